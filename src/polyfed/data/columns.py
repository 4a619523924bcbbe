"""Which columns of a table are inputs and labels, and what they become: arrays, images, texts, further columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.task import CLASSIFICATION, Task
from polyfed.data.cells import (
    TOKENS,
    images_of,
    is_encoded,
    is_list,
    is_scalar,
    is_words,
    lists_of,
    names_pictures,
    scalars_of,
    texts_of,
    values_of,
)
from polyfed.data.decode import decode_images
from polyfed.data.form import FEW_ROWS, Form, Raw
from polyfed.data.labels import find_label, label_columns, read_labels
from polyfed.data.tables import Table

IMAGES = ("image", "img", "x", "pixels", "features", "signal")
TEXTS = ("text", "sentence", "content", "body", "message", "review")
# Names that only an identifier has; and names that one often has, where no two rows have the same value.
WHO = "patient|subject|person|case|record|sample|row|visit|user|customer"
IDENTIFIER = re.compile(
    r"(?:.*[_ .-])?(?:id|Id|ID)|.*[a-z](?:Id|ID)|(?i:uuid|guid|unnamed: ?\d+|__index_level_\d+__)"
    + f"|(?i:{WHO})(?i:id)"
)
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

    A column of images (or of names of their files) or of lists is the input; then a column of texts, where it is named
    like one or is all there is. Otherwise every column but the label, `columns`, `drop` and identifiers is a feature:
    numbers, yes and no, or words. An identifier has a name like one and another value in every row; named in `inputs`
    it is a feature, too.

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
    if not named and not whole:
        said += [
            f"column '{name}' is a feature, but its whole numbers differ in every row, as those of an identifier do: "
            f"leave it out if it is one (drop=['{name}'], --drop-columns {name})"
            for name in x_columns
            if _counts_rows(table, name)
        ]
    labels = read_labels(table, targets)
    others = {
        name: scalars_of(table, name)
        for name in present
        if name not in (*targets, *x_columns) and (name in columns or is_scalar(table.rows.schema.field(name)))
    }
    return Part(
        x,
        labels,
        table.class_names.get(targets[0]) if len(targets) == 1 else None,
        others,
        features=() if whole else tuple(x_columns),
        notes=(
            *table.notes,
            *(f"column '{name}' is an identifier, not a feature (inputs=[...] would keep it)" for name in left_out),
            *said,
        ),
        targets=tuple(targets),
    )


def kind_of(part: Part, given: str | None = None) -> str | None:
    """Return what further parts hold, once the first one has been read: a few rows of words do not tell it."""
    return part.inputs.kind if isinstance(part.inputs, Raw) else given


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
    whole = [field.name for field in fields if is_encoded(field.type) or is_list(field.type)]
    if not whole and kind in (None, "image"):
        whole = [field.name for field in fields if names_pictures(table, field.name)]
    if whole:
        preferred = [name for name in (*IMAGES, *TOKENS) if name in whole]
        if len(whole) > 1 and not preferred:
            raise InputError(f"{table.what} has several input columns ({', '.join(whole)}): pass inputs='...' for one.")
        return [(preferred or whole)[0]], []
    texts = [field.name for field in fields if is_words(field.type)]
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
    if not (types.is_integer(kind) or is_words(kind)) or name in table.class_names:
        return False
    different = len(table.rows[name].unique()) == table.rows.num_rows
    if IDENTIFIER.fullmatch(name):  # a patient may have several rows
        return bool(types.is_integer(kind)) or 2 * len(table.rows[name].unique()) > table.rows.num_rows
    return bool(KEY.fullmatch(name)) and different


def _counts_rows(table: Table, name: str) -> bool:
    """Tell whether a column looks like an identifier by its values alone: whole numbers, another one in every row."""
    import pyarrow.types as types

    rows = table.rows.num_rows
    whole = types.is_integer(table.rows.schema.field(name).type)
    return bool(whole) and rows >= FEW_ROWS and len(table.rows[name].unique()) == rows


def _features(
    table: Table, names: list[str], resize: tuple[int, int] | None, kind: str | None, notes: list[str]
) -> tuple[Tensor | Raw, bool]:
    """Return the inputs, and whether they are one column: images, lists, texts or tokens."""
    if len(names) == 1:
        name, arrow = names[0], table.rows.schema.field(names[0]).type
        if is_encoded(arrow) or (kind in (None, "image") and names_pictures(table, name)):
            return decode_images(images_of(table, name), table.what, resize, notes), True
        if is_list(arrow):
            return lists_of(table, name, kind), True
        if is_words(arrow) and (kind == "text" or name in TEXTS or (kind is None and _reads_like_text(table, name))):
            return Raw({name: texts_of(table, name)}, "text"), True
    if kind in ("text", "tokens", "image", "signal"):
        raise InputError(f"{table.what} has {len(names)} columns of features, which are no {kind}: pass inputs='...'.")
    return Raw({name: values_of(table, name) for name in names}), False


def _reads_like_text(table: Table, name: str) -> bool:
    """Tell whether the words of the only input column are texts: more than one word, or another in most rows."""
    texts = [text for text in table.rows[name].to_pylist() if text]
    return 2 * len(set(texts)) > len(texts) or sum(" " in text for text in texts) * 2 > len(texts)
