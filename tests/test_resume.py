"""`kill -9` at any moment, then `polyfed resume`: the finished run is the uninterrupted one (time fields aside)."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

import polyfed as pf
from forked import POLYFED, Forks
from polyfed.analysis.opening import open_run
from polyfed.cli import app

pytestmark = pytest.mark.xdist_group("killed runs")  # which are compared with one whole run

ARGUMENTS = [
    *("--method", "fedavg", "--data", "digits", "--limit", "300", "--clients", "4", "--partition", "dirichlet:0.5"),
    *("--models", "mlp:1x32,mlp:2x32", "--rounds", "12", "--epochs", "1", "--set", "checkpoint_seconds=0", "--quiet"),
]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="module")
def forks():
    built = Forks(ENVIRONMENT)
    yield built
    built.close()


@pytest.fixture
def start(request, tmp_path):
    """Start a command, or another module that becomes one: forked, or as people do."""

    def begin(*words, module=POLYFED, whole=False):
        if not whole:
            forks = request.getfixturevalue("forks")
            return forks.start([*map(str, words)], tmp_path, tmp_path / "log", module)
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *map(str, words)], env=ENVIRONMENT, stdout=log, stderr=log
            )

    return begin


def timeless(path):
    def strip(value):
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in ("seconds", "peak_memory", "checksum")}
        return [strip(v) for v in value] if isinstance(value, list) else value

    return (
        [strip(json.loads(line)) for line in path.read_text().replace("\n}", "}").splitlines() if line]
        if path.suffix == ".jsonl"
        else strip(json.loads(path.read_text()))
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    done = CliRunner().invoke(app, ["run", *ARGUMENTS, "--out", str(out)])  # nobody kills it: no process of its own
    assert done.exit_code == 0, done.output
    return out


def assert_equal_runs(out, whole):
    assert timeless(out / "history.jsonl") == timeless(whole / "history.jsonl")
    assert timeless(out / "result.json") == timeless(whole / "result.json")
    for model in sorted((whole / "models").iterdir()):
        assert (out / "models" / model.name).read_bytes() == model.read_bytes(), model.name


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the run did not get there"
        time.sleep(0.001)


def sometimes(values):
    """Return the first value as it is, the others for `make test-long`: each costs two runs of the command."""
    return [values[0], *(pytest.param(value, marks=pytest.mark.long) for value in values[1:])]


@pytest.mark.parametrize("moment", sometimes([4, 1, 7, 11]))
def test_killed_after_some_rounds_and_a_random_moment_more(moment, whole, start, tmp_path):
    out = tmp_path / "run"
    process = start("run", *ARGUMENTS, "--out", out, whole=moment == 4)  # every day as people start it
    history = out / "history.jsonl"
    wait_for(lambda: history.is_file() and len(history.read_text().splitlines()) >= moment)
    time.sleep(random.Random(moment).random() * 0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    if moment == 4:  # nobody kills this one: no process of its own
        done = CliRunner().invoke(app, ["resume", str(out), "--quiet"])
        assert done.exit_code == 0, done.output
    else:
        assert start("resume", out, "--quiet").wait(120) == 0, (tmp_path / "log").read_text()
    assert_equal_runs(out, whole)


@pytest.mark.long
@pytest.mark.parametrize("point", ["client-2.6", "server.5", "index.json", "client-0.1"])
def test_killed_in_the_middle_of_a_checkpoint_write(point, whole, start, tmp_path):
    """The process kills itself half-way through writing one file of a checkpoint."""
    out = tmp_path / "run"
    killed = start(point, "run", *ARGUMENTS, "--out", out, module="half_written")
    assert killed.wait(120) == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert not (out / "result.json").exists()
    assert start("resume", out, "--quiet").wait(120) == 0, (tmp_path / "log").read_text()
    assert_equal_runs(out, whole)
    assert not [file for file in (out / "checkpoint").iterdir() if file.name.startswith(".")]


@pytest.fixture
def scaled(monkeypatch):
    """Make what FedAvg sends depend on the round, the phase and who took part."""
    send = pf.FedAvg.send

    def send_scaled(self, server, info, step, ctx):
        message = send(self, server, info, step, ctx)
        scale = ctx.round * len(ctx.phase) * (2.0 if info.id in ctx.participants else 1.0)
        for name, tensor in message.params["main"].items():
            message.params["main"][name] = tensor * scale if step.name == "evaluate" else tensor
        return message

    monkeypatch.setattr(pf.FedAvg, "send", send_scaled)


def test_a_finished_run_has_the_same_models_when_it_is_opened_again(scaled, tmp_path):
    clients = pf.split(pf.load("digits", limit=(150, 60)), clients=3, by="iid", seed=0)
    first = pf.run("fedavg", clients, "mlp:1x8", 3, participation=0.4, out=tmp_path / "run")
    states = {client: model.state_dict() for client, model in first.models.items()}
    again = pf.resume(tmp_path / "run").models
    opened = open_run(tmp_path / "run").models
    for client, state in states.items():
        for name, tensor in state.items():
            assert torch.equal(tensor, again[client].state_dict()[name])
            assert torch.equal(tensor, opened[client].state_dict()[name])
