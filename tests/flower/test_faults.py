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
from processes import flowers

import polyfed as pf

ROUNDS = 3
COMMON = ["--rounds", str(ROUNDS), "--epochs", "1", "--batch-size", "8", "--method", "fedavg"]
PATIENT = ["--deadline", "240", "--wait", "240"]
pytestmark = pytest.mark.timeout(900)


def start(processes, *options):
    """Start a server and three sites."""
    server = processes.serve(*COMMON, *options)
    return server, {name: processes.join(name) for name in SITES}


def missing(line):
    return {int(client): why for client, why in line.get("missing", {}).items()}


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait(60)


def test_killed_before_its_work_the_round_goes_on_and_it_takes_part_in_the_next(processes):
    processes.close("north-2-before", "south-3-before")
    server, joined = start(processes, "--min-sites", "2", *PATIENT)
    processes.reaches("north-2-before")
    kill(joined["north"])
    processes.has_history(2)
    processes.open("north-2-before")
    processes.join("north", name="north-again")
    processes.has_worked("north", 3)  # the others have not answered in round 3: south stands before its gate
    processes.open("south-3-before")
    assert processes.finish(server) == 0, processes.logs()
    assert [list(missing(line)) for line in processes.history()] == [[], [0], []], processes.logs()
    line = processes.history()[1]
    assert missing(line)[0] == "north is not connected" and line["accuracy"]["clients"] == [1, 2]


def test_killed_during_and_after_its_work_and_back_at_once_nothing_is_lost(processes):
    # After: between writing its state and sending its reply. It does the same work again, from the same state.
    processes.close("north-2-during", "north-3-after")
    server, joined = start(processes, *PATIENT)
    for gate in ("north-2-during", "north-3-after"):
        processes.reaches(gate)
        kill(joined["north"])
        processes.open(gate)
        joined["north"] = processes.join("north", name=f"north-after-{gate}")
    assert processes.finish(server) == 0, processes.logs()
    assert all(processes.finish(process) == 0 for process in joined.values())
    assert [missing(line) for line in processes.history()] == [{}] * ROUNDS
    assert_same_as_undisturbed(processes)


def test_a_slow_site_misses_the_deadline_and_is_in_the_next_round_again(processes):
    processes.close("north-2-during", "south-3-before")
    server, _ = start(processes, "--min-sites", "2", "--deadline", "20", "--wait", "240", "--evaluate", "end")
    processes.has_history(2)
    processes.open("north-2-during")
    processes.has_worked("north", 3)
    processes.open("south-3-before")
    assert processes.finish(server) == 0, processes.logs()
    lines = processes.history()
    assert [list(missing(line)) for line in lines] == [[], [0], []], processes.logs()
    assert missing(lines[1])[0] == "north did not answer in 20 s"


def test_the_server_is_killed_in_a_round_and_resumes_with_the_sites_reconnecting(processes):
    processes.close("north-2-during")
    server, joined = start(processes, *PATIENT)
    processes.reaches("north-2-during")
    kill(server)
    resumed = processes.serve("--resume", *PATIENT, name="resumed")
    processes.open("north-2-during")
    assert processes.finish(resumed) == 0, processes.logs()
    assert all(processes.finish(process) == 0 for process in joined.values())
    assert [line["round"] for line in processes.history()] == [1, 2, 3]
    assert_same_as_undisturbed(processes)


def test_ctrl_c_lets_the_round_finish_and_resume_goes_on(processes):
    processes.close("north-2-during")
    server = processes.serve(*COMMON, *PATIENT, group=0)
    joined = [processes.join(name) for name in SITES]
    processes.reaches("north-2-during")
    os.killpg(server.pid, signal.SIGINT)  # a terminal tells the command and all that it started
    processes.open("north-2-during")
    assert processes.finish(server) == 130, processes.logs()
    said = " ".join(processes.log("serve").split())
    before, _, command = said.partition(" Go on with polyfed ")
    assert before.endswith("Stopped after round 2.") and command.startswith("serve --resume --out run --keys keys ")
    assert [line["round"] for line in processes.history()] == [1, 2]
    resumed = processes.start("resumed", shlex.split(command.rstrip(".")))
    assert processes.finish(resumed) == 0, processes.logs()
    assert all(processes.finish(process) == 0 for process in joined)
    assert_same_as_undisturbed(processes)


