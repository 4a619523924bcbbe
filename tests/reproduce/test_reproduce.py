"""An entry from its file to a page: budget and resume, diverging runs, what a page says, this project's pages."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.reproduce.conftest import ENTRY
from typer.testing import CliRunner

from polyfed.cli.commands import app
from polyfed.cli.reproduce import parse_budget
from polyfed.core.checkpoint import read_json, write_json
from polyfed.core.errors import InputError
from polyfed.reproduce.cost import AGAIN, USUAL, Speed, guess, in_words, left, minutes_of, operations, seconds_of
from polyfed.reproduce.entries import Entry, home, read_entries, read_entry
from polyfed.reproduce.figures import cka, draw_axis, draw_curves, on_axis
from polyfed.reproduce.pages import FOLDER, pages, told, verdicts
from polyfed.reproduce.quantities import held_accuracy, values_from
from polyfed.reproduce.queue import queue
from polyfed.reproduce.results import Measured, Result, file_of, forget, judged, read_result, write_result
from polyfed.reproduce.running import Clock, Part, Plan, reproduce
from polyfed.reproduce.standing import known


def run(place, clock=None, started=None, only=Part()):  # noqa: B008 (frozen)
    entry = read_entry(place / "experiments" / "papers" / "ams" / "table9.toml")
    watch = (
        (lambda config, case, where: started.append((config.label, config.seed, where)) or ())
        if started is not None
        else None
    )
    runs, clock = place / "runs", clock or Clock()
    return entry, *reproduce(entry, "mini", place, runs, clock, lambda _config: 0.1, watch, "told", "auto", only)


class Ticks:
    """A clock that goes on by one second whenever somebody looks."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        self.seconds += 1.0
        return self.seconds


@pytest.mark.long
def test_an_entry_stops_with_its_budget_and_goes_on(place):
    begun = []
    entry, _, whole = run(place, Clock(12.0, Ticks()), begun)
    assert not whole and 0 < len(begun) < 15
    assert begun[0][:2] == ("ams", 0) and begun[0][2].total == 15 and begun[0][2].number == 1
    file = file_of(place, entry, "mini")
    kept = json.loads(file.read_text())
    assert kept["command"] == "told" and kept["versions"]["polyfed"]
    assert [scale for _, scale in queue([entry], place)] == ["mini", "paper"]
    again = []
    entry, result, whole = run(place, None, again)
    assert whole and not {start[:2] for start in again} & {("ams", 0)}  # nothing finished is run again
    case = result.cases["two"]
    assert set(case.failed["wild"]) == set("01234") and "loss of client" in case.failed["wild"]["0"]
    assert {label: len(seeds) for label, seeds in case.runs.items()} == {"ams": 5, "ensemble": 5}
    assert read_result(place, entry, "mini") == result
    assert [scale for _, scale in queue([entry], place)] == ["paper"]
    nothing = []
    run(place, None, nothing)
    assert nothing == []


def test_a_part_of_an_entry_is_run_alone_and_the_rest_later(place):
    begun = []
    entry, result, whole = run(place, started=begun, only=Part(rows=("ensemble",), cases=("two",)))
    assert whole and {start[0] for start in begun} == {"ensemble"} and begun[0][2].total == 5
    assert {label: len(seeds) for label, seeds in result.cases["two"].runs.items()} == {"ensemble": 5}
    assert read_result(place, entry, "mini") == result
    assert [scale for _, scale in queue([entry], place)] == ["mini", "paper"]  # two rows are missing
    later = []
    run(place, started=later, only=Part(rows=("ams", "ensemble")))
    assert {start[0] for start in later} == {"ams"}


@pytest.mark.parametrize(
    ("part", "told"), [(Part(rows=("amsel",)), "rows ams, ensemble, wild"), (Part(cases=("iid",)), "cases two")]
)
def test_a_part_that_an_entry_does_not_have_is_refused(place, part, told):
    with pytest.raises(InputError, match=f"ams/table9 at scale mini has {told}, not"):
        run(place, only=part)
    assert not (place / "runs").exists()


