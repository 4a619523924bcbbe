"""Width: the same tiny problem as the authors' programs compute it."""

import pytest
import torch
from tests.released.tiny_problem import Tiny, clients, finished, in_few, in_one, wave
from torch import nn

from polyfed.api import prepare
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.nets import Net
from polyfed.core.settings import Settings
from polyfed.core.stage import Batch
from polyfed.methods.fedrolex import FedRolex
from polyfed.methods.fiarse import FIARSE
from polyfed.methods.fjord import FjORD
from polyfed.methods.heterofl import HeteroFL
from polyfed.methods.scalefl import ScaleFL

NAMES = ("stem.linear.weight", "layers.0.linear.weight", "head.weight")


def fused(method, number):
    """Fuse what clients of rates 1, 1/2 and 1/4 would return in a round, for given weights."""
    run = prepare(method, clients(), ["mlp:2x8@1", "mlp:2x8@0.5", "mlp:2x8@0.25"], Settings(1))
    run.ctx.round = number
    for start, name in enumerate(NAMES):
        run.server.state[name].copy_(wave(run.server.state[name].shape, 1.0 + start))
    replies = {}
    for client, info in run.backend.infos.items():
        sent = run.method.send(run.server, info, Step(), run.ctx).params["main"]
        state = {name: (1 + client) * tensor + wave(tensor.shape, client) for name, tensor in sent.items()}
        replies[client] = Message({"main": state}, meta={"samples": info.samples})
    run.method.fuse(run.server, replies, Step(), run.ctx)
    return [in_one([run.server.state[name]]) for name in NAMES]


def test_slices_of_heterofl_and_windows_of_fedrolex():
    """AIoT-MLSys-Lab/FedRolex, resnet_server.py: `split_model` and `combine` (K = 1), in its first and fourth round."""
    first, fourth = [5.9295506, 17.9491905, 1.3457982], [4.0572938, 25.2024137, 2.0700497]
    assert fused(HeteroFL(mask=False), 1) == pytest.approx(first, abs=1e-5)
    assert fused(FedRolex(mask=False, direction=-1), 1) == pytest.approx(first, abs=1e-5)
    assert fused(FedRolex(mask=False, direction=-1), 4) == pytest.approx(fourth, abs=1e-5)


def test_the_average_of_fjord():
    """adap/flower, baselines/fjord (`fjord_average`): P = 1/4, 1/2, 1, clients of 4, 8 and 12 samples."""
    assert fused(FjORD(widths=(0.25, 0.5, 1.0)), 1) == pytest.approx([6.7427666, 18.9490519, 1.4926499], abs=1e-5)


def distinct():
    """Return a network in which no two weights have one size: of equal ones, theirs keeps all and ours the first."""
    return Tiny(apart=0.37)


def test_two_rounds_of_fiarse():
    """HarliWu/FIARSE, model_utils.py (`Bern`) and server.py: clients that keep 16, 21 and 24 of 27 weights."""
    bias, total = in_few(finished(FIARSE(sizes=(0.6, 0.8, 0.9)), 2, model=distinct).server.state)
    assert bias == pytest.approx([0.0831565, 0.0157937, -0.3150489], abs=5e-6)
    assert total == pytest.approx(4.0299006, abs=1e-5)


class Exits(nn.Module):
    """Three exits whose logits are given."""

    def __init__(self):
        super().__init__()
        self.logits = nn.ParameterList([wave((2, 3), 1.0 + j, 2.0) for j in range(3)])

    def exits(self, x):
        return list(self.logits)


def test_the_loss_of_scalefl():
    """git-disl/scale-fl, train.py and `KDLoss` with gamma 0.05, T = 3: the teacher is not held fixed there."""
    module = Exits()
    batch = Batch(torch.zeros(2, 1), torch.tensor([0, 2]))
    loss = ScaleFL(official=True).loss({"main": Net(module)}, batch, {"gamma": torch.tensor(0.05)})
    loss.backward()
    assert loss.item() == pytest.approx(0.36003078, abs=1e-6)
    expected = [
        [-0.0489847, 0.0404074, 0.0085774, 0.0200171, 0.0126642, -0.0326813],
        [-0.0332113, 0.0290015, 0.0042098, 0.0054244, 0.0208537, -0.0262781],
        [-0.0539782, 0.0316988, 0.0222794, 0.0120632, 0.0817185, -0.0937818],
    ]
    for exit_, gradient in zip(module.logits, expected, strict=True):
        assert exit_.grad.flatten().tolist() == pytest.approx(gradient, abs=1e-6)
