"""The page: sections, charts and tables in one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from polyfed.core.errors import InputError
from polyfed.core.versions import PACKAGES
from polyfed.report import again, charts, statistics, tables, words
from polyfed.report.chart import Chart
from polyfed.report.draw import plain, to_plotly
from polyfed.report.runs import LOCAL, REFERENCES, Run, Study
from polyfed.report.style import dark_colors
from polyfed.terminal.tables import in_rounds

SHOWN_CLIENTS = 50  # of each method, in the table of clients; the exported one has all


def render(study: Study, targets: Sequence[float] | None = None) -> str:
    """Return the page as text."""
    drawn: dict[str, Chart] = {}
    missing: dict[str, str] = {}
    ordered = _by_family(study)
    for kind in charts.KINDS:
        try:
            drawn[kind] = charts.chart(ordered, kind)
        except InputError as error:
            missing[kind] = str(error)
    figures = {kind: _json_figure(chart) for kind, chart in drawn.items()}
    answer = words.answer(study)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_asset("page.html"))
    return template.render(
        title=_title(study),
        facts=_facts(study),
        answer=answer,
        tables={
            "leaderboard": tables.leaderboard(ordered),
            "targets": tables.targets(ordered, targets),
            "fairness": tables.fairness(ordered),
            "clients": tables.clients(ordered, SHOWN_CLIENTS),
            "trust": tables.trust(ordered),
            "kept": tables.kept(ordered),
            "wire": tables.wire(ordered),
            "sweep": tables.sweep(study),
        },
        charts=drawn,
        missing=missing,
        baseline=statistics.baseline(study),
        local=LOCAL in study.runs,
        seeds=study.seeds,
        fewer=max(run.clients for run in study.all) > SHOWN_CLIENTS and SHOWN_CLIENTS,
        idle=any(run.idle for run in study.all),
        settings=_settings(study),
        options=_options(study),
        versions=_versions(study),
        commands=again.commands(study),
        config=json.dumps(study.experiment or study.all[0].config, indent=2, sort_keys=True),
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
        data=_embed({"figures": figures, "dark": dark_colors(), **_many(study)}),
        many=study.many,
        tries=study.tries,
        plotly=Markup(_plotly()),
    )


def _by_family(study: Study) -> Study:
    """Return the study with its methods family by family, the best first, where there are many."""
    if not study.many:
        return study
    rows = sorted(statistics.leaderboard(study), key=lambda row: (study.family(row.method), -row.accuracy.mean))
    return replace(study, runs={row.method: study.runs[row.method] for row in rows})


def _many(study: Study) -> dict[str, Any]:
    """Return, where there are many methods, the family of each and those that charts show at first."""
    if not study.many:
        return {}
    rows = [row for row in statistics.leaderboard(study) if row.method not in REFERENCES]
    best: dict[str, Any] = {}  # of each family
    for row in sorted(rows, key=lambda row: -row.accuracy.mean):
        best.setdefault(study.family(row.method), row.method)
    kept = statistics.frontier([(row.method, row.cost, row.accuracy.mean) for row in rows])
    shown = [label for label in study.labels if label in {*REFERENCES, *best.values(), *kept}]
    return {"families": {plain(label): study.family(label) for label in study.labels}, "shown": [*map(plain, shown)]}


def _asset(name: str) -> str:
    return files("polyfed.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """Return plotly.js, compressed: 4.8 MB become 2, and the page stays far below 5 MB. The browser unpacks it."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def _embed(value: Any) -> Markup:
    """Return JSON that may stand inside a script element, whatever names people chose."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _json_figure(chart: Chart) -> dict[str, Any]:
    figure: dict[str, Any] = to_plotly(chart).to_plotly_json()
    figure["layout"].pop("title", None)  # the page has its own headings
    figure["layout"].pop("template", None)
    return dict(json.loads(json.dumps(_rounded({"data": figure["data"], "layout": figure["layout"]}), default=list)))


def _rounded(value: Any) -> Any:
    """Keep six digits: enough for any screen, and a third of the bytes."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


# --- words and settings ---


def _title(study: Study) -> str:
    names = dict.fromkeys(_data_name(run) for run in study.all)
    what = study.labels[0] if len(study.labels) == 1 else f"{len(study.labels)} methods"
    return f"{', '.join(names)}: {what}, {study.all[0].clients} clients"


def _data_name(run: Run) -> str:
    return str((run.config.get("data") or {}).get("source") or "own data")


def _facts(study: Study) -> str:
    run = study.all[0]
    partition = (run.config.get("data") or {}).get("partition")
    parts = [f"{len(study.seeds)} seed{'s' if len(study.seeds) > 1 else ''}", in_rounds(run.summary["rounds"])]
    if partition:
        parts.insert(0, f"split {partition}")
    kinds = len(set(run.architectures))
    parts.append(f"{kinds} different networks" if kinds > 1 else run.architectures[0])
    total = sum(run.summary["samples"])
    parts.append(f"{total:,} training samples".replace(",", " "))  # a narrow space: 10 000
    return " · ".join(parts)


def _settings(study: Study) -> list[tuple[str, str]]:
    """Return what all runs have in common, one line each."""
    shown: list[tuple[str, Callable[[Run], Any]]] = [
        ("data", _data_name),
        ("clients", lambda run: run.clients),
        ("partition", lambda run: (run.config.get("data") or {}).get("partition")),
        ("public data", lambda run: (run.config.get("data") or {}).get("public")),
        ("networks", lambda run: ", ".join(dict.fromkeys(run.architectures))),
        ("rounds", lambda run: run.summary["rounds"]),
        ("participation", lambda run: (run.config.get("participation") or {}).get("share")),
        ("training", lambda run: _training(run.config.get("training") or {})),
    ]
    lines = []
    for name, read in shown:
        values = dict.fromkeys(str(read(run)) for run in study.all if read(run) is not None)
        if values:
            lines.append((name, "; ".join(values)))
    lines.append(("seeds", ", ".join(str(seed) for seed in study.seeds)))
    return lines


def _training(training: dict[str, Any]) -> str | None:
    if not training:
        return None
    epochs = "1 epoch" if training["epochs"] == 1 else f"{training['epochs']} epochs"
    text = f"{epochs} of batches of {training['batch_size']}, {training['optimizer']}, "
    text += f"learning rate {training['lr']}"
    return text + "".join(f", {key.replace('_', ' ')} {training[key]}" for key in ("momentum", "clip") if training[key])


def _options(study: Study) -> list[tuple[str, str]]:
    rows = []
    for label, runs in study.runs.items():
        options = runs[0].config.get("method") or {}
        text = ", ".join(f"{key} = {value}" for key, value in options.items() if key != "name")
        rows.append((label, text or "no options"))
    return rows


def _versions(study: Study) -> list[tuple[str, str]]:
    found: dict[str, dict[str, None]] = {}
    for run in study.all:
        for package, version in run.summary.get("versions", {}).items():
            found.setdefault(package, {})[version] = None
    order = ["polyfed", "python", *PACKAGES]
    return [(name, ", ".join(found[name])) for name in dict.fromkeys(order) if name in found]