@pytest.mark.long
def test_runs_of_another_version_are_not_paired_with_new_ones(place):
    entry, result, _ = run(place)
    known = result.cases["two"].runs["ams"]["0"].copy()
    result.versions["polyfed"] = "0.0.1"
    result.cases["two"].runs["ams"]["0"]["global"] = 99.0
    write_result(place, entry, result)
    assert read_result(place, entry, "mini").cases["two"].runs["ams"]["0"]["global"] == 99.0
    _, again, _ = run(place)
    assert again.cases["two"].runs["ams"]["0"] == known and again.versions["polyfed"] != "0.0.1"


def test_runs_on_disk_with_other_settings_of_their_label_are_not_taken_in(place):
    """A folder is named by the settings of all labels: a method's own may have changed since."""
    run(place)
    file = place / "experiments" / "papers" / "ams" / "table9.toml"
    file.write_text(
        file.read_text().replace("[methods.wild]", "[methods.ensemble]\nsettings = {lr = 0.2}\n[methods.wild]")
    )
    with pytest.raises(InputError, match="ensemble"):
        run(place)


@pytest.mark.long
def test_runs_of_another_version_on_disk_are_refused(place):
    entry, _, _ = run(place)
    file_of(place, entry, "mini").unlink()
    folder = place / "runs" / entry.folder("mini", entry.cases()[0]) / "ams" / "seed-0"
    kept = read_json(folder / "result.json")
    kept["versions"]["polyfed"] = "0.0.1"
    write_json(folder / "result.json", kept)
    with pytest.raises(InputError, match=r"seed-0 was run by polyfed 0\.0\.1, .* \(--runs\)"):
        run(place)


@pytest.mark.parametrize("name", ["fedvtc/table2", "ams/fig2", "fedin/table4", "ams/table3"])
def test_a_scale_that_an_entry_does_not_have_is_refused_before_anything_is_written(place, name):
    (entry,) = [one for one in read_entries(home(Path(__file__).parents[2])) if one.path == name]
    with pytest.raises(InputError, match=f"Unknown scale of {name} 'huge'"):
        reproduce(entry, "huge", place, place / "runs", Clock(), lambda _config: 0.1)
    assert not (place / "results").exists()


@pytest.mark.long
def test_held_labels_are_measured_again_from_the_run(place):
    entry, result, _ = run(place)
    folder = place / "runs" / entry.folder("mini", entry.cases()[0]) / "ams" / "seed-0"
    values = result.cases["two"].runs["ams"]["0"]
    assert values["held"] == held_accuracy(folder) >= values["global"]
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert values["global"] == pytest.approx(100 * history[-1]["accuracy"]["global"], abs=1e-4)


def test_what_a_page_says(place):
    entry, result, _ = run(place)
    rows = judged(entry, "mini", result)
    assert [(row.gain, row.fix, row.judged.seeds) for row in rows] == [(10.0, "", 5), (-69.0, "a wild rate", 0)]
    assert verdicts(entry, "mini", result) == [rows[0].judged.verdict]
    assert rows[0].judged.verdict != "reproduced"  # other data
    made = pages(place)
    assert set(made) == {"README.md", "ams.md"}
    assert "wild (ours: a wild rate)" in made["ams.md"] and "wild failed with seed 0" in made["ams.md"]
    assert (
        "**paper**: not measured" in made["ams.md"]
        and "Claims: 2, corrected for together (Holm); 1 have" in made["ams.md"]
    )
    assert "digits (120 images); 3 clients; 2 rounds of 2 epochs; `mlp:1x8`." in made["ams.md"]
    assert "| AMS-top1 (`ams`) | 5 |" in made["ams.md"] and "| ensemble | 5 |" in made["ams.md"]
    assert "1 of 1 entries have a result" in made["README.md"]
    file_of(place, entry, "mini").unlink()
    assert "| not measured |" in pages(place)["README.md"] and known(entry, place) == []


def test_a_row_of_a_reconstruction_is_marked():
    (entry,) = [entry for entry in read_entries(home()) if entry.path == "fedfd/table5"]
    case = entry.cases("mini")[0]
    runs = {label: {"0": {"global": 50.0}} for label in ("msfkd", "fedfd")}
    lines = told(entry, "mini", Result(entry.path, "mini", cases={case.name: Measured(runs=runs)}))
    assert [line.split("|")[1].strip() for line in lines if line.startswith(("| msfkd", "| fedfd"))] == [
        "msfkd (reconstruction)",
        "fedfd",
    ]


