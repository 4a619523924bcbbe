"""`polyfed predict`: which row a prediction belongs to, and that no file is written over."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
from typer.testing import CliRunner

import polyfed as pf
from polyfed.cli import app
from polyfed.core.errors import InputError
from polyfed.exporting import write_predictions

ROWS = 40
TABLE = pandas.DataFrame(
    {"mrn": [f"p-{row}" for row in range(ROWS)], "age": np.arange(ROWS) * 1.0, "outcome": ["ill", "well"] * (ROWS // 2)}
)


@pytest.fixture
def model(tmp_path):
    clients = pf.split(pf.load(TABLE, label="outcome", drop=["mrn"]), clients=2)
    pf.run("local", clients, "mlp:1x4", rounds=1, out=tmp_path / "run")
    TABLE.to_csv(tmp_path / "new.csv", index=False)
    return pf.load_model(tmp_path / "run", 0)


def test_a_row_of_predictions_has_the_number_of_its_row_and_what_one_asks_for(model, tmp_path):
    write_predictions(model, tmp_path / "new.csv", tmp_path / "plain.csv")
    plain = pandas.read_csv(tmp_path / "plain.csv")
    assert plain.columns.tolist() == ["row", "prediction", "ill", "well"] and plain["row"].tolist() == list(range(ROWS))
    words = ["predict", str(tmp_path / "run"), str(tmp_path / "new.csv"), "--client", "0"]
    done = CliRunner().invoke(app, [*words, "--keep", "mrn,outcome", "--out", str(tmp_path / "kept.csv")])
    assert done.exit_code == 0, done.output
    kept = pandas.read_csv(tmp_path / "kept.csv")
    assert kept.columns.tolist() == ["row", "mrn", "outcome", "prediction", "ill", "well"]
    assert kept[["mrn", "outcome"]].equals(TABLE[["mrn", "outcome"]]) and kept["ill"].equals(plain["ill"])


@pytest.mark.parametrize(
    ("keep", "said"),
    [(["mnr"], r"no column 'mnr' to keep: did you mean 'mrn'\?"), (["ill"], "'ill' is a column of the predictions")],
)
def test_a_column_that_cannot_be_kept_is_refused(model, tmp_path, keep, said):
    TABLE.assign(ill=1).to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(InputError, match=said):
        write_predictions(model, tmp_path / "new.csv", tmp_path / "p.csv", keep)
    assert not (tmp_path / "p.csv").exists()


def test_only_tables_have_columns_to_keep(tmp_path):
    clients = pf.split(pf.load("digits", limit=(60, 40)), clients=2)
    pf.run("local", clients, "mlp:1x4", rounds=1, out=tmp_path / "digits")
    np.save(tmp_path / "new.npy", clients.test.x[:3].numpy())
    model = pf.load_model(tmp_path / "digits", 0)
    with pytest.raises(InputError, match=r"new\.npy has no columns to keep"):
        write_predictions(model, tmp_path / "new.npy", tmp_path / "p.csv", ["id"])
    write_predictions(model, tmp_path / "new.npy", tmp_path / "p.csv")
    assert pandas.read_csv(tmp_path / "p.csv")["row"].tolist() == [0, 1, 2]


def test_a_file_that_is_there_stays_as_it_is(model, tmp_path):
    before = (tmp_path / "new.csv").read_bytes()
    with pytest.raises(InputError, match=r"new.csv already exists: choose another --out, or remove it"):
        write_predictions(model, tmp_path / "new.csv", tmp_path / "new.csv")
    assert (tmp_path / "new.csv").read_bytes() == before
