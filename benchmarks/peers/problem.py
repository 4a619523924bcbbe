"""What a user has before choosing a library: the clients' samples, a plain PyTorch network, and a clock for the rounds.

This folder runs in the peers' own environments, so it imports nothing of polyfed.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def arguments() -> argparse.Namespace:
    """Return what every peer is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="an .npz file with x [clients, samples, ...] and y")
    parser.add_argument("--network", required=True, help="cnn2 or mlp:1x100")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--out", required=True, help="a .json file for the seconds of each round")
    return parser.parse_args()


@lru_cache(maxsize=1)
def samples(file: str) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of all clients; a process reads them once."""
    with np.load(file) as arrays:
        return torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])


def network(name: str) -> nn.Sequential:
    """Return a network with the same initial values everywhere."""
    torch.manual_seed(0)
    if name == "mlp:1x100":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    assert name == "cnn2", name
    convolutions = [nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10))


@torch.no_grad()
def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the mean cross-entropy over all clients: it shows that two peers did the same work."""
    return sum(F.cross_entropy(model(a), b).item() for a, b in zip(x, y, strict=True)) / len(x)


class Clock:
    """Notes the end of every round."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def note(self) -> None:
        """Call it before the first round and after every round."""
        self.ends.append(time.perf_counter())

    def save(self, file: str, loss: float) -> None:
        """Write the seconds of each round and the final loss."""
        seconds = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
        Path(file).write_text(json.dumps({"seconds": seconds, "loss": loss}))
