"""A federation without keys on one machine, from the commands to the report; and the example, with few rounds."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import problem
import pytest
from processes import FLOWER
from typer.testing import CliRunner

import polyfed as pf
import polyfed.flower
from polyfed.cli import app

MODELS = {"north": "mlp:1x16", "south": "mlp:2x16", "west": "problem:own"}
EXAMPLE = Path(__file__).parents[2] / "examples" / "hospital" / "run.py"


@pytest.fixture
def processes(whole_processes):
    return whole_processes


@pytest.mark.timeout(600)
def test_without_keys_on_this_machine_it_gives_the_numbers_of_a_simulation(processes):
    method = ["--method", "fedproto", "--feature-dim", "8", "--rounds", "2", "--batch-size", "8"]
    server = processes.serve(*method, "--insecure", "--sites", ",".join(problem.SITES), "--wait", "240")
    sites = {name: processes.join(name, "--insecure", "--name", name, model=MODELS[name]) for name in problem.SITES}
    assert processes.finish(server) == 0, processes.logs()
    assert all(processes.finish(process) == 0 for process in sites.values()), processes.logs()
    models = ["mlp:1x16", "mlp:2x16", problem.own]
    training = pf.Training(epochs=1, batch_size=8, lr=0.05)
    alone = pf.run("fedproto", problem.clients(), models, rounds=2, feature_dim=8, training=training, engine="threads")
    assert [line["accuracy"]["per_client"] for line in processes.history()] == [
        line["accuracy"]["per_client"] for line in alone.history
    ]
    assert [line["bytes_up"] for line in processes.history()] == [line["bytes_up"] for line in alone.history]
    up = alone.summary()["cost"]["per_client"]["up"]
    for number, name in enumerate(problem.SITES):
        (sent,) = re.findall(r"This site sent ([\d,]+) bytes in all", processes.log(name))
        # The payload, and all that goes with it: joining, losses, measurements.
        assert up[str(number)] < int(sent.replace(",", "")) < up[str(number)] + 20_000
        assert "prototypes" in processes.log(name) and "No weights are among it" in processes.log(name)
    assert "fedproto" in (processes.folder / "run" / "report.html").read_text()
    said = processes.log("serve")
    assert "round   2/2" in said and "Report: run/report.html" in said and "Done: mean accuracy" in said


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["serve", "--insecure", "--sites", "a", "--host", "0.0.0.0", "--out", "run"], "on this machine only"),
        (
            ["join", "--insecure", "--name", "a", "--server", "example.org:1", "--model", "m", "--data", "d"],
            "machine only",
        ),
        (["serve", "--out", "run"], "Give --keys"),
    ],
)
def test_without_keys_nothing_leaves_this_machine(tmp_path, command, words):
    done = subprocess.run([*FLOWER, *command], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.timeout(600)
def test_the_hospital_example_ends_with_its_table(tmp_path, monkeypatch):
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    command = [sys.executable, str(EXAMPLE), "--rounds", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(word in done.stdout for word in ("alone", "together", "gained", "north", "hospital:ward_net", "mean"))
    assert "What leaves this site" in done.stdout and "No weights are among it" in done.stdout


@pytest.mark.parametrize("command", [["keys", "init", "k", "--server", "a", "--sites", "b"], ["serve", "--out", "run"]])
def test_without_flower_the_commands_say_how_to_get_it(tmp_path, monkeypatch, command):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(polyfed.flower, "version", absent)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2 and "pip install 'polyfed[flower]'" in result.output
    assert not list(tmp_path.iterdir())
