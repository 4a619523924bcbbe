"""Which columns of a table are inputs and labels, and what they become: arrays, images, texts, further columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.task import CLASSIFICATION, Task
from polyfed.data.decode import as_inputs, decode_images
from polyfed.data.form import Form, Raw
from polyfed.data.labels import find_label, label_columns, read_labels
from polyfed.data.tables import Table, any_table

IMAGES = ("image", "img", "x", "pixels", "features", "signal")
TEXTS = ("text", "sentence", "content", "body", "message", "review")
TOKENS = ("input_ids", "token_ids", "tokens", "ids")
# Names that only an identifier has; and names that one often has, where no two rows have the same value.
WHO = "patient|subject|person|case|record|sample|row|visit|user|customer"
IDENTIFIER = re.compile(
    r"(?:.*[_ .-])?(?:id|Id|ID)|.*[a-z](?:Id|ID)|(?i:uuid|guid|unnamed: ?\d+|__index_level_\d+__)"
    + f"|(?i:{WHO})(?i:id)"
)
DATE = re.compile(r"(?:\d{4}([-./])\d{1,2}\1\d{1,2}|\d{1,2}([-./])\d{1,2}\2\d{4})(?:[T ]\d{1,2}:.*)?")
KEY = re.compile(f"(?i:index|key|(?:{WHO})(?:[_ .-]?(?:number|no|nr|key))?)")


@dataclass(frozen=True)
class Part:
    """What one split gives: inputs, labels (numbers or strings), class names if known, further columns.

    Columns of a table, texts and token ids are `Raw` until it is known which rows are for training. `divisor` is known
    where the inputs were scaled before (digits go from 0 to 16), `features` are the names of the columns of a feature
    table, and `notes` say what was left out.
    """

    inputs: Tensor | Raw
    labels: np.ndarray
    class_names: tuple[str, ...] | None
    columns: dict[str, np.ndarray]
    divisor: float | None = None
    features: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()  # which columns the labels came from
    form: Form | None = None  # of inputs that were made numbers before

    def outputs(self, task: Task) -> tuple[str, ...] | None:
        """Return the names of what is predicted: the classes, or the columns of labels and values; None: unknown."""
        if task == CLASSIFICATION or not self.targets:
            return self.class_names
        width = 1 if self.labels.ndim == 1 else self.labels.shape[1]
        return self.targets if len(self.targets) == width else None  # one column may hold lists

    @property
    def tensor(self) -> Tensor:
        """The inputs, which are numbers already."""
        assert isinstance(self.inputs, Tensor)
        return self.inputs


def convert(
    table: Table,
    *,
    inputs: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
    columns: Sequence[str] = (),
    drop: Sequence[str] = (),
    resize: tuple[int, int] | None = None,
    kind: str | None = None,
) -> Part:
    """Find the input and label columns of a table and turn them into arrays.

    An image or list column is the input; then a column of texts, where it is named like one or is all there is.
    Otherwise every column but the label, `columns`, `drop` and identifiers is a feature: numbers, yes and no, or words.
    An identifier has a name like one and another value in every row; named in `inputs` it is a feature, too.

    Raises
    ------
    InputError
        If a column is missing (with the columns there are), empty, or of a type that cannot be used.
    """
    named = [inputs] if isinstance(inputs, str) else list(inputs or ())
    targets = label_columns(label, table.rows.column_names)
    for name in (*named, *targets, *columns, *drop):
        if name not in table.rows.column_names:
            raise InputError(
                f"{table.what} has no column '{name}': its columns are {', '.join(table.rows.column_names)}."
            )
    both = [name for name in drop if name in (*named, *targets, *columns)]
    if both:
        raise InputError(f"Column '{both[0]}' is both used and dropped: leave it out of drop.")
    table = replace(table, rows=table.rows.drop_columns(list(drop))) if drop else table
    present = table.rows.column_names
    targets = targets or [find_label(table)]
    x_columns, left_out = (named, []) if named else _find_inputs(table, targets, columns, kind)
    said: list[str] = []
    x, whole = _features(table, x_columns, resize, kind, said)
    labels = read_labels(table, targets)
    others = {
        name: _scalars(table, name)
        for name in present
        if name not in (*targets, *x_columns) and (name in columns or _is_scalar(table.rows.schema.field(name)))
    }
    return Part(
        x,
        labels,
        table.class_names.get(targets[0]) if len(targets) == 1 else None,
        others,
        features=() if whole else tuple(x_columns),
        notes=(
            *(f"column '{name}' is an identifier, not a feature (inputs=[...] would keep it)" for name in left_out),
            *said,
        ),
        targets=tuple(targets),
    )


def kind_of(part: Part, given: str | None = None) -> str | None:
    """Return what further parts hold, once the first one has been read: a few rows of words do not tell it."""
    return part.inputs.kind if isinstance(part.inputs, Raw) else given


def read_columns(source: Any, names: Sequence[str], what: str) -> dict[str, np.ndarray]:
    """Return columns of a table in any form: a file, a data frame, columns by name or rows as dictionaries.

    Raises
    ------
    InputError
        If one is missing.
    """
    table = any_table(source, what)
    _check_there(table, names, what)
    return {name: _feature(table, name) for name in names}


def read_texts(source: Any, name: str, what: str) -> np.ndarray:
    """Return the texts of a table in any form; without a name, the column named like texts or the only one of words.

    Raises
    ------
    InputError
        If there is not one such column, or it holds something else.
    """
    table = any_table(source, what)
    if not name:
        words = [field.name for field in table.rows.schema if _is_words(field.type)]
        found = [known for known in TEXTS if known in words][:1] or words
        if len(found) != 1:
            raise InputError(
                f"{what[0].upper()}{what[1:]} has {len(found)} columns of words, so it is not plain which are the "
                "texts: call it 'text'."
            )
        name = found[0]
    _check_there(table, [name], what)
    column = table.rows[name]
    if not _is_words(column.type) and column.null_count < len(column):
        raise InputError(f"Column '{name}' of {what} holds no texts ({column.type}): give texts.")
    return _texts(table, name)


def _check_there(table: Table, names: Sequence[str], what: str) -> None:
    missing = [name for name in names if name not in table.rows.column_names]
    if missing:
        raise InputError(f"{what[0].upper()}{what[1:]} has no column '{missing[0]}', which the network needs.")


def _texts(table: Table, name: str) -> np.ndarray:
    return np.array(["" if text is None else text for text in table.rows[name].to_pylist()], dtype=object)


def same_features(features: Sequence[str], first: Sequence[str], what: str) -> None:
    """Refuse a part whose features are others than those of the first part, or in another order.

    Raises
    ------
    InputError
        With both lists.
    """
    if features and first and tuple(features) != tuple(first):
        raise InputError(
            f"{what[0].upper()}{what[1:]} has the features {', '.join(features)}, but expected are "
            f"{', '.join(first)}, in this order: load it with inputs={list(first)}."
        )


def _find_inputs(
    table: Table, targets: Sequence[str], columns: Sequence[str], kind: str | None
) -> tuple[list[str], list[str]]:
    """Return the input columns, and identifiers that were left out."""
    fields = [field for field in table.rows.schema if field.name not in (*targets, *columns)]
    whole = [field.name for field in fields if _is_encoded(field.type) or _is_list(field.type)]
    if whole:
        preferred = [name for name in (*IMAGES, *TOKENS) if name in whole]
        if len(whole) > 1 and not preferred:
            raise InputError(f"{table.what} has several input columns ({', '.join(whole)}): pass inputs='...' for one.")
        return [(preferred or whole)[0]], []
    texts = [field.name for field in fields if _is_words(field.type)]
    left_out = [field.name for field in fields if _is_identifier(table, field.name)]
    usable = [field.name for field in fields if field.name not in left_out]
    named = [name for name in TEXTS if name in texts]
    if kind == "text" or named or (len(usable) == 1 and usable[0] in texts):
        found = named or [name for name in usable if name in texts]
        if len(found) != 1:
            raise InputError(
                f"{table.what} has {len(found)} columns of texts: name the one that counts (inputs='...')."
            )
        return found, []
    if not usable:
        raise InputError(
            f"{table.what} has no image or feature columns besides '{', '.join(targets)}'; its columns are "
            f"{', '.join(table.rows.column_names)}: pass inputs='...'."
        )
    return usable, left_out


def _is_identifier(table: Table, name: str) -> bool:
    import pyarrow.types as types  # type: ignore[import-untyped]

    kind = table.rows.schema.field(name).type
    if not (types.is_integer(kind) or _is_words(kind)) or name in table.class_names:
        return False
    different = len(table.rows[name].unique()) == table.rows.num_rows
    if IDENTIFIER.fullmatch(name):  # a patient may have several rows
        return bool(types.is_integer(kind)) or 2 * len(table.rows[name].unique()) > table.rows.num_rows
    return bool(KEY.fullmatch(name)) and different


def _features(
    table: Table, names: list[str], resize: tuple[int, int] | None, kind: str | None, notes: list[str]
) -> tuple[Tensor | Raw, bool]:
    """Return the inputs, and whether they are one column: images, lists, texts or tokens."""
    if len(names) == 1:
        name, arrow = names[0], table.rows.schema.field(names[0]).type
        if _is_encoded(arrow):
            return decode_images(_blobs(table, name), table.what, resize, notes), True
        if _is_list(arrow):
            return _lists(table, name, kind), True
        if _is_words(arrow) and (kind == "text" or name in TEXTS or (kind is None and _reads_like_text(table, name))):
            return Raw({name: _texts(table, name)}, "text"), True
    if kind in ("text", "tokens", "image", "signal"):
        raise InputError(f"{table.what} has {len(names)} columns of features, which are no {kind}: pass inputs='...'.")
    return Raw({name: _feature(table, name) for name in names}), False


def _reads_like_text(table: Table, name: str) -> bool:
    """Tell whether the words of the only input column are texts: more than one word, or another in most rows."""
    texts = [text for text in table.rows[name].to_pylist() if text]
    return 2 * len(set(texts)) > len(texts) or sum(" " in text for text in texts) * 2 > len(texts)


def _lists(table: Table, name: str, kind: str | None) -> Tensor | Raw:
    rows = table.rows[name].to_pylist()
    what = f"Column '{name}' of {table.what}"
    flat = all(isinstance(value, int) for row in rows[:100] for value in (row or ()))
    if kind == "tokens" or (kind is None and flat and (name in TOKENS or len({len(row or ()) for row in rows}) > 1)):
        ids = np.empty(len(rows), dtype=object)
        ids[:] = [list(row or ()) for row in rows]
        return Raw({name: ids}, "tokens")
    try:
        return as_inputs(np.array(rows), what, kind)
    except ValueError as error:
        raise InputError(f"{what} has rows of different lengths.") from error


def _feature(table: Table, name: str) -> np.ndarray:
    """Return a column of a table as numbers (NaN where there is none), yes and no, or words (None where there is none).

    Raises
    ------
    InputError
        For a column of dates, or of something else that is not a feature.
    """
    import pyarrow.types as types

    column = table.rows[name]
    kind = column.type
    if types.is_temporal(kind) or _are_dates(table, name):
        raise InputError(
            f"Column '{name}' of {table.what} holds dates or times, which are not features as they are: leave it out "
            f"(drop=['{name}']), or make a number of it (days since the first one, the month)."
        )
    if types.is_boolean(kind) and not column.null_count:
        return np.array(column.to_numpy())
    if name not in table.class_names and (
        types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_null(kind)
    ):
        return np.array(column.cast("float64", safe=False).to_numpy(), dtype=np.float64)
    if types.is_boolean(kind) or _is_words(kind) or name in table.class_names:
        words = _scalars(table, name).tolist() if name in table.class_names else column.to_pylist()
        return np.array([None if word is None or not str(word).strip() else str(word) for word in words], dtype=object)
    raise InputError(
        f"Column '{name}' of {table.what} is of type {kind}, which is no feature: leave it out (drop=['{name}'])."
    )


def _are_dates(table: Table, name: str) -> bool:
    """Tell whether all words of a column are dates, which a file or a frame may hold as texts."""
    if not _is_words(table.rows.schema.field(name).type):
        return False
    words = [str(word).strip() for word in table.rows[name].unique().to_pylist() if word is not None]
    found = [word for word in words if word]
    return bool(found) and all(DATE.fullmatch(word) for word in found)


def _blobs(table: Table, name: str) -> list[bytes | Path]:
    import pyarrow.types as types

    blobs: list[bytes | Path] = []
    for chunk in table.rows[name].chunks:
        if not types.is_struct(chunk.type):
            blobs.extend(chunk.to_pylist())
            continue
        encoded = chunk.field("bytes").to_pylist()
        if chunk.type.get_field_index("path") >= 0:  # images of a local set may be named instead of contained
            paths = chunk.field("path").to_pylist()
            encoded = [Path(path) if blob is None and path else blob for blob, path in zip(encoded, paths, strict=True)]
        blobs.extend(encoded)
    for row, blob in enumerate(blobs):
        if blob is None or (isinstance(blob, Path) and not blob.is_file()):
            raise InputError(f"Row {row} of {table.what} has no image in column '{name}': remove the row.")
    return blobs


def _scalars(table: Table, name: str) -> np.ndarray:
    """Return a column as numbers or strings; class numbers become their names, a missing value NaN or ''."""
    import pyarrow.types as types

    column = table.rows[name]
    names = table.class_names.get(name)
    if names is not None:
        return np.array(["" if value is None or value < 0 else names[value] for value in column.to_pylist()])
    kind = column.type
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        wide = "int64" if types.is_integer(kind) and column.null_count == 0 else "float64"
        return np.array(column.to_numpy() if types.is_boolean(kind) else column.cast(wide, safe=False).to_numpy())
    return np.array(["" if value is None else str(value) for value in column.to_pylist()], dtype=str)


def _is_encoded(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_struct(kind):
        return bool(kind.get_field_index("bytes") >= 0)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    kind = getattr(kind, "storage_type", kind)  # Array2D and its like are lists underneath
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_words(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        return _is_words(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_scalar(field: Any) -> bool:
    import pyarrow.types as types

    numbers = (types.is_integer, types.is_floating, types.is_boolean)
    texts = (types.is_string, types.is_large_string, types.is_dictionary)
    return any(test(field.type) for test in (*numbers, *texts))
