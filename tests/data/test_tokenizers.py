"""Tokenizers that are given: a file, a folder, a name of code; what becomes of them; texts that are empty."""

import json
import sys

import numpy as np
import pandas
import pytest

import polyfed as pf
from polyfed.api import execute
from polyfed.core.errors import InputError
from polyfed.data import Clients
from polyfed.data.form import Raw
from polyfed.data.texts import Words
from polyfed.experiment import read_experiment
from polyfed.trained import load_model

tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["the cat", "the dog sat", "a cat", "the cat sat down"] * 10
WORDS = ["[UNK]", "the", "cat", "dog", "sat", "down"]


def write_tokenizer(folder, padding=0):
    """A file whose padding has some id, and which asks for texts of 8 words."""
    names = [*WORDS[:padding], "[PAD]", *WORDS[padding:]]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: n for n, w in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_padding(pad_id=padding, pad_token="[PAD]", length=8)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture
def csv(tmp_path):
    pandas.DataFrame({"text": TEXTS, "label": ["x", "y"] * 20}).to_csv(tmp_path / "said.csv", index=False)
    return tmp_path / "said.csv"


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("as_folder", [False, True])
def test_a_file_or_its_folder_names_a_tokenizer(tmp_path, csv, padding, as_folder):
    file = write_tokenizer(tmp_path, padding)
    data = pf.load(csv, test=csv, tokenizer=str(tmp_path) if as_folder else file)
    known = tokenizers.Tokenizer.from_file(str(file))
    known.no_padding()
    expected = [number + (padding != 0) for number in known.encode("the dog sat").ids]
    assert data.train.x[1].tolist() == [*expected, 0]  # the longest text has four words
    assert data.input_shape.words == 7 + (padding != 0)
    assert data.recipe["tokenizer"] == str(tmp_path if as_folder else file)


