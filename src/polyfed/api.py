"""`run`: one federation from start to end, in this process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from polyfed import methods
from polyfed.arguments import as_method, as_models, check_arguments
from polyfed.build import ModelSpec, label_of, make_parties, pool
from polyfed.config import Config, Data, Networks, check_same, read_config
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.core.federation import Federation, Line, few
from polyfed.core.method import EVALUATE, Method
from polyfed.core.needs import check_needs
from polyfed.core.party import Blueprint, ClientInfo
from polyfed.core.rundir import RunDirectory
from polyfed.core.settings import Evaluation, Execution, Participation, Settings, Training
from polyfed.data import Clients
from polyfed.engines.inprocess import InProcess, chosen_device
from polyfed.flower import require_flower
from polyfed.result import Models, Result

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
    engine: str = "threads",
    workers: int | None = None,
    device: str = "cpu",
    label: str | None = None,
    observers: Sequence[Observer] = (),
    progress: bool | None = None,
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
    resume
        Continue the run in `out` from its checkpoint.
    engine, workers
        How clients share the machine: `sequential`, `threads` (whole clients on several threads, the same numbers bit
        for bit), `batched` (clients of one architecture as one stack), or `auto`, which times both and keeps the
        faster. By default as many workers as torch uses threads. `flower` runs the apps of a real federation in
        Flower's simulation runtime (Ray), which can use a cluster.
    device
        Where active clients compute: `cpu`, `cuda`, or `auto` (a GPU if there is one).
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
    method, models = as_method(method), as_models(models)
    config = Config(
        method=method,
        label=label or method.name or type(method).__name__,
        rounds=rounds,
        seed=seed,
        data=Data.of(clients, seed),
        models=Networks(tuple(map(described, models)), feature_dim, feature_adapter),  # type: ignore[arg-type]
        training=training or Training(),
        participation=Participation(share=participation) if isinstance(participation, int | float) else participation,
        evaluation=Evaluation(evaluate, evaluate_clients, evaluate_samples),  # type: ignore[arg-type]
        execution=Execution(engine, workers, device, checkpoint_seconds),  # type: ignore[arg-type]
        script=tuple(
            part
            for part, named in (
                ("method", methods.is_importable(type(method))),
                ("data", bool(clients.recipe.get("repeatable"))),
                ("models", all(isinstance(model, str) for model in models)),
            )
            if not named
        ),
    )
    return execute(config, clients, models, out, resume, observers, progress)


def execute(
    config: Config,
    clients: Clients | None = None,
    models: Sequence[ModelSpec] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    progress: bool | None = None,
) -> Result:
    """Run a configuration; data and models are made from it where they are not given.

    Raises
    ------
    InputError
        Before any training, when the request cannot be carried out.
    """
    clients = clients if clients is not None else config.data.load(config.seed)
    models = models if models is not None else config.models.names
    config = replace(config, fingerprint=clients.fingerprint)
    from polyfed.terminal.live import showing

    federation, infos = prepare(config.method, clients, models, config.settings(), config.models)
    if not all(isinstance(model, str) for model in models):
        config = replace(config, networks=structure_of(federation.backend.blueprints))
    directory = _directory(out, config, resume)
    federation.directory = directory
    shown = False if progress is None and observers else progress  # whoever observes shows it
    try:
        with showing(shown, federation.rounds, config.label) as view:
            federation.observers = [*view, *observers]
            if config.execution.engine == "flower":
                require_flower()
                from polyfed.flower.simulation import simulate

                history = simulate(federation, clients, models, config.models, resume)
            else:
                history = federation.run(resume)
        result = _result(config, federation, infos, clients, history)
        if directory is not None:
            result.directory = directory.path
            result.save(directory.path)
        return result
    finally:
        if directory is not None:
            directory.close()


def _result(
    config: Config, federation: Federation, infos: list[ClientInfo], clients: Clients, history: list[Line]
) -> Result:
    backend = federation.backend
    assert isinstance(backend, InProcess)
    return Result(
        method=config.label,
        seed=config.seed,
        rounds=federation.rounds,
        history=history,
        cost=federation.meter,
        architectures=[info.architecture for info in infos],
        samples=[info.samples for info in infos],
        parameters=[info.parameters for info in infos],
        label_counts=clients.label_counts().tolist(),
        class_names=list(clients.class_names),
        config=config.dump(),
        models=Models(sorted(backend.infos), lambda client: _model_of(federation, backend, client)),
        server_model=federation.server.models.get("main"),
        server=federation.server,
        pooled=config.method.pools_data,
    )


def _model_of(federation: Federation, backend: InProcess, client: int) -> nn.Module:
    """Return the model that a client ends up with: its own, with what the server would send it now."""
    message = federation.method.send(federation.server, federation.ctx.infos[client], EVALUATE, federation.ctx)
    return backend.model(client, federation.ctx, message)


def prepare(
    method: Method,
    clients: Clients,
    models: Sequence[ModelSpec],
    settings: Settings,
    networks: Networks = Networks(),  # noqa: B008 (frozen)
) -> tuple[Federation, list[ClientInfo]]:
    """Build a federation and check that everything fits; nothing is trained or written.

    Raises
    ------
    InputError
        When the method does not fit the models or the data.
    """
    device = chosen_device(settings.execution.device)
    settings = replace(settings, execution=replace(settings.execution, device=device))
    outputs = method.outputs(clients.num_classes, clients.own_public_classes())
    infos, data, blueprints = make_parties(
        method, clients, models, outputs, settings.seed, networks.feature_dim, networks.feature_adapter
    )
    check_needs(method, infos, blueprints, clients.public, clients.input_shape, methods.candidates)
    parties, holdings = pool(infos, data) if method.pools_data else (infos, data)
    engine = settings.execution.engine
    federation = Federation(
        method,
        InProcess(
            method,
            parties,
            holdings,
            blueprints,
            clients.test,
            "sequential" if engine == "flower" else engine,  # there the clients are elsewhere
            settings.execution.workers,
            sample=few(clients.test, settings),
        ),
        settings,
        num_classes=clients.num_classes,
        input_shape=clients.input_shape,
        test=clients.test,
        public=clients.public,
        public_classes=outputs - clients.num_classes or None,
    )
    return federation, infos


def resume(out: str | Path, observers: Sequence[Observer] = (), progress: bool | None = None) -> Result:
    """Continue a run that was started from names (models, data and method): all that is needed is in its directory.

    Raises
    ------
    RunDirectoryError
        When the run used objects that only its own script can make again.
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
    return execute(config, out=out, resume=True, observers=observers, progress=progress)


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


def _directory(out: str | Path | None, config: Config, resume: bool) -> RunDirectory | None:
    if out is None:
        if resume:
            raise InputError("resume needs the directory of the earlier run: pass out=...")
        return None
    if not resume:
        return RunDirectory.create(Path(out), config.dump())
    check_same(out, config)
    return RunDirectory.open(Path(out))
