"""Arrow tables (parquet files, Hub data sets) become inputs, labels and further columns."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.data.decode import as_inputs, decode_images
from polyfed.data.labels import label_array

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]

LABELS = ("label", "labels", "fine_label", "target", "class", "y")
IMAGES = ("image", "img", "x", "pixels", "features")
# Names that only an identifier has; and names that one often has, where no two rows have the same value.
WHO = "patient|subject|person|case|record|sample|row|visit|user|customer"
IDENTIFIER = re.compile(
    r"(?:.*[_ .-])?(?:id|Id|ID)|.*[a-z](?:Id|ID)|(?i:uuid|guid|unnamed: ?\d+|__index_level_\d+__)"
    + f"|(?i:{WHO})(?i:id)"
)
KEY = re.compile(f"(?i:index|key|(?:{WHO})(?:[_ .-]?(?:number|no|nr|key))?)")


@dataclass(frozen=True)
class Table:
    """One split: the rows, the class names of its label columns, and a name for messages."""

    rows: pyarrow.Table
    class_names: dict[str, tuple[str, ...]]
    what: str


@dataclass(frozen=True)
class Part:
    """What one split gives: inputs, labels (numbers or strings), class names if known, further columns.

    `divisor` is known where the inputs were scaled before (digits go from 0 to 16), `features` are the names of the
    columns of a feature table, and `notes` say what was left out.
    """

    inputs: Tensor
    labels: np.ndarray
    class_names: tuple[str, ...] | None
    columns: dict[str, np.ndarray]
    divisor: float | None = None
    features: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_parquet(files: Sequence[Path]) -> Table:
    """Read one split from its parquet files.

    Raises
    ------
    InputError
        If a file is missing, truncated or not parquet; the file is named.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    pieces = []
    for file in files:
        try:
            pieces.append(pq.read_table(file, partitioning=None))
        except (OSError, pa.ArrowException) as error:
            if file.suffix != ".parquet":
                raise InputError(
                    f"{file} is not a parquet file: convert it (for instance with pandas: read_csv, to_parquet)."
                ) from error
            reason = str(error).splitlines()[0].rstrip(".")
            raise InputError(
                f"{file} cannot be read as a parquet file ({reason}): it may be truncated; copy or download it again."
            ) from error
    try:
        rows = pa.concat_tables(pieces)
    except pa.ArrowException as error:
        raise InputError(f"{files[0]} and the other pieces of its split have different columns.") from error
    return Table(rows, _names_from_metadata(pieces[0].schema.metadata), str(files[0]))


def table_of(dataset: Any, what: str) -> Table:
    """Take the rows out of a `datasets.Dataset`, without decoding images one by one."""
    names = {
        column: tuple(feature.names)
        for column, feature in dataset.features.items()
        if type(feature).__name__ == "ClassLabel" and feature.names
    }
    return Table(dataset.with_format("arrow")[:], names, what)


def convert(
    table: Table,
    *,
    inputs: str | Sequence[str] | None = None,
    label: str | None = None,
    columns: Sequence[str] = (),
    resize: tuple[int, int] | None = None,
) -> Part:
    """Find the input and label columns of a table and turn them into arrays.

    Without an image or list column, all number columns but the label, `columns` and identifiers are the features. An
    identifier has a name like one and another whole number in every row; named in `inputs` it is a feature, too.

    Raises
    ------
    InputError
        If a column is missing (with the columns there are), empty, or of a type that cannot be used.
    """
    present = table.rows.column_names
    named = [inputs] if isinstance(inputs, str) else list(inputs or ())
    for name in (*named, label, *columns):
        if name is not None and name not in present:
            raise InputError(f"{table.what} has no column '{name}': its columns are {', '.join(present)}.")
    label = label or _find_label(table)
    x_columns, left_out = (named, []) if named else _find_inputs(table, label, columns)
    x = _features(table, x_columns, resize)
    labels = _labels(table, label)
    others = {
        name: _scalars(table, name)
        for name in present
        if name != label and name not in x_columns and (name in columns or _is_scalar(table.rows.schema.field(name)))
    }
    whole = _is_encoded(table.rows.schema.field(x_columns[0]).type) or _is_list(
        table.rows.schema.field(x_columns[0]).type
    )
    return Part(
        x,
        labels,
        table.class_names.get(label),
        others,
        features=() if whole else tuple(x_columns),
        notes=tuple(
            f"column '{name}' is an identifier, not a feature (inputs=[...] would keep it)" for name in left_out
        ),
    )


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


