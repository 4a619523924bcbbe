"""Files of models that say how they are used: `polyfed fuse` prepares the data as they say, and says it again."""

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import polyfed as pf
from polyfed.cli.commands import app
from polyfed.trained import load_model

TRAINING = pf.Training(optimizer="adam", lr=0.05, epochs=6)


def rows(count, center, seed=0, labels=("ill", "well")):
    rng = np.random.default_rng(seed)
    age = rng.normal(center, 12, count).round(1)
    smoker = rng.choice(["no", "yes"], count)
    old = (age + 10 * (smoker == "yes")) > 55
    return pandas.DataFrame({"age": age, "smoker": smoker, "ward": "a", "outcome": np.where(old, *labels)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two hospitals' model, and a file of much older patients, among whom nearly all are ill."""
    place = tmp_path_factory.mktemp("fuse")
    table = rows(400, 50)
    clients = pf.split(pf.load(table.drop(columns="ward"), label="outcome"), clients=2, by="iid")
    pf.run("fedavg", clients, models="tabular:1x16", rounds=4, training=TRAINING, out=place / "run")
    rows(200, 65, seed=1).to_csv(place / "old.csv", index=False)
    return place


def fuse(folder, out, *words, files=None, data=None, code=0):
    files = files or [folder / "run" / "models" / f"client-{number}.safetensors" for number in range(2)]
    given = ("fuse", *files, "--models", "tabular:1x16", "--data", data or folder / "old.csv", "--label", "outcome")
    done = CliRunner().invoke(app, [str(word) for word in (*given, "--out", out, *words)])
    text = " ".join(done.output.split()) + (str(done.exception) if done.exception else "")
    assert (done.exit_code == 0) == (code == 0), text
    return text


def reached(text):
    return float(text.split("networks: ")[1].split(" %")[0])


@pytest.mark.parametrize("method", ["average", "ensemble", "ams-top1", "ensemble --distill-into tabular:1x8"])
def test_rows_are_scaled_as_the_files_say_and_the_fused_file_predicts(folder, tmp_path, method):
    text = fuse(folder, tmp_path / "fused.safetensors", "--method", *method.split())
    assert "prepared as the header of client-0.safetensors says" in text
    alone = load_model(folder / "run", 0)
    table = pandas.read_csv(folder / "old.csv")
    told = alone.predict(folder / "old.csv")
    expected = np.mean([a == b for a, b in zip(told, table.outcome, strict=True)])
    assert expected > 0.85
    fused = load_model(tmp_path / "fused.safetensors")
    if "distill" not in method:
        assert reached(text) > 80
        assert fused.predict(table) == told
    assert "polyfed predict" in text
    words = ["predict", tmp_path / "fused.safetensors", folder / "old.csv", "--out", tmp_path / "p.csv"]
    assert CliRunner().invoke(app, [str(word) for word in words]).exit_code == 0
    assert pandas.read_csv(tmp_path / "p.csv").prediction.tolist() == fused.predict(table)


def test_a_class_that_the_rows_lack_keeps_its_number(folder, tmp_path):
    table = rows(200, 90, seed=2)  # everybody is ill
    table[table.outcome == "ill"].to_csv(tmp_path / "ill.csv", index=False)
    assert reached(fuse(folder, tmp_path / "a", "--method", "average", data=tmp_path / "ill.csv")) > 90
    table[table.outcome == "ill"].assign(outcome="well").to_csv(tmp_path / "well.csv", index=False)
    assert reached(fuse(folder, tmp_path / "b", "--method", "average", data=tmp_path / "well.csv")) < 10


def test_files_without_a_header_are_scaled_by_the_data_and_that_is_said(folder, tmp_path):
    states = [load_file(folder / "run" / "models" / f"client-{number}.safetensors") for number in range(2)]
    torch.save(states[0], tmp_path / "a.pt")
    save_file(states[1], tmp_path / "b.safetensors")
    files = [tmp_path / "a.pt", tmp_path / "b.safetensors"]
    text = fuse(folder, tmp_path / "fused", "--method", "average", "--drop-columns", "ward", files=files)
    assert "a.pt, b.safetensors: no header" in text and "columns (age, smoker), scaling" in text
    assert "load_fused" in text and "polyfed predict" not in text
    assert "columns (age, smoker, ward)" in fuse(folder, tmp_path / "no", files=files, code=1)
    mixed = [folder / "run" / "models" / "client-0.safetensors", tmp_path / "b.safetensors"]
    assert "b.safetensors: no header, taken to be alike" in fuse(folder, tmp_path / "both", files=mixed)


def other(tmp_path, table):
    clients = pf.split(pf.load(table, label="outcome"), clients=2, by="iid")
    pf.run("local", clients, models="tabular:1x16", rounds=1, out=tmp_path / "run")
    return tmp_path / "run" / "models" / "client-0.safetensors"


@pytest.mark.parametrize(
    ("change", "says"),
    [(lambda t: t, "another scaling (age: mean"),
     (lambda t: t.assign(pulse=t.age), "other columns (age, smoker against age, smoker, pulse)"),
     (lambda t: t.assign(outcome="a" + t.outcome), "other classes (ill, well against aill, awell)")],
)  # fmt: skip
def test_headers_that_disagree_are_refused(folder, tmp_path, change, says):
    table = change(rows(200, 65, seed=3).drop(columns="ward"))
    files = [folder / "run" / "models" / "client-0.safetensors", other(tmp_path, table)]
    text = fuse(folder, tmp_path / "fused", files=files, code=1)
    assert says in text and "size mismatch" not in text and not (tmp_path / "fused.safetensors").exists()


def test_rows_without_a_column_of_the_header_are_refused_with_its_name(folder, tmp_path):
    rows(50, 50).drop(columns="smoker").to_csv(tmp_path / "less.csv", index=False)
    text = fuse(folder, tmp_path / "fused", data=tmp_path / "less.csv", code=1)
    assert "has no column 'smoker'" in text
