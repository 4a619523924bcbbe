"""Small image sets in the form that the Hub has them."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def png(array) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(array, dtype=np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


def image_table(count=20, classes=2, size=(6, 5), color=False, seed=0, names=True, column="image", **columns):
    """A `datasets.Dataset` of small PNG images, as the Hub has them."""
    import datasets

    rng = np.random.default_rng(seed)
    shape = (count, *size, 3) if color else (count, *size)
    images = rng.integers(0, 256, shape)
    features = {
        column: datasets.Image(),
        "label": datasets.ClassLabel(names=[f"class {c}" for c in range(classes)])
        if names
        else datasets.Value("int64"),
    }
    content = {
        column: [{"bytes": png(image), "path": None} for image in images],
        "label": [row % classes for row in range(count)],
        **columns,
    }
    for key, values in columns.items():
        features[key] = datasets.Value("string" if isinstance(values[0], str) else "int64")
    return datasets.Dataset.from_dict(content, features=datasets.Features(features)), images
