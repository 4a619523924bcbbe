"""Methods that distill: what networks say travels, or is taught to another network at the server."""

from tests.contract.case import WIDTHS, Case

FEDDF = {"distill_steps": 6, "distill_batch": 16}

CASES = [
    Case("feddistill", off={"lam": 0.0}, base="local"),
    Case("feddistill", ("mlp:2x16",), {"leave_one_out": False}),
    Case("feddistill_plus", ("mlp:2x16",), off={"lam": 0.0}, base="fedavg"),
    Case(
        "feddf",
        public=True,
        options=FEDDF,
        off={"distill_steps": 0},
        base="fedavg",
        base_options={"view": "same_arch"},
    ),
    Case("feddf", ("cnn:4-8,bn",), {**FEDDF, "ensemble": "probs", "temperature": 2.0}, public=True),
    Case(
        "takfl",
        public=True,
        options={"distill_epochs": 2, "distill_lr": 1e-3},
        off={"lam": [0.0, 0.0, 0.0]},
        base="fedavg",
        base_options={"view": "same_arch"},
    ),
    Case("takfl", ("mlp:2x16",), {"distill_epochs": 2, "distill_batch": 16}, public=True),
    Case("dsfl", public=True, options={"subset": 20}, off={"digest_epochs": 0}, base="local"),
    Case("dsfl", ("mlp:2x16",), {"subset": 20, "private_epochs": 1, "space": "log", "temperature": 0.5}, public=True),
    Case(
        "cronus",
        public=True,
        options={"subset": 20, "private_epochs": 1},
        off={"digest_epochs": 0, "private_epochs": 0},
        base="local",
    ),
    Case("feddf_hetero", WIDTHS, public=True, off={"distill_epochs": 0}, base="heterofl"),
    Case("msfkd", WIDTHS, public=True, off={"rho": 1.0, "kappa": 1.0}, base="feddf_hetero"),
]