def test_claims_of_a_case_that_the_paper_does_not_have_are_ours():
    told = {"title": "t", "claims": ["a - b > 0"], "mini": {}, "cases": {"theirs": {}, "more": {"ours": "other data"}}}
    entry = Entry("ams", "table9", {}, told)
    runs = {label: {str(seed): {"local": value + seed} for seed in range(5)} for label, value in (("a", 1.0), ("b", 0))}
    result = Result("ams/table9", "mini", cases={name: Measured(runs=runs) for name in ("theirs", "more")})
    assert [row.fix for row in judged(entry, "mini", result)] == ["", "other data"]
    assert verdicts(entry, "mini", result) == ["holds"]  # one claim of the paper, not two


def test_the_last_stages_are_named_by_their_place(monkeypatch):
    """The mini has two stages and the paper four: a claim about the last one is the same claim."""
    means = {"stem": 0.9, "stage 1": 0.8, "stage 2": 0.7, "logits": 0.1}
    stages = {name: {"mean": value} for name, value in means.items()}
    monkeypatch.setattr("polyfed.analysis.opening.open_run", lambda folder: folder)
    monkeypatch.setattr("polyfed.analysis.cka.compare_clients", lambda *_: {"stages": stages})
    monkeypatch.setattr("polyfed.analysis.cka.cka_figures", lambda found: {})
    numbers, _ = cka(Path())
    assert (numbers["cka last stage"], numbers["cka last but one stage"]) == (0.7, 0.8)
    del stages["stage 2"]
    assert "cka last but one stage" not in cka(Path())[0]


def test_runs_with_other_settings_than_the_entry_are_forgotten(place):
    """An entry that was corrected is measured again, and what it shares with the old one stays."""
    file = place / "experiments" / "papers" / "ams" / "table9.toml"
    entry = read_entry(file)
    made = entry.experiment("mini", entry.cases()[0])
    told = json.loads(json.dumps(made.dump()))

    def left(now):
        runs = {label: {"0": {"global": 1.0}} for label in ("ams", "ensemble", "wild")}
        measured = Measured(told, runs, curves={"wild": {"0": [[1, 2.0]]}})
        forget(measured, now)
        assert set(measured.curves) <= set(measured.runs)
        return set(measured.runs)

    assert left(made) == {"ams", "ensemble", "wild"}
    assert left(replace(made, compare=("ams",), seeds=9)) == {"ams", "ensemble", "wild"}
    assert left(replace(made, base=replace(made.base, rounds=3))) == set()
    other = replace(made.base, execution=replace(made.base.execution, engine="threads"))
    assert left(replace(made, base=other)) == {"ams", "ensemble", "wild"}
    assert left(replace(made, settings={"wild": {"training.lr": 1.0}})) == {"ams", "ensemble"}
    assert left(replace(made, methods={**made.methods, "ams": {"top_k": 2}})) == {"ensemble", "wild"}
    del told["training"]["lr"]  # a setting that is new since
    assert left(made) == {"ams", "ensemble", "wild"}


def test_curves_are_drawn(tmp_path):
    told = {"title": "t", "curve": "local", "mini": {}, "cases": {"one": {"title": "One"}, "two": {}}}
    entry = Entry("ams", "fig9", {}, told)
    result = Result("ams/fig9", "mini")
    result.case("one").curves = {"a": {"0": [[1, 10.0], [2, 20.0]], "1": [[1, 20.0], [2, 40.0]]}}
    draw_curves(entry, "mini", result, tmp_path)
    assert result.figures == ["ams-fig9-mini-one-curves.png"]  # nothing was measured of the other case
    assert (tmp_path / "docs" / "reproductions" / "figures" / result.figures[0]).stat().st_size > 1000


def test_a_result_that_somebody_edited_is_refused(place):
    entry, _, _ = run(place)
    file = file_of(place, entry, "mini")
    file.write_text(file.read_text().replace('"scale": "mini"', '"scale": "paper"'))
    with pytest.raises(Exception, match="damaged or was edited"):
        pages(place)


