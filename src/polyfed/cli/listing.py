"""What `polyfed methods` and `polyfed models` print: a short table of all, or one entry in full."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from polyfed.core.errors import unknown
from polyfed.core.fields import in_words, meanings, types_of
from polyfed.core.method import Method
from polyfed.core.needs import EXPLAINED
from polyfed.methods import find, reference, registry

PAGES = {"ensemble": "ams", "oneshot_fedavg": "ams", "pfnm": "ams", "fedprox": "fedavg"}  # told beside another one
UNTOLD = ("local", "centralized")


def method_rows() -> list[dict[str, Any]]:
    """Return one short row for each method, family by family."""
    kinds = sorted(registry().values(), key=lambda kind: (kind.family, kind.name))
    return [{"family": kind.family, "method": kind.name, "paper": kind.paper, "sends": kind.sends} for kind in kinds]


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
        "paper": kind.paper,
        "family": kind.family,
        "about": _summary(kind),
        "sends": kind.sends,
        "needs": [EXPLAINED[need] for need in needs],
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
    from polyfed.models import describe

    rows = {str(row["name"]): row for row in describe()}
    if name not in rows:
        raise unknown("model", name, rows)
    return dict(rows[name])


def method_text(entry: dict[str, Any]) -> str:
    """Return a method's entry for people."""
    lines = [
        f"{entry['method']}: {entry['about']}",
        "",
        f"paper    {entry['paper']}",
        f"family   {entry['family']}",
        f"sends    {entry['sends']}",
        f"needs    {'; '.join(entry['needs']) or 'nothing in particular'}",
        *([f"page     {entry['page']}"] if entry["page"] else []),
        "",
        "options (--set method.NAME=VALUE)" if entry["options"] else "It has no options.",
    ]
    for option in entry["options"]:
        lines += ["", f"  {option['option']} = {option['default']}   ({option['takes']})", f"      {option['meaning']}"]
    return "\n".join(lines)


def model_text(entry: dict[str, Any]) -> str:
    """Return a network's entry for people."""
    return "\n".join(
        [
            f"{entry['name']}: {entry['summary']}",
            "",
            f"write it as  {entry['example']}",
            f"options      {entry['options'] or 'none'}",
            f"parameters   {entry['parameters']} in the example, for colour images of 32x32 pixels and ten classes",
        ]
    )


def _summary(kind: type[Method]) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _page(kind: type[Method]) -> str | None:
    told = reference(kind) == kind.name and kind.name not in UNTOLD
    return f"docs/methods/{PAGES.get(kind.name, kind.name)}.md" if told else None
