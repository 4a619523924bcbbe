"""Channels last only where every processor computes it rightly."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from user_networks import ABLE, NETWORKS

from polyfed.core.layout import channels_last, convolutions, is_able, is_safe, laid_out
from polyfed.models import build
from polyfed.models.generators import ImageGenerator
from polyfed.models.resnet import ConvNorm
from polyfed.models.vtc import VTC


@pytest.mark.long
@pytest.mark.parametrize("processor", ["AVX2", "SSE41", None])
def test_every_convolution_of_the_zoo_is_right_in_both_layouts_on_all_processors(processor):
    environment = {key: value for key, value in os.environ.items() if key != "ONEDNN_MAX_CPU_ISA"}
    if processor is not None:
        environment["ONEDNN_MAX_CPU_ISA"] = processor
    command = [sys.executable, str(Path(__file__).with_name("convolutions.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"exit code {done.returncode} after {last}: {done.stderr[-800:]}"
    assert last[0].endswith("convolutions are right") and int(last[0].split()[0]) > 400


@pytest.mark.parametrize(
    ("kernel", "stride", "channels", "safe"),
    [
        ((1, 1), (2, 2), 15, False),
        ((1, 1), (2, 2), 16, True),
        ((1, 1), (1, 2), 4, False),
        ((1, 1), (3, 1), 4, False),
        ((1, 1), (1, 1), 4, True),
        ((3, 3), (2, 2), 4, True),
        ((1, 3), (2, 2), 4, True),
        ((1,), (2,), 4, False),
    ],
)
def test_strided_1x1_convolutions_of_few_channels_are_not_safe(kernel, stride, channels, safe):
    assert is_safe(torch.empty(8, channels, *kernel), stride) is safe


@pytest.mark.parametrize("name", NETWORKS)
def test_one_unsafe_convolution_keeps_a_whole_network_in_the_usual_order(name):
    network = NETWORKS[name]()
    with channels_last({"main": network}, (3, 8, 8)):
        weights = [layer.weight for layer in convolutions(network) if layer.weight[0].numel() > 1]
        laid = {weight.stride() == laid_out(weight).stride() for weight in weights}
    assert laid == {name in ABLE}


@pytest.mark.parametrize("spec", ["resnet10:w2", "resnet50:w2", "resnet18:w2,pre,stem=7x7", "wrn-10-1@0.1", "cnn:2-3"])
def test_narrow_networks_of_the_zoo_keep_the_fast_layout(spec):
    assert is_able(build(spec, (1, 8, 8), 10), (1, 8, 8))


@pytest.mark.parametrize("make", [partial(VTC, 12, (1, 8, 8)), partial(ImageGenerator, 5, (1, 8, 8), 4)])
def test_networks_that_are_not_fed_with_samples_have_the_fast_layout(make):
    network = make()
    noise, found = torch.randn(6, *network.takes), {}
    for shape in ((1, 8, 8), (7,)):  # whatever the samples are
        assert is_able(make(), shape)
    for layout in ("usual", "fast"):
        with channels_last({"main": network} if layout == "fast" else {}, (1, 8, 8)):
            assert all((w.stride(1) == 1) == (layout == "fast") for w in [c.weight for c in convolutions(network)][:2])
            loss = network(noise).square().sum()
            found[layout] = [loss, *torch.autograd.grad(loss, list(network.parameters()), allow_unused=True)]
    for fast, usual in zip(found["fast"], found["usual"], strict=True):
        assert (fast is None) == (usual is None)
        assert fast is None or torch.allclose(fast, usual, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (7, 6), (8, 8)])
def test_a_shortcut_that_picks_pixels_first_is_the_strided_convolution(size):
    torch.manual_seed(0)
    shortcut = ConvNorm(3, 5, 1, 2, bare=True, bias=True).double()
    strided = nn.Conv2d(3, 5, 1, 2).double()
    strided.load_state_dict(shortcut.conv.state_dict())
    maps = [torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)]
    maps.append(maps[0].detach().clone().requires_grad_())
    found, expected = shortcut(maps[0]), strided(maps[1])
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(found)
    found.backward(direction)
    expected.backward(direction)
    torch.testing.assert_close(maps[0].grad, maps[1].grad)
    torch.testing.assert_close(shortcut.conv.weight.grad, strided.weight.grad)


@pytest.mark.long  # a process of its own
def test_a_first_convolution_does_not_wait_for_torchs_compiler():
    code = (
        "import sys, torch, polyfed as pf\n"
        "x, y = torch.randn(12, 1, 8, 8), torch.arange(12) % 3\n"
        "clients = pf.Clients.from_parts([(x, y)] * 2, test=(x, y))\n"
        "pf.run('fedavg', clients, 'cnn:4-8', rounds=1, engine='threads', progress=False)\n"
        "print('imported:', *sorted({'torch._dynamo', 'scipy', 'sklearn', 'pandas'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["imported:"], done.stdout + done.stderr
