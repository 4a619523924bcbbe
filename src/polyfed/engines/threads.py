"""Whole clients, pulled by the workers; with one worker, one client after the other.

A client's numbers come from its own streams and its own modules, so they are the same, bit for bit, for any number of
workers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from polyfed.core.message import Message
from polyfed.core.method import Replies, Step
from polyfed.core.party import Context
from polyfed.engines.work import drive, receive

if TYPE_CHECKING:
    from polyfed.engines.inprocess import InProcess


class Threads:
    """Clients with the most work first: the last ones to finish are then short."""

    def exchange(self, home: InProcess, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Let the clients work and collect their replies."""

        def work(worker: int, client: int) -> tuple[Message, float, float]:
            start = time.perf_counter()
            with ctx.own_draws(f"own/{step.name}", home.infos[client]):
                party = home.open(client, ctx, worker=worker)
                receive(home.method, party, messages[client], step, ctx)
                reply, loss = drive(home.method, party, step, ctx)
                home.close(party, ctx)
            return reply, loss, time.perf_counter() - start

        clients = sorted(messages)
        replies = Replies()
        done = home.pool.run(work, clients, lambda client: home.expected_work(step, client))
        for client, (reply, loss, seconds) in zip(clients, done, strict=True):
            home.spent[step.name, client] = seconds
            replies.messages[client] = reply
            replies.losses[client] = loss
            replies.seconds[client] = seconds
        return replies
