"""The tables of the report, once for the page and for all other forms (`forms.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polyfed.core.errors import unknown
from polyfed.core.summary import client_columns
from polyfed.ops.estimate import estimate
from polyfed.report import attacks, charts, statistics, sweeps
from polyfed.report import fairness as numbers
from polyfed.report.cells import TIMES, Cell, Column, Table, number, percent, plain, share, size, word
from polyfed.report.runs import POOLED, Study

MEASURES: dict[str, statistics.Measure] = {  # columns of the leaderboard in which a method can be ahead
    "accuracy %": statistics.mean_accuracy,
    "took part %": statistics.of_those_who_took_part,
    "worst client %": statistics.worst_client,
    "worst decile %": statistics.of_worst_decile,
    "global %": statistics.global_model,
    "own test %": statistics.on_own_data,
    "vs. local": statistics.mean_accuracy,  # the difference of two gains is that of the accuracies
}


def leaderboard(study: Study) -> Table:
    """Who is how good at which cost."""
    rows = statistics.leaderboard(study)
    if study.many:  # family by family, the best first
        rows = sorted(rows, key=lambda row: (study.family(row.method), -row.accuracy.mean))
    prices = {row.method: (row.method, row.cost, row.accuracy.mean) for row in rows if row.method != POOLED}
    beaten: dict[str, str | None] = {}
    for group in statistics.by_networks(study, prices):
        beaten |= statistics.beaten_by([prices[label] for label in group])
    metrics = statistics.metric_names(study)
    columns = [
        Column("method", number=False),
        Column("family", "what kind of thing travels", number=False),
        Column("accuracy %", "mean over clients; mean and 95 % interval over seeds"),
        Column("took part %", "mean over the clients that took part in a round"),
        Column("worst client %", "the lowest accuracy of any client"),
        Column("worst decile %", "mean of the worst tenth of the clients"),
        Column("global %", "the server's own model, where the method makes one"),
        Column("own test %", "mean over clients, each on test data of its own"),
        *(Column(name, "mean over clients on the common test set, in its own unit") for name in metrics),
        Column("vs. local", "points above training alone, paired by seed"),
        Column("vs. centralized", "points above all data in one place, paired by seed"),
        Column("beaten by", "the best with the same networks that is more accurate for no more bytes", number=False),
        Column("sent", "payload sent by a client in all, by the papers' formulas"),
        Column("received", "payload received by a client in all, by the papers' formulas"),
        Column("on the wire", "sent and received by a client in all, as serialized: payload and framing"),
        Column("peak memory", "of the process that simulated all clients"),
        Column("time", "wall-clock seconds in all, with measuring"),
    ]
    cells = [
        [
            Cell(study.named(row.method), row.method),
            word(study.family(row.method) if study.many else None),
            share(row.accuracy),
            share(row.took_part),
            share(row.worst),
            share(row.decile),
            share(row.shared),
            share(statistics.over_seeds(study, row.method, statistics.on_own_data)),
            *(plain(statistics.over_seeds(study, row.method, statistics.metric(name))) for name in metrics),
            share(row.gain, signed=True),
            share(row.gap, signed=True),
            word(beaten.get(row.method) if study.many else None),
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
    rows = [[Cell(study.named(label), label)] for label in study.labels]
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
        found = numbers.fairness(study, label)
        rows.append(
            [
                Cell(study.named(label), label),
                Cell(found.worst_tier, found.worst_tier),
                number(100 * found.worst_tier_accuracy, ".1f"),
                number(100 * found.spread, ".1f"),
                number(found.jain, ".3f"),
                number(None if found.lost is None else 100 * found.lost, ".0f", " %"),
                number(None if found.worst_loss is None else 100 * found.worst_loss, "+.1f"),
            ]
        )
    return _without_empty(Table("fairness", "Fairness", columns, rows))


def clients(study: Study, most: int | None = None) -> Table:
    """Every client of the first seed (or so many of each method): how good its model is on common and on own data."""
    found = [
        (label, runs[0], client_columns(runs[0].summary["accuracy"], runs[0].clients))
        for label, runs in study.runs.items()
    ]
    names = list(dict.fromkeys(name for _, _, columns in found for name in columns))
    shares = {"accuracy": "accuracy %", "personal": "own test %", "validation": "validation %"}
    shares |= {"alone": "alone %", "gain": "gain over alone %"}
    columns = [
        Column("method", number=False),
        Column("client", number=not any(run.summary.get("names") for _, run, _ in found)),
        Column("network", number=False),
        Column("samples", "for training"),
        *(Column(shares.get(name, name), CLIENT_HELP.get(name, "in its own unit")) for name in names),
    ]
    rows = []
    for label, run, values in found:
        method = Cell(study.named(label), label)
        for client in range(run.clients if most is None else min(most, run.clients)):
            called = run.summary.get("names")
            who = word(called[client]) if called else number(client, "d")
            cells = [method, who, word(run.architectures[client])]
            cells.append(number(run.summary["samples"][client], "d"))
            for name in names:
                value = values[name][client] if name in values else None
                cells.append(percent(value) if name in shares else number(value, ".4g"))
            rows.append(cells)
    return _without_empty(Table("clients", "Every client", columns, rows))


def trust(study: Study) -> Table:
    """Of the first seed: who was malicious, left out or missing, and what each has spent; others have no row."""
    columns = [
        Column("method", number=False),
        Column("client"),
        Column("malicious", "what it did instead of the truth; it counts in no accuracy", number=False),
        Column("left out", "rounds in which the rule against bad senders left it out"),
        Column("missing", "rounds in which its reply did not count: away, refused, or its budget was spent"),
        Column("epsilon", "privacy loss, of a sample or of the client as a whole, at the run's delta"),
        Column("unit", "whom epsilon is for", number=False),
    ]
    rows = []
    for label, runs in study.runs.items():
        run, method = runs[0], Cell(study.named(label), label)
        attack = run.config.get("trust", {}).get("attack") or "yes"
        spent = run.summary.get("privacy", {})
        for client in range(run.clients):
            bad = any(client in line.get("malicious", ()) for line in run.history)
            out = sum(client in line.get("left_out", ()) for line in run.history)
            gone = sum(str(client) in line.get("missing", {}) for line in run.history)
            epsilon = spent.get("epsilon", {}).get(str(client))
            if bad or out or gone or epsilon is not None:
                cells = [method, number(client, "d"), word(attack if bad else None)]
                cells += [number(out or None, "d"), number(gone or None, "d"), number(epsilon, ".4g")]
                rows.append([*cells, word(spent.get("unit", "sample") if epsilon is not None else None)])
    return _without_empty(Table("trust", "Trust", columns, rows))


def kept(study: Study) -> Table:
    """Return what honest clients keep of the accuracy of the same run without attack and rule, where there is one."""
    columns = [
        Column("method", number=False),
        Column("attack", "what malicious clients do", number=False),
        Column("rule", "how bad senders are left out", number=False),
        Column("honest %", "mean accuracy of the honest clients"),
        Column("clean %", "of the same clients, without attack and without rule"),
        Column("kept %", "the share of it that they keep"),
        Column("least kept %", "by the honest client that keeps least"),
    ]
    rows = [
        [Cell(study.named(one.label), one.label), word(one.attack), word(one.rule)]
        + [share(value) for value in (one.honest, one.clean, one.share, one.least)]
        for one in attacks.kept(study)
    ]
    return Table("kept", "What honest clients keep", columns, rows)


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
        total, method = sum(line[3] for line in lines), Cell(study.named(label), label)
        for step, direction, kind, bytes_ in sorted(lines, key=lambda line: -line[3]):
            name = charts.kind_name(kind)
            where = "sent" if direction == "up" else "received"
            words = [Cell(word, word) for word in (step, where, name)]
            rows.append([method, *words, size(bytes_), number(100 * bytes_ / total if total else None, ".1f", " %")])
    return Table("wire", "What crossed the wire", columns, rows)


def sweep(study: Study) -> Table:
    """Every try of a sweep; without one there is no row."""
    columns = [
        Column("method", number=False),
        Column("values", number=False),
        Column("validation %", "mean over clients on their own validation data; this decides"),
        Column("test %", "mean over clients on the common test set"),
        Column("chosen", number=False),
    ]
    rows = [
        [
            Cell(study.named(label), label),
            word(values),
            share(estimate(validation)),
            share(estimate(test)),
            word("yes" if chosen else ""),
        ]
        for label, values, validation, test, chosen in sweeps.rows(study)
    ]
    return Table("sweep", "What was tried", columns, rows)


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
    "clients": clients,
    "trust": trust,
    "kept": kept,
    "wire": wire,
    "sweep": sweep,
}
CLIENT_HELP = {
    "accuracy": "on the common test set: general",
    "personal": "on its own test data: personal",
    "validation": "on its own validation data",
}


def make(study: Study, name: str) -> Table:
    """Return a table by name."""
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    return TABLES[name](study)
