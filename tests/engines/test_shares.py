"""Fusing that is divided over processes: who fuses what, what travels, and that nothing is lost on the way."""

from __future__ import annotations

from queue import Queue
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed import methods
from polyfed.api import prepare
from polyfed.core.checkpoint import Tree
from polyfed.core.cost import UP, CostMeter
from polyfed.core.message import Message
from polyfed.core.settings import Settings
from polyfed.core.trust import Trust
from polyfed.engines import parcels
from polyfed.engines.link import GLOO, NCCL, Link, transport
from polyfed.engines.shares import divided, from_outlines, fusing_in_words, outlined, part_of
from polyfed.testing import synthetic


def test_the_largest_tensor_goes_to_the_rank_with_the_least_work() -> None:
    assert divided({"a": 5, "b": 9, "c": 4, "d": 0}, 2) == {"b": 0, "a": 1, "c": 1, "d": 0}
    assert divided({"a": 5}, 3) == {"a": 0}
    assert divided({}, 3) == {}


def test_the_parts_of_a_reply_are_the_reply() -> None:
    one = torch.arange(3.0)
    reply = Message({"main": {"w": one, "v": one + 1}, "side": {"w": one + 2}}, {"logits": one + 3}, {"samples": 4})
    keys = {"params/main/w": "w", "params/main/v": "arch::v", "params/side/w": "side"}
    parts = [part_of(reply, keys, {"w": 1, "arch::v": 2, "side": 1}, rank) for rank in range(3)]
    assert [list(part.params) for part in parts] == [[], ["main", "side"], ["main"]]
    assert list(parts[0].data) == ["logits"]  # of no key
    assert all(part.meta == {"samples": 4} for part in parts)
    names = sorted(name for part in parts for name, _ in part.tensors())
    assert names == sorted(name for name, _ in reply.tensors())


def test_replies_that_stay_are_counted_as_those_that_travel_and_bad_ones_come_whole() -> None:
    good = Message({"main": {"w": torch.ones(3, 2)}}, {"n": torch.ones(2, dtype=torch.int64)}, {"samples": 3})
    bad = Message({"main": {"w": torch.tensor([1.0, float("nan")])}})
    found = from_outlines(outlined({2: good, 10: bad}))
    assert found[2].params["main"]["w"].is_meta and found[2].meta == {"samples": 3}
    assert not found[10].params["main"]["w"].is_meta
    meters = CostMeter(), CostMeter()
    meters[0].count(UP, 2, "main", good)
    meters[1].count(UP, 2, "main", found[2])
    assert meters[0] == meters[1] and meters[0].wire[UP]


DIVIDED = "fusing divided over 4 processes by tensor"


@pytest.mark.parametrize(
    ("method", "model", "trust", "words"),
    [
        ("fedavg", "resnet10:w4", Trust(), DIVIDED),
        ("fedprox", "resnet10:w4", Trust(), DIVIDED),
        ("fedavg", "mlp:1x16", Trust(), "fusing at rank 0 (one tensor has most of the numbers)"),
        ("scaffold", "resnet10:w4", Trust(), "fusing at rank 0 (scaffold does more than averaging)"),
        ("fedproto", "resnet10:w4", Trust(), "fusing at rank 0 (fedproto does more than averaging)"),
        ("fedavg", "resnet10:w4", Trust(robust="median"), "fusing at rank 0 (attacks, rules against them and noise"),
        ("fedavg", "resnet10:w4", Trust(attack="signflip:0.4"), "fusing at rank 0 (attacks, rules against them and"),
    ],
)
def test_where_fusing_happens_is_said(method: str, model: str, trust: Trust, words: str) -> None:
    federation = prepare(methods.make(method, {}), synthetic(), [model], Settings(1, 0, trust=trust))
    assert fusing_in_words(federation, 4).startswith(words)


# --- what travels ---


@pytest.fixture
def small_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "TOGETHER", 256)


