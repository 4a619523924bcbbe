"""What people give to `fuse`: read it, or refuse it in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.errors import InputError
from polyfed.core.samples import Samples
from polyfed.core.task import CLASSIFICATION, Task
from polyfed.data import Dataset
from polyfed.fusion.chain import weight_layers
from polyfed.models import signature
from polyfed.ops.selection import NORMALIZATIONS, class_weights

ANY_TASK = ("average", "ensemble")  # methods that do not ask what the outputs mean


def known_outputs(network: nn.Module) -> int | None:
    """Return the number of outputs of a module where it can be read off without running it."""
    declared = getattr(network, "num_classes", None)
    if isinstance(declared, int):
        return declared
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    return layers[-1].out_features if layers else None


def check_networks(networks: Sequence[nn.Module]) -> None:
    """Refuse what cannot be fused at all: nothing, things that are no modules, outputs of different sizes."""
    if not networks:
        raise InputError("There is nothing to fuse: give at least one network.")
    for place, network in enumerate(networks):
        if not isinstance(network, nn.Module):
            raise InputError(f"Network {place} is a {type(network).__name__}: give trained torch modules.")
    sizes = [known_outputs(network) for network in networks]
    for place, size in enumerate(sizes):
        if size is not None and sizes[0] is not None and size != sizes[0]:
            raise InputError(
                f"Network 0 has {sizes[0]} outputs and network {place} has {size}: networks are fused over one set of "
                "labels, in one order."
            )


def check_task(task: Task, method: str, distilled: bool) -> None:
    """Refuse what works with classes only, where the networks learned something else."""
    if task != CLASSIFICATION and (distilled or method not in ANY_TASK):
        what = "distill_into" if distilled else method
        raise InputError(
            f"{what} needs classes, but the task is {task.name}: fuse such networks with {', '.join(ANY_TASK)}"
            f"{', without distill_into' if distilled else ''}."
        )


def expect(field: str, value: str, words: Sequence[str]) -> None:
    """Refuse a word that is not among those that a field knows."""
    if value not in words:
        raise InputError(f"{field} is one of {', '.join(words)}, not '{value}'.")


def check_choice(select: str, keep: int | None, table: Tensor | None, public: Samples | None) -> None:
    """Refuse to choose networks without what the choice needs."""
    expect("select", select, ("greedy", "cluster"))
    if select == "greedy" and table is None:
        raise InputError("select='greedy' needs counts=[...]: the samples of each class that each network saw.")
    if select == "cluster" and (public is None or keep is None):
        raise InputError("select='cluster' needs public inputs and keep, the number of groups.")


def check_selection(
    networks: Sequence[nn.Module],
    k: int | None,
    normalize: str,
    temperatures: Sequence[float] | None,
    mask_absent: bool,
    confidence: str,
    table: Tensor | None,
) -> None:
    """Refuse variants of AMS that do not go together, or lack something."""
    expect("normalize", normalize, NORMALIZATIONS)
    expect("confidence", confidence, ("logit", "first_norm", "first_max"))
    if k is not None and k < 1:
        raise InputError(f"k is the number of networks to sum, at least 1, not {k}.")
    if normalize == "temperature" and (temperatures is None or len(temperatures) != len(networks)):
        raise InputError(f"normalize='temperature' needs temperatures=[...], one for each of {len(networks)} networks.")
    if mask_absent and table is None:
        raise InputError("mask_absent needs counts=[...]: the samples of each class that each network saw.")
    if confidence == "logit":
        return
    if k != 1:
        raise InputError(f"confidence='{confidence}' chooses one network: use method 'ams-top1'.")
    if normalize != "none":
        raise InputError(f"confidence='{confidence}' does not compare logits, so normalize must be 'none'.")
    for place, network in enumerate(networks):
        if not (hasattr(network, "stem") and hasattr(network, "middle")):
            raise InputError(
                f"confidence='{confidence}' needs networks with a stem, but network {place} has none: "
                "wrap it with polyfed.adapt(model, head=..., stem=..., input_shape=...)."
            )


def check_one_architecture(networks: Sequence[nn.Module]) -> None:
    """Refuse to average networks whose tensors differ."""
    first = signature(networks[0])
    for place, network in enumerate(networks):
        if signature(network) != first:
            raise InputError(
                f"Method 'average' is not applicable: networks 0 and {place} have different architectures; "
                "use 'ams-top1' or 'ensemble', which take any."
            )


def check_one_depth(networks: Sequence[nn.Module]) -> None:
    """Refuse to match networks of several depths."""
    depths = [len(weight_layers(network)) for network in networks]
    for place, depth in enumerate(depths):
        if depth != depths[0]:
            raise InputError(
                f"Method 'pfnm' is not applicable: network 0 has {depths[0]} layers and network {place} has {depth}; "
                "use 'ams-top1' or 'ensemble', which take any."
            )


def read_sizes(weights: Sequence[float] | str | None, table: Tensor | None, number: int) -> list[float]:
    """Return one weight for each network: as given, else its samples, else 1."""
    if weights is None or isinstance(weights, str):
        if weights not in (None, "uniform", "samples"):
            raise InputError(f"weights is a list of numbers, 'samples' or 'uniform' here, not '{weights}'.")
        if weights == "samples" and table is None:
            raise InputError("weights='samples' needs counts=[...]: the samples of each class that each network saw.")
        counted = table is not None and weights != "uniform"
        return [float(n) for n in table.sum(dim=1)] if counted and table is not None else [1.0] * number
    if len(weights) != number or min(weights) < 0 or sum(weights) <= 0:
        raise InputError(f"weights needs one number for each of {number} networks, none negative, not all zero.")
    return [float(weight) for weight in weights]


def read_class_weights(weights: Sequence[float] | str | None, table: Tensor | None) -> Tensor | None:
    """Return the weight of each network for each class, or None for equal ones."""
    if weights in (None, "uniform"):
        return None
    if weights != "class" or table is None:
        raise InputError("For 'ensemble', weights is 'uniform', or 'class' together with counts=[...].")
    return class_weights(table)


def read_label_table(counts: Any, number: int) -> Tensor:
    """Return the samples of each class that each network saw, `[J, C]`."""
    table = torch.as_tensor(counts)
    if table.dim() != 2 or len(table) != number or bool((table < 0).any()) or bool((table.sum(dim=1) == 0).any()):
        raise InputError(f"counts needs a row for each of {number} networks: its samples of each class, not all zero.")
    return table


def read_inputs(public: Any) -> Samples:
    """Return unlabeled inputs from samples, a data set, an array, or a pair whose labels are ignored."""
    if isinstance(public, Dataset):
        return public.train
    if isinstance(public, Samples):
        return public
    x = torch.as_tensor(public[0] if isinstance(public, tuple) else public)
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    return Samples(x, torch.zeros(len(x), dtype=torch.long))
