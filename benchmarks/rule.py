"""Where the rule of the engine `auto` is right, and by how much it is wrong: `python -m benchmarks.rule [--save]`.

For a grid of networks, inputs, batch sizes and methods: how many times less processor time a step costs a client in a
stack of twenty (or fewer) than alone, on one thread, and which way the rule (`polyfed/engines/auto.py`) goes.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import polyfed as pf
from benchmarks.run import RESULTS, machine
from polyfed import methods
from polyfed.api import prepare
from polyfed.core.party import Party
from polyfed.core.runner import run_stage
from polyfed.core.settings import Execution, Settings, Training
from polyfed.core.threads import one_thread
from polyfed.engines import batched
from polyfed.engines.auto import way_of
from polyfed.engines.work import PLAIN, STACK

FILE = RESULTS / "rule.json"
CLIENTS, STEPS, REPEATS = 20, 6, 3
IMAGES = {"8x8 grey": (1, 8, 8), "14x14 grey": (1, 14, 14), "28x28 grey": (1, 28, 28), "32x32 color": (3, 32, 32)}
NETWORKS = ("mlp:1x16", "mlp:2x32", "mlp:1x128", "mlp:2x200", "mlp:2x512", "cnn:4-8", "cnn:8-16", "cnn:16-32")


class Timed(batched.Batched):
    """Times a stack and a lone client on copies, and leaves it at that."""

    gain = 0.0

    def run_stages(self, backend: Any, step: Any, jobs: Any, ctx: Any) -> None:
        """Compare once, then go on one by one."""
        if not self.gain and not batched.obstacle(backend, jobs, step, ctx):
            with one_thread():
                together = min(stacked(backend, jobs, step, ctx) for _ in range(REPEATS))
                self.gain = min(alone(backend, jobs[0], step, ctx) for _ in range(REPEATS)) / together
        for job in jobs:
            batched.run_alone(backend, job, step, ctx, 0)


def stacked(backend: Any, jobs: Any, step: Any, ctx: Any) -> float:
    """Return the seconds of a client's step in a stack."""
    first = jobs[0].party.states
    tensors = {m: {n: torch.stack([j.party.states[m][n] for j in jobs]) for n in first[m]} for m in first}
    program = batched.make_program(backend, jobs, tensors, step, ctx, 0)
    start = time.thread_time()
    program.run(limit=STEPS)
    return (time.thread_time() - start) * len(program.updates) / sum(m.totals.losses.number for m in program.members)


def alone(backend: Any, job: Any, step: Any, ctx: Any) -> float:
    """Return the seconds of a client's step by itself."""
    party = Party(job.client, job.party.info, job.party.data)
    party.models = dict(job.party.models)
    copies = {m: {n: t.clone() for n, t in state.items()} for m, state in job.party.states.items()}
    backend.store.attach(party, copies, 0)
    stage = replace(job.stage, steps=STEPS, epochs=None)
    start = time.thread_time()
    run_stage(stage, party, ctx, job.name(step))
    return (time.thread_time() - start) / STEPS


def clients_of(shape: tuple[int, ...], batch: int, clients: int) -> pf.Clients:
    """Return clients with random images: only their size matters here."""
    rng = torch.Generator().manual_seed(0)
    count = clients * batch * STEPS
    x, y = torch.randn(count, *shape, generator=rng), torch.randint(0, 10, (count,), generator=rng)
    data = pf.load((x, y), test=(x[:10], torch.arange(10)))
    return pf.split(data, clients=clients, by=pf.IID(), seed=0)


def measure(
    images: str, network: str, batch: int, method: str, optimizer: str, clients: int = CLIENTS
) -> dict[str, Any]:
    """Return one line of the grid."""
    training = Training(batch_size=batch, optimizer=optimizer, lr=0.01)
    settings = Settings(1, training=training, execution=Execution("batched", workers=1))
    federation = prepare(methods.make(method, {}), clients_of(IMAGES[images], batch, clients), [network], settings)
    timed = Timed()
    federation.backend.engine = timed
    federation.run()
    (blueprint,) = federation.backend.blueprints.values()
    way = way_of(blueprint.build(), IMAGES[images], clients, batch)
    return {
        "images": images,
        "network": network,
        "parameters": blueprint.parameters,
        "batch": batch,
        "method": method,
        "optimizer": optimizer,
        "clients": clients,
        "gain": round(timed.gain, 2),
        "stacked": way == STACK or (way == PLAIN and method == "fedavg"),
    }


def wrong(line: dict[str, Any]) -> bool:
    """Tell whether the rule is wrong: a stack that loses, or a lone client that is a fifth slower than in a stack."""
    return bool(line["gain"] < 1 if line["stacked"] else line["gain"] > 1.2)


def main() -> None:
    """Measure the grid, show it, and perhaps save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    save = parser.parse_args().save
    grid = [
        (images, network, batch, "fedavg", "sgd")
        for images in IMAGES
        for network in NETWORKS
        for batch in (8, 32)
        if images != "14x14 grey" or network.startswith("cnn")  # where convolutions stop to gain
    ]
    grid += [
        ("8x8 grey", network, 32, method, "sgd")
        for network in ("mlp:1x16", "mlp:2x512")
        for method in ("fedprox", "moon", "scaffold", "fednova", "fml")
    ]
    grid += [("8x8 grey", network, 32, "fedavg", "adam") for network in ("mlp:1x16", "mlp:2x512", "cnn:4-8")]
    grid += [
        ("8x8 grey", network, batch, method, "sgd")
        for network in ("cnn:16-32,bn", "resnet10:w4", "resnet10:w8")
        for batch, method in ((8, "fedavg"), (32, "fedavg"), (32, "fedprox"))
    ]
    grid += [  # few clients that share a step
        (images, network, batch, "fedavg", optimizer, clients)
        for images, network in (
            ("8x8 grey", "mlp:1x16"),
            ("8x8 grey", "mlp:3x100"),
            ("28x28 grey", "mlp:1x100"),
            ("28x28 grey", "mlp:4x100"),
            ("8x8 grey", "cnn:8-16"),
        )
        for batch, optimizer in ((10, "sgd"), (32, "adam"))
        for clients in (1, 2, 3, 5)
    ]
    grid += [  # the same with other losses
        ("8x8 grey", network, 16, method, optimizer, clients)
        for network in ("mlp:3x100", "cnn:8-16")
        for method in ("fedprox", "scaffold", "fednova")
        for optimizer in ("sgd", "adam")
        for clients in (2, 4, 6, 8)
    ]
    lines = []
    for setting in grid:
        line = measure(*setting)
        lines.append(line)
        words = (
            f"{line['clients']:2} x {line['images']:12} {line['network']:12} batch {line['batch']:3} {line['method']:9}"
            f" {line['optimizer']:5}"
        )
        chosen = "stack" if line["stacked"] else "whole"
        print(
            f"{words} stacked {line['gain']:6.2f} times as fast; rule: {chosen}{'  <- wrong' if wrong(line) else ''}",
            flush=True,
        )
    if save:
        Path(FILE).write_text(json.dumps({"machine": machine(), "grid": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
