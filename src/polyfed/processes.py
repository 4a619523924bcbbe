"""One run of several: done in this process, or in another one.

Another process (`python -m polyfed.processes`) gets one run after the other; configurations, finished rounds and
results go over its pipes as lines of JSON. A helper that is killed cuts off its run only; one whose asker is gone ends
at once. Both leave directories that the same command goes on from.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
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
from polyfed.core.errors import PolyfedError
from polyfed.data import Clients
from polyfed.engines.known import BUDGET, KnownStages

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
            [sys.executable, "-m", "polyfed.processes", str(budget)],
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
