"""What a method's class tells, on its page: what its exchanges cost, what leaves, what it needs, its options."""

from __future__ import annotations

from typing import Any

from polyfed.cli.listing import PAGES, method_entry
from polyfed.methods import registry

FOLDER = "methods"


def sections(page: str) -> str:
    """Return a section for each method that a page tells about."""
    return "".join(f"\n\n{section(method_entry(method))}" for method in _told(page))


def _told(page: str) -> list[str]:
    """Return the methods that a page tells about."""
    folder, _, name = page.rpartition("/")
    stem = name.removesuffix(".md")
    return [method for method in registry() if folder == FOLDER and PAGES.get(method, method) == stem]


def costs(page: str) -> str:
    """Return what the exchanges of a page's methods cost."""
    return "\n\n".join(cost(method_entry(method)) for method in _told(page))


def cost(entry: dict[str, Any]) -> str:
    """Return what a method's exchanges cost, with the meaning of the letters, as Markdown."""
    if not entry["cost"]:
        return "" if entry["cost"] is None else f"`{entry['method']}`: nothing travels."
    lines = [f"Bytes of a client in one exchange of `{entry['method']}`, as its class has them:", ""]
    for one in entry["cost"]:  # a list: on a phone, a table of formulas is cut off
        ways = ", ".join(f"{way} `{one[way]}`" for way in ("down", "up") if one[way] != "0")
        lines.append(f"- `{one['step']}`, {one['when']}: {ways}")
    where = "; ".join(f"`{letter}` {meaning}" for letter, meaning in entry["where"].items())
    return "\n".join([*lines, "", f"Here {where}. Tests hold every formula to the bytes that runs count."])


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
    lines += ["| option and default | meaning |", "|---|---|"]  # two columns: a phone has no room for more
    for one in entry["options"]:
        takes = f" ({_cell(one['takes'])})" if one["takes"] else ""
        lines.append(f"| `{one['option']}` = `{one['default']}`{takes} | {_cell(one['meaning'])} |")
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
