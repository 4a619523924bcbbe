"""The process of Flower's SuperNode: `python -m polyfed.flower.supernode ...`.

It dies with its `polyfed join`, and it looks for messages four times a second while something goes on, less often when
nothing has come for a while. Flower's own loop sleeps three seconds between two looks and has no setting for it, so the
pause is shortened here, and with it the second that Flower waits for a piece of a message that is still on its way. If
Flower changes these, this has no effect: only latency is lost.
"""

from __future__ import annotations

import argparse
import sys
import time
from types import SimpleNamespace

from polyfed.flower.watch import die_with_parent, keep_imports, pause_after

PAUSE = 0.25  # seconds between two looks for messages at least
IDLE = 3.0  # seconds that Flower sleeps where there was no message; it sleeps less while it waits for a reply of ours
SOON = 0.1  # seconds until the first second look for a missing piece; Flower doubles it each time


def main() -> None:
    """Read our own options and hand the rest to Flower."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    own, rest = parser.parse_known_args()
    die_with_parent(own.parent)

    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    names = {name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
    start_client_internal.time = SimpleNamespace(**{**names, "sleep": Looks().sleep})  # type: ignore[attr-defined,assignment]
    hasten()
    keep_imports()
    sys.argv = ["flower-supernode", *rest]
    flower_supernode()


class Looks:
    """The sleeps of Flower's loop, shortened."""

    def __init__(self) -> None:
        self.silent_since = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep, at most as long as Flower would."""
        now = time.monotonic()
        if seconds < IDLE:  # a message came
            self.silent_since = now
        time.sleep(min(seconds, pause_after(now - self.silent_since, PAUSE, IDLE)))


def hasten() -> None:
    """Look again soon for a piece of a message that is not there yet (at the server and at a site)."""
    from flwr.supercore.inflatable.inflatable_utils import pull_objects

    defaults = pull_objects.__kwdefaults__ or {}
    if "initial_backoff" in defaults:
        defaults["initial_backoff"] = SOON


if __name__ == "__main__":
    main()
