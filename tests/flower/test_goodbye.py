"""The end of a federation: its result is kept before anybody is told, so that nobody is needed for it again."""

from __future__ import annotations

import signal
from typing import Any

from problem import SITES

SHORT = ["--rounds", "1", "--epochs", "1", "--batch-size", "8", "--method", "fedavg"]
PATIENT = ["--deadline", "240", "--wait", "240"]


def test_a_server_that_is_killed_while_it_says_goodbye_has_its_result_and_tells_who_still_waits(processes: Any) -> None:
    first, *others = SITES
    processes.close(f"{first}-end")
    server = processes.serve(*SHORT, *PATIENT)
    joined = {site: processes.join(site) for site in SITES}
    processes.reaches(f"{first}-end")  # it has been told, and so may others have been
    kept = processes.result()
    server.send_signal(signal.SIGKILL)
    assert processes.finish(server) != 0
    joined[first].send_signal(signal.SIGKILL)  # it never learned that it is over
    processes.open(f"{first}-end")
    resumed = processes.serve("--resume", *PATIENT, name="resumed")
    late = processes.join(first, name="late")
    still = [resumed, late, *(joined[site] for site in others)]
    assert [processes.finish(process) for process in still] == [0] * 4, processes.logs()
    assert processes.result() == kept and "alone" in kept["accuracy"]
    assert "This federation has ended" in processes.log("resumed")
    assert "The federation has ended" in processes.log("late")