def travelled(tree: Tree) -> tuple[Tree, list[int]]:
    """Return a tree as another process would get it, and the sizes of the parcels."""
    words, tensors, _ = parcels.described(tree, on_gpu=False)
    skeleton, items = parcels.read(words)
    found: dict[int, Tensor] = {}
    sizes = []
    for numbers in parcels.parcels(items):
        some = [items[number] for number in numbers]
        sent = parcels.filled([tensors[number] for number in numbers], some)
        arrived = parcels.empty(some, None)
        arrived.copy_(sent)
        sizes.append(len(sent))
        found.update(zip(numbers, parcels.opened(arrived, some), strict=True))
    return parcels.tree_of(skeleton, found), sizes


def test_trees_arrive_as_they_were_in_parcels(small_parcels: None) -> None:
    tensors = {
        "matrix": torch.randn(3, 4),
        "turned": torch.randn(3, 4).t(),
        "large": torch.randn(100),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(5).to(torch.bfloat16),
        "empty": torch.empty(0, 2),
        "count": torch.tensor(7),
    }
    tree = {"tensors": tensors, "rest": [1, 2.5, None, "word", {"a": True}]}
    found, sizes = travelled(tree)
    assert found["rest"] == tree["rest"]
    for name, tensor in tensors.items():
        again = found["tensors"][name]
        assert again.dtype == tensor.dtype and again.shape == tensor.shape and torch.equal(again, tensor), name
        assert again.data_ptr() % parcels.ALIGN == 0 or not again.numel()
    assert sizes == [400, 64 * 4, 64 * 2]  # the large one alone; the others together, as many as fit


def test_large_tensors_are_not_copied_on_the_way_out(small_parcels: None) -> None:
    large = torch.randn(1000)
    (item,) = parcels.read(parcels.described([large], on_gpu=False)[0])[1]
    assert parcels.filled([large], [item]).data_ptr() == large.data_ptr()


def test_nothing_and_empty_tensors_travel() -> None:
    assert travelled({"a": 1}) == ({"a": 1}, [])
    found, _ = travelled([torch.empty(0), torch.empty(0, 3)])
    assert [tuple(tensor.shape) for tensor in found] == [(0,), (0, 3)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_all_ranks_swap_at_the_same_time(size: int) -> None:
    """Whoever sends waits until it is received, as with gloo: an order that could get stuck does."""
    boxes = {(a, b): Rendezvous() for a in range(size) for b in range(size)}
    got: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        link = Link.__new__(Link)
        link.number, link.size = number, size
        link.send = lambda to, tree: boxes[number, to].put(tree)  # type: ignore[method-assign]
        link.receive = lambda source: boxes[source, number].get()  # type: ignore[method-assign]
        got[number] = sorted(link.swap([f"{number} to {other}" for other in range(size)]))

    threads = [Thread(target=work, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == {n: [f"{other} to {n}" for other in range(size) if other != n] for n in range(size)}


class Rendezvous:
    """A place where a sender waits for the receiver."""

    def __init__(self) -> None:
        self.here: Queue[Any] = Queue()
        self.taken: Queue[None] = Queue()

    def put(self, tree: Any) -> None:
        self.here.put(tree)
        self.taken.get(timeout=15)

    def get(self) -> Any:
        tree = self.here.get(timeout=15)
        self.taken.put(None)
        return tree


@pytest.mark.parametrize(
    ("device", "gpus", "processes", "found"),
    [("cpu", 4, 4, GLOO), ("cuda:3", 4, 4, NCCL), ("cuda:0", 8, 4, NCCL), ("cuda:1", 2, 4, GLOO), ("cpu", 0, 1, GLOO)],
)
def test_gpus_talk_to_each_other_where_each_process_has_its_own(
    device: str, gpus: int, processes: int, found: str
) -> None:
    assert transport(torch.device(device), gpus, processes) == found
