"""Studies for the report, and a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import TINY, make_run

from polyfed.report.runs import Run, Study

FLAGS = [  # a quiet browser: no sandbox (root in containers), and no services that call home
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture
def two_methods() -> Study:
    """Return a study of three seeds: `alpha` is two to six points above `local`, `beta` far below."""
    runs: dict[str, list[Run]] = {"local": [], "alpha": [], "beta": []}
    for seed, gain in enumerate((0.02, 0.04, 0.06)):
        base = [0.4, 0.5, 0.6]
        runs["local"].append(make_run("local", seed, [[0.3, 0.3, 0.3], base]))
        better = [value + gain for value in base]
        runs["alpha"].append(make_run("alpha", seed, [[0.5, 0.5, 0.5], better], up=300, down=600))
        runs["alpha"][-1].history[-1]["stages"] = {"halfway": {"mean": 0.45}}
        worse = [0.4 - gain, 0.5 - 0.1, 0.6 + 0.01]
        runs["beta"].append(make_run("beta", seed, [[0.2, 0.2, 0.2], worse], up=3000, down=6000))
    tried = [
        {
            "method": label,
            "values": {"training.lr": lr},
            "validation": [lr] * 3,
            "accuracy": [0.5] * 3,
            "chosen": lr > 0.1,
        }
        for label in runs
        for lr in (0.1, 0.2)
    ]
    return Study(runs, sweep=tried)


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a real comparison: three methods, two seeds."""
    from polyfed.compare import compare

    out = tmp_path_factory.mktemp("comparison") / "cmp"
    compare(TINY, ["local", "fedavg", "fedproto", "centralized"], 2, out)
    return out


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Return a headless Chromium, or skip where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    program = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if program is None:
        pytest.skip("needs a browser: install Debian's chromium (or google-chrome)")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=FLAGS)
        yield opened
        opened.close()
