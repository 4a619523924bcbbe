"""Every registered method, in a small setting that fits its needs. A new method gets all contract tests by one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import polyfed as pf
from polyfed.data import Clients
from polyfed.methods import make
from polyfed.result import Result

MIXED = ("mlp:1x16", "mlp:2x16", "cnn:4-8")
WIDTHS = ("cnn:8-16,bn@1", "cnn:8-16,bn@0.5")
DEPTHS = ("resnet10:w4", "resnet14:w4")
FEDVTC = {"samples_per_class": 4, "rec_reduction": "mean", "kl_weight": 0.1}
FEDVTC_OFF = {"rec_weight": 0.0, "kl_weight": 0.0, "lambda_dm": 0.0, "finetune": False}


@dataclass(frozen=True)
class Case:
    """How the contract tests run a method."""

    method: str
    models: tuple[str, ...] = MIXED
    options: dict[str, Any] = field(default_factory=dict)
    public: bool = False
    feature_dim: int | None = None
    off: dict[str, Any] | None = None  # these options switch the method's own idea off ...
    base: str | None = None  # ... and it is then exactly this method
    base_options: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.method}-{'x'.join(sorted({m.split(':')[0] for m in self.models}))}"


CASES = [
    Case("local"),
    Case("centralized"),
    Case("fedavg", ("mlp:2x16",)),
    Case("fedavg", DEPTHS),
    Case("fedprox", ("mlp:2x16",), off={"mu": 0.0}, base="fedavg"),
    Case("fedprox", DEPTHS, off={"mu": 0.0}, base="fedavg"),
    Case("heterofl", WIDTHS),
    Case(
        "heterofl",
        ("mlp:2x16",),
        off={"mask": False, "clip": None, "static_bn": False},
        base="fedavg",
        base_options={"weighting": "uniform"},
    ),
    Case(
        "fedfd",
        WIDTHS,
        public=True,
        off={"distill": "none"},
        base="heterofl",
        base_options={"weighting": "samples", "statistics": "public", "mask": False, "clip": None, "measure": "own"},
    ),
    Case(
        "fedfd",
        public=True,
        options={"aggregation": "none", "server_model": "cnn:8-16", "subset": 20},
        off={"digest_epochs": 0},
        base="local",
    ),
    Case(
        "fedin",
        DEPTHS,
        {"feature_batch": 4},
        off={"use_in": False, "mu": 0.0},
        base="fedavg",
        base_options={"buffers": "local"},
    ),
    Case(
        "fedin",
        ("mlp:2x16", "mlp:3x16"),
        {"combine": "analytic", "noise": 0.5, "feature_batch": 4},
        off={"use_in": False},
        base="fedprox",
    ),
    Case("fedproto", feature_dim=8, off={"lam": 0.0}, base="local"),
    Case("fedvtc", options=FEDVTC, feature_dim=32),
    Case("fedvtc", ("cnn:8-16,bn",), FEDVTC, feature_dim=32, off=FEDVTC_OFF, base="local"),
    Case(
        "fedmd",
        public=True,
        options={"subset": 20, "public_epochs": 0, "private_epochs": 1},
        off={"digest_epochs": 0, "private_epochs": 0},
        base="local",
    ),
    Case(
        "fedmd_global",
        public=True,
        options={"subset": 20, "public_epochs": 0, "private_epochs": 1, "digest_epochs": 2, "server_model": "mlp:3x16"},
        off={"global_model": False, "lwof": False},
        base="fedmd",
        base_options={"subset": 20, "public_epochs": 0, "private_epochs": 1, "digest_epochs": 2, "digest_batch": 64},
    ),
    Case(
        "fedmd_global",
        ("cnn:4-8,bn",),
        public=True,
        options={"subset": 20, "public_epochs": 0, "private_epochs": 1, "bn_recalibrate": True, "rho": 1.0},
    ),
    Case("ams"),
    Case("ams", ("mlp:2x16",), {"top_k": 2, "mask_absent": True, "select": "greedy", "normalize": "temperature"}),
    Case("ams", ("cnn:4-8,bn",), {"distill": "unlabeled", "student": "mlp:1x16", "distill_epochs": 2}, public=True),
    Case("ensemble"),
    Case("oneshot_fedavg", ("mlp:2x16",)),
    Case("pfnm", ("mlp:2x16", "mlp:2x12"), {"select_on": "train"}),
]


def synthetic(clients: int = 4, per_client: int = 18, classes: int = 3, seed: int = 0, public: bool = True) -> Clients:
    """A small image problem that can be learned: noisy class patterns, unequal clients, one of them lacking a class."""
    rng = np.random.default_rng(seed)
    patterns = rng.normal(size=(classes, 1, 8, 8)).astype(np.float32)

    def draw(n: int, labels: int = classes) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, labels, n)
        return (patterns[y] + 0.5 * rng.normal(size=(n, 1, 8, 8))).astype(np.float32), y

    parts = [draw(per_client + 5 * k, classes if k else classes - 1) for k in range(clients)]
    return Clients.from_parts(
        parts, test=draw(60), num_classes=classes, name="synthetic", public=draw(40)[0] if public else None, seed=seed
    )


def run_case(
    case: Case,
    rounds: int = 2,
    seed: int = 0,
    lr: float = 0.05,
    participation: float = 1.0,
    out: Any = None,
    digits: bool = False,
    sizes: tuple[int, ...] | None = None,
    single_class: int | None = None,
    observers: Any = (),
    **more: Any,
) -> Result:
    """Run a case in its small setting. `digits`: on named data, so that the run can be resumed from its directory."""
    if digits:
        data = pf.load("digits", limit=(150, 60))
        clients = pf.split(data, clients=3, by="dirichlet:1.0", seed=0, public=30 if case.public else None)
    elif sizes:
        clients = unequal(sizes, single_class, case.public)
    else:
        clients = synthetic(public=case.public)
    return pf.run(
        make(case.method, case.options),
        clients,
        case.models,
        rounds=rounds,
        training=pf.Training(epochs=2, batch_size=8, lr=lr),
        seed=seed,
        out=out,
        participation=participation,
        feature_dim=case.feature_dim,
        checkpoint_seconds=0.0,
        observers=observers,
        **more,
    )


def unequal(sizes: tuple[int, ...], single_class: int | None, public: bool) -> Clients:
    """Clients of the given sizes; one of them holds samples of one class only."""
    rng = np.random.default_rng(0)

    def draw(n: int, one_class: bool = False) -> tuple[np.ndarray, np.ndarray]:
        y = np.zeros(n, dtype=np.int64) if one_class else rng.integers(0, 3, n)
        return rng.normal(size=(n, 1, 8, 8)).astype(np.float32), y

    parts = [draw(size, client == single_class) for client, size in enumerate(sizes)]
    return Clients.from_parts(parts, test=draw(30), num_classes=3, public=draw(24)[0] if public else None)
