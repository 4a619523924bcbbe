"""The sentences: what is claimed, and when the reader is warned."""

from __future__ import annotations

import pytest
from report_runs import make_run

from polyfed.report import tables
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


def test_replies_that_did_not_count_are_named_with_the_first_reason():
    runs = [make_run("alpha", seed, [[0.2, 0.4, 0.6]]) for seed in (0, 1)]
    for run in runs:
        for number, line in enumerate(run.history):
            line |= {"participants": [0, 1, 2], "spent": [2]}
            line["missing"] = {"0": f"refused in {number}", "2": "its budget is used up"} if number == 0 else {}
    asked = sum(len(line["participants"]) for run in runs for line in run.history)
    found = answer(Study({"alpha": runs, "beta": [make_run("beta", 0, [[0.1] * 3])]}))
    said = [text for text in found.cautions if "did not count" in text]
    assert said == [f"alpha: 2 of {asked} replies did not count. The first: refused in 0"]


def test_a_tie_is_called_a_tie():
    found = answer(study([0.1, 0.2, 0.3], [("beta", [0.3, 0.2, 0.1])]))
    assert found.sentences[0].startswith("alpha and beta are equal: both reached a mean accuracy of 70.0 %")
    assert found.sentences[1].startswith("Each client sent 1.0 kB")
    assert not any("behind" in text for text in found.cautions)
    dear = Study({"dear": [make_run("dear", 0, [[0.6] * 3], up=9)], "cheap": [make_run("cheap", 0, [[0.6] * 3], up=3)]})
    assert answer(dear).sentences[1].startswith("cheap is the cheapest of them: each client sent 1 B")
    three = answer(study([0.1], [("beta", [0.1]), ("gamma", [0.1]), ("delta", [0.0])], seeds=1))
    assert three.sentences[0].startswith("alpha, beta and gamma are equal: all reached a mean accuracy of 60.0 %")


def test_where_nobody_gained_the_headline_says_so():
    alone = answer(study([0.0], seeds=1))
    assert alone.sentences[0] == (
        "Nobody gained over training alone; alpha reached a mean accuracy of 50.0 % over 3 clients, level with local."
    )
    both = answer(study([0.0, 0.0], [("beta", [0.0, 0.0])], seeds=2)).sentences[0]
    assert both.startswith("Nobody gained over training alone; alpha and beta are equal: both reached")
    assert "best" not in both


def test_a_gain_whose_interval_includes_zero_is_no_gain_in_the_headline():
    text = answer(study([0.10, -0.05, 0.02])).sentences[0]
    assert "2.3 points above training alone, a difference that these seeds do not resolve (95 % interval -16" in text
    assert "resolve" not in answer(study([0.10, 0.11, 0.12])).sentences[0]


def test_the_first_of_an_open_order_is_not_called_the_best():
    text = answer(study([0.10, 0.11, 0.12], [("beta", [0.08, 0.12, 0.11])])).sentences[0]
    assert text.startswith("alpha came first, though not clearly: it reached a mean accuracy of 61.0 %")
    assert "came first" in answer(study([0.2], [("beta", [0.1])], seeds=1)).sentences[0]


def test_it_says_who_had_settings_of_its_own():
    runs = {label: [make_run(label, 0, [[0.5] * 3])] for label in ("local", "alpha", "beta")}
    own = {"models.names": ["a", "b"], "training.lr": 0.1}
    said = answer(Study(runs, {"settings": {"alpha": own, "beta": own, "gone": own}})).cautions
    assert "Settings of their own: alpha, beta with models.names a, b; training.lr 0.1." in said


def test_the_gain_of_a_real_federation_is_in_the_answer():
    """Sites that trained by themselves as well: no run of local is needed to say what each gained."""
    from types import SimpleNamespace

    from polyfed.report.words import _gained_alone

    accuracy = {"mean": 0.8, "per_client": [0.9, 0.7], "alone": {"clients": [0, 1], "per_client": [0.75, 0.8]}}
    run = SimpleNamespace(summary={"accuracy": accuracy, "names": ["north", "south"]}, clients=2)
    told = _gained_alone(SimpleNamespace(runs={"fedavg": [run]}), "fedavg")
    assert "north +15.0, south -10.0" in told
    del accuracy["alone"]
    assert _gained_alone(SimpleNamespace(runs={"fedavg": [run]}), "fedavg") == ""


def test_a_reconstruction_is_called_one():
    runs = {"local": [make_run("local", 0, [[0.4] * 3])], "theirs": [make_run("theirs", 0, [[0.5] * 3])]}
    assert not any("reconstruction" in caution for caution in answer(Study(runs)).cautions)
    runs["theirs"][0].config["method"] = {"name": "msfkd"}
    assert "theirs is a reconstruction: the paper leaves parts of it open." in answer(Study(runs)).cautions


@pytest.mark.parametrize("name", ["leaderboard", "targets", "fairness", "clients", "wire"])
def test_rows_of_a_reconstruction_are_marked_for_people_and_not_for_programs(name):
    runs = {label: [make_run(label, 0, [[0.5] * 3], up=30, down=30)] for label in ("local", "theirs")}
    runs["theirs"][0].config["method"] = {"name": "msfkd"}
    first = [row[0] for row in tables.make(Study(runs), name).rows]
    assert {(cell.text, cell.value) for cell in first} == {("local", "local"), ("theirs (reconstruction)", "theirs")}


def test_an_order_of_different_networks_is_called_one():
    runs = {"local": [make_run("local", 0, [[0.4] * 3])], "fedmd": [make_run("fedmd", 0, [[0.5] * 3])]}
    assert not any("different networks" in caution for caution in answer(Study(runs)).cautions)
    runs["fedin"] = [make_run("fedin", 0, [[0.6] * 3], architectures=["deep"] * 3)]
    assert any("different networks" in caution for caution in answer(Study(runs)).cautions)
