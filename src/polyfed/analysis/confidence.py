"""Absolute confidence: the largest logit of a network on labels that it was trained on, and on others.

    python -m polyfed.analysis.confidence --data digits

Zhang, Zhang, 2022 (https://arxiv.org/abs/2210.12974), second experiment: a perceptron is trained on some labels, and
max_c exp f_c(x) of every test sample is compared by true label. The exponential is never taken: log10 of it is the
largest logit divided by ln 10.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from polyfed.core.alone import train_alone
from polyfed.core.errors import InputError
from polyfed.core.passes import logits_of
from polyfed.core.rng import seeded
from polyfed.core.samples import Samples
from polyfed.core.settings import Training
from polyfed.data import Dataset, load
from polyfed.methods.ams import AMS
from polyfed.models import build

LABELS = (0, 1, 2, 5, 9)
TRAINING = Training(epochs=40, batch_size=64, optimizer="adam", lr=1e-3, decay=0.8, decay_every=2)


def log10_confidence(model: nn.Module, samples: Samples) -> np.ndarray:
    """Return log10 of the absolute confidence of every sample, in prediction mode."""
    largest = logits_of(model, samples).amax(dim=1)
    return largest.double().numpy() / math.log(10.0)


def auroc(positive: np.ndarray, negative: np.ndarray) -> float:
    """Return how well values tell two groups apart: 1 if every positive is larger, 0.5 for no difference."""
    from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]

    held = np.repeat([1, 0], [len(positive), len(negative)])
    return float(roc_auc_score(held, np.concatenate([positive, negative])))


def compare_confidence(model: nn.Module, samples: Samples, trained: Sequence[int]) -> dict[str, Any]:
    """Compare the absolute confidence on trained and other labels.

    Returns
    -------
    dict
        `auroc` of the largest logit for telling trained labels from others, `median_trained` and `median_other` of
        log10, and `by_label`: for every label its quartiles of log10 and whether it was trained.

    Raises
    ------
    InputError
        If all labels of the samples were trained, or none.
    """
    values = log10_confidence(model, samples)
    labels = samples.labels().numpy()
    known = np.isin(labels, list(trained))
    if known.all() or not known.any():
        raise InputError("The samples need labels that the network was trained on and labels that it was not.")
    return {
        "auroc": auroc(values[known], values[~known]),
        "median_trained": float(np.median(values[known])),
        "median_other": float(np.median(values[~known])),
        "by_label": {
            str(label): {
                "trained": bool(label in trained),
                "samples": int((labels == label).sum()),
                "quartiles": [float(q) for q in np.quantile(values[labels == label], (0.25, 0.5, 0.75))],
            }
            for label in np.unique(labels).tolist()
        },
        "values": values.tolist(),
        "labels": labels.tolist(),
    }


def confidence_experiment(
    data: Dataset | str = "mnist",
    labels: Sequence[int] = LABELS,
    model: str = "mlp:2x100",
    training: Training = TRAINING,
    seed: int = 0,
) -> dict[str, Any]:
    """Train a network on the samples of some labels and compare its absolute confidence on all test samples."""
    data = load(data) if isinstance(data, str) else data
    unknown = [label for label in labels if not 0 <= label < data.num_classes]
    if unknown or not labels:
        raise InputError(f"labels must be some of 0 to {data.num_classes - 1}, not {list(labels)}.")
    with seeded(seed, f"init/{model}"):
        network = build(model, data.input_shape, data.num_classes)
    rows = torch.nonzero(torch.isin(data.train.labels(), torch.tensor(list(labels)))).flatten()
    train_alone(network, AMS().alone(data.train.select(rows)), training, seed)
    return compare_confidence(network, data.test, labels)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the comparison as JSON, without the single values."""
    parser = argparse.ArgumentParser(description="Absolute confidence on trained and on other labels.")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--labels", default=",".join(map(str, LABELS)), help="labels to train on")
    parser.add_argument("--model", default="mlp:2x100")
    parser.add_argument("--epochs", type=int, default=TRAINING.epochs)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    settings = Training(**{**vars(TRAINING), "epochs": given.epochs})
    chosen = [int(label) for label in given.labels.split(",")]
    found = confidence_experiment(given.data, chosen, given.model, settings, given.seed)
    print(json.dumps({k: v for k, v in found.items() if k not in ("values", "labels")}, indent=2))


if __name__ == "__main__":
    main()
