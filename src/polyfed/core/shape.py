"""The shape of one input, and what its values mean where that is not plain from the shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class InputShape(tuple[int, ...]):
    """A shape without the batch axis that also says what the values are: equal to, and used as, the plain tuple.

    Three sizes are images (channels, height, width), two are signals (channels, time), one is a row of a table or,
    where there are `words`, a text.

    Attributes
    ----------
    words
        Inputs are token ids below this number (0: they are no tokens); id 0 is padding.
    groups
        Sizes of the groups of 0 and 1 at the end of a table's row, one group for each column of categories.
    """

    words: int
    groups: tuple[int, ...]

    def __new__(cls, sizes: Iterable[int] = (), words: int = 0, groups: Iterable[int] = ()) -> InputShape:
        """Make one from sizes; another `InputShape` keeps what it knows."""
        made = super().__new__(cls, sizes)
        made.words = words or getattr(sizes, "words", 0)
        made.groups = tuple(groups) or getattr(sizes, "groups", ())
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return InputShape, (tuple(self), self.words, self.groups)

    @property
    def kind(self) -> str:
        """What one input is: image, signal, text or table."""
        if self.words:
            return "text"
        return {3: "image", 2: "signal"}.get(len(self), "table")

    def dump(self) -> dict[str, Any]:
        """Return the shape for a JSON file."""
        return {"sizes": list(self), "words": self.words, "groups": list(self.groups)}

    @staticmethod
    def load(dumped: Mapping[str, Any]) -> InputShape:
        """Read what `dump` gave."""
        return InputShape(dumped["sizes"], dumped.get("words", 0), dumped.get("groups", ()))
