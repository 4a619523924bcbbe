"""The public names of polyfed, from the stub that type checkers read, and the pages of their reference."""

from __future__ import annotations

import ast
from inspect import ismodule
from pathlib import Path

STUB = Path(__file__).parents[2] / "src" / "polyfed" / "__init__.pyi"
GROUPS = {  # by the module that a name lives in; what is in no group stands under "More"
    "Run": ("api", "result", "core.settings"),
    "Data": ("data",),
    "Networks": ("models", "fusion", "build"),
    "For authors of methods": ("core.method", "core.message", "core.party", "core.stage", "testing"),
    "Errors": ("core.errors",),
}


def public() -> dict[str, str]:
    """Return every public name with the place where it is defined: `split` -> `polyfed.data.split.split`."""
    import polyfed

    found = {}
    for node in ast.parse(STUB.read_text()).body:
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            name = alias.asname or alias.name
            thing = getattr(polyfed, name)
            place = thing.__name__ if ismodule(thing) else f"{thing.__module__}.{thing.__qualname__}"
            found[name] = place
    return found


def pages() -> dict[str, str]:
    """Return the pages of the reference: everything but methods, and the methods."""
    names = public()
    methods = {name: path for name, path in names.items() if path.startswith("polyfed.methods.")}
    text = ["# Reference", "", "`import polyfed as pf`: everything below is `pf.NAME`.", ""]
    rest = {name: path for name, path in names.items() if name not in methods}
    for title, modules in {**GROUPS, "More": ("",)}.items():
        mine = {n: p for n, p in rest.items() if any(p.startswith(f"polyfed.{module}") for module in modules)}
        rest = {name: path for name, path in rest.items() if name not in mine}
        if mine:
            text += [f"## {title}", "", *(f"::: {path}\n" for path in mine.values())]
    listed = [
        "# Methods as classes",
        "",
        "Options are the fields; [the pages](../methods/README.md) tell more.",
        "",
    ]
    listed += [f"::: {path}\n    options:\n      members: false\n" for _, path in sorted(methods.items())]
    return {
        "reference/README.md": "\n".join(text),
        "reference/method-classes.md": "\n".join(listed),
        "reference/files.md": files(),
    }


def files() -> str:
    """Return a page with the first line of every file, which says what it holds."""
    lines = ["# Files", "", "Every file of `src/polyfed`, by its first line.", ""]
    root, folder = STUB.parent, None
    for path in sorted(root.rglob("*.py"), key=lambda file: (file.parent != root, file)):
        if path.parent != folder:
            folder = path.parent
            lines += ["", f"## {folder.relative_to(root.parent)}", "", "| file | holds |", "|---|---|"]
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0].replace("|", "\\|")
        lines.append(f"| `{path.name}` | {first} |")
    return "\n".join(lines) + "\n"
