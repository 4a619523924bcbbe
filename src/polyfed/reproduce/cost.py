"""How long a run takes on this machine: as its other seeds took, or calculated from the arithmetic of its networks.

    seconds = factor · (steps · overhead · layers + operations / speed)

`overhead` and `speed` are measured in a second or two (`calibrate`); `layers` are those of a network, in those of the
perceptron whose overhead was measured; `factor` says how much more than plain training a method does. Perceptrons
have a speed of their own, and where the engine stacks them (`polyfed.engines.auto`) all clients of a round take a step
together, for one overhead. Networks that a comparison trains once are counted once.
`results/reproductions/costs.json` keeps the estimates of one machine, so that pages can tell them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median

import torch
from torch import nn

from polyfed.config import Config
from polyfed.core.checkpoint import read_json, write_json
from polyfed.core.errors import PolyfedError
from polyfed.core.method import Method
from polyfed.engines.auto import OTHERS, PERCEPTRONS
from polyfed.reproduce.entries import Case, Entry
from polyfed.reproduce.results import FOLDER, Result, missing, read_result, runs_in_all

FILE = FOLDER / "costs.json"
SMALL = "mlp:1x16"  # whose steps are all overhead
ONE_SHOT = ("ams", "ensemble", "oneshot_fedavg", "pfnm")  # of equal settings: the second begins with known networks
AGAIN = 0.1  # of the first: fusing and measuring
USUAL = 1.3  # a method that has no factor of its own: sending, averaging and bookkeeping
FACTORS = {  # rough: measured against plain training where runs exist
    "ensemble": 0.1, "oneshot_fedavg": 0.1, "pfnm": 0.5,  # after ams: equal networks are trained once
    "local": 1.0, "fedavg": 1.1, "fedin": 2.2, "inco": 1.2, "moon": 2.5, "fedfd": 2.0, "feddf_hetero": 1.8,
    "fedgd": 15.0, "fedgen": 2.5, "fedgen_hetero": 2.5, "dafkd_hetero": 4.0, "msfkd": 2.0, "fedmd": 3.0,
    "fedmd_global": 7.0, "fedvtc": 9.0, "fedtype": 3.0, "pfedafm": 3.0, "scalefl": 2.0, "fedfd_student": 3.0,
}  # fmt: skip


@dataclass(frozen=True)
class Speed:
    """Of a machine: operations in a second on images, and seconds that a step of `SMALL` takes beside them."""

    operations: float
    overhead: float
    perceptrons: float = 4e10  # operations in a second of a stack of them, with the optimizer's work


def calibrate(repeats: int = 3) -> Speed:
    """Measure this machine on one thread: a step of a perceptron, and a step of a small convolutional network."""
    from polyfed.models import build

    def step(spec: str, shape: tuple[int, ...], batch: int) -> float:
        network = build(spec, shape, 10)
        optimizer = torch.optim.Adam(network.parameters())
        x, y = torch.zeros(batch, *shape), torch.zeros(batch, dtype=torch.int64)
        times = []
        for _ in range(repeats + 1):
            start = time.thread_time()  # others may be at work on this machine
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
            times.append(time.thread_time() - start)
        return min(times[1:])

    from polyfed.core.threads import one_thread

    def stack(clients: int = 10, batch: int = 64) -> float:
        sizes = ((784, 100), (100, 10))
        weights = [torch.zeros(clients, *size, requires_grad=True) for size in sizes]
        optimizer = torch.optim.Adam(weights)
        x, times = torch.zeros(clients, batch, 784), []
        for _ in range(repeats + 1):
            start = time.thread_time()
            optimizer.zero_grad()
            (x @ weights[0]).relu().matmul(weights[1]).square().mean().backward()
            optimizer.step()
            times.append(time.thread_time() - start)
        return 6 * clients * batch * sum(a * b for a, b in sizes) / min(times[1:])  # three passes of 2ab

    with one_thread():
        perceptrons = stack()
        overhead = step(SMALL, (1, 8, 8), 16)
        shape, batch = (3, 32, 32), 32
        seconds = step("resnet10:w16", shape, batch) - overhead * layers("resnet10:w16", shape)
    return Speed(3 * batch * operations("resnet10:w16", shape) / seconds, overhead, perceptrons)


@lru_cache(maxsize=256)
def operations(spec: str, shape: tuple[int, ...]) -> int:
    """Return the operations of one sample's forward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    from polyfed.core.nets import EVAL, mode

    with torch.device("meta"):
        network = _shaped(spec, shape)
        with FlopCounterMode(display=False) as counter, torch.no_grad(), mode(network, EVAL):
            network(torch.zeros(1, *shape))
    return int(counter.get_total_flops())


@lru_cache(maxsize=256)
def layers(spec: str, shape: tuple[int, ...]) -> float:
    """Return how many layers a network has, in those of the small perceptron."""
    return _leaves(_shaped(spec, shape)) / _leaves(_shaped(SMALL, shape))


def _shaped(spec: str, shape: tuple[int, ...]) -> nn.Module:
    """Return a network of shapes without numbers: a ResNet-152 takes no longer than a perceptron."""
    from polyfed.models import build

    with torch.device("meta"):
        return build(spec, shape, 10)


def _leaves(network: nn.Module) -> int:
    return sum(not any(True for _ in part.children()) for part in network.modules())


