"""Linear centered kernel alignment between clients, stage by stage.

Kornblith, Norouzi, Lee, Hinton, 2019 (https://arxiv.org/abs/1905.00414); used to compare clients of a federation in
FedIN, Fig. 6 and 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.analysis.opening import OpenedRun, first_samples, stage_outputs


def gram(x: Tensor) -> Tensor:
    """Return the inner products of centered features, `[n, n]`: features may be far wider than n."""
    x = x.flatten(1).double()
    x = x - x.mean(0)
    return x @ x.T


def _alignment(k: Tensor, l: Tensor) -> float:  # noqa: E741 (K and L as in the paper)
    # tr(KL) / (|K| |L|) equals |Y'X|² / (|X'X| |Y'Y|) in Frobenius norms, for centered features
    norms = float(k.norm() * l.norm())
    return float((k * l).sum()) / norms if norms else float("nan")


def cka_matrix(features: list[Tensor]) -> Tensor:
    """Return the linear CKA of every pair of features of the same samples, `[n, p]` each: `[clients, clients]`.

    1 for features that differ by a rotation and a factor, 0 for unrelated ones; nan where one of them is constant.
    """
    grams = [gram(x) for x in features]
    size = len(grams)
    found = torch.eye(size, dtype=torch.float64)
    for i in range(size):
        for j in range(i + 1, size):
            found[i, j] = found[j, i] = _alignment(grams[i], grams[j])
    return found


def pair_mean(matrix: Tensor) -> float:
    """Return the mean over all pairs of different clients."""
    size = len(matrix)
    if size < 2:
        return float("nan")
    rows, columns = torch.triu_indices(size, size, 1)
    return float(matrix[rows, columns].mean())


def compare_clients(run: OpenedRun, samples: int = 300, clients: int = 10) -> dict[str, Any]:
    """Return the CKA between clients at every stage that all of them have.

    Parameters
    ----------
    run
        A finished run.
    samples
        Test samples that all clients look at.
    clients
        At most so many clients, the first ones.

    Returns
    -------
    dict
        `stages`: by stage the matrix and its mean over pairs; `clients`: their numbers and networks.
    """
    chosen = sorted(run.models)[:clients]
    x, _ = first_samples(run, samples)
    outputs = [stage_outputs(run.models[client], x) for client in chosen]
    common = [stage for stage in outputs[0] if all(stage in other for other in outputs)]
    stages = {}
    for stage in common:
        matrix = cka_matrix([output[stage] for output in outputs])
        stages[stage] = {"mean": pair_mean(matrix), "matrix": matrix.tolist()}
    names = {str(client): run.architectures[client] for client in chosen}
    return {"method": run.label, "seed": run.seed, "samples": len(x), "clients": names, "stages": stages}


def cka_figures(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures: mean by stage for every run, and the heat maps of each."""
    from polyfed.analysis.figures import heat_maps, lines

    stages = list(dict.fromkeys(stage for run in found for stage in run["stages"]))
    curves = {
        _name(run): (
            [stages.index(stage) for stage in run["stages"]],
            [entry["mean"] for entry in run["stages"].values()],
        )
        for run in found
    }
    figures = {"stages": lines("Mean linear CKA between clients", "", "CKA", curves, ticks=stages)}
    for run in found:
        matrices = {stage: entry["matrix"] for stage, entry in run["stages"].items()}
        figures[f"clients-{_name(run)}"] = heat_maps(f"Linear CKA, {_name(run)}", matrices, list(run["clients"]))
    return figures


def _name(run: Mapping[str, Any]) -> str:
    return f"{run['method']}-seed{run['seed']}"
