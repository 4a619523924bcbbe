"""Methods, models and data of other installed packages, found by their entry points.

[project.entry-points."polyfed.methods"]
my_method = "my_package.my_method:MyMethod"
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.metadata import entry_points
from typing import Any


@cache
def plugins(group: str) -> dict[str, Any]:
    """Return what other packages offer under `polyfed.<group>`, by name.

    A package that cannot be loaded is left out with a warning: it must not keep others from working.
    """
    found: dict[str, Any] = {}
    for point in entry_points(group=f"polyfed.{group}"):
        package = point.dist.name if point.dist is not None else point.value
        try:
            loaded = point.load()
        except Exception as error:  # whatever its code does
            warnings.warn(
                f"'{point.name}' of the package {package} is left out of polyfed's {group}: it cannot be loaded "
                f"({type(error).__name__}: {error}).",
                stacklevel=2,
            )
            continue
        if point.name in found:
            warnings.warn(
                f"'{point.name}' of the package {package} is left out of polyfed's {group}: another package has one of "
                "this name.",
                stacklevel=2,
            )
            continue
        found[point.name] = loaded
    return found
