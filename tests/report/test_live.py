"""The terminal view, and Ctrl-C in a real process."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import polyfed as pf
from polyfed.terminal.live import LiveProgress, View, sparkline
from polyfed.terminal.progress import Ahead, Guessed, Place, PlainProgress, RemainingTime, duration
from polyfed.terminal.stopping import Stopped, Stopper


def line(number, mean=0.5, **more):
    accuracy = {"mean": mean, "worst": 0.1, "per_client": [0.9, 0.1], "global": None}
    return {"round": number, "phase": "round", "accuracy": accuracy, "bytes_up": 1000, "bytes_down": 2000, **more}


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [([0.0, 0.5, 1.0], 9, "▁▅█"), ([0.3, 0.3], 9, "▁▁"), ([0.0, 1.0, 0.0], 2, "█▁"), ([], 9, ""), ([1.0], 0, "")],
)
def test_sparkline(values, width, expected):
    assert sparkline(values, width) == expected


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_time_left_follows_the_speed_also_of_rounds_that_take_minutes():
    now = [0.0]
    time = RemainingTime(10, clock=lambda: now[0])
    assert time.left() is None
    now[0] = 400.0
    time.add(line(1))
    now[0] = 600.0
    time.add(line(2))  # three hundred seconds a round, eight rounds to go
    assert time.left() == pytest.approx(2400.0)
    now[0] = 800.0
    assert time.left() == pytest.approx(2200.0)
    assert time.spent() == 800.0


def test_a_resumed_run_is_paced_by_its_own_rounds():
    now = [0.0]
    time = RemainingTime(10, clock=lambda: now[0])
    now[0] = 2.0
    time.add(line(8))
    assert time.left() == pytest.approx(4.0)


def test_before_the_first_round_nobody_knows_how_long_rounds_take():
    now = [0.0]
    time = RemainingTime(10, clock=lambda: now[0])
    now[0] = 2.0
    time.add({**line(0), "phase": "before"})
    assert time.left() is None and time.spent() == 2.0


def test_both_displays_tell_the_same_time_left():
    now = [0.0]
    view, out = View(10, "alpha", clock=lambda: now[0]), io.StringIO()
    plain = PlainProgress(Console(file=out, width=200), 10, "alpha")
    plain.time = RemainingTime(10, clock=lambda: now[0])
    now[0] = 20.0
    view.add(line(1))
    plain(line(1))
    Console(file=out, width=200).print(view)
    assert out.getvalue().count("  3 min 00 s left") == 2


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_view_fits_any_width(width):
    view = View(10, "a-method-with-a-long-name #0")
    for number in range(1, 6):
        view.add(line(number, number / 10))
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=width, color_system=None).print(view)
    rows = out.getvalue().splitlines()
    assert len(rows) == 4  # a wrapped row would leave rests behind when it is redrawn
    assert all(len(row) <= width for row in rows)


def test_the_view_says_what_matters():
    view = View(10, "alpha")
    view.add(line(4, 0.5))
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=100, color_system=None).print(view)
    text = out.getvalue()
    for part in ("alpha", "round 4/10", "50.0 %", "best 90.0 % (client 0)", "worst 10.0 % (client 1)", "sent 1.0 kB"):
        assert part in text


def test_ctrl_c_before_the_first_run_stops_at_once():
    with pytest.raises(KeyboardInterrupt):
        Stopper(Console(file=io.StringIO())).request(signal.SIGINT, None)


def test_sites_are_shown_by_their_names_also_when_one_is_away():
    view = View(10, "alpha", names=["north", "south", "west"])
    accuracy = {"mean": 0.5, "per_client": [0.9, 0.1], "clients": [0, 2]}
    view.add({**line(4), "accuracy": accuracy})
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=100, color_system=None).print(view)
    assert "best 90.0 % (north)  worst 10.0 % (west)" in out.getvalue()


def test_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    progress = LiveProgress(Console(file=out, width=200), 10, "alpha")
    progress(line(1))
    progress.close()
    assert out.getvalue().count("\n") == 1
    assert "\x1b" not in out.getvalue()


def test_a_terminal_is_redrawn_in_place():
    out = io.StringIO()
    progress = LiveProgress(Console(file=out, force_terminal=True, width=80), 10, "alpha")
    for number in (1, 2):
        progress(line(number))
    progress.close()
    assert "\x1b[1A" in out.getvalue()  # the cursor goes up


def test_the_first_ctrl_c_waits_for_the_round_and_the_second_does_not():
    stopper = Stopper(Console(file=io.StringIO()))
    stopper.running = True
    stopper(line(1))
    stopper.request(signal.SIGINT, None)
    with pytest.raises(Stopped, match="after round 2"):
        stopper(line(2))
    with pytest.raises(KeyboardInterrupt):
        stopper.request(signal.SIGINT, None)


def test_ctrl_c_that_torchs_launcher_passes_on_is_not_a_second_one(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    stopper = Stopper(Console(file=io.StringIO()))
    stopper.running = True
    for _ in range(2):
        stopper.request(signal.SIGINT, None)
    with pytest.raises(Stopped, match="after round 1"):
        stopper(line(1))


def start(words):
    program = [sys.executable, "-m", "polyfed.cli", *words]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stop_after_first_line(process):
    """Read progress until a round is done, press Ctrl-C, and return the last round printed and the error text."""
    chosen, first = process.stdout.readline(), process.stdout.readline()
    assert "mlp:1x8 as " in chosen and "round" in first, (chosen, first)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    rounds = [int(row.split("round")[1].split("/")[0]) for row in (first + rest).splitlines() if "/5000" in row]
    return rounds, errors


def test_ctrl_c_saves_a_checkpoint_and_resume_goes_on(tmp_path):
    out = tmp_path / "run"
    words = ["run", "--method", "fedavg", "--data", "digits", "--limit", "80", "--clients", "2", "--models", "mlp:1x8"]
    process = start([*words, "--rounds", "5000", "--out", str(out)])
    rounds, errors = stop_after_first_line(process)
    assert process.returncode == 130, errors
    assert f"Stopped after round {rounds[-1]}. Go on with polyfed resume {out}." in errors.replace("\n", " ")
    index = json.loads((out / "checkpoint" / "index.json").read_text())
    assert index["round"] == rounds[-1] == index["history_lines"]
    assert not (out / "result.json").exists()
    process = start(["resume", str(out)])
    later, errors = stop_after_first_line(process)
    assert process.returncode == 130, errors
    assert later[0] == rounds[-1] + 1
    history = [json.loads(row)["round"] for row in Path(out / "history.jsonl").read_text().splitlines()]
    assert history == list(range(1, later[-1] + 1))


@pytest.mark.long
def test_without_a_directory_ctrl_c_says_that_nothing_is_kept():
    words = ["run", "--method", "local", "--data", "digits", "--limit", "80", "--clients", "2", "--models", "mlp:1x8"]
    process = start([*words, "--rounds", "5000"])
    _, errors = stop_after_first_line(process)
    assert process.returncode == 130
    assert "Nothing is kept" in errors


# --- progress of a run that Python code starts ---


class Screen(io.StringIO):
    """An error stream that is a terminal."""

    def isatty(self):
        return True


def small_run(**options):
    clients = pf.split(pf.load("digits", limit=(40, 20)), 2, "iid", seed=0)
    return pf.run("local", clients, ["mlp:1x4"], rounds=2, **options)


def test_progress_is_one_line_a_round_on_the_error_stream(capsys):
    small_run(progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    rounds = [row.split("accuracy")[0].split() for row in shown.err.splitlines()]
    ways = ["local", "mlp:1x4", "as", "stacks", "in", "plain", "training"]
    assert rounds == [ways, ["local", "round", "1/2"], ["local", "round", "2/2"]]


def test_without_a_terminal_a_run_is_silent(capsys):
    small_run()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "expected"), [({}, True), ({"progress": False}, False), ({"observers": [print]}, False)]
)
def test_on_a_terminal_progress_is_shown_unless_somebody_else_watches(options, expected, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    small_run(**options)
    assert ("round 2/2" in screen.getvalue()) is expected
    assert bool(screen.getvalue()) is expected


def test_the_cursor_comes_back_when_a_run_fails(monkeypatch):
    def fail(line):
        raise RuntimeError

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with pytest.raises(RuntimeError):
        small_run(progress=True, observers=[fail])
    assert screen.getvalue().rfind("\x1b[?25h") > screen.getvalue().rfind("\x1b[?25l") >= 0


def test_a_notebook_shows_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    small_run()
    shown = capsys.readouterr()
    assert shown.err.count("round") == 2 and "\x1b" not in shown.err
    assert shown.out == ""


def test_a_resumed_run_shows_its_progress_too(tmp_path, capsys):
    small_run(out=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint")  # as if it had been stopped before the first one
    pf.resume(tmp_path / "run", progress=True)
    assert capsys.readouterr().err.count("round") == 2


def test_a_comparison_tells_how_long_all_of_it_takes():
    """Runs take as long as earlier ones of their name; before there is one, as long as the others."""
    ahead = Ahead(["a", "b", "a", "b"], clock=lambda: 0.0)
    first = ahead.begin("a")
    assert first == Place(1, 4) and first.words(0.0, None) == Place(1, 4).words(0.0, 5.0) == ""
    assert first.words(2.0, 8.0) == "38 s left for all"  # nothing has ended: the other three as long as this one
    first.words(10.0, 0.0)
    ahead.took("a", 10.0)
    second = ahead.begin("b")
    assert second.words(5.0, 25.0) == "45 s left for all"  # of b nothing has ended: as long as a
    second.words(30.0, 0.0)
    ahead.took("b", 30.0)
    assert ahead.begin("a").words(0.0, 10.0) == "40 s left for all"
    assert ahead.begin("b").words(25.0, 5.0) == "15 s left for all"  # the run before it is not through yet


def test_runs_at_once_tell_one_time_for_all():
    """What a line says is what is left of all of them: also of a longer one beside, and when the last one has begun."""
    now = [0.0]
    ahead = Ahead(["slow", "quick", "last"], clock=lambda: now[0])
    slow, quick = ahead.begin("slow", 2), ahead.begin("quick", 2)
    slow.words(10.0, 90.0)
    assert quick.words(10.0, 10.0) == "1 min 30 s left for all"  # (90 + 10 + 60) / 2 is less than the slow one needs
    now[0] = 10.0
    assert quick.words(20.0, 0.0) == "1 min 20 s left for all"
    ahead.took("quick", 20.0)
    last = ahead.begin("last", 2)
    now[0] = 20.0
    assert last.words(10.0, 10.0) == slow.words(30.0, 70.0) == "1 min 10 s left for all"
    now[0] = 90.0
    assert slow.words(100.0, 0.0) == ""  # done: nothing is left


def test_the_place_of_a_run_is_shown():
    out = io.StringIO()
    PlainProgress(Console(file=out, width=200), 10, "alpha", Place(2, 12))(line(1, 0.5))
    assert out.getvalue().startswith("[ 2/12]  alpha")
    screen = io.StringIO()
    Console(file=screen, width=80).print(View(10, "alpha", place=Place(2, 12)))
    assert screen.getvalue().startswith("run 2 of 12")


def test_where_the_runs_to_come_were_guessed_their_time_is_added():
    place = Place(2, 9, Guessed(60.0))
    assert place.words(spent=5.0, left=30.0) == f"{duration(90.0)} left for all" and not place.words(5.0, None)
    two = Place(2, 9, Guessed(60.0, at_once=2))
    assert two.words(spent=5.0, left=30.0) == f"{duration(45.0)} left for all"
    assert two.words(spent=5.0, left=80.0) == f"{duration(80.0)} left for all"  # no end before its own
