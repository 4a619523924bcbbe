"""Differential privacy: the settings, the accountant, and what a client has spent.

The accountant is `dp-accounting` (extra `privacy`), with Rényi differential privacy of the Gaussian mechanism. With the
sample as unit, neighbouring data sets differ by one sample more or less: training on Poisson samples (`core/dpsgd.py`)
and class sums over all samples (`core/releases.py`) add up in one ledger. With the client as unit, all of a client's
data may be replaced (`core/clientnoise.py`). Nothing here needs torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Gt, Lt

from polyfed.core.errors import InputError, PolyfedError
from polyfed.core.fields import Positive, check_fields, setting
from polyfed.core.trust import Rule

if TYPE_CHECKING:
    from polyfed.core.method import Method

LEDGER = "privacy"  # where a client keeps in its memory what it has spent
Spent = Sequence[tuple[float, float, int]]  # sampling rate, noise multiplier, steps


class BudgetSpent(PolyfedError):
    """A client stops before its privacy budget would be exceeded. The others go on."""


@dataclass(frozen=True)
class Releases:
    """How often a client tells sums over its samples, made in `core/releases.py`: in each round, and once."""

    each_round: int = 0
    once: int = 0

    def planned(self, rounds: int) -> int:
        """Return how often in a whole run."""
        return self.each_round * rounds + self.once


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of what leaves a client.

    Attributes
    ----------
    unit
        Whom the guarantee is for. `sample`: each sample of each client, against everybody, the server too (DP-SGD, and
        noise on class sums). `client`: each client as a whole, against all but the server, which adds noise to what it
        combines.
    epsilon, delta
        The budget of each client for the whole run: it stops before it would exceed it.
    noise_multiplier
        Standard deviation of the noise in units of `max_norm`; none: the least with which the planned training keeps
        the budget. Privacy is on where this or `epsilon` is given.
    max_norm
        Each sample's gradient is shortened to this norm; with the client as unit, each client's change.
    clipping
        The norm of a sample's whole gradient (`global`), or those of its parts, whose bounds make up `max_norm`
        together: of each `layer` (weight and bias), or of each `group` (a network's parts: the first word of names).
    release_norm, release_share
        For methods that tell class means: each sample's vector is shortened to this norm, and this share of epsilon is
        theirs; the rest is for training.
    """

    unit: Literal["sample", "client"] = "sample"
    epsilon: Positive | None = setting(None)
    delta: Annotated[float, Gt(0), Lt(1)] = setting(1e-5)
    noise_multiplier: Positive | None = setting(None)
    max_norm: Positive = 1.0
    clipping: Literal["global", "layer", "group"] = "global"
    release_norm: Positive = 1.0
    release_share: Annotated[float, Gt(0), Lt(1)] = 0.5

    def __post_init__(self) -> None:
        check_fields(self, "privacy")

    @property
    def given(self) -> bool:
        """Whether anything is private."""
        return self.epsilon is not None or self.noise_multiplier is not None

    @property
    def on(self) -> bool:
        """Whether samples are protected: training and class sums are noisy."""
        return self.given and self.unit == "sample"

    @property
    def of_clients(self) -> bool:
        """Whether clients are protected: what the server combines is noisy."""
        return self.given and self.unit == "client"

    def multiplier(self, rate: float, steps: int, releases: int = 0) -> float:
        """Return the noise multiplier: the one given, or the least that keeps the budget for so many steps.

        Beside them, sums over the samples may be told so many times (`release_multiplier`).
        """
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.epsilon is not None
        beside = ((1.0, self.release_multiplier(releases), releases),) if releases else ()
        return calibrated(rate, max(1, steps), self.epsilon, self.delta, beside)

    def release_multiplier(self, releases: int) -> float:
        """Return the noise multiplier of so many releases, which may cost their share of the budget."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.epsilon is not None
        return calibrated(1.0, max(1, releases), self.release_share * self.epsilon, self.delta)

    def check_budget(self, who: str, before: Spent, after: Spent) -> None:
        """Stop a client before its budget is exceeded.

        Raises
        ------
        BudgetSpent
            With what it has spent, and what this would bring it to.
        """
        if self.epsilon is None:
            return
        wanted = epsilon_of(after, self.delta)
        if wanted > self.epsilon:
            raise BudgetSpent(
                f"{who.capitalize()} stops: its privacy budget is epsilon {self.epsilon:g} at delta {self.delta:g}; it "
                f"has spent {epsilon_of(before, self.delta):.4g}, and this would bring it to {wanted:.4g}."
            )


def accounting() -> Any:
    """Return the accountant's package.

    Raises
    ------
    InputError
        With what to install.
    """
    try:
        import dp_accounting
    except ImportError as error:
        raise InputError("Differential privacy needs dp-accounting: pip install 'polyfed[privacy]'.") from error
    return dp_accounting


class _Quiet:
    """Keeps the accountant's logger silent inside of the block, for one thread at a time."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.logger = logging.getLogger("absl")

    def __enter__(self) -> None:
        self.lock.acquire()
        self.logger.disabled = True

    def __exit__(self, *details: object) -> None:
        self.logger.disabled = False
        self.lock.release()


_quiet = _Quiet()


@cache
def _orders() -> tuple[float, ...]:
    """Return the orders at which divergences are looked at: the accountant's own."""
    return tuple(float(order) for order in accounting().rdp.RdpAccountant().orders)


