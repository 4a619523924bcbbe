"""Methods for networks of several depths."""

from tests.contract.case import Case

STACKS = ("mlp:2x16", "mlp:3x16")
STAGES = ("resnet:1-1,w4,stem=pool", "resnet:2-2,w4,stem=pool")

CASES = [
    Case(
        "inclusivefl",
        STACKS,
        {"share_head": False},
        off={"share_head": True, "share_top": True, "beta": 0.0},
        base="fedavg",
    ),
    Case("inclusivefl", STAGES, {"delay": 1}, off={"share_top": True, "beta": 0.0}, base="fedavg"),
    Case("inco", STACKS, {"rule": "projection", "mu": 0.1}, off={"rule": "none"}, base="fedprox"),
    Case("inco", STAGES, {"clip": 0.01}, off={"rule": "none"}, base="fedavg"),
]
