"""Which runs and which scale a claim is judged by, and what to believe then."""

import json

import pytest

from polyfed.reproduce.entries import Entry, read_entries, read_entry
from polyfed.reproduce.pages import pages, verdicts
from polyfed.reproduce.results import Result, read_result, write_result
from polyfed.reproduce.standing import known, standing


@pytest.mark.parametrize(("sign", "place_of_it"), [(1, "stands"), (-1, "does not")])
def test_what_to_believe_follows_from_the_verdicts(place, sign, place_of_it):
    entry = read_entry(place / "experiments" / "papers" / "ams" / "table9.toml")
    values = {str(seed): seed / 10 for seed in range(5)}
    result = Result(entry.path, "mini")
    result.case("two").runs = {
        "ams": {seed: {"global": 75 + sign * (4 + value)} for seed, value in values.items()},
        "ensemble": {seed: {"global": 75.0} for seed in values},
        "wild": {seed: {"global": 1.0} for seed in values},  # a change of ours: no claim of the paper
    }
    write_result(place, entry, result)
    told = "\n".join(standing("AMS", known(entry, place), 3))
    assert "**AMS** (1 of 3 entries measured, 0 of their claims and numbers open)" in told
    stands, falls = told.index("- stands"), told.index("- does not")
    parts = {"stands": told[stands:falls], "does not": told[falls:]}
    claim = (
        f"    - [table9](ams.md#table9) mini (on digits): ams - ensemble {sign * 4.2:+.2f} (two, the paper's +10.00)"
    )
    assert claim in parts.pop(place_of_it)
    (other,) = parts.values()
    assert "nothing yet" in other and "table9" not in other
    assert "wild" not in told


def results_of(entry, scales):
    """Write results: scale -> label -> the numbers of its seeds."""
    for scale, labels in scales.items():
        result = Result(entry.path, scale)
        made = entry.experiment(scale, entry.cases(scale)[0])
        result.case("two").settings = json.loads(json.dumps(made.dump()))
        result.case("two").runs = {
            label: {str(seed): {"global": number, "seconds": 60.0} for seed, number in enumerate(found)}
            for label, found in labels.items()
        }
        yield scale, result


def test_a_claim_counts_at_the_largest_scale_that_has_the_seeds_for_it(place):
    entry = read_entry(place / "experiments" / "papers" / "ams" / "table9.toml")
    better, worse, even = [78, 79, 80, 81, 82], [61, 62, 63, 64, 65], [70] * 5
    few = {"ams": better[:4], "ensemble": even[:4]}
    made = dict(results_of(entry, {"mini": {"ams": worse, "ensemble": even}, "paper": few}))
    for result in made.values():
        write_result(place, entry, result)
    assert [(one.scale, one.verdicts) for one in known(entry, place)] == [("mini", ["refuted"])]
    ((_, result),) = results_of(entry, {"paper": {"ams": better, "ensemble": even}})
    write_result(place, entry, result)
    assert [(one.scale, one.verdicts) for one in known(entry, place)] == [("paper", ["reproduced"])]
    index = pages(place)["README.md"]
    assert "measured claims: 1 reproduced, 0 holds, 0 refuted, 0 not resolved" in index
    assert "| 1 reproduced | paper | 5 | 10 |" in index
    assert "ams - ensemble +10.00 (two, the paper's +10.00) reproduced" in index


@pytest.mark.parametrize(
    ("paper", "mini", "scale"), [(2, 4, "paper"), (2, 5, "mini"), (0, 1, "mini"), (5, 5, "paper"), (4, 0, "paper")]
)
def test_before_any_scale_has_enough_seeds_the_largest_with_some_counts(place, paper, mini, scale):
    entry = read_entry(place / "experiments" / "papers" / "ams" / "table9.toml")
    seeds = {"paper": paper, "mini": mini}
    made = results_of(entry, {name: {"ams": [80] * n, "ensemble": [70] * n} for name, n in seeds.items()})
    for _, result in made:
        write_result(place, entry, result)
    assert [one.scale for one in known(entry, place)] == [scale]


def test_the_index_tells_what_has_no_verdict_yet_from_what_is_outdated(place):
    entry = read_entry(place / "experiments" / "papers" / "ams" / "table9.toml")
    ((_, result),) = results_of(entry, {"mini": {"ams": [80] * 4}})  # nobody to compare with
    write_result(place, entry, result)
    index = pages(place)["README.md"]
    assert "| measured, no verdict | mini | 4 | 4 |" in index and "1 of 1 entries have a result" in index
    result.case("two").settings["rounds"] = 7
    write_result(place, entry, result)
    index = pages(place)["README.md"]
    assert "| not counted, with earlier settings | mini | 4 | 4 |" in index
    assert "0 of 1 entries have a result" in index


