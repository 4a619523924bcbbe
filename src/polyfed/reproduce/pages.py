"""The pages in `docs/reproductions`: written from the entries and their result files, and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from polyfed.reproduce.cost import left, read_costs
from polyfed.reproduce.entries import PAPERS, Case, Entry, read_entries
from polyfed.reproduce.figures import redraw
from polyfed.reproduce.results import Measured, Number, Result, Row, current, is_stale, judged, numbers, read_result
from polyfed.reproduce.standing import Known, known, once, standing
from polyfed.reproduce.verdict import SEEDS, VERDICTS, Verdict, between, decimals, summary

FOLDER = Path("docs") / "reproductions"
NAMES = {  # of rows in the papers, where ours have others
    "fedin": {"inco": "InCoAvg", "fedin-no-in": "w/o IN", "fedin-no-prox": "w/o Prox", "fedin-no-opt": "w/o Opt"},
    "fedfd": {
        "feddf_hetero": "FedFusion-h",
        "moon-h": "MOON-h",
        "fedgen_hetero": "FedGen-h",
        "dafkd_hetero": "DaFKD-h",
        "fedmd-server": "FedMD",
    },
    "fedvtc": {"fedgen-head": "FedGen", "ccvr-clients": "CCVR"},
    "ams": {"ams": "AMS-top1", "ams-full": "AMS-full", "oneshot_fedavg": "FedAvg"},
    "fedmd_global": {"fedmd_global-plain": "FedMD+Global", "fedmd_global": "FedMD+Global with LwoF"},
}
TITLES = {
    "fedin": "FedIN",
    "fedfd": "FedFD",
    "fedvtc": "FedVTC",
    "ams": "AMS",
    "fedmd_global": "FedMD+Global and LwoF",
}


def write_pages(root: Path) -> list[Path]:
    """Write all pages and the pictures that follow from the result files; return the pages' files."""
    for entry in read_entries(root):
        for scale in entry.scales:
            result = read_result(root, entry, scale)
            if result is not None and entry.kind not in ("count", "study"):
                redraw(entry, scale, _shown(entry, scale, result), root)
    written = []
    for name, text in pages(root).items():
        file = root / FOLDER / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        written.append(file)
    return written


def pages(root: Path) -> dict[str, str]:
    """Return every page by its name."""
    entries = read_entries(root)
    found = {"README.md": _index(root, entries)}
    for paper in PAPERS:
        mine = [entry for entry in entries if entry.paper == paper]
        if mine:
            found[f"{paper}.md"] = _paper(root, paper, mine)
    return found


# --- what is known of an entry ---


def verdicts(entry: Entry, scale: str, result: Result | None) -> list[Verdict]:
    """Return the verdicts on the paper's claims; those on a fix of ours are not among them."""
    if result is None:
        return []
    result = current(entry, scale, result)
    if entry.kind == "count":
        return [number.judged.verdict for number in numbers(entry, result)]
    return [row.judged.verdict for row in judged(entry, scale, result) if not row.fix and row.judged.seeds]


def seeds_of(result: Result) -> str:
    """Return how many seeds there are: `5`, or `3-5` where cases differ."""
    counted = [case.seeds() for case in result.cases.values() if case.runs]
    if not counted:
        return "0"
    return str(min(counted)) if min(counted) == max(counted) else f"{min(counted)}-{max(counted)}"


# --- the index ---


