"""Tables in other forms: data frames, Markdown and LaTeX."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from polyfed.report.cells import MINUS, NOTHING, TIMES, Cell, Column, Table

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]


def heading(column: Column) -> str:
    """Return a heading that is clear without the one above it."""
    return f"{column.title}, {column.group}" if column.group else column.title


def to_frame(table: Table) -> pandas.DataFrame:
    """Return a data frame of numbers; half widths of intervals are columns of their own."""
    import pandas

    columns: dict[str, list[float | str | None]] = {}
    for place, column in enumerate(table.columns):
        columns[heading(column)] = [row[place].value for row in table.rows]
        halves = [row[place].half_value for row in table.rows]
        if any(half is not None for half in halves):
            columns[f"{heading(column)} ±"] = list(halves)
    return pandas.DataFrame(columns)


def to_markdown(table: Table) -> str:
    """Return the table as Markdown."""

    def clean(text: str) -> str:
        return text.replace("|", "\\|")

    lines = [
        "| " + " | ".join(clean(heading(column)) for column in table.columns) + " |",
        "|" + "|".join("---:" if column.number else "---" for column in table.columns) + "|",
    ]
    lines += ["| " + " | ".join(clean(_plain(cell)) for cell in row) + " |" for row in table.rows]
    return "\n".join(lines) + "\n"


def to_latex(table: Table) -> str:
    """Return the table as LaTeX (package booktabs); what is clearly the best of a column is bold, as on the page."""
    import pandas

    cells = pandas.DataFrame(
        [[_plain(cell) for cell in row] for row in table.rows], columns=[heading(column) for column in table.columns]
    )
    bold = pandas.DataFrame("", cells.index, cells.columns)
    for row, column in product(range(len(table.rows)), range(len(table.columns))):
        if table.is_best(row, column):
            bold.iloc[row, column] = "textbf: --rwrap"
    shown = cells.style.hide(axis="index").apply(lambda _: bold, axis=None)
    shown = shown.format(_with_symbols, escape="latex").format_index(_with_symbols, axis=1, escape="latex")
    form = "".join("r" if column.number else "l" for column in table.columns)
    return str(shown.to_latex(column_format=form, hrules=True))


def _plain(cell: Cell) -> str:
    return f"{cell.text} ± {cell.half}" if cell.half else cell.text


def _with_symbols(text: str) -> str:
    """Write signs of escaped text that LaTeX has commands for."""
    return "".join(SYMBOLS.get(sign, sign) for sign in text)


SYMBOLS = {NOTHING: "--", MINUS: "$-$", TIMES: r"$\times$", "±": r"$\pm$", ">": "$>$", "<": "$<$"}