def test_code_of_ones_own_is_named(tmp_path, csv, monkeypatch):
    (tmp_path / "spelling.py").write_text("def letters(text):\n    return [ord(c) - 97 for c in text if c.isalpha()]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = pf.load(csv, test=csv, tokenizer="spelling:letters")
    assert data.train.x[0, :3].tolist() == [20, 8, 5]  # t, h, e from 1 on
    (tmp_path / "spelling2.py").write_text("def broken(text):\n    return text.nothing\n")
    with pytest.raises(InputError, match=r"The tokenizer broken failed with AttributeError.*spelling2.py:2"):
        pf.load(csv, test=csv, tokenizer="spelling2:broken")


def test_what_is_no_tokenizer_is_a_sentence(tmp_path, csv, monkeypatch):
    with pytest.raises(InputError, match=r"There is no tokenizer none\.json: give a tokenizer\.json"):
        pf.load(csv, tokenizer="none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match=r"bad\.json cannot be read as a tokenizer"):
        pf.load(csv, tokenizer=tmp_path / "bad.json")
    file = write_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"pip install 'polyfed\[transformers\]'"):
        pf.load(csv, tokenizer=file)


@pytest.mark.parametrize("padding", [0, 1])
def test_a_run_by_name_goes_on_and_its_model_needs_no_tokenizer_again(tmp_path, csv, padding):
    file = write_tokenizer(tmp_path, padding)
    (tmp_path / "a.toml").write_text(
        f'method = "fedavg"\nrounds = 1\nmodels = ["cnn1d:1x8"]\n[data]\nsource = "{csv}"\ntokenizer = "{file}"\n'
        "length = 6\nclients = 2\n"
    )
    config = read_experiment(tmp_path / "a.toml").config()
    execute(config, out=tmp_path / "run")
    assert pf.resume(tmp_path / "run", rounds=2).rounds == 2
    expected = config.data.whole(0).form.encode(Raw({"text": np.array(TEXTS[:4], dtype=object)}, "text"), "x")[0]
    file.unlink()
    trained = load_model(tmp_path / "run", 0)
    assert trained.inputs(TEXTS[:4]).tolist() == expected.tolist() and len(expected[0]) == 6
    assert set(trained.predict(TEXTS[:4])) <= {"x", "y"}


def test_ids_after_reading_a_form_again_are_the_same(tmp_path):
    for padding in (0, 1):
        words = Words.given(write_tokenizer(tmp_path, padding))
        again = Words.load(words.dump())
        assert again.count == words.count
        assert [list(row) for row in again.ids(TEXTS[:3], "x")] == [list(row) for row in words.ids(TEXTS[:3], "x")]


def test_a_length_that_is_given_is_the_same_everywhere(tmp_path):
    file = write_tokenizer(tmp_path)
    short, long = (pf.load((texts, [0, 1]), test=(texts, [0, 1]), tokenizer=file, length=5) for texts in (
        ["the", "cat"], ["the cat sat down the cat sat", "dog"]))  # fmt: skip
    assert short.input_shape == long.input_shape == (5,) and short.input_shape.words == long.input_shape.words
    parts = Clients.from_parts([(["the cat"], [0]), (["dog"], [1])], test=(["cat"], [0]), tokenizer=file, length=3)
    assert parts.train[0].x.tolist()[0] == [2, 3, 0] and parts.input_shape.words == 7


def test_texts_that_are_all_empty_are_said():
    data = pf.load((["", "  "] * 5, [0, 1] * 5), test=(["a", ""], [0, 1]), kind="text")
    assert "all 10 texts of the training set of 'own data' are empty: there is nothing to learn from" in data.notes
    assert "1 rows of the test set of 'own data' are empty: each is one unknown word" in data.notes


def test_empty_cells_of_words_are_said(tmp_path):
    (tmp_path / "a.csv").write_text(
        "age,town,ward,label\n" + "1,ulm,w,0\n2,,w,1\n3,bonn,v,0\n4, ,w,1\n5,ulm,v,0\n6,ulm,v,1\n" * 2
    )
    data = pf.load(tmp_path / "a.csv", test=tmp_path / "a.csv")
    assert data.form.columns[1].values == ("bonn", "ulm")
    assert "empty cells of words in the training set of 'a' are none of the known values: town (4 rows)" in data.notes
    assert any("town (4 rows)" in line for line in pf.split(data, 2, by="iid").describe().splitlines())


def test_a_zero_before_other_ids_is_said():
    rows = np.array([[0, 5, 6, 0], [5, 6, 0, 0], [0, 0, 0, 0]])
    data = pf.load((rows, [0, 1, 0]), test=(rows, [0, 1, 0]), kind="tokens")
    assert "1 rows of the input array of the training set of 'own data' have a 0 before other ids" in data.notes[0]
    lists = pf.load(([[0, 5, 6], [5, 6]], [0, 1]), test=([[5], [6]], [0, 1]), kind="tokens")
    assert any(note.startswith("1 rows of the training set of 'own data' have a 0 before") for note in lists.notes)


def test_notes_reach_people_on_the_command_line_and_at_a_site(tmp_path):
    from typer.testing import CliRunner

    from polyfed.cli.commands import app
    from polyfed.flower.sitedata import read_data

    rows = "".join(f"{row},{['ulm', '', 'bonn'][row % 3]},{1 + row % 2}\n" for row in range(60))
    (tmp_path / "a.csv").write_text(f"age,town,label\n{rows}")
    words = ["run", "--data", str(tmp_path / "a.csv"), "--method", "local", "--rounds", "1", "--clients", "2"]
    done = CliRunner().invoke(app, [*words, "--models", "mlp:1x4", "--out", str(tmp_path / "run")])
    assert "The data: labels 1 to 2 are the classes 0 to 1" in done.output, done.output
    assert "The data: empty cells of words in the training set of 'a'" in done.output
    notes = json.loads((tmp_path / "run" / "result.json").read_text())["notes"]
    assert "labels 1 to 2 are the classes 0 to 1" in notes
    assert "labels 1 to 2 are the classes 0 to 1" in read_data(str(tmp_path / "a.csv")).notes
