"""`run` and `resume`: one federation from start to end, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed import methods
from polyfed.arguments import as_method, as_metrics, as_models, check_arguments
from polyfed.config import Config, Data, Networks
from polyfed.core.errors import RunDirectoryError
from polyfed.core.method import Method
from polyfed.core.metrics import Function, make_metrics
from polyfed.core.privacy import Privacy
from polyfed.core.rundir import RunDirectory
from polyfed.core.runstate import Observer
from polyfed.core.settings import Evaluation, Execution, Participation, Training
from polyfed.core.trust import Trust
from polyfed.data import Clients
from polyfed.execute import execute, prolonged
from polyfed.prepare import described, prepare
from polyfed.result import Result
from polyfed.specs import ModelSpec
from polyfed.stored import read_config

__all__ = ["execute", "prepare", "prolonged", "resume", "run"]


def run(
    method: Method | type[Method] | str,
    clients: Clients,
    models: Sequence[ModelSpec] | Mapping[Any, ModelSpec] | ModelSpec = ("mlp:2",),
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
        Model strings (`"resnet10:w16"`), classes or functions that build a module, or modules; dealt in turn, or a
        table with one for each client, by name or number (`{"north": "mlp:2", "south": "resnet10"}`). Modules
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
        How clients share the machine: `auto` (small networks as stacks, all others as with `threads`), `threads` (whole
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
    models, wanted = as_models(models, lambda: clients), as_metrics(metrics)
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
