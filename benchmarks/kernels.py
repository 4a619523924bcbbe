"""Convolutions with large kernels: frequencies beside torch's own, and whether the rule knows which is faster.

python -m benchmarks.kernels [--save]: processor seconds of forward and backward on one thread, channels last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time

import torch
import torch.nn.functional as F

import polyfed as pf  # noqa: F401 (products are rounded as in a run)
from benchmarks.run import RESULTS, machine
from polyfed.ops.frequency import Shape, convolve

FILE = RESULTS / "kernels.json"
BATCHES, CHANNELS = (10, 32, 64), ((1, 32), (6, 16), (16, 16), (16, 32), (32, 64), (64, 64))
SIZES, KERNELS = (7, 14, 28), (5, 7)
REPEATS = 9
LARGEST = 4e9  # products: beyond, a setting takes seconds and shows nothing new


def measure(batch: int, into: int, channels: int, size: int, kernel: int) -> dict[str, float | bool | list[int]]:
    """Return the milliseconds of both ways (medians, in turns), and which one the rule takes."""
    rng = torch.Generator().manual_seed(0)
    last = {"memory_format": torch.channels_last}
    x = torch.randn(batch, into, size, size, generator=rng).to(**last).requires_grad_(into > 1)  # images have none
    weight = torch.randn(channels, into, kernel, kernel, generator=rng).to(**last).requires_grad_()
    bias = torch.zeros(channels, requires_grad=True)
    along = torch.randn(batch, channels, size, size, generator=rng).to(**last)
    padding = (kernel // 2, kernel // 2)
    wanted = [tensor for tensor in (x, weight, bias) if tensor.requires_grad]

    def direct() -> None:
        torch.autograd.grad(F.conv2d(x, weight, bias, padding=padding), wanted, along)

    def frequencies() -> None:
        torch.autograd.grad(convolve(x, weight, bias, padding), wanted, along)

    seconds: dict[str, list[float]] = {"direct": [], "frequencies": []}
    for number in range(REPEATS + 2):
        for way in (direct, frequencies):
            start = time.process_time()
            way()
            if number > 1:
                seconds[way.__name__].append(time.process_time() - start)
    found = {name: sorted(taken)[REPEATS // 2] * 1e3 for name, taken in seconds.items()}
    pays = Shape((size, size), (kernel, kernel), padding).pays(batch, into, channels)
    return {"setting": [batch, into, channels, size, kernel], **found, "rule": pays}


def main() -> None:
    """Measure the grid and say where the rule is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for batch, (into, channels), size, kernel in itertools.product(BATCHES, CHANNELS, SIZES, KERNELS):
        if batch * into * channels * (size * kernel) ** 2 * 3 > LARGEST:
            continue
        rows.append(row := measure(batch, into, channels, size, kernel))
        ratio = row["direct"] / row["frequencies"]  # type: ignore[operator]
        told = f"{into} to {channels} channels, {size}x{size}, kernel {kernel}, batch {batch}"
        chosen = "frequencies" if row["rule"] else "direct"
        print(f"{told:50} direct {row['direct']:7.2f} ms  frequencies {ratio:5.2f}x  rule: {chosen}", flush=True)
    if options.save:
        FILE.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
