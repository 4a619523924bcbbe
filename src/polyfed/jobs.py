"""Several runs at once, where single runs cannot fill the machine: `compare` and what is built on it use this.

The process that asks works as well, in its main thread. Each helper is a fresh process (`processes.py`) to which a
thread here gives one run after the other. A run's numbers depend on its configuration alone, so they are the same
wherever it ran, to the bit. Runs of one seed go to one process as far as possible: what they train alike is trained
once there (`engines/known.py`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from polyfed.config import Config
from polyfed.core.cost import peak_memory
from polyfed.core.errors import InputError, PolyfedError, TrainingError
from polyfed.engines.known import BUDGET
from polyfed.processes import CutOff, Helper, Here, Job, Observer, Summary

WORTHWHILE = 20.0  # seconds of work ahead for which helpers are started: each needs a few to load torch
SAME_BITS = ("auto", "threads", "sequential")  # engines whose numbers do not depend on how many cores a run has


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
        # A long round tells nothing before its end: by then, another run of its length is worth a process.
        alarm = threading.Timer(WORTHWHILE, self._consider, (0.0,))
        alarm.daemon = True
        alarm.start()
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
            alarm.cancel()
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
            nobody = self.error is not None or len(self.left) == self.number  # at work any more, or yet
            if nobody or self.jobs is not None or self.threads or not self.left:
                return
            done = len(self.found) + share
            passed = time.monotonic() - self.started
            ahead = passed * (self.number - done) / done if done else passed * (self.number - 1)
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
