"""Whole clients, pulled by the workers; with one worker, one client after the other.

A client's numbers come from its own streams and its own modules, so they are the same, bit for bit, for any number of
workers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from polyfed.core.errors import PolyfedError, TrainingError
from polyfed.core.message import Message
from polyfed.core.method import Replies, Step
from polyfed.core.party import Context
from polyfed.core.privacy import LEDGER, BudgetSpent
from polyfed.core.runner import run_stage
from polyfed.engines.work import drive, receive

if TYPE_CHECKING:
    from polyfed.engines.inprocess import InProcess


class Threads:
    """Clients with the most work first: the last ones to finish are then short."""

    def exchange(self, backend: InProcess, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Let the clients work and collect their replies."""

        def work(worker: int, client: int) -> tuple[Message, float, float] | PolyfedError:
            start = time.perf_counter()
            with ctx.own_draws(f"own/{step.name}", backend.infos[client]):
                party = backend.store.open(client, ctx, worker=worker)
                receive(backend.method, party, messages[client], step, ctx)
                try:
                    reply, loss = drive(backend.method, party, step, ctx, run)
                    backend.store.check_own(party, worker)
                except (BudgetSpent, TrainingError) as error:  # the others go on
                    backend.store.close(party, ctx)
                    return error
                if LEDGER in party.memory:
                    replies.epsilon[client] = party.memory[LEDGER]["epsilon"]
                backend.store.close(party, ctx)
            return reply, loss, time.perf_counter() - start

        run = run_stage if backend.known is None else backend.known.run
        clients = sorted(messages)
        replies = Replies()
        done = backend.pool.run(work, clients, lambda client: backend.expected_work(step, client))
        for client, found in zip(clients, done, strict=True):
            if isinstance(found, PolyfedError):
                replies.leave_out(client, found)
                if isinstance(found, TrainingError):
                    backend.store.start_over(client, ctx)
                continue
            reply, loss, seconds = found
            backend.spent[step.name, client] = seconds
            replies.messages[client] = reply
            replies.losses[client] = loss
            replies.seconds[client] = seconds
        if backend.known is not None:
            replies.saved = backend.known.take_saved() / backend.pool.workers
        return replies
