"""Where a round's time goes, and how far it is from what the machine can do: `python -m benchmarks.limits [W1 ...]`.

For each workload: the parts of a round of the reference loop (before) and with the engine `auto` (after); the bare
steps (forward, backward and a plain update on ready tensors, one client on each core, nothing else); and the arithmetic
(floating point operations of a round at the rate of a large matrix product). The last two stand for plain training, so
methods that do more have none. `--save` writes results/bench/limits.json.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from contextlib import suppress
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.reference import measure, tensors_of
from benchmarks.run import RESULTS, machine
from benchmarks.workloads import WORKLOADS, Workload

ROUNDS = 3
PLAIN = ("W1", "W2", "W3", "W4", "W5")  # cross-entropy alone stands for the work of W2's loss


class Enough(Exception):
    """The rounds that are measured have been run."""


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


def before(workload: Workload) -> dict[str, float]:
    """Return the seconds of a round's parts in the reference loop, the first round apart."""
    data = workload.data()
    loop, test = workload.loop(data), tensors_of(data.test)
    loop.round()
    loop.seconds.clear()
    for _ in range(ROUNDS):
        loop.round()
        with loop.counted("measuring"):
            measure(loop.networks(), test)
    return {part: seconds / ROUNDS for part, seconds in loop.seconds.items()}


def after(workload: Workload) -> dict[str, float]:
    """Return the seconds of a round's parts with the engine `auto`, the first round apart."""
    federation = workload.federation("auto", workload.data())
    lines: list[dict[str, Any]] = []

    def note(line: dict[str, Any]) -> None:
        lines.append(line)
        if len(lines) > ROUNDS:  # what comes after the last round, such as fine-tuning, is no part of a round
            raise Enough

    federation.observers.append(note)
    with suppress(Enough):
        federation.run()
    del lines[0]
    means = {part: sum(line["seconds"][part] for line in lines) / ROUNDS for part in lines[0]["seconds"]}
    found = {"training": means["local"], "fusing": means["fuse"], "measuring": means["evaluate"]}
    return {**found, "rest": means["total"] - sum(found.values())}


def look(workload: Workload, gemm: float) -> dict[str, Any]:
    """Measure one workload."""
    found: dict[str, Any] = {"before": before(workload), "after": after(workload)}
    if workload.name in PLAIN:
        workers = torch.get_num_threads()
        found["bare_steps"] = min(bare_round(workload, workers) for _ in range(2))
        torch.set_num_threads(workers)
        found["gflop"] = operations(workload) / 1e9
        found["arithmetic"] = found["gflop"] / gemm
    return found


def digits(seconds: float | None) -> str:
    """Return seconds for the table."""
    return "" if seconds is None else f"{seconds:.3f}" if seconds < 0.5 else f"{seconds:.2f}"


def main() -> None:
    """Measure, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="workloads (all)")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    described = machine()
    file = RESULTS / "limits.json"
    found = json.loads(file.read_text())["workloads"] if file.is_file() else {}
    print("| | training | fusing | measuring | rest | bare steps | arithmetic |\n|---|---|---|---|---|---|---|")
    for workload in WORKLOADS:
        if not arguments.names or workload.name in arguments.names:
            found[workload.name] = one = look(workload, described["gemm_gflops"])
            cells = []
            for part in ("training", "fusing", "measuring"):
                cells.append(" → ".join(digits(one[when].get(part, 0.0)) for when in ("before", "after")))
            cells += [digits(one["after"]["rest"]), *(digits(one.get(key)) for key in ("bare_steps", "arithmetic"))]
            print(f"| {workload.name} | {' | '.join(cells)} |", flush=True)
            if arguments.save:  # after each workload: a long run that is stopped keeps what it has
                RESULTS.mkdir(parents=True, exist_ok=True)
                content = {"machine": described, "workloads": found}
                file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
