"""Small experiments of the papers that are no federation: each runs whole, over many seeds, in a minute or two.

Each function returns case -> label -> seed -> quantity -> value, and figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polyfed.reproduce.quantities import Values

Studied = tuple[dict[str, dict[str, dict[str, Values]]], Mapping[str, Any]]


def disturbing(seeds: int = 40, **cases: Mapping[str, Any]) -> Studied:
    """AMS, Fig. 1: two networks of one neuron in two dimensions, summed; cases vary rates, epochs and sizes.

    `no better` is 100 in a seed where the sum is no better than the better of the two networks, and 0 otherwise.
    """
    from polyfed.analysis.command import disturbing_figures
    from polyfed.analysis.disturbing import disturbing as study

    found: dict[str, dict[str, dict[str, Values]]] = {}
    figures: dict[str, Any] = {}
    for name, options in cases.items():
        told = study(seeds, examples=range(seeds), **options)
        labels: dict[str, dict[str, Values]] = {}
        for run in told["runs"]:
            seed = str(run["seed"])
            for label in ("left", "right", "fused", "ams_top1", "ensemble"):
                labels.setdefault(label, {})[seed] = {"accuracy": round(100 * run[label], 3)}
            better = max(run["left"], run["right"])
            labels.setdefault("better local", {})[seed] = {"accuracy": round(100 * better, 3)}
            labels["fused"][seed]["no better"] = 100.0 * (run["fused"] <= better)
            labels.setdefault("half of the seeds", {})[seed] = {"no better": 50.0}
        found[name] = labels
        if not figures:  # those of the first case are enough
            figures = {f"{name}-{kind}": figure for kind, figure in disturbing_figures(told).items()}
    return found, figures


def confidence(seeds: int = 5, data: str = "mnist", epochs: int = 40) -> Studied:
    """AMS, Fig. 2: the largest logit of a network on labels that it was trained on, and on others (log10)."""
    from dataclasses import replace

    from polyfed.analysis.confidence import LABELS, TRAINING, confidence_experiment
    from polyfed.analysis.figures import quartiles
    from polyfed.data import load

    loaded = load(data)
    labels: dict[str, dict[str, Values]] = {}
    figures: dict[str, Any] = {}
    for seed in range(seeds):
        told = confidence_experiment(loaded, training=replace(TRAINING, epochs=epochs), seed=seed)
        for label, name in (("trained", "median_trained"), ("other", "median_other")):
            labels.setdefault(label, {})[str(seed)] = {
                "confidence": round(told[name], 4),
                "auroc": round(told["auroc"], 5),
            }
        if not seed:
            parts = {int(label): part["quartiles"] for label, part in told["by_label"].items()}
            groups = {
                "trained labels": {label: part for label, part in parts.items() if label in LABELS},
                "other labels": {label: part for label, part in parts.items() if label not in LABELS},
            }
            title = f"{data}: absolute confidence by label (AUROC {told['auroc']:.2f})"
            figures["confidence"] = quartiles(title, "label", "log10 confidence, quartiles", groups)
    return {"all": labels}, figures


def partition(data: str = "cifar10", clients: int = 20, seeds: int = 10) -> Studied:
    """FedMD+Global, Fig. 1: the classes that clients hold (at least ten samples), at two Dirichlet parameters."""
    import numpy as np

    from polyfed.analysis.figures import bubbles
    from polyfed.data import load, split

    loaded = load(data)
    labels: dict[str, dict[str, Values]] = {}
    figures: dict[str, Any] = {}
    for alpha in (0.5, 0.1):
        for seed in range(seeds):
            parts = split(loaded, clients, f"dirichlet:{alpha}", seed)
            counts = np.array([part.label_counts(parts.num_classes) for part in parts.train])
            held = {"classes": round(float((counts >= 10).sum(1).mean()), 4)}
            labels.setdefault(f"dirichlet-{alpha}", {})[str(seed)] = held
            if not seed:
                figures[f"dirichlet-{alpha}"] = bubbles(f"{data}, Dirichlet({alpha})", "client", "class", counts)
    return {"all": labels}, figures


def fedvtc_memory(batch: int = 16) -> Studied:
    """FedVTC, Fig. 3: MB of the largest step of an update, for each network; they stand where seeds stand (`over`)."""
    from polyfed.analysis.figures import lines
    from polyfed.reproduce.memory import NETWORKS, sizes_of

    labels: dict[str, dict[str, Values]] = {}
    for place, network in enumerate(NETWORKS):
        sizes = sizes_of(network, batch)
        for label, size in sizes.items():
            share = round(100 * size / sizes["fedproto"], 3)  # networks differ tenfold in size: MB have no common mean
            labels.setdefault(label, {})[str(place)] = {"share": share, "memory": round(size / 1e6, 2)}
    places = list(range(len(NETWORKS)))
    curves = {label: (places, [kept[str(place)]["memory"] for place in places]) for label, kept in labels.items()}
    figure = lines("Memory of an update", "network", f"MB, batches of {batch}", curves, NETWORKS)
    return {"all": labels}, {"memory": figure}


STUDIES: dict[str, Callable[..., Studied]] = {
    "disturbing": disturbing,
    "confidence": confidence,
    "partition": partition,
    "fedvtc_memory": fedvtc_memory,
}
