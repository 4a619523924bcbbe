"""A method one of whose clients sends what is not a number: another one in each round."""

from __future__ import annotations

from dataclasses import dataclass

from polyfed import FedAvg
from polyfed.core.method import Local, Step
from polyfed.core.party import Context, Party


@dataclass(frozen=True)
class Spoilt(FedAvg):
    name = "spoilt"

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        reply = yield from super().local(client, step, ctx)
        if client.id == ctx.round + 1:  # client 2, then client 3
            state = reply.params["main"]
            last = list(state)[-1]
            reply.params["main"] = {**state, last: state[last] * float("nan")}
        return reply
