"""The verdict on a claim, computed: nobody writes one down.

A claim says that a method gains so much over another. Seeds give paired differences; their t interval decides:

`reproduced`    it leaves out zero and contains the paper's gain
`holds`         it leaves out zero, on the paper's side
`refuted`       it leaves out zero on the other side, or it contains zero and stays away from the paper's gain by more
                than half of that gain
`not resolved`  otherwise, and always with fewer than five seeds

Where the paper calls two rows equal, zero and the difference that it prints both count as no difference.

The rules are asked in this order. The claims of an entry are tested together: Holm's correction widens the intervals,
so that the chance that any claim is given a direction which it has not stays below 5 %. That an interval misses the
paper's gain is not bounded like that: where eight true gains are the paper's, some interval misses one in about an
eighth of all entries, and says `holds` for `reproduced`. Claims that are not measured yet count, too (as if they came
last): a verdict does not depend on which claims somebody chose to measure first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10, sqrt
from statistics import fmean, stdev
from typing import Literal

from polyfed.ops.estimate import estimate

Verdict = Literal["reproduced", "holds", "refuted", "not resolved"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "holds", "refuted", "not resolved")
SEEDS = 5  # fewer decide nothing
ERROR = 0.05  # chance of a wrong direction among all claims of an entry


@dataclass(frozen=True)
class Judged:
    """A claim after its test: the mean difference, its interval, and what follows."""

    verdict: Verdict
    seeds: int
    mean: float | None = None  # None: nothing was measured
    half: float | None = None  # None: too few seeds for an interval
    level: float | None = None  # of that interval, after the correction
    ends: tuple[float, float] | None = None  # smallest and largest difference, where they are computed

    @property
    def low(self) -> float | None:
        """Lower end of the interval."""
        return None if self.mean is None or self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        """Upper end of the interval."""
        return None if self.mean is None or self.half is None else self.mean + self.half


@dataclass(frozen=True)
class Compared:
    """Differences paired by seed, and what the paper says about them."""

    differences: tuple[float, ...]
    gain: float | None  # the paper's; None: it gives no number
    sign: int  # of the paper's gain: 1, -1, or 0 for "no difference"
    direction_only: bool = False  # other data than the paper's: only the sign can be compared
    near: float = 0.0  # the paper's own difference, where it calls two rows equal


def judge(claims: Sequence[Compared], seeds: int = SEEDS) -> list[Judged]:
    """Return the verdict on every claim of an entry, with Holm's correction over all of them."""
    tested = [place for place, claim in enumerate(claims) if len(claim.differences) >= seeds]
    chances = {place: chance(claims[place].differences) for place in tested}
    found = [_few(claim) for claim in claims]
    allowed, rejecting = 0.0, True
    for rank, place in enumerate(sorted(tested, key=lambda place: chances[place])):
        if rejecting:  # after the first that is not rejected, all others are not either
            allowed = ERROR / (len(claims) - rank)
            rejecting = chances[place] <= allowed
        found[place] = _judge(claims[place], allowed, rejecting)
    return found


def chance(differences: Sequence[float]) -> float:
    """Return the two-sided p value of the differences' mean against zero."""
    from scipy.special import stdtr  # type: ignore[import-untyped]

    error = stdev(differences) / sqrt(len(differences))
    if error == 0.0:
        return 1.0 if fmean(differences) == 0.0 else 0.0
    return float(2 * stdtr(len(differences) - 1, -abs(fmean(differences)) / error))


def _few(claim: Compared) -> Judged:
    values = claim.differences
    return Judged("not resolved", len(values), fmean(values) if values else None)


def _judge(claim: Compared, allowed: float, rejected: bool) -> Judged:
    found = estimate(claim.differences, 1 - allowed)
    assert found is not None
    verdict = _verdict(claim, found.mean, found.low, found.high, rejected)
    return Judged(verdict, found.seeds, found.mean, found.half, 1 - allowed)


def _verdict(claim: Compared, mean: float, low: float, high: float, rejected: bool) -> Verdict:
    gain = None if claim.direction_only else claim.gain
    side = (1 if mean > 0 else -1) if rejected else 0
    if side and side == claim.sign:
        return "reproduced" if gain is not None and low <= gain <= high else "holds"
    if side and claim.sign == 0 and (high >= claim.near if side < 0 else low <= claim.near):
        return "not resolved"  # not further apart than in the paper, which calls that equal
    if side:
        return "refuted"
    if gain is not None and _away(gain, low, high) > abs(gain) / 2:
        return "refuted"
    return "not resolved"


def _away(value: float, low: float, high: float) -> float:
    """Return how far a value lies outside an interval (0: inside)."""
    return max(low - value, value - high, 0.0)


def decimals(half: float | None) -> int:
    """Return the digits behind the point with which a difference is told: two of its interval, from two to six."""
    return min(max(2, 1 - floor(log10(half))), 6) if half else 2


def judge_number(ours: float, paper: float, rounding: float) -> Verdict:
    """Return the verdict on a number that is computed, not measured: no seeds, no interval.

    `reproduced`: equal to the digits that the paper prints; `holds`: of the same sign and off by at most half of it;
    `refuted` otherwise.
    """
    if abs(ours - paper) <= rounding * (1 + 1e-9):
        return "reproduced"
    return "holds" if ours * paper > 0 and abs(ours - paper) <= abs(paper) / 2 else "refuted"


def between(ends: tuple[float, float]) -> str:
    """Return in words from where to where computed differences go."""
    return f"{ends[0]:+.2f} to {ends[1]:+.2f}" if ends[0] < ends[1] else f"{ends[0]:+.2f}"


def judge_each(claim: Compared) -> Judged:
    """Return the verdict on differences that are computed, one for each network say: nothing is drawn, no interval.

    `holds`: all of them are on the paper's side; `refuted`: all are on the other, or on one where the paper has none;
    `not resolved` otherwise. Sizes are not compared.
    """
    values = claim.differences
    if not values:
        return Judged("not resolved", 0)
    ends = min(values), max(values)
    side = (ends[0] > 0) - (ends[1] < 0)
    verdict: Verdict = "not resolved" if not side else "holds" if side == claim.sign else "refuted"
    return Judged(verdict, len(values), fmean(values), ends=ends)


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return how many of each there are, in the order of the rules: `2 holds, 1 not resolved`."""
    counted = [(verdicts.count(verdict), verdict) for verdict in VERDICTS]
    return ", ".join(f"{number} {verdict}" for number, verdict in counted if number) or "measured, no verdict"
