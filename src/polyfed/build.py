"""From what people pass (model strings, classes, modules) to the blueprints and infos that a federation needs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyfed.core.errors import InputError, first_line
from polyfed.core.learner import Learner
from polyfed.core.message import State
from polyfed.core.method import Method
from polyfed.core.nets import frozen_names
from polyfed.core.party import Blueprint, ClientInfo, PartyData, state_of
from polyfed.core.rng import seeded
from polyfed.core.runner import draws_by_itself
from polyfed.core.samples import Samples
from polyfed.core.task import CLASSIFICATION
from polyfed.core.threads import one_thread
from polyfed.core.weights import DoesNotFit, header_of
from polyfed.data import Clients
from polyfed.data.described import describe_inputs, differences
from polyfed.models import check_model, count_parameters, properties, with_feature_dim
from polyfed.models.contract import REQUIRED, about_ids, check_floats, cut_shapes, evaluating, sample_input
from polyfed.models.estimators import offers
from polyfed.models.structure import structure
from polyfed.specs import ModelSpec, construct, label_of, weights_of


@one_thread()
def make_blueprint(
    model: ModelSpec,
    label: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    seed: int,
    feature_dim: int | None,
    feature_adapter: str,
) -> Blueprint:
    """Build a model once from its seed, check it, and describe it."""
    module = make_module(model, label, input_shape, num_classes, seed, feature_dim, feature_adapter)
    if isinstance(module, Learner):
        return learner_blueprint(module, label)
    _check(module, label, input_shape, num_classes)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InputError(
            f"Model {label} has nothing to train: all of its parameters are frozen; set requires_grad on some of them."
        )
    state = state_of(module)  # not a copy: nobody trains this module, it is only copied from
    buffers = frozenset(name for name, _ in module.named_buffers())
    return Blueprint(
        name=label if feature_dim is None else f"{label}>{feature_dim}",
        shapes={name: tuple(tensor.shape) for name, tensor in state.items()},
        buffers=buffers & frozenset(state),
        properties=properties(module),
        feature_dim=getattr(module, "feature_dim", None),
        num_classes=num_classes,
        family=getattr(module, "family", None),
        parameters=count_parameters(module),
        initial=state,
        build=lambda: copy.deepcopy(module),
        frozen=frozen_names(module),
        cuts=cut_shapes(module, input_shape),
        random=draws_by_itself(module, sample_input(module, input_shape)),
        width_groups=getattr(module, "width_groups", dict)(),
    )


def learner_blueprint(learner: Learner, label: str) -> Blueprint:
    """Describe a model that is no network: it has no tensors; what it learned is in its client's memory."""
    return Blueprint(
        name=label,
        shapes={},
        buffers=frozenset(),
        properties=offers(learner),
        feature_dim=None,
        num_classes=learner.outputs,
        family=None,
        parameters=0,
        initial={},
        build=lambda: copy.deepcopy(learner),
    )


@one_thread()
def make_module(
    model: ModelSpec,
    label: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    seed: int,
    feature_dim: int | None,
    feature_adapter: str,
) -> nn.Module:
    """Build a model from its seed, with features of the wanted size. A module that was given keeps its weights."""
    with seeded(seed, f"init/{label}"):
        module = construct(model, input_shape, num_classes)
        if feature_dim is not None:
            if not all(hasattr(module, name) for name in REQUIRED):
                raise InputError(f"feature_dim needs a model with features: wrap {label} with polyfed.adapt(...).")
            # All rates of a network get the projection, or none: a width family has common names.
            always = isinstance(model, str) and "@" in model
            module = with_feature_dim(module, feature_dim, feature_adapter, always)
    return module