def test_runs_with_earlier_settings_are_paired_with_nothing(place):
    """The file keeps them until new ones are made, but no verdict and no table has both."""
    entry = read_entry(place / "experiments" / "papers" / "ams" / "table9.toml")
    ((_, result),) = results_of(entry, {"mini": {"ams": [80] * 5, "ensemble": [70] * 5}})
    result.case("two").settings["methods"]["ams"] = {"epochs": 3}
    write_result(place, entry, result)
    assert [one.verdicts for one in known(entry, place)] == [[]] and verdicts(entry, "mini", result) == []
    page = pages(place)["ams.md"]
    assert "| AMS-top1 (`ams`) | 0 |  | 80 |" in page and "| ensemble | 5 | 70.0" in page
    assert "5 of 15 runs with the settings of today" in page
    assert len(read_result(place, entry, "mini").cases["two"].runs["ams"]) == 5


def test_a_scale_may_have_claims_of_its_own():
    told = {
        "title": "t",
        "claims": ["a - b", "a - c > 0"],
        "mini": {"claims": ["a - b"]},
        "paper": {},
        "cases": {"one": {}, "two": {"claims": ["a - c > 0", "c - b < 0"]}},
    }
    entry = Entry("ams", "table9", {}, told)
    found = {
        scale: [[c.words("local") for c in entry.claims(case, scale)] for case in entry.cases(scale)]
        for scale in ("mini", "paper")
    }
    assert found == {"mini": [["a - b"], ["a - b"]], "paper": [["a - b", "a - c"], ["a - c", "c - b"]]}


def test_a_case_that_another_scale_names_otherwise_is_the_same(place):
    file = place / "experiments" / "papers" / "ams" / "table9.toml"
    more = '[paper.cases.two-paper]\nsame = "two"\ntitle = "two"\nnumbers.global = {ams = 80.0, ensemble = 70.0}\n'
    text = file.read_text().replace("[paper.mini]\n", '[paper.mini]\ncases = ["two"]\n')
    file.write_text(text.replace("[paper.paper]\n", '[paper.paper]\ncases = ["two-paper"]\n') + more)
    entry = read_entry(file)
    worse, better, even = [61, 62, 63, 64, 65], [78, 79, 80, 81, 82], [70] * 5
    for _scale, result in results_of(entry, {"mini": {"ams": worse, "ensemble": even}}):
        write_result(place, entry, result)
    for _scale, result in results_of(entry, {"paper": {"ams": better, "ensemble": even}}):
        result.cases["two-paper"] = result.cases.pop("two")
        write_result(place, entry, result)
    assert [(one.scale, one.verdicts) for one in known(entry, place)] == [("paper", ["reproduced"])]


def test_a_claim_of_two_entries_from_the_same_runs_counts_once(place):
    first = place / "experiments" / "papers" / "ams" / "table9.toml"
    (first.parent / "fig9.toml").write_text(first.read_text())
    for entry in read_entries(place):
        for _, result in results_of(entry, {"paper": {"ams": [78, 79, 80, 81, 82], "ensemble": [70] * 5}}):
            write_result(place, entry, result)
    index = pages(place)["README.md"]
    assert "measured claims: 1 reproduced, 0 holds, 0 refuted, 0 not resolved" in index
    assert index.count("| 1 reproduced | paper | 5 |") == 2 and index.count("+10.00 (two, the paper's +10.00)") == 1
    (first.parent / "fig9.toml").write_text(first.read_text().replace("limit = [120, 60]", "limit = [130, 60]"))
    (entry,) = [entry for entry in read_entries(place) if entry.name == "fig9"]
    for _, result in results_of(entry, {"paper": {"ams": [78, 79, 80, 81, 82], "ensemble": [70] * 5}}):
        write_result(place, entry, result)
    assert "measured claims: 2 reproduced" in pages(place)["README.md"]


def test_a_claim_about_counted_numbers_is_judged_by_its_sign(place):
    told = {
        "title": "t",
        "count": "fedin_overheads",
        "claims": ["a:memory - b:memory = 0", "a:memory - b:memory > 0"],
        "cases": {"all": {"numbers": {"memory": {"a": 235.3, "b": 235.0}}}},
    }
    entry = Entry("fedin", "table9", {}, told)
    result = Result(entry.path, "paper")
    result.case("all").runs = {"a": {"0": {"memory": 306.0}}, "b": {"0": {"memory": 235.0}}}
    write_result(place, entry, result)
    (one,) = known(entry, place)
    assert [row.judged.verdict for row in one.rows] == ["refuted", "holds"]
    assert one.verdicts == ["holds", "reproduced", "refuted", "holds"]  # two numbers, two claims
    told_of = "\n".join(standing("FedIN", [one], 1))
    assert "- computed, and near the paper's numbers:\n    - [table9](fedin.md#table9) paper: 1 of 2 numbers" in told_of