def _names_from_metadata(metadata: dict[bytes, bytes] | None) -> dict[str, tuple[str, ...]]:
    """Read the class names that `datasets` writes into the metadata of a parquet file."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return {
            column: tuple(feature["names"])
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
        }
    except (KeyError, TypeError, ValueError):
        return {}


def _find_label(table: Table) -> str:
    present = table.rows.column_names
    for name in LABELS:
        if name in present:
            return name
    if len(table.class_names) == 1:
        return next(iter(table.class_names))
    raise InputError(
        f"{table.what} has no column that looks like a label; its columns are {', '.join(present)}: "
        "pass label='...' with the right one."
    )


def _find_inputs(table: Table, label: str, columns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the input columns, and identifiers that were left out."""
    import pyarrow.types as types  # type: ignore[import-untyped]

    fields = [field for field in table.rows.schema if field.name != label and field.name not in columns]
    whole = [field.name for field in fields if _is_encoded(field.type) or _is_list(field.type)]
    if whole:
        preferred = [name for name in IMAGES if name in whole]
        if len(whole) > 1 and not preferred:
            raise InputError(f"{table.what} has several input columns ({', '.join(whole)}): pass inputs='...' for one.")
        return [(preferred or whole)[0]], []
    numbers = [
        field.name
        for field in fields
        if (types.is_integer(field.type) or types.is_floating(field.type)) and field.name not in table.class_names
    ]
    left_out = [name for name in numbers if _is_identifier(table, name)]
    numbers = [name for name in numbers if name not in left_out]
    if not numbers:
        raise InputError(
            f"{table.what} has no image or number columns besides '{label}'; its columns are "
            f"{', '.join(table.rows.column_names)}: pass inputs='...'."
        )
    return numbers, left_out


def _is_identifier(table: Table, name: str) -> bool:
    import pyarrow.types as types

    if not types.is_integer(table.rows.schema.field(name).type):
        return False
    if IDENTIFIER.fullmatch(name):  # a patient may have several rows
        return True
    return bool(KEY.fullmatch(name)) and len(table.rows[name].unique()) == table.rows.num_rows


def _features(table: Table, names: list[str], resize: tuple[int, int] | None) -> Tensor:
    field = table.rows.schema.field(names[0])
    if len(names) == 1 and _is_encoded(field.type):
        return decode_images(_blobs(table, names[0]), table.what, resize)
    if len(names) == 1 and _is_list(field.type):
        try:
            return as_inputs(np.array(table.rows[names[0]].to_pylist()), f"Column '{names[0]}' of {table.what}")
        except ValueError as error:
            raise InputError(f"Column '{names[0]}' of {table.what} has rows of different lengths.") from error
    scalars = {name: _scalars(table, name) for name in names}
    for name, values in scalars.items():
        missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), dtype=bool)
        if missing.any():
            raise InputError(
                f"Column '{name}' of {table.what} has no number in {int(missing.sum())} rows, the first is row "
                f"{int(missing.argmax())}: fill them in, remove the rows, or leave the column out (columns=['{name}'])."
            )
    return as_inputs(np.stack(list(scalars.values()), axis=1), table.what)


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


def _labels(table: Table, name: str) -> np.ndarray:
    column = table.rows[name]
    if column.null_count:
        row = column.to_pylist().index(None)
        raise InputError(f"Row {row} of {table.what} has no label in column '{name}': remove the row.")
    return label_array(column.to_pylist(), table.what)


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


def _is_scalar(field: Any) -> bool:
    import pyarrow.types as types

    numbers = (types.is_integer, types.is_floating, types.is_boolean)
    texts = (types.is_string, types.is_large_string, types.is_dictionary)
    return any(test(field.type) for test in (*numbers, *texts))
