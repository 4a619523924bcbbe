"""Sites and servers that die, come back, or are slow: real processes, real signals."""

from __future__ import annotations

import signal
import time

import pytest
from problem import SITES

ROUNDS = ["--rounds", "4", "--epochs", "1", "--batch-size", "8", "--method", "fedavg"]
OTHERS = [1, 2]

# Minutes of real processes with real deadlines: a busy machine fails them for no fault of the code. `make faults`.
pytestmark = pytest.mark.slow


def start(town, *options, mark=None, site="north"):
    """Start a server and three sites; one of them pauses in its first batch when the mark file says so."""
    server = town.serve(*ROUNDS, *options)
    joined = {}
    for name in SITES:
        extra = {"POLYFED_TEST_MARK": str(mark)} if mark is not None and name == site else {}
        joined[name] = town.join(name, model="problem:pausing", **extra)
    return server, joined


def missing(line):
    return {int(client): why for client, why in line.get("missing", {}).items()}


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait(10)


def test_killed_before_its_work_the_round_goes_on_and_it_comes_back(town):
    server, joined = start(town, "--min-sites", "2", "--deadline", "60", "--wait", "90")
    town.until(lambda: len(town.history()) >= 1, 120, "round 1")
    kill(joined["north"])
    town.until(lambda: any(missing(line) for line in town.history()), 60, "a round without north")
    line = next(line for line in town.history() if missing(line))
    assert list(missing(line)) == [0] and "north" in missing(line)[0]
    assert line["accuracy"]["clients"] == OTHERS
    again = town.join("north", name="north-again", model="problem:pausing")
    assert town.finish(server, 180) == 0, town.logs()
    assert town.finish(again, 60) == 0
    assert all(
        name not in why for line in town.history() for why in missing(line).values() for name in ("south", "west")
    )
    assert len(town.history()) == 4


def test_killed_during_its_work_and_back_at_once_it_takes_part_in_the_same_round(town, tmp_path):
    mark = tmp_path / "mark"
    server, joined = start(town, "--deadline", "120", "--wait", "90", mark=mark)
    town.until(lambda: len(town.history()) >= 1, 120, "round 1")
    mark.write_text("600")
    town.until(mark.with_suffix(".working").is_file, 60, "north at work")
    kill(joined["north"])
    town.join("north", name="north-again", model="problem:pausing")
    assert town.finish(server, 180) == 0, town.logs()
    assert [missing(line) for line in town.history()] == [{}, {}, {}, {}]
    assert_same_as_undisturbed(town)


def test_killed_after_its_work_nothing_is_lost_and_the_result_is_the_same(town, tmp_path):
    # The site dies between writing its state and sending its reply; it does the same work again, from the same state.
    server, joined = start(town, "--deadline", "120", "--wait", "90")
    state = tmp_path / "state-north"
    town.until(lambda: list(state.glob("*/state-1-2-0.safetensors")), 120, "the state after round 2")
    kill(joined["north"])
    town.join("north", name="north-again", model="problem:pausing")
    assert town.finish(server, 180) == 0, town.logs()
    assert_same_as_undisturbed(town)


def test_a_slow_site_misses_the_deadline_and_is_in_a_later_round_again(town, tmp_path):
    mark = tmp_path / "mark"
    server, _ = start(town, "--min-sites", "2", "--deadline", "6", "--wait", "90", mark=mark)
    town.until(lambda: len(town.history()) >= 1, 120, "round 1")
    mark.write_text("9")
    assert town.finish(server, 180) == 0, town.logs()
    lines = town.history()
    late = [number for number, line in enumerate(lines) if 0 in missing(line)]
    assert late and "did not answer in 6 s" in missing(lines[late[0]])[0]
    assert missing(lines[-1]) == {} and len(lines) == 4


def test_the_server_is_killed_and_resumes_with_the_sites_reconnecting(town):
    server, joined = start(town, "--deadline", "120", "--wait", "120")
    town.until(lambda: len(town.history()) >= 2, 120, "two rounds")
    kill(server)
    resumed = town.serve("--resume", "--deadline", "120", "--wait", "120", name="resumed")
    assert town.finish(resumed, 240) == 0, town.logs()
    assert [line["round"] for line in town.history()] == [1, 2, 3, 4]
    assert all(town.finish(process, 60) == 0 for process in joined.values())
    assert_same_as_undisturbed(town)


def test_too_few_sites_a_clear_wait_then_a_clear_stop(town):
    server = town.serve(*ROUNDS, "--min-sites", "2", "--wait", "8")
    town.join("north", model="problem:pausing")
    assert town.finish(server, 90) == 1
    said = town.log("serve")
    assert "waiting up to" in said and "Only 1 of the 2 sites that are needed came" in said
    assert "Traceback" not in said


@pytest.mark.slow  # the minute is the point
def test_back_after_a_minute_it_takes_part_again_with_its_own_state(town):
    server, joined = start(town, "--deadline", "150", "--wait", "150")
    town.until(lambda: len(town.history()) >= 1, 120, "round 1")
    kill(joined["north"])
    time.sleep(60)
    town.join("north", name="north-again", model="problem:pausing")
    assert town.finish(server, 240) == 0, town.logs()
    assert_same_as_undisturbed(town)


def assert_same_as_undisturbed(town):
    """The run with its faults gives the numbers of one without any, computed here in one process."""
    import problem

    import polyfed as pf

    result = pf.run(
        "fedavg",
        problem.clients(),
        [problem.pausing],
        rounds=4,
        training=pf.Training(epochs=1, batch_size=8, lr=0.05),
        engine="sequential",
    )
    assert [line["accuracy"]["per_client"] for line in town.history()] == [
        line["accuracy"]["per_client"] for line in result.history
    ]
    assert [line["loss"] for line in town.history()] == pytest.approx([line["loss"] for line in result.history], abs=0)
