"""The optimizers give torch's own numbers, to the bit, without loading its compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from polyfed import Training
from polyfed.core.optimizers import make_optimizer

CLASSES = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", CLASSES)
def test_steps_are_those_of_torch(name: str, momentum: float) -> None:
    rng = torch.Generator().manual_seed(0)
    start = [torch.randn(3, 4, generator=rng), torch.randn(4, generator=rng), torch.randn(2, generator=rng)]
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in start] for _ in range(2))
    training = Training(optimizer=name, lr=0.1, momentum=momentum, weight_decay=0.01)
    more = {"momentum": momentum} if name == "sgd" else {}
    reference = CLASSES[name](theirs, lr=0.1, weight_decay=0.01, fused=True, **more)
    optimizer = make_optimizer(ours, training)
    for step in range(4):
        rate = 0.1 / (step + 1)
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=rng)
            other.grad = one.grad.clone()
        ours[2].grad = theirs[2].grad = None  # a parameter that the loss does not reach stays where it is
        reference.param_groups[0]["lr"] = rate
        reference.step()
        optimizer.step(rate)
    assert all(map(torch.equal, ours, theirs))
    assert torch.equal(ours[2], start[2]) and not torch.equal(ours[0], start[0])


@pytest.mark.long
def test_a_run_does_not_load_the_compiler() -> None:
    script = (
        "import sys, polyfed as pf\n"
        "clients = pf.split(pf.load('digits', limit=100), clients=2)\n"
        "for optimizer in ('sgd', 'adam'):\n"
        "    for engine in ('threads', 'batched'):\n"
        "        pf.run('fedavg', clients, ['mlp:1x4'], 1, pf.Training(optimizer=optimizer), engine=engine)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