def _index(root: Path, entries: Sequence[Entry]) -> str:
    lines: list[str] = []
    claims: list[Verdict] = []
    counted: list[Verdict] = []
    costs = read_costs(root)
    measured: list[Known] = []
    for entry in entries:
        link = f"[{entry.path}]({entry.paper}.md#{entry.name})"
        about = entry.title.replace("|", "/")
        rest = _rest(entry, root, costs.get(entry.path, {}))
        found = known(entry, root)
        cells = [_cells(one) for one in found] or _stale_cells(entry, root) or [("not measured", "", "", "")]
        lines.append(f"| {link} | {about} | {' | '.join('; '.join(c) for c in zip(*cells, strict=True))} | {rest} |")
        measured += found
    alone = once(measured)
    for one in alone:
        (counted if one.entry.computed else claims).extend(one.verdicts)
    both = [", ".join(f"{some.count(verdict)} {verdict}" for verdict in VERDICTS) for some in (claims, counted)]
    believed: list[str] = []
    for paper in dict.fromkeys(entry.paper for entry in entries):
        mine = [one for one in alone if one.entry.paper == paper]
        believed += standing(TITLES[paper], mine, sum(entry.paper == paper for entry in entries))
    return "\n".join(
        [
            "# Reproductions",
            "",
            "Every table and figure with results in the five papers that this library began with. `polyfed reproduce "
            "PAPER/ENTRY --scale SCALE` measures one, `polyfed reproduce --pages` writes these pages from the result "
            "files; nothing here is typed by hand. [How to read and extend them](../how-to/reproduce.md).",
            "",
            f"{len({one.entry.path for one in measured})} of {len(entries)} entries have a result. Verdicts on "
            f"measured claims: {both[0]}. On numbers that are computed, without training, and on claims about such: "
            f"{both[1]}.",
            "",
            f"A verdict is computed from differences paired by seed, at least {SEEDS} seeds, a t interval with Holm's "
            "correction over all claims of the entry, also those not measured yet: *reproduced* (it contains the "
            "paper's gain and leaves out 0), *holds* (it leaves out 0 on the paper's side), *refuted* (it leaves out "
            "0 on the other side, or it contains 0 and stays away from the paper's gain by more than half of it), "
            "*not resolved* otherwise. With other data or sizes than the paper's only directions are compared, and "
            "*holds* is the best there is; a claim that two rows are equal can only be refuted. A claim counts once, "
            "at the largest scale that has the seeds for it; where two entries have it from the same runs, with the "
            "first. Differences of computed numbers have no interval: a claim about them holds when all are on the "
            "paper's side (with every network, say), is refuted when all are on the other, and is not resolved when "
            "they disagree; a computed number holds when it is off by at most half. Minutes are those of all runs one"
            " after the other; times of what is not run yet are estimates for one thread.",
            "",
            "| entry | what | verdicts | scale | seeds | minutes | not run yet |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *lines,
            "",
            "## What to believe after this",
            "",
            "By the verdicts above and nothing else: the differences that are reproduced or hold, as we measured them, "
            "and those that are refuted. All others are open, which is no word against them.",
            "",
            *believed,
        ]
    )


def _cells(one: Known) -> tuple[str, str, str, str]:
    """Return the verdicts, scale, seeds and minutes of what is known at a scale."""
    seeds = "none needed" if one.entry.computed else seeds_of(one.result)
    return summary(one.verdicts), one.scale, seeds, _minutes(one.result.seconds / 60)


def _stale_cells(entry: Entry, root: Path) -> list[tuple[str, str, str, str]]:
    """Return the same of results that count nowhere, since the entry has other settings now."""
    results = [(scale, result) for scale in entry.scales if (result := read_result(root, entry, scale)) is not None]
    return [
        (
            "not counted, with earlier settings",
            scale,
            seeds_of(result),
            _minutes(result.seconds / 60),
        )
        for scale, result in results
    ]


def _rest(entry: Entry, root: Path, minutes: Mapping[str, float]) -> str:
    """Return what is not run yet of each scale, and its price."""
    found = {scale: left(entry, scale, read_result(root, entry, scale), minutes.get(scale)) for scale in entry.scales}
    return "; ".join(f"{scale}: {words.removeprefix('not measured, ')}" for scale, words in found.items() if words)


# --- a page for each paper ---


def _paper(root: Path, paper: str, entries: Sequence[Entry]) -> str:
    lines = [
        f"# {TITLES[paper]}: tables and figures",
        "",
        f"Written by `polyfed reproduce --pages` from `results/reproductions/{paper}/`. "
        f"[The method](../methods/{paper}.md), [all papers](README.md).",
        "",
    ]
    costs = read_costs(root)
    for entry in entries:
        lines += [f"## {entry.name}", "", f"{entry.title}.", ""]
        if note := entry.told.get("note"):
            lines += [str(note), ""]
        for scale in entry.scales:
            result = read_result(root, entry, scale)
            rest = left(entry, scale, result, costs.get(entry.path, {}).get(scale))
            if result is None:
                lines += [f"**{scale}**: {rest} (`polyfed reproduce {entry.path} --scale {scale}`).", ""]
            else:
                lines += _scale(entry, scale, _shown(entry, scale, result), rest)
    return "\n".join(lines).rstrip() + "\n"


