"""Tables that are arithmetic: parameters, traffic and memory are counted, nothing is trained and nothing is drawn.

Each function returns case -> label -> quantity -> value, in the paper's units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from torch import nn

from polyfed.core.stage import LossFunction

Counted = dict[str, dict[str, dict[str, float]]]
FLOAT = 4  # bytes
FEDIN_ZOO = tuple(f"resnet{depth}:stem=fedin" for depth in (10, 14, 18, 22, 26))
LEVELS = (1.0, 0.5, 0.25, 0.125, 0.0625)  # of HeteroFL and FedRolex
BATCH = 16
PAIRS = BATCH * (64 * 8 * 8 + 512)  # floats: a batch of features before and after the middle


def parameters(network: nn.Module) -> int:
    """Return how many numbers are trained."""
    return sum(parameter.numel() for parameter in network.parameters())


def fedin_overheads() -> Counted:
    """FedIN, Table 4: parameters that a client sends in a round, in millions, and memory of an update, in MB.

    Memory: parameters, gradients, Adam's two averages and the activations of a batch of 16, mean over the five
    networks. SCAFFOLD keeps two control variates more, MOON two networks more; FedIN a batch of pairs, what the pass
    over them saves, and the anchor of its proximal term.
    """
    from polyfed.models import build

    zoo = {name: build(name, (3, 32, 32), 10) for name in FEDIN_ZOO}
    slices = {
        rate: build("resnet152:stem=fedin" + (f"@{rate}" if rate < 1 else ""), (3, 32, 32), 10) for rate in LEVELS
    }
    sent = fmean(parameters(net) for net in zoo.values())
    sliced = fmean(parameters(net) for net in slices.values())
    held = fmean(_memory(net) for net in zoo.values())
    held_sliced = fmean(_memory(net) for net in slices.values())
    params = {"fedavg": sent, "scaffold": 2 * sent, "moon": sent, "heterofl": sliced, "fedrolex": sliced}
    memory = {"fedavg": held, "scaffold": held + 2 * FLOAT * sent, "moon": held + 2 * FLOAT * sent}
    memory |= {
        "heterofl": held_sliced,
        "fedrolex": held_sliced,
        "fedin": fmean(_fedin_memory(net) for net in zoo.values()),
    }
    params["fedin"] = sent + PAIRS
    return {
        "all": {
            label: {"params": round(params[label] / 1e6, 4), "memory": round(memory[label] / 1e6, 2)}
            for label in ("fedavg", "scaffold", "moon", "heterofl", "fedrolex", "fedin")
        }
    }


def _memory(network: nn.Module) -> float:
    """Return the bytes of one update with Adam on CIFAR-10 images."""
    from polyfed.methods.local import Local

    return _update_memory(network, (Local().loss,), {})


def _fedin_memory(network: nn.Module) -> float:
    """Return the same of FedIN, whose one backward pass is that of both losses."""
    import torch

    from polyfed.methods.fedin import FedIN

    method = FedIN()
    anchor = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    pairs = {"s_in": torch.zeros(BATCH, 64, 8, 8), "s_out": torch.zeros(BATCH, 512)}
    held = _update_memory(network, (method.joint_loss,), {"anchor": anchor, **pairs})
    return held + FLOAT * (parameters(network) + PAIRS)  # the anchor, and the pairs


def _update_memory(network: nn.Module, losses: tuple[LossFunction, ...], aux: Mapping[str, Any]) -> float:
    import torch

    from polyfed.analysis.memory import update_memory
    from polyfed.core.stage import Batch, Update

    rows = Batch(torch.zeros(BATCH, 3, 32, 32), torch.zeros(BATCH, dtype=torch.int64), {})
    found = update_memory(Update(losses, {"main": None}), {"main": network}, rows, aux)
    return found["total"] + 2 * found["gradients"]  # Adam's two averages


def fedmd_zoo() -> Counted:
    """FedMD+Global, Table 1: parameters of the wide ResNets with 30 outputs."""
    from polyfed.models import build

    counted = {f"wrn-{depth}-1": parameters(build(f"wrn-{depth}-1", (3, 32, 32), 30)) for depth in range(10, 41, 6)}
    clients = {10: 6, 16: 4, 22: 4, 28: 4, 34: 2}
    total = sum(number * counted[f"wrn-{depth}-1"] for depth, number in clients.items())
    rows: dict[str, dict[str, float]] = {name: {"params": float(number)} for name, number in counted.items()}
    rows["clients"] = {"millions": round(total / 1e6, 4)}
    for share in (40, 60, 100):  # the paper's totals fit 20 networks of WRN-34
        rows[f"fedavg-{share}"] = {"millions": round(share / 100 * 20 * counted["wrn-34-1"] / 1e6, 4)}
    return {"all": rows}


FEDVTC_SETS = {"mnist": (10, 980), "cifar10": (10, 4096), "cifar100": (100, 4096), "tiny": (200, 4096)}
CLIENT_ROUNDS = {"fedproto": 12_000, "fedtgp": 12_000, "ccvr": 12_000, "fedvtc": 8_000}  # as the cost table implies
DECODERS = 40  # transmissions of the decoder at the end: 20 active clients, up and down


def fedvtc_traffic() -> Counted:
    """FedVTC, Table 2: all traffic of a federation in GB, where it follows from sizes alone."""
    found: Counted = {}
    for name, (classes, latents) in FEDVTC_SETS.items():
        both = 2 * FLOAT * latents
        decoder = DECODERS * FLOAT * _decoder(name)
        totals = {
            "fedproto": CLIENT_ROUNDS["fedproto"] * both * classes,
            "fedtgp": CLIENT_ROUNDS["fedtgp"] * both * classes,
            "ccvr": CLIENT_ROUNDS["ccvr"] * FLOAT * ((classes + 1) * latents + latents**2),  # means, one covariance
            "fedvtc": CLIENT_ROUNDS["fedvtc"] * both * (classes + 1) + decoder,
        }
        found[name] = {label: {"gb": round(total / 1e9, 4)} for label, total in totals.items()}
    return found


def _decoder(name: str) -> int:
    from polyfed.models.vtc import VTC

    latents = FEDVTC_SETS[name][1]
    shape = {"mnist": (1, 28, 28), "tiny": (3, 64, 64)}.get(name, (3, 32, 32))
    return parameters(VTC(latents, shape))


COUNTS: dict[str, Callable[[], Counted]] = {
    "fedin_overheads": fedin_overheads,
    "fedmd_zoo": fedmd_zoo,
    "fedvtc_traffic": fedvtc_traffic,
}
