"""From methods, data and models to a federation in this process: everybody is described, and everything checked."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from polyfed import methods
from polyfed.build import make_parties, pool
from polyfed.config import Networks
from polyfed.core.attack import check_attack, check_share, malicious, poisoned
from polyfed.core.errors import InputError
from polyfed.core.evaluate import few
from polyfed.core.federation import Federation
from polyfed.core.method import Method
from polyfed.core.metrics import Function, make_metrics
from polyfed.core.needs import check_needs
from polyfed.core.party import Blueprint, ClientInfo, PartyData
from polyfed.core.robust import check_rule, nobody_to_compare
from polyfed.core.settings import Settings
from polyfed.core.trust import IN_DATA, Trust
from polyfed.data import Clients
from polyfed.engines.inprocess import InProcess, chosen_device
from polyfed.engines.known import KnownStages
from polyfed.specs import ModelSpec, label_of


@dataclass(frozen=True)
class Parties:
    """Everybody who takes part, described: clients, their data, and their architectures by name."""

    infos: list[ClientInfo]
    data: list[PartyData]
    blueprints: dict[str, Blueprint]
    outputs: int  # of every network


def prepare(
    method: Method,
    clients: Clients,
    models: Sequence[ModelSpec],
    settings: Settings,
    networks: Networks = Networks(),  # noqa: B008 (frozen)
) -> Federation:
    """Build a federation and check that everything fits; nothing is trained or written.

    Raises
    ------
    InputError
        When the method does not fit the models or the data.
    """
    check_patience(settings, clients)
    return make_federation(
        method, clients, describe_parties(method, clients, models, settings.seed, networks, settings.trust), settings
    )


def check_patience(settings: Settings, clients: Clients) -> None:
    """Refuse to stop early where nothing says when: test data never does."""
    if settings.evaluation.patience is not None and not any(held is not None for held in clients.validation):
        raise InputError("patience needs validation data: split(..., validation=0.1), or --validation 0.1.")


def describe_parties(
    method: Method,
    clients: Clients,
    models: Sequence[ModelSpec],
    seed: int,
    networks: Networks,
    trust: Trust = Trust(),  # noqa: B008 (frozen)
) -> Parties:
    """Deal the models to the clients, and check that the method can work with them and their data.

    Malicious clients of a simulation get the data that they are to learn from.

    Raises
    ------
    InputError
        When it cannot.
    """
    outputs = method.outputs(clients.num_classes, clients.own_public_classes())
    infos, data, blueprints = make_parties(
        method, clients, models, outputs, seed, networks.feature_dim, networks.feature_adapter
    )
    check_needs(method, infos, blueprints, clients.public, clients.input_shape, methods.candidates, clients.task)
    check_rule(trust.rule(), method, methods.candidates)
    check_attack(attack := trust.attackers(), method)
    check_share(attack, len(infos))
    if attack is not None and attack.name in IN_DATA:
        for client in malicious(attack, [info.id for info in infos], seed):
            data[client] = poisoned(attack, data[client], clients.num_classes, seed, client)
    return Parties(infos, data, blueprints, outputs)


def make_federation(
    method: Method,
    clients: Clients,
    parties: Parties,
    settings: Settings,
    known: KnownStages | None = None,
    metrics: Sequence[str | Function] | None = None,
) -> Federation:
    """Return the federation of parties in this process; `known`: training that earlier runs did already."""
    device = chosen_device(settings.execution.device)
    settings = replace(settings, execution=replace(settings.execution, device=device))
    made = Federation(
        method,
        make_backend(method, clients, parties, settings, known),
        settings,
        num_classes=clients.num_classes,
        input_shape=clients.input_shape,
        test=clients.test,
        public=clients.public,
        public_classes=parties.outputs - clients.num_classes or None,
        task=clients.task,
        metrics=make_metrics(settings.evaluation.metrics if metrics is None else metrics, clients.task),
    )
    if (told := nobody_to_compare(made.rule, method, made.server, made.ctx)) is not None:
        warnings.warn(told, stacklevel=2)
    return made


def make_backend(
    method: Method, clients: Clients, parties: Parties, settings: Settings, known: KnownStages | None = None
) -> InProcess:
    """Return the clients in this process (of a simulation by Flower: to hold what its sites ended up with)."""
    infos, data = pool(parties.infos, parties.data) if method.pools_data else (parties.infos, parties.data)
    engine = "sequential" if settings.execution.engine == "flower" else settings.execution.engine
    sample, workers = few(clients.test, settings), settings.execution.workers
    return InProcess(
        method,
        infos,
        data,
        parties.blueprints,
        clients.test,
        engine,
        workers,
        sample=sample,
        known=known,
        batch_size=settings.training.batch_size,
        share=settings.participation.share * (1 - settings.participation.dropout),
    )


def described(model: ModelSpec) -> str:
    """Return a model string, or what tells a class, function or module from another in any process."""
    if isinstance(model, str):
        return model
    if isinstance(model, nn.Module):
        shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in model.state_dict().items()]
        return f"{label_of(model)}#{hashlib.sha256(f'{model!r}|{shapes}'.encode()).hexdigest()[:12]}"
    return f"{getattr(model, '__module__', '')}:{getattr(model, '__qualname__', type(model).__name__)}"


def structure_of(blueprints: Mapping[str, Blueprint]) -> str:
    """Return a checksum of networks that came as objects: a function may build another one under its old name.

    Their layers and tensors count, not their weights: a script that makes them anew draws other ones.
    """
    parts = [
        (name, repr(found.build() if found.build else None), sorted(found.shapes.items()), sorted(found.frozen))
        for name, found in sorted(blueprints.items())
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
