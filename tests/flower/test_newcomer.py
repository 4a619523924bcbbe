"""A site that comes to a federation which exists: with a key that was made later, after the last round."""

from __future__ import annotations

from typing import Any

from problem import SITES

from polyfed.flower.enroll import add_site

SHORT = ["--epochs", "1", "--batch-size", "8", "--method", "fedavg", "--no-alone"]
PATIENT = ["--deadline", "240", "--wait", "240"]


def test_a_site_with_a_new_key_takes_part_when_the_federation_goes_on(processes: Any) -> None:
    server = processes.serve("--rounds", "1", *SHORT, *PATIENT)
    joined = [processes.join(site) for site in SITES]
    assert [processes.finish(process) for process in (server, *joined)] == [0] * 4, processes.logs()
    add_site(processes.folder / "keys", "east")  # what `polyfed keys add` does
    resumed = processes.serve("--resume", "--rounds", "2", *PATIENT, name="resumed")
    joined = [processes.join(site, name=f"{site}-again") for site in (*SITES, "east")]
    assert [processes.finish(process) for process in (resumed, *joined)] == [0] * 5, processes.logs()
    first, second = processes.history()
    assert first["participants"] == [0, 1, 2] and second["participants"] == [0, 1, 2, 3]
    assert len(second["accuracy"]["per_client"]) == 4
