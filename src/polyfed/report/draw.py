"""Charts as interactive plotly figures."""

from __future__ import annotations

from html import escape
from math import ceil, floor, log10
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]

from polyfed.report.chart import Axis, Chart, Series
from polyfed.report.style import FONT, GRID, INK, MUTED, SURFACE, faded
from polyfed.terminal.tables import amount


def to_plotly(chart: Chart) -> go.Figure:
    """Return an interactive figure; clicking a name in the legend hides or shows it."""
    figure = go.Figure()
    for series in chart.series:
        for trace in _traces(series):
            figure.add_trace(trace)
    for level in chart.levels:
        figure.add_hline(y=level.value, line={"color": level.look.color, "dash": "dot", "width": 1.5})
        figure.add_annotation(
            x=0,
            xref="paper",
            y=level.value,
            text=plain(level.name),
            showarrow=False,
            xanchor="left",
            yanchor="bottom",
            font={"color": level.look.color, "size": 12},
        )
    figure.update_layout(
        title={"text": chart.title, "font": {"size": 16}, "x": 0, "xref": "paper"},
        template="none",
        font={"family": FONT, "size": 13, "color": INK},
        paper_bgcolor=SURFACE,
        plot_bgcolor=SURFACE,
        height=chart.height,
        margin={"l": 8, "r": 12, "t": 40 if any(series.legend for series in chart.series) else 14, "b": 8},
        showlegend=any(series.legend for series in chart.series),
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12.5}},
        hovermode="closest",
        hoverlabel={"font": {"family": FONT, "size": 12.5}, "align": "left"},
        xaxis=_axis(chart.x),
        yaxis=_axis(chart.y),
        bargap=0.35,
        dragmode=False,
    )
    return figure


def plain(text: str) -> str:
    """Return text that plotly shows letter by letter, whatever people call their methods; only line breaks are kept."""
    return escape(text, quote=False).replace("&lt;br&gt;", "<br>")


def _axis(axis: Axis) -> dict[str, Any]:
    named = bool(axis.ticks)
    options: dict[str, Any] = {
        "title": {"text": axis.title, "font": {"size": 12.5, "color": MUTED}, "standoff": 10},
        "automargin": True,
        "zeroline": axis.zero,
        "zerolinecolor": MUTED,
        "zerolinewidth": 1.5,
        "gridcolor": GRID,
        "showgrid": True,
        "showline": False,
        "ticks": "",
        "tickfont": {"size": 12, "color": MUTED},
    }
    if axis.log:
        marks = log_marks(axis)
        options |= {"type": "log", "tickmode": "array", "tickvals": marks, "ticktext": [mark(axis, m) for m in marks]}
    elif axis.unit == "B":
        options |= {"tickformat": "~s", "ticksuffix": "B"}
    elif axis.unit:
        options |= {"ticksuffix": f" {axis.unit}"}
    if axis.step:
        options["dtick"] = axis.step
    if axis.limits:
        options["range"] = list(axis.limits)
    if named:
        options |= {
            "tickmode": "array",
            "tickvals": list(range(len(axis.ticks))),
            "ticktext": [plain(tick) for tick in axis.ticks],
            "range": [-0.6, len(axis.ticks) - 0.4],
            "ticklabelstandoff": 4,
        }
    return options


def log_marks(axis: Axis) -> list[float]:
    """Return the marks of a logarithmic axis: powers of ten, with 2 and 5 between where it is short."""
    low, high = axis.range
    steps = (1, 2, 5) if high / low < 300 else (1,)
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in steps if low / 2 <= step * 10.0**power <= high * 2]


def mark(axis: Axis, value: float) -> str:
    """Return the text of a mark."""
    if axis.unit == "B":
        return amount(value).replace(".0 ", " ")
    return f"{value:g} {axis.unit}".strip()


def _traces(series: Series) -> list[Any]:
    name = plain(series.name)
    common: dict[str, Any] = {"x": series.x, "y": series.y, "name": name, "legendgroup": name}
    common["showlegend"] = series.legend
    if series.text:
        common |= {"hovertext": [plain(text) for text in series.text], "hovertemplate": "%{hovertext}<extra></extra>"}
    else:
        common["hoverinfo"] = "skip"
    color = series.look.color
    if series.kind == "bars":
        return [go.Bar(**common, marker={"color": color, "line": {"width": 0}})]
    for direction, errors in (("error_x", series.error_x), ("error_y", series.error_y)):
        if errors:
            common[direction] = {"type": "data", "array": errors, "color": color, "thickness": 1.5, "width": 3}
    marker: dict[str, Any] = {"color": color, "symbol": series.look.symbol, "size": 8}
    if series.kind == "bubbles":
        marker |= {"size": series.sizes, "opacity": 0.85, "line": {"width": 0}}
        return [go.Scatter(**common, mode="markers", marker=marker)]
    if series.kind == "points":
        marker |= {"size": 11 if series.labels else 8, "line": {"width": 0.8, "color": SURFACE}, "opacity": 0.9}
        if series.look.symbol == "line-ns":  # the mean: a stroke across the row
            marker |= {"size": 22, "opacity": 1, "line": {"width": 2.5, "color": color}}
        if not series.labels:
            return [go.Scatter(**common, mode="markers", marker=marker)]
        text = [f" {plain(label)} " for label in series.labels]
        font = {"color": color, "size": 12.5}
        beside = f"{'top' if series.above else 'bottom'} {'left' if series.left else 'right'}"
        return [go.Scatter(**common, mode="markers+text", marker=marker, text=text, textfont=font, textposition=beside)]
    line = {"color": color, "dash": series.look.dash, "width": 2 if series.kind == "lines" else 1.2}
    if series.kind == "steps":
        return [go.Scatter(**common, mode="lines", line=line | {"shape": "hv"})]
    traces = [go.Scatter(**common, mode="lines+markers", line=line, marker=marker | {"size": 5})]
    if series.band is not None:
        low, high = series.band
        traces.insert(
            0,
            go.Scatter(
                x=[*series.x, *reversed(series.x)],
                y=[*high, *reversed(low)],
                fill="toself",
                fillcolor=faded(color),
                line={"width": 0},
                mode="lines",
                hoverinfo="skip",
                legendgroup=name,
                showlegend=False,
            ),
        )
    return traces
