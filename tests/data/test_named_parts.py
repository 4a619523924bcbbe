"""Parts with names: whatever is wrong with one is said by its name; labels that are one class in two spellings."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

import polyfed as pf
from polyfed.cli import app
from polyfed.core.errors import InputError
from polyfed.data.agree import agree, tell

RNG = np.random.default_rng(0)


def frame(words=("ill", "well"), rows=20, **more):
    return pd.DataFrame(
        {"age": RNG.normal(60, 9, rows), **more, "outcome": [words[k % len(words)] for k in range(rows)]}
    )


def arrays(rows=20, width=3, labels=(0, 1), kind=np.float32):
    return RNG.normal(size=(rows, width)).astype(kind), np.array([labels[k % len(labels)] for k in range(rows)])


def pictures(folder, words):
    for word in words:
        (folder / word).mkdir(parents=True)
        for row in range(6):
            Image.fromarray(RNG.integers(0, 255, (8, 8), dtype=np.uint8)).save(folder / word / f"{row}.png")
    return folder


# --- by name ---


@pytest.mark.parametrize(
    ("south", "test", "said"),
    [
        ("absent.csv", "own", r"There is no file absent.csv for client South"),
        (frame(rows=0), "own", r"Client South has no samples"),
        (frame(ward=1.0), "own", None),
        (frame().assign(age=1 + 1j), "own", r"client South"),
    ],
)
def test_a_part_that_cannot_be_used_is_called_by_its_name(south, test, said):
    parts = {"North": frame(), "South": south}
    if said is None:
        assert pf.Clients.from_parts(parts, test=test, label="outcome").names == ("North", "South")
        return
    with pytest.raises(InputError, match=said):
        pf.Clients.from_parts(parts, test=test, label="outcome")


@pytest.mark.parametrize(
    ("south", "said"),
    [
        (arrays(width=4), r"[Cc]lient South has samples of shape \(4,\).*client North has \(3,\)"),
        (arrays(labels=("a", "b")), "labels of client South are names, but those of client North are numbers"),
        ((RNG.normal(size=(4, 3)), None), "client South"),
        ((np.full((4, 3), np.nan, dtype=np.float32), [0, 1, 0, 1]), "client South"),
    ],
)
def test_arrays_that_do_not_fit_are_called_by_the_names_of_their_clients(south, said):
    with pytest.raises(InputError, match=said):
        pf.Clients.from_parts({"North": arrays(), "South": south}, test=arrays())


def test_own_test_sets_and_notes_have_the_names_too():
    parts = {"North": arrays(), "South": arrays()}
    with pytest.raises(InputError, match=r"own test set of client South have shape \(4,\), but those of client North"):
        pf.Clients.from_parts(parts, test=arrays(), own_test=[arrays(), arrays(width=4)])
    words = {"North": frame(ward=["a", "b"] * 10), "South": frame(ward=["b", None] * 10)}
    notes = pf.Clients.from_parts(words, test=frame(ward=["a", "b"] * 10), label="outcome").notes
    assert any("empty cells of words in client South" in note for note in notes)


# --- one class, written in two ways ---


def test_labels_that_differ_by_case_are_told_with_who_has_them():
    parts = {"north": frame(), "south": frame(("ILL", "well")), "west": frame(("ILL", "well"))}
    clients = pf.Clients.from_parts(parts, test="own", label="outcome")
    told = [note for note in clients.notes if "differ only by case" in note]
    assert told == [
        "classes whose names differ only by case or blanks: 'ILL' (client south, client west) and 'ill' (client north) "
        "(one class? write it alike)"
    ]


def test_folders_of_classes_that_differ_by_case_are_told(tmp_path):
    parts = {
        "north": pictures(tmp_path / "north", ["normal", "ill"]),
        "south": pictures(tmp_path / "south", ["Normal"]),
    }
    notes = pf.Clients.from_parts(parts, test="own").notes
    assert any("'normal' (client north) and 'Normal' (client south)" in note for note in notes)
    whole = pf.load(pictures(tmp_path / "all", ["Normal", "normal", "ill"]))
    assert any("'Normal' and 'normal'" in note for note in whole.notes)
    fine = {"north": parts["north"], "south": pictures(tmp_path / "b", ["normal"])}
    assert not any("differ only" in note for note in pf.Clients.from_parts(fine, test="own").notes)


def test_sites_that_agree_are_told_of_two_spellings_of_a_class_or_a_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sites = {"north": frame(ward=["a", "b"] * 10), "south": frame(("ILL", "well"), ward=["A", "b"] * 10)}
    told = {name: tell(pf.load(table, test=table, label="outcome")) for name, table in sites.items()}
    assert agree({"north": told["north"]}).notes == ()
    assert agree(told).notes == (
        "values of 'ward' that differ only by case or blanks: 'A' (south) and 'a' (north) (one value? write it alike)",
        "classes whose names differ only by case or blanks: 'ILL' (south) and 'ill' (north) "
        "(one class? write it alike)",
    )
    run = CliRunner()
    for name, table in sites.items():
        table.to_csv(f"{name}.csv", index=False)
        assert (
            run.invoke(app, ["form", "tell", f"{name}.csv", "--label", "outcome", "--out", f"{name}.json"]).exit_code
            == 0
        )
    done = run.invoke(app, ["form", "agree", "north.json", "south.json", "--out", "all.json"])
    assert done.exit_code == 0 and "'ILL' (south.json) and 'ill' (north.json)" in done.output
