"""Clients spread over the processes of torch's launcher: `torchrun --nproc-per-node 4 -m polyfed run ...`.

Each rank keeps some of the clients for good; their networks never move, only messages do. Rank 0 runs the round loop
with `Ranks` as its backend; the others wait in `work_for_first` for its orders. What a client computes depends on
nothing but its messages and its own streams, and replies are fused in ascending id, by rank 0 or, where a method only
averages, by all ranks, each its keys (`shares.py`): the results are those of one process, bit for bit, for any number
of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import Tensor

from polyfed.core.backend import Measure
from polyfed.core.checkpoint import Tree
from polyfed.core.cost import CostMeter
from polyfed.core.errors import InputError, PolyfedError, TrainingError
from polyfed.core.federation import Federation
from polyfed.core.message import Message
from polyfed.core.method import Replies, Step
from polyfed.core.party import ClientInfo, Context, Party, fill
from polyfed.engines.inprocess import InProcess
from polyfed.engines.link import Link, deaf, ending_in_words
from polyfed.engines.packing import by_client, by_word, packed, unpacked
from polyfed.engines.shares import divided, from_outlines, fuse_share, outlined, sizes_of, why_at_first

TOLD = ("losses", "seconds", "failed", "epsilon")  # what a rank tells of each client beside its message
ERRORS = {kind.__name__: kind for kind in (InputError, TrainingError)}  # what a rank reports by name


def owners(infos: Mapping[int, ClientInfo], ranks: int) -> dict[int, int]:
    """Return which rank keeps which client: the one with the most work goes to whoever has least so far."""
    load = [0.0] * ranks
    owner: dict[int, int] = {}
    for client in sorted(infos, key=lambda client: (-infos[client].samples * infos[client].parameters, client)):
        rank = load.index(min(load))
        owner[client] = rank
        load[rank] += max(1, infos[client].samples * infos[client].parameters)
    return dict(sorted(owner.items()))


# --- rank 0 ---


class Ranks:
    """The backend of rank 0: its own clients are at home, the others' a message away."""

    def __init__(self, home: InProcess, link: Link, divides: bool = False) -> None:
        self.home = home
        self.link = link
        self.divides = divides  # fusing: replies stay at their ranks until it is known who needs which part of them
        self.infos = home.infos
        self.blueprints = home.blueprints
        self.owner = owners(home.infos, link.size)

    def exchange(self, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Let all ranks work side by side; replies come in ascending id."""
        shares = self._shares(messages)
        stays = self.divides and step.up
        order = {"order": "exchange", "step": asdict(step), "stays": stays, **moment(ctx)}
        self._tell({rank: {**order, "messages": packed(share)} for rank, share in shares.items() if rank})
        replies = self.home.exchange(step, shares.get(0, {}), ctx) if 0 in shares else Replies()
        for rank in sorted(shares.keys() - {0}):
            answer = self._answer(rank)
            found = from_outlines(answer["messages"]) if stays else unpacked(answer["messages"])
            others = Replies(found, broken=set(answer["broken"]), spent=set(answer["spent"]))
            for name in TOLD:
                getattr(others, name).update(by_client(answer[name]))
            replies.add(others)
        if stays:
            replies.fuse = partial(self._fuse, step, ctx)
        return replies

    def _fuse(self, step: Step, ctx: Context, server: Party, replies: Mapping[int, Message]) -> None:
        """Let every rank fuse its keys, and take in the means."""
        method, others = self.home.method, range(1, self.link.size)
        owner = divided(sizes_of(method, server, replies, step, ctx), self.link.size)
        order = {"order": "fuse", "step": asdict(step), "clients": sorted(replies), "owner": owner, **moment(ctx)}
        for rank in others:  # what nobody holds of a key stays as it is: its rank needs to know that
            self.link.send(rank, {**order, "state": {key: server.state[key] for key in owner if owner[key] == rank}})
        own = {client: reply for client, reply in replies.items() if self.owner[client] == 0}
        fuse_share(method, server, own, sorted(replies), owner, step, ctx, self.link)
        for rank in others:
            fill(server.state, self._answer(rank)["state"])
        nothing = {client: Message(meta=reply.meta) for client, reply in sorted(replies.items())}
        method.fuse(server, nothing, step, ctx)  # whatever follows the mean: the global model is loaded with it

    def evaluate(self, messages: Mapping[int, Message], ctx: Context, on: str = "test") -> dict[int, Measure]:
        """Let all ranks measure their clients side by side."""
        shares = self._shares(messages)
        order = {"order": "evaluate", "on": on, **moment(ctx)}
        self._tell({rank: {**order, "messages": packed(share)} for rank, share in shares.items() if rank})
        found = self.home.evaluate(shares[0], ctx, on) if 0 in shares else {}
        for rank in sorted(shares.keys() - {0}):
            answer = self._answer(rank)
            found.update({client: Measure(**fields) for client, fields in by_client(answer["measures"]).items()})
        return dict(sorted(found.items()))

    def ask(self, client: int, x: Tensor, ctx: Context) -> Tensor:
        """Ask a client wherever it is."""
        rank = self.owner[client]
        if rank == 0:
            return self.home.ask(client, x, ctx)
        self._tell({rank: {"order": "ask", "client": client, "x": x.cpu()}})
        outputs: Tensor = self._answer(rank)["outputs"]
        return outputs.to(x.device)

    def changed(self) -> dict[int, Any]:
        """Collect the trees of clients that were active since the last call: a checkpoint is rank 0's business."""
        return self._collect("changed", self.home.changed())

    def restore(self, states: Mapping[int, Any]) -> None:
        """Give every rank the saved states of its clients, however many ranks there were when they were saved."""
        shares = self._shares(states)
        self._tell({rank: {"order": "restore", "states": by_word(share)} for rank, share in shares.items() if rank})
        self.home.restore(shares.get(0, {}))
        for rank in sorted(shares.keys() - {0}):
            self._answer(rank)

    def bring_home(self) -> InProcess:
        """Take over the clients of all ranks: at the end somebody asks for their networks."""
        states = self._collect("everything", {})
        self.home.restore({**everything(self.home), **states})
        return self.home

    def _collect(self, order: str, own: dict[int, Any]) -> dict[int, Any]:
        others = range(1, self.link.size)
        self._tell({rank: {"order": order} for rank in others})
        found = dict(own)
        for rank in others:
            found.update(by_client(self._answer(rank)["states"]))
        return dict(sorted(found.items()))

    def _shares(self, by_client: Mapping[int, Any]) -> dict[int, dict[int, Any]]:
        shares: dict[int, dict[int, Any]] = {}
        for client in sorted(by_client):
            shares.setdefault(self.owner[client], {})[client] = by_client[client]
        return shares

    def _tell(self, orders: Mapping[int, Tree]) -> None:
        for rank in sorted(orders):
            self.link.send(rank, orders[rank])

    def _answer(self, rank: int) -> Any:
        answer = self.link.receive(rank)
        if "error" in answer:
            raise ERRORS.get(answer["kind"], PolyfedError)(answer["error"])
        return answer


@contextmanager
def leading(federation: Federation, link: Link) -> Iterator[None]:
    """Run the block with the clients spread over all ranks; afterwards they are all here, and the others are free."""
    assert isinstance(federation.backend, InProcess)
    ranks = Ranks(federation.backend, link, why_at_first(federation) is None)
    federation.backend = ranks
    try:
        with ending_in_words(link):
            yield
            federation.backend = ranks.bring_home()
    except BaseException:
        link.hang_up()
        raise
    for rank in range(1, link.size):
        link.send(rank, {"order": "end", "history": federation.history, "cost": federation.meter.dump()})


# --- the other ranks ---


def work_for_first(federation: Federation, link: Link) -> None:
    """Do what rank 0 asks until it is done; then this federation has its history and cost, but not its networks.

    Raises
    ------
    RankGone
        When rank 0 died, and this rank is the one that says so.
    SystemExit
        When rank 0 gave up: it says why.
    """
    with deaf():
        try:
            with ending_in_words(link):
                _work(federation, link)
        except PolyfedError:
            if link.lost(0) and link.has_the_word():
                raise link.gone(0) from None
            raise SystemExit(1) from None


def _work(federation: Federation, link: Link) -> None:
    worker = Worker(federation, link)
    while True:
        order = link.receive(0)
        if order["order"] == "end":
            federation.history, federation.meter = order["history"], CostMeter.load(order["cost"])
            return
        try:
            answer = worker.obey(order)
        except PolyfedError as error:
            if link.ended:  # nobody waits for the answer
                raise
            answer = {"error": str(error), "kind": type(error).__name__}
        link.send(0, answer)


class Worker:
    """Carries out the orders of rank 0; `kept` are replies that stay here until they are fused."""

    def __init__(self, federation: Federation, link: Link) -> None:
        assert isinstance(federation.backend, InProcess)
        self.home = federation.backend
        self.server = federation.server
        self.ctx = federation.ctx
        self.link = link
        self.kept: dict[int, Message] = {}

    def obey(self, order: Mapping[str, Any]) -> Tree:
        """Carry out one order and return the answer."""
        home, ctx, kind = self.home, self.ctx, order["order"]
        if kind == "restore":
            home.restore(by_client(order["states"]))
            return {}
        if kind == "ask":
            return {"outputs": home.ask(order["client"], order["x"].to(ctx.device), ctx).cpu()}
        if kind in ("changed", "everything"):
            return {"states": by_word(home.changed() if kind == "changed" else everything(home))}
        ctx.round, ctx.phase, ctx.participants = order["round"], order["phase"], tuple(order["participants"])
        if kind == "evaluate":
            found = home.evaluate(unpacked(order["messages"]), ctx, order["on"])
            return {"measures": {str(client): asdict(measure) for client, measure in found.items()}}
        return self._exchange(order) if kind == "exchange" else self._fuse(order)

    def _exchange(self, order: Mapping[str, Any]) -> Tree:
        replies = self.home.exchange(Step(**order["step"]), unpacked(order["messages"]), self.ctx)
        if order["stays"]:
            self.kept = replies.messages
        return {
            "messages": outlined(self.kept) if order["stays"] else packed(replies.messages),
            "broken": sorted(replies.broken),
            "spent": sorted(replies.spent),
            **{name: by_word(getattr(replies, name)) for name in TOLD},
        }

    def _fuse(self, order: Mapping[str, Any]) -> Tree:
        state, clients, server = order["state"], order["clients"], self.server
        fill(server.state, state)
        own = {client: self.kept[client] for client in clients if client in self.kept}
        self.kept = {}
        fuse_share(self.home.method, server, own, clients, order["owner"], Step(**order["step"]), self.ctx, self.link)
        return {"state": {key: server.state[key] for key in state}}


def everything(home: InProcess) -> dict[int, Tree]:
    """Return the trees of all clients that were ever active here."""
    return home.store.trees()


# --- what travels ---


def moment(ctx: Context) -> dict[str, Any]:
    """Return where in the run rank 0 is."""
    return {"round": ctx.round, "phase": ctx.phase, "participants": list(ctx.participants)}
