"""`run`: one federation from start to end, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import nn

from polyfed import methods
from polyfed.arguments import as_method, as_models, as_whole, check_arguments
from polyfed.backends.flower import require_flower
from polyfed.backends.inprocess import InProcess, chosen_device
from polyfed.build import ModelSpec, make_parties, pool
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.core.federation import Federation, Line, Settings, few
from polyfed.core.method import EVALUATE, Method, Participation
from polyfed.core.needs import check_needs
from polyfed.core.party import ClientInfo, Training
from polyfed.core.rundir import RunDirectory
from polyfed.core.stage import OPTIMIZERS
from polyfed.data import Clients, from_recipe
from polyfed.result import Models, Result


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
    config: dict[str, Any] | None = None,
    observers: Sequence[Callable[[Line], None]] = (),
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

    Returns
    -------
    Result
        History, cost, final accuracies and models.

    Raises
    ------
    InputError
        Before any training, when the request cannot be carried out.
    """
    check_arguments(locals())
    method, models = as_method(method), as_models(models)
    rounds, seed = as_whole("rounds", rounds), as_whole("seed", seed)
    participation = Participation(share=participation) if isinstance(participation, int | float) else participation
    settings = Settings(
        rounds,
        seed,
        training or Training(),
        participation,
        evaluation_rounds(evaluate),
        checkpoint_seconds,
        chosen_device(device),
        engine,
        workers,
        evaluate_clients,
        evaluate_samples,
    )
    check_settings(settings)
    federation, infos = prepare(method, clients, models, settings, feature_dim, feature_adapter)
    described = describe_run(method, clients, models, settings, feature_dim, feature_adapter, config)
    directory = federation.directory = _directory(out, described, resume)
    federation.observers = list(observers)
    backend = federation.backend
    assert isinstance(backend, InProcess)
    if engine == "flower":
        require_flower()
        from polyfed.backends.flower.simulation import simulate

        history = simulate(federation, clients, models, feature_dim, feature_adapter, resume)
    else:
        history = federation.run(resume)
    result = Result(
        method=described["label"],
        seed=seed,
        rounds=federation.rounds,
        history=history,
        cost=federation.meter,
        architectures=[info.architecture for info in infos],
        samples=[info.samples for info in infos],
        parameters=[info.parameters for info in infos],
        label_counts=clients.label_counts().tolist(),
        class_names=list(clients.class_names),
        config=described,
        models=Models(sorted(backend.infos), lambda client: _model_of(federation, backend, client)),
        server_model=federation.server.models.get("main"),
        server=federation.server,
        directory=directory.path if directory else None,
        pooled=method.pools_data,
    )
    if directory is not None:
        result.save(directory.path)
    return result


def _model_of(federation: Federation, backend: InProcess, client: int) -> nn.Module:
    """Return the model that a client ends up with: its own, with what the server would send it now."""
    message = federation.method.send(federation.server, federation.ctx.infos[client], EVALUATE, federation.ctx)
    return backend.model(client, federation.ctx, message)


