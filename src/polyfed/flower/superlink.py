"""The process of Flower's SuperLink, with a gate in front: `python -m polyfed.flower.superlink ...`.

SuperLink serves three interfaces on one port: Fleet for the sites (each call signed with a registered key), Runtime for
the server's own process, and Control, which may register keys and start runs. Without an account service Control
accepts everybody, so here it asks for a secret that only `polyfed serve` knows, and Runtime answers this machine only.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from polyfed.flower.gate import CLOCKS, Gate
from polyfed.flower.watch import die_with_parent, keep_imports

PATIENCE = 7 * 24 * 3600  # seconds that the server's process may be silent


def main() -> None:
    """Read our own options, put the gate in front, and hand the rest to Flower."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--secret-file", type=Path, required=True)
    parser.add_argument("--max-bytes", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    own, rest = parser.parse_known_args()
    die_with_parent(own.parent)
    secret = own.secret_file.read_bytes()

    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    earlier = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(Gate, secret=secret, max_bytes=own.max_bytes), *earlier())
    be_patient()
    allow_clocks()
    keep_imports()
    sys.argv = ["flower-superlink", *rest]
    flower_superlink()


def be_patient() -> None:
    """Let a suspended server keep its task: SuperLink ends with it anyway, and cannot outlive it.

    Flower takes a task back whose owner was silent for a minute, for instance because its machine slept. If Flower
    moves this setting, only that is lost.
    """
    from flwr.supercore.corestate import in_memory_corestate, sql_corestate

    for module in (in_memory_corestate, sql_corestate):
        module.HEARTBEAT_DEFAULT_INTERVAL = PATIENCE  # type: ignore[attr-defined]


def allow_clocks() -> None:
    """Let in sites whose clock is ahead by minutes: Flower allows five seconds, which few machines keep among them.

    A call is signed with its time, so that nobody can repeat it much later. If Flower moves this setting, only the five
    seconds are back.
    """
    from flwr.superlink.routers.fleet import node_auth

    node_auth.SYSTEM_TIME_TOLERANCE = CLOCKS  # type: ignore[attr-defined]


if __name__ == "__main__":
    os.umask(0o077)
    main()
