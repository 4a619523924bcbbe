"""What people look at: one self-contained page, figures, and tables, from runs on disk or in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.report.runs import Study, study

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

__all__ = ["Study", "export", "figure", "study", "table", "to_latex", "to_markdown", "write_report"]


def write_report(source: Any, out: str | Path | None = None, targets: Sequence[float] | None = None) -> Path:
    """Write `report.html`: one page about runs or a comparison that opens from disk, without a network.

    Parameters
    ----------
    source
        A run directory, a comparison directory, a `Result`, or several of them.
    out
        The file; None: `report.html` in the directory given.
    targets
        Accuracies (0 to 1) for the table of rounds to a target; None: round numbers below the best.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    InputError
        When there is no finished run, or a target is no share.
    """
    from polyfed.core.checkpoint import write_atomic
    from polyfed.core.errors import InputError
    from polyfed.report.page import render

    for target in targets or ():
        if not 0 <= target <= 1:
            raise InputError(f"A target is an accuracy from 0 to 1, such as 0.8, not {target:g}.")
    found = study(source)
    path = Path(out) if out is not None else _place(source)
    if path.is_dir():
        path = path / "report.html"
    write_atomic(path, render(found, targets).encode())
    return path


def figure(source: Any, kind: str = "curves", backend: str = "plotly") -> Any:
    """Return a figure: an ordinary plotly figure, or with `backend="matplotlib"` a matplotlib one.

    `kind` is one of curves, curves-bytes, curves-seconds, stages, frontier, frontier-seconds, gains, tiers, split,
    sizes, entropy, wire, sweep.
    """
    from polyfed.core.errors import unknown
    from polyfed.report.charts import chart

    drawn = chart(study(source), kind)
    if backend == "plotly":
        from polyfed.report.draw import to_plotly

        return to_plotly(drawn)
    if backend == "matplotlib":
        from polyfed.report.static import to_matplotlib

        return to_matplotlib(drawn)
    raise unknown("backend", backend, ("plotly", "matplotlib"))


def table(source: Any, name: str = "leaderboard") -> pandas.DataFrame:
    """Return a table (leaderboard, targets, fairness, clients, trust, kept, wire, sweep) as a data frame of numbers."""
    from polyfed.report import forms, tables

    return forms.to_frame(tables.make(study(source), name))


def to_markdown(source: Any, name: str = "leaderboard") -> str:
    """Return a table as Markdown."""
    from polyfed.report import forms, tables

    return forms.to_markdown(tables.make(study(source), name))


def to_latex(source: Any, name: str = "leaderboard") -> str:
    """Return a table as LaTeX, for the booktabs package."""
    from polyfed.report import forms, tables

    return forms.to_latex(tables.make(study(source), name))


def export(source: Any, folder: str | Path, formats: Sequence[str] = ("pdf", "svg", "png")) -> list[Path]:
    """Write every figure and table for a paper into a folder: PDF, SVG and PNG; LaTeX, Markdown and CSV."""
    from polyfed.core.errors import InputError
    from polyfed.report import forms, static, tables
    from polyfed.report.charts import KINDS, chart

    found, folder = study(source), Path(folder)
    written = []
    for kind in KINDS:
        try:
            drawn = chart(found, kind)
        except InputError:  # these runs cannot show it, for instance no gains without `local`
            continue
        picture = static.to_matplotlib(drawn)
        written += [static.save(picture, folder / f"{kind}.{ending}") for ending in formats]
    for name in tables.TABLES:
        made = tables.make(found, name)
        if not made.rows and name in ("sweep", "trust", "kept"):  # these runs have none
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for ending, text in (
            ("md", forms.to_markdown(made)),
            ("tex", forms.to_latex(made)),
            ("csv", forms.to_frame(made).to_csv(index=False)),
        ):
            path = folder / f"{name}.{ending}"
            path.write_text(text)
            written.append(path)
    return written


def _place(source: Any) -> Path:
    """Return where the report of something goes: into its directory, else into the current one."""
    items = [source] if isinstance(source, str | Path) or not isinstance(source, list | tuple) else list(source)
    directory = items[0] if isinstance(items[0], str | Path) else getattr(items[0], "directory", None)
    return Path(directory) / "report.html" if len(items) == 1 and directory is not None else Path("report.html")
