"""What `polyfed methods`, `models` and `data` print: a short table of all, or one entry in full."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polyfed import models
from polyfed.core.fields import in_words, meanings, types_of
from polyfed.core.method import Method
from polyfed.core.needs import EXPLAINED
from polyfed.core.traffic import described, letters
from polyfed.experiment import read_experiment
from polyfed.methods import find, reference, registry
from polyfed.terminal.tables import say

PAGES = {  # told beside another one
    "dafkd_hetero": "dafkd",
    "ensemble": "ams",
    "feddf_hetero": "feddf",
    "feddistill_plus": "feddistill",
    "fedgen_hetero": "fedgen",
    "fedprox": "fedavg",
    "moon_hetero": "moon",
    "oneshot_fedavg": "ams",
    "pfnm": "ams",
}
UNTOLD = ("local", "centralized")
OFFERS = {  # what methods may need of a network
    "features": "features and a head",
    "split3": "cuts in three (stem, middle, head)",
    "width": "width slices",
    "exits": "several exits",
    "batchnorm": "BatchNorm",
    "mlp": "only fully connected layers",
    "dropout": "dropout",
}
EXAMPLE_INPUTS = {
    "image": "color images of 32x32 pixels",
    "signal": "signals of 3 channels and 50 steps",
    "text": "texts of 64 words out of 1000",
    "table": "a table with 4 numbers and columns of 3 and 5 words",
}


def print_json(value: Any) -> None:
    """Print for machines."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def print_rows(rows: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Print the table of all, or some of its columns."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0))
    headings = columns or list(rows[0])
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading == "example")  # how to write a model is copied whole
    for row in rows:
        cells = (row[heading] for heading in headings)
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in cells))  # None: nobody knows
    Console().print(table)


def method_rows() -> list[dict[str, Any]]:
    """Return one short row for each method, family by family."""
    kinds = sorted(registry().values(), key=lambda kind: (kind.family, kind.name))
    return [{"family": kind.family, "method": kind.name, "paper": _paper(kind), "sends": kind.sends} for kind in kinds]


def method_entry(name: str) -> dict[str, Any]:
    """Return everything about one method.

    Raises
    ------
    InputError
        For an unknown name, with the nearest known one.
    """
    kind: Any = find(name)
    needs = sorted(kind().requirements())
    return {
        "method": reference(kind),
        "paper": _paper(kind),
        "family": kind.family,
        "about": _summary(kind),
        "sends": kind.sends,
        "needs": [EXPLAINED[need] for need in needs],
        "cost": described(kind()),
        "where": letters(kind()),
        "options": [
            {
                "option": field.name,
                "takes": in_words(types_of(kind)[field.name]),
                "default": field.default,
                "meaning": meanings(kind).get(field.name, ""),
            }
            for field in fields(kind)
        ],
        "page": _page(kind),
    }


def model_entry(name: str) -> dict[str, Any]:
    """Return everything about one network of the zoo.

    Raises
    ------
    InputError
        For an unknown name, with the nearest known one.
    """
    return models.describe_one(name)


def method_text(entry: dict[str, Any], width: int = 80) -> str:
    """Return a method's entry for people; options that are explained together stand together."""
    facts = {
        "paper": entry["paper"],
        "family": entry["family"],
        "sends": entry["sends"],
        "needs": "; ".join(entry["needs"]) or "nothing in particular",
        "page": entry["page"],
    }
    lines = [
        _wrapped(f"{entry['method']}: {entry['about']}", width),
        "",
        *_table(facts, width),
        *_cost(entry, width),
        "",
        "options (--set method.NAME=VALUE)" if entry["options"] else "It has no options.",
    ]
    explained: dict[str, list[str]] = {}
    for option in entry["options"]:
        words = f"{option['option']} = {option['default']}   ({option['takes']})"
        explained.setdefault(option["meaning"], []).append(words)
    for meaning, options in explained.items():
        lines += ["", *(_wrapped(words, width, 2, 6) for words in options), _wrapped(meaning, width, 6)]
    return "\n".join(lines)


def _cost(entry: dict[str, Any], width: int) -> list[str]:
    """Return what a method's exchanges cost, and what the letters mean."""
    if not entry["cost"]:
        return [] if entry["cost"] is None else ["", "cost: nothing travels"]
    lines = ["", "cost (bytes of a client in one exchange)"]
    for one in entry["cost"]:
        lines.append(_wrapped(f"{one['step']}, {one['when']}", width, 2, 6))
        lines += [_wrapped(f"{way:<5} {one[way]}", width, 6, 12) for way in ("down", "up") if one[way] != "0"]
    return [*lines, *(_wrapped(f"{letter:<4}{meaning}", width, 2, 6) for letter, meaning in entry["where"].items())]


