"""Methods in which a small common model travels: a proxy, or a combiner of everybody's networks."""

from tests.contract.case import MIXED, Case

PROXY = {"proxy": "mlp:1x8"}
FEDTYPE_OFF = {"set_weight": 0.0, "distill_weight": 0.0, "finish": False}

CASES = [
    Case("fml", MIXED, PROXY, off={"alpha": 1.0}, base="local"),
    Case("fml", ("cnn:4-8,bn",), {"proxy": "cnn:4,bn"}),
    Case("fedmrl", MIXED, {**PROXY, "d1": 4}, off={"projector": "private", "m_g": 0.0}, base="local"),
    Case("fedmrl", ("mlp:2x16",), PROXY),
    Case("pfedafm", MIXED, {**PROXY, "mixing_lr": 0.1}, feature_dim=8, off={"mixing_lr": 0.0}, base="local"),
    Case("pfedafm", ("mlp:2x16",), {**PROXY, "mixing": 0.5}),
    Case("fedkd", MIXED, PROXY, off={"distill_weight": 0.0, "hidden_weight": 0.0}, base="local"),
    Case("fedkd", ("cnn:4-8,bn",), {"proxy": "cnn:4,bn", "e_0": 0.7, "proxy_lr": 0.02, "weighting": "samples"}),
    Case("fedtype", MIXED, {**PROXY, "k_reg": 1}, off=FEDTYPE_OFF, base="local", where={"epochs": 1}),
    Case(
        "fedtype",
        ("mlp:2x16",),
        {**PROXY, "randomized": False, "temperature": 2.0},
        off=FEDTYPE_OFF,
        base="local",
        where={"epochs": 1},
    ),
    Case(
        "fens",
        MIXED,
        {"combiner_rounds": 3, "held_out": 0.3},
        off={"combiner": "client", "server_lr": 0.0},
        base="ensemble",
        base_options={"space": "logit", "l1": 0.0},
        where={"sizes": (1, 1, 1, 1)},  # one order of samples, whatever the exchange is called; nothing is held out
    ),
    Case("fens", ("cnn:4-8,bn",), {"combiner_rounds": 2, "combiner": "class", "combiner_batch": 4, "server_lr": 0.1}),
]
