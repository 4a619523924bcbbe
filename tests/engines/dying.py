"""A method one of whose processes (DIES) dies in the third round, once: the file that ONCE names remembers it.

AT says where: at `work`, or when it has fused its share and has not told it yet (`fuse`).
"""

from __future__ import annotations

import os
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
        return (yield from super().local(client, step, ctx))

    def refresh(self, server: Party, ctx: Context) -> None:
        super().refresh(server, ctx)
        die("fuse", ctx)


def die(at: str, ctx: Context) -> None:
    once, mine = os.environ.get("ONCE"), os.environ.get("RANK", "0") == os.environ.get("DIES", "1")
    if once and mine and ctx.round == 3 and at == os.environ.get("AT", "work") and not Path(once).exists():
        Path(once).touch()
        os._exit(9)