@one_thread()
def make_blueprints(
    models: Sequence[ModelSpec],
    input_shape: tuple[int, ...],
    outputs: int,
    seed: int,
    feature_dim: int | None,
    feature_adapter: str,
) -> list[tuple[Blueprint, State | None]]:
    """Return for each model its architecture and, where its weights are not the common initial ones, its own.

    A model string is an architecture by its name. Modules, and what functions and classes build, are one architecture
    where their structure is equal; the common initial weights are those of the first.
    """
    settings = input_shape, outputs, seed, feature_dim, feature_adapter
    made: dict[str, Blueprint] = {}
    labels: dict[Hashable, str] = {}  # by structure
    found: dict[Any, tuple[Blueprint, State | None]] = {}  # by string, or by identity
    for position, model in enumerate(models):
        key, label = model if isinstance(model, str) else id(model), label_of(model)
        if key in found:
            continue
        own: State | None = None
        if isinstance(model, str) and label in made and any(weights_of(m)[1] for m in models if isinstance(m, str)):
            own = _own_state(model, label, settings, made[label].initial)
        if not isinstance(model, str):
            with seeded(seed, f"init/{label}"):
                kind = structure(model if isinstance(model, nn.Module) else construct(model, input_shape, outputs))
            if kind in labels:
                label = labels[kind]
                # From the same seed two functions give the same weights, unless they take them from somewhere else.
                own = _own_state(model, label, settings, made[label].initial)
            else:
                label = labels[kind] = label if label not in made else f"{label}#{position}"
        if label not in made:
            made[label] = make_blueprint(model, label, *settings)
        found[key] = made[label], own
    return [found[model if isinstance(model, str) else id(model)] for model in models]


def _own_state(model: ModelSpec, label: str, settings: Any, common: State) -> State | None:
    """Return the weights that a model came with, where they are not the common ones of its architecture."""
    state = state_of(make_module(model, label, *settings))
    return None if all(torch.equal(state[name], common[name]) for name in common) else state


def make_parties(
    method: Method,
    clients: Clients,
    models: Sequence[ModelSpec],
    outputs: int,
    seed: int,
    feature_dim: int | None = None,
    feature_adapter: str = "linear",
) -> tuple[list[ClientInfo], list[PartyData], dict[str, Blueprint]]:
    """Deal the models to the clients in turn and describe everybody."""
    if not models:
        raise InputError("No models: name at least one, for instance models=['mlp:2'].")
    with explained_starts(models, lambda: _described(clients)):
        made = make_blueprints(models, clients.input_shape, outputs, seed, feature_dim, feature_adapter)
    for told in other_starts(models, lambda: _described(clients)):
        warnings.warn(told, stacklevel=4)
    _warn_of_lost_weights(method, made)
    infos, data = [], []
    tell_counts = "label_counts" in method.requirements() and clients.task == CLASSIFICATION
    for number in range(len(clients)):
        blueprint, own = made[number % len(made)]
        train, validation = clients.client(number)
        infos.append(
            ClientInfo(
                id=number,
                samples=len(train),
                architecture=blueprint.name,
                parameters=blueprint.parameters,
                label_counts=train.label_counts(clients.num_classes) if tell_counts else None,
                name=clients.names[number] if clients.names else "",
            )
        )
        data.append(PartyData(train, validation, clients.public, own, clients.own_tests(number)))
    used = {info.architecture for info in infos}
    return infos, data, {blueprint.name: blueprint for blueprint, _ in made if blueprint.name in used}


def other_starts(models: Sequence[ModelSpec], described: Callable[[], Mapping[str, Any]]) -> list[str]:
    """Say which files that networks begin from were trained for something else than the data (`describe_inputs`)."""
    return [
        f"The network of {file} was trained for something else, by its header (there against your data): {told}."
        for file, told in _differing(models, described).items()
    ]


