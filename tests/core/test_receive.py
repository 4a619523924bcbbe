"""What a client makes of a message is the same where it works, is measured, and is handed out."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import polyfed as pf
from polyfed.core.message import Message
from polyfed.core.stage import Stage

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from table import synthetic

ROOT = Path(__file__).parents[2]
ENGINES = ("sequential", "threads", "batched")


def head_average():
    """Return the method of the contributing page."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class HeadAverage" in b)
    namespace = {"__name__": "__main__"}
    exec(block.split("\nclients = ")[0], namespace)
    return namespace["HeadAverage"]


def accuracy(model, clients):
    x, y = clients.test.inputs(), clients.test.labels()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_contributing_pages_method_is_measured_and_exported_with_the_averaged_head(engine):
    clients = synthetic()
    result = pf.run(head_average()(share=1.0), clients, ["mlp:1x8", "mlp:2x8"], 2, engine=engine)
    for client, model in result.models.items():
        for name, tensor in model.head.state_dict().items():
            assert torch.equal(tensor, result.server.memory["head"][name])
        assert result.accuracy()["per_client"][client] == pytest.approx(accuracy(model.eval(), clients))


@dataclass(frozen=True)
class Counting(pf.Method):
    """Counts in its memory, in place, how many messages it took in."""

    name: ClassVar[str] = "counting"

    def setup_client(self, client, ctx):
        client.memory["taken"] = torch.zeros(1)

    def receive(self, client, step, ctx):
        super().receive(client, step, ctx)
        client.memory["taken"] += 1

    def local(self, client, step, ctx):
        yield Stage(self.loss)
        return Message(data={"taken": client.memory["taken"].clone()})

    def fuse(self, server, replies, step, ctx):
        ctx.log("taken", [int(reply.data["taken"]) for reply in replies.values()])


@pytest.mark.parametrize("engine", ENGINES)
def test_measuring_takes_in_a_message_without_a_trace(engine):
    history = pf.run(Counting(), synthetic(3, public=False), "mlp:1x8", 3, engine=engine).history
    assert [line["taken"] for line in history] == [[1, 1, 1], [2, 2, 2], [3, 3, 3]]


@dataclass(frozen=True)
class Told(pf.FedAvg):
    """A number in the message says which class a client answers, whatever it is asked."""

    name: ClassVar[str] = "told"

    weights: bool = True  # whether a measured client gets the server's weights, too

    def send(self, server, info, step, ctx):
        message = super().send(server, info, step, ctx) if self.weights or step.name != "evaluate" else Message()
        message.meta["answer"] = (info.id + ctx.round) % 3
        return message

    def predict(self, party, x, ctx):
        scores = super().predict(party, x, ctx) * 0
        scores[:, party.inbox.meta.get("answer", 0)] = 1.0  # the server has no inbox
        return scores


@dataclass(frozen=True)
class TakenIn(Told):
    """The same, but the number becomes part of the network when the message is taken in."""

    name: ClassVar[str] = "taken_in"

    def receive(self, client, step, ctx):
        super().receive(client, step, ctx)
        if step.name == "evaluate":
            head = client.main.head.state_dict()
            head["weight"].zero_()
            head["bias"].zero_()[client.inbox.meta["answer"]] = 1.0

    def predict(self, party, x, ctx):
        return party.main(x)


@pytest.mark.parametrize("method", [Told, TakenIn])
@pytest.mark.parametrize("weights", [True, False])
def test_what_changes_predictions_is_not_answered_from_earlier_measures(method, weights):
    """Most clients never work, so their own weights are equal and stay as they are: only the message differs."""
    clients = synthetic(6, public=False)
    shares = clients.test.labels().bincount(minlength=3) / len(clients.test)
    assert len(set(shares.tolist())) == 3
    result = pf.run(method(weights=weights), clients, "mlp:1x8", 3, participation=0.2)
    for line in result.history:
        expected = [shares[(client + line["round"]) % 3].item() for client in range(6)]
        assert line["accuracy"]["per_client"] == pytest.approx(expected)