def model_text(entry: dict[str, Any], width: int = 80) -> str:
    """Return a network's entry for people."""
    narrow = f" ({entry['example']}@0.5: at half its width)" if "width" in entry["offers"] else ""
    facts = {
        "write it as": entry["example"] + narrow,
        "offers": "; ".join(OFFERS[offer] for offer in entry["offers"] if offer in OFFERS),
        "parameters": f"{entry['parameters'] or 'unknown'} in the example, for {EXAMPLE_INPUTS[entry['inputs']]} "
        "and ten classes",
    }
    options = [
        _wrapped(f"{option}: {meaning}" if meaning else option, width, 2, 6)
        for option, meaning in entry["options"].items()
    ]
    heading = "options (behind a colon, joined by commas)" if options else "It has no options."
    about = _wrapped(f"{entry['name']}: {entry['summary']}", width)
    return "\n".join([about, "", *_table(facts, width), "", heading, *options])


def _table(facts: dict[str, str | None], width: int) -> list[str]:
    """Return facts below each other, those that there are."""
    start = max(map(len, facts)) + 2
    return [_wrapped(f"{name:<{start}}{fact}", width, 0, start) for name, fact in facts.items() if fact]


def _wrapped(text: str, width: int, first: int = 0, further: int | None = None) -> str:
    """Return a text in lines of a width, indented; what people copy, such as paths and values, is not cut."""
    after = " " * (first if further is None else further)
    return textwrap.fill(
        text,
        width,
        initial_indent=" " * first,
        subsequent_indent=after,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(kind: type[Method]) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _ours(kind: type[Method]) -> bool:
    return kind.__module__.startswith("polyfed.methods.")


def _paper(kind: type[Method]) -> str:
    """Return a method's paper; one of another package is not from that of the method it builds on."""
    return kind.paper if _ours(kind) or "paper" in vars(kind) else ""


def _page(kind: type[Method]) -> str | None:
    told = _ours(kind) and kind.name not in UNTOLD
    return f"docs/methods/{PAGES.get(kind.name, kind.name)}.md" if told else None  # others have pages of their own


@dataclass(frozen=True)
class Listing:
    """What a command lists."""

    command: str
    columns: tuple[str, ...]  # of the short table
    rows: Callable[[], list[dict[str, Any]]]
    entry: Callable[[str], dict[str, Any]]
    text: Callable[[dict[str, Any], int], str]  # for people, in lines of a width

    def show(self, name: str | None, as_json: bool) -> None:
        """Print one entry in full, or the table of all."""
        if as_json:
            print_json(self.rows() if name is None else self.entry(name))
        elif name is not None:
            say(Console(), self.text(self.entry(name), max(40, Console().width)))
        else:
            print_rows(self.rows(), self.columns)
            say(Console(), f"polyfed {self.command} NAME prints one in full, with its options.")


def show_applicable(path: Path, as_json: bool, name: str | None = None) -> None:
    """Print which methods apply to an experiment file, family by family, then why the others do not; or of one."""
    from polyfed.cli.applies import applicable

    if name is not None:
        (row,) = applicable(read_experiment(path), {name: find(name)})
        if as_json:
            print_json(row)
        else:
            told = "applies to" if row["applies"] else "does not apply to"
            say(Console(), f"{name} {told} {path}" + (f": {row['needs']}" if row["needs"] else "."))
        return
    rows = applicable(read_experiment(path))
    if as_json:
        print_json(rows)
        return
    able = [row for row in rows if row["applies"]]
    say(Console(), f"{len(able)} of {len(rows)} methods apply to {path}:")
    families: dict[str, list[str]] = {}
    for row in able:
        families.setdefault(row["family"], []).append(row["method"])
    print_rows([{"family": k, "methods": ", ".join(names)} for k, names in families.items()], ("family", "methods"))
    if len(able) < len(rows):
        say(Console(), "The others need:")
        print_rows([row for row in rows if not row["applies"]], ("method", "needs"))


METHODS = Listing("methods", ("family", "method", "paper"), method_rows, method_entry, method_text)
MODELS = Listing("models", ("name", "inputs", "example", "summary"), lambda: models.describe(), model_entry, model_text)
