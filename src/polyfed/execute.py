"""A configuration is run from start to end, in this process: checked, begun or gone on with, saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from polyfed.config import Config
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.core.federation import Federation
from polyfed.core.method import EVALUATE
from polyfed.core.metrics import Function, make_metrics
from polyfed.core.party import ClientInfo
from polyfed.core.privacy import check_privacy
from polyfed.core.rundir import RunDirectory
from polyfed.core.runstate import Observer
from polyfed.data import Clients
from polyfed.engines.inprocess import InProcess
from polyfed.engines.known import KnownStages
from polyfed.engines.link import join
from polyfed.engines.ranks import leading, work_for_first
from polyfed.engines.shares import fusing_in_words
from polyfed.engines.work import in_words
from polyfed.flower import require_flower
from polyfed.prepare import (
    check_patience,
    describe_parties,
    make_backend,
    make_federation,
    structure_of,
)
from polyfed.result import Models, Result
from polyfed.specs import ModelSpec
from polyfed.stored import check_same
from polyfed.trained import describe_use


def execute(
    config: Config,
    clients: Clients | None = None,
    models: Sequence[ModelSpec] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    progress: bool | None = None,
    known: KnownStages | None = None,
    metrics: Sequence[str | Function] | None = None,
) -> Result:
    """Run a configuration; data, models and metrics are made from it where they are not given.

    Raises
    ------
    InputError
        Before any training, when the request cannot be carried out.
    """
    clients = clients if clients is not None else config.data.load(config.seed)
    models = models if models is not None else config.models.names
    config = replace(config, fingerprint=clients.fingerprint)
    from polyfed.terminal.live import showing

    check_privacy(config.privacy, config.method, config.trust.rule())
    settings, simulated = config.settings(), config.execution.engine == "flower"
    if simulated:
        require_flower()
        from polyfed.flower.simulation import check_simulation, simulate

        check_simulation(config.method, settings)
    asked = metrics if metrics is not None else settings.evaluation.metrics
    parties = describe_parties(config.method, clients, models, settings.seed, config.models, settings.trust)
    check_patience(settings, clients)
    federation = None if simulated else make_federation(config.method, clients, parties, settings, known, asked)
    link = join(federation.ctx.device if federation is not None else torch.device("cpu"), out)
    if federation is None and link is not None:
        raise InputError("The engine 'flower' starts processes by itself: run it without torchrun.")
    if federation is not None and link is not None and link.number > 0:
        work_for_first(federation, link)  # rank 0 runs the loop and writes all files
        return _result(config, federation, None, parties.infos, clients)
    if not all(isinstance(model, str) for model in models):
        config = replace(config, networks=structure_of(parties.blueprints))
    planned = config.method.plan().rounds
    if link is not None and out is not None:
        resume = resume or link.begun(out)
    groups = federation.backend.groups() if federation is not None and isinstance(federation.backend, InProcess) else {}
    directory = _directory(out, config, resume, groups)
    if link is not None and out is not None:
        link.begin(out)
    shown = False if progress is None and observers else progress  # whoever observes shows it
    try:
        with showing(shown, settings.rounds if planned is None else planned, config.label) as view:
            observers = [*view, *observers]
            words = [in_words(groups)] if groups else []
            if federation is not None and link is not None:
                words.append(fusing_in_words(federation, link.size))
            for observer in observers:
                if words and hasattr(observer, "begin"):
                    observer.begin("; ".join(words))
            if federation is not None:
                federation.directory, federation.observers = directory, observers
                with leading(federation, link) if link is not None else nullcontext():
                    federation.run(resume)
                store = federation.backend
            else:
                found = make_metrics(asked, clients.task)
                federation, states = simulate(
                    config.method, settings, clients, models, config.models, directory, observers, resume, found
                )
                store = make_backend(config.method, clients, parties, settings)
                store.restore(states)
        assert isinstance(store, InProcess)
        result = _result(config, federation, store, parties.infos, clients)
        networks = config.models
        result.use = describe_use(
            clients,
            models,
            parties.outputs,
            config.seed,
            networks.feature_dim,
            networks.feature_adapter,
            config.method.pools_data,
        )
        if directory is not None:
            result.directory = directory.path
            result.save(directory.path)
        return result
    finally:
        if directory is not None:
            directory.close()


def _result(
    config: Config, federation: Federation, store: InProcess | None, infos: list[ClientInfo], clients: Clients
) -> Result:
    return Result(
        method=config.label,
        seed=config.seed,
        rounds=rounds_done(federation),
        history=federation.history,
        cost=federation.meter,
        architectures=[info.architecture for info in infos],
        samples=[info.samples for info in infos],
        parameters=[info.parameters for info in infos],
        label_counts=clients.label_counts().tolist(),
        class_names=list(clients.class_names),
        config=config.dump(),
        models=Models(sorted(federation.backend.infos), lambda client: _model_of(federation, store, client)),
        server_model=federation.server.models.get("main"),
        server=federation.server,
        pooled=config.method.pools_data,
        task=clients.task,
        names=list(clients.names),
        notes=list(clients.notes),
        worked=_worked(federation),
    )


def _worked(federation: Federation) -> set[int] | None:
    """Return who was active in some round; None where a step before or after the rounds is everybody's."""
    rounds = [line for line in federation.history if line["phase"] == "round"]
    if federation.plan.before or federation.plan.after or any("participants" not in line for line in rounds):
        return None
    return {who for line in rounds for who in line["participants"]}


