"""Which convolutions of a network are computed with frequencies, and that nothing else changes."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyfed as pf
from polyfed.core import convolving
from polyfed.core.convolving import LargeKernels


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
        lambda: F.conv2d(X, WEIGHT, torch.ones(64), padding="valid"),
        lambda: F.conv2d(X, torch.randn(64, 32, 7, 5) / 28, padding=(3, 0)),
        lambda: nn.Conv2d(32, 64, 5, padding=2)(X),
        lambda: nn.Conv2d(32, 64, 5, padding=2, padding_mode="reflect")(X),
    ],
)
def test_large_kernels_are_computed_with_frequencies(call, counted):
    mode = LargeKernels({"main": nn.Conv2d(1, 1, 5)})
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
        lambda: F.conv2d(X, WEIGHT[:, :16], groups=2, padding=2),
        lambda: F.conv2d(X, WEIGHT[:, :, :3, :3], padding=1),
        lambda: F.conv2d(X, WEIGHT, padding=5),  # wider than the kernel
        lambda: F.conv2d(X[:2], WEIGHT, padding=2),  # too few samples
        lambda: F.conv2d(X[0], WEIGHT, padding=2),
        lambda: F.conv2d(X.double(), WEIGHT.double(), padding=2),
    ],
)
def test_all_others_are_left_to_torch(call, counted):
    with LargeKernels({"main": nn.Conv2d(1, 1, 5)}):
        call()
    assert counted == []


def test_errors_are_those_of_torch():
    with LargeKernels({"main": nn.Conv2d(1, 1, 5)}), pytest.raises(RuntimeError, match="channels"):
        F.conv2d(X, WEIGHT[:, :16], padding=2)
    with LargeKernels({"main": nn.Conv2d(1, 1, 5)}), pytest.raises(RuntimeError, match="size"):
        F.conv2d(X[:, :, :3, :3], WEIGHT)


def test_networks_without_large_kernels_are_not_looked_at(counted):
    for models, able in (({"main": nn.Conv2d(1, 1, 3)}, True), ({"main": nn.Conv2d(1, 1, 5)}, False)):
        with LargeKernels(models, able):
            F.conv2d(X, WEIGHT, padding=2)
    assert counted == []


def test_other_threads_are_not_concerned(counted):
    with LargeKernels({"main": nn.Conv2d(1, 1, 5)}):
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


def federation(model, tmp_path=None, **settings):
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    x, y = torch.rand(4, 48, 1, 16, 16, generator=rng), torch.randint(0, 10, (4, 48), generator=rng)
    parts = [(one.numpy(), labels.numpy()) for one, labels in zip(x, y, strict=True)]
    clients = pf.Clients.from_parts(parts, test=parts[0], num_classes=10, name="noise", seed=0)
    return pf.run("fedavg", clients, [model], rounds=2, training=pf.Training(batch_size=32, lr=0.05), **settings)


@pytest.mark.parametrize("model", ["cnn2", Own])
def test_runs_use_them_and_learn_the_same(model, counted, monkeypatch):
    results = {}
    for workers in (1, 2):
        results[workers] = federation(model, engine="threads", workers=workers)
        assert len(counted) >= 4 * 2  # every client in both rounds
        counted.clear()
    monkeypatch.setattr(convolving, "SMALLEST", 99)
    plain = federation(model, engine="threads", workers=1)
    assert counted == []
    states = [result.models[2].state_dict() for result in (results[1], results[2], plain)]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name])  # to the bit, for any number of workers
        torch.testing.assert_close(tensor, states[2][name], rtol=1e-3, atol=1e-4)


def test_private_training_takes_samples_one_by_one_and_is_left_alone(counted):
    federation("cnn2", engine="threads", workers=1, privacy=pf.Privacy(epsilon=8.0, max_norm=1.0))
    assert counted == []
