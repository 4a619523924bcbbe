"""Runs of a comparison that go on at once, in several processes: the same results, whatever happens to a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polyfed.jobs as jobs_module
from polyfed.compare import compare
from polyfed.config import Config
from polyfed.core.checkpoint import read_json
from polyfed.core.errors import InputError, TrainingError
from polyfed.experiment import experiment
from polyfed.jobs import Together, free_memory, is_portable, room
from polyfed.processes import CutOff, Failed, Helper, Here, Job
from polyfed.testing.watch import timeless

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = {"limit": 150, "clients": 3, "models": ["mlp:1x8"], "rounds": 3, "checkpoint_seconds": 0}


@pytest.fixture
def helped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Note which runs helpers were given."""
    run, given = Helper.run, []

    def noted(self: Helper, job: Job, *more: Any) -> Any:
        given.append((job.name, job.config.seed))
        return run(self, job, *more)

    monkeypatch.setattr(Helper, "run", noted)
    monkeypatch.setenv("ASKER", str(os.getpid()))
    return given


def everything(out: Path) -> dict[str, Any]:
    """Return all that runs left behind and that does not depend on the clock."""
    files = [file for file in sorted(out.rglob("*")) if file.is_file() and file.parent.name != "checkpoint"]
    found: dict[str, Any] = {}
    for file in files:
        name = str(file.relative_to(out))
        if file.suffix == ".safetensors":
            found[name] = file.read_bytes()
        elif file.suffix == ".jsonl":
            found[name] = [timeless(json.loads(line)) for line in file.read_text().splitlines()]
        else:
            found[name] = timeless(read_json(file))
    return found


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for another process."""
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.02)


def test_runs_at_once_give_the_results_of_one_after_the_other(tmp_path: Path, helped: list[Any]) -> None:
    made = experiment(**{**SMALL, "models": ["mlp:1x8", "cnn:4-8"]}, seeds=2)
    labels = ["local", "fedproto", "ensemble"]
    alone = compare(made, labels, out=tmp_path / "alone", jobs=1)
    assert not helped
    together = compare(made, labels, out=tmp_path / "together", jobs=2)
    assert helped
    assert everything(tmp_path / "together") == everything(tmp_path / "alone")
    for one, two in zip(alone, together, strict=True):
        assert timeless(vars(one)) == timeless(vars(two))


def test_a_killed_process_cuts_off_its_run_alone_and_the_same_call_goes_on(
    tmp_path: Path, helped: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    made, labels = experiment(**SMALL, seeds=3), ["tests.helped:Killed", "local"]
    with pytest.raises(CutOff, match=r"1 of 6 runs were cut off.*SIGKILL") as told:
        compare(made, labels, out=tmp_path / "c", jobs=2)
    assert "the same command goes on" in str(told.value) and "tests.helped:Killed with seed" in str(told.value)
    assert len(list((tmp_path / "c").rglob("result.json"))) == 5
    compare(made, labels, out=tmp_path / "c", jobs=1)
    compare(made, labels, out=tmp_path / "undisturbed", jobs=1)
    assert everything(tmp_path / "c") == everything(tmp_path / "undisturbed")


@pytest.mark.long
def test_what_somebody_stops_goes_on_later(tmp_path: Path, helped: list[Any]) -> None:
    class Enough(Exception):
        pass

    closed: list[str] = []

    class Stopping:
        def __init__(self, label: str) -> None:
            self.label = label

        def __call__(self, line: dict[str, Any]) -> None:
            if line["round"] == 2 and threading.current_thread() is not threading.main_thread():
                raise Enough

        def close(self) -> None:
            closed.append(self.label)

    made = experiment(**{**SMALL, "rounds": 400}, seeds=2)
    begun = time.monotonic()
    with pytest.raises(Enough):  # raised while the main thread was at a run of its own
        compare(made, ["local"], out=tmp_path / "c", jobs=2, started=lambda config, place: [Stopping(config.label)])
    assert time.monotonic() - begun < 100 and closed == ["local", "local"]
    assert not list((tmp_path / "c").rglob("result.json"))
    seeds = [tmp_path / "c" / "local" / f"seed-{seed}" for seed in (0, 1)]
    assert all((seed / "checkpoint" / "index.json").is_file() for seed in seeds)
    rounds = [len((seed / "history.jsonl").read_text().splitlines()) for seed in seeds]
    assert all(1 <= number < 400 for number in rounds)


@pytest.mark.long
def test_whoever_loses_the_process_that_asked_ends_and_leaves_a_sound_directory(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "polyfed", "compare", "--methods", "local", "--seeds", "2", "--limit", "150"]
    words += ["--clients", "3", "--models", "mlp:1x8", "--quiet", "--set", "checkpoint_seconds=0", "--jobs"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    out = tmp_path / "c"
    seeds = [out / "local" / f"seed-{seed}" for seed in (0, 1)]
    long = [*words, "2", "--rounds", "2000", "--out", str(out)]
    asker = subprocess.Popen(long, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
    until(lambda: all((seed / "history.jsonl").is_file() for seed in seeds), "two runs")
    holders = {int((seed / ".lock").read_text()) for seed in seeds}
    assert len(holders) == 2 and asker.pid in holders
    asker.send_signal(signal.SIGKILL)
    asker.wait()
    (helper,) = holders - {asker.pid}
    until(lambda: not _lives(helper), "the helper's end")
    asker = subprocess.Popen(long, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    lines = [len((seed / "history.jsonl").read_text().splitlines()) for seed in seeds]
    until(
        lambda: all(
            len((seed / "history.jsonl").read_text().splitlines()) > number + 3
            for seed, number in zip(seeds, lines, strict=True)
        ),
        "that both go on",
    )
    asker.send_signal(signal.SIGINT)  # Ctrl-C
    _, said = asker.communicate(timeout=120)
    assert asker.returncode == 130 and "the same command" in " ".join(said.split()), said
    assert all((seed / "checkpoint" / "index.json").is_file() for seed in seeds)
    assert not any((seed / ".lock").exists() for seed in seeds)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat")
    return not (state.is_file() and ") Z " in state.read_text())  # ended, and nobody has asked how


@pytest.mark.long
def test_a_run_that_diverges_in_a_helper_is_told_and_does_not_hold_up_others(tmp_path: Path, helped: list[Any]) -> None:
    made = experiment(**{**SMALL, "lr": 1e30}, seeds=2)
    with pytest.raises(TrainingError, match=r"2 of 2 runs failed"):
        compare(made, ["local"], out=tmp_path / "c", jobs=2)
    assert helped == [("local", helped[0][1])]


@pytest.mark.long
def test_what_nobody_foresaw_in_a_helper_comes_with_its_traceback(helped: list[Any]) -> None:
    with pytest.raises(Failed, match=r"nobody foresaw this[\s\S]*ZeroDivisionError"):
        compare(experiment(**SMALL, seeds=2), ["tests.helped:Broken", "local"], jobs=2)


@pytest.mark.long
def test_a_network_that_only_this_process_knows_is_trained_here(
    helped: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyfed.models import registry

    monkeypatch.setitem(registry._registry, "mine", registry._registry["mlp"])
    made = experiment(**{**SMALL, "models": ["mine:1x8"], "rounds": 1}, seeds=2)
    (row,) = compare(made, ["local"], jobs=2)
    assert len(row.accuracy) == 2 and len(helped) == 1  # it was offered to the helper, which does not know it


def test_helpers_come_once_the_work_ahead_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    monkeypatch.setattr(Together, "_start", lambda self, number: begun.append(number) or self.threads.append(_done()))
    monkeypatch.setattr(jobs_module, "room", lambda need: 5)
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    made = experiment(**SMALL, seeds=3)
    compare(made, ["local"])
    assert begun == []  # it takes no second
    monkeypatch.setattr(jobs_module, "WORTHWHILE", 0.0)
    compare(made, ["local"])
    assert begun == [2]  # one for each of the other runs; there were cores and room for more
    monkeypatch.setattr(jobs_module, "room", lambda need: 1)
    compare(made, ["local"])
    assert begun == [2, 1]


def test_helpers_come_while_the_first_run_is_in_a_long_round(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, run = threading.Event(), Here.run

    def patient(self: Here, *given: Any) -> Any:
        assert begun.wait(60), "nobody came to help"
        return run(self, *given)

    monkeypatch.setattr(Here, "run", patient)
    monkeypatch.setattr(Together, "_start", lambda self, number: begun.set())
    monkeypatch.setattr(jobs_module, "WORTHWHILE", 0.01)
    compare(experiment(**{**SMALL, "rounds": 1}, seeds=2), ["local"])


def _done() -> threading.Thread:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    return thread


def job(seed: int, **settings: Any) -> Job:
    return Job(str(seed), experiment(**{**SMALL, **settings}).config("local", seed))


def test_runs_of_a_seed_stay_together_and_seeds_are_spread() -> None:
    some = Together([job(seed) for seed in (0, 0, 0, 1, 1, 2)])
    first, second = some._next(None), some._next(None)
    assert first is not None and second is not None
    assert (first[0], second[0]) == (0, 3)  # another process takes another seed
    third = some._next(second[1].config.seed)
    assert third is not None and third[0] == 4  # and stays with it
    fourth = some._next(third[1].config.seed)
    assert fourth is not None and fourth[0] == 5  # then takes one that nobody is at
    fifth = some._next(fourth[1].config.seed)
    assert fifth is not None and fifth[0] == 1  # then helps where most is left


def test_only_runs_whose_numbers_do_not_depend_on_cores_go_elsewhere_by_themselves() -> None:
    assert is_portable(job(0).config)
    assert not is_portable(job(0, engine="batched").config)  # stacks of convolutions round by their size
    assert not is_portable(job(0, device="cuda").config)
    stacks = Together([job(0, engine="batched")])
    stacks.cores = 8
    assert stacks._cores(job(0, engine="batched"), 2) == 8 and stacks._cores(job(0), 2) == 2


def test_memory_bounds_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_memory()
    assert free is None or free > 0
    monkeypatch.setattr(jobs_module, "free_memory", lambda: 10 << 30)
    assert room(1 << 30) == 8 and room(20 << 30) == 0
    monkeypatch.setattr(jobs_module, "free_memory", lambda: None)
    assert room(1 << 30) > 1000


@pytest.mark.parametrize("wrong", [0, "0", "-1", "many", 1.5])
def test_jobs_is_auto_or_a_number(wrong: Any) -> None:
    with pytest.raises(InputError, match="jobs is 'auto' or a number from 1"):
        compare(experiment(**SMALL), ["local"], jobs=wrong)


@pytest.mark.parametrize("file", sorted((ROOT / "experiments").glob("*.toml")), ids=lambda file: file.stem)
def test_a_configuration_survives_the_way_to_a_helper(file: Path) -> None:
    from polyfed.experiment import read_experiment

    made = read_experiment(file)
    for label in made.compare or (made.base.label,):
        config = made.config(label, 3)
        assert Config.load(config.dump()) == config
