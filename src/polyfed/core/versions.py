"""The versions that a result depends on."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("polyfed", "torch", "numpy", "safetensors", "datasets", "scikit-learn")


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {"python": platform.python_version(), **dict(_installed())}


@cache  # every run asks, and each of these reads a page of metadata: 10 ms of a small run
def _installed() -> tuple[tuple[str, str], ...]:
    found = []
    for package in PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return tuple(found)