def _shown(entry: Entry, scale: str, result: Result) -> Result:
    """Return what is told of a result: where nothing is of today's settings, all; else no old run beside new ones."""
    return result if is_stale(entry, scale, result) else current(entry, scale, result)


def _scale(entry: Entry, scale: str, result: Result, rest: str) -> list[str]:
    head = f"**{scale}**: {_minutes(result.seconds / 60)} min of runs, polyfed {result.versions.get('polyfed', '?')}, "
    head += f"torch {result.versions.get('torch', '?')} (`{result.command or f'polyfed reproduce {entry.path}'}`)."
    if note := entry.told.get(scale, {}).get("note"):
        head += f" {note}"
    if rest:
        head += f" {rest}."
    lines = [head, ""]
    if entry.kind == "count":
        rows = judged(entry, scale, result)
        return lines + _counted(numbers(entry, result)) + (_claims(entry, scale, rows) if rows else [])
    if entry.kind != "study":
        lines += [_measured_with(entry, scale), ""]
    for case in entry.cases(scale):
        measured = result.cases.get(case.name, Measured())
        lines += _table(entry, scale, case, measured)
    lines += _claims(entry, scale, judged(entry, scale, result), is_stale(entry, scale, result))
    for figure in result.figures:
        lines += [f"![{figure.removesuffix('.png')}](figures/{figure})", ""]
    return lines


def _measured_with(entry: Entry, scale: str) -> str:
    """Return the data and size of a scale: titles of cases are the paper's."""
    base = entry.experiment(scale, entry.cases(scale)[0]).base
    data, limit, size = base.data, base.data.limit, base.data.resize
    parts = [data.source + (f" ({limit[0]:,} images)" if isinstance(limit, tuple) else "")]
    parts += [f"{size} x {size}"] if isinstance(size, int) else []
    rounds, names = base.planned_rounds(), ", ".join(dict.fromkeys(base.models.names))
    if data.public is not None:
        parts += [f"public: {data.public}" if isinstance(data.public, str) else f"{data.public:,} of them public"]
    share = base.participation.share
    parts += [f"{data.clients} clients" + (f", {share:.0%} of them in a round" if share not in (None, 1.0) else "")]
    parts += [f"{rounds} round{'s' * (rounds > 1)} of {base.training.epochs} epochs", names]
    words = "Measured with (cases may differ in what they name; they are headed as in the paper): "
    return words + "; ".join(f"`{part}`" if ":" in part or "-" in part else part for part in parts) + "."


def reconstructions(entry: Entry, scale: str, case: Case) -> set[str]:
    """Return the labels of methods whose papers leave so much open that ours are reconstructions."""
    if entry.kind == "study":
        return set()
    made = entry.experiment(scale, case)
    return {label for label in made.compare if made.config(label).method.paper.endswith("(reconstruction)")}


def _table(entry: Entry, scale: str, case: Case, measured: Measured) -> list[str]:
    """Return ours beside the paper's: a row for each label, mean and standard deviation over seeds.

    Where numbers are computed over something else, the smallest and the largest: nothing varies by chance there.
    """
    if not measured.runs:
        return [f"*{case.title}*: not measured.", ""]
    shown, reconstructed = _quantities(entry, scale, case, measured), reconstructions(entry, scale, case)
    lines = [f"*{case.title}*", ""]
    heads = [f"{q} | paper" if case.numbers.get(q) else q for q in shown]
    count = sum(head.count("|") + 1 for head in heads)
    lines += [f"| | {entry.over or 'seeds'} | " + " | ".join(heads) + " |", "| --- " * (count + 2) + "|"]
    labels = list(dict.fromkeys([*(label for q in shown for label in case.numbers.get(q, {})), *measured.runs]))
    fixes = entry.fixes
    for label in labels:
        seeds = measured.runs.get(label, {})
        cells = []
        for quantity in shown:
            values = [found[quantity] for found in seeds.values() if quantity in found]
            cells.append(_ends(values) if entry.over else _spread(values))
            if case.numbers.get(quantity):
                paper = case.numbers[quantity].get(label)
                cells.append("" if paper is None or label in fixes else f"{paper:g}")
        name = f"{label} (ours: {fixes[label]})" if label in fixes else _named(entry, label)
        name += " (reconstruction)" if label in reconstructed else ""
        lines.append(f"| {name} | {len(seeds)} | " + " | ".join(cells) + " |")
    for label, failed in measured.failed.items():
        lines += ["", f"{label} failed with seed {', '.join(failed)}: {next(iter(failed.values()))}"]
    return [*lines, ""]


