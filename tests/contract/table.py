"""Every registered method, in a small setting that fits its needs. A new method gets all contract tests by one line."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.contract.case import DEPTHS, WIDTHS, Case

from polyfed.result import Result
from polyfed.testing import synthetic, unequal
from polyfed.testing.setting import digits as digits_of

__all__ = ["CASES", "FEW_CASES", "FEW_SAMPLES", "Case", "everyday", "run_case", "synthetic", "unequal"]

FEDVTC = {"samples_per_class": 4}
FEDVTC_OFF = {"rec_weight": 0.0, "kl_weight": 0.0, "lambda_dm": 0.0, "finetune": False}


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
        "fedfd_student",
        public=True,
        options={"server_model": "cnn:8-16", "subset": 20},
        off={"digest_epochs": 0},
        base="local",
    ),
    Case(
        "fedin",
        ("mlp:2x16", "mlp:3x16"),
        {"combine": "analytic", "noise": 0.5, "feature_batch": 4},
        off={"use_in": False},
        base="fedprox",
    ),
    Case(
        "fedin",
        DEPTHS,
        {"feature_batch": 4},
        off={"use_in": False, "mu": 0.0},
        base="fedavg",
        base_options={"buffers": "local"},
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
] + [
    case
    for file in sorted(Path(__file__).parent.glob("cases_*.py"))
    for case in importlib.import_module(f"tests.contract.{file.stem}").CASES
]


FEW = ("fedavg", "heterofl", "fedproto", "fedmd", "ams")  # methods of very different kinds
TWINS = ("dafkd_hetero", "feddf_hetero")  # their everyday checks are those of dafkd and feddf, on slices
FEW_SAMPLES = (10, 5, 12, 8)  # for tests that need a full batch and a rest of one, and no more
FEW_CASES = [next(case for case in CASES if case.method == method) for method in FEW]


def everyday(cases: Sequence[Case] = CASES, few: bool = False) -> Any:
    """Parametrize a test: `make test` runs the first case of each method (or of a few), `make test-long` the rest.

    All tests of a case run in one process, where its plain run is made once.
    """
    seen: set[str] = set(TWINS)
    params = []
    for case in cases:
        often = case.method not in seen and (not few or case.method in FEW)
        seen.add(case.method)
        together = pytest.mark.xdist_group(f"case {case.id}")
        params.append(pytest.param(case, id=case.id, marks=(together,) if often else (together, pytest.mark.long)))
    return pytest.mark.parametrize("case", params)


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
        data = digits_of(case.public)
    elif sizes:
        data = unequal(sizes, single_class, case.public)
    else:
        data = synthetic(public=case.public)
    return case.setting.run(rounds, seed, lr, participation, data, out=out, observers=observers, **more)
