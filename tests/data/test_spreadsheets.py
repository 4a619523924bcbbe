"""CSV files as spreadsheets write them: other letters, semicolons, commas in numbers, and what cannot be read."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import polyfed as pf
from polyfed.core.errors import InputError

ROWS = range(40)


def written(tmp_path, lines, encoding="utf-8", name="t.csv"):
    (tmp_path / name).write_bytes("\n".join(lines).encode(encoding))
    return tmp_path / name


@pytest.mark.parametrize(
    ("encoding", "said"),
    [("utf-8", None), ("utf-8-sig", None), ("cp1252", "read as cp1252"), ("utf-16", "read as utf-16")],
)
def test_letters_of_other_countries_are_read(tmp_path, encoding, said):
    lines = ["größe;ort;finding", *(f"{row};{['Köln', 'Bonn'][row % 2]};{row % 2}" for row in ROWS)]
    data = pf.load(written(tmp_path, lines, encoding), label="finding", cache=False)
    assert data.features == ("größe", "ort")
    assert data.form.columns[1].values == ("Bonn", "Köln")
    told = [note for note in data.notes if "not written in UTF-8" in note]
    assert told == [] if said is None else said in told[0]


@pytest.mark.parametrize("mark", [";", "\t"])
def test_numbers_with_a_comma_are_numbers_and_that_is_said(tmp_path, mark):
    lines = [mark.join(["weight", "code", "finding"])]
    lines += [mark.join([f"{row},5", f"{row}.25", str(row % 2)]) for row in ROWS]
    data = pf.load(written(tmp_path, lines), label="finding", cache=False)
    assert [column.kind for column in data.form.columns] == ["number", "number"]
    weights = np.concatenate([data.train.x[:, 0], data.test.x[:, 0]])
    assert sorted(weights.tolist()) == [row + 0.5 for row in ROWS]
    assert any("written with a comma: weight" in note for note in data.notes)


def test_two_columns_of_one_name_are_refused(tmp_path):
    file = written(tmp_path, ["a,a,label", *(f"{row},{row},{row % 2}" for row in ROWS)])
    with pytest.raises(InputError, match=r"t.csv has 2 columns 'a': rename or remove them"):
        pf.load(file)


def test_a_file_without_names_is_refused_and_one_of_pandas_is_not(tmp_path):
    lines = [f"{row},{row / 2},{row % 2}" for row in ROWS]
    with pytest.raises(InputError, match=r"The first line of .*t.csv holds numbers \(0,0.0,0\): .* column names"):
        pf.load(written(tmp_path, lines), label="2", cache=False)
    file = written(tmp_path, ["0,1,2", *lines])
    assert pf.load(file, label="2", cache=False).features == ("0", "1")


def test_a_word_among_numbers_is_named(tmp_path):
    lines = ["age,label", *(f"{'old' if row % 9 == 3 else row},{row % 2}" for row in ROWS)]
    with pytest.raises(InputError, match=r"Column 'age' of .* holds numbers beside words such as 'old': make"):
        pf.load(written(tmp_path, lines), cache=False, kind="table")


def test_yes_and_no_as_a_label_keep_their_names(tmp_path):
    table = pd.DataFrame({"age": ROWS, "label": [row % 3 == 0 for row in ROWS]})
    table.to_csv(tmp_path / "t.csv", index=False)
    for source in (table, tmp_path / "t.csv"):
        data = pf.load(source, cache=False)
        assert data.class_names == ("False", "True")
        assert int(data.train.y.sum() + data.test.y.sum()) == sum(row % 3 == 0 for row in ROWS)


def test_masks_are_called_segmentation():
    with pytest.raises(InputError, match=r"shape \(20, 8, 8\): .*a class for every pixel \(segmentation\)"):
        pf.load((np.zeros((20, 3, 8, 8), "f"), np.zeros((20, 8, 8), int)))


def test_one_class_alone_is_said():
    data = pf.load(pd.DataFrame({"age": ROWS, "label": "ill"}))
    assert any("all labels are 'ill', so that there is nothing to tell apart" in note for note in data.notes)
