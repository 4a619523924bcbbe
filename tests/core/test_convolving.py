"""Which convolutions of a network are computed with frequencies, and that nothing else changes."""

import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyfed as pf
from polyfed.core import convolving
from polyfed.core.convolving import LargeKernels
from polyfed.ops.frequency import Shape
from polyfed.ops.memory import _memory


@pytest.fixture
def counted(monkeypatch):
    calls = []

    def counting(*args):
        calls.append(tuple(args[1].shape))
        return real(*args)

    real = convolving.convolve
    monkeypatch.setattr(convolving, "convolve", counting)
    return calls


X = torch.randn(32, 32, 14, 14)
WEIGHT = torch.randn(64, 32, 5, 5) / 28


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.conv2d(X, WEIGHT, None, 1, 2),
        lambda: F.conv2d(X, WEIGHT, padding=(2, 2)),
        lambda: F.conv2d(input=X, weight=WEIGHT, padding="same"),
        lambda: F.conv2d(X, torch.randn(64, 32, 7, 7) / 40, torch.ones(64), padding="valid"),
        lambda: F.conv2d(X, torch.randn(64, 32, 7, 5) / 28, padding=(3, 0)),
        lambda: nn.Conv2d(32, 64, 5, padding=2)(X),
        lambda: nn.Conv2d(32, 64, 5, padding=2, padding_mode="reflect")(X),
    ],
)
def test_large_kernels_are_computed_with_frequencies(call, counted):
    mode = LargeKernels({"main": nn.Conv2d(32, 64, 5)})
    torch.manual_seed(0)
    wanted = call()
    torch.manual_seed(0)
    with mode:
        found = call()
    assert len(counted) == 1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.conv2d(X, WEIGHT, stride=2, padding=2),
        lambda: F.conv2d(X, WEIGHT, dilation=2),
        lambda: F.conv2d(X, WEIGHT[:, :, :3, :3], padding=1),
        lambda: F.conv2d(X, WEIGHT, padding=5),  # wider than the kernel
        lambda: F.conv2d(X[:2], WEIGHT, padding=2),  # too few samples
        lambda: F.conv2d(X[0], WEIGHT, padding=2),
        lambda: F.conv2d(X.double(), WEIGHT.double(), padding=2),
    ],
)
def test_all_others_are_left_to_torch(call, counted):
    with LargeKernels({"main": nn.Conv2d(32, 64, 5)}):
        call()
    assert counted == []


STRANGE = {
    "padding of numpy": {"padding": np.int64(2)},
    "stride of numpy": {"stride": np.int64(1), "padding": 2},
    "padding as a tensor": {"padding": torch.tensor(2)},
    "even kernel": {"weight": torch.ones(64, 32, 6, 6), "padding": "same"},
    "groups": {"weight": torch.ones(64, 16, 5, 5), "groups": 2, "padding": 2},
    "another place": {"input": X.to("meta"), "weight": WEIGHT.to("meta"), "padding": 2},
    "another layout": {"input": X.to_mkldnn(), "padding": 2},
}


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_what_only_torch_can_read_is_left_to_torch(name, counted, monkeypatch):
    monkeypatch.setattr(Shape, "pays", lambda *_: True)
    given = {"input": X, "weight": WEIGHT} | STRANGE[name]
    with LargeKernels({"main": nn.Conv2d(32, 64, 5)}):
        found = F.conv2d(**given)
    assert counted == []
    assert found.shape == F.conv2d(**given).shape


@pytest.mark.parametrize(
    "wrong", [{"padding": (2, 2, 2)}, {"padding": "SAME"}, {"bias": torch.ones(64, 1)}, {"bias": torch.tensor(1.0)}]
)
def test_what_is_wrong_for_torch_is_wrong(wrong):
    with LargeKernels({"main": nn.Conv2d(32, 64, 5)}), pytest.raises((RuntimeError, TypeError)):
        F.conv2d(**{"input": X, "weight": WEIGHT, "padding": 2} | wrong)


class Marked(torch.Tensor):
    """A tensor that keeps its type."""


def test_a_tensor_of_another_class_keeps_it(counted):
    with LargeKernels({"main": nn.Conv2d(32, 64, 5)}):
        assert type(F.conv2d(X.as_subclass(Marked), WEIGHT, padding=2)) is Marked
    assert counted == []


def layer():
    return nn.Conv2d(32, 64, 5, padding=2)


WAYS = {
    "gradient of a function": lambda conv: torch.func.grad(lambda x: conv(x).square().sum())(X),
    "many at once": lambda conv: torch.func.vmap(conv)(X[None]),
    "forward": lambda conv: torch.func.jvp(conv, (X,), (X,)),
    "forward by hand": lambda conv: dual(conv),
    "inference": lambda conv: torch.inference_mode()(conv)(X),
    "narrow": lambda conv: torch.autocast("cpu", torch.bfloat16)(conv)(X),
    "traced": lambda conv: torch.jit.trace(conv, X, check_trace=False)(X),
}


