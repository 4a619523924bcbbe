"""Two hospitals with a CSV file each: real measurements of breast tumours, from scikit-learn.

Who was treated where is made up: one woman in eight belongs to `north`, the others to `south`. Seven measurements are
kept, and the size of the tumour as a word, so that the table has columns of both kinds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer

HOSPITALS = {"north": 0.12, "south": 0.88}
MEASURED = ["mean texture", "mean smoothness", "mean symmetry", "mean fractal dimension"]
MEASURED += ["texture error", "smoothness error", "symmetry error"]


def table(seed: int = 0) -> pd.DataFrame:
    """Return all women: hospital, measurements, size in words, and the finding."""
    found = load_breast_cancer(as_frame=True).frame
    rng = np.random.default_rng(seed)
    rows = found[MEASURED].rename(columns=lambda name: name.replace(" ", "_"))
    rows.insert(0, "hospital", rng.choice(list(HOSPITALS), len(rows), p=list(HOSPITALS.values())))
    radius = found["mean radius"]
    rows["size"] = np.select([radius < 12, radius < 14.5], ["small", "medium"], "large")
    rows["finding"] = np.where(found["target"] == 0, "malignant", "benign")
    return rows.sample(frac=1, random_state=seed)


def write(folder: Path, seed: int = 0) -> None:
    """Write `patients.csv`, and the rows of each hospital: to train, to test, and women who come later."""
    rows = table(seed)
    rows.to_csv(folder / "patients.csv", index=False)
    for name in HOSPITALS:
        own = rows[rows["hospital"] == name].drop(columns="hospital")
        first, second = len(own) // 3, 2 * len(own) // 3
        own[:first].to_csv(folder / f"{name}.csv", index=False)
        own[first:second].to_csv(folder / f"{name}-test.csv", index=False)
        own[second:].to_csv(folder / f"{name}-later.csv", index=False)
