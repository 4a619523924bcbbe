"""What a federation does against bad senders, and which bad senders a simulation has: the settings, in words.

`--robust trimmed:0.2` and `--attack signflip:0.2` are texts with a name and numbers. They are read here, without torch,
and carried out in `core/robust.py` and `core/attack.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyfed.core.errors import InputError, unknown
from polyfed.core.fields import check_fields, setting

# Name -> what its number means, the number where none is given, and the range that it may lie in.
RULES: dict[str, tuple[str, float | None, float, float]] = {
    "median": ("", None, 0, 0),
    "trimmed": ("share of the senders that is cut off at either end", 0.2, 0, 0.5),
    "geometric": ("", None, 0, 0),
    "krum": ("share of the senders that may be bad", 0.2, 0, 0.5),
    "multikrum": ("share of the senders that may be bad", 0.2, 0, 0.5),
    "norm": ("longest change that counts in full (none: the median of the changes)", None, 0, float("inf")),
    "distance": ("how many times as far from the majority as is usual a sender may be", 2.0, 1, float("inf")),
    "cosine": ("smallest cosine to the median of the changes", 0.0, -1, 1),
}
REPLACING = ("median", "trimmed", "geometric")  # one value for all; the others leave senders out or shorten changes

# Name -> its strength where none is given.
ATTACKS: dict[str, float] = {
    "signflip": 1.0,  # -strength times the message
    "scale": -10.0,  # strength times the message
    "random": 1.0,  # noise of the message's own spread, times strength
    "constant": 1.0,  # the same number everywhere
    "alie": 0.0,  # mean minus z deviations of the honest; 0: the z of the paper
    "ipm": 0.5,  # minus strength times the honest mean change
    "shuffle": 1.0,  # outputs of logits in another order
    "lma": 1.0,  # logits for the class that the honest think least likely
    "protoflip": 1.0,  # each class told as another one
    "labelflip": 1.0,  # in the data: class c becomes C-1-c
    "backdoor": 0.5,  # in the data: a share of the samples gets a mark and class 0
}
IN_DATA = ("labelflip", "backdoor")


@dataclass(frozen=True)
class Rule:
    """How replies are combined."""

    name: str
    value: float | None = None

    @property
    def does_nothing(self) -> bool:
        """Whether the rule is the method's own mean: nothing is cut off."""
        return self.name == "trimmed" and self.value == 0


@dataclass(frozen=True)
class Attack:
    """What malicious clients do, and how large a share of the clients they are."""

    name: str
    share: float
    strength: float


@dataclass(frozen=True)
class Trust:
    """Protection against bad senders, and bad senders to try it with.

    Attributes
    ----------
    robust
        How replies are combined: `median`, `trimmed:0.2`, `geometric`, `krum:0.2`, `multikrum:0.2`, `norm`, `norm:5`,
        `distance`, `distance:3`, `cosine`; by default as the method says.
    attack
        Simulations only: what a share of the clients, drawn from the seed, sends or learns instead:
        `NAME:SHARE[:STRENGTH]`, for instance `signflip:0.2`. They do not count in any accuracy.
    """

    robust: str | None = setting(None)
    attack: str | None = setting(None)

    def __post_init__(self) -> None:
        check_fields(self, "trust")
        self.rule()
        self.attackers()

    def rule(self) -> Rule | None:
        """Return the rule, or None for the method's own way."""
        if self.robust is None:
            return None
        name, _, text = self.robust.partition(":")
        if name not in RULES:
            raise unknown("rule of robust", name, RULES)
        meaning, usual, low, high = RULES[name]
        if not text:
            return Rule(name, usual)
        value = _number(text, f"robust={self.robust}")
        if not meaning or not low <= value <= high or (high == 0.5 and value == 0.5) or (name == "norm" and not value):
            bounds = f"a number from {low:g}, below {high:g}" if high == 0.5 else f"a number from {low:g} to {high:g}"
            raise InputError(
                f"trust: robust='{self.robust}' {f'takes {bounds}: {meaning}' if meaning else 'takes no number'}."
            )
        return Rule(name, value)

    def attackers(self) -> Attack | None:
        """Return the attack, or None."""
        if self.attack is None:
            return None
        name, *numbers = self.attack.split(":")
        if name not in ATTACKS:
            raise unknown("attack", name, ATTACKS)
        if not 1 <= len(numbers) <= 2:
            raise InputError(
                f"trust: attack is NAME:SHARE or NAME:SHARE:STRENGTH, for instance {name}:0.2, not '{self.attack}'."
            )
        values = [_number(text, f"attack={self.attack}") for text in numbers]
        if not 0 <= values[0] < 1:
            raise InputError(f"trust: the share of malicious clients is from 0, below 1, not {values[0]:g}.")
        if name == "backdoor" and len(values) > 1 and not 0 < values[1] <= 1:
            raise InputError(f"trust: the share of samples with a backdoor is above 0, at most 1, not {values[1]:g}.")
        return Attack(name, values[0], values[1] if len(values) > 1 else ATTACKS[name])


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e300:
        raise InputError(f"trust: {where}: '{text}' is not a number.")
    return value
