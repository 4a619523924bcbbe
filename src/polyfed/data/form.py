"""How raw rows (columns of a table, texts, token ids) become numbers: learned from training rows, used on all others.

Numbers of a table come first, then a mark for each column with gaps, then the yes and no columns, then for each column
of words one position for each of its values. A value that training does not know is in none of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import InputError, nearest
from polyfed.core.shape import InputShape
from polyfed.data.texts import Words, padded, zeros_inside

GAPS = "empty cells get the mean of the others and a mark beside it"
CATEGORIES = "columns of categories, a position for each value"
EMPTY = "empty cells of words"
MOST_VALUES = 100  # a column with more different words is not a column of categories
NUMBER = re.compile(r"\s*[-+]?\d+(?:[.,]\d+)?(?:[eE][-+]?\d+)?\s*")
FEW_ROWS = 20  # from so many rows on, a column whose words are mostly different is not one either


@dataclass(frozen=True)
class Raw:
    """Rows as they were read, before a form makes numbers of them.

    `columns`: numbers (float, NaN where there is none), yes and no (bool) or words (objects: text, or None). Texts and
    token ids are one column: of texts, or of lists of ids.
    """

    columns: dict[str, np.ndarray]
    kind: str = "table"  # table | text | tokens
    named: bool = True  # False: the one column came as a list, and its name here is ours

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def take(self, rows: np.ndarray) -> Raw:
        """Return some rows."""
        return replace(self, columns={name: values[rows] for name, values in self.columns.items()})

    @staticmethod
    def join(parts: Sequence[Raw]) -> Raw:
        """Put the rows of several parts together; a column that is words in one of them is words in all."""
        columns = {}
        for name in parts[0].columns:
            pieces = [part.columns[name] for part in parts]
            if len({piece.dtype.kind for piece in pieces}) > 1:
                raise InputError(
                    f"Column '{name}' holds {_kind_in_words(pieces[0])} in one part and "
                    f"{_kind_in_words(next(p for p in pieces if p.dtype.kind != pieces[0].dtype.kind))} in another: "
                    "give one kind everywhere."
                )
            columns[name] = np.concatenate(pieces)
        return replace(parts[0], columns=columns)


@dataclass(frozen=True)
class Column:
    """One column of a table: its name, kind (number, flag or category), the values of a category in order.

    `gaps`: some training rows have no number, so that a position of its own says which; `fill` stands in for it.
    `center` and `spread` scale a number where several parties agreed on that; None: its training rows say.
    """

    name: str
    kind: str
    values: tuple[str, ...] = ()
    gaps: bool = False
    fill: float = 0.0
    center: float = 0.0
    spread: float | None = None


@dataclass(frozen=True)
class Form:
    """What inputs are, and how raw rows become the numbers that are stored.

    Attributes
    ----------
    kind
        image, signal, features (numbers without names), table, text or tokens.
    columns
        Of a table.
    words
        Of texts: the vocabulary, or the tokenizer that was given.
    length, ids
        Of texts and tokens: how many ids a row has, and how many different ones there are.
    column
        Of texts: the column that they came from; empty where they had no name.
    resize
        Of images: whether they were brought to their size, as new ones then are.
    white
        Of images that came as floats: what the 255 of a byte is there, 1 where they go from 0 to 1; 0: nobody knows.
    """

    kind: str = "features"
    columns: tuple[Column, ...] = ()
    words: Words | None = field(default=None, repr=False)
    length: int = 0
    ids: int = 0
    column: str = ""
    resize: bool = False
    white: float = 0.0

    def shape(self, x: Tensor) -> InputShape:
        """Return the shape of stored inputs, with what they mean."""
        return InputShape(x.shape[1:], self.ids, [len(c.values) for c in self.columns if c.kind == "category"])

    @property
    def numbers(self) -> int:
        """How many positions of a row are numbers that are scaled; all that follow are 0 or 1."""
        return sum(column.kind == "number" for column in self.columns)

    def encode(self, raw: Raw, what: str) -> tuple[Tensor, tuple[str, ...]]:
        """Return stored inputs of raw rows, and what a reader should know about them.

        Raises
        ------
        InputError
            If a column is missing or holds another kind of values.
        """
        if self.kind in ("text", "tokens"):
            return self._encode_ids(raw, what)
        pieces: dict[str, list[np.ndarray]] = {"number": [], "gap": [], "flag": [], "category": []}
        notes: list[str] = []
        empty: list[str] = []
        for column in self.columns:
            if column.name not in raw.columns:
                raise InputError(
                    f"{_capital(what)} has no column '{column.name}', which the form has that all rows follow: "
                    f"{nearest(column.name, raw.columns, 'its columns are')}"
                )
            values = _as(column, raw.columns[column.name], what)
            if column.kind == "category":
                pieces["category"].append(_one_hot(column, values, what, notes))
                missing = np.array([value is None for value in values], dtype=bool)
                if rows := int(missing.sum()):
                    empty.append(f"{column.name} ({rows} row{'s' if rows > 1 else ''})")
                continue
            missing = np.isnan(values)
            if missing.any() and not column.gaps:
                notes.append(f"{int(missing.sum())} rows of {what} have no '{column.name}': training's mean stands in")
            pieces[column.kind].append(np.where(missing, column.fill, values)[:, None])
            if column.gaps:
                pieces["gap"].append(missing[:, None])
        if empty:
            notes.append(f"{EMPTY} in {what} are none of the known values: {', '.join(empty)}")
        table = np.concatenate([piece.astype(np.float32) for group in pieces.values() for piece in group], axis=1)
        return torch.from_numpy(np.ascontiguousarray(table)), tuple(notes)

    def _encode_ids(self, raw: Raw, what: str) -> tuple[Tensor, tuple[str, ...]]:
        (rows,) = raw.columns.values()
        if self.words is not None:
            rows = self.words.ids(rows, what)
        empty = sum(len(row) == 0 for row in rows)
        notes = zeros_inside(rows, what) if self.kind == "tokens" else ()
        if empty:
            notes += (f"{empty} rows of {what} are empty: each is one unknown word",)
        return padded(rows, self.length, self.ids, what), notes

    def without(self, name: str, x: Tensor, x_test: Tensor) -> tuple[Form, np.ndarray, np.ndarray, Tensor]:
        """Take a column out of a table: return the form without it, its values in both parts, and what stays of x."""
        column = next(column for column in self.columns if column.name == name)
        places = self.places(name)
        found = [_values(column, part[:, torch.from_numpy(places)].numpy()) for part in (x, x_test)]
        kept = torch.from_numpy(np.setdiff1d(np.arange(x.shape[1]), places))
        left = replace(self, columns=tuple(other for other in self.columns if other.name != name))
        return left, found[0], found[1], kept

    def places(self, name: str) -> np.ndarray:
        """Return the positions that a column has in a stored row."""
        owners = [column.name for column in self.columns if column.kind == "number"]
        owners += [column.name for column in self.columns if column.gaps]
        owners += [column.name for column in self.columns if column.kind == "flag"]
        owners += [column.name for column in self.columns if column.kind == "category" for _ in column.values]
        return np.flatnonzero(np.array(owners) == name)

    def dump(self) -> dict[str, Any]:
        """Return the form for a JSON file (a tokenizer that was given as an object is only named)."""
        return {
            "kind": self.kind,
            "columns": [asdict(column) for column in self.columns],
            "words": None if self.words is None else self.words.dump(),
            "length": self.length,
            "ids": self.ids,
            "column": self.column,
            "resize": self.resize,
            "white": self.white,
        }

    @staticmethod
    def load(dumped: Mapping[str, Any]) -> Form:
        """Read what `dump` gave."""
        columns = tuple(Column(**{**column, "values": tuple(column["values"])}) for column in dumped["columns"])
        words = None if dumped["words"] is None else Words.load(dumped["words"])
        later = {key: dumped[key] for key in ("column", "resize", "white") if key in dumped}  # not in files from before
        return Form(dumped["kind"], columns, words, dumped["length"], dumped["ids"], **later)


def learn_form(
    raw: Raw, what: str, words: Words | None = None, length: int | None = None
) -> tuple[Form, tuple[str, ...]]:
    """Find out from training rows how to make numbers of them, and say what that does.

    Raises
    ------
    InputError
        If a column is empty, or its words are too many for categories.
    """
    if raw.kind in ("text", "tokens"):
        return _learn_ids(raw, what, words, length)
    columns, notes, gaps = [], [], []
    for name, values in raw.columns.items():
        column = _learn_column(name, values, what)
        columns.append(column)
        if column.gaps:
            gaps.append(f"{name} ({int(np.isnan(values.astype(np.float64)).sum())} rows)")
    if gaps:
        notes.append(f"{GAPS}: {', '.join(gaps)}")
    categories = [f"{c.name} ({len(c.values)})" for c in columns if c.kind == "category"]
    if categories:
        notes.append(f"{CATEGORIES}: {', '.join(categories)}")
    return Form("table", tuple(columns)), tuple(notes)


def notes_without(notes: Sequence[str], name: str) -> tuple[str, ...]:
    """Return notes on the columns of a table without one that is no feature any more."""
    kept = []
    for note in notes:
        if note.startswith((GAPS, CATEGORIES, EMPTY)):
            begin, _, listed = note.rpartition(": ")
            others = [item for item in listed.split(", ") if not item.startswith(f"{name} (")]
            note = f"{begin}: {', '.join(others)}" if others else ""
        kept.append(note)
    return tuple(note for note in kept if note)


def _learn_ids(raw: Raw, what: str, words: Words | None, length: int | None) -> tuple[Form, tuple[str, ...]]:
    (rows,) = raw.columns.values()
    notes: tuple[str, ...] = ()
    if raw.kind == "text":
        words = words or Words.learn(rows)
        rows = words.ids(rows, what)
        count = words.count or max((max(row, default=0) for row in rows), default=0) + 1
        if texts_are_empty(texts := next(iter(raw.columns.values()))):
            notes = (f"all {len(texts)} texts of {what} are empty: there is nothing to learn from",)
        elif words.learned:
            notes = (f"texts are at most {{}} of {count - 2} words, learned from training",)
    else:
        count = max((max(row, default=0) for row in rows), default=0) + 1
    longest = max((len(row) for row in rows), default=1)
    length = length or min(longest, 256) or 1  # one that was given is the same at all sites, whatever their texts
    if longest > length:
        cut = sum(len(row) > length for row in rows)
        notes += (f"{cut} texts are longer than {length} words and are cut (length=... keeps more)",)
    column = next(iter(raw.columns)) if raw.kind == "text" and raw.named else ""
    return Form(raw.kind, (), words, length, max(count, 2), column), tuple(note.format(length) for note in notes)


def texts_are_empty(texts: np.ndarray) -> bool:
    """Tell whether no text has anything but blanks."""
    return not any(str(text or "").strip() for text in texts)


def _learn_column(name: str, values: np.ndarray, what: str) -> Column:
    if values.dtype.kind == "b":
        return Column(name, "flag")
    if values.dtype.kind == "f":
        missing = np.isnan(values)
        if missing.all():
            raise InputError(f"Column '{name}' of {what} is empty: leave it out (drop=['{name}']).")
        finite = values[~missing & np.isfinite(values)]
        fill = float(finite.mean()) if len(finite) else 0.0
        return Column(name, "number", gaps=bool(missing.any()), fill=fill)
    known = sorted({str(value) for value in values if value is not None})
    if not known:
        raise InputError(f"Column '{name}' of {what} is empty: leave it out (drop=['{name}']).")
    if len(known) > MOST_VALUES or (len(values) >= FEW_ROWS and 2 * len(known) > len(values)):
        words = [word for word in known if not NUMBER.fullmatch(word)]
        if 2 * len(words) < len(known):
            told = f" beside words such as '{words[0]}'" if words else " that are written as words"
            raise InputError(
                f"Column '{name}' of {what} holds numbers{told}: make such cells empty or numbers, or leave the column "
                f"out (drop=['{name}'])."
            )
        raise InputError(
            f"Column '{name}' of {what} holds {len(known)} different words in {len(values)} rows, too many for "
            f"categories: leave it out (drop=['{name}']), or read it as text, alone (inputs='{name}', kind='text')."
        )
    return Column(name, "category", tuple(known))


def _as(column: Column, values: np.ndarray, what: str) -> np.ndarray:
    """Return values as the kind that a column has: whole numbers may be words, words are never numbers."""
    if column.kind == "category":
        if values.dtype.kind == "O":
            return values
        plain = [None if value != value else value for value in values.tolist()]
        return np.array([None if v is None else _word(v) for v in plain], dtype=object)
    if values.dtype.kind == "O":
        wrong = next((value for value in values if value is not None), None)
        if wrong is None:
            return np.full(len(values), np.nan)
        raise InputError(
            f"Column '{column.name}' of {what} holds words ('{wrong}'), but in training it holds numbers: "
            "give one kind everywhere."
        )
    return values.astype(np.float64)


def _word(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _one_hot(column: Column, values: np.ndarray, what: str, notes: list[str]) -> np.ndarray:
    places = {value: place for place, value in enumerate(column.values)}
    found = np.array([places.get(value, -1) if value is not None else -1 for value in values], dtype=np.int64)
    strange = sorted({str(value) for value in values if value is not None and value not in places})
    if strange:
        rows = sum(value is not None and value not in places for value in values)
        notes.append(
            f"{rows} rows of {what} have a '{column.name}' that training does not know "
            f"({', '.join(strange[:3])}{', ...' if len(strange) > 3 else ''}): they count as none of its values"
        )
    table = np.zeros((len(values), len(column.values)), dtype=np.float32)
    known = found >= 0
    table[np.flatnonzero(known), found[known]] = 1.0
    return table


def _values(column: Column, stored: np.ndarray) -> np.ndarray:
    """Return a column as it was, from its positions in stored rows; '' or NaN where there was no value."""
    if column.kind == "category":
        names = np.array([*column.values, ""])
        return names[np.where(stored.any(axis=1), stored.argmax(axis=1), len(column.values))]
    numbers = stored[:, 0].astype(np.float64)
    if column.gaps:
        numbers[stored[:, 1] > 0] = np.nan
    whole = not np.isnan(numbers).any() and bool((numbers == np.floor(numbers)).all())
    return numbers.astype(np.int64) if whole else numbers


def _kind_in_words(values: np.ndarray) -> str:
    return {"f": "numbers", "b": "yes and no", "O": "words"}[values.dtype.kind]


def _capital(what: str) -> str:
    return what[0].upper() + what[1:]
