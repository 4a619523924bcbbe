"""A new client joins a finished run."""

from __future__ import annotations

import json

import pandas
import pytest
import torch
from typer.testing import CliRunner

import polyfed as pf
from polyfed.api import resume
from polyfed.cli import app
from polyfed.core.errors import InputError
from polyfed.core.newcomers import together

ROWS = [
    {"hospital": ["north", "south"][n % 2], "age": 30 + n % 40, "sex": "fm"[n % 3 == 0], "outcome": "yn"[n % 3 == 0]}
    for n in range(120)
]


def newcomer():
    return pf.load("digits", limit=(30, 20), seed=5)


def finished(out, method="fedavg", models="mlp:1x8", **options):
    clients = pf.split(pf.load("digits", limit=(90, 40)), clients=3, by="iid", **options)
    return pf.run(method, clients, models, rounds=2, out=out)


@pytest.mark.parametrize(("method", "model"), [("fedavg", "mlp:1x8"), ("feddistill", "mlp:1x12")])
def test_a_new_client_takes_part_and_the_others_go_on(tmp_path, method, model):
    earlier = finished(tmp_path / "a", method, ["mlp:1x8", "mlp:1x8", "mlp:2x8"])
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    result = pf.add_client(tmp_path / "a", newcomer(), model=model, rounds=4, out=tmp_path / "b")
    assert before == {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert result.history[:2] == earlier.history and [line["round"] for line in result.history] == [1, 2, 3, 4]
    assert result.history[2]["participants"] == [0, 1, 2, 3]
    assert result.architectures == ["mlp:1x8", "mlp:1x8", "mlp:2x8", model]
    assert len(result.accuracy()["per_client"]) == 4 and result.accuracy()["personal"]["clients"] == [3]
    if method == "fedavg":  # it has what the others of its architecture share
        assert torch.equal(result.models[0].head.weight, result.models[3].head.weight)
    assert pf.load_model(tmp_path / "b", 3).predict(newcomer().test.x[:2])


def test_it_goes_on_where_it_was_stopped(tmp_path):
    finished(tmp_path / "a")
    asked = {"model": "mlp:1x8", "rounds": 5}
    whole = pf.add_client(tmp_path / "a", newcomer(), **asked, out=tmp_path / "whole")

    def stop(line):
        if line["round"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pf.add_client(tmp_path / "a", newcomer(), **asked, out=tmp_path / "b", observers=[stop])
    again = pf.add_client(tmp_path / "a", newcomer(), **asked, out=tmp_path / "b")
    assert again.rounds == 5
    for client in range(4):
        assert torch.equal(again.models[client].head.weight, whole.models[client].head.weight)
    with pytest.raises(InputError, match="other settings"):
        pf.add_client(tmp_path / "a", newcomer(), model="mlp:1x8", rounds=6, out=tmp_path / "b")


def test_it_does_by_itself_what_clients_do_before_the_rounds(tmp_path):
    method = pf.FedMD(public_epochs=1, private_epochs=1)
    clients = pf.split(pf.load("digits", limit=(90, 40)), clients=2, by="iid", public=20)
    pf.run(method, clients, ["mlp:1x8", "mlp:2x8"], rounds=1, out=tmp_path / "a")
    steps = []
    local = type(method).local

    def told(self, client, step, ctx):
        steps.append((client.id, step.name))
        return (yield from local(self, client, step, ctx))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "local", told)
        pf.add_client(tmp_path / "a", newcomer(), model="mlp:1x12", rounds=2, out=tmp_path / "b")
    alone = {step.name for step in method.plan().before if not step.up}
    assert alone and {step for client, step in steps if client == 2} >= alone
    assert not {step for client, step in steps if client < 2} & alone


def test_rows_of_a_table_become_numbers_as_those_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = pandas.DataFrame(ROWS)
    table.to_csv("patients.csv", index=False)
    table[:40].assign(sex="x", hospital="west", extra="2020-01-01").to_csv("west.csv", index=False)
    run = [
        "run",
        "--data",
        "patients.csv",
        "--label",
        "outcome",
        "--partition",
        "column:hospital",
        "--method",
        "fedavg",
    ]
    call = CliRunner()
    done = call.invoke(app, [*run, "--models", "tabular:1x8", "--rounds", "1", "--out", "a", "--quiet"])
    assert done.exit_code == 0, done.output
    join = ["add", "a", "--data", "west.csv", "--model", "tabular:1x8", "--rounds", "2", "--name", "west", "--quiet"]
    done = call.invoke(app, [*join, "--out", "b"])
    assert done.exit_code == 0, done.output
    assert "west" in done.output and json.loads((tmp_path / "b" / "result.json").read_text())["rounds"] == 2
    old, new = pf.load_model("a", "north"), pf.load_model("b", "west")
    assert torch.equal(old.inputs("west.csv"), new.inputs("west.csv")) and old.class_names == new.class_names
    with pytest.raises(InputError, match="There is a client 'north' already"):
        pf.add_client("a", "west.csv", model="tabular:1x8", rounds=2, out="c", name="north")
    table.assign(outcome="maybe").to_csv("other.csv", index=False)
    with pytest.raises(InputError, match=r"'maybe' in row 0 .* is not one of the classes n, y"):
        pf.add_client("a", "other.csv", model="mlp:1x8", rounds=2, out="c", name="other")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rounds": 2}, "it has 2 rounds already"),
        ({"data": pf.load("digits", limit=(30, 20)).train.x[:20].float().numpy()}, "has no labels|samples|pair"),
        ({"data": (torch.rand(20, 1, 9, 9).numpy(), [n % 10 for n in range(20)])}, "but those of the run have shape"),
    ],
)
def test_what_cannot_be_is_said_and_leaves_nothing(tmp_path, asked, message):
    finished(tmp_path / "a")
    given = {"data": newcomer(), "model": "mlp:1x8", "rounds": 3, "out": tmp_path / "b", **asked}
    with pytest.raises(InputError, match=message):
        pf.add_client(tmp_path / "a", given.pop("data"), **given)
    assert not (tmp_path / "b").exists()


