"""Sites and servers that die, come back, or are slow: real processes, real signals.

Gates (see gated.py) catch a site exactly before, during or after its work, so no test depends on who is fast. The
limits are for machines that are busy with other things; on an idle one a test takes some ten seconds.
"""

from __future__ import annotations

import os
import shlex
import signal
import time

import gated
import problem
import pytest
from problem import SITES
from town import FLOWER, flowers

import polyfed as pf

ROUNDS = 3
COMMON = ["--rounds", str(ROUNDS), "--epochs", "1", "--batch-size", "8", "--method", "fedavg"]
PATIENT = ["--deadline", "240", "--wait", "240"]
pytestmark = pytest.mark.timeout(900)


def start(town, *options):
    """Start a server and three sites."""
    server = town.serve(*COMMON, *options)
    return server, {name: town.join(name) for name in SITES}


def missing(line):
    return {int(client): why for client, why in line.get("missing", {}).items()}


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait(60)


def test_killed_before_its_work_the_round_goes_on_and_it_takes_part_in_the_next(town):
    town.close("north-2-before", "south-3-before")
    server, joined = start(town, "--min-sites", "2", *PATIENT)
    town.reaches("north-2-before")
    kill(joined["north"])
    town.has_history(2)
    town.open("north-2-before")
    town.join("north", name="north-again")
    town.has_worked("north", 3)  # the others have not answered in round 3: south stands before its gate
    town.open("south-3-before")
    assert town.finish(server) == 0, town.logs()
    assert [list(missing(line)) for line in town.history()] == [[], [0], []], town.logs()
    line = town.history()[1]
    assert missing(line)[0] == "north is not connected" and line["accuracy"]["clients"] == [1, 2]


def test_killed_during_and_after_its_work_and_back_at_once_nothing_is_lost(town):
    # After: between writing its state and sending its reply. It does the same work again, from the same state.
    town.close("north-2-during", "north-3-after")
    server, joined = start(town, *PATIENT)
    for gate in ("north-2-during", "north-3-after"):
        town.reaches(gate)
        kill(joined["north"])
        town.open(gate)
        joined["north"] = town.join("north", name=f"north-after-{gate}")
    assert town.finish(server) == 0, town.logs()
    assert all(town.finish(process) == 0 for process in joined.values())
    assert [missing(line) for line in town.history()] == [{}] * ROUNDS
    assert_same_as_undisturbed(town)


def test_a_slow_site_misses_the_deadline_and_is_in_the_next_round_again(town):
    town.close("north-2-during", "south-3-before")
    server, _ = start(town, "--min-sites", "2", "--deadline", "20", "--wait", "240", "--evaluate", "end")
    town.has_history(2)
    town.open("north-2-during")
    town.has_worked("north", 3)
    town.open("south-3-before")
    assert town.finish(server) == 0, town.logs()
    lines = town.history()
    assert [list(missing(line)) for line in lines] == [[], [0], []], town.logs()
    assert missing(lines[1])[0] == "north did not answer in 20 s"


def test_the_server_is_killed_in_a_round_and_resumes_with_the_sites_reconnecting(town):
    town.close("north-2-during")
    server, joined = start(town, *PATIENT)
    town.reaches("north-2-during")
    kill(server)
    resumed = town.serve("--resume", *PATIENT, name="resumed")
    town.open("north-2-during")
    assert town.finish(resumed) == 0, town.logs()
    assert all(town.finish(process) == 0 for process in joined.values())
    assert [line["round"] for line in town.history()] == [1, 2, 3]
    assert_same_as_undisturbed(town)