def prepare(
    method: Method,
    clients: Clients,
    models: Sequence[ModelSpec],
    settings: Settings,
    feature_dim: int | None = None,
    feature_adapter: str = "linear",
) -> tuple[Federation, list[ClientInfo]]:
    """Build a federation and check that everything fits; nothing is trained or written.

    Raises
    ------
    InputError
        When the method does not fit the models or the data.
    """
    method.check()
    outputs = method.outputs(clients.num_classes, own_public_classes(clients))
    infos, data, blueprints = make_parties(
        method, clients, models, outputs, settings.seed, feature_dim, feature_adapter
    )
    check_needs(method, infos, blueprints, clients.public, clients.input_shape, known_methods)
    parties, holdings = pool(infos, data) if method.pools_data else (infos, data)
    engine = "sequential" if settings.engine == "flower" else settings.engine  # there the clients are elsewhere
    federation = Federation(
        method,
        InProcess(
            method,
            parties,
            holdings,
            blueprints,
            clients.test,
            engine,
            settings.workers,
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


def resume(out: str | Path, observers: Sequence[Callable[[Line], None]] = ()) -> Result:
    """Continue a run that was started from names (models, data and method): all that is needed is in its directory.

    Raises
    ------
    RunDirectoryError
        When the run used objects that only its own script can make again.
    """
    _, config = RunDirectory.open(Path(out))
    if not config["repeatable"]:
        raise RunDirectoryError(
            f"The run in {out} used models, data or a method from a script: call polyfed.run(..., resume=True) in that "
            "script, with the same arguments."
        )
    return run(
        methods.make(config["method"], config["options"]),
        from_recipe(config["clients"]),
        config["models"],
        config["rounds"],
        Training(**config["training"]),
        config["seed"],
        out,
        participation=Participation(**config["participation"]),
        feature_dim=config["feature_dim"],
        feature_adapter=config["feature_adapter"],
        evaluate=config["evaluate_every"],
        evaluate_clients=config["evaluate_clients"],
        evaluate_samples=config["evaluate_samples"],
        checkpoint_seconds=config["checkpoint_seconds"],
        engine=config["engine"],
        workers=config["workers"],
        device=config["device"],
        resume=True,
        config={"label": config["label"]},
        observers=observers,
    )


def describe_run(
    method: Method,
    clients: Clients,
    models: Sequence[ModelSpec],
    settings: Settings,
    feature_dim: int | None,
    feature_adapter: str,
    config: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return everything needed to run it again, for `config.json`."""
    known = type(method).name in methods.registry() and methods.registry()[method.name] is type(method)
    named = all(isinstance(model, str) for model in models)
    return {
        "method": method.name if known else f"{type(method).__module__}:{type(method).__qualname__}",
        "label": method.name,
        "options": {field.name: getattr(method, field.name) for field in fields(method)},
        "clients": clients.recipe,
        "fingerprint": clients.fingerprint,
        "models": [model if isinstance(model, str) else repr(model) for model in models],
        "rounds": settings.rounds,
        "seed": settings.seed,
        "training": asdict(settings.training),
        "participation": asdict(settings.participation),
        "evaluate_every": settings.evaluate_every,
        "evaluate_clients": settings.evaluate_clients,
        "evaluate_samples": settings.evaluate_samples,
        "checkpoint_seconds": settings.checkpoint_seconds,
        "engine": settings.engine,
        "workers": settings.workers,
        "device": settings.device,
        "feature_dim": feature_dim,
        "feature_adapter": feature_adapter,
        "repeatable": bool(named and known and clients.recipe.get("repeatable")),
        **(config or {}),
    }


def known_methods() -> list[Method]:
    """Return all methods that need no arguments: candidates to name when one does not fit."""
    return [kind() for kind in methods.registry().values() if not kind.pools_data]


def own_public_classes(clients: Clients) -> int | None:
    """Return the number of public classes when public labels are not the clients' own."""
    held_out = isinstance(clients.recipe.get("public"), int | float)
    return None if held_out else clients.public_classes


def evaluation_rounds(evaluate: str | int) -> int:
    """Turn `every=5`, `5` or `end` into a number of rounds (0: only at the end)."""
    text = str(evaluate)
    if text == "end":
        return 0
    number = text.removeprefix("every=")
    if not number.isdigit():
        raise InputError(f"evaluate is 'every=N' or 'end', not '{evaluate}'.")
    return int(number)


def check_settings(settings: Settings) -> None:
    """Refuse numbers that make no sense, with the name of the setting."""
    training, participation = settings.training, settings.participation
    if settings.rounds < 1:
        raise InputError(f"rounds must be at least 1, got {settings.rounds}.")
    for name in ("evaluate_clients", "evaluate_samples"):
        number = getattr(settings, name)
        if number is not None and number < 1:
            raise InputError(f"{name} must be at least 1, got {number}.")
    if training.epochs < 1 or training.batch_size < 1:
        raise InputError(f"epochs and batch_size must be at least 1, got {training.epochs} and {training.batch_size}.")
    if not 0 < training.lr < float("inf"):
        raise InputError(f"lr must be a positive number, got {training.lr}.")
    if training.optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer is one of {', '.join(OPTIMIZERS)}, not '{training.optimizer}'.")
    if not 0 < participation.share <= 1:
        raise InputError(f"participation must be above 0 and at most 1, got {participation.share}.")
    if not 0 <= participation.dropout < 1:
        raise InputError(f"dropout is a share from 0 to below 1, got {participation.dropout}.")
    if participation.who not in ("random", "weakest"):
        raise InputError(f"who drops out is 'random' or 'weakest', not '{participation.who}'.")


def _directory(out: str | Path | None, config: dict[str, Any], resume: bool) -> RunDirectory | None:
    if out is None:
        if resume:
            raise InputError("resume needs the directory of the earlier run: pass out=...")
        return None
    if not resume:
        return RunDirectory.create(Path(out), config)
    directory, earlier = RunDirectory.open(Path(out))
    for key in ("method", "options", "fingerprint", "models", "rounds", "seed", "training", "participation"):
        if _plain(earlier.get(key)) != _plain(config[key]):
            raise RunDirectoryError(
                f"Cannot continue {out}: its {key} was {earlier.get(key)!r}, now it is {config[key]!r}; "
                "use the same settings, or another --out."
            )
    return directory


def _plain(value: Any) -> Any:
    """Compare settings as JSON keeps them: tuples are lists there."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