def test_an_architecture_that_would_move_what_the_server_has_is_refused(tmp_path):
    finished(tmp_path / "a", "fedavg", "mlp:1x8")
    with pytest.raises(InputError, match="give it an architecture that other clients of the run have"):
        pf.add_client(tmp_path / "a", newcomer(), model="mlp:1x12", rounds=3, out=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_runs_of_a_script_and_one_shot_methods(tmp_path):
    finished(tmp_path / "once", method="oneshot_fedavg")
    with pytest.raises(InputError, match="number of rounds of its own"):
        pf.add_client(tmp_path / "once", newcomer(), model="mlp:1x8", rounds=3, out=tmp_path / "b")
    parts = [(torch.rand(20, 6).numpy(), [n % 2 for n in range(20)]) for _ in range(3)]
    clients = pf.Clients.from_parts(parts[:2], test=parts[2])
    pf.run("fedavg", clients, "mlp:1x8", rounds=1, out=tmp_path / "a")
    with pytest.raises(InputError, match=r"used data from a script: pass them \(clients=...\)"):
        pf.add_client(tmp_path / "a", parts[2], model="mlp:1x8", rounds=2, out=tmp_path / "b")
    result = pf.add_client(tmp_path / "a", parts[2], model="mlp:1x8", rounds=2, out=tmp_path / "b", clients=clients)
    assert len(result.models) == 3
    with pytest.raises(InputError, match="not those of the run"):
        other = pf.Clients.from_parts(parts[1:], test=parts[0])
        pf.add_client(tmp_path / "a", parts[2], model="mlp:1x8", rounds=2, out=tmp_path / "c", clients=other)


def test_a_run_that_goes_on_by_itself_has_no_newcomers(tmp_path):
    finished(tmp_path / "a")
    assert resume(tmp_path / "a", rounds=3).history[-1]["participants"] == [0, 1, 2]


def test_what_is_saved_wins_and_what_is_new_is_added():
    new, saved = {"heads": {"a": 0, "b": 1}, "seen": 0, "fresh": 2}, {"heads": {"a": 9}, "seen": 5}
    assert together(new, saved) == {"heads": {"a": 9, "b": 1}, "seen": 5, "fresh": 2}
