"""How many threads torch uses inside one operation: one, wherever numbers must not depend on the machine.

Sums over several threads are rounded in another way, so results would depend on the number of cores; and threads that
wait for each other at every small operation are slow on a machine that others use, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the block with one intra-op thread, then allow as many as before."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
