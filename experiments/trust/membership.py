"""Membership inference with shadow models (LiRA, Carlini et al. 2022): was a sample in a client's training data.

For each seed, `SHADOWS` federations are trained, each on a random half of the training samples. For a target federation
the attacker compares the confidence in a sample's label with two normal distributions: that of the federations that saw
the sample, and of those that did not. What counts is the share of members found at one per cent false alarms.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import polyfed as pf
from polyfed.core.rng import generator

SHADOWS, TARGETS = 12, 4  # federations for each setting; the last ones are attacked, each by all others
ALARMS = 0.01
SETTINGS: tuple[float | None, ...] = (None, 8.0, 1.0)
TRAINING = pf.Training(epochs=5, lr=0.5, batch_size=128)
CLIENTS, ROUNDS = 2, 10


def trained(epsilon: float | None, seed: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which samples a federation saw, and its confidence in the label of each: log(p / (1 - p))."""
    whole = pf.load("digits")
    seen = torch.rand(len(whole.train), generator=generator(seed, "membership", number)) < 0.5
    inputs, labels = whole.train.inputs(), whole.train.labels()
    rows = torch.nonzero(seen).flatten()
    parts = [(inputs[part].numpy(), labels[part].numpy()) for part in rows.chunk(CLIENTS)]
    test = whole.test.inputs().numpy(), whole.test.labels().numpy()
    data = pf.Clients.from_parts(parts, test=test, num_classes=10, normalize=False)
    result = pf.run(
        "fedavg",
        data,
        ["mlp:1x64"],
        rounds=ROUNDS,
        training=TRAINING,
        seed=seed * 1000 + number,
        evaluate="end",
        privacy=pf.Privacy(epsilon=epsilon),
        engine="sequential",
        workers=1,
        progress=False,
    )
    assert result.server_model is not None
    with torch.no_grad():
        logs = result.server_model(inputs).double().log_softmax(1)
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


def measure(path: Path, seeds: int) -> None:
    """Measure what is missing; a setting of a seed is one line."""
    known: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    done = {(line["seed"], line["epsilon"]) for line in known}
    for epsilon in SETTINGS:
        for seed in range(seeds):
            if (seed, epsilon) in done:
                continue
            pairs = [trained(epsilon, seed, number) for number in range(SHADOWS)]
            seen, confidence = torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])
            shares = [
                found_at(seen[target], attacked(seen, confidence, target), ALARMS)
                for target in range(SHADOWS - TARGETS, SHADOWS)
            ]
            right = float(((confidence > 0) & ~seen).sum() / (~seen).sum())
            line = {
                "seed": seed,
                "epsilon": epsilon,
                "found": sum(shares) / len(shares),
                "each": shares,
                "held_out": right,
            }
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line)
