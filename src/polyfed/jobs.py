"""Several runs at once, where single runs cannot fill the machine: `compare` and what is built on it use this.

The process that asks works as well, in its main thread. Each helper is a fresh process (`python -m polyfed.jobs`) to
which a thread here gives one run after the other; configurations, finished rounds and results go over its pipes as
lines of JSON. A run's numbers depend on its configuration alone, so they are the same wherever it ran, to the bit. Runs
of one seed go to one process as far as possible: what they train alike is trained once there (`engines/known.py`).

A helper that is killed cuts off its run only; one whose asker is gone ends at once. Both leave directories that the
same command goes on from.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from polyfed.api import execute
from polyfed.config import Config, Data
from polyfed.core import errors
from polyfed.core.cost import peak_memory
from polyfed.core.errors import InputError, PolyfedError, TrainingError
from polyfed.data import Clients
from polyfed.engines.known import BUDGET, KnownStages

WORTHWHILE = 20.0  # seconds of work ahead for which helpers are started: each needs a few to load torch
SAME_BITS = ("auto", "threads", "sequential")  # engines whose numbers do not depend on how many cores a run has

Summary = dict[str, Any]  # the content of `result.json`
Observer = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, eq=False)
class Job:
    """One run of several: what it does, and where it is kept (None: nowhere)."""

    name: str
    config: Config
    folder: Path | None = None
    what: str = ""  # what tells it from others of its name: the values that it tries


class CutOff(PolyfedError):
    """The process of a run ended before the run did; what it had saved is there."""


class Failed(RuntimeError):
    """Something that nobody foresaw happened in another process; its traceback is in the text."""


class Here:
    """Runs configurations in this process; what runs of one seed train alike is trained once."""

    def __init__(self, budget: int = BUDGET) -> None:
        self.budget = budget
        self.data: tuple[Data, int] | None = None
        self.loaded: Clients | None = None
        self.known = KnownStages(budget)

    def clients(self, config: Config) -> Clients:
        """Return the data of a run; that of the latest one is kept."""
        if self.loaded is None or (config.data, config.seed) != self.data:
            self.loaded, self.known = None, KnownStages(self.budget)  # another seed has other data and networks
            self.loaded = config.data.load(config.seed)
            self.data = config.data, config.seed
        return self.loaded

    def run(self, job: Job, cores: int | None, observers: Sequence[Observer]) -> Summary:
        """Run a job, or go on with it, and return its result; `cores`: how many of them it may use (None: all)."""
        begun = job.folder is not None and (job.folder / "config.json").is_file()
        with _at_most(cores):
            done = execute(
                job.config,
                self.clients(job.config),
                out=job.folder,
                resume=begun,
                observers=observers,
                known=self.known,
            )
        return done.summary()


class Helper:
    """A process that runs jobs for this one."""

    def __init__(self, budget: int) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "polyfed.jobs", str(budget)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the process that asks: it tells the helpers
        )
        self.words: deque[str] = deque(maxlen=20)
        self.lock = threading.Lock()  # of the orders: a stop may come from any thread
        threading.Thread(target=self._pass_on, daemon=True).start()

    def run(self, job: Job, cores: int | None, observers: Sequence[Observer]) -> Summary:
        """Let the helper run a job; observers are called here. One that raises stops the run after its next round.

        Raises
        ------
        CutOff
            When the helper ended before the run did.
        """
        folder = str(job.folder.absolute()) if job.folder else None
        self._tell({"name": job.name, "config": job.config.dump(), "folder": folder, "cores": cores})
        asked: BaseException | None = None
        while (answer := self._answer()) is not None:
            if "done" in answer:  # also where an end was asked for: there was no other round
                found: Summary = answer["done"]
                return found
            if "kind" in answer:
                kind = getattr(errors, answer["kind"], None)
                raise kind(answer["text"]) if kind else Failed(f"{answer['text']}\n\n{answer['trace']}")
            if "stopped" in answer:
                raise asked or CutOff("it was stopped")
            if "begin" in answer:
                for observer in observers:
                    if hasattr(observer, "begin"):
                        observer.begin(answer["begin"])
                continue
            try:
                for observer in observers if asked is None else ():
                    observer(answer["line"])
            except BaseException as error:
                asked = error
                self.stop()
        code = self.process.wait()
        how = f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        raise CutOff(f"its process {how}" + (f": {self.words[-1]}" if self.words else ""))

    def stop(self) -> None:
        """Ask for an end after the round at hand."""
        self._tell({"stop": True})

    def close(self) -> None:
        """Let the process end: when it is idle as it likes, else at once."""
        assert self.process.stdin is not None
        with self.lock, suppress(OSError):
            self.process.stdin.close()

    def _answer(self) -> dict[str, Any] | None:
        """Return the next answer; None: the process is gone."""
        assert self.process.stdout is not None
        with suppress(ValueError):  # half a line: it ended in the middle
            found: dict[str, Any] = json.loads(self.process.stdout.readline())
            return found
        return None

    def _tell(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with self.lock, suppress(OSError, ValueError):  # it is gone: whoever waits for its answer learns so
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def _pass_on(self) -> None:
        """Print what the process prints, where a view on this terminal makes room for it."""
        assert self.process.stderr is not None
        for text in self.process.stderr:
            self.words.append(text.rstrip())
            sys.stderr.write(text)


class Together:
    """Jobs, the processes that take them, and what became of them.

    Parameters
    ----------
    jobs
        How many runs at once; None: as many as there are cores (as torch counts them) and memory for, once the work
        ahead is worth starting other processes.
    begin
        Called when a job begins; returns its observers. One that raises stops everything after the rounds at hand.
    ended
        Called with a job and its result.
    here
        What runs jobs in this process, where it has loaded data already.
    """

    def __init__(
        self,
        todo: Sequence[Job],
        jobs: int | None = None,
        begin: Callable[[Job, int], Sequence[Observer]] = lambda job, at_once: (),
        ended: Callable[[Job, Summary], None] = lambda job, summary: None,
        here: Here | None = None,
    ) -> None:
        self.left = list(enumerate(todo))
        self.number = len(self.left)
        self.jobs = jobs
        self.cores = torch.get_num_threads()
        self.begin, self.ended = begin, ended
        self.found: dict[int, Summary | PolyfedError] = {}
        self.error: BaseException | None = None  # what ended all of it
        self.said: set[str] = set()  # how clients work, where it was printed
        self.seeds: Counter[int] = Counter()  # at how many processes a seed is at work
        self.running = 0
        self.here = here or Here()
        self.helpers: list[Helper] = []
        self.threads: list[threading.Thread] = []
        self.lock = threading.RLock()  # of all above, and of everything that observers do
        self.started = time.monotonic()

    def run(self) -> list[Summary | PolyfedError]:
        """Run all of them; return their results, or what went wrong (a TrainingError or CutOff), in their order."""
        if self.jobs is not None:
            self._start(min(self.jobs, self.number) - 1)
        try:
            while self.left and self.error is None:  # a helper may leave one behind
                self._pull(self.here, here=True)
                for thread in self.threads:
                    thread.join()
        except BaseException as error:  # the second Ctrl-C: at once
            self._give_up(error)
            for helper in self.helpers:
                helper.process.kill()
            raise
        finally:
            for helper in self.helpers:
                helper.close()
            for thread in self.threads:
                thread.join()
            for helper in self.helpers:
                helper.process.wait()
        if self.error is not None:
            raise self.error
        return [self.found[place] for place in range(self.number)]

    def _start(self, number: int) -> None:
        self.here.budget = self.here.known.budget = BUDGET // (number + 1)
        for _ in range(number):
            helper = Helper(BUDGET // (number + 1))
            self.helpers.append(helper)
            thread = threading.Thread(target=self._pull, args=(helper,), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _pull(self, worker: Here | Helper, here: bool = False) -> None:
        """Take one job after the other, until there is none or everything stops."""
        seed: int | None = None
        while (taken := self._next(seed)) is not None:
            place, job = taken
            seed = job.config.seed
            observers: Sequence[Observer] = ()
            try:
                with self.lock:
                    at_once = min(1 + len(self.helpers), self.running + len(self.left))
                    cores = max(1, self.cores // at_once) if self.helpers else None
                    observers = [*self.begin(job, at_once), *([self._watch(job)] if here else [])]
                summary = worker.run(job, self._cores(job, cores), [_Guarded(self, one) for one in observers])
                with self.lock:
                    self.found[place] = summary
                    self.ended(job, summary)
            except TrainingError as error:  # one that diverges does not hold up all others
                self.found[place] = error
            except CutOff as error:
                self.found[place] = error
                worker = self._replaced(worker)
            except InputError as error:
                if here:
                    self._give_up(error)
                else:  # it was possible here: this process knows a network or method that a fresh one does not
                    with self.lock:
                        self.left.append(taken)
                    return
            except BaseException as error:
                self._give_up(error)
                if here and not isinstance(error, Exception):
                    raise
            finally:
                with self.lock:
                    self.running -= 1
                    for observer in observers:
                        if hasattr(observer, "close"):
                            observer.close()
            if here and self.jobs is None:
                self._consider(0.0)

    def _next(self, seed: int | None) -> tuple[int, Job] | None:
        """Return a job of the same seed, else of the one that fewest processes are at and that has most jobs left."""
        with self.lock:
            if self.error is not None or not self.left:
                return None
            ahead = Counter(job.config.seed for _, job in self.left)
            if seed is not None:
                self.seeds[seed] -= 1
            if seed is None or seed not in ahead:
                seed = min(ahead, key=lambda other: (self.seeds[other], -ahead[other], other))
            self.seeds[seed] += 1
            self.running += 1
            return self.left.pop(next(i for i, (_, job) in enumerate(self.left) if job.config.seed == seed))

    def _cores(self, job: Job, cores: int | None) -> int | None:
        """Return how many cores a run may use: all, where its numbers depend on it."""
        return cores if job.config.execution.engine in SAME_BITS else self.cores

    def _watch(self, job: Job) -> Observer:
        rounds = job.config.planned_rounds()
        return lambda line: self._consider(line["round"] / max(1, rounds))

    def _consider(self, share: float) -> None:
        """Start helpers once the work ahead is worth it; `share`: how much of the run at hand is done."""
        with self.lock:
            if self.jobs is not None or self.threads or not self.left:
                return
            done = len(self.found) + share
            ahead = (time.monotonic() - self.started) * (self.number - done) / max(done, 1e-9)
            if ahead < WORTHWHILE or any(not is_portable(job.config) for _, job in self.left):
                return
            more = min(self.cores - 1, len(self.left), room(peak_memory()))
            self._start(more)

    def _replaced(self, worker: Here | Helper) -> Helper:
        """Return a helper in the place of one that ended."""
        assert isinstance(worker, Helper)
        helper = Helper(BUDGET // (1 + len(self.helpers)))
        with self.lock:
            self.helpers[self.helpers.index(worker)] = helper
        return helper

    def _give_up(self, error: BaseException) -> None:
        with self.lock:
            self.error = self.error or error
            for helper in self.helpers:
                helper.stop()


class _Guarded:
    """An observer of one of several runs: only one of all of them is called at a time."""

    def __init__(self, together: Together, observer: Observer) -> None:
        self.together = together
        self.observer = observer

    def begin(self, words: str) -> None:
        """Pass on how the clients of the run work; for equal runs once."""
        with self.together.lock:
            if hasattr(self.observer, "begin") and words not in self.together.said:
                self.together.said.add(words)
                self.observer.begin(words)

    def __call__(self, line: dict[str, Any]) -> None:
        """Pass on a finished round."""
        with self.together.lock:
            self.observer(line)
            if self.together.error is not None:
                raise self.together.error


def is_portable(config: Config) -> bool:
    """Tell whether a run can be given to another process, with nothing lost by it."""
    execution = config.execution
    return not config.script and execution.engine in SAME_BITS and execution.device == "cpu"


def room(need: int) -> int:
    """Return how many further processes of a size the free memory holds, with a fifth of it kept back."""
    free = free_memory()
    return int(0.8 * free / max(1, need)) if free is not None else sys.maxsize


def free_memory() -> int | None:
    """Return the bytes of memory that are free on this machine, or in its container (None: the system does not say)."""
    found = []
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024)
    with suppress(OSError, ValueError):  # "max" is no number: no limit
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(found, default=None)


@contextmanager
def _at_most(cores: int | None) -> Iterator[None]:
    """Let torch, and so a run's workers, use at most so many threads inside the block."""
    before = torch.get_num_threads()
    if cores is not None:
        torch.set_num_threads(cores)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- the other process ---


