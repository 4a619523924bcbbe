"""Neuron disturbing in two dimensions: two small networks, each right in its own region, spoil each other when summed.

    python -m polyfed.analysis.disturbing --seeds 40

Zhang, Zhang, 2022 (https://arxiv.org/abs/2210.12974), first experiment. Points lie in a band around x2 = |x1|, with
|x1| <= 2; the label says whether a point is above the line. The left client sees x1 in [-2, 0.5], the right one x1 in
[-0.5, 2]. Each trains one hidden neuron, y = w2·phi(w1·x + b), without output bias. The fused network is the
concatenation of both, y = y1 + y2. All networks of all seeds are trained as one tensor program.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.rng import generator
from polyfed.ops.selection import ensemble_scores, top_k_scores

RANGES = {"left": (-2.0, 0.5), "right": (-0.5, 2.0)}
ACTIVATIONS = {"leaky_relu": F.leaky_relu, "relu": torch.relu}  # with plain ReLU most networks die


def sample_band(number: int, low: float, high: float, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw points, x1 uniform in its range and x2 uniform in |x1| ± 1, with their labels."""
    first = low + (high - low) * torch.rand(number, generator=rng)
    offset = 2.0 * torch.rand(number, generator=rng) - 1.0
    return torch.stack([first, first.abs() + offset], dim=1), (offset > 0).long()


def outputs(nets: dict[str, Tensor], x: Tensor, activation: str = "leaky_relu") -> Tensor:
    """Return the logits `[M, N, 2]` of M one-neuron networks on their points `x [M, N, 2]`."""
    hidden = torch.einsum("mnd,md->mn", x, nets["w1"]) + nets["b"].unsqueeze(1)
    return ACTIVATIONS[activation](hidden).unsqueeze(2) * nets["w2"].unsqueeze(1)


def train(x: Tensor, y: Tensor, nets: dict[str, Tensor], epochs: int, lr: float, activation: str) -> dict[str, Tensor]:
    """Train M networks on their own points, full batch, with Adam; Adam works entry by entry, so they do not mix."""
    nets = {name: value.clone().requires_grad_(True) for name, value in nets.items()}
    optimizer = torch.optim.Adam(list(nets.values()), lr=lr)
    for _ in range(epochs):
        optimizer.zero_grad()
        logits = outputs(nets, x, activation)
        # The mean over points and the sum over networks: each network has its own loss.
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / x.shape[1]
        loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in nets.items()}


def initial(rng: torch.Generator) -> dict[str, Tensor]:
    """Draw one network as torch's linear layers do: U(±1/sqrt(inputs))."""

    def uniform(shape: tuple[int, ...], inputs: int) -> Tensor:
        root: float = inputs**0.5
        return (2.0 * torch.rand(shape, generator=rng) - 1.0) / root

    return {"w1": uniform((2,), 2), "b": uniform((), 2), "w2": uniform((2,), 1)}


def disturbing(
    seeds: int | Sequence[int] = 40,
    epochs: int | Sequence[int] = 600,
    lr: float | Sequence[float] = 0.5,
    train_points: int | Sequence[int] = 300,
    test_points: int = 150,
    activation: str = "leaky_relu",
    examples: Sequence[int] = (),
) -> dict[str, Any]:
    """Run the experiment over many seeds.

    Parameters
    ----------
    seeds
        How many, or which.
    epochs, lr, train_points
        Of both clients, or of the left and of the right one.
    test_points, activation
        Of each client: points in its region, and of its neuron.
    examples
        Seeds whose test points and softmax probabilities are returned too (for pictures).

    Returns
    -------
    dict
        `runs`: for each seed the accuracy on the merged test set of both local networks, of the fused one, of AMS-top1
        and of the ensemble. `summary`: means, the share of seeds with a fused accuracy above 95 %, and `failed`, the
        share in which fusing gave no more than the better local network. `examples`: points, labels, probabilities.
    """
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    nets = []  # of the left client, one for each seed, and of the right one
    each = zip(RANGES.values(), _pair(train_points), _pair(epochs), _pair(lr), strict=True)
    for client, ((low, high), points, length, rate) in enumerate(each):
        data = [sample_band(int(points), low, high, generator(seed, "band/train", 0, client)) for seed in chosen]
        starts = [initial(generator(seed, "band/init", 0, client)) for seed in chosen]
        together = {name: torch.stack([start[name] for start in starts]) for name in starts[0]}
        x, y = (torch.stack(part) for part in zip(*data, strict=True))
        nets.append(train(x, y, together, int(length), rate, activation))
    tested = []
    for seed in chosen:
        parts = [
            sample_band(test_points, low, high, generator(seed, "band/test", 0, client))
            for client, (low, high) in enumerate(RANGES.values())
        ]
        tested.append((torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])))
    where = torch.stack([x for x, _ in tested])
    labels = torch.stack([y for _, y in tested])
    logits = torch.stack([outputs(own, where, activation) for own in nets], dim=1)
    runs: list[dict[str, float]] = []
    pictures: dict[str, Any] = {}
    for place, seed in enumerate(chosen):
        both = logits[place]  # [2 networks, N, 2]
        scores = {
            "left": both[0],
            "right": both[1],
            "fused": both.sum(dim=0),
            "ams_top1": top_k_scores(both, 1),
            "ensemble": ensemble_scores(both),
        }
        accuracy = {name: float((s.argmax(1) == labels[place]).float().mean()) for name, s in scores.items()}
        runs.append({"seed": seed, **accuracy})
        if seed in examples:
            pictures[str(seed)] = {
                "points": where[place].tolist(),
                "labels": labels[place].tolist(),
                "above": {n: torch.softmax(scores[n], dim=1)[:, 1].tolist() for n in ("left", "right", "fused")},
            }
    return {"runs": runs, "summary": summary(runs), "examples": pictures}


def _pair(value: float | Sequence[float]) -> Sequence[float]:
    return value if isinstance(value, Sequence) else (value, value)


def summary(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the means over seeds, and how often fusing worked or failed."""
    count = len(runs)
    kinds = ("left", "right", "fused", "ams_top1", "ensemble")
    fused = [run["fused"] for run in runs]
    return {
        "seeds": count,
        **{kind: sum(run[kind] for run in runs) / count for kind in kinds},
        "fused_lowest": min(fused),
        "fused_highest": max(fused),
        "above_95": sum(value > 0.95 for value in fused) / count,
        "failed": sum(run["fused"] <= max(run["left"], run["right"]) for run in runs) / count,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the summary (or all runs) as JSON."""
    parser = argparse.ArgumentParser(description="Neuron disturbing in two dimensions.")
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=600)
    parser.add_argument("--activation", choices=sorted(ACTIVATIONS), default="leaky_relu")
    parser.add_argument("--runs", action="store_true", help="print every seed too")
    given = parser.parse_args(arguments)
    found = disturbing(given.seeds, given.epochs, activation=given.activation)
    print(json.dumps({k: found[k] for k in (("runs", "summary") if given.runs else ("summary",))}, indent=2))


if __name__ == "__main__":
    main()
