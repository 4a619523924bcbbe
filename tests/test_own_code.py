"""`package.module:function` names models and data everywhere, and `compare` takes objects."""

import json
import os
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import polyfed as pf
from polyfed.cli import app
from polyfed.core.errors import InputError
from polyfed.core.own_code import imported
from polyfed.fusion import load_fused

CODE = """
    import numpy as np
    from torch import nn
    import polyfed as pf

    def make(input_shape, num_classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], 8), nn.ReLU(), nn.Linear(8, num_classes))

    def rows():
        rng = np.random.default_rng(0)
        x = rng.normal(size=(120, 4)).astype("float32")
        return x, (x[:, 0] > 0).astype(int)

    def wards():
        x, y = rows()
        return pf.Clients.from_parts([(x[:50], y[:50]), (x[50:90], y[50:90])], test=(x[90:], y[90:]))

    def broken():
        return 1 / 0

    number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    name = f"own_code_{tmp_path.name.replace('-', '_')}"  # a module is imported once in a process
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(CODE))
    monkeypatch.chdir(tmp_path)
    return name


def call(*words):
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


SMALL = ["--clients", "2", "--partition", "iid", "--rounds", "1", "--quiet"]


def test_run_takes_models_and_data_by_name_and_the_run_can_be_resumed(folder):
    words = ["run", "--method", "fedavg", "--data", f"{folder}:rows", "--models", f"{folder}:make", *SMALL]
    assert call(*words, "--out", "a").exit_code == 0
    assert call("resume", "a", "--rounds", "2", "--quiet").exit_code == 0
    assert json.loads(Path("a/result.json").read_text())["rounds"] == 2
    with pytest.raises(InputError, match="pass what builds it"):  # a file never decides which code runs
        pf.load_model("a", client=0)
    assert len(pf.load_model("a", client=0, model=f"{folder}:make").predict(np.zeros((3, 4), np.float32))) == 3


def test_data_that_is_divided_already_stays_as_it_is(folder):
    words = ["run", "--method", "local", "--data", f"{folder}:wards", "--models", "mlp:1x8", "--rounds", "1"]
    assert call(*words, "--quiet", "--out", "a").exit_code == 0
    assert json.loads(Path("a/result.json").read_text())["samples"] == [50, 40]
    with pytest.raises(InputError, match="gives clients, which are divided already"):
        call(*words, "--clients", "5")


def test_compare_takes_models_and_data_by_name(folder):
    words = ["compare", "--methods", "fedavg", "--seeds", "1", "--data", f"{folder}:rows", "--models", f"{folder}:make"]
    found = json.loads(call(*words, *SMALL, "--json").stdout)
    assert [row["method"] for row in found] == ["local", "fedavg"]


def test_code_that_was_written_a_moment_ago_is_found(tmp_path, monkeypatch):
    """Python lists a folder once, and again when its time of change is another: not so within a tick of that clock."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="No module named"):
        imported(f"late_{id(tmp_path)}:number", "--data")
    seen = tmp_path.stat()
    (tmp_path / f"late_{id(tmp_path)}.py").write_text("number = 3")
    os.utime(tmp_path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert imported(f"late_{id(tmp_path)}:number", "--data") == 3


def test_fuse_takes_models_and_data_by_name_and_files_of_torch(folder):
    own = sys.modules[imported(f"{folder}:make", "--models").__module__]
    for number in range(2):
        torch.manual_seed(number)
        torch.save(own.make((4,), 2).state_dict(), f"{number}.pt")
    words = ["fuse", "0.pt", "1.pt", "--models", f"{folder}:make", "--method", "ensemble", "--data", f"{folder}:rows"]
    done = call(*words, "--out", "fused.safetensors")
    assert done.exit_code == 0 and "ensemble of 2 networks" in done.output
    with pytest.raises(InputError, match=r"pass what builds them \(models="):
        load_fused("fused")
    fused = load_fused("fused", models=[own.make])
    x = torch.randn(5, 4)
    each = []
    for number in range(2):
        network = own.make((4,), 2)
        network.load_state_dict(torch.load(f"{number}.pt", weights_only=True))
        each.append(network(x).softmax(1))
    assert torch.allclose(fused(x).softmax(1), (each[0] + each[1]) / 2, atol=1e-6)


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("--models", "{}:absent", "has no attribute 'absent'"),
        ("--models", "{}:number", "name a function or class that makes a network"),
        ("--models", "absent_module.x:make", "No module named 'absent_module'"),
        ("--models", "mpl:wide", "Unknown model 'mpl': did you mean 'mlp'"),
        ("--data", "{}:broken", "failed with ZeroDivisionError"),
        ("--data", "{}:absent", "has no attribute 'absent'"),
    ],
)
def test_what_cannot_be_used_is_a_sentence(folder, option, name, words):
    given = {"--models": "mlp:1x8", "--data": f"{folder}:rows", option: name.format(folder)}
    with pytest.raises(InputError, match=words):
        call("run", "--method", "local", *SMALL, *(word for pair in given.items() for word in pair))


# --- compare in Python ---


def small(seed=0):
    return pf.split(pf.load("digits", limit=(150, 60)), clients=2, seed=seed)


def tiny(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, num_classes))


def test_compare_takes_methods_data_and_networks_as_objects(tmp_path):
    given = {"plain": pf.FedAvg(), "near": pf.FedProx(mu=0.1)}
    rows = pf.compare(given, clients=small, models=[tiny], rounds=2, seeds=2, out=tmp_path / "c")
    assert [row.method for row in rows] == ["local", "plain", "near"] and len(rows[1].accuracy) == 2
    alone = [pf.run(pf.Local(), small(seed), [tiny], rounds=2, seed=seed).accuracy()["mean"] for seed in range(2)]
    assert rows[0].accuracy == alone
    assert rows[1].gain == [a - b for a, b in zip(rows[1].accuracy, alone, strict=True)]
    assert "near" in str(rows.table())
    from polyfed.report import write_report

    assert write_report(tmp_path / "c").is_file()
    again = pf.compare(given, clients=small, models=[tiny], rounds=2, seeds=2, out=tmp_path / "c")
    assert [row.accuracy for row in again] == [row.accuracy for row in rows]


def test_compare_refuses_a_method_that_does_not_fit_before_anything_trains(tmp_path):
    with pytest.raises(InputError, match="fedmd needs"):
        pf.compare(["fedavg", "fedmd"], clients=small(), models="mlp:1x8", rounds=1, out=tmp_path / "c")
    assert not (tmp_path / "c").exists()
    with pytest.raises(InputError, match="compare needs data"):
        pf.compare(["fedavg"])
    for jobs, told in ((2, "cannot be handed to other processes"), ("two", "jobs is 'auto' or a number from 1")):
        with pytest.raises(pf.InputError, match=told):
            pf.compare(["fedavg"], clients=small(), models="mlp:1x8", rounds=1, jobs=jobs)


def test_compare_is_the_function_also_after_its_module_was_imported():
    import polyfed.compare  # noqa: F401

    assert callable(pf.compare)
