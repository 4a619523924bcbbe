"""Methods that average weights."""

from tests.contract.case import DEPTHS, Case

CASES = [
    Case("scaffold", ("mlp:2x16",)),
    Case("scaffold", DEPTHS, {"option": "gradient"}),
    Case("fednova", ("mlp:2x16",)),
    Case("fednova", DEPTHS, {"gmf": 0.5, "mu": 0.1, "straggler_share": 0.5}),
    Case("moon", ("mlp:2x16",), {"mu": 5.0, "previous": 2}, off={"mu": 0.0}, base="fedavg"),
    Case("moon", DEPTHS, off={"mu": 0.0}, base="fedavg"),
]