def seconds_of(config: Config, speed: Speed) -> float:
    """Return roughly how long a run takes."""
    rows, shape = _data(config)
    names = config.models.names
    forward = fmean(operations(name, shape) for name in names)
    overhead = speed.overhead * fmean(layers(name, shape) for name in names)
    clients = config.data.clients or 10
    share = config.participation.share if config.participation.share is not None else 1.0
    rounds, training = config.planned_rounds(), config.training
    shared = config.data.partition.startswith("labels")  # every client has all samples of its labels
    samples = rows[0] * (0.45 * clients if shared else 1.0) * share
    trained = samples * training.epochs * rounds
    steps = trained / training.batch_size
    every = config.evaluation.every or rounds
    measured = rows[1] * clients * max(1, rounds // every)
    factor = FACTORS.get(config.method.name, USUAL)
    flat = all(name.startswith("mlp") for name in names)
    together = clients * share if flat and config.execution.engine in ("auto", "batched") else 1.0
    needed = PERCEPTRONS if type(config.method).loss is Method.loss else OTHERS  # as the engine asks for
    steps /= together if together >= needed else 1.0
    rate = speed.perceptrons if flat else speed.operations
    return factor * (steps * overhead + 3 * forward * trained / rate) + forward * measured / rate


def _data(config: Config) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return the rows for training and testing, and the shape of an input, without loading anything."""
    from polyfed.data.catalog import KNOWN

    known = KNOWN[config.data.source.partition("/")[0].partition(":")[0]]
    given = config.data.limit
    limits = given if isinstance(given, tuple) else (given, given)
    train, test = (min(n, limit) if limit else n for n, limit in zip(known.rows, limits, strict=True))
    size = config.data.resize
    sides = known.shape[1:] if size is None else (size, size) if isinstance(size, int) else size
    return (train, test), (known.shape[0], *sides)


def guess(speed: Speed) -> Callable[[Config], float]:
    """Return what guesses the seconds of a run; one that cannot be guessed counts as nothing."""

    def seconds(config: Config) -> float:
        try:
            return seconds_of(config, speed)
        except (PolyfedError, KeyError, RuntimeError, ValueError):
            return 0.0

    return seconds


def is_timed(entry: Entry, scale: str, result: Result | None) -> bool:
    """Tell whether every row of every case has been run at least once, so that nothing need be guessed."""
    if result is None or entry.kind in ("count", "study"):
        return False
    for case in entry.cases(scale):
        runs = result.cases[case.name].runs if case.name in result.cases else {}
        for label in entry.experiment(scale, case).compare:
            if not any("seconds" in values for values in runs.get(label, {}).values()):
                return False
    return True


def minutes_of(entry: Entry, scale: str, root: Path, seconds: Callable[[Config], float]) -> float:
    """Return the minutes of all runs of an entry at a scale: those that their like took, or as guessed."""
    if entry.kind in ("count", "study"):
        return 0.5
    result = read_result(root, entry, scale)
    whole = 0.0
    for case in entry.cases(scale):
        seeds = entry.experiment(scale, case).seeds
        whole += seeds * sum(seconds_by_label(entry, scale, case, result, seconds).values())
    return round(whole / 60, 1)


def seconds_by_label(
    entry: Entry, scale: str, case: Case, result: Result | None, seconds: Callable[[Config], float]
) -> dict[str, float]:
    """Return how long a run of each label of a case takes: as those with other seeds did, or as guessed."""
    made = entry.experiment(scale, case)
    runs = result.cases[case.name].runs if result is not None and case.name in result.cases else {}
    begun: set[str] = set()
    found = {}
    for label in made.compare:
        config = made.config(label)
        known = [values["seconds"] for values in runs.get(label, {}).values() if "seconds" in values]
        found[label] = median(known) if known else seconds(config)
        if config.method.name in ONE_SHOT and not known:  # networks of earlier calls are forgotten
            found[label] *= AGAIN if config.method.name in begun else 1.0
            begun.add(config.method.name)
    return found


def write_costs(root: Path, entries: list[Entry], speed: Speed) -> None:
    """Keep the estimates of this machine for the pages."""
    seconds = guess(speed)
    found = {one.path: {scale: minutes_of(one, scale, root, seconds) for scale in one.scales} for one in entries}
    write_json(root / FILE, {"speed": asdict(speed), "minutes": found})


def read_costs(root: Path) -> dict[str, dict[str, float]]:
    """Return the minutes that were kept, by entry and scale."""
    return dict(read_json(root / FILE)["minutes"]) if (root / FILE).is_file() else {}


def stored_speed(root: Path) -> Speed | None:
    """Return the speed of the machine whose estimates were kept."""
    return Speed(**read_json(root / FILE)["speed"]) if (root / FILE).is_file() else None


def in_words(minutes: float) -> str:
    """Return a guess in a unit that one can picture."""
    for size, unit in ((60 * 24 * 365, "years"), (60 * 24, "days"), (60, "hours")):
        if minutes >= 2 * size:
            return f"about {minutes / size:,.0f} {unit}"
    return f"about {minutes:.0f} min" if minutes >= 1.5 else "about a minute"


def left(entry: Entry, scale: str, result: Result | None, minutes: float | None) -> str:
    """Return what is not run yet and about how long it takes (empty: nothing), if the whole takes so many minutes."""
    if result is None:
        return "not measured" if minutes is None else f"not measured, {in_words(minutes)}"
    lacking, total = len(missing(entry, scale, result)), runs_in_all(entry, scale)
    if not lacking:
        return ""
    price = "" if minutes is None else f", the rest {in_words(minutes * lacking / total)}"
    return f"{total - lacking} of {total} runs with the settings of today{price}"
