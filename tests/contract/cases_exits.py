"""Methods whose clients hold networks with several exits, cut at different depths."""

from tests.contract.case import Case

CASES = [
    Case(
        "depthfl",
        ("cnn:4-8,exits", "cnn:4-8,exits=1"),
        off={"extended": False, "feddyn": False},
        base="fedavg",
        base_options={"weighting": "uniform"},
    ),
    Case(
        "scalefl",
        ("cnn:4-8,bn,exits", "cnn:4-8,bn,exits=1@0.5"),
        off={"static_bn": False},
        base="fedavg",
        base_options={"weighting": "uniform"},
        where={"models": ("cnn:4-8,bn,exits=1",)},
    ),
]
