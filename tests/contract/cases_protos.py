"""Methods that exchange heads, class prototypes or statistics of features."""

from tests.contract.case import Case

ALL_STUDIED = (1, 1, 1, 1)  # a lone sample is in the study set and in the quiz set

CASES = [
    Case("lg_fedavg", feature_dim=8, off={"keep": 0}, base="local"),
    Case("lg_fedavg", ("mlp:2x16",), {"keep": 2}, off={"keep": "all"}, base="fedavg"),
    Case("fedgh", options={"server_epochs": 3}, feature_dim=8),
    Case(
        "fedgh",
        ("mlp:2x16",),
        off={"server_epochs": 0},
        base="local",
        where={"rounds": 1, "besides": ("head.",)},  # a head that nobody trains is the initial one again
    ),
    Case("fedproto", ("mlp:2x16",), {"collect": "training"}, off={"lam": 0.0}, base="local"),
    Case("fedproto", ("cnn:4-8,bn",), {"collect": "before"}, off={"lam": 0.0}, base="local"),
    Case("fedtgp", options={"server_epochs": 5}, feature_dim=8, off={"lam": 0.0}, base="local"),
    Case("fedtgp", ("cnn:4-8,bn",), {"server_epochs": 5, "collect": "training"}, off={"lam": 0.0}, base="local"),
    Case(
        "ccvr",
        ("cnn:4-8,bn",),
        {"samples_per_class": 8, "head_epochs": 2},
        off={"samples_per_class": 0},
        base="fedavg",
    ),
    Case(
        "ccvr",
        options={"form": "clients", "when": "every_round", "covariance": "shared", "samples_per_class": 8},
        feature_dim=8,
        off={"samples_per_class": 0},
        base="local",
    ),
    Case(
        "ccvr",
        ("mlp:2x16",),
        {"when": "every_round", "covariance": "diag", "samples_per_class": 8, "head_epochs": 2},
        off={"samples_per_class": 0},
        base="fedavg",
    ),
    Case("fedl2g", options={"warm_up": 2}, off={"guide_weight": 0.0}, base="local", where={"sizes": ALL_STUDIED}),
    Case(
        "fedl2g",
        ("cnn:4-8,bn",),
        {"form": "feature", "warm_up": 1},
        off={"guide_weight": 0.0},
        base="local",
        where={"sizes": ALL_STUDIED},
    ),
]
