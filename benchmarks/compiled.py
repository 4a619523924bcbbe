"""Would `torch.compile` make a training step of a ResNet faster? `python -m benchmarks.compiled [--save]`.

A step is forward, loss, backward and update on a ready batch, on one thread, as a worker of the engine runs it (weights
and images channels last), with the network as it is and as inductor compiles it. Both take turns, and the least
processor time of each counts, so the ratio holds on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.run import RESULTS, machine
from polyfed.models import build

BATCH, TURNS, STEPS = 32, 12, 3


def step_of(module: nn.Module, call: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Return what runs one training step."""
    parameters = list(module.parameters())

    def step() -> None:
        loss = nn.functional.cross_entropy(call(x), y)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-0.01)

    return step


def measure(network: str) -> dict[str, Any]:
    """Return the seconds of a step, both ways, and of the first compiled one."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, 3, 32, 32).to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (BATCH,))
    modules = [build(network, (3, 32, 32), 10).train().to(memory_format=torch.channels_last) for _ in range(2)]
    plain = step_of(modules[0], modules[0], x, y)
    compiled = step_of(modules[1], torch.compile(modules[1]), x, y)
    plain()
    start = time.perf_counter()
    compiled()
    first = time.perf_counter() - start
    seconds: dict[str, list[float]] = {"plain": [], "compiled": []}
    for _ in range(TURNS):
        for name, step in (("plain", plain), ("compiled", compiled)):
            start = time.thread_time()
            for _ in range(STEPS):
                step()
            seconds[name].append((time.thread_time() - start) / STEPS)
    least = {name: min(values) for name, values in seconds.items()}
    return {"network": network, **least, "ratio": least["plain"] / least["compiled"], "first_compiled": first}


def main() -> None:
    """Measure, show, and perhaps save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--networks", default="resnet10:w16,resnet18:w16,resnet26:w16")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for network in arguments.networks.split(","):
        lines.append(measure(network))
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in lines[-1].items()})
        if arguments.save:
            Path(RESULTS / "compiled.json").write_text(
                json.dumps({"machine": machine(), "steps": lines}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
