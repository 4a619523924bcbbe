"""The entries: one TOML file for each table or figure, in `experiments/papers/PAPER/ENTRY.toml`.

The file is an experiment that `polyfed compare` reads; as written it is the mini scale, `[scales.middle]` and
`[scales.paper]` are the others. Its `[paper]` table adds what the paper says:

    [paper]
    title = "Table 2: one-shot fusion, 3 to 6 labels a client"
    quantity = "global"
    claims = ["ams - ensemble", "fedfd:wobble - fedfd-logit:wobble < 0"]
    [paper.mini]                      # facts of a scale
    swapped = true                    # other data than the paper's: only directions can be compared
    cases = ["n5"]                    # those of this scale; all where it is left out
    [paper.cases.n5]
    title = "MNIST, N = 5, L = 1"
    settings = {clients = 5}          # laid over the scale
    numbers.global = {ams = 81.60, ensemble = 62.12}

A claim is `A - B`, each side a label with the entry's quantity or `LABEL:QUANTITY`; its gain is the difference of the
paper's numbers, or only a direction (`> 0`, `< 0`, `= 0`) where the paper gives none.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from polyfed.command import setting_words
from polyfed.core.errors import InputError, unknown
from polyfed.experiment import Experiment, experiment_of

SCALES = ("mini", "middle", "paper")
PAPERS = ("fedin", "fedfd", "fedvtc", "ams", "fedmd_global")


@dataclass(frozen=True)
class Side:
    """One side of a claim: the runs of a label, and what of them."""

    label: str
    quantity: str

    def __str__(self) -> str:
        return f"{self.label}:{self.quantity}"


@dataclass(frozen=True)
class Claim:
    """`A - B`: what the paper says one gains over the other."""

    one: Side
    two: Side
    sign: int = 0  # given without a number: 1 or -1
    equal: bool = False  # the paper says that there is no difference

    def words(self, quantity: str) -> str:
        """Return it for people; the entry's own quantity goes without saying."""
        sides = [side.label if side.quantity == quantity else str(side) for side in (self.one, self.two)]
        return " - ".join(sides)


@dataclass(frozen=True)
class Case:
    """One setting of an entry: a column or a row of the paper's table."""

    name: str
    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # quantity -> label -> value
    claims: tuple[Claim, ...] | None = None  # None: those of the entry
    ours: str = ""  # why it is no case of the paper: its claims are ours then
    same: str = ""  # the case that it is at another scale, under another name

    def number(self, side: Side) -> float | None:
        """Return what the paper reports."""
        return self.numbers.get(side.quantity, {}).get(side.label)

    def gain(self, claim: Claim) -> float | None:
        """Return the paper's gain, where it gives both numbers."""
        return 0.0 if claim.equal else None if claim.sign else self.apart(claim)

    def apart(self, claim: Claim) -> float | None:
        """Return how far apart the paper's numbers are, where it gives both."""
        one, two = self.number(claim.one), self.number(claim.two)
        return None if one is None or two is None else one - two