@cache
def _one_step(rate: float, multiplier: float, order: float) -> float:
    """Return the Rényi divergence of one step at an order: steps add up."""
    dp = accounting()
    accountant = dp.rdp.RdpAccountant([order])
    with _quiet:  # it tells of every order at which its series does not converge, and leaves that order out
        accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier)))
    return float(accountant.rdp[0])


def epsilon_of(spent: Spent, delta: float) -> float:
    """Return the epsilon of everything spent, at a delta: the least that any of the accountant's orders gives.

    Not every order is looked at, which would take ten times as long. Times (order - 1), the bound of an order is convex
    (a divergence is then a cumulant function), so it falls up to one order and rises behind it. The series of whole
    orders are exact and show where that is; those in between are long, and are looked at there alone.
    """
    if not any(steps for _, _, steps in spent):
        return 0.0

    def bound(order: float) -> float:
        total = sum(steps * _one_step(rate, multiplier, order) for rate, multiplier, steps in spent)
        with _quiet:  # of huge noise it tells that rounding made a divergence negative, and takes zero
            return float(accounting().rdp.compute_epsilon([order], [total], delta)[0])

    whole = [order for order in _orders() if order.is_integer()]
    least, best = bound(whole[0]), whole[0]
    for order in whole[1:]:
        found = bound(order)
        if found >= least:
            break
        least, best = found, order
    near = [order for order in _orders() if abs(order - best) < 1 and order != best]
    return min([least, *map(bound, near)]) if least > 0 else 0.0


@cache
def calibrated(
    rate: float, steps: int, epsilon: float, delta: float, beside: tuple[tuple[float, float, int], ...] = ()
) -> float:
    """Return the least noise multiplier (to a thousandth, rounded up) with which so many steps stay within epsilon.

    `beside`: what else is spent.
    """
    low, high = 1e-2, 1.0
    while epsilon_of([*beside, (rate, high, steps)], delta) > epsilon:
        low, high = high, 2 * high
        if high > 1e6:
            raise InputError(f"privacy: no noise gives epsilon {epsilon:g} at delta {delta:g} over {steps} steps.")
    while high - low > 1e-3:
        middle = (low + high) / 2
        if epsilon_of([*beside, (rate, middle, steps)], delta) > epsilon:
            low = middle
        else:
            high = middle
    return high


def added(spent: Spent, rate: float, multiplier: float, steps: int) -> list[tuple[float, float, int]]:
    """Return what is spent after more steps; equal ones are counted together."""
    found = {(float(r), float(m)): int(n) for r, m, n in spent}
    found[rate, multiplier] = found.get((rate, multiplier), 0) + steps
    return [(r, m, n) for (r, m), n in found.items()]


def spent_of(memory: dict[str, Any]) -> list[tuple[float, float, int]]:
    """Return what a client has spent so far, by its memory."""
    return [(float(r), float(m), int(n)) for r, m, n in memory.get(LEDGER, {}).get("spent", [])]


def note(memory: dict[str, Any], spent: Spent, delta: float) -> None:
    """Keep in a client's memory what it has spent; its epsilon is told with its reply."""
    memory[LEDGER] = {"spent": [list(item) for item in spent], "epsilon": epsilon_of(spent, delta)}


def check_privacy(privacy: Privacy, method: Method, rule: Rule | None = None) -> None:
    """Refuse a method whose clients tell more than the noise covers, and a rule with which noise covers too little.

    Raises
    ------
    InputError
        With what that is.
    """
    if not privacy.given:
        return
    accounting()
    if method.pools_data:
        raise InputError(f"privacy: {method.name} puts all data in one place, so there is nothing to protect.")
    if privacy.of_clients:
        check_clients(method)
        check_alone(rule)
        return
    told = "which classes a client holds" if "label_counts" in method.requirements() else method.beyond_training()
    if told is not None:
        raise InputError(
            f"privacy: noise covers what is computed from the trained network alone, and sums over samples by class, "
            f"but clients of {method.name} also send {told}: use one that sends weights (fedavg), logits on public "
            "data (fedmd) or class means (fedproto)."
        )


def check_alone(rule: Rule | None) -> None:
    """Refuse a rule by which one reply changes what becomes of others: noise hides what one client moves by itself."""
    if rule is None or rule.does_nothing or (rule.name == "norm" and rule.value is not None):
        return
    raise InputError(
        f"privacy: with unit=client noise hides what one client can move by itself, but with robust={rule.name} its "
        "reply also changes what becomes of the others': use robust=norm:5 (a fixed bound), no rule, or unit=sample."
    )


def check_clients(method: Method) -> None:
    """Refuse a method whose replies are more than numbers that are averaged, entry by entry."""
    kinds = set(method.combines.values())
    why = (
        "does not average what it is sent"
        if not kinds
        else "uses each client's reply by itself"
        if kinds & {"apart", "rows"}
        else "is told which classes a client holds"
        if "classes" in kinds or "label_counts" in method.requirements()
        else None
    )
    if why is not None and method.family != "control":
        raise InputError(
            f"privacy: with unit=client noise goes into means over clients, but {method.name} {why}: use one that "
            "averages weights (fedavg, heterofl with mask=false) or logits on public data (fedmd), or unit=sample."
        )
