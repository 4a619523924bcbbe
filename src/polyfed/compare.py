"""Several methods over several seeds on identical splits and initial weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyfed.api import configured, execute, prepare
from polyfed.arguments import as_method, as_metrics, as_models
from polyfed.config import Config
from polyfed.core.checkpoint import read_json, write_json
from polyfed.core.errors import InputError, PolyfedError, TrainingError
from polyfed.core.lock import Lock
from polyfed.core.method import Method
from polyfed.core.metrics import Function
from polyfed.core.settings import Training
from polyfed.data import Clients
from polyfed.engines.known import KnownStages
from polyfed.experiment import Experiment
from polyfed.jobs import Together
from polyfed.processes import CutOff, Here, Job, Observer, Summary
from polyfed.rows import REFERENCE, Row, Rows, summarize
from polyfed.specs import ModelSpec
from polyfed.stored import check_same
from polyfed.sweep import Try, best, check_measured, tries
from polyfed.terminal.live import showing_several
from polyfed.terminal.progress import Ahead, Place
from polyfed.terminal.tables import RECONSTRUCTION

SWEEP = "sweep"  # folder of all tries; those that were chosen are named in comparison.json


Started = Callable[[Config, Place], Sequence[Observer]]  # those with a method `close` are closed when their run ends


Methods = Mapping[str, "Method | type[Method] | str"] | Sequence["Method | type[Method] | str"]


def compare(
    experiment: Experiment | Methods,
    labels: Sequence[str] | None = None,
    seeds: int | None = None,
    out: str | Path | None = None,
    started: Started | None = None,
    jobs: int | str = "auto",
    *,
    reference: bool = True,
    clients: Clients | Callable[[int], Clients] | None = None,
    models: Sequence[ModelSpec] | Mapping[Any, ModelSpec] | ModelSpec = ("mlp:2",),
    rounds: int = 10,
    training: Training | None = None,
    seed: int = 0,
    feature_dim: int | None = None,
    metrics: Sequence[str | Function] | str = (),
    evaluate: str | int = 1,
) -> Rows:
    """Run methods x seeds; with `local` as the reference row. Finished runs in `out` are kept and not run again.

    Where an experiment has a sweep, every method runs with each of its tries, and its row is the try that is best on
    validation data.

    Parameters
    ----------
    experiment
        An experiment from a file; or methods, as names, classes or objects, or a table of them by label. What follows
        `jobs` is for methods: an experiment says it itself.
    labels
        Which methods of an experiment.
    seeds
        How many, from `seed` on (an experiment's own number, else 3).
    out
        A new directory for all runs, for `polyfed report`.
    started
        A function that is called before each run of an experiment and returns its observers.
    jobs
        How many runs of an experiment go on at once, each in a process of its own; the results are the same. `auto`: as
        many as there are cores and memory for, once the work ahead is worth starting other processes (`polyfed.jobs`).
        Methods on data that came as objects run one after the other.
    reference
        Whether `local` is added to the methods of an experiment.
    clients
        Data as in `run`, the same for all seeds; or a function from the seed to it.
    models, rounds, training, seed, feature_dim, metrics, evaluate
        As in `run`, the same for all methods.

    Raises
    ------
    InputError
        Before the first run, when any of the methods does not fit the models or data, or `out` holds a run with other
        settings.
    TrainingError
        After the last run, when some of them went wrong.
    """
    if not isinstance(experiment, Experiment):
        if clients is None:
            raise InputError("compare needs data: clients=..., from polyfed.split or Clients.from_parts.")
        if as_jobs(jobs) not in (None, 1):
            raise InputError(
                f"jobs={jobs} is not possible with data and networks as objects, which cannot be handed to other "
                "processes: their runs go one after the other, each on all cores. An experiment from a file can."
            )
        how = {"rounds": rounds, "training": training or Training(), "networks": (feature_dim, "linear")}
        how |= {"evaluation": (evaluate, None, None, None)}
        load = clients if callable(clients) else lambda seed: clients
        listed = as_models(models, lambda: load(seed))
        return _compare_objects(experiment, load, listed, as_metrics(metrics), seeds or 3, seed, out, how)
    seeds = experiment.seeds if seeds is None else seeds
    if seeds < 1:
        raise InputError(f"seeds must be at least 1, got {seeds}.")
    labels = list(dict.fromkeys(labels or experiment.compare or (experiment.base.label,)))
    if reference and REFERENCE not in labels:
        labels.insert(0, REFERENCE)
    if experiment.sweep:
        check_measured(experiment, labels)
    tried = tries(experiment, labels) if experiment.sweep else [Try(label, {}, {}) for label in labels]
    first, at_once = experiment.base.seed, as_jobs(jobs)
    here = Here()
    folder = Path(out) if out is not None else None
    runs = [_planned(experiment, choice, seed, folder) for seed in range(first, first + seeds) for choice in tried]
    for run in runs[: len(tried)]:
        config = run.config
        prepare(config.method, here.clients(config), config.models.names, config.settings(), config.models)
    if folder is None:
        return Rows(_rows(experiment, tried, _all(runs, here, started, at_once))[0])
    with Lock(folder):
        rows, told = _rows(experiment, tried, _all(runs, here, started, at_once))
        content = {"experiment": experiment.dump(), "rows": [vars(row) for row in rows]}
        write_json(folder / "comparison.json", {**content, "sweep": told} if told else content)
    return Rows(rows)


def _compare_objects(
    given: Methods,
    load: Callable[[int], Clients],
    models: Sequence[ModelSpec],
    metrics: Sequence[str | Function],
    seeds: int,
    first: int,
    out: str | Path | None,
    how: Mapping[str, Any],
) -> Rows:
    """Compare methods on data and networks that came as objects."""
    listed = [given] if isinstance(given, str | Method | type) else given
    named = dict(listed) if isinstance(listed, Mapping) else {as_method(m).name: m for m in listed}
    if REFERENCE not in named:
        named = {REFERENCE: REFERENCE, **named}
    folder = Path(out) if out is not None else None

    def config_of(label: str, seed: int) -> Config:
        return configured(named[label], load(seed), models, metrics, label, seed=seed, **how)

    for label in named:  # nothing trains before all of them are known to fit
        config = config_of(label, first)
        prepare(config.method, load(first), models, config.settings(), config.models)
    results: dict[str, list[dict[str, Any]]] = {label: [] for label in named}
    for seed in range(first, first + seeds):
        known, data = KnownStages(), load(seed)
        for label in named:
            config = config_of(label, seed)
            place = folder / folder_of(config) if folder else None
            begun = place is not None and (place / "config.json").is_file()
            done = execute(config, data, models, place, begun, progress=False, known=known, metrics=metrics)
            results[label].append(done.summary())
    rows = Rows(replace(row, reconstructed=_reconstructed(as_method(named[row.method]))) for row in summarize(results))
    if folder is not None:
        dumped = {**config_of(next(iter(named)), first).dump(), "compare": list(named), "seeds": seeds}
        write_json(folder / "comparison.json", {"experiment": dumped, "rows": [vars(row) for row in rows]})
    return rows


def as_jobs(jobs: int | str) -> int | None:
    """Return how many runs are to go on at once; None: whatever suits the machine.

    Raises
    ------
    InputError
        For anything but `auto` and numbers from 1.
    """
    if jobs == "auto":
        return None
    if not str(jobs).isdigit() or int(jobs) < 1:
        raise InputError(f"jobs is 'auto' or a number from 1, not {jobs!r}.")
    return int(jobs)


def _planned(experiment: Experiment, choice: Try, seed: int, out: Path | None) -> Job:
    config = choice.of(experiment).config(choice.label, seed)
    if not experiment.sweep:
        return Job(choice.label, config, out / folder_of(config) if out else None)
    place = folder_of(config)
    name = f"{SWEEP}/{place.parent}/{choice.folder()}"
    return Job(name, config, out / name / place.name if out else None, choice.folder())


def _all(runs: Sequence[Job], here: Here, started: Started | None, jobs: int | None) -> dict[str, list[Summary]]:
    """Run, continue, or read every run; return the results by name, in the order of seeds."""
    for run in runs:
        if run.folder is not None and (run.folder / "config.json").is_file():
            # nothing trains before all of them are known to be the same
            check_same(run.folder, replace(run.config, fingerprint=here.clients(run.config).fingerprint))
    done = {run: read_json(run.folder / "result.json") for run in runs if run.folder and is_finished(run.folder)}
    ahead = Ahead([run.name for run in runs])
    for run, summary in done.items():
        ahead.begin(run.name)
        ahead.took(run.name, summary["cost"]["seconds"]["total"])

    show = showing_several()

    def begin(run: Job, at_once: int) -> Sequence[Observer]:
        place = replace(ahead.begin(run.name, at_once), what=run.what)
        if started is not None:
            return started(run.config, place)
        return show(run.config.label, run.config.planned_rounds(), place)

    def ended(run: Job, summary: Summary) -> None:
        ahead.took(run.name, summary["cost"]["seconds"]["total"])

    todo = [run for run in runs if run not in done]
    found = dict(zip(todo, Together(todo, jobs, begin, ended, here).run(), strict=True)) | done
    _complain(runs, {run: error for run, error in found.items() if isinstance(error, PolyfedError)})
    results: dict[str, list[Summary]] = {run.name: [] for run in runs}
    for run in runs:
        results[run.name].append(found[run])
    return results


def is_finished(folder: Path) -> bool:
    """Tell whether a folder holds a run that came to its end."""
    return (folder / "result.json").is_file()


def _complain(runs: Sequence[Job], failed: Mapping[Job, PolyfedError]) -> None:
    """Raise one error for all runs that went wrong: those that diverged, then those whose process was killed."""
    for kind, what in ((TrainingError, "failed"), (CutOff, "were cut off")):
        told = [
            f"{run.config.label} with seed {run.config.seed}{f' and {run.what}' if run.what else ''} ({error})"
            for run, error in failed.items()
            if isinstance(error, kind)
        ]
        if not told:
            continue
        kept = " and kept" if runs[0].folder else ""
        advice = ": change these settings in a new directory" if kept else ""
        if kind is CutOff:
            advice = ": the same command goes on with these (fewer --jobs need less memory)" if kept else ""
        raise kind(f"{len(told)} of {len(runs)} runs {what}, the others are finished{kept}{advice}. " + "; ".join(told))


def _rows(
    experiment: Experiment, tried: Sequence[Try], results: dict[str, list[dict[str, Any]]]
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Return a row for each method, and, of a sweep, every try: its values, what it reached, and whether it is it."""
    labels = list(dict.fromkeys(choice.label for choice in tried))
    methods = {label: experiment.config(label).method for label in labels}
    alone = [label for label in labels if methods[label].name == REFERENCE]

    def told_of(row: Row, **more: Any) -> Row:
        differs = experiment.own_settings(row.method) | more.pop("values", {})
        return replace(row, differs=differs, reconstructed=_reconstructed(methods[row.method]), **more)

    if not experiment.sweep:
        return [told_of(row) for row in summarize(results, alone)], []
    told: list[dict[str, Any]] = [
        {
            "method": choice.label,
            "values": choice.values,
            "folder": name,
            "validation": [run["accuracy"]["validation"]["mean"] for run in runs],
            "accuracy": [run["accuracy"]["mean"] for run in runs],
        }
        for choice, (name, runs) in zip(tried, results.items(), strict=True)
    ]
    by_label = {label: [one for one in told if one["method"] == label] for label in labels}
    chosen = best({label: [one["validation"] for one in each] for label, each in by_label.items()})
    winners = {label: by_label[label][place] for label, place in chosen.items()}
    rows = [
        told_of(row, values=winner["values"], tries=len(by_label[row.method]))
        for row, winner in zip(
            summarize({label: results[winner["folder"]] for label, winner in winners.items()}, alone),
            winners.values(),
            strict=True,
        )
    ]
    return rows, [{**one, "chosen": one is winners[one["method"]]} for one in told]


def _reconstructed(method: Method) -> bool:
    return method.paper.endswith(RECONSTRUCTION)


def folder_of(config: Config) -> Path:
    """Return where a comparison keeps a run."""
    return Path(config.label.replace("/", "-").replace(" ", "_")) / f"seed-{config.seed}"
