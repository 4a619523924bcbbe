"""A new client joins a finished run: `add_client("runs/a", "west.csv", model="mlp:2x64", rounds=30, out="runs/b")`.

The earlier run stays as it is. The new one begins where that one ended, with one client more.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyfed.config import Config, Data
from polyfed.core.checkpoint import read_json
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.core.rundir import RunDirectory
from polyfed.core.runstate import Observer
from polyfed.core.samples import Samples
from polyfed.data import Clients, load
from polyfed.data.dataset import content_hash, measure, plural
from polyfed.execute import check_longer, execute
from polyfed.result import Result
from polyfed.stored import read_config

ENCODED = ("table", "text")  # kinds of rows that become numbers by a form


def add_client(
    run: str | Path,
    data: Any,
    *,
    model: str,
    rounds: int,
    out: str | Path,
    name: str | None = None,
    test: Any = None,
    label: str | Sequence[str] | None = None,
    clients: Clients | None = None,
    observers: Sequence[Observer] = (),
    progress: bool | None = None,
) -> Result:
    """Let a new client join a finished run, which then goes on with it, in another directory.

    The others and the server are as the run left them; the new client has what the method gives a client that takes
    part for the first time. Its rows become numbers as those of the run do: same columns, words, scaling and classes.

    Parameters
    ----------
    run
        The directory of the finished run. Nothing in it changes.
    data
        The new client's data, as `load` takes it: a file, a data frame, a pair of arrays, a torch Dataset.
    model
        Its network (or learner), as a string; `=FILE` behind it names weights to begin with.
    rounds
        Go on to so many rounds in all.
    out
        A new directory; where it holds this very request already, that is taken up where it stopped.
    name
        The new client's name; None: `new`, where the others have names.
    test
        Its own test data; None: a fifth of its rows.
    label
        The label column, where it is not called as in the run.
    clients
        The clients of the run, where these came from a script.

    Raises
    ------
    InputError
        If the run cannot go on, or the data is not of its kind.
    """
    run, out = Path(run), Path(out)
    config = read_config(run)
    _check(run, config, rounds, clients)
    before = clients if clients is not None else config.data.load(config.seed)
    if before.fingerprint != config.fingerprint:
        raise RunDirectoryError(f"The clients are not those of the run in {run}: give them as the run had them.")
    now = with_client(before, data, name, test, label or config.data.label, config.data.resize)
    names = config.models.names
    dealt = tuple(names[number % len(names)] for number in range(len(before)))
    config = replace(
        config,
        rounds=rounds,
        data=Data.of(now, config.seed),
        models=replace(config.models, names=(*dealt, model)),
        script=("data",),
        fingerprint=now.fingerprint,
    )
    fresh = not (out / "config.json").is_file()
    if fresh:
        _begin(run, out, config)
    try:
        return execute(config, now, config.models.names, out, True, observers, progress)
    except InputError:  # before any training: a second try begins anew
        if fresh:
            shutil.rmtree(out)
        raise
    except (KeyError, RuntimeError, ValueError) as error:
        if not fresh or model in dealt or (out / "history.jsonl").read_bytes() != (run / "history.jsonl").read_bytes():
            raise
        shutil.rmtree(out)  # a method that lays out its memory by the architectures that it began with
        raise InputError(
            f"{config.label} cannot take {model} into a run that began without it ({type(error).__name__}): give the "
            "new client an architecture that others have."
        ) from error


def _check(run: Path, config: Config, rounds: int, clients: Clients | None) -> None:
    if "federation" in RunDirectory.read_config(run):
        raise RunDirectoryError(
            f"The run in {run} is a real federation: a new site gets a key ('polyfed keys add'), and takes part when "
            f"the server goes on ('polyfed serve --resume --rounds {rounds} --out {run}')."
        )
    if not (run / "result.json").is_file():
        raise RunDirectoryError(f"The run in {run} is not finished: 'polyfed resume {run}' ends it.")
    objects = [part for part in config.script if part != "data" or clients is None]
    if objects:
        how = "pass them (clients=...)" if objects == ["data"] else "a client can join runs whose parts have names"
        raise RunDirectoryError(f"The run in {run} used {' and '.join(objects)} from a script: {how}.")
    check_longer(run, config, rounds)
    index = read_json(run / "checkpoint" / "index.json", sealed=True)
    reasons = {
        "an earlier version of polyfed wrote it": "clients" not in index,
        f"it has {index['round']} rounds already": rounds <= index["round"],
        "it stopped early (patience)": index["round"] < config.rounds,
        "its differential privacy was planned for the clients that it had": config.privacy.on,
        "who is malicious was drawn among the clients that it had": config.trust.attack is not None,
        "its clients' states are Flower's (engine flower)": config.execution.engine == "flower",
        "all its data is in one place": config.method.pools_data,
    }
    for reason, holds in reasons.items():
        if holds:
            raise RunDirectoryError(f"No client can join the run in {run} up to round {rounds}: {reason}.")


def _begin(run: Path, out: Path, config: Config) -> None:
    """Write a directory in which the new run stands where the earlier one ended."""
    directory = RunDirectory.create(out, config.dump())
    try:
        shutil.copy(run / "history.jsonl", out / "history.jsonl")
        shutil.copytree(run / "checkpoint", out / "checkpoint")
    except BaseException:
        (out / "config.json").unlink()  # or a second try would take this for a run
        raise
    finally:
        directory.close()


def with_client(
    clients: Clients, data: Any, name: str | None, test: Any, label: str | Sequence[str] | None, resize: Any = None
) -> Clients:
    """Return clients and one more, whose rows become numbers as theirs do.

    Raises
    ------
    InputError
        If its rows are of another kind, or have labels that the others do not know.
    """
    form = clients.form
    called = name or ("new" if clients.names else str(len(clients)))
    if called in clients.names:
        raise InputError(f"There is a client '{called}' already: give the new one another name.")
    whole = load(
        data,
        test=test,
        name=called,
        label=label,
        resize=resize,
        inputs=[column.name for column in form.columns] or None,
        kind=form.kind if form.kind in (*ENCODED, "tokens", "signal", "image") else None,
        form=form if form.kind in ENCODED else None,
        class_names=clients.class_names,
        normalize=False,
        cache=False,
        task=clients.task,
    )
    own = clients.recipe.get("scaling") == "own"
    old = clients.train[0]
    kinds = [(tuple(part.x.shape[1:]), part.x.dtype, part.scaling.divisor) for part in (whole.train, old)]
    if kinds[0] != kinds[1]:
        found, expected = (f"shape {shape} ({dtype}, divided by {by:g})" for shape, dtype, by in kinds)
        raise InputError(f"Samples of client {called} have {found}, but those of the run have {expected}.")
    if (whole.class_names, whole.task) != (clients.class_names, clients.task):
        raise InputError(
            f"Client {called} has other {plural(whole.task)} ({', '.join(whole.class_names)}) than the run "
            f"({', '.join(clients.class_names)}): bring them to one list."
        )
    scaling = measure(whole.train.x[whole.train.rows()], old.scaling.divisor, form) if own else old.scaling
    train, tested = (Samples(part.x, part.y, part.index, scaling) for part in (whole.train, whole.test))
    return replace(
        clients,
        train=(*clients.train, train),
        validation=(*clients.validation, None),
        own_test=(*(clients.own_test or (None,) * len(clients)), tested),
        names=(*clients.names, called) if clients.names else (),
        fingerprint=hashlib.sha256(f"{clients.fingerprint}|{called}|{content_hash(whole)}".encode()).hexdigest(),
        recipe={**clients.recipe, "clients": len(clients) + 1, "repeatable": False},
        notes=(*clients.notes, *whole.notes),
    )
