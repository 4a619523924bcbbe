"""Differential privacy of a client's training: the settings, the accountant, and what a client has spent.

The accountant is `dp-accounting` (extra `privacy`), with Rényi differential privacy of the Poisson-sampled Gaussian
mechanism; neighbouring data sets differ by one sample more or less. Nothing here needs torch.
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

if TYPE_CHECKING:
    from polyfed.core.method import Method

LEDGER = "privacy"  # where a client keeps in its memory what it has spent
Spent = Sequence[tuple[float, float, int]]  # sampling rate, noise multiplier, steps


class BudgetSpent(PolyfedError):
    """A client stops before its privacy budget would be exceeded. The others go on."""


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of every client's training (DP-SGD), sample by sample.

    Attributes
    ----------
    epsilon, delta
        The budget of each client for the whole run: it stops before it would exceed it.
    noise_multiplier
        Standard deviation of the noise in units of `max_norm`; none: the least with which the planned training keeps
        the budget. Privacy is on where this or `epsilon` is given.
    max_norm
        Each sample's gradient is shortened to this norm.
    clipping
        The norm of a sample's whole gradient (`global`), or of each tensor's (`layer`), whose bounds make up `max_norm`
        together.
    """

    epsilon: Positive | None = setting(None)
    delta: Annotated[float, Gt(0), Lt(1)] = setting(1e-5)
    noise_multiplier: Positive | None = setting(None)
    max_norm: Positive = 1.0
    clipping: Literal["global", "layer"] = "global"

    def __post_init__(self) -> None:
        check_fields(self, "privacy")

    @property
    def on(self) -> bool:
        """Whether training is private."""
        return self.epsilon is not None or self.noise_multiplier is not None

    def multiplier(self, rate: float, steps: int) -> float:
        """Return the noise multiplier: the one given, or the least that keeps the budget for so many steps."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.epsilon is not None
        return calibrated(rate, max(1, steps), self.epsilon, self.delta)


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
def _one_step(rate: float, multiplier: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the orders, and the Rényi divergence of one step at each of them: steps add up."""
    dp = accounting()
    accountant = dp.rdp.RdpAccountant()
    with _quiet:  # it tells of every order at which its series does not converge, and leaves that order out
        accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier)))
    return tuple(accountant._orders), tuple(accountant._rdp)


def epsilon_of(spent: Spent, delta: float) -> float:
    """Return the epsilon of everything spent, at a delta."""
    if not any(steps for _, _, steps in spent):
        return 0.0
    total: list[float] | None = None
    orders: tuple[float, ...] = ()
    for rate, multiplier, steps in spent:
        orders, each = _one_step(rate, multiplier)
        more = [steps * value for value in each]
        total = more if total is None else [a + b for a, b in zip(total, more, strict=True)]
    assert total is not None
    found, _ = accounting().rdp.compute_epsilon(orders, total, delta)
    return float(found)


@cache
def calibrated(rate: float, steps: int, epsilon: float, delta: float) -> float:
    """Return the least noise multiplier (to a thousandth, rounded up) with which so many steps stay within epsilon."""
    low, high = 1e-2, 1.0
    while epsilon_of([(rate, high, steps)], delta) > epsilon:
        low, high = high, 2 * high
        if high > 1e6:
            raise InputError(f"privacy: no noise gives epsilon {epsilon:g} at delta {delta:g} over {steps} steps.")
    while high - low > 1e-3:
        middle = (low + high) / 2
        if epsilon_of([(rate, middle, steps)], delta) > epsilon:
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


def check_privacy(privacy: Privacy, method: Method) -> None:
    """Refuse a method whose clients tell more of their samples than their training makes of them.

    Raises
    ------
    InputError
        With what that is.
    """
    if not privacy.on:
        return
    accounting()
    if method.pools_data:
        raise InputError(f"privacy: {method.name} puts all data in one place, so there is nothing to protect.")
    told = "which classes a client holds" if "label_counts" in method.requirements() else method.beyond_training()
    if told is not None:
        raise InputError(
            f"privacy: noise in training covers what is computed from the trained network alone, but clients of "
            f"{method.name} also send {told}: use one that sends weights (fedavg) or logits on public data (fedmd)."
        )
