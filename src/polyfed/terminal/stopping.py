"""Ctrl-C during a run: the round is finished and saved, then the run stops; a second one stops at once.

Under torchrun one Ctrl-C may come twice, from the terminal and from the launcher, which passes it on; nothing tells
them apart. The second one there interrupts the launcher while it waits for its processes, so it ends them with SIGTERM
(`engines/link.py` answers that): SIGINT asks for the end of the round only, however often it comes.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console

from polyfed.core.errors import PolyfedError
from polyfed.core.launch import world_size
from polyfed.terminal.tables import say


class Stopped(PolyfedError):
    """The user stopped the run; what was done is saved where there is a directory."""


class Stopper:
    """Turns Ctrl-C into a stop at the next checkpoint: an observer that raises after the round was saved."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.running = False  # before a run has begun there is nothing to finish
        self.asked = False

    def __call__(self, line: dict[str, Any]) -> None:
        """Stop here if somebody asked to."""
        if self.asked:
            raise Stopped(f"Stopped after round {line['round']}.")

    def request(self, number: int, frame: FrameType | None) -> None:
        """Answer the first Ctrl-C; the second one interrupts at once, where no launcher takes care of it."""
        if not self.running or (self.asked and world_size() == 1):
            raise KeyboardInterrupt
        if self.asked:
            return
        self.asked = True
        if self.console.is_terminal:  # the view says it; printing from here could meet a redraw half done
            return
        say(self.console, "Stopping after this round (Ctrl-C again: at once) ...")


@contextmanager
def stoppable(console: Console) -> Iterator[Stopper]:
    """Let Ctrl-C stop a run cleanly inside the block."""
    stopper = Stopper(console)
    try:
        earlier = signal.signal(signal.SIGINT, stopper.request)
    except ValueError:  # not the main thread: signals stay as they are
        yield stopper
        return
    try:
        yield stopper
    finally:
        signal.signal(signal.SIGINT, earlier)
