"""Methods whose clients hold widths of one network."""

from tests.contract.case import WIDTHS, Case

CASES = [
    Case("fedrolex", WIDTHS, off={"extraction": "static"}, base="heterofl"),
    Case(
        "fjord",
        WIDTHS,
        {"widths": (0.25, 0.5, 1.0), "kd": True},
        off={"widths": (1.0,)},
        base="heterofl",
        base_options={"weighting": "samples", "scaler": False, "mask": False, "clip": None},
    ),
    Case(
        "fiarse",
        ("mlp:2x16",),
        {"sizes": (1.0, 0.25)},
        off={"sizes": (1.0,)},
        base="fedavg",
        base_options={"weighting": "uniform"},
    ),
    Case("fiarse", ("cnn:4-8,bn",), {"sizes": (0.5, 0.02), "scope": "layer", "server_lr": 0.9}),
    Case("heterofl_dynamic", ("cnn:8-16,bn",), {"mix": "a1-b1-c1"}, off={"mix": "a"}, base="heterofl"),
]