@contextmanager
def explained_starts(models: Sequence[ModelSpec], described: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Say of a file that does not fit what it was trained for, where its header tells that.

    Raises
    ------
    InputError
        Instead of the sentence about its tensors.
    """
    try:
        yield
    except DoesNotFit as error:
        for file, told in _differing(models, described).items():
            if str(file) in str(error):
                raise InputError(
                    f"No network for your data can begin from {file}, which was trained for something else, by its "
                    f"header (there against your data): {told}. Give a file that was trained for the same inputs and "
                    "classes, or name the model without one."
                ) from error
        raise


def _differing(models: Sequence[ModelSpec], described: Callable[[], Mapping[str, Any]]) -> dict[Path, str]:
    """Return in words, for each file that networks begin from, what its header has that the data has not."""
    files = dict.fromkeys(file for model in models if isinstance(model, str) and (file := weights_of(model)[1]))
    headers = {file: header for file in files if (header := header_of(file)) is not None}
    found = {file: differences(header, described()) for file, header in headers.items()}
    return {file: "; ".join(told) for file, told in found.items() if told}


def _described(clients: Clients) -> dict[str, Any]:
    scaling = clients.train[0].scaling
    return describe_inputs(clients.input_shape, clients.form, scaling, clients.class_names, clients.task)


def _warn_of_lost_weights(method: Method, made: Sequence[tuple[Blueprint, State | None]]) -> None:
    """Say when networks were given with weights of their own and the method starts from common ones."""
    names = dict.fromkeys(blueprint.name for blueprint, own in made if own is not None)
    common = method.pools_data or ("main" in method.shares and method.outcome == "clients")
    if names and common:
        warnings.warn(
            f"The networks given as {', '.join(names)} have different weights: {method.name} starts from those of the "
            "first one (what a method does not share, each client keeps).",
            stacklevel=4,
        )


def pool(infos: Sequence[ClientInfo], data: Sequence[PartyData]) -> tuple[list[ClientInfo], list[PartyData]]:
    """Put all data in one place: one party for each architecture, holding everybody's samples once."""
    train = union([item.train for item in data if item.train is not None])
    validation = [item.validation for item in data if item.validation is not None]
    held, public = union(validation) if validation else None, data[0].public
    pooled: list[ClientInfo] = []
    parties: list[PartyData] = []
    for architecture in dict.fromkeys(info.architecture for info in infos):
        first = next(info for info in infos if info.architecture == architecture)
        pooled.append(ClientInfo(len(pooled), len(train), architecture, first.parameters, first.label_counts))
        served = [item for info, item in zip(infos, data, strict=True) if info.architecture == architecture]
        parties.append(
            PartyData(train, held, public, tests={c: own for item in served for c, own in item.tests.items()})
        )
    return pooled, parties


def union(parts: Sequence[Samples]) -> Samples:
    """Return all samples of several views, each row once."""
    first = parts[0]
    if any(part.scaling != first.scaling for part in parts):  # each client scales by itself
        return Samples(torch.cat([part.inputs() for part in parts]), torch.cat([part.labels() for part in parts]))
    if all(part.x is first.x for part in parts):
        rows = torch.cat([part.index if part.index is not None else torch.arange(len(part.x)) for part in parts])
        return Samples(first.x, first.y, torch.unique(rows), first.scaling)
    x = torch.cat([part.x[part.rows()] for part in parts])
    y = torch.cat([part.labels() for part in parts])
    return Samples(x, y, None, first.scaling)


def _check(module: nn.Module, label: str, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Check the contract where the model offers it, and in any case its numbers and the shape of its outputs."""
    check_floats(module, input_shape, label)
    if all(hasattr(module, name) for name in REQUIRED):
        check_model(module, input_shape)
    try:
        with evaluating(module), torch.no_grad():
            logits = module(sample_input(module, input_shape))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        advice = about_ids(module, input_shape).removeprefix(", and ")
        raise InputError(
            f"Model {label} cannot take inputs of shape {list(input_shape)} ({first_line(error)})"
            f"{advice and ': ' + advice}."
        ) from error
    shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if shape != (2, num_classes):
        raise InputError(
            f"Model {label} gives outputs of shape {shape} for two inputs, but ({2}, {num_classes}) is needed: "
            f"its last layer must have {num_classes} outputs, one for each class (label or target)."
        )
