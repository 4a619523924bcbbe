"""What divided fusing saves: `torchrun --nproc-per-node 4 -m benchmarks.ranks [--save]`, with any number of processes.

Rounds of FedAvg with little training, so that what is left is messages and fusing: 20 ResNets layer by layer (W4's
networks) and 100 perceptrons (W3's). Each is run with fusing divided and with fusing at rank 0; the results must be
equal to the bit. Bytes that rank 0 receives and sends in a round, its processor seconds, and the seconds of a round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

import polyfed as pf
from benchmarks.run import RESULTS, machine
from benchmarks.workloads import RESNET_MIX
from polyfed.core.launch import rank, world_size
from polyfed.engines import ranks

ROUNDS = 6
CASES: dict[str, tuple[int, list[str]]] = {
    "20 ResNets": (20, list(RESNET_MIX)),
    "100 perceptrons": (100, ["mlp:1x100"]),
}
WAYS = {"divided": lambda federation: None, "at rank 0": lambda federation: "it is asked for"}


def clients_of(number: int) -> Any:
    """Make few images for each client."""
    rng = np.random.default_rng(0)

    def some() -> tuple[np.ndarray, np.ndarray]:
        return rng.integers(0, 256, (8, 28, 28)).astype(np.uint8), rng.integers(0, 10, 8)

    return pf.Clients.from_parts([some() for _ in range(number)], test=some(), num_classes=10, name="few", seed=0)


@contextmanager
def counting(carried: dict[str, int]) -> Iterator[None]:
    """Count the bytes that this process receives and sends."""
    send, receive = dist.send, dist.recv

    def sending(tensor: torch.Tensor, *rest: Any) -> None:
        carried["sent"] += tensor.nbytes
        send(tensor, *rest)

    def receiving(tensor: torch.Tensor, *rest: Any) -> None:
        carried["received"] += tensor.nbytes
        receive(tensor, *rest)

    with patch.object(dist, "send", sending), patch.object(dist, "recv", receiving):
        yield


def measured(number: int, models: list[str], way: str) -> tuple[dict[str, float], list[Any]]:
    """Run one case one way; return what a round takes at this rank, and the history."""
    carried = {"sent": 0, "received": 0}
    moments: list[tuple[float, float, int, int]] = []

    def note(line: Any = None) -> None:
        moments.append((time.perf_counter(), time.process_time(), carried["received"], carried["sent"]))

    settings: dict[str, Any] = {"evaluate": "end", "workers": 1, "engine": "threads", "observers": [note]}
    with counting(carried), patch.object(ranks, "why_at_first", WAYS[way]):
        training = pf.Training(epochs=1, batch_size=8)
        result = pf.run("fedavg", clients_of(number), models, ROUNDS, training=training, **settings)
    rounds = [[after - before for before, after in zip(*pair, strict=True)] for pair in pairwise(moments[:-1])]
    seconds, busy, received, sent = (median(values) for values in zip(*rounds, strict=True)) if rounds else [0.0] * 4
    fuse = median(line["seconds"].get("fuse", 0.0) for line in result.history)
    found = {"seconds": round(seconds, 3), "processor_seconds": round(busy, 3), "fuse_seconds": round(fuse, 4)}
    found |= {"received_megabytes": round(received / 1e6, 2), "sent_megabytes": round(sent / 1e6, 2)}
    history = [{key: value for key, value in line.items() if key != "seconds"} for line in result.history]
    return found, history


def main() -> None:
    """Measure all cases both ways; rank 0 shows them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="add the figures to results/bench/ranks.json")
    arguments = parser.parse_args()
    cases: dict[str, Any] = {}
    for name, (number, models) in CASES.items():
        found = {way: measured(number, models, way) for way in (WAYS if world_size() > 1 else ["at rank 0"])}
        if rank() == 0:
            histories = [history for _, history in found.values()]
            assert all(history == histories[0] for history in histories), "the two ways differ"
            cases[name] = {way: figures for way, (figures, _) in found.items()}
            print(f"{world_size()} processes, {name}: {cases[name]}", flush=True)
    if rank() == 0 and arguments.save:
        file = RESULTS / "ranks.json"
        stored = json.loads(file.read_text()) if file.is_file() else {}
        stored[str(world_size())] = {"machine": machine(), "cases": cases}
        file.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
