"""Mean over seeds with its confidence interval: the one interval of tables, report and papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

LEVEL = 0.95  # of every confidence interval, unless several claims share one


@dataclass(frozen=True)
class Estimate:
    """Mean over seeds and half the width of its confidence interval (None: a single seed has none)."""

    mean: float
    half: float | None = None
    seeds: int = 1

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + (self.half or 0.0)

    @property
    def clear(self) -> bool:
        """Whether the interval exists and leaves out zero."""
        return self.half is not None and (self.low > 0 or self.high < 0)


def estimate(values: Sequence[float], level: float = LEVEL) -> Estimate | None:
    """Return the mean and its t interval over seeds (None for no values)."""
    if not values:
        return None
    if len(values) == 1:
        return Estimate(values[0])
    half = quantile(len(values) - 1, level) * stdev(values) / len(values) ** 0.5
    return Estimate(fmean(values), half, len(values))


@cache
def quantile(freedom: int, level: float = LEVEL) -> float:
    """Return the two-sided quantile of Student's t distribution."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # all of scipy.stats takes a second to import

    return float(stdtrit(freedom, (1 + level) / 2))