def _named(entry: Entry, label: str) -> str:
    """Return a row's name as in the paper, with ours behind it."""
    name = NAMES.get(entry.paper, {}).get(label)
    return label if name is None else f"{name} (`{label}`)"


def _quantities(entry: Entry, scale: str, case: Case, measured: Measured) -> list[str]:
    asked = [side.quantity for claim in entry.claims(case, scale) for side in (claim.one, claim.two)]
    wanted = dict.fromkeys([entry.quantity, *entry.told.get("show", ()), *case.numbers, *asked])
    there = {quantity for seeds in measured.runs.values() for values in seeds.values() for quantity in values}
    return [quantity for quantity in wanted if quantity in there]


def _claims(entry: Entry, scale: str, rows: Sequence[Row], stale: bool = False) -> list[str]:
    tested = sum(row.judged.seeds >= SEEDS for row in rows)
    how = f"corrected for together (Holm); {tested} have their seeds"
    if entry.computed:
        how = "each judged by its sign" + (f" with all {entry.over}" if entry.over else "")
        how += ": computed, so without an interval"
    lines = [f"Claims: {len(rows)}, {how}.", ""]
    lines += ["| case | claim | paper | ours | verdict |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        told = f"{row.gain:+.2f}" if row.gain is not None else {1: "above 0", -1: "below 0"}.get(row.claim.sign, "")
        told = "equal" if row.claim.equal else told
        found = row.judged
        if found.mean is None:
            ours = "not measured"
        elif found.ends is not None:
            ours = between(found.ends)
        elif found.half is None:
            ours = f"{found.mean:+.2f} (seeds: {found.seeds})"
        else:
            digits = decimals(found.half)
            ours = f"{found.mean:+.{digits}f} ± {found.half:.{digits}f}"
        verdict = "not counted: earlier settings" if stale else str(found.verdict)
        verdict += f" (ours: {row.fix})" if row.fix else ""
        lines.append(f"| {row.case.title} | {row.claim.words(entry.quantity)} | {told} | {ours} | {verdict} |")
    if entry.swapped(scale):
        lines += ["", "Other data or sizes than the paper's: directions only."]
    return [*lines, ""]


def _counted(found: Sequence[Number]) -> list[str]:
    lines = ["| case | label | quantity | paper | ours | verdict |", "| --- | --- | --- | --- | --- | --- |"]
    for number in found:
        ours = "" if number.ours is None else f"{number.ours:g}"
        row = (number.case.title, number.label, number.quantity, f"{number.paper:g}", ours, number.judged.verdict)
        lines.append(f"| {' | '.join(row)} |")
    return [*lines, ""]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean = fmean(values)
    text = f"{mean:.1f}" if abs(mean) >= 10 else f"{mean:.3g}"
    return (
        text
        if len(values) < 2
        else f"{text} ± {stdev(values):.1f}"
        if abs(mean) >= 10
        else f"{text} ± {stdev(values):.2g}"
    )


def _ends(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}" if values else ""


def _minutes(minutes: float) -> str:
    return f"{minutes:.0f}" if minutes >= 1 else "under 1"


def told(entry: Entry, scale: str, result: Result) -> list[str]:
    """Return what the command prints: the same lines as the page."""
    rest = left(entry, scale, result, None)
    return [f"{entry.path}: {entry.title}", *_scale(entry, scale, _shown(entry, scale, result), rest)]