@dataclass(frozen=True)
class Entry:
    """A table or figure of a paper."""

    paper: str
    name: str
    values: Mapping[str, Any]  # the experiment file, without what the paper says
    told: Mapping[str, Any]  # what the paper says

    @property
    def path(self) -> str:
        """How people name it: `ams/table2`."""
        return f"{self.paper}/{self.name}"

    @property
    def title(self) -> str:
        """What it is."""
        return str(self.told["title"])

    @property
    def kind(self) -> str:
        """`runs`, `figure` (and an analysis of them), `study` (no federation), `count` (arithmetic)."""
        return next(
            (kind for kind in ("count", "study") if kind in self.told), "figure" if "analysis" in self.told else "runs"
        )

    @property
    def quantity(self) -> str:
        """What its table shows."""
        return str(self.told.get("quantity", "local"))

    @property
    def over(self) -> str:
        """What stands where seeds stand when numbers are computed (`networks`); empty: seeds."""
        return str(self.told.get("over", ""))

    @property
    def computed(self) -> bool:
        """Whether nothing in it is random, so that its verdicts need neither seeds nor an interval."""
        return self.kind == "count" or bool(self.over)

    @property
    def fixes(self) -> Mapping[str, str]:
        """Labels with a change of ours, and its name: they are never rows of the paper."""
        return dict(self.told.get("fixes", {}))

    @property
    def scales(self) -> tuple[str, ...]:
        """The scales that it has, smallest first; a count has one, the paper's own."""
        if self.kind == "count":
            return ("paper",)
        return tuple(scale for scale in SCALES if scale in self.told)

    def cases(self, scale: str | None = None) -> list[Case]:
        """Return its cases, or those of one scale."""
        wanted = self.told.get(scale, {}).get("cases") if scale else None
        return [case for case in self._cases if wanted is None or case.name in wanted]

    @cached_property
    def _cases(self) -> list[Case]:
        made = []
        for name, told in self.told.get("cases", {"all": {}}).items():
            claims = (
                None if "claims" not in told else tuple(parse_claim(text, self.quantity) for text in told["claims"])
            )
            made.append(
                Case(
                    name,
                    told.get("title", self.title),
                    told.get("settings", {}),
                    told.get("numbers", {}),
                    claims,
                    told.get("ours", ""),
                    told.get("same", ""),
                )
            )
        return made

    def claims(self, case: Case, scale: str) -> list[Claim]:
        """Return what the paper claims in a case.

        A scale may have claims of its own (`claims`).
        """
        if "claims" not in self.told.get(scale, {}) and case.claims is not None:
            return list(case.claims)
        return [parse_claim(text, self.quantity) for text in self.option(scale, "claims", ())]

    def swapped(self, scale: str) -> bool:
        """Tell whether a scale has other data than the paper's, so that only directions can be compared."""
        return bool(self.told.get(scale, {}).get("swapped", False))

    def option(self, scale: str, name: str, default: Any) -> Any:
        """Return a fact of a scale, or of the entry."""
        return self.told.get(scale, {}).get(name, self.told.get(name, default))

    def experiment(self, scale: str, case: Case) -> Experiment:
        """Return the comparison of a case.

        Raises
        ------
        InputError
            For a scale that the entry lacks.
        """
        if scale not in self.scales:
            raise unknown(f"scale of {self.path}", scale, self.scales)
        return experiment_of(self.values, None if scale == "mini" else scale, case.settings)

    def folder(self, scale: str, case: Case) -> Path:
        """Return where its runs are kept: entries of a paper with equal settings share them."""
        base = self.experiment(scale, case).base
        words = setting_words(
            replace(base, seed=0)
        )  # what is not a default: a setting that is new later changes nothing
        digest = hashlib.blake2b(json.dumps(words).encode(), digest_size=4).hexdigest()
        return Path(self.paper) / f"{scale}-{digest}"


def parse_claim(text: str, quantity: str) -> Claim:
    """Read `A - B`, `A:q - B:r`, `A - B > 0` (or `< 0`, `= 0`).

    Raises
    ------
    InputError
        When it is none of these.
    """
    words, sign = text, 0
    for ending, found in ((" > 0", 1), (" < 0", -1), (" = 0", 0)):
        if text.endswith(ending):
            words, sign = text.removesuffix(ending), found
    sides = words.split(" - ")
    if len(sides) != 2 or not all(side.strip() for side in sides):
        raise InputError(f"A claim is 'A - B', 'A:quantity - B:quantity' or 'A - B > 0', not '{text}'.")
    one, two = (Side(label.strip(), which.strip() or quantity) for label, _, which in (s.partition(":") for s in sides))
    return Claim(one, two, sign, text.endswith(" = 0"))


def home(start: Path | None = None) -> Path:
    """Return the folder with `experiments/papers`: the current one, or the checkout that this package is in.

    Raises
    ------
    InputError
        When neither has it.
    """
    for folder in (start or Path.cwd(), Path(__file__).resolve().parents[3]):
        if (folder / "experiments" / "papers").is_dir():
            return folder
    raise InputError("There is no experiments/papers here: call polyfed reproduce in a clone of the repository.")


def read_entry(file: Path) -> Entry:
    """Read one file.

    Raises
    ------
    InputError
        When it is not an entry.
    """
    try:
        values = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"Cannot read the entry {file}: {error}.") from error
    told = values.pop("paper", None)
    if not isinstance(told, dict) or "title" not in told:
        raise InputError(f"{file} has no [paper] table with a title: it is no entry.")
    return Entry(file.parent.name, file.stem, values, told)


def read_entries(root: Path) -> list[Entry]:
    """Read all entries, paper by paper, tables before figures."""
    found = [read_entry(file) for paper in PAPERS for file in (root / "experiments" / "papers" / paper).glob("*.toml")]
    return sorted(found, key=lambda entry: (PAPERS.index(entry.paper), _order(entry.name)))


def _order(name: str) -> tuple[bool, int, str]:
    kind = name.rstrip("abcdefghijklmnopqrstuvwxyz-")
    digits = "".join(letter for letter in kind if letter.isdigit())
    return not name.startswith("table"), int(digits or 0), name


def find_entries(entries: Sequence[Entry], what: str | None) -> list[Entry]:
    """Return all entries, those of a paper, or one by its path.

    Raises
    ------
    InputError
        For a name that is neither, with the nearest one.
    """
    if what is None:
        return list(entries)
    found = [entry for entry in entries if what in (entry.paper, entry.path)]
    if not found:
        raise unknown("paper or entry", what, [*PAPERS, *(entry.path for entry in entries)])
    return found