def test_ctrl_c_lets_the_round_finish_and_resume_goes_on(town):
    town.close("north-2-during")
    server = town.serve(*COMMON, *PATIENT, group=0)
    joined = [town.join(name) for name in SITES]
    town.reaches("north-2-during")
    os.killpg(server.pid, signal.SIGINT)  # a terminal tells the command and all that it started
    town.open("north-2-during")
    assert town.finish(server) == 130, town.logs()
    said = " ".join(town.log("serve").split())
    before, _, command = said.partition(" Go on with polyfed ")
    assert before.endswith("Stopped after round 2.") and command.startswith("serve --resume --out run --keys keys ")
    assert [line["round"] for line in town.history()] == [1, 2]
    resumed = town.start("resumed", [*FLOWER, *shlex.split(command.rstrip("."))])
    assert town.finish(resumed) == 0, town.logs()
    assert all(town.finish(process) == 0 for process in joined)
    assert_same_as_undisturbed(town)


def test_ctrl_c_while_waiting_for_sites_stops_at_once(town):
    server = town.serve(*COMMON, *PATIENT, group=0)
    town.until(lambda: "waiting up to" in town.log("serve"), what="the wait")
    os.killpg(server.pid, signal.SIGINT)
    assert town.finish(server) == 130, town.logs()
    assert "Traceback" not in town.log("serve")


def test_too_few_sites_a_clear_wait_then_a_clear_stop(town):
    server = town.serve(*COMMON, "--min-sites", "2", "--wait", "10")
    town.join("north")
    assert town.finish(server) == 1
    said = town.log("serve")
    assert "waiting up to" in said and "of the 2 sites that are needed came" in said and "south" in said
    assert "Traceback" not in said


def test_a_site_whose_flower_process_is_killed_loses_a_round_at_most_and_connects_again(town):
    # Flower lets the same key in again only when it has missed its heartbeats for a minute: the rounds go on meanwhile.
    town.close("north-2-during")
    server, joined = start(town, "--min-sites", "2", "--deadline", "20", "--wait", "240")
    town.reaches("north-2-during")
    (node,) = flowers(joined["north"].pid)
    os.kill(node, signal.SIGKILL)
    town.open("north-2-during")
    assert town.finish(server) == 0, town.logs()
    assert "connecting again" in town.log("north") and "Traceback" not in town.log("north")
    lines = town.history()
    assert len(lines) == ROUNDS and missing(lines[0]) == {}
    assert all(why.startswith("north ") for line in lines for why in missing(line).values())
    assert joined["north"].poll() is None or "The federation has ended" in town.log("north")


@pytest.mark.slow  # the minute is the point
def test_back_after_a_minute_it_takes_part_again_with_its_own_state(town):
    town.close("north-2-during")
    server, joined = start(town, *PATIENT)
    town.reaches("north-2-during")
    kill(joined["north"])
    town.open("north-2-during")
    time.sleep(60)
    town.join("north", name="north-again")
    assert town.finish(server) == 0, town.logs()
    assert [missing(line) for line in town.history()] == [{}] * ROUNDS
    assert_same_as_undisturbed(town)


@pytest.mark.slow  # a minute until Flower forgets the vanished process
def test_a_site_whose_flower_process_is_killed_is_waited_for_and_nothing_is_lost(town):
    town.close("north-2-during")
    server, joined = start(town, *PATIENT)
    town.reaches("north-2-during")
    (node,) = flowers(joined["north"].pid)
    os.kill(node, signal.SIGKILL)
    town.open("north-2-during")
    assert town.finish(server) == 0, town.logs()
    assert all(town.finish(process) == 0 for process in joined.values())
    assert_same_as_undisturbed(town)


def assert_same_as_undisturbed(town):
    """The run with its faults gives the numbers of one without any, computed here in one process."""
    result = pf.run(
        "fedavg",
        problem.clients(),
        [gated.net],
        rounds=ROUNDS,
        training=pf.Training(epochs=1, batch_size=8, lr=0.05),
        engine="sequential",
    )
    assert [line["accuracy"]["per_client"] for line in town.history()] == [
        line["accuracy"]["per_client"] for line in result.history
    ]
    assert [line["loss"] for line in town.history()] == pytest.approx([line["loss"] for line in result.history], abs=0)
