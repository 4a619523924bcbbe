"""The tables of the report, once for the page, Markdown, LaTeX and pandas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from polyfed.core.errors import unknown
from polyfed.ops.estimate import Estimate
from polyfed.report import charts, statistics
from polyfed.report.runs import Study
from polyfed.terminal.tables import amount

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

NOTHING = "\u2013"  # a dash
MINUS = "\u2212"  # as wide as a plus sign
TIMES = "\u00d7"


@dataclass(frozen=True)
class Column:
    """A heading, what it means, and whether its cells are numbers (aligned right)."""

    title: str
    help: str = ""
    number: bool = True
    group: str = ""  # a heading over several columns


@dataclass(frozen=True)
class Cell:
    """A value for machines and as people read it; `half` is what follows the ± sign."""

    text: str
    value: float | str | None = None
    half: str = ""
    half_value: float | None = None


@dataclass(frozen=True)
class Table:
    """Columns and rows."""

    name: str
    title: str
    columns: list[Column]
    rows: list[list[Cell]]
    best: frozenset[tuple[int, str]] = frozenset()  # (row, heading) of the cells that are clearly the best

    def groups(self) -> list[tuple[str, int]]:
        """Return the headings over several columns with their widths (empty: there are none)."""
        runs = [(group, len(list(columns))) for group, columns in groupby(column.group for column in self.columns)]
        return runs if any(group for group, _ in runs) else []

    def is_best(self, row: int, column: int) -> bool:
        """Whether the seeds show that a cell is the best of its column: it is printed bold."""
        return (row, self.columns[column].title) in self.best


def share(value: Estimate | None, signed: bool = False) -> Cell:
    """Return a cell of an accuracy or a difference, in percent, with its interval."""
    if value is None:
        return Cell(NOTHING)
    text = f"{100 * value.mean:+.1f}".replace("-", MINUS) if signed else f"{100 * value.mean:.1f}"
    if value.half is None:
        return Cell(text, 100 * value.mean)
    return Cell(text, 100 * value.mean, f"{100 * value.half:.1f}", 100 * value.half)


def size(value: float | None) -> Cell:
    """Return a cell of bytes."""
    return Cell(NOTHING) if value is None else Cell(amount(value), value)


def number(value: float | None, form: str, unit: str = "") -> Cell:
    """Return a cell of a plain number."""
    return Cell(NOTHING) if value is None else Cell(f"{value:{form}}{unit}".replace("-", MINUS), value)


MEASURES: dict[str, statistics.Measure] = {  # columns of the leaderboard in which a method can be ahead
    "accuracy %": statistics.mean_accuracy,
    "took part %": statistics.of_those_who_took_part,
    "worst client %": statistics.worst_client,
    "worst decile %": statistics.of_worst_decile,
    "global %": statistics.global_model,
    "vs. local": statistics.mean_accuracy,  # the difference of two gains is that of the accuracies
}


def leaderboard(study: Study) -> Table:
    """Who is how good at which cost."""
    rows = statistics.leaderboard(study)
    columns = [
        Column("method", number=False),
        Column("accuracy %", "mean over clients; mean and 95 % interval over seeds"),
        Column("took part %", "mean over the clients that took part in a round"),
        Column("worst client %", "the lowest accuracy of any client"),
        Column("worst decile %", "mean of the worst tenth of the clients"),
        Column("global %", "the server's own model, where the method makes one"),
        Column("vs. local", "points above training alone, paired by seed"),
        Column("vs. centralized", "points above all data in one place, paired by seed"),
        Column("sent", "payload sent by a client in all, by the papers' formulas"),
        Column("received", "payload received by a client in all, by the papers' formulas"),
        Column("on the wire", "sent and received by a client in all, as serialised: payload and framing"),
        Column("peak memory", "of the process that simulated all clients"),
        Column("time", "wall-clock seconds in all, with measuring"),
    ]
    cells = [
        [
            Cell(row.method, row.method),
            share(row.accuracy),
            share(row.took_part),
            share(row.worst),
            share(row.decile),
            share(row.shared),
            share(row.gain, signed=True),
            share(row.gap, signed=True),
            size(row.up),
            size(row.down),
            size(row.wire),
            size(row.memory),
            number(row.seconds, ".1f", " s"),
        ]
        for row in rows
    ]
    winners = {heading: statistics.winner(study, measure) for heading, measure in MEASURES.items()}
    best = {(place, title) for place, row in enumerate(rows) for title, label in winners.items() if label == row.method}
    return _without_empty(Table("leaderboard", "Leaderboard", columns, cells, frozenset(best)))


def targets(study: Study, wanted: Sequence[float] | None = None) -> Table:
    """When each method first reached a target accuracy."""
    columns = [Column("method", number=False)]
    rows = [[Cell(label, label)] for label in study.labels]
    against = statistics.baseline(study)
    for target in wanted or statistics.targets(study):
        group = f"{100 * target:g} % accuracy"
        columns += [
            Column("rounds", "first measured round at or above the target, mean over seeds", group=group),
            Column("speed", f"rounds of {against} divided by rounds of the method", group=group),
            Column("bytes", "payload sent and received by a client until then", group=group),
        ]
        for row, found in zip(rows, statistics.rounds_to(study, target), strict=True):
            some = found.reached < found.seeds and found.reached
            rounds = number(found.rounds, ".1f" if found.rounds and found.rounds % 1 else ".0f")
            if some:
                rounds = Cell(f"{rounds.text} ({found.reached} of {found.seeds} seeds)", rounds.value)
            row += [rounds, number(found.speed, ".1f", TIMES), size(found.bytes)]
    return Table("targets", "Rounds to a target accuracy", columns, rows)


def fairness(study: Study) -> Table:
    """How evenly each method serves its clients."""
    columns = [
        Column("method", number=False),
        Column("worst network", "the architecture with the lowest mean accuracy", number=False),
        Column("its accuracy %"),
        Column("best to worst", "points between the best and the worst architecture"),
        Column("Jain index", "of the clients' accuracies: 1 when all are equal"),
        Column("clients that lost", "share of clients (over all seeds) below their own accuracy alone"),
        Column("largest loss", "points that the worst-off client lost (or the least it gained)"),
    ]
    rows = []
    for label in study.labels:
        found = statistics.fairness(study, label)
        rows.append(
            [
                Cell(label, label),
                Cell(found.worst_tier, found.worst_tier),
                number(100 * found.worst_tier_accuracy, ".1f"),
                number(100 * found.spread, ".1f"),
                number(found.jain, ".3f"),
                number(None if found.lost is None else 100 * found.lost, ".0f", " %"),
                number(None if found.worst_loss is None else 100 * found.worst_loss, "+.1f"),
            ]
        )
    return _without_empty(Table("fairness", "Fairness", columns, rows))


def wire(study: Study) -> Table:
    """Bytes by phase, direction and kind."""
    columns = [
        Column("method", number=False),
        Column("phase", number=False),
        Column("direction", number=False),
        Column("what", number=False),
        Column("bytes a client", "mean over clients and seeds, all rounds"),
        Column("share", "of all bytes of the method on the wire"),
    ]
    rows = []
    for label in study.labels:
        lines = statistics.wire(study, label)
        total = sum(line[3] for line in lines)
        for step, direction, kind, bytes_ in sorted(lines, key=lambda line: -line[3]):
            name = charts.kind_name(kind)
            where = "sent" if direction == "up" else "received"
            words = [Cell(word, word) for word in (label, step, where, name)]
            rows.append([*words, size(bytes_), number(100 * bytes_ / total if total else None, ".1f", " %")])
    return Table("wire", "What crossed the wire", columns, rows)


def _without_empty(table: Table) -> Table:
    """Leave out columns in which no row has anything."""
    kept = [c for c in range(len(table.columns)) if any(row[c].value is not None for row in table.rows)]
    return Table(
        table.name,
        table.title,
        [table.columns[c] for c in kept],
        [[row[c] for c in kept] for row in table.rows],
        table.best,
    )


TABLES: dict[str, Callable[[Study], Table]] = {
    "leaderboard": leaderboard,
    "targets": targets,
    "fairness": fairness,
    "wire": wire,
}


def make(study: Study, name: str) -> Table:
    """Return a table by name."""
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    return TABLES[name](study)


# --- other forms ---


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
    form = "".join("r" if column.number else "l" for column in table.columns)
    lines = [f"\\begin{{tabular}}{{{form}}}", "\\toprule"]
    lines.append(" & ".join(_tex(heading(column)) for column in table.columns) + r" \\")
    lines.append("\\midrule")
    for place, row in enumerate(table.rows):
        cells = []
        for column, cell in enumerate(row):
            text = _tex(cell.text) + (f" $\\pm$ {_tex(cell.half)}" if cell.half else "")
            cells.append(f"\\textbf{{{text}}}" if table.is_best(place, column) else text)
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def _plain(cell: Cell) -> str:
    return f"{cell.text} ± {cell.half}" if cell.half else cell.text


TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    NOTHING: "--",
    MINUS: "$-$",
    TIMES: r"$\times$",
    ">": r"$>$",
    "<": r"$<$",
}


def _tex(text: str) -> str:
    return "".join(TEX.get(letter, f"\\{letter}" if letter in "&%$#_{}" else letter) for letter in text)
