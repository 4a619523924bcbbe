"""What a method's class tells, as a section of its page: what leaves, what it needs, its options."""

from __future__ import annotations

from typing import Any

from polyfed.cli.listing import PAGES, method_entry
from polyfed.methods import registry

FOLDER = "methods"


def sections(page: str) -> str:
    """Return a section for each method that a page tells about."""
    folder, _, name = page.rpartition("/")
    stem = name.removesuffix(".md")
    if folder != FOLDER:
        return ""
    told = [method for method in registry() if PAGES.get(method, method) == stem]
    return "".join(f"\n\n{section(method_entry(method))}" for method in told)


def section(entry: dict[str, Any]) -> str:
    """Return one method as Markdown."""
    lines = [
        f"## `{entry['method']}` at a glance",
        "",
        "*From the class itself; `polyfed methods " + entry["method"] + "` prints the same.*",
        "",
        f"| paper | {_cell(entry['paper'])} |",
        "|---|---|",
        f"| family | {_cell(entry['family'])} |",
        f"| what leaves a client | {_cell(entry['sends'])} |",
        f"| needs | {_cell('; '.join(entry['needs']) or 'nothing in particular')} |",
        "",
    ]
    if not entry["options"]:
        return "\n".join([*lines, "It has no options."])
    lines += ["| option | default | takes | meaning |", "|---|---|---|---|"]
    for one in entry["options"]:
        cells = (f"`{one['option']}`", f"`{one['default']}`", _cell(one["takes"]), _cell(one["meaning"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def generated() -> dict[str, str]:
    """Return pages for the methods that nobody wrote one for."""
    made = {}
    for method in registry():
        entry = method_entry(method)
        if entry["page"] is None and ":" not in entry["method"]:
            made[f"{FOLDER}/{method}.md"] = f"# {method}\n\n{entry['about']}\n"
    return made


def _cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
