"""What people are told about tables, signals and images: the right thing, and no two things that contradict."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from polyfed.core.errors import InputError
from polyfed.data import ByColumn, load, split


def patients(**more):
    count = np.arange(60)
    plain = {"patient_id": count, "hospital": np.array(["n", "s", "w"])[count % 3], "age": count * 1.0}
    return pd.DataFrame({**plain, **more, "outcome": np.array(["ill", "well"])[count % 2]})


@pytest.mark.parametrize(
    "written",
    ["2024-01-{:02d}", "{:02d}.01.2024", "{}/1/2024", "2024-01-{:02d} 10:30", "2024-01-{:02d}T10:30:00Z",
     "202401{:02d}", "{:02d}.01.24", "1/{}/24 10:30", "{}-Jan-24", "{} january 2024", "Jan {}, 2024"],
)  # fmt: skip
def test_dates_are_refused_however_they_are_written(written, tmp_path):
    days = [written.format(1 + row % 12) for row in range(60)]
    frame = patients(visit=[None, *days[1:]])
    frame.to_csv(tmp_path / "p.csv", index=False)
    for source in (frame, tmp_path / "p.csv"):
        with pytest.raises(InputError, match=r"Column 'visit' of .* holds dates or times.*drop=\['visit'\]"):
            load(source, label="outcome", cache=False)


def test_dates_are_refused_where_some_are_unknown():
    days = ["unknown" if row % 10 == 0 else f"{1 + row % 12}.1.24" for row in range(60)]
    with pytest.raises(InputError, match=r"Column 'visit' of .* holds dates or times"):
        load(patients(visit=days), label="outcome")


def test_words_that_look_a_little_like_dates_are_categories():
    words = ["1.2.3", "2024", "10-20", "2024-01"] * 15
    assert "visit (4)" in "".join(load(patients(visit=words), label="outcome").notes)


def test_signals_of_different_lengths_are_called_signals():
    signals = [np.zeros((3, 50 + row % 2), dtype="f") for row in range(20)]
    items = [(signal, row % 2) for row, signal in enumerate(signals)]
    for source in ((signals, np.arange(20) % 2), items):
        with pytest.raises(InputError, match=r"signals of .* \(3 x 50, 3 x 51; .*pad or cut") as error:
            load(source, kind="signal")
        assert "image" not in str(error.value) and "resize" not in str(error.value)


def test_a_wrong_column_to_group_by_is_answered_with_all_there_are():
    with pytest.raises(InputError, match="no column 'clinic' to group by: it has age, hospital, patient_id"):
        split(load(patients(), label="outcome"), by=ByColumn("clinic"))


def test_notes_do_not_call_the_dividing_column_a_feature():
    frame = patients(sex=["f", "m"] * 30)
    frame.loc[3, "sex"] = None
    frame.loc[4, "age"] = np.nan
    notes = split(load(frame, label="outcome"), by=ByColumn("hospital")).notes
    assert "columns of categories, a position for each value: sex (2)" in notes
    notes = split(load(patients(), label="outcome"), by=ByColumn("hospital")).notes
    assert [note for note in notes if "hospital" in note] == ["column 'hospital' divides the rows and is no feature"]


def test_a_note_on_images_does_not_call_all_of_them_the_training_set(tmp_path):
    from PIL import Image

    for row in range(20):
        file = tmp_path / "imgs" / "ab"[row % 2] / f"{row}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L" if row < 4 else "RGB", (8, 8)).save(file)
    (note,) = load(tmp_path / "imgs", cache=False).notes
    assert note.startswith("4 grey images of imgs are beside 16")
    grey = [np.zeros((8, 8) if row < 4 else (8, 8, 3), dtype="uint8") for row in range(20)]
    (note,) = load((grey, np.arange(20) % 2)).notes
    assert note.startswith("4 grey images of 'own data' are beside 16")


def test_class_names_that_differ_by_case_or_blanks_are_noted():
    frame = patients()
    frame["outcome"] = (["Ill ", "ill", "well"] * 20)[:60]
    (note,) = (note for note in load(frame, label="outcome").notes if "differ only" in note)
    assert "'Ill ' and 'ill'" in note and "well" not in note
    assert not any("differ only" in note for note in load(patients(), label="outcome").notes)
