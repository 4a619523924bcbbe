"""Real processes on loopback. Every process that a test starts is ended with it; nothing is left behind."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

STAYING = 2  # federations whose sites stay


class WithoutFlower(pytest.Module):
    """A test file where Flower is not installed."""

    def collect(self) -> Any:
        pytest.skip("needs Flower: pip install 'polyfed[flower]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if importlib.util.find_spec("flwr") is None and module_path.parent == Path(__file__).parent:
        return WithoutFlower.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let few processes have sites that stay: also one that waits costs processor time."""
    staying = [item for item in items if "local_federation" in getattr(item, "fixturenames", ())]
    for number, item in enumerate(staying):
        item.add_marker(pytest.mark.xdist_group(f"staying {number % STAYING}"))


@pytest.fixture(scope="session")
def forks() -> Iterator[Any]:
    """What starts a command without the seconds of its imports."""
    from processes import IMPORTED, environment

    from forked import Forks

    built = Forks(environment(), IMPORTED)
    yield built
    built.close()


@pytest.fixture
def processes(tmp_path: Path, forks: Any) -> Iterator[Any]:
    """A federation of real commands."""
    from processes import FederationProcesses

    built = FederationProcesses(tmp_path, forks)
    yield built
    built.stop()


@pytest.fixture
def whole_processes(tmp_path: Path) -> Iterator[Any]:
    """The same, with commands that are started as people start them."""
    from processes import FederationProcesses

    built = FederationProcesses(tmp_path, None)
    yield built
    built.stop()


@pytest.fixture(scope="session")
def local_federation(tmp_path_factory: pytest.TempPathFactory, forks: Any) -> Iterator[Any]:
    """One server connection and three sites that stay for all tests."""
    from processes import LocalFederation

    built = LocalFederation(tmp_path_factory.mktemp("local_federation"), forks)
    yield built
    built.link.close()
    built.stop()
