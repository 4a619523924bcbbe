"""Methods for runs in helpers of a comparison: one whose process ends in the second round, once, and one that fails."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from polyfed import FedAvg
from polyfed.core.method import Local, Step
from polyfed.core.party import Context, Party


def in_helper() -> bool:
    """Tell whether this is a process that a comparison started."""
    return os.getpid() != int(os.environ["ASKER"])


@dataclass(frozen=True)
class Killed(FedAvg):
    """Its process is killed; the file that ONCE names remembers it."""

    name = "killed"

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        once = Path(os.environ["ONCE"])
        if ctx.round == 2 and in_helper() and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return (yield from super().local(client, step, ctx))


@dataclass(frozen=True)
class Broken(FedAvg):
    """A mistake of its author."""

    name = "broken"

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        if in_helper():
            raise ZeroDivisionError("nobody foresaw this")
        return (yield from super().local(client, step, ctx))
