"""Sentences about tables say where: the column, how many rows, the nearest name, and what looks like an identifier."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import polyfed as pf
from polyfed.core.errors import InputError
from polyfed.data.agree import agree, tell

ROWS = 40
RNG = np.random.default_rng(0)


def patients(**more):
    table = {"age": RNG.normal(60, 9, ROWS), "systolic": 100 + RNG.integers(0, 20, ROWS)}
    return pd.DataFrame({**table, **more, "outcome": ["ill", "well"] * (ROWS // 2)})


def notes(**more):
    return [note for note in pf.load(patients(**more), label="outcome").notes if "identifier" in note]


# --- identifiers ---


def test_whole_numbers_that_differ_in_every_row_are_told():
    (told,) = notes(mrn=RNG.permutation(ROWS) + 70_000)
    assert told == (
        "column 'mrn' is a feature, but its whole numbers differ in every row, as those of an identifier do: leave it "
        "out if it is one (drop=['mrn'], --drop-columns mrn)"
    )
    parts = {"north": patients(mrn=range(ROWS)), "south": patients(mrn=range(50, 50 + ROWS))}
    assert any("'mrn'" in note for note in pf.Clients.from_parts(parts, test="own", label="outcome").notes)


@pytest.mark.parametrize(
    "values", [np.arange(ROWS) // 2, RNG.normal(size=ROWS), np.arange(ROWS) % 2 == 0], ids=["twice", "floats", "flags"]
)
def test_other_columns_are_not(values):
    assert notes(mrn=values) == []


def test_few_rows_and_features_that_somebody_named_are_not():
    few = patients(mrn=range(ROWS))[:19]
    assert not any("identifier" in note for note in pf.load(few, label="outcome").notes)
    named = pf.load(patients(mrn=range(ROWS)), label="outcome", inputs=["age", "mrn"])
    assert not any("identifier" in note for note in named.notes)


# --- where ---


def test_a_value_that_is_not_finite_is_told_with_its_column_and_row_as_it_was_read():
    age = np.full(ROWS, 60.0)
    age[[33, 35]] = np.inf, -np.inf
    said = r"Row 33 of .* holds a value that is NaN or infinite \(2 such rows\), in column 'age': remove or repair them"
    with pytest.raises(InputError, match=said):
        pf.load(patients(age=age), label="outcome")
    with pytest.raises(InputError, match=f"Row 33 of client south .*{said[13:]}"):
        pf.Clients.from_parts({"north": patients(), "south": patients(age=age)}, test="own", label="outcome")
    array = np.ones((10, 3), dtype=np.float32)
    array[4, 2] = np.nan
    with pytest.raises(InputError, match=r"Row 4 of .*\(1 such row\), in column 2: remove or repair it"):
        pf.load((array, [0, 1] * 5))


def test_new_rows_that_are_not_finite_are_told_with_their_column(tmp_path):
    clients = pf.split(pf.load(patients(), label="outcome"), clients=2)
    pf.run("local", clients, "mlp:1x4", rounds=1, out=tmp_path / "run")
    with pytest.raises(InputError, match=r"Row 1 of the given data .*, in column 'systolic'"):
        pf.load_model(tmp_path / "run", 0).predict([{"age": 1, "systolic": 1}, {"age": 1, "systolic": np.inf}])
    with pytest.raises(InputError, match=r"no column 'systolic', which the network needs: did you mean 'sistolic'\?"):
        pf.load_model(tmp_path / "run", 0).predict([{"age": 1, "sistolic": 1}])
    with pytest.raises(InputError, match=r"There is no .*nothere\.safetensors: correct the path"):
        pf.load_model(tmp_path / "nothere.safetensors")


@pytest.mark.parametrize("gone", [(3,), (3, 5, 8, 9, 20, 21)])
def test_how_many_rows_have_no_label(gone):
    labels = ["ill", "well"] * (ROWS // 2)
    for row in gone:
        labels[row] = None
    many = r" \(6 such rows\)" if len(gone) > 1 else " .*"
    for source in (patients().assign(outcome=labels), (np.ones((ROWS, 2)), np.array(labels, dtype=object))):
        with pytest.raises(InputError, match=f"Row 3 of .* has no label.*{many}"):
            pf.load(source, label="outcome") if isinstance(source, pd.DataFrame) else pf.load(source)


def test_a_column_of_the_agreed_form_that_is_missing_is_told_with_the_nearest_name():
    agreed = agree({"north": tell(pf.load(patients(), label="outcome"))})
    site = patients().rename(columns={"systolic": "sistolic"})
    said = r"has no column 'systolic', which the form has .*: did you mean 'sistolic'\?"
    with pytest.raises(InputError, match=said):
        pf.load(site, label="outcome", **agreed.options())
    with pytest.raises(InputError, match=r"which the form has .*: its columns are age\."):
        pf.load(site.drop(columns="sistolic"), label="outcome", **agreed.options())


def test_images_of_other_sizes_are_told_how_to_bring_them_to_one():
    small, large = ((RNG.integers(0, 255, (10, n, n), dtype=np.uint8), [0, 1] * 5) for n in (8, 9))
    for parts, test in (((small, large), "own"), ((small, large), small), ((small, small), [small, large])):
        with pytest.raises(InputError, match=r"shape.*resize=\(height, width\)"):
            pf.Clients.from_parts(list(parts), test=test, kind="image")


def test_each_option_of_a_table_says_what_it_is_itself():
    from polyfed.cli.options import option

    helps = [option(name).annotation.__metadata__[0].help for name in ("label", "columns", "drop_columns")]
    assert len(set(helps)) == 3 and not any("(default )" in told for told in helps)
    assert "labels" in helps[0] and "kept beside the features" in helps[1] and "left out" in helps[2]
