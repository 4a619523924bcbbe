"""A child process that ends when its parent does, however the parent ended."""

from __future__ import annotations

import os
import signal
import threading
import time

LOOK = 0.1  # seconds
GRACE = 5.0  # seconds for a clean end (a SuperNode tells the server that it leaves)


def die_with_parent(parent: int) -> None:
    """End this process, cleanly if possible, as soon as `parent` is no longer its parent."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
