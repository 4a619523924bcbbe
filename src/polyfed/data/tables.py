"""Tables in any form (parquet and CSV files, data frames, Hub data sets) become one: arrow's."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import InputError, first_line

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]

TABLES = (".csv", ".tsv")
NOTHING = ["", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "?"]  # how a CSV file says that there is no value


@dataclass(frozen=True)
class Table:
    """One split: the rows, the class names of its label columns, a name for messages, and where it lies."""

    rows: pyarrow.Table
    class_names: dict[str, tuple[str, ...]]
    what: str
    folder: Path = Path()
    notes: tuple[str, ...] = ()  # what was done to the file that a reader should know


def read_table(files: Sequence[Path]) -> Table:
    """Read one split from its parquet or CSV files.

    Raises
    ------
    InputError
        If a file is missing, truncated or not of its kind; the file is named.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    pieces: list[Any] = []
    notes: list[str] = []
    for file in files:
        if not file.exists():
            raise InputError(f"There is no file {file}: correct its name.")
        try:
            if file.suffix.lower() in TABLES:
                pieces.append(_read_csv(file, notes))
                continue
            pieces.append(pq.read_table(file, partitioning=None))
        except (OSError, pa.ArrowException, UnicodeError) as error:
            reason = first_line(error)
            if file.suffix.lower() in TABLES:
                raise InputError(f"{file} cannot be read as a CSV file ({reason}): correct that row.") from error
            if file.suffix != ".parquet":
                raise InputError(
                    f"{file} is neither a parquet nor a CSV file: convert it (for instance with pandas)."
                ) from error
            raise InputError(
                f"{file} cannot be read as a parquet file ({reason}): it may be truncated; copy or download it again."
            ) from error
    try:
        rows = pa.concat_tables(pieces)
    except pa.ArrowException as error:
        raise InputError(f"{files[0]} and the other pieces of its split have different columns.") from error
    return Table(rows, _names_from_metadata(pieces[0].schema.metadata), str(files[0]), files[0].parent, tuple(notes))


def _read_csv(file: Path, notes: list[str]) -> pyarrow.Table:
    """Read a CSV file; its first line, the names, tells whether commas, semicolons or tabs part the columns.

    Spreadsheets write other letters than UTF-8 and, beside semicolons, commas in numbers: both are read, and said.
    """
    import pyarrow.csv as csv  # type: ignore[import-untyped]

    letters = _letters_of(file)
    with open(file, encoding=letters) as content:
        header = content.readline().strip()
    if not header:
        raise InputError(f"{file} is empty: a CSV file begins with a line of column names.")
    if letters != "utf-8-sig":
        notes.append(f"{file.name} is not written in UTF-8 and was read as {letters}")
    mark = max((",", ";", "\t"), key=header.count)
    names = [name.strip().strip('"') for name in header.split(mark)]
    numbers = all(re.fullmatch(r"[-+]?\d+(?:[.,]\d+)?", name) for name in names)
    if numbers and names != [str(place) for place in range(len(names))]:  # pandas calls columns 0, 1, 2
        told = f"The first line of {file} holds numbers ({header[:60]})"
        raise InputError(f"{told}: a CSV file begins with a line of column names.")

    def read(point: str) -> pyarrow.Table:
        return csv.read_csv(
            file,
            read_options=csv.ReadOptions(encoding=letters.removesuffix("-sig")),
            parse_options=csv.ParseOptions(delimiter=mark, newlines_in_values=True),
            convert_options=csv.ConvertOptions(strings_can_be_null=True, null_values=NOTHING, decimal_point=point),
        )

    table = read(".")
    double = [name for name in table.column_names if table.column_names.count(name) > 1]
    if double:
        raise InputError(f"{file} has {double.count(double[0])} columns '{double[0]}': rename or remove them.")
    return table if mark == "," else _with_commas(table, read(","), file, notes)


def _letters_of(file: Path) -> str:
    """Return how a file of text is encoded: a mark at its start says it, or what its bytes can be."""
    with open(file, "rb") as content:
        if content.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return "utf-16"
        content.seek(0)
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            while block := content.read(1 << 20):
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return "cp1252"
    return "utf-8-sig"


def _with_commas(table: pyarrow.Table, other: pyarrow.Table, file: Path, notes: list[str]) -> pyarrow.Table:
    """Take columns that are numbers where a comma is the decimal point, and words otherwise."""
    import pyarrow.types as types  # type: ignore[import-untyped]

    found = []
    for place, name in enumerate(table.column_names):
        if types.is_string(table.schema.types[place]) and types.is_floating(other.schema.types[place]):
            table = table.set_column(place, other.schema.field(place), other.column(place))
            found.append(name)
    if found:
        notes.append(f"numbers of {file.name} are written with a comma: {', '.join(found)}")
    return table


def table_of_frame(frame: Any, what: str) -> Table:
    """Take the rows of a data frame (pandas, polars) or an Arrow table.

    Raises
    ------
    InputError
        If a column mixes kinds.
    """
    import pyarrow as pa

    if isinstance(frame, pa.Table):
        return Table(frame, {}, what)
    if hasattr(frame, "to_arrow"):
        return Table(frame.to_arrow(), {}, what)
    frame = frame.rename(columns=str)
    pieces = {}
    for name in frame.columns:
        if not frame.columns.is_unique:
            raise InputError(f"The column names of {what} are not all different: rename them.")
        try:
            pieces[name] = pa.array(frame[name], from_pandas=True)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise InputError(
                f"Column '{name}' of {what} mixes kinds of values (numbers and words): give one kind, or leave it out "
                f"(drop=['{name}'])."
            ) from error
    return Table(pa.table(pieces), {}, what)


def any_table(source: Any, what: str) -> Table:
    """Take the rows of a file, a data frame, columns by name or rows as dictionaries.

    Raises
    ------
    InputError
        If it is none of these.
    """
    import pandas  # type: ignore[import-untyped]

    if isinstance(source, str | os.PathLike):
        return read_table([Path(source)])
    if hasattr(source, "features") and hasattr(source, "with_format"):
        return table_of(source, what)
    if isinstance(source, Mapping | list | tuple):
        try:
            source = pandas.DataFrame(source)
        except ValueError as error:
            raise InputError(f"{what[0].upper()}{what[1:]} is no table ({error}): give a list of rows.") from error
    if not is_frame(source):
        raise InputError(
            f"{what[0].upper()}{what[1:]} is of type {type(source).__name__}: give a file, a data frame, columns by "
            "name or rows as dictionaries."
        )
    return table_of_frame(source, what)


def is_frame(source: Any) -> bool:
    """Tell a data frame, an Arrow table or a Hugging Face data set by what it can do."""
    return any(hasattr(source, name) for name in ("to_parquet", "write_parquet", "column_names"))


def table_of(dataset: Any, what: str) -> Table:
    """Take the rows out of a `datasets.Dataset`, without decoding images one by one."""
    names = {
        column: tuple(feature.names)
        for column, feature in dataset.features.items()
        if type(feature).__name__ == "ClassLabel" and feature.names
    }
    return Table(dataset.with_format("arrow")[:], names, what)


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
