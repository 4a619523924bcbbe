"""A method whose process dies at one client, once: the file that ONCE names remembers it."""

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
        once = os.environ.get("ONCE")
        if once and ctx.round == 3 and int(os.environ.get("RANK", "0")) == 1 and not Path(once).exists():
            Path(once).touch()
            os._exit(9)
        return (yield from super().local(client, step, ctx))
