"""Methods whose clients hold widths of one network."""

from tests.contract.case import WIDTHS, Case

CASES = [
    Case("fedrolex", WIDTHS, off={"extraction": "static"}, base="heterofl"),
    Case(
        "fedrolex",
        ("mlp:2x16@0.5", "mlp:2x16@0.25"),
        {"server_model": "mlp:2x16@1", "weighting": "width"},
        off={"extraction": "static", "server_model": "mlp:2x16@0.5", "weighting": "updates"},
        base="heterofl",
    ),
    Case("fedrolex", ("resnet10:w4@1", "resnet10:w4@0.5"), {"extraction": "random", "mask": False}),
    Case(
        "fjord",
        WIDTHS,
        {"widths": (0.25, 0.5, 1.0), "kd": True},
        off={"widths": (1.0,)},
        base="heterofl",
        base_options={"weighting": "samples", "scaler": False, "mask": False, "clip": None},
    ),
    Case("fjord", ("mlp:2x16",), {"widths": (0.5, 1.0)}, stacked=False),
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
