"""Evaluation, aggregation, overhead and scale, each on its own, against what people write by hand."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import polyfed as pf
from benchmarks.reference import average, measure, tensors_of
from benchmarks.workloads import CNN_MIX, MNIST, Workload
from polyfed.api import prepare
from polyfed.core.cost import peak_memory
from polyfed.core.message import Message
from polyfed.core.method import Method
from polyfed.core.settings import Evaluation, Execution, Participation, Settings, Training
from polyfed.models import build
from polyfed.ops.aggregate import Part, Slot, scatter_mean

STATES = 100
SCALE_CLIENTS = 10_000


def evaluation(clients: int = 20) -> dict[str, Callable[[], None]]:
    """20 clients' networks on 10,000 test images: the plain loop, and the engine's workers."""
    workload = Workload("evaluation", "local", clients, 40, 32, CNN_MIX, MNIST, 2.0, test=10_000)
    data = workload.data()
    federation = workload.federation("threads", data)
    federation._exchange(federation.plan.round[0], sorted(federation.backend.infos), {})
    models = [workload.model(number) for number in range(clients)]
    test = tensors_of(data.test)

    def plain() -> None:
        measure(models, test)

    def ours() -> None:
        federation.backend.measured.clear()  # type: ignore[attr-defined]
        federation._evaluate_clients()

    return {"reference": plain, "threads": ours}


def aggregation() -> dict[str, Callable[[], None]]:
    """Average 100 ResNet-18 states: by a sum over dictionaries, and by the streaming mean."""
    module = build("resnet18", (3, 32, 32), 10)
    state = {name: tensor for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
    few = [{name: tensor + k for name, tensor in state.items()} for k in range(8)]
    states = [few[k % len(few)] for k in range(STATES)]  # the work of a hundred in the memory of eight
    slots = {name: Slot(name) for name in state}
    server = {name: tensor.clone() for name, tensor in state.items()}
    weights = [float(k + 1) for k in range(STATES)]

    def plain() -> None:
        average(states, weights)

    def ours() -> None:
        scatter_mean(server, (Part(s, slots, w) for s, w in zip(states, weights, strict=True)))

    return {"reference": plain, "streaming": ours}


class Idle(Method):
    """Clients do nothing: what is left is the framework."""

    def local(self, client: Any, step: Any, ctx: Any) -> Message:  # type: ignore[override]
        """Return an empty reply."""
        return Message()


def overhead(clients: int = 200) -> float:
    """Return the milliseconds that the framework costs for a client and round with nothing to do."""
    workload = replace(Workload("idle", "local", clients, 4, 4, ("mlp:1x100",), MNIST, 0.0))
    settings = Settings(1000, evaluation=Evaluation(0))
    federation = prepare(Idle(), workload.data(), list(workload.models), settings)
    everybody = sorted(federation.backend.infos)
    step = federation.plan.round[0]
    federation._exchange(step, everybody, {})
    times = []
    for _ in range(5):
        start = time.perf_counter()
        federation._exchange(step, everybody, {})
        times.append(time.perf_counter() - start)
    return sorted(times)[2] / clients * 1e3


def scale() -> dict[str, float]:
    """Return start-up, seconds of a round and peak memory of 10,000 clients, 1 % active, in a process of its own."""
    program = "from benchmarks.parts import run_scale; run_scale()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    start, seconds, peak = map(float, done.stdout.split()[-3:])
    return {"start_seconds": start, "round_seconds": seconds, "peak_gigabytes": peak}


def run_scale(clients: int = SCALE_CLIENTS) -> None:
    """Run a few rounds of FedAvg on perceptrons and print start-up, the last round and the peak."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (clients * 6, *MNIST)).astype(np.uint8), rng.integers(0, 10, clients * 6)
    begin = time.perf_counter()
    data = pf.load((x, y), test=(x[:1000], y[:1000]))
    parts = pf.split(data, clients=clients, by="iid", seed=0)
    settings = Settings(
        4, 0, Training(batch_size=10), Participation(0.01), Evaluation(0, clients=100), Execution("batched")
    )
    federation = prepare(pf.methods.make("fedavg", {}), parts, ["mlp:1x100"], settings)
    start = time.perf_counter() - begin
    rounds = []
    federation.observers.append(lambda line: rounds.append(line["seconds"]["total"]))
    federation.run()
    print(start, rounds[2], peak_memory() / 1e9)
