"""The process of Flower's SuperNode: `python -m polyfed.backends.flower.supernode ...`.

It dies with its `polyfed join`, and it looks for messages four times a second. Flower's own loop sleeps three seconds
between two looks and has no setting for it, so the pause is shortened here; if Flower changes that loop, this has no
effect and the only loss is latency.
"""

from __future__ import annotations

import argparse
import sys
import time
from types import SimpleNamespace

from polyfed.backends.flower.watch import die_with_parent

PAUSE = 0.25  # seconds between two looks for messages


def main() -> None:
    """Read our own options and hand the rest to Flower."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    own, rest = parser.parse_known_args()
    die_with_parent(own.parent)

    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    names = {name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
    short = SimpleNamespace(**{**names, "sleep": lambda seconds: time.sleep(min(seconds, PAUSE))})
    start_client_internal.time = short  # type: ignore[attr-defined]
    sys.argv = ["flower-supernode", *rest]
    flower_supernode()


if __name__ == "__main__":
    main()
