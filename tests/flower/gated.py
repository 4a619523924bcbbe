"""The commands of a real federation with gates in a site's work: `python gated.py join ...`.

A test that wants to catch a site at a certain moment closes a gate by creating a file, waits until the site stands
before it, does what it wants to the processes, and opens the gate by removing the file. So nothing depends on who is
fast: a moment is reached, however busy the machine is.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polyfed.flower.codec import Body
from polyfed.flower.site import Site

GATES = Path(os.environ.get("POLYFED_TEST_GATES", "/nonexistent"))
now = ""  # the site and round of the work that goes on


def stand_before(gate: str) -> None:
    """Wait as long as the gate is closed."""
    path = GATES / gate
    if path.is_file():
        (GATES / f"{gate}.there").touch()
        while path.is_file():
            time.sleep(0.02)


class GatedSite(Site):
    """A site with gates before its work of a round, after it (state written, no reply sent), and before its end."""

    def answer(self, head: dict[str, Any], body: Body) -> tuple[dict[str, Any], bytes]:
        if head.get("kind") == "end":
            stand_before(f"{self.name}-end")
        return super().answer(head, body)

    def work(self, head: dict[str, Any], body: Body) -> tuple[dict[str, Any], bytes]:
        global now
        now = f"{self.name}-{head['round']}"
        stand_before(f"{now}-before")
        reply = super().work(head, body)
        stand_before(f"{now}-after")
        return reply


class GatedNet(nn.Module):
    """A network with a gate in its training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            stand_before(f"{now}-during")
        return self.layer(x.flatten(1))


def net() -> nn.Module:
    return GatedNet()


def main() -> None:
    import gated  # the module that holds `now` for the network, too; this script is another one

    from polyfed.cli import app
    from polyfed.flower import join

    join.Site = gated.GatedSite  # type: ignore[misc]
    app()


if __name__ == "__main__":
    main()
