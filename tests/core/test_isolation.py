"""Parties of one process are apart from each other as machines are: what would be shared by mistake is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import polyfed as pf
from polyfed.core.errors import MethodError, TrainingError
from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.stage import Stage
from polyfed.testing import check_method, synthetic

ENGINES = ("sequential", "threads", "batched", "auto")


@dataclass(frozen=True)
class Heads(Method):
    """Averages the last layers, each hook written as it should be; the others below make one mistake each."""

    name: ClassVar[str] = "heads"
    sends: ClassVar[str] = "the last layer"
    live: ClassVar[bool] = False  # whether a client sends its tensors themselves

    def send(self, server: Any, info: Any, step: Any, ctx: Any) -> Message:
        return Message(data=dict(server.memory.get("head", {})))

    def receive(self, client: Any, step: Any, ctx: Any) -> None:
        if client.inbox.data:
            client.main.head.load_state_dict(client.inbox.data)

    def local(self, client: Any, step: Any, ctx: Any) -> Any:
        yield Stage(self.loss)
        state = dict(client.main.head.state_dict())
        return Message(data=state if self.live else {name: tensor.clone() for name, tensor in state.items()})

    def fuse(self, server: Any, replies: Mapping[int, Message], step: Any, ctx: Any) -> None:
        names = next(iter(replies.values())).data
        server.memory["head"] = {n: torch.stack([r.data[n] for r in replies.values()]).mean(0) for n in names}


@dataclass(frozen=True)
class Live(Heads):
    """Sends live tensors, which is fast and harmless as long as nobody writes into them."""

    name: ClassVar[str] = "heads_live"
    live: ClassVar[bool] = True


@dataclass(frozen=True)
class AddsUp(Live):
    """The server adds the others to the first reply, in place."""

    name: ClassVar[str] = "heads_adding"

    def fuse(self, server: Any, replies: Mapping[int, Message], step: Any, ctx: Any) -> None:
        first, *others = replies.values()
        total: dict[str, Tensor] = first.data
        for reply in others:
            for name in total:
                total[name] += reply.data[name]
        server.memory["head"] = {name: tensor / len(replies) for name, tensor in total.items()}


@dataclass(frozen=True)
class ShrinksInbox(Heads):
    """A client shrinks what it received, in place: all clients have the same tensors."""

    name: ClassVar[str] = "heads_shrinking"

    def receive(self, client: Any, step: Any, ctx: Any) -> None:
        for tensor in client.inbox.data.values():
            tensor.mul_(0.9)
        super().receive(client, step, ctx)


@dataclass(frozen=True)
class KeepsReply(Live):
    """The server keeps a live tensor: the client's next training moves it."""

    name: ClassVar[str] = "heads_keeping"

    def fuse(self, server: Any, replies: Mapping[int, Message], step: Any, ctx: Any) -> None:
        first = next(iter(replies.values())).data
        last = server.memory.get("last", first)
        super().fuse(server, replies, step, ctx)
        server.memory["head"] = {n: tensor + 0.1 * last[n] for n, tensor in server.memory["head"].items()}
        server.memory["last"] = dict(first)


@dataclass(frozen=True)
class Rebinds(Heads):
    """Puts new tensors in the place of its own."""

    name: ClassVar[str] = "heads_rebinding"

    def local(self, client: Any, step: Any, ctx: Any) -> Any:
        reply = yield from super().local(client, step, ctx)
        for parameter in client.main.parameters():
            parameter.data = parameter.data * 0.5
        return reply


@dataclass(frozen=True)
class Assigns(Heads):
    """Loads a state by putting its tensors in the place of its own."""

    name: ClassVar[str] = "heads_assigning"

    def receive(self, client: Any, step: Any, ctx: Any) -> None:
        state = {name: tensor.clone() for name, tensor in client.main.head.state_dict().items()}
        client.main.head.load_state_dict(state, assign=True)


