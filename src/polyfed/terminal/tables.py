"""Tables for the terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

from polyfed.core.summary import client_columns
from polyfed.ops.estimate import estimate

if TYPE_CHECKING:
    from polyfed.rows import Row


RECONSTRUCTION = "(reconstruction)"  # how `Method.paper` ends where the paper leaves parts open
LEAST = 16  # letters that a column of names keeps in a line
TITLES = {"personal": "own %", "validation": "val. %", "alone": "alone %", "gain": "gain %"}  # columns of clients


def say(console: Console, text: str | Text) -> None:
    """Print a line letter by letter: square brackets in paths and names are no markup, colons no emoji."""
    console.print(text if isinstance(text, Text) else Text(text), soft_wrap=True)


def marked(label: str, reconstructed: bool) -> str:
    """Return a label as people read it: a reconstruction must not pass for what the paper did."""
    return f"{label} {RECONSTRUCTION}" if reconstructed and not label.endswith(RECONSTRUCTION) else label


def amount(number: float) -> str:
    """Return bytes for people, in powers of ten as the papers count them."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    raise AssertionError


def in_rounds(number: int) -> str:
    """Return a number of rounds in words."""
    return f"{number} round{'' if number == 1 else 's'}"


def percent(share: float | None) -> str:
    """Return an accuracy for people."""
    return "-" if share is None else f"{100 * share:.1f}"


def figure(value: float | None) -> str:
    """Return a metric for people, in its own unit."""
    return "-" if value is None else f"{value:.4g}"


def spread(values: Sequence[float], signed: bool = False) -> str:
    """Return mean and 95 % interval over seeds, in percent."""
    found = estimate(values)
    if found is None:
        return "-"
    sign = "+" if signed and found.mean >= 0 else ""
    return f"{sign}{100 * found.mean:.1f}" + ("" if found.half is None else f" ± {100 * found.half:.1f}")