def dual(conv):
    with torch.autograd.forward_ad.dual_level():
        return conv(torch.autograd.forward_ad.make_dual(X, X))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_whatever_is_no_plain_training_is_left_to_torch(name, counted):
    conv = layer()
    with LargeKernels({"main": conv}):
        WAYS[name](conv)
        assert counted == []
        conv(X).sum().backward()  # and spoils nothing for what comes after
    assert len(counted) == 1


def test_many_gradients_at_once_are_right(counted):
    conv, x = layer(), X.clone().requires_grad_()
    along = torch.randn(2, 32, 64, 14, 14)
    with LargeKernels({"main": conv}):
        found = torch.autograd.grad(conv(x), x, along, is_grads_batched=True)[0]
    assert len(counted) == 1
    wanted = torch.stack([torch.autograd.grad(conv(x), x, one)[0] for one in along])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_other_defaults_change_nothing():
    with LargeKernels({"main": nn.Conv2d(32, 64, 5)}):
        wanted = F.conv2d(X, WEIGHT, padding=2)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        with LargeKernels({"main": nn.Conv2d(32, 64, 5)}):
            found = F.conv2d(X, WEIGHT, padding=2)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)


def test_memory_goes_back_at_the_end():
    conv = layer()
    with LargeKernels({"main": conv}):
        conv(X).sum().backward()
        assert _memory.scratch
        assert len(_memory.free) == 2
    assert not _memory.scratch
    assert not _memory.free


def test_errors_are_those_of_torch():
    with LargeKernels({"main": nn.Conv2d(32, 64, 5)}), pytest.raises(RuntimeError, match="channels"):
        F.conv2d(X, WEIGHT[:, :16], padding=2)
    with LargeKernels({"main": nn.Conv2d(32, 64, 5)}), pytest.raises(RuntimeError, match="size"):
        F.conv2d(X[:, :, :3, :3], WEIGHT)


@pytest.mark.parametrize(
    "network",
    [
        nn.Conv2d(32, 64, 3),
        nn.Conv2d(6, 16, 5),  # too few channels, however many samples
        nn.Conv2d(32, 64, 7, stride=2),
        nn.Conv2d(32, 64, 5, groups=2),
        nn.Linear(3, 2),
    ],
)
def test_networks_without_such_a_layer_are_not_looked_at(network, counted):
    mode = LargeKernels({"main": network})
    with mode:
        F.conv2d(X, WEIGHT, padding=2)
    assert counted == []
    assert not mode.needed


def test_one_such_layer_is_enough():
    assert LargeKernels({"main": nn.Linear(3, 2), "more": nn.Sequential(nn.Conv2d(32, 64, 5))}).needed
    assert not LargeKernels({"main": nn.Conv2d(32, 64, 5)}, able=False).needed


def test_other_threads_are_not_concerned(counted):
    with LargeKernels({"main": nn.Conv2d(32, 64, 5)}):
        thread = threading.Thread(target=lambda: F.conv2d(X, WEIGHT, padding=2))
        thread.start()
        thread.join()
    assert counted == []


class Own(nn.Module):
    """A network that calls `view` on a map, so it keeps the usual order of axes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(1, 16, 3, padding=1)
        self.large = nn.Conv2d(16, 32, 7, padding=3)
        self.last = nn.Linear(32 * 16 * 16, 10)

    def forward(self, x):
        return self.last(self.large(self.body(x).relu()).relu().view(len(x), -1))


def federation(model, method="fedavg", **settings):
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    x, y = torch.rand(4, 48, 1, 16, 16, generator=rng), torch.randint(0, 10, (4, 48), generator=rng)
    parts = [(one.numpy(), labels.numpy()) for one, labels in zip(x, y, strict=True)]
    clients = pf.Clients.from_parts(parts, test=parts[0], num_classes=10, name="noise", seed=0)
    return pf.run(method, clients, [model], rounds=2, training=pf.Training(batch_size=32, lr=0.05), **settings)


@pytest.mark.parametrize("model", ["cnn2", Own])
def test_runs_use_them_and_learn_the_same(model, counted, monkeypatch):
    results = {}
    for workers in (1, 2):
        results[workers] = federation(model, engine="threads", workers=workers)
        assert len(counted) >= 4 * 2  # every client in both rounds
        counted.clear()
    monkeypatch.setattr(convolving, "could_pay", lambda *_: False)
    plain = federation(model, engine="threads", workers=1)
    assert counted == []
    states = [result.models[2].state_dict() for result in (results[1], results[2], plain)]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name])  # to the bit, for any number of workers
        torch.testing.assert_close(tensor, states[2][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["dafkd", "dafkd_hetero"])
def test_methods_that_transform_functions_run(method):
    federation("cnn2", engine="threads", workers=1, method=method)


def test_private_training_takes_samples_one_by_one_and_is_left_alone(counted, monkeypatch):
    monkeypatch.setattr(Shape, "pays", lambda *_: True)
    federation("cnn2", engine="threads", workers=1, privacy=pf.Privacy(epsilon=8.0, max_norm=1.0))
    assert counted == []
