"""Where a round's time goes, and how far it is from what the machine can do: `python -m benchmarks.limits [W1 ...]`.

For each workload: the parts of a round with the engine `auto`; the bare steps (forward, backward and a plain update on
ready tensors, one client on each core, nothing else); and the arithmetic (floating point operations of a round at the
rate of a large matrix product). `--save` writes results/bench/limits.json.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.run import RESULTS, machine
from benchmarks.workloads import WORKLOADS, Workload

ROUNDS = 3
NAMES = ("W1", "W2", "W3", "W4", "W5")  # cross-entropy alone stands for the work of W2's loss


def step_of(workload: Workload, client: int) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Return a client's network, channels last as the engines have it, with one batch."""
    module = workload.model(client).train()
    x, y = torch.rand(workload.batch, *workload.shape), torch.randint(0, 10, (workload.batch,))
    if "mlp" not in workload.models[0]:
        module, x = module.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return module, x, y


def bare_steps(workload: Workload, clients: list[int], count: int) -> None:
    """Take the steps of some clients, and do nothing else."""
    torch.set_num_threads(1)
    for client in clients:
        module, x, y = step_of(workload, client)
        parameters = list(module.parameters())
        for _ in range(count):
            grads = torch.autograd.grad(F.cross_entropy(module(x), y), parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, grads, alpha=-0.01)


def bare_round(workload: Workload, workers: int) -> float:
    """Return the seconds of all steps of a round on all cores."""
    count = -(-workload.samples // workload.batch)
    shares = [list(range(worker, workload.clients, workers)) for worker in range(workers)]
    threads = [threading.Thread(target=bare_steps, args=(workload, share, count)) for share in shares]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def operations(workload: Workload) -> float:
    """Return the floating point operations of a round: those of matrix products and convolutions."""
    total = 0.0
    for client in range(len(workload.models)):
        module, x, y = step_of(workload, client)
        with FlopCounterMode(display=False) as counter:
            F.cross_entropy(module(x), y).backward()
        total += counter.get_total_flops() * workload.clients / len(workload.models)
    return total * -(-workload.samples // workload.batch)


def parts_of(workload: Workload) -> dict[str, float]:
    """Return the seconds of a round's parts with the engine `auto`, the first round apart."""
    federation = workload.federation("auto", workload.data())
    federation.rounds = ROUNDS + 1
    lines = federation.run()[1:]
    return {part: sum(line["seconds"][part] for line in lines) / ROUNDS for part in lines[0]["seconds"]}


def look(workload: Workload, gemm: float) -> dict[str, Any]:
    """Measure one workload."""
    workers = torch.get_num_threads()
    bare = min(bare_round(workload, workers) for _ in range(2))
    torch.set_num_threads(workers)
    parts = parts_of(workload)
    flops = operations(workload)
    return {
        "seconds": parts,
        "framework": parts["total"] - sum(parts.get(key, 0.0) for key in ("local", "fuse", "evaluate")),
        "bare_steps": bare,
        "gflop": flops / 1e9,
        "at_gemm_rate": flops / 1e9 / gemm,
    }


def main() -> None:
    """Measure, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    described = machine()
    found = {}
    headings = ("training", "fusing", "measuring", "rest", "bare steps", "arithmetic")
    print(" " * 4 + "".join(f"{heading:>11}" for heading in headings) + "  (seconds)")
    for workload in WORKLOADS:
        if workload.name in arguments.names:
            found[workload.name] = one = look(workload, described["gemm_gflops"])
            parts = one["seconds"]
            figures = (parts["local"], parts["fuse"], parts["evaluate"], one["framework"])
            limits = (one["bare_steps"], one["at_gemm_rate"])
            print(f"{workload.name:4}" + "".join(f"{value:>11.3f}" for value in (*figures, *limits)), flush=True)
    if arguments.save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        content = {"machine": described, "workloads": found}
        (RESULTS / "limits.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