def test_ctrl_c_while_waiting_for_sites_stops_at_once(processes):
    server = processes.serve(*COMMON, *PATIENT, group=0)
    processes.until(lambda: "waiting up to" in processes.log("serve"), what="the wait")
    os.killpg(server.pid, signal.SIGINT)
    assert processes.finish(server) == 130, processes.logs()
    assert "Traceback" not in processes.log("serve")


def test_too_few_sites_a_clear_wait_then_a_clear_stop(processes):
    server = processes.serve(*COMMON, "--min-sites", "2", "--wait", "10")
    processes.join("north")
    assert processes.finish(server) == 1
    said = processes.log("serve")
    assert "waiting up to" in said and "of the 2 sites that are needed came" in said and "south" in said
    assert "Traceback" not in said


def test_a_site_whose_flower_process_is_killed_loses_a_round_at_most_and_connects_again(processes):
    # Flower lets the same key in again only when it has missed its heartbeats for a minute: the rounds go on meanwhile.
    processes.close("north-2-during")
    server, joined = start(processes, "--min-sites", "2", "--deadline", "20", "--wait", "240")
    processes.reaches("north-2-during")
    (node,) = flowers(joined["north"].pid)
    os.kill(node, signal.SIGKILL)
    processes.open("north-2-during")
    assert processes.finish(server) == 0, processes.logs()
    assert "connecting again" in processes.log("north") and "Traceback" not in processes.log("north")
    lines = processes.history()
    assert len(lines) == ROUNDS and missing(lines[0]) == {}
    assert all(why.startswith("north ") for line in lines for why in missing(line).values())
    assert joined["north"].poll() is None or "The federation has ended" in processes.log("north")


@pytest.mark.slow  # the minute is the point
def test_back_after_a_minute_it_takes_part_again_with_its_own_state(processes):
    processes.close("north-2-during")
    server, joined = start(processes, *PATIENT)
    processes.reaches("north-2-during")
    kill(joined["north"])
    processes.open("north-2-during")
    time.sleep(60)
    processes.join("north", name="north-again")
    assert processes.finish(server) == 0, processes.logs()
    assert [missing(line) for line in processes.history()] == [{}] * ROUNDS
    assert_same_as_undisturbed(processes)


@pytest.mark.slow  # a minute until Flower forgets the vanished process
def test_a_site_whose_flower_process_is_killed_is_waited_for_and_nothing_is_lost(processes):
    processes.close("north-2-during")
    server, joined = start(processes, *PATIENT)
    processes.reaches("north-2-during")
    (node,) = flowers(joined["north"].pid)
    os.kill(node, signal.SIGKILL)
    processes.open("north-2-during")
    assert processes.finish(server) == 0, processes.logs()
    assert all(processes.finish(process) == 0 for process in joined.values())
    assert_same_as_undisturbed(processes)


def assert_same_as_undisturbed(processes):
    """The run with its faults gives the numbers of one without any, computed here in one process."""
    result = pf.run(
        "fedavg",
        problem.clients(),
        [gated.net],
        rounds=ROUNDS,
        training=pf.Training(epochs=1, batch_size=8, lr=0.05),
        engine="sequential",
    )
    assert [line["accuracy"]["per_client"] for line in processes.history()] == [
        line["accuracy"]["per_client"] for line in result.history
    ]
    assert [line["loss"] for line in processes.history()] == pytest.approx(
        [line["loss"] for line in result.history], abs=0
    )
