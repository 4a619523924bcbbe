"""`fuse`: one module out of several trained networks, without training data.

    fused = polyfed.fuse([net_a, net_b, net_c], method="ams-top1")

The result is an ordinary `nn.Module` in prediction mode that takes the same inputs and returns scores `[B, C]`. It
holds copies: the given networks are not changed. `fuse_files` and `load_fused` do the same with files.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.errors import unknown
from polyfed.core.rng import generator
from polyfed.core.samples import Samples
from polyfed.core.task import CLASSIFICATION, Task, as_task
from polyfed.core.threads import one_thread
from polyfed.fusion.chain import check_alike
from polyfed.fusion.checks import (
    check_choice,
    check_networks,
    check_one_architecture,
    check_one_depth,
    check_selection,
    check_task,
    expect,
    known_outputs,
    read_class_weights,
    read_inputs,
    read_label_table,
    read_sizes,
)
from polyfed.fusion.choosing import choose
from polyfed.fusion.distill import Distillation, distill, make_student
from polyfed.fusion.matching import accuracy_of, candidates, matched
from polyfed.fusion.networks import Averaged, Selection, Several
from polyfed.ops.aggregate import Part, Slot, scatter_mean
from polyfed.ops.matching import Matching

METHODS = ("ams-top1", "ams-topk", "ams-full", "ensemble", "average", "pfnm")


@one_thread()
def fuse(
    models: Sequence[nn.Module],
    method: str = "ams-top1",
    *,
    k: int = 2,
    counts: Any = None,
    weights: Sequence[float] | str | None = None,
    space: str = "prob",
    normalize: str = "none",
    temperatures: Sequence[float] | None = None,
    mask_absent: bool = False,
    confidence: str = "logit",
    select: str | None = None,
    keep: int | None = None,
    matching: Matching | None = None,
    search: tuple[Any, Any] | Samples | None = None,
    distill_into: str | nn.Module | None = None,
    public: Any = None,
    distillation: Distillation | None = None,
    input_shape: Sequence[int] | None = None,
    seed: int = 0,
    task: Task | str = CLASSIFICATION.name,
) -> nn.Module:
    """Fuse trained networks into one module.

    Parameters
    ----------
    models
        Trained modules whose outputs are logits of the same classes in the same order. `average` needs one
        architecture, `pfnm` one depth; the others take any mixture.
    method
        `ams-top1` (for each input the network with the largest logit), `ams-topk` (the sum of the k most confident),
        `ams-full` (the sum of all), `ensemble` (mean probabilities), `average` (mean weights), `pfnm` (matched units).
    k
        For `ams-topk`.
    counts
        `[J, C]`, how many training samples of each class each network saw: for `mask_absent`, `select="greedy"`,
        `weights="class"`, PFNM's class weighting and distillation without data.
    weights
        For `average`, one number for each network, `"samples"` (the sums of `counts`) or `"uniform"`; None: `samples`
        where `counts` are given. For `ensemble`, `"uniform"` (also None), or `"class"`: class by class. For
        `select="cluster"`, their sizes, as for `average`.
    space
        For `ensemble`: `prob` or `logit`.
    normalize, temperatures, mask_absent, confidence
        Variants of AMS, see `polyfed.AMS`; `temperature` needs one number for each network.
    select, keep
        Use only some networks: `greedy` (by label coverage, from `counts`) or `cluster` (by similarity of outputs on
        `public`, one for each of `keep` groups).
    matching, search
        Settings of `pfnm`. With `search`, labelled data `(inputs, labels)`, the best setting of a grid by accuracy on
        it is taken: use training or validation data, and say so if it was the test set.
    distill_into, public, distillation
        Distil the fused predictor into this model (a model string or a module, trained in place) with unlabeled
        `public` inputs; without them inputs are made from the networks themselves.
    input_shape
        Shape of one input, where it cannot be read off `public` or a first linear layer.
    seed
        Of everything random: sweeps of the matching, the student's initial weights, made inputs.
    task
        What the networks learned: where it is not classification, `average` and `ensemble` fuse them.

    Returns
    -------
    nn.Module
        In prediction mode. `pfnm` and `average` give a network of the clients' kind, distillation the student.

    Raises
    ------
    InputError
        When the networks do not fit together or the method; the sentence says which and why.
    """
    models = list(models)
    check_networks(models)
    if method not in METHODS:
        raise unknown("fusion method", method, METHODS)
    check_task(as_task(task), method, distill_into is not None)
    table = None if counts is None else read_label_table(counts, len(models))
    inputs = None if public is None else read_inputs(public)
    shape = tuple(inputs.x.shape[1:]) if inputs is not None and input_shape is None else input_shape  # which knows more
    networks = [copy.deepcopy(model).eval() for model in models]
    chosen = list(range(len(models)))
    if select is not None:
        check_choice(select, keep, table, inputs)
        clustered = select == "cluster"
        sizes = read_sizes(None if weights == "class" else weights, table, len(models)) if clustered else []
        chosen = choose(networks, select, keep, table, sizes, inputs)
        networks = [networks[j] for j in chosen]
        table = None if table is None else table[chosen]
        if weights is not None and not isinstance(weights, str):
            used = clustered and method != "average"  # they were the sizes, and have no other use
            weights = None if used else [weights[j] for j in chosen]
        temperatures = None if temperatures is None else [temperatures[j] for j in chosen]
    if method == "average":
        check_one_architecture(networks)
        fused: nn.Module = _average(networks, read_sizes(weights, table, len(networks)))
    elif method == "pfnm":
        fused = _pfnm(networks, matching or Matching(), table, search, shape, seed)
    elif method == "ensemble":
        expect("space", space, ("prob", "logit"))
        fused = Averaged(networks, space, read_class_weights(weights, table), as_task(task).name)
    else:
        size = {"ams-top1": 1, "ams-topk": k, "ams-full": None}[method]
        check_selection(networks, size, normalize, temperatures, mask_absent, confidence, table)
        present = table > 0 if mask_absent and table is not None else None
        scales = temperatures if normalize == "temperature" else None
        fused = Selection(networks, size, normalize, scales, present, confidence)
    if isinstance(fused, Several):
        fused.places = chosen
    fused.eval()
    if distill_into is None:
        return fused
    student = make_student(distill_into, shape, known_outputs(networks[0]), seed, networks[0])
    return distill(fused, student, networks, inputs, table, shape, distillation or Distillation(), seed)


def _average(networks: Sequence[nn.Module], weights: Sequence[float]) -> nn.Module:
    """Average the states as FedAvg does: parameters and float buffers by weight; of integers the maximum is taken."""
    states = [network.state_dict() for network in networks]
    fused = copy.deepcopy(networks[0])
    mean = fused.state_dict()
    slots = {name: Slot(name) for name, tensor in mean.items() if tensor.is_floating_point()}
    shared = [{name: state[name] for name in slots} for state in states]
    scatter_mean(mean, (Part(state, slots, weight) for state, weight in zip(shared, weights, strict=True)))
    for name in mean.keys() - slots.keys():
        mean[name].copy_(torch.stack([state[name] for state in states]).amax(dim=0))
    return fused


def _pfnm(
    networks: Sequence[nn.Module],
    options: Matching,
    table: Tensor | None,
    search: tuple[Any, Any] | Samples | None,
    shape: Sequence[int] | None,
    seed: int,
) -> nn.Module:
    """Match the networks; with labelled data to search on, take the setting of the grid that is most often right."""
    check_one_depth(networks)
    check_alike({f"network {place}": network for place, network in enumerate(networks)}, shape)
    if search is None:
        return matched(networks, options, generator(seed, "matching"), table)
    data = search if isinstance(search, Samples) else Samples(torch.as_tensor(search[0]), torch.as_tensor(search[1]))
    found = [matched(networks, settings, generator(seed, "matching"), table) for settings in candidates(options)]
    scores = [accuracy_of(network, data) for network in found]
    return found[scores.index(max(scores))]
