"""Methods run on a device that is not the CPU, and give the same numbers.

There need not be a GPU: the tests pretend that `meta` is a device. Its tensors hold their values on the CPU, but they
may meet a CPU tensor only where CUDA's may: in copies, as a number (no dimensions), and when a CPU index picks rows.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.contract.table import CASES, FEW_CASES, FEW_SAMPLES, Case, everyday, run_case
from torch import Tensor
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from polyfed.core.checkpoint import Tree
from polyfed.core.message import Message
from polyfed.core.method import Replies, Step
from polyfed.core.party import Context
from polyfed.engines.inprocess import InProcess
from polyfed.engines.link import Link
from polyfed.engines.packing import packed, unpacked
from polyfed.testing.watch import double_precision

FAKE = torch.device("meta")
aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)


@contextmanager
def plain_mode() -> Iterator[None]:
    """Leave inference mode, in which a wrapper cannot be a view of one that was made before; gradients stay off."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class OnDevice(Tensor):
    """A tensor of the pretended device; `held` has its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=FAKE
        )
        made.held = held
        return made

    def __init__(self, held: Tensor) -> None: ...

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == Tensor.data.__set__:
            args[0].held = args[1].held.detach()
        if function in (Tensor.data_ptr, Tensor.tolist):
            return function(args[0].held)
        with torch._C.DisableTorchFunctionSubclass(), plain_mode():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return on_device(function, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.held})"


def on_device(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do one operation of torch, with CUDA's rules for tensors of two devices."""
    if function is aten._foreach_copy_.default:
        for to, source in zip(*args, strict=True):
            on_device(aten.copy_.default, (to, source), kwargs)
        return None
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    devices = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    inputs_here = any(isinstance(tensor, OnDevice) for tensor in tensors)
    result_here = devices[0] == FAKE if devices else inputs_here
    if function is aten._has_compatible_shallow_copy_type.default:
        return all(isinstance(tensor, OnDevice) for tensor in tensors)
    if function is aten.copy_.default:
        result_here = isinstance(args[0], OnDevice)
    elif inputs_here:
        picks = function in INDEXING and isinstance(args[0], OnDevice)
        for tensor in tensors:
            allowed = isinstance(tensor, OnDevice) or not tensor.dim() or (picks and not tensor.is_floating_point())
            if not allowed:
                raise RuntimeError(f"{function}: a CPU tensor of shape {tuple(tensor.shape)} met one of the device")
    if result_here and kwargs.get("generator") is not None:
        raise RuntimeError(f"{function}: a CPU generator cannot draw on the device")
    out = function(*tree_map(held, args), **tree_map(held, kwargs))
    owners = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, OnDevice)}
    crossed = bool(tensors) and bool(devices) and result_here != inputs_here

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not result_here:
            return leaf.clone() if crossed else leaf
        return owners[id(leaf)] if id(leaf) in owners else OnDevice(leaf.clone() if crossed else leaf)

    return tree_map(placed, out)


def held(leaf: Any) -> Any:
    """Return what the CPU works on in the device's place."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf.held if isinstance(leaf, OnDevice) else leaf


class Pretend(TorchDispatchMode):
    """Make `meta` a device with values."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return on_device(function, args, kwargs or {})


