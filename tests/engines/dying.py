"""A method to which something happens in the third round, once: the file that ONCE names remembers it.

The process DIES (a rank) dies, and AT says where: at `work`, at work while the others above rank 0 cannot finish theirs
(`busy`), or when it has fused its share and has not told it yet (`fuse`); a folder that it LOSES goes with it. With
AT=ctrl-c somebody presses Ctrl-C while rank 0 is at work, and again with AT=ctrl-c-twice; with AT=fault the work of
rank DIES fails.
"""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

from polyfed import FedAvg
from polyfed.core.method import Local, Step
from polyfed.core.party import Context, Party


@dataclass(frozen=True)
class Dying(FedAvg):
    name = "dying"

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        die("work", ctx)
        die("busy", ctx)
        if is_time("fault", os.environ.get("DIES", "1"), ctx):
            raise ValueError("A fault of this method.")
        stay_busy(ctx)
        press(ctx)
        return (yield from super().local(client, step, ctx))

    def refresh(self, server: Party, ctx: Context) -> None:
        super().refresh(server, ctx)
        die("fuse", ctx)


def is_time(at: str, rank: str, ctx: Context) -> bool:
    once = os.environ.get("ONCE")
    if not once or ctx.round != 3 or at != os.environ.get("AT", "work") or Path(once).exists():
        return False
    if os.environ.get("RANK", "0") != rank:
        return False
    Path(once).touch()
    return True


def die(at: str, ctx: Context) -> None:
    if is_time(at, os.environ.get("DIES", "1"), ctx):
        if "LOSES" in os.environ:
            shutil.rmtree(os.environ["LOSES"])
        os._exit(9)


def stay_busy(ctx: Context) -> None:
    if ctx.round == 3 and os.environ.get("AT") == "busy" and os.environ["RANK"] not in ("0", os.environ["DIES"]):
        signal.pause()


def press(ctx: Context) -> None:
    """Interrupt this rank, as a terminal may do, and the launcher, which tells all ranks; wait until it is heard."""
    twice = is_time("ctrl-c-twice", "0", ctx)
    if not twice and not is_time("ctrl-c", "0", ctx):
        return
    heard, here = os.pipe()
    os.set_blocking(here, False)
    signal.set_wakeup_fd(here)
    for who in (os.getpid(), *[os.getppid()] * (1 + twice)):
        os.kill(who, signal.SIGINT)
        os.read(heard, 1)
    signal.set_wakeup_fd(-1)
