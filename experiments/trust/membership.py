"""Membership inference with shadow models (LiRA, Carlini et al. 2022): was a sample in a client's training data.

For each seed, `SHADOWS` federations are trained, each on a random half of the training samples. The attacker holds the
model of the client that a sample belongs to, and compares its confidence in the label with two normal distributions:
that of the federations that saw the sample, and of those that did not. What counts is the share of members found at one
per cent false alarms.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES, private

import polyfed as pf
from polyfed.core.rng import generator

SHADOWS, TARGETS = 12, 4  # federations for each setting; the last ones are attacked, each by all others
ALARMS = 0.01
SETTINGS: tuple[float | None, ...] = (None, 8.0, 1.0)
TRAINING = pf.Training(epochs=5, lr=0.5, batch_size=128)
ONCE = pf.Training(epochs=50, lr=0.5, batch_size=128)  # as many steps in one round
CLIENTS, ROUNDS, PUBLIC = 2, 10, 200


def trained(method: str, epsilon: float | None, seed: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which samples a federation saw, and a confidence in the label of each: log(p / (1 - p)).

    It is that of the model of the client that held the sample, or would have held it.
    """
    whole, family = pf.load("digits"), FAMILIES[method]
    inputs, labels = whole.train.inputs()[PUBLIC:], whole.train.labels()[PUBLIC:]
    seen = torch.rand(len(labels), generator=generator(seed, "membership", number)) < 0.5
    owner = torch.arange(len(labels)) % CLIENTS
    held = [torch.nonzero(seen & (owner == client)).flatten() for client in range(CLIENTS)]
    data = pf.Clients.from_parts(
        [(inputs[rows].numpy(), labels[rows].numpy()) for rows in held],
        test=(whole.test.inputs().numpy(), whole.test.labels().numpy()),
        public=whole.train.inputs()[:PUBLIC].numpy() if family.get("public") else None,
        num_classes=10,
        normalize=False,
    )
    result = pf.run(
        private(method),
        data,
        family["models"],
        rounds=ROUNDS,
        training=ONCE if method == "ams" else TRAINING,
        seed=seed * 1000 + number,
        feature_dim=family.get("feature_dim"),
        evaluate="end",
        privacy=pf.Privacy(epsilon=epsilon),
        engine="sequential",
        workers=1,
        progress=False,
    )
    with torch.no_grad():
        logs = torch.stack([result.models[client](inputs).double().log_softmax(1) for client in range(CLIENTS)])
    logs = logs[owner, torch.arange(len(labels))]
    right = logs.gather(1, labels.unsqueeze(1)).squeeze(1)
    wrong = logs.scatter(1, labels.unsqueeze(1), -torch.inf).logsumexp(1)
    return seen, right - wrong


def found_at(seen: torch.Tensor, scores: torch.Tensor, alarms: float) -> float:
    """Return the share of members above the threshold that so large a share of the others exceeds."""
    threshold = torch.quantile(scores[~seen], 1 - alarms)
    return float((scores[seen] > threshold).double().mean())


def attacked(seen: torch.Tensor, confidence: torch.Tensor, target: int) -> torch.Tensor:
    """Return LiRA's score of every sample for one federation: the log ratio of the two normal densities."""
    others = torch.arange(len(seen)) != target
    inside, outside = seen[others], ~seen[others]
    values = confidence[others]

    def density(chosen: torch.Tensor) -> torch.Tensor:
        count = chosen.sum(0).clamp(min=1)
        mean = (values * chosen).sum(0) / count
        spread = (((values - mean) ** 2 * chosen).sum() / chosen.sum()).sqrt()  # one for all: few shadows
        return -((confidence[target] - mean) ** 2) / (2 * spread**2) - spread.log()

    return density(inside) - density(outside)


def measure(path: Path, seeds: int, methods: Sequence[str]) -> None:
    """Measure what is missing; a setting of a seed is one line."""
    known: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    done = {(line["seed"], line["method"], line["epsilon"]) for line in known}
    for seed, method, epsilon in itertools.product(range(seeds), methods, SETTINGS):
        if (seed, method, epsilon) in done:
            continue
        pairs = [trained(method, epsilon, seed, number) for number in range(SHADOWS)]
        seen, confidence = torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])
        targets = range(SHADOWS - TARGETS, SHADOWS)
        shares = [found_at(seen[target], attacked(seen, confidence, target), ALARMS) for target in targets]
        line = {
            "seed": seed,
            "method": method,
            "epsilon": epsilon,
            "found": sum(shares) / len(shares),
            "each": shares,
            "held_out": float(((confidence > 0) & ~seen).sum() / (~seen).sum()),
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
