"""Methods that average weights."""

from tests.contract.case import DEPTHS, WIDTHS, Case

UNIFORM = {"weighting": "uniform"}
BATCHES = (14, 16, 15, 13)  # samples of clients that take the same number of steps

CASES = [
    Case("scaffold", ("mlp:2x16",), off={}, base="fedavg", base_options=UNIFORM, where={"rounds": 1}),
    Case("scaffold", DEPTHS, {"option": "gradient"}, off={}, base="fedavg", base_options=UNIFORM, where={"rounds": 1}),
    Case("fednova", ("mlp:2x16",), off={}, base="fedavg", where={"sizes": BATCHES}),
    Case(
        "fednova",
        DEPTHS,
        {"gmf": 0.5, "mu": 0.1, "straggler_share": 0.5},
        off={"gmf": 0.0, "mu": 0.0, "straggler_share": 0.0},
        base="fedavg",
        where={"sizes": BATCHES},
    ),
    Case("moon", ("mlp:2x16",), {"mu": 5.0, "previous": 2}, off={"mu": 0.0}, base="fedavg"),
    Case("moon", DEPTHS, off={"mu": 0.0}, base="fedavg"),
    Case("moon_hetero", WIDTHS, {"mu": 5.0}, off={"mu": 0.0}, base="heterofl"),
]