def rounds_done(federation: Federation) -> int:
    """Return the rounds that were run: fewer than planned where validation data said so."""
    return int(federation.history[-1]["round"]) if federation.history else federation.rounds


def _model_of(federation: Federation, store: InProcess | None, client: int) -> nn.Module:
    """Return the model that a client ends up with: its own, with what the server would send it now."""
    if store is None:
        raise InputError(f"The model of client {client} is at rank 0: ask for it there (if torch's RANK is 0).")
    message = federation.method.send(federation.server, federation.ctx.infos[client], EVALUATE, federation.ctx)
    return store.model(client, federation.ctx, message)


def prolonged(out: str | Path, config: Config, rounds: int) -> Config:
    """Write into a run's directory that it has more rounds, and return its configuration.

    Raises
    ------
    RunDirectoryError
        When a run with more rounds would have been another one from its beginning, or has a step after its last round.
    """
    check_longer(out, config, rounds)
    config = replace(config, rounds=rounds)
    directory = RunDirectory.open(Path(out))
    try:
        directory.rewrite_config({**RunDirectory.read_config(Path(out)), **config.dump()})  # sites stay in it
    finally:
        directory.close()
    return config


def check_longer(out: str | Path, config: Config, rounds: int) -> None:
    """Refuse more rounds where a run with them would have been another one from its beginning.

    Raises
    ------
    RunDirectoryError
        With the reason.
    """
    plan = config.method.plan()
    reasons = {
        f"it has {config.rounds} already": rounds < config.rounds,
        f"{config.label} has a number of rounds of its own": plan.rounds is not None,
        f"{config.label} has done its last step after the rounds": bool(plan.after),
        f"what {config.label} does depends on the number of rounds": config.method.knows_rounds,
        "its learning rate falls along the number of rounds (schedule)": config.training.schedule != "constant",
    }
    for reason, holds in reasons.items():
        if holds:
            raise RunDirectoryError(f"The run in {out} cannot go on to {rounds} rounds: {reason}.")


def _directory(out: str | Path | None, config: Config, resume: bool, groups: Mapping[str, str]) -> RunDirectory | None:
    if out is None:
        if resume:
            raise InputError("resume needs the directory of the earlier run: pass out=...")
        return None
    if not resume:
        return RunDirectory.create(Path(out), {**config.dump(), **({"groups": groups} if groups else {})})
    check_same(out, config)
    begun = RunDirectory.read_config(Path(out)).get("groups", groups)
    if begun != groups:
        raise RunDirectoryError(
            f"The clients in {out} worked in another way ({in_words(begun)}) than this version of polyfed lets them "
            f"({in_words(groups)}): go on with the version that began it, or start the run again."
        )
    return RunDirectory.open(Path(out))
