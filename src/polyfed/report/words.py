"""The answer in sentences, made from the numbers, with a caution where they do not carry it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.core.summary import client_columns
from polyfed.ops.estimate import Estimate
from polyfed.report import statistics as numbers
from polyfed.report.fairness import fairness
from polyfed.report.runs import LOCAL, POOLED, Run, Study
from polyfed.report.statistics import Standing
from polyfed.report.sweeps import equal
from polyfed.terminal.tables import amount, own_settings

SAME = 1e-9  # means that differ by less are equal
LEVEL = 5e-4  # a gain that would be printed as 0.0 points


@dataclass(frozen=True)
class Answer:
    """Two sentences and what speaks against relying on them."""

    sentences: list[str]
    cautions: list[str]


def answer(study: Study) -> Answer:
    """Say which method is best, what it gained, what it cost, and how sure that is."""
    rows = numbers.leaderboard(study)
    contenders = [row for row in rows if row.method in study.contenders]
    if not contenders:
        return _references_only(rows)
    top = max(row.accuracy.mean for row in contenders)
    first = [row for row in contenders if top - row.accuracy.mean < SAME]
    best = min(first, key=lambda row: row.cost)
    others = [row for row in contenders if row not in first]
    sentences = [_who(study, best, first, others), _price(best, first)]
    return Answer(sentences, _cautions(study, best, others))


def _references_only(rows: list[Standing]) -> Answer:
    parts = [f"{row.method} reached {_accuracy(row.accuracy)}" for row in rows]
    return Answer([f"No method that exchanges anything was run: {' and '.join(parts)}."], [])


def _accuracy(value: Estimate) -> str:
    if value.half is None:
        return f"{100 * value.mean:.1f} %"
    low, high = max(0.0, value.low), min(1.0, value.high)
    return f"{100 * value.mean:.1f} % (95 % interval {100 * low:.1f} to {100 * high:.1f})"


def _gained_alone(study: Study, method: str) -> str:
    """Say what every site of a real federation gained over training by itself, where that was measured."""
    run = study.runs[method][0]
    gains = client_columns(run.summary["accuracy"], run.clients).get("gain", [])
    names = run.summary.get("names") or [f"client {client}" for client in range(run.clients)]
    told = [f"{name} {100 * gain:+.1f}" for name, gain in zip(names, gains, strict=False) if gain is not None]
    return f"Gained over training alone, in points of accuracy on own test data: {', '.join(told)}." if told else ""


def _who(study: Study, best: Standing, first: list[Standing], others: list[Standing]) -> str:
    clients = study.runs[best.method][0].clients
    sentence = (
        f"{_start(study, best, first, others)} a mean accuracy of {_accuracy(best.accuracy)} over {clients} clients"
    )
    told = _gained_alone(study, best.method)
    if best.gain is None and told:
        return f"{sentence}. {told}"
    if best.gain is None:
        missing = f"a run of '{LOCAL}' with the same networks and split"
        return f"{sentence}; without {missing}, nobody knows what taking part gained."
    interval = ""
    if best.gain.half is not None:
        interval = f" (95 % interval {100 * best.gain.low:+.1f} to {100 * best.gain.high:+.1f})"
    if abs(best.gain.mean) < LEVEL:
        return f"Nobody gained over training alone; {sentence}, level with {LOCAL}{interval}."
    side = "above" if best.gain.mean > 0 else "below"
    size = f"{100 * abs(best.gain.mean):.1f} points {side} training alone"
    unsure = ", a difference that these seeds do not resolve" if interval and not best.gain.clear else ""
    return f"{sentence}, {size}{unsure}{interval}."


def _start(study: Study, best: Standing, first: list[Standing], others: list[Standing]) -> str:
    """Call the first the best only where the seeds show it: what the tables print bold."""
    if len(first) > 1:
        return f"{_list([row.method for row in first])} are equal: {'both' if len(first) == 2 else 'all'} reached"
    if not others:
        return f"{best.method} reached"
    if numbers.winner(study) == best.method:
        return f"{best.method} was best: it reached"
    return f"{best.method} came first, though not clearly: it reached"


def _price(best: Standing, first: list[Standing]) -> str:
    sentence = f"Each client sent {amount(best.up)} and received {amount(best.down)} of payload on average"
    if best.cost:
        sentence += f" ({amount(best.wire)} on the wire)"
    if any(row.cost > best.cost for row in first):
        sentence = f"{best.method} is the cheapest of them: {sentence[0].lower()}{sentence[1:]}"
    if best.gap is None:
        return f"{sentence}."
    side = "below" if best.gap.mean < 0 else "above"
    return f"{sentence}; with all data in one place ({POOLED}) it would be {_opposite(side, best.gap)}."


def _opposite(side: str, gap: Estimate) -> str:
    size = f"{100 * abs(gap.mean):.1f} points"
    return f"{size} better" if side == "below" else f"{size} worse"


def _cautions(study: Study, best: Standing, others: list[Standing]) -> list[str]:
    found = []
    if best.seeds == 1:
        found.append("One seed only: another seed may give another order. Use --seeds 3 or more for intervals.")
    elif best.gain is not None and not best.gain.clear:
        found.append(
            f"The interval of the gain includes zero: these {best.seeds} seeds do not show that {best.method} "
            "differs from training alone."
        )
    if best.gain is not None and best.gain.mean < 0:
        found.append("No method beat training alone.")
    if best.seeds > 1:
        ties = [row.method for row in others if not numbers.ahead(study, best.method, row.method)]
        if ties:
            verb = "is" if len(ties) == 1 else "are"
            found.append(
                f"{_list(ties)} {verb} not clearly behind: the 95 % intervals over {best.seeds} seeds "
                "leave the order open."
            )
    found += [text for label, runs in study.runs.items() if (text := _lost(label, runs))]
    if len(numbers.by_networks(study, study.labels)) > 1:
        found.append("Methods have different networks: gains and prices compare the same ones, this order does not.")
    if best.took_part is not None:
        found.append(_idle(study, best))
    lost = fairness(study, best.method).lost
    if lost:
        found.append(f"{100 * lost:.0f} % of the clients would have been better off alone.")
    if study.sweep:
        found.append(
            f"Values were chosen on validation data out of {study.tries} tries for each method; with other values to "
            "try, another choice and another order are possible."
        )
        found += [
            f"{label}: {number} tries were equal on validation data; the first was taken."
            for label, number in equal(study).items()
        ]
    found += [
        f"{label} is a reconstruction: the paper leaves parts of it open."
        for label, runs in study.runs.items()
        if runs[0].reconstructed
    ]
    asked = study.experiment or {}
    own = {label: _unlike(asked, given) for label, given in asked.get("settings", {}).items() if label in study.runs}
    found += [f"Settings of their own: {text}." for text in own_settings(own)]
    return [*found, *study.notes]


def _unlike(experiment: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return those settings of a label that are not the ones of all."""
    common = {}
    for full in given:
        section, _, name = full.partition(".")
        common[full] = experiment.get(section, {}).get(name) if name else experiment.get(section)
    return {full: value for full, value in given.items() if value != common[full]}


def _idle(study: Study, best: Standing) -> str:
    """Say that some never took part, and how good the others are."""
    runs = study.runs[best.method]
    few, many = min(run.idle for run in runs), max(run.idle for run in runs)
    count = str(few) if few == many else f"{few} to {many} (by seed)"
    assert best.took_part is not None
    return (
        f"{count} of the {runs[0].clients} clients never took part in a round (no reply of theirs counted); the mean "
        f"counts them with the weights that they hold and what the server would send them. Without them {best.method} "
        f"reached {_accuracy(best.took_part)} instead of {_accuracy(best.accuracy)}."
    )


def _lost(label: str, runs: Sequence[Run]) -> str:
    """Say how many replies of a row did not count (an empty text: all did), with the first reason."""
    lines = [line for run in runs for line in run.history]
    asked = sum(len(line.get("participants", [])) for line in lines)
    spent = [{str(client) for client in line.get("spent", [])} for line in lines]
    why = [
        w for line, gone in zip(lines, spent, strict=True) for c, w in line.get("missing", {}).items() if c not in gone
    ]
    return f"{label}: {len(why)} of {asked} replies did not count. The first: {why[0]}" if why else ""


def _list(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
