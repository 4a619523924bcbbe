"""The sentences: what is claimed, and when the reader is warned."""

from __future__ import annotations

from report_runs import make_run

from polyfed.report.runs import Study
from polyfed.report.words import answer


def study(gains, others=(), seeds=3):
    """Return a study of local, alpha (by these gains) and further methods (by theirs)."""
    runs = {"local": [make_run("local", s, [[0.5] * 3]) for s in range(seeds)]}
    for name, values in (("alpha", gains), *others):
        runs[name] = [make_run(name, s, [[0.5 + value] * 3], up=3000, down=6000) for s, value in enumerate(values)]
    return Study(runs)


def test_a_clear_winner_is_stated_without_a_caution():
    found = answer(study([0.10, 0.11, 0.12], [("beta", [0.01, 0.02, 0.03])]))
    assert found.sentences[0].startswith("alpha was best: it reached a mean accuracy of 61.0 %")
    assert "11.0 points above training alone (95 % interval +8.5 to +13.5)" in found.sentences[0]
    assert (
        found.sentences[1] == "Each client sent 1.0 kB and received 2.0 kB of payload on average (6.0 kB on the wire)."
    )
    assert found.cautions == []


def test_a_rival_within_the_interval_is_named():
    found = answer(study([0.10, 0.11, 0.12], [("beta", [0.08, 0.12, 0.11]), ("gamma", [0.0, 0.01, 0.0])]))
    assert any(text.startswith("beta is not clearly behind") for text in found.cautions)
    assert not any("gamma" in text for text in found.cautions)


def test_a_gain_that_may_be_zero_is_not_sold_as_one():
    found = answer(study([0.10, -0.05, 0.02]))
    assert any("includes zero" in text for text in found.cautions)


def test_one_seed_is_a_caution():
    found = answer(study([0.10], seeds=1))
    assert any(text.startswith("One seed only") for text in found.cautions)
    assert "interval" not in found.sentences[0]


def test_losing_to_local_is_said():
    found = answer(study([-0.10, -0.11, -0.12]))
    assert "below training alone" in found.sentences[0]
    assert "No method beat training alone." in found.cautions
    assert any(text.startswith("100 % of the clients") for text in found.cautions)


def test_without_local_nothing_is_claimed_about_the_gain():
    found = answer(Study({"alpha": [make_run("alpha", 0, [[0.5] * 3])]}))
    assert "without a run of 'local'" in found.sentences[0]


def test_only_references():
    found = answer(Study({"local": [make_run("local", 0, [[0.5] * 3])]}))
    assert found.sentences == ["No method that exchanges anything was run: local reached 50.0 %."]


def test_an_interval_of_accuracies_stays_within_0_and_100():
    found = answer(study([0.3, 0.5, 0.4]))
    assert "to 100.0)" in found.sentences[0]


def test_clients_that_never_took_part_are_named_with_both_means():
    runs = [make_run("alpha", seed, [[0.2, 0.4, 0.6]]) for seed in (0, 1)]
    for run, active in zip(runs, ([1, 2], [2]), strict=True):
        values = [run.per_client[client] for client in active]
        run.summary["accuracy"]["took_part"] = {"mean": sum(values) / len(values), "clients": active}
    found = answer(Study({"alpha": runs}))
    (said,) = [text for text in found.cautions if "took part" in text]
    assert said.startswith("1 to 2 (by seed) of the 3 clients never took part in a round")
    assert "Without them alpha reached 55.0 %" in said and "instead of 40.0 %" in said
