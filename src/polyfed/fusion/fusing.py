"""`fuse`: one module out of several trained networks, without training data.

    fused = polyfed.fuse([net_a, net_b, net_c], method="ams-top1")

The result is an ordinary `nn.Module` in prediction mode that takes the same inputs and returns scores `[B, C]`. It
holds copies: the given networks are not changed. `fuse_files` and `load_fused` do the same with files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.errors import InputError, unknown
from polyfed.core.passes import count_right
from polyfed.core.rng import generator
from polyfed.core.samples import Samples
from polyfed.core.threads import one_thread
from polyfed.data import Dataset
from polyfed.fusion.chain import check_alike, read_chain, sample_inputs, weight_layers, write_chain
from polyfed.fusion.distill import Distillation, distill, make_student
from polyfed.fusion.networks import (
    Averaged,
    BlockNetwork,
    Selection,
    Several,
    check_networks,
    fill,
    known_outputs,
    load_fused,
    read_state,
    write_fused,
)
from polyfed.models import build, signature
from polyfed.ops.aggregate import weighted_mean
from polyfed.ops.matching import GRID, Matching, match_networks
from polyfed.ops.selection import NORMALIZATIONS, class_weights, cluster_heads, greedy_cover

__all__ = ["METHODS", "Distillation", "Matching", "fuse", "fuse_blockdiag", "fuse_files", "load_fused"]

METHODS = ("ams-top1", "ams-topk", "ams-full", "ensemble", "average", "pfnm")
CHUNK = 512


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
    table = None if counts is None else _label_table(counts, len(models))
    inputs = None if public is None else _inputs(public)
    shape = tuple(inputs.x.shape[1:]) if inputs is not None else input_shape
    chosen = list(range(len(models)))
    if select is not None:
        chosen = _choose(models, select, keep, table, weights, inputs)
        models = [models[j] for j in chosen]
        table = None if table is None else table[chosen]
        if weights is not None and not isinstance(weights, str):
            used = select == "cluster" and method != "average"  # they were the sizes, and have no other use
            weights = None if used else [weights[j] for j in chosen]
        temperatures = None if temperatures is None else [temperatures[j] for j in chosen]
    networks = [copy.deepcopy(model).eval() for model in models]
    if method == "average":
        fused: nn.Module = _average(networks, weights, table)
    elif method == "pfnm":
        fused = _pfnm(networks, matching or Matching(), table, search, shape, seed)
    elif method == "ensemble":
        _expect("space", space, ("prob", "logit"))
        fused = Averaged(networks, space, _class_table(weights, table))
    else:
        size = {"ams-top1": 1, "ams-topk": k, "ams-full": None}[method]
        fused = _selection(networks, size, normalize, temperatures, mask_absent, confidence, table)
    if isinstance(fused, Several):
        fused.places = chosen
    fused.eval()
    if distill_into is None:
        return fused
    student = make_student(distill_into, shape, known_outputs(networks[0]), networks[0], seed)
    return distill(fused, student, inputs, networks, table, shape, distillation or Distillation(), seed)


def fuse_blockdiag(
    models: Sequence[nn.Module],
    k: int | None = 1,
    activation: Callable[[Tensor], Tensor] = torch.relu,
    input_shape: Sequence[int] | None = None,
) -> BlockNetwork:
    """Join perceptrons of equal depth into one block-diagonal network; k None sums its last blocks (AMS-full).

    Raises
    ------
    InputError
        If the networks are not perceptrons of one depth with this activation.
    """
    models = list(models)
    check_networks(models)
    for place, model in enumerate(models):
        for name, layer in model.named_modules():
            if not isinstance(layer, nn.Linear) and next(layer.parameters(recurse=False), None) is not None:
                raise InputError(
                    "The block-diagonal form is not applicable: it needs fully connected networks of one depth, but "
                    f"layer '{name}' of network {place} is a {type(layer).__name__}."
                )
    layers = [weight_layers(model) for model in models]
    if len({len(own) for own in layers}) > 1:
        raise InputError("The block-diagonal form is not applicable: it needs fully connected networks of one depth.")
    weights = [[layer.weight.detach() for _, layer in own] for own in layers]
    biases = [[None if layer.bias is None else layer.bias.detach() for _, layer in own] for own in layers]
    joined = BlockNetwork(weights, biases, k, activation).eval()
    x = sample_inputs(models[0], input_shape)
    with torch.no_grad():
        expected = torch.stack([copy.deepcopy(model).eval()(x) for model in models])
        if not torch.allclose(joined.logits(x), expected, rtol=1e-4, atol=1e-4):
            raise InputError(
                "The block-diagonal form is not applicable: the networks do something else between their layers than "
                "the given activation."
            )
    return joined


# --- the methods ---


def _selection(
    networks: list[nn.Module],
    k: int | None,
    normalize: str,
    temperatures: Sequence[float] | None,
    mask_absent: bool,
    confidence: str,
    table: Tensor | None,
) -> Selection:
    _expect("normalize", normalize, NORMALIZATIONS)
    _expect("confidence", confidence, ("logit", "first_norm", "first_max"))
    if k is not None and k < 1:
        raise InputError(f"k is the number of networks to sum, at least 1, not {k}.")
    if normalize == "temperature" and (temperatures is None or len(temperatures) != len(networks)):
        raise InputError(f"normalize='temperature' needs temperatures=[...], one for each of {len(networks)} networks.")
    if mask_absent and table is None:
        raise InputError("mask_absent needs counts=[...]: the samples of each class that each network saw.")
    if confidence != "logit":
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
    present = (table > 0).tolist() if mask_absent and table is not None else None
    scales = list(temperatures) if normalize == "temperature" and temperatures is not None else None
    return Selection(networks, k, normalize, scales, present, confidence)


def _average(networks: list[nn.Module], weights: Sequence[float] | str | None, table: Tensor | None) -> nn.Module:
    """Average the states: parameters and float buffers by weight, integers by their maximum."""
    first = signature(networks[0])
    for place, network in enumerate(networks):
        if signature(network) != first:
            raise InputError(
                f"Method 'average' is not applicable: networks 0 and {place} have different architectures; "
                "use 'ams-top1' or 'ensemble', which take any."
            )
    shares = _sizes(weights, table, len(networks))
    states = [network.state_dict() for network in networks]
    mean = {
        name: weighted_mean([state[name] for state in states], shares)
        if tensor.is_floating_point()
        else torch.stack([state[name] for state in states]).amax(dim=0)
        for name, tensor in states[0].items()
    }
    fused = copy.deepcopy(networks[0])
    fused.load_state_dict(mean)
    return fused


def _pfnm(
    networks: list[nn.Module],
    options: Matching,
    table: Tensor | None,
    search: tuple[Any, Any] | Samples | None,
    shape: Sequence[int] | None,
    seed: int,
) -> nn.Module:
    depths = [len(weight_layers(network)) for network in networks]
    for place, depth in enumerate(depths):
        if depth != depths[0]:
            raise InputError(
                f"Method 'pfnm' is not applicable: network 0 has {depths[0]} layers and network {place} has {depth}; "
                "use 'ams-top1' or 'ensemble', which take any."
            )
    chains = [read_chain(network, shape) for network in networks]
    check_alike({f"network {place}": network for place, network in enumerate(networks)}, shape)
    shares = None if table is None else list(class_weights(table))

    def candidate(settings: Matching) -> nn.Module:
        matched = match_networks(chains, settings, generator(seed, "matching"), shares)
        return write_chain(networks[0], matched.layers)

    if search is None:
        return candidate(options)
    data = search if isinstance(search, Samples) else Samples(torch.as_tensor(search[0]), torch.as_tensor(search[1]))
    found: list[nn.Module] = []
    scores: list[float] = []
    for sigma2, sigma0_2, gamma in GRID:
        found.append(candidate(replace(options, sigma2=sigma2, sigma0_2=sigma0_2, gamma=gamma)))
        scores.append(accuracy_of(found[-1], data))
    return found[scores.index(max(scores))]


# --- files ---


def accuracy_of(model: nn.Module, data: Samples) -> float:
    """Return the share of samples that a module gets right."""
    return count_right(model, data) / len(data)


def fuse_files(
    paths: Sequence[str | Path],
    model_specs: Sequence[str] | str,
    method: str = "ams-top1",
    *,
    input_shape: Sequence[int],
    num_classes: int,
    out: str | Path,
    **options: Any,
) -> nn.Module:
    """Fuse networks of the zoo whose states are in safetensors files, and write the fused model.

    Parameters
    ----------
    paths
        One file for each network, as a run leaves them in `models/client-<n>.safetensors`.
    model_specs
        Their model strings; fewer than paths are dealt in turn.
    method, options
        As in `fuse`; `distill_into` must be a model string.
    input_shape, num_classes
        Of the data that the networks were trained on.
    out
        Where to write: `<out>.safetensors` and, beside it, `<out>.json`, which says how to build the module again
        (`load_fused`).

    Raises
    ------
    InputError
        A file cannot be read or does not fit its model string; or as in `fuse`.
    """
    specs = [model_specs] if isinstance(model_specs, str) else list(model_specs)
    student = options.get("distill_into")
    if not specs or not paths:
        raise InputError("Nothing to fuse: name at least one file and one model.")
    if isinstance(student, nn.Module):
        raise InputError("fuse_files needs distill_into as a model string, so that the file can be read again.")
    dealt = [specs[place % len(specs)] for place in range(len(paths))]
    models = [_read_network(path, spec, input_shape, num_classes) for path, spec in zip(paths, dealt, strict=True)]
    fused = fuse(models, method, input_shape=input_shape, **options)
    description: dict[str, Any] = {
        "method": method,
        "sources": [Path(path).name for path in paths],
        "input_shape": list(input_shape),
        "num_classes": num_classes,
    }
    if isinstance(fused, Several):
        kept = [dealt[place] for place in fused.places]
        description |= {"kind": fused.kind, "models": kept, "options": fused.recipe()}
    else:
        kind = "model" if student is not None or method == "average" else "matched"
        description |= {"kind": kind, "models": [student or dealt[0]], "options": {}}
    write_fused(fused, description, out)
    return fused


def _read_network(path: str | Path, spec: str, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    network = build(spec, input_shape, num_classes)
    fill(network, read_state(Path(path)), f"{path}, read as {spec},")
    return network


# --- small things ---


def _choose(
    models: Sequence[nn.Module],
    select: str,
    keep: int | None,
    table: Tensor | None,
    weights: Sequence[float] | str | None,
    public: Samples | None,
) -> list[int]:
    """Return the places of the networks that are kept."""
    _expect("select", select, ("greedy", "cluster"))
    if select == "greedy":
        if table is None:
            raise InputError("select='greedy' needs counts=[...]: the samples of each class that each network saw.")
        return greedy_cover(table, keep)
    if public is None or keep is None:
        raise InputError("select='cluster' needs public inputs and keep, the number of groups.")
    outputs = []
    with torch.no_grad():
        for model in models:
            probe = copy.deepcopy(model).eval()
            outputs.append(torch.cat([probe(x) for x, _ in public.chunks(CHUNK)]))
    sizes = _sizes(None if weights == "class" else weights, table, len(models))
    return cluster_heads(torch.stack(outputs), sizes, keep)


def _sizes(weights: Sequence[float] | str | None, table: Tensor | None, number: int) -> list[float]:
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


def _class_table(weights: Sequence[float] | str | None, table: Tensor | None) -> list[list[float]] | None:
    if weights in (None, "uniform"):
        return None
    if weights != "class" or table is None:
        raise InputError("For 'ensemble', weights is 'uniform', or 'class' together with counts=[...].")
    rows: list[list[float]] = class_weights(table).tolist()
    return rows


def _label_table(counts: Any, number: int) -> Tensor:
    table = torch.as_tensor(counts)
    if table.dim() != 2 or len(table) != number or bool((table < 0).any()) or bool((table.sum(dim=1) == 0).any()):
        raise InputError(f"counts needs a row for each of {number} networks: its samples of each class, not all zero.")
    return table


def _inputs(public: Any) -> Samples:
    """Read unlabeled inputs from samples, a data set, an array, or a pair whose labels are ignored."""
    if isinstance(public, Dataset):
        return public.train
    if isinstance(public, Samples):
        return public
    x = torch.as_tensor(public[0] if isinstance(public, tuple) else public)
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    return Samples(x, torch.zeros(len(x), dtype=torch.long))


def _expect(field: str, value: str, words: Sequence[str]) -> None:
    if value not in words:
        raise InputError(f"{field} is one of {', '.join(words)}, not '{value}'.")
