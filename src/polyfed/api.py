"""`run` and `resume`: one federation from start to end, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from polyfed import methods
from polyfed.arguments import as_method, as_metrics, as_models, check_arguments
from polyfed.build import ModelSpec
from polyfed.config import Config, Data, Networks, check_same, read_config
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.core.federation import Federation
from polyfed.core.launch import was_restarted
from polyfed.core.method import EVALUATE, Method
from polyfed.core.metrics import Function, make_metrics
from polyfed.core.party import ClientInfo
from polyfed.core.privacy import Privacy, check_privacy
from polyfed.core.rundir import RunDirectory
from polyfed.core.runstate import Line
from polyfed.core.settings import Evaluation, Execution, Participation, Training
from polyfed.core.trust import Trust
from polyfed.data import Clients
from polyfed.engines.inprocess import InProcess
from polyfed.engines.known import KnownStages
from polyfed.engines.link import join
from polyfed.engines.ranks import leading, work_for_first
from polyfed.engines.work import in_words
from polyfed.flower import require_flower
from polyfed.prepare import (
    check_patience,
    describe_parties,
    described,
    make_backend,
    make_federation,
    prepare,
    structure_of,
)
from polyfed.result import Models, Result
from polyfed.trained import describe_use

__all__ = ["execute", "prepare", "prolonged", "resume", "run"]

Observer = Callable[[Line], None]


def run(
    method: Method | type[Method] | str,
    clients: Clients,
    models: Sequence[ModelSpec] | ModelSpec = ("mlp:2",),
    rounds: int = 10,
    training: Training | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    *,
    participation: Participation | float = 1.0,
    feature_dim: int | None = None,
    feature_adapter: str = "linear",
    evaluate: str | int = 1,
    evaluate_clients: int | None = None,
    evaluate_samples: int | None = None,
    checkpoint_seconds: float = 10.0,
    resume: bool = False,
    engine: str = "auto",
    workers: int | None = None,
    device: str = "cpu",
    robust: str | None = None,
    attack: str | None = None,
    privacy: Privacy | None = None,
    label: str | None = None,
    observers: Sequence[Observer] = (),
    progress: bool | None = None,
    metrics: Sequence[str | Function] | str = (),
    patience: int | None = None,
) -> Result:
    """Run a method over clients with different models.

    Parameters
    ----------
    method
        A method object; a name or a class stands for its default hyper-parameters.
    clients
        The data of all parties, from `split` or `Clients.from_parts`.
    models
        Model strings (`"resnet10:w16"`), classes or functions that build a module, or modules; dealt in turn. Modules
        of equal structure are one architecture, also where they are different objects or come from different
        functions; each client starts from the weights of the module that it was given. A method that shares weights
        starts from those of the first one, and says so where they differ.
    rounds, training, seed, participation
        How long, how clients train, the seed of everything random, and who takes part in a round.
    out
        A new directory for history, checkpoint, models and result; None keeps everything in memory.
    feature_dim, feature_adapter
        Give every model features of this size, by a trainable projection (`linear`) or by pooling (`avgpool`).
    evaluate, evaluate_clients, evaluate_samples
        Every so many rounds, or `"end"`; and how many clients and test samples (always the same ones) are used for
        measuring before the end, where all are. None: all every time.
    metrics
        What to measure beside the score of the task: names (see `polyfed.core.metrics`), and functions
        `(predictions, targets) -> float` of NumPy arrays, called by their names. None given: those of the task.
    patience
        Stop after so many rounds without a better result on the clients' validation data.
    resume
        Continue the run in `out` from its checkpoint.
    engine, workers
        How clients share the machine: `auto` (perceptrons as stacks, all others as with `threads`), `threads` (whole
        clients on several threads), `sequential` (the same numbers bit for bit), or `batched` (clients of one
        architecture as one stack wherever possible). Results of `auto` and `threads` do not depend on the number
        of workers; by default there are as many as torch uses threads. `flower` runs the apps of a real federation in
        Flower's simulation runtime (Ray), which can use a cluster.
    device
        Where active clients compute: `cpu`, `cuda`, or `auto` (a GPU if there is one).
    robust, attack
        Protection against bad senders, such as `"trimmed:0.2"`; and bad senders to try it with, `"signflip:0.2"`.
    privacy
        Differential privacy of clients' training, such as `Privacy(epsilon=8)`.
    label
        What tables call this run; None: the method's name.
    observers, progress
        Functions called with the line of every finished round; and whether to show the run on the error stream. None:
        on a terminal and in a notebook, unless observers are given.

    Returns
    -------
    Result
        History, cost, final accuracies and models.

    Raises
    ------
    InputError
        Before any training, when the request cannot be carried out.
    """
    check_arguments(clients, participation, out, observers)
    models, wanted = as_models(models), as_metrics(metrics)
    config = configured(
        method,
        clients,
        models,
        wanted,
        label,
        rounds=rounds,
        seed=seed,
        training=training or Training(),
        networks=(feature_dim, feature_adapter),
        participation=participation,
        evaluation=(evaluate, evaluate_clients, evaluate_samples, patience),
        execution=Execution(engine, workers, device, checkpoint_seconds),  # type: ignore[arg-type]
        trust=Trust(robust, attack),
        privacy=privacy or Privacy(),
    )
    return execute(config, clients, models, out, resume, observers, progress, metrics=wanted)


def configured(
    method: Method | type[Method] | str,
    clients: Clients,
    models: Sequence[ModelSpec],
    metrics: Sequence[str | Function],
    label: str | None = None,
    *,
    networks: tuple[int | None, str] = (None, "linear"),
    participation: Participation | float = 1.0,
    evaluation: tuple[str | int, int | None, int | None, int | None] = (1, None, None, None),
    **rest: Any,
) -> Config:
    """Return the configuration of a run whose data, models and method are objects."""
    method = as_method(method)
    names = tuple(found.name for found in make_metrics(metrics, clients.task)) if metrics else ()
    every, some_clients, some_samples, patience = evaluation
    return Config(
        method=method,
        label=label or method.name or type(method).__name__,
        data=Data.of(clients, rest["seed"]),
        models=Networks(tuple(map(described, models)), *networks),  # type: ignore[arg-type]
        participation=Participation(share=participation) if isinstance(participation, int | float) else participation,
        evaluation=Evaluation(every, some_clients, some_samples, names, patience),  # type: ignore[arg-type]
        script=tuple(
            part
            for part, named in (
                ("method", methods.is_importable(type(method))),
                ("data", bool(clients.recipe.get("repeatable"))),
                ("models", all(isinstance(model, str) for model in models)),
                ("metrics", all(isinstance(metric, str) for metric in metrics)),
            )
            if not named
        ),
        **rest,
    )


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

    check_privacy(config.privacy, config.method)
    settings, simulated = config.settings(), config.execution.engine == "flower"
    if simulated:
        require_flower()
        from polyfed.flower.simulation import check_simulation, simulate

        check_simulation(config.method, settings)
    asked = metrics if metrics is not None else settings.evaluation.metrics
    parties = describe_parties(config.method, clients, models, settings.seed, config.models, settings.trust)
    check_patience(settings, clients)
    federation = None if simulated else make_federation(config.method, clients, parties, settings, known, asked)
    link = join()
    if federation is None and link is not None:
        raise InputError("The engine 'flower' starts processes by itself: run it without torchrun.")
    if federation is not None and link is not None and link.number > 0:
        work_for_first(federation, link)  # rank 0 runs the loop and writes all files
        return _result(config, federation, None, parties.infos, clients)
    if not all(isinstance(model, str) for model in models):
        config = replace(config, networks=structure_of(parties.blueprints))
    planned = config.method.plan().rounds
    resume = resume or (was_restarted() and out is not None and (Path(out) / "config.json").is_file())
    groups = federation.backend.groups() if federation is not None and isinstance(federation.backend, InProcess) else {}
    directory = _directory(out, config, resume, groups)
    shown = False if progress is None and observers else progress  # whoever observes shows it
    try:
        with showing(shown, settings.rounds if planned is None else planned, config.label) as view:
            observers = [*view, *observers]
            for observer in observers:
                if groups and hasattr(observer, "begin"):
                    observer.begin(in_words(groups))
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
    )


def rounds_done(federation: Federation) -> int:
    """Return the rounds that were run: fewer than planned where validation data said so."""
    return int(federation.history[-1]["round"]) if federation.history else federation.rounds


def _model_of(federation: Federation, store: InProcess | None, client: int) -> nn.Module:
    """Return the model that a client ends up with: its own, with what the server would send it now."""
    if store is None:
        raise InputError(f"The model of client {client} is at rank 0: ask for it there (if torch's RANK is 0).")
    message = federation.method.send(federation.server, federation.ctx.infos[client], EVALUATE, federation.ctx)
    return store.model(client, federation.ctx, message)


def resume(
    out: str | Path, observers: Sequence[Observer] = (), progress: bool | None = None, rounds: int | None = None
) -> Result:
    """Continue a run that was started from names (models, data and method): all that is needed is in its directory.

    With `rounds`, a finished run goes on to so many rounds in all; the outcome is that of a run that was started with
    them.

    Raises
    ------
    RunDirectoryError
        When the run used objects that only its own script can make again, or more rounds would not be the same.
    """
    if "federation" in RunDirectory.read_config(Path(out)):
        raise RunDirectoryError(
            f"The run in {out} is a real federation: continue it with 'polyfed serve --resume --out {out}' and the "
            "same --keys (or --insecure and --sites) as before."
        )
    config = read_config(out)
    if config.script:
        raise RunDirectoryError(
            f"The run in {out} used {' and '.join(config.script)} from a script: call polyfed.run(..., resume=True) in "
            "that script, with the same arguments."
        )
    if rounds is not None:
        config = prolonged(out, config, rounds)
    return execute(config, out=out, resume=True, observers=observers, progress=progress)


def prolonged(out: str | Path, config: Config, rounds: int) -> Config:
    """Write into a run's directory that it has more rounds, and return its configuration.

    Raises
    ------
    RunDirectoryError
        When a run with more rounds would have been another one from its beginning, or has a step after its last round.
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
    config = replace(config, rounds=rounds)
    directory = RunDirectory.open(Path(out))
    try:
        directory.rewrite_config({**RunDirectory.read_config(Path(out)), **config.dump()})  # sites stay in it
    finally:
        directory.close()
    return config


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