def test_the_pages_of_this_project_are_those_of_its_files():
    """Written by `polyfed reproduce --pages`, from the result files and nothing else."""
    root = home(Path(__file__).parents[2])
    made = pages(root)
    there = {path.name: path.read_text() for path in (root / FOLDER).glob("*.md")}
    assert there == made
    shown = {name for text in made.values() for name in _pictures(text)}
    assert shown == {path.name for path in (root / FOLDER / "figures").glob("*.png")}


def _pictures(text):
    return [part.split(")")[0] for part in text.split("](figures/")[1:]]


def test_every_result_belongs_to_an_entry():
    root = home(Path(__file__).parents[2])
    known = {file_of(root, entry, scale) for entry in read_entries(root) for scale in entry.scales}
    there = set((root / "results" / "reproductions").rglob("*.json")) - {root / "results/reproductions/costs.json"}
    assert there <= known
    for entry in read_entries(root):
        for scale in entry.scales:
            result = read_result(root, entry, scale)
            if result is not None:  # a case that was named anew would be lost
                assert result.cases.keys() <= {case.name for case in entry.cases()}, (entry.path, scale)
                assert (result.entry, result.scale) == (entry.path, scale)


def line(number, phase, mean, worst, each, stages, **more):
    told = {"mean": mean, "worst": worst, "per_client": each, **more}
    return {
        "round": number,
        "phase": phase,
        "accuracy": told,
        "stages": {name: {"mean": value} for name, value in stages.items()},
    }


HISTORY = [
    line(0, "before", 0.2, 0.1, [0.2], {"initial": 0.2}) | {"seconds": {"total": 5.0, "saved": 4.0}},
    line(1, "round", 0.4, 0.1, [0.3, 0.5], {"distilled": 0.6}, **{"global": 0.5}),
    line(2, "round", 0.6, 0.3, [0.3, 0.9], {"distilled": 0.7}, **{"global": 0.7}),
]
RESULT = {
    "cost": {"bytes_up": 4e6, "bytes_down": 2e6, "peak_memory": 5e6, "seconds": {"total": 9.0}},
    "architectures": ["a", "b"],
}


def test_quantities_by_hand():
    found = values_from(HISTORY, RESULT, last=2, target=65.0)
    assert found == {
        "local": 50.0, "worst": 20.0, "best": 70.0, "global": 60.0, "wobble": 10.0, "initial": 20.0, "distilled": 65.0,
        "unrest": 10.0, "area": 60.0,
        "personalized": 50.0, "gap": 15.0, "rounds": 2.0, "mb_up": 2.0, "mb_down": 1.0, "memory": 5.0, "seconds": 5.0,
    }  # fmt: skip
    assert values_from(HISTORY, RESULT, target=71.0)["rounds"] == 3.0  # never reached
    clients = values_from(HISTORY, RESULT, target=45.0, of="local")  # 40 %, then 60 %
    assert (clients["rounds"], clients["area"], values_from(HISTORY, RESULT, target=45.0)["rounds"]) == (2.0, 50.0, 1.0)
    after = {"round": 2, "phase": "after", "accuracy": {"mean": 0.8, "worst": 0.3, "per_client": [0.8]}}
    fine = values_from([*HISTORY, after], RESULT)
    assert (fine["local"], fine["before"]) == (80.0, 60.0)


def test_costs_are_counted_from_the_networks(place):
    assert operations("mlp:1x100", (1, 28, 28)) == 2 * (784 * 100 + 100 * 10)
    entry = read_entry(place / "experiments" / "papers" / "ams" / "table9.toml")
    speed = Speed(1e9, 1e-3)
    config = entry.experiment("mini", entry.cases()[0]).config("ensemble")
    assert 0 < seconds_of(config, speed) < 60
    assert minutes_of(entry, "mini", place, lambda _config: 4.0) == 1.0  # 15 runs
    known = {"ensemble": {"0": {"seconds": 20.0}, "1": {"seconds": 40.0}}}
    write_result(place, entry, Result(entry.path, "mini", cases={"two": Measured(runs=known)}))
    assert minutes_of(entry, "mini", place, lambda _config: 0.0) == 2.5  # five of half a minute, as its runs took


