"""A few threads that pull pieces of work; torch runs one intra-op thread in each.

Kernels of torch release Python's lock, so threads keep all cores busy. Two intra-op threads for one client after the
other would be slower, and a client's numbers would depend on how many there are: with one, they never do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from polyfed.core.threads import one_thread

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


class WorkerPool:
    """Workers numbered from 0; a piece of work learns the number of its worker."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="polyfed") if workers > 1 else None

    def run(
        self,
        work: Callable[[int, Item], Outcome],
        items: Sequence[Item],
        cost: Callable[[Item], float] | None = None,
    ) -> list[Outcome]:
        """Return `work(worker, item)` for every item, in the order of the items; the costliest ones start first.

        If some fail, the error of the first of them is raised, as it would be one by one.
        """
        order = list(range(len(items)))
        if cost is not None:
            order.sort(key=lambda position: -cost(items[position]))
        with one_thread():
            if self._pool is None or len(items) < 2:
                return self._one_by_one(work, items)
            return self._together(self._pool, work, items, order)

    @staticmethod
    def _one_by_one(work: Callable[[int, Item], Outcome], items: Sequence[Item]) -> list[Outcome]:
        return [work(0, item) for item in items]

    def _together(
        self,
        pool: ThreadPoolExecutor,
        work: Callable[[int, Item], Outcome],
        items: Sequence[Item],
        order: list[int],
    ) -> list[Outcome]:
        results: dict[int, Outcome] = {}
        errors: dict[int, BaseException] = {}
        left = iter(order)
        lock = threading.Lock()
        stopped = False

        def pull(worker: int) -> None:
            torch.set_num_threads(1)  # for this thread: it may be a new one
            while not stopped:
                with lock:
                    position = next(left, None)
                if position is None:
                    return
                if errors and position > min(errors):  # an earlier item failed: this one would not have been reached
                    continue
                try:
                    results[position] = work(worker, items[position])
                except BaseException as error:
                    errors[position] = error

        futures = [pool.submit(pull, worker) for worker in range(min(self.workers, len(items)))]
        try:
            for future in futures:
                future.result()
        except BaseException:  # the person pressed Ctrl-C: let every worker finish what it holds, and no more
            stopped = True
            for future in futures:
                future.result()
            raise
        if errors:
            raise errors[min(errors)]
        return [results[position] for position in range(len(items))]