@dataclass(frozen=True)
class Remembers(Heads):
    """Keeps something on the party instead of in its memory."""

    name: ClassVar[str] = "heads_remembering"

    def receive(self, client: Any, step: Any, ctx: Any) -> None:
        client.seen = 1


@dataclass(frozen=True)
class SendsList(Heads):
    """Sends a list where a tensor belongs."""

    name: ClassVar[str] = "heads_list"

    def local(self, client: Any, step: Any, ctx: Any) -> Any:
        yield Stage(self.loss)
        return Message(data={"counts": [1, 2]})  # type: ignore[dict-item]


def run(method: Method, engine: str = "auto") -> pf.Result:
    data = synthetic(per_client=8, public=False)
    return pf.run(method, data, ["mlp:1x8"], feature_dim=8, rounds=2, engine=engine, progress=False)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("method", "told"),
    [
        (AddsUp(), "heads_adding: `fuse` wrote into 'data/weight' of client 0's reply"),
        (ShrinksInbox(), "heads_shrinking: a client wrote into 'data/weight' of the message to client 0"),
        (Rebinds(), "client 0 .*'stem.linear.weight' of its network 'main'"),
        (Assigns(), "client 0 .*'head.weight' of its network 'main'"),
        (Remembers(), "'seen'.*memory"),
        (SendsList(), "reply of client 0.*'data/counts' is a list"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_two_machines_could_not_share_is_refused(method: Method, told: str, engine: str) -> None:
    with pytest.raises(MethodError, match=told):
        run(method, engine)


@pytest.mark.parametrize("method", [Heads(), Live()])
def test_live_tensors_that_nobody_writes_into_are_fine(method: Method) -> None:
    assert run(method).history[-1]["bytes_up"] > 0
    assert "copied_messages_give_the_same_run" in check_method(method, models=["mlp:1x8"], feature_dim=8)


@pytest.mark.parametrize("method", [KeepsReply()])
def test_the_contract_sees_a_live_tensor_that_outlives_its_exchange(method: Method) -> None:
    with pytest.raises(AssertionError, match=r"heads_keeping: .*Messages may be copies, as between sites"):
        check_method(method, models=["mlp:1x8"], feature_dim=8)


@dataclass(frozen=True)
class WrongShape(Heads):
    """Fails with an error of torch's."""

    name: ClassVar[str] = "heads_wrong"

    def fuse(self, server: Any, replies: Mapping[int, Message], step: Any, ctx: Any) -> None:
        torch.ones(2) + torch.ones(3)


def test_the_contract_names_its_check_whatever_was_raised() -> None:
    with pytest.raises(AssertionError, match=r"heads_wrong: .*: RuntimeError: The size of tensor") as told:
        check_method(WrongShape(), models=["mlp:1x8"], feature_dim=8)
    assert isinstance(told.value.__cause__, RuntimeError)


def nan(_: int) -> Message:
    return Message(data={"a": torch.tensor([float("nan")])})


def rest(client: int) -> Message:
    return nan(client) if client else Message(data={"a": torch.ones(1)})


@dataclass(frozen=True)
class Tells(Heads):
    """Replies with what a function makes of the client's number."""

    name: ClassVar[str] = "heads_telling"
    what: Callable[[int], Message] = nan

    def local(self, client: Any, step: Any, ctx: Any) -> Any:
        yield Stage(self.loss)
        return self.what(client.id)

    def fuse(self, server: Any, replies: Mapping[int, Message], step: Any, ctx: Any) -> None:
        pass


def test_a_run_whose_every_reply_is_refused_ends_with_the_reason() -> None:
    with pytest.raises(TrainingError, match="'data/a' holds NaN or infinite values"):
        run(Tells(what=nan))


def test_a_run_goes_on_with_those_whose_replies_are_good() -> None:
    result = run(Tells(what=rest))
    assert sorted(result.history[-1]["missing"]) == ["1", "2", "3"]