def test_what_is_left_is_guessed_by_the_settings_of_each_run(place):
    cases = {"few": {"settings": {"clients": 2}}, "many": {"settings": {"clients": 7}}}
    values = {"data": "digits", "models": ["mlp:1x8"], "rounds": 1, "seeds": 5, "compare": ["local", "fedavg"]}
    entry = Entry("ams", "table8", values, {"title": "t", "mini": {}, "cases": cases})
    result = Result(entry.path, "mini", cases={"few": Measured(runs={"local": {"0": {"seconds": 30.0}}})})
    found = Plan(entry, "mini", result, lambda config: float(config.data.clients)).guesses()
    assert found == {("few", "local"): 30, ("few", "fedavg"): 2, ("many", "local"): 7, ("many", "fedavg"): 7}


def test_perceptrons_are_stacked_and_trained_once():
    """By hand: 4 clients, 64 images in all, 2 epochs of batches of 16 are 8 steps, or 2 of a stack."""
    speed = Speed(1.0, 1.0, 1e30)  # only the overhead counts
    values = {"data": "digits", "limit": [64, 1], "clients": 4, "partition": "iid", "models": ["mlp:1x8"], "rounds": 1,
              "epochs": 2, "batch_size": 16, "seeds": 5, "compare": ["ams", "full"],
              "methods": {"full": {"method": "ams", "top_k": "all"}}}  # fmt: skip
    entry = Entry("ams", "table9", values, {"title": "t", "mini": {}, "cases": {"all": {}}})
    made = entry.experiment("mini", entry.cases()[0])
    stacked = seconds_of(made.config("ams"), speed)
    assert stacked == pytest.approx(USUAL * 2)
    threads = replace(made.base, execution=replace(made.base.execution, engine="threads"))
    assert seconds_of(replace(made, base=threads).config("ams"), speed) == pytest.approx(USUAL * 8)
    found = minutes_of(entry, "mini", Path("nowhere"), guess(speed))
    assert found == round(5 * stacked * (1 + AGAIN) / 60, 1)


@pytest.mark.long
def test_the_command(place, monkeypatch):
    monkeypatch.chdir(place)

    def polyfed(*words):
        done = CliRunner().invoke(app, ["reproduce", *words])
        assert done.exit_code == 0, done.output
        return done.output

    assert "ams/table9" in (listed := polyfed()) and "    mini    not measured, about a minute" in listed
    assert "budget is used up" in polyfed("ams/table9", "--scale", "mini", "--budget", "0s", "--quiet")
    some = polyfed("ams/table9", "--scale", "mini", "--rows", "ams, ensemble", "--cases", "two", "--quiet")
    assert "| two | ams - ensemble | +10.00 |" in some
    refused = CliRunner().invoke(app, ["reproduce", "--next", "--rows", "ams"])
    assert refused.exit_code != 0 and "--scale" in str(refused.exception)
    assert "| two | ams - ensemble | +10.00 |" in polyfed("ams/table9", "--scale", "mini", "--quiet")
    assert "    mini    1 not resolved; seeds 5; took 0 min\n" in polyfed("ams")
    polyfed("--costs")
    polyfed("--pages")
    assert "paper**: not measured, about" in (place / "docs" / "reproductions" / "ams.md").read_text()
    assert "Left out" not in (went_on := polyfed("--next", "--scale", "mini")) and "is measured" in went_on
    entry = place / "experiments" / "papers" / "ams" / "table9.toml"
    other = ENTRY.replace('data = "digits"', 'data = "nowhere/at_all"').replace("order = 2", "order = 1")
    (entry.parent / "table1.toml").write_text(other)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    went_on = polyfed("--next", "--quiet")  # table 1 is first in the queue, and its data are not here
    assert "Left out ams/table1 at scale mini: " in went_on and "| two | ams - ensemble | +10.00 |" in went_on
    (entry.parent / "table1.toml").unlink()


