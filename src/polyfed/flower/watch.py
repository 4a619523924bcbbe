"""Processes that look at each other: one that ends with its parent, and how soon somebody who waits looks again."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

LOOK = 0.1  # seconds
GRACE = 5.0  # seconds for a clean end (a SuperNode tells the server that it leaves)

PATIENT = 0.1  # a look comes at most this share of the time that was waited too late


def pause_after(silence: float, shortest: float, longest: float) -> float:
    """Return the seconds until the next look: often while something goes on, rarely where nothing has come for long.

    Each look is a request, signed and encrypted. A thousand sites that look four times a second keep a server busy;
    after half a minute of silence they look every three seconds, and lose a tenth of the time that they waited anyway.
    """
    return min(longest, max(shortest, PATIENT * silence))


def die_with_parent(parent: int) -> None:
    """End this process, cleanly if possible, as soon as `parent` is no longer its parent."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def keep_imports() -> None:
    """Tell the garbage collector to leave alone what is there by now, and to look less often.

    A Flower process imports a few hundred thousand objects that stay. Every request makes hundreds of new ones, and to
    look through all of them took a third of the processor time of a request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