class ShownTable(Table):
    """A rich table that `print` and notebooks show as a table, with every text letter by letter.

    Numbers are never cut. Where it is too narrow for all of them, long names go on in the next line, and what still has
    no room comes in a second table below the first.
    """

    def __init__(self, title: str) -> None:
        super().__init__(
            title=Text(title, "table.title"),
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 0),
        )

    def add_row(
        self, *renderables: RenderableType | None, style: StyleType | None = None, end_section: bool = False
    ) -> None:
        """Add a row; words in it are no markup."""
        cells = (Text(cell) if isinstance(cell, str) else cell for cell in renderables)
        super().add_row(*cells, style=style, end_section=end_section)

    def add_names(self, heading: str, justify: JustifyMethod = "left") -> None:
        """Add a column of names, which are folded where there is no room."""
        self.add_column(heading, justify=justify, overflow="fold")

    def add_numbers(self, heading: str) -> None:
        """Add a column of numbers, which stay in one piece."""
        self.add_column(heading, justify="right", no_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Show it, in as many tables below each other as its numbers need."""
        for part in self._parts(options.max_width):
            yield from Table.__rich_console__(part, console, options)

    def _parts(self, room: int) -> list[ShownTable]:
        cells = [[Text(str(column.header)), *column.cells] for column in self.columns]
        widths = [max(console_width(cell) for cell in each) for each in cells]
        names = [n for n, column in enumerate(self.columns) if not column.no_wrap]
        left = room - 1 - sum(min(widths[n], LEAST) + 1 for n in names)
        groups: list[list[int]] = [[]]
        for number in (n for n in range(len(cells)) if n not in names):
            if groups[-1] and sum(widths[n] + 1 for n in (*groups[-1], number)) > left:
                groups.append([])
                left = room - 2 - min(widths[names[0]], LEAST)  # further tables have the first name only
            groups[-1].append(number)
        if len(groups) == 1:
            return [self]
        parts = []
        for place, group in enumerate(groups):
            part = ShownTable("")
            part.title = self.title if place == 0 else None
            part.caption = self.caption if place == len(groups) - 1 else None
            shown = [*(names if place == 0 else names[:1]), *group]
            for n in shown:
                column = self.columns[n]
                part.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap, overflow=column.overflow)
            for row in zip(*(cells[n][1:] for n in shown), strict=True):
                part.add_row(*row)
            parts.append(part)
        return parts

    def __str__(self) -> str:
        console = Console(width=max(80, Console().width), file=io.StringIO(), record=True)
        console.print(self)
        return console.export_text().rstrip()


def console_width(cell: RenderableType) -> int:
    """Return how many letters of a line a cell takes."""
    return cell.cell_len if isinstance(cell, Text) else cell_len(str(cell))


def comparison_table(rows: Sequence[Row], title: str) -> Table:
    """Return the table of a comparison: who gained what at which cost."""
    table = ShownTable(title)
    table.add_names("method")
    own, metrics = any(row.personal for row in rows), list(dict.fromkeys(name for row in rows for name in row.metrics))
    more = [*(["own %"] if own else []), *metrics]
    score = next((row.score for row in rows), "accuracy")
    for heading in (f"{score} %", "gain", "worst %", "global %", *more, "sent", "received", "s"):
        table.add_numbers(heading)
    for row in rows:
        table.add_row(
            marked(row.method, row.reconstructed),
            spread(row.accuracy),
            spread(row.gain, signed=True),
            spread(row.worst),
            spread(row.globals),
            *([spread(row.personal)] if own else []),
            *(figure(fmean(row.metrics[name]) if row.metrics.get(name) else None) for name in metrics),
            amount(row.bytes_up),
            amount(row.bytes_down),
            f"{row.seconds:.0f}" if row.seconds >= 10 else f"{row.seconds:.1f}",
        )
    seeds = len(rows[0].accuracy)
    over = f"; mean and 95 % t-interval over {seeds} seeds" if seeds > 1 else ""
    whose = "; own: on the own test data of clients" if own else ""
    caption = (
        f"gain over local training of the same networks{over}{whose}; sent and received: payload of a client in all"
    )
    caption += _framing(rows)
    active = ", ".join(f"{row.method} {spread(row.took_part)}" for row in rows if row.took_part)
    if active:
        caption += f"; accuracy counts clients of which no reply counted in any round, without them it is: {active}"
    if rows[0].tries > 1:
        caption += f"; every method had {rows[0].tries} tries, chosen on validation data"
    caption += "".join(f"; {text}" for text in own_settings({row.method: row.differs for row in rows}))
    table.caption = Text(caption, "table.caption")
    return table


def own_settings(differs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return which methods have settings of their own, in words: `a and b with models.names x, y; training.lr 0.1`."""
    groups: dict[str, list[str]] = {}
    for label, settings in differs.items():
        words = [
            f"{name} {', '.join(map(str, value)) if isinstance(value, list | tuple) else value}"
            for name, value in settings.items()
        ]
        if words:
            groups.setdefault("; ".join(words), []).append(label)
    return [f"{', '.join(labels)} with {text}" for text, labels in groups.items()]


def _framing(rows: Sequence[Row]) -> str:
    """Say how much more than the payload is on the wire, for the method with the most framing."""
    sizes = [(row.bytes_up + row.bytes_down, row.wire_up + row.wire_down) for row in rows]
    more = [100 * wire / payload - 100 for payload, wire in sizes if payload]
    return f" (on the wire, with framing, up to {max(more):.0f} % more)" if more else ""


def client_table(summary: Mapping[str, Any], alone: Sequence[float] | None = None) -> Table:
    """Return one row for each client from the content of `result.json`; `alone`: its accuracy without the others."""
    accuracy, cost = summary["accuracy"], summary["cost"]["per_client"]
    title = f"{summary['method']}, {in_rounds(summary['rounds'])}, seed {summary['seed']}"
    table = ShownTable(title)
    names = summary.get("names") or [str(client) for client in range(len(summary["samples"]))]
    table.add_names("client", "left" if summary.get("names") else "right")
    table.add_names("model")
    score = accuracy.get("score", "acc.")
    columns = client_columns(accuracy, len(summary["samples"]))
    more = {TITLES.get(name, name): values for name, values in columns.items() if name != "accuracy"}
    more = {name: values for name, values in more.items() if " " not in name or name.endswith("%")}
    headings = ["samples", f"{score} %"] + (["alone %", "gain"] if alone else []) + [*more, "sent", "received"]
    for heading in headings:
        table.add_numbers(heading)
    measured = accuracy.get("clients", range(len(accuracy["per_client"])))  # a site may have been away at the end
    for client, value in zip(measured, accuracy["per_client"], strict=True):
        cells = [str(summary["samples"][client]), percent(value)]
        if alone:
            cells += [percent(alone[client]), f"{100 * (value - alone[client]):+.1f}"]
        cells += [(percent if name.endswith("%") else figure)(values[client]) for name, values in more.items()]
        cells += [amount(cost[direction].get(str(client), 0)) for direction in ("up", "down")]
        table.add_row(names[client], summary["architectures"][client], *cells)
    for client in accuracy.get("malicious", []):
        cells = [str(summary["samples"][client]), "-", *(["-", "-"] if alone else []), *("-" for _ in more), "-", "-"]
        table.add_row(names[client], f"{summary['architectures'][client]} (malicious: does not count)", *cells)
    best = f", global model {percent(accuracy['global'])} %" if accuracy["global"] is not None else ""
    gained = f", alone {percent(sum(alone) / len(alone))} %" if alone else ""
    apart = ""
    if "took_part" in accuracy:
        number = len(accuracy["per_client"])
        idle = number - len(accuracy["took_part"]["clients"])
        mean = percent(accuracy["took_part"]["mean"])
        apart = f" ({mean} % without the {idle} of {number} clients of which no reply counted in any round)"
    payload, wire = (sum(summary["cost"][f"{kind}_{way}"] for way in ("up", "down")) for kind in ("bytes", "wire"))
    spent = f"; sent and received: payload, {amount(payload)} of all ({amount(wire)} on the wire)" if payload else ""
    worst = f", worst client {percent(accuracy['worst'])} %"
    private = ""
    if "privacy" in summary:
        told = summary["privacy"]
        unit = told.get("unit", "sample")
        largest = f"epsilon {max(told['epsilon'].values()):.4g} at delta {told['delta']:g}"
        private = f"; privacy of each {unit}: {largest} (the largest)"
    own = accuracy.get("personal")
    personal = f"; on own test data {percent(own['mean'])} %{_undefined(own)}" if own else ""
    held = accuracy.get("validation")
    validated = f"; on validation data {percent(held['mean'])} %{_undefined(held)}" if held else ""
    stopped = summary.get("stopped")
    ended = f"; stopped: no better on validation data since round {stopped['best_round']}" if stopped else ""
    if summary.get("spent"):
        ended += f"; privacy budget used up at {len(summary['spent'])} clients"
    reached = f"mean {percent(accuracy['mean'])} %{apart}{gained}{worst}{best}{personal}{validated}{ended}"
    table.caption = f"{reached}{spent}{private}"
    return table


def _undefined(part: Mapping[str, Any]) -> str:
    """Say for how many clients a figure does not exist."""
    return f" (not defined at {part['undefined']} clients)" if part.get("undefined") else ""