def test_a_figure_over_an_axis(tmp_path):
    """Cases or labels may be values on it: a curve for each label, or for each case; what has no value is left out."""
    cases = {"a1": {"title": "one"}, "a02": {"title": "other"}, "more": {"title": "more"}}
    told = {"title": "t", "mini": {}, "cases": cases, "quantity": "held"}
    values = {"data": "digits", "compare": ["ams", "pfnm"], "clients": 3}
    runs = {"ams": {"0": {"held": 40.0}, "1": {"held": 60.0}}, "pfnm": {"0": {"held": 10.0}, "1": {"global": 9.0}}}
    result = Result("ams/fig9", "mini", cases={"a1": Measured(runs=runs), "a02": Measured(runs={"ams": runs["pfnm"]})})
    by_case = Entry("ams", "fig9", values, told | {"axis": {"name": "alpha", "cases": {"a1": 1.0, "a02": 0.2}}})
    assert on_axis(by_case, "mini", result) == {"ams": {1.0: [40.0, 60.0], 0.2: [10.0]}, "pfnm": {1.0: [10.0]}}
    by_label = Entry("ams", "fig9", values, told | {"axis": {"name": "k", "labels": {"ams": 1}}})
    assert on_axis(by_label, "mini", result) == {"one": {1.0: [40.0, 60.0]}, "other": {1.0: [10.0]}}
    draw_axis(by_case, "mini", result, tmp_path)
    assert result.figures == ["ams-fig9-mini-axis.png"]
    assert (tmp_path / "docs" / "reproductions" / "figures" / "ams-fig9-mini-axis.png").is_file()


def test_every_place_on_an_axis_is_a_case_or_label_of_its_entry():
    for entry in read_entries(home(Path(__file__).parents[2])):
        axis = entry.told.get("axis", {})
        assert axis.get("cases", {}).keys() <= {case.name for case in entry.cases()}, entry.path
        if "labels" in axis:
            made = entry.experiment("mini", entry.cases("mini")[0])
            assert axis["labels"].keys() <= set(made.compare), entry.path
            assert set(made.compare) - axis["labels"].keys() <= entry.fixes.keys(), entry.path


def test_what_is_left_of_an_entry_and_its_price(place):
    """Three labels and five seeds: 15 runs, of which those that failed are known; other settings do not count."""
    entry = read_entry(place / "experiments" / "papers" / "ams" / "table9.toml")
    assert left(entry, "mini", None, 30.0) == "not measured, about 30 min"
    settings = json.loads(json.dumps(entry.experiment("mini", entry.cases()[0]).dump()))
    runs = {label: {str(seed): {"seconds": 1.0} for seed in range(5)} for label in ("ams", "ensemble")}
    result = Result(entry.path, "mini", cases={"two": Measured(settings, runs, {"wild": {"0": "inf", "1": "inf"}})})
    assert left(entry, "mini", result, 30.0) == "12 of 15 runs with the settings of today, the rest about 6 min"
    assert left(entry, "mini", result, None) == "12 of 15 runs with the settings of today"
    result.cases["two"].failed["wild"] = dict.fromkeys(map(str, range(5)), "inf")
    assert left(entry, "mini", result, 30.0) == ""
    assert queue([entry], place) == [(entry, "mini"), (entry, "paper")]
    write_result(place, entry, result)
    assert queue([entry], place) == [(entry, "paper")]
    result.cases["two"].settings["training"]["lr"] = 0.2
    assert left(entry, "mini", result, 30.0) == "0 of 15 runs with the settings of today, the rest about 30 min"
    assert len(result.cases["two"].runs) == 2  # nothing is dropped by looking
    write_result(place, entry, result)
    index = pages(place)["README.md"]
    assert "| not counted, with earlier settings |" in index and "0 of 1 entries have a result" in index
    assert "| +10.00 | not measured | not counted: earlier settings |" in pages(place)["ams.md"]
    write_result(place, entry, result)
    assert queue([entry], place) == [(entry, "mini"), (entry, "paper")]


def test_estimates_are_in_a_unit_that_one_can_picture():
    told = [in_words(minutes) for minutes in (0.2, 40, 119, 300, 60 * 24 * 10, 60 * 24 * 365 * 3)]
    assert told[:3] == ["about a minute", "about 40 min", "about 119 min"]
    assert told[3:] == ["about 5 hours", "about 10 days", "about 3 years"]


def test_budgets_are_times():
    assert [parse_budget(text) for text in (None, "45s", "60m", "1.5h")] == [None, 45.0, 3600.0, 5400.0]
    with pytest.raises(InputError, match="60m"):
        parse_budget("60")
