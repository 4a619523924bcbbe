"""Names that share a description in a docstring (`rounds, seed`) get a row and a type each in the reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

TOGETHER = re.compile(r"^(\w+(?:, \w+)+)\n((?:    .*\n?|\n(?=    ))+)", re.MULTILINE)


def apart(text: str) -> str:
    """Return a docstring with an entry for every name."""
    return TOGETHER.sub(lambda found: "".join(f"{name}\n{found[2].rstrip()}\n" for name in found[1].split(", ")), text)


class Apart(griffe.Extension):
    """Rewrites docstrings before they are read: the reader would give all names the type of the first."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one."""
        if obj.docstring is not None:
            obj.docstring.value = apart(obj.docstring.value)
