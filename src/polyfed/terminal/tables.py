"""Tables and progress for the terminal."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

from polyfed.ops.estimate import estimate

if TYPE_CHECKING:
    from polyfed.compare import Row


def say(console: Console, text: str | Text) -> None:
    """Print a line letter by letter: square brackets in paths and names are no markup, colons no emoji."""
    console.print(text if isinstance(text, Text) else Text(text), soft_wrap=True)


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


def spread(values: Sequence[float], signed: bool = False) -> str:
    """Return mean and 95 % interval over seeds, in percent."""
    found = estimate(values)
    if found is None:
        return "-"
    sign = "+" if signed and found.mean >= 0 else ""
    return f"{sign}{100 * found.mean:.1f}" + ("" if found.half is None else f" ± {100 * found.half:.1f}")


class ShownTable(Table):
    """A rich table that `print` and notebooks show as a table, with every text letter by letter."""

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

    def __str__(self) -> str:
        console = Console(width=max(80, Console().width), file=io.StringIO(), record=True)
        console.print(self)
        return console.export_text().rstrip()


def comparison_table(rows: Sequence[Row], title: str) -> Table:
    """Return the table of a comparison: who gained what at which cost."""
    table = ShownTable(title)
    table.add_column("method", no_wrap=True)
    for heading in ("accuracy %", "gain", "worst %", "global %", "sent", "received", "s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.method,
            spread(row.accuracy),
            spread(row.gain, signed=True),
            spread(row.worst),
            spread(row.globals),
            amount(row.bytes_up),
            amount(row.bytes_down),
            f"{row.seconds:.0f}" if row.seconds >= 10 else f"{row.seconds:.1f}",
        )
    seeds = len(rows[0].accuracy)
    over = f"; mean and 95 % t-interval over {seeds} seeds" if seeds > 1 else ""
    caption = f"gain over local training{over}; sent and received: payload of a client in all{_framing(rows)}"
    active = ", ".join(f"{row.method} {spread(row.took_part)}" for row in rows if row.took_part)
    if active:
        caption += f"; accuracy counts clients that never took part in a round, without them it is: {active}"
    table.caption = Text(caption, "table.caption")
    return table


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
    table.add_column("client", justify="right")
    table.add_column("model", no_wrap=True)
    headings = ["samples", "acc. %"] + (["alone %", "gain"] if alone else []) + ["sent", "received"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    measured = accuracy.get("clients", range(len(accuracy["per_client"])))  # a site may have been away at the end
    for client, value in zip(measured, accuracy["per_client"], strict=True):
        cells = [str(summary["samples"][client]), percent(value)]
        if alone:
            cells += [percent(alone[client]), f"{100 * (value - alone[client]):+.1f}"]
        cells += [amount(cost[direction].get(str(client), 0)) for direction in ("up", "down")]
        table.add_row(str(client), summary["architectures"][client], *cells)
    best = f", global model {percent(accuracy['global'])} %" if accuracy["global"] is not None else ""
    gained = f", alone {percent(sum(alone) / len(alone))} %" if alone else ""
    apart = ""
    if "took_part" in accuracy:
        number = len(accuracy["per_client"])
        idle = number - len(accuracy["took_part"]["clients"])
        mean = percent(accuracy["took_part"]["mean"])
        apart = f" ({mean} % without the {idle} of {number} clients that never took part in a round)"
    payload, wire = (sum(summary["cost"][f"{kind}_{way}"] for way in ("up", "down")) for kind in ("bytes", "wire"))
    spent = f"; sent and received: payload, {amount(payload)} of all ({amount(wire)} on the wire)" if payload else ""
    worst = f", worst client {percent(accuracy['worst'])} %"
    table.caption = f"mean {percent(accuracy['mean'])} %{apart}{gained}{worst}{best}{spent}"
    return table


class Progress:
    """One line a round: accuracy, bytes, time left. Plain text where the output is not a terminal."""

    def __init__(self, console: Console, rounds: int, label: str) -> None:
        self.console = console
        self.rounds = rounds
        self.label = label
        self.start = time.perf_counter()
        self.done = 0

    def __call__(self, line: dict[str, Any]) -> None:
        """Print the line of a finished round."""
        self.done += line["phase"] == "round"
        spent = time.perf_counter() - self.start
        left = spent / max(self.done, 1) * max(self.rounds - line["round"], 0)
        where = f"round {line['round']:>3}/{self.rounds}" if line["phase"] == "round" else f"{line['phase']:<9}"
        parts = [f"{self.label:<12}", where]
        if "accuracy" in line:
            accuracy = line["accuracy"]
            parts.append(f"accuracy {percent(accuracy['mean']):>5} %  worst {percent(accuracy['worst']):>5} %")
            if accuracy.get("global") is not None:
                parts.append(f"global {percent(accuracy['global']):>5} %")
        elif "loss" in line:
            parts.append(f"loss {line['loss']:.3f}")
        parts.append(f"up {amount(line['bytes_up'])}  down {amount(line['bytes_down'])}")
        if line.get("missing"):
            parts.append(f"missing {len(line['missing'])}")
        parts.append(f"{left:.0f} s left" if left else f"{spent:.1f} s")
        say(self.console, "  ".join(parts))