class Made(TorchFunctionMode):
    """Let `torch.tensor` and its like, which do not go through a dispatch mode, make tensors of the device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", None) if function in (torch.tensor, torch.as_tensor) else None
        made = function(*args, **kwargs)
        return made if device is None else made.to(device)


@contextmanager
def pretended() -> Iterator[None]:
    """Make `meta` a device with values, which fused optimisers accept too."""
    with pytest.MonkeyPatch.context() as patch, Pretend(), Made():
        patch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: ["cpu", "cuda", "meta"])
        yield


@pretended()
def test_the_pretended_device_refuses_what_cuda_refuses() -> None:
    here, cpu = torch.ones(3, device=FAKE), torch.ones(3)
    assert (here + here).device == FAKE and (here + cpu[0]).tolist() == [2.0] * 3
    assert here[torch.tensor([0, 2])].cpu().tolist() == [1.0, 1.0]
    assert cpu.to(FAKE).device == FAKE and torch.zeros(3, device=FAKE).copy_(cpu).sum().item() == 3
    with pytest.raises(RuntimeError, match="met one of the device"):
        here + cpu
    with pytest.raises(RuntimeError, match="met one of the device"):
        cpu[torch.tensor([0, 2], device=FAKE)]
    with pytest.raises(RuntimeError, match="cannot draw on the device"):
        torch.rand(3, device=FAKE, generator=torch.Generator())
    weight = torch.nn.Linear(3, 1).to(FAKE).weight
    (weight * here).sum().backward()
    assert copy.deepcopy(weight.grad).device == FAKE and weight.grad.tolist() == [[1.0] * 3]


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@everyday(few=True)
def test_a_method_gives_the_same_numbers_on_a_device(case: Case, engine: str, caplog: pytest.LogCaptureFixture) -> None:
    same_on_a_device(case, engine, caplog)


@pytest.mark.long
@pytest.mark.parametrize("case", FEW_CASES, ids=lambda case: case.id)
def test_the_engine_that_is_made_of_both_does_too(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    same_on_a_device(case, "auto", caplog)


@everyday(few=True)
def test_a_method_gives_the_same_numbers_where_tensors_travel_without_nccl(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every other client is at another rank: gloo takes what comes and goes there through the processor's memory."""
    post = posted(monkeypatch)
    exchange, evaluate = InProcess.exchange, InProcess.evaluate

    def travelled(messages: Mapping[int, Message]) -> dict[int, Message]:
        there = unpacked(post(packed({client: messages[client] for client in messages if client % 2})))
        return {client: there.get(client, messages[client]) for client in messages}

    def exchange_far(self: InProcess, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        replies = exchange(self, step, travelled(messages), ctx)
        replies.messages = travelled(replies.messages)
        return replies

    def evaluate_far(self: InProcess, messages: Mapping[int, Message], ctx: Context, on: str = "test") -> Any:
        return evaluate(self, travelled(messages), ctx, on)

    monkeypatch.setattr(InProcess, "exchange", exchange_far)
    monkeypatch.setattr(InProcess, "evaluate", evaluate_far)
    same_on_a_device(case, "sequential", caplog)


def posted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tree], Tree]:
    """Return what a link without NCCL does with a tree: what one rank sends, the other one receives."""
    post: deque[Tensor] = deque()

    def send(tensor: Tensor, to: int) -> None:
        assert tensor.device.type == "cpu"
        post.append(tensor.clone())

    def receive(tensor: Tensor, source: int) -> None:
        assert tensor.device.type == "cpu"
        tensor.copy_(post.popleft())

    monkeypatch.setattr(dist, "send", send)
    monkeypatch.setattr(dist, "recv", receive)
    link = Link.__new__(Link)
    link.gpu, link.device, link.talking, link.ended = None, FAKE, False, False

    def there(tree: Tree) -> Tree:
        link.send(1, tree)
        return link.receive(1)

    return there


def same_on_a_device(case: Case, engine: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "polyfed.engine")
    plain = run_case(case, rounds=1, engine=engine, workers=1, sizes=FEW_SAMPLES)
    refused = [record.message for record in caplog.records]
    caplog.clear()
    with pretended():  # in this thread: hence one worker
        moved = run_case(case, rounds=1, engine=engine, workers=1, sizes=FEW_SAMPLES, device="meta")
    assert [record.message for record in caplog.records] == refused  # what is stacked here is stacked there
    for one, other in zip(plain.history, moved.history, strict=True):
        assert one.get("loss") == other.get("loss")
        assert one["accuracy"] == other["accuracy"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("engine", ["auto", "batched", "threads"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_method_gives_nearly_the_same_numbers_on_a_gpu(case: Case, engine: str) -> None:
    """All methods on the real device, in float64: sums are rounded in another order there, and nothing else."""
    with double_precision():
        plain = run_case(case, rounds=1, engine="sequential")
        moved = run_case(case, rounds=1, engine=engine, device="cuda")
    for one, other in zip(plain.history, moved.history, strict=True):
        assert one.get("loss", 0.0) == pytest.approx(other.get("loss", 0.0), rel=1e-6)
        assert one["accuracy"]["mean"] == pytest.approx(other["accuracy"]["mean"], abs=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_same_seed_gives_the_same_bits_on_a_gpu() -> None:
    (case,) = [case for case in CASES if case.id == "fedavg-mlp"]
    first, second = (run_case(case, rounds=2, device="cuda") for _ in range(2))
    assert [line["accuracy"] for line in first.history] == [line["accuracy"] for line in second.history]
    for client in first.models:
        for one, two in zip(first.models[client].parameters(), second.models[client].parameters(), strict=True):
            assert torch.equal(one, two)