class _Asked(BaseException):
    """Somebody asked for an end after this round."""


def serve(budget: int) -> None:
    """Run what is asked on the standard input, until it is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    stop = threading.Event()
    busy = threading.Event()

    def listen() -> None:
        for text in sys.stdin:
            order = json.loads(text)
            if "stop" in order:
                stop.set()
            else:
                busy.set()
                orders.put(order)
        if busy.is_set():  # whoever asked is gone: the directory is sound at any moment
            os._exit(1)
        orders.put(None)

    def answer(content: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):
            answers.write(json.dumps(content) + "\n")
            answers.flush()

    class Telling:
        def begin(self, words: str) -> None:
            answer({"begin": words})

        def __call__(self, line: dict[str, Any]) -> None:
            answer({"line": line})
            if stop.is_set():
                raise _Asked

    here = Here(budget)
    threading.Thread(target=listen, daemon=True).start()
    while (order := orders.get()) is not None:
        folder = Path(order["folder"]) if order["folder"] else None
        try:
            job = Job(order["name"], Config.load(order["config"]), folder)
            content: dict[str, Any] = {"done": here.run(job, order["cores"], [Telling()])}
        except _Asked:
            content = {"stopped": True}
        except Exception as error:
            content = {"kind": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
        busy.clear()
        answer(content)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
