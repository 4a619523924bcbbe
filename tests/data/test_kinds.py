"""Tables of mixed columns, texts, tokens, signals and dictionaries: what they become, by hand, and what is refused."""

from __future__ import annotations

import datetime

import numpy as np
import pandas
import pytest
import torch

from polyfed.core.errors import InputError
from polyfed.data import ByColumn, Clients, load, split

CSV = """hospital,age,sex,smoker,outcome
north,40,f,true,ill
north,50,m,false,well
south,,f,true,ill
south,70,,false,well
"""


@pytest.fixture
def csv(tmp_path):
    file = tmp_path / "patients.csv"
    file.write_text(CSV)
    return file


def frame(rows=8, **columns):
    return pandas.DataFrame({"age": np.arange(rows) * 1.0, **columns, "label": np.arange(rows) % 2})


# --- tables ---


def test_a_csv_of_mixed_columns_by_hand(csv):
    data = load(csv, test=csv, label="outcome", normalize=False)
    assert data.features == ("hospital", "age", "sex", "smoker") and data.class_names == ("ill", "well")
    age, gap = [40, 50, 160 / 3, 70], [0, 0, 1, 0]
    flag = [1, 0, 1, 0]
    north, south, female, male = [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 0, 0]  # the last has no sex
    expected = np.array([age, gap, flag, north, south, female, male], dtype=np.float32).T
    assert np.array_equal(data.train.x.numpy(), expected)
    assert data.input_shape == (7,) and data.input_shape.groups == (2, 2) and data.input_shape.kind == "table"


def test_only_numbers_are_scaled(csv):
    data = load(csv, test=csv, label="outcome")
    x = data.train.inputs()
    assert x[:, 0].mean().abs() < 1e-6 and abs(x[:, 0].std(correction=0) - 1) < 1e-6
    assert set(x[:, 1:].flatten().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("mark", [";", "\t"])
def test_other_marks_between_columns(tmp_path, mark):
    file = tmp_path / "patients.csv"
    file.write_text(CSV.replace(",", mark))
    assert load(file, test=file, label="outcome").features == ("hospital", "age", "sex", "smoker")


def test_a_hospital_column_divides_names_and_is_no_feature(csv):
    clients = split(load(csv, test=csv, label="outcome"), by=ByColumn("hospital"))
    assert clients.names == ("north", "south") and clients.input_shape == (5,) and clients.input_shape.groups == (2,)
    assert [len(samples) for samples in clients.train] == [2, 2]
    assert [row["name"] for row in clients.rows()] == ["north", "south"] and "north" in clients.describe()
    with pytest.raises(InputError, match="only feature"):
        split(load(csv, test=csv, label="outcome", inputs=["hospital"]), by="column:hospital")


def test_columns_can_be_dropped_and_chosen(csv):
    assert load(csv, test=csv, label="outcome", drop=["sex", "age"]).features == ("hospital", "smoker")
    assert load(csv, test=csv, label="outcome", inputs=["age"]).features == ("age",)
    with pytest.raises(InputError, match="no column 'wage': its columns are hospital, age"):
        load(csv, label="outcome", drop="wage")
    with pytest.raises(InputError, match="'age' is both used and dropped"):
        load(csv, label="outcome", inputs=["age"], drop="age")


def test_categories_are_those_of_training(tmp_path):
    train, test = frame(ward=["a", "b"] * 4), frame(ward=["a", "z"] * 4)
    data = load(train, test=test)
    assert data.input_shape.groups == (2,) and data.test.x[1].tolist() == [1, 0, 0]
    assert "4 rows of the test set of 'own data' have a 'ward' that training does not know (z)" in repr(data)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([datetime.date(2024, 1, day + 1) for day in range(24)], r"'extra' .* dates or times.*drop=\['extra'\]"),
        ([f"note {row}" for row in range(24)], r"'extra' .* 24 different words in 24 rows.*kind='text'"),
        ([1, "one"] * 12, "'extra' .* mixes kinds of values"),
        ([None] * 24, "'extra' .* is empty"),
        ([np.inf] + [1.0] * 23, "NaN or infinite"),
    ],
)
def test_columns_that_are_no_features(column, message):
    with pytest.raises(InputError, match=message):
        load(frame(24, extra=column), test=frame(24, extra=column))


def test_a_column_of_words_where_training_has_numbers():
    with pytest.raises(InputError, match=r"'extra' of the test set .* holds words \('no'\)"):
        load(frame(extra=[1.0] * 8), test=frame(extra=["no"] * 8))


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty"), ("a,label\n1,2\n1\n", r"patients.csv cannot be read as a CSV file \(.*Expected 2 columns")],
)
def test_a_bad_csv_file_is_told_by_its_name(tmp_path, content, message):
    file = tmp_path / "patients.csv"
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        load(file)


def test_clients_with_tables_of_their_own_share_the_categories():
    parts = [frame(ward=["a"] * 8), frame(ward=["b", None] * 4)]
    clients = Clients.from_parts(parts, test=frame(ward=["a", "b"] * 4), normalize=False)
    assert clients.train[0].inputs()[0].tolist() == [0, 1, 0] and clients.train[1].inputs()[0].tolist() == [0, 0, 1]
    assert clients.train[1].inputs()[1].tolist() == [1, 0, 0]  # no ward


def test_a_public_table_has_the_clients_categories():
    data = load(frame(ward=["a", "b"] * 4), test=frame(ward=["a", "b"] * 4), normalize=False)
    public = split(data, clients=2, public=frame(ward=["b", "c"] * 4)).public
    assert public.inputs()[:2].tolist() == [[0, 0, 1], [1, 0, 0]]


def test_a_table_from_the_cache_is_the_same(csv, tmp_path):
    first = load(csv, test=csv, label="outcome", cache=tmp_path / "cache")
    again = load(csv, test=csv, label="outcome", cache=tmp_path / "cache")
    assert again.form == first.form and again.input_shape.groups == first.input_shape.groups
    assert again.fingerprint == first.fingerprint and torch.equal(again.train.x, first.train.x)


# --- texts and tokens ---

TEXTS = ["the cat sat", "the dog", "", "A cat, a cat!"]


def test_texts_become_ids_of_training_words():
    data = load((TEXTS, [0, 1, 0, 1]), test=(["The bird"], [0]))
    words = data.form.words.vocabulary
    assert words == ("cat", "a", "the", "!", ",", "dog", "sat")  # by frequency, then by the alphabet
    assert data.train.x.dtype == torch.int64 and data.input_shape == (6,) and data.input_shape.words == 9
    assert data.train.inputs()[0].tolist() == [4, 2, 8, 0, 0, 0]
    assert data.train.inputs()[2].tolist() == [1, 0, 0, 0, 0, 0] and "1 rows of the training set" in repr(data)
    assert data.test.inputs()[0].tolist() == [4, 1, 0, 0, 0, 0]  # nobody saw a bird


def test_texts_are_cut_at_a_length():
    data = load((TEXTS, [0, 1, 0, 1]), test=(TEXTS, [0, 1, 0, 1]), length=2)
    assert data.input_shape == (2,) and "2 texts are longer than 2 words" in repr(data)


def test_a_tokenizer_can_be_given():
    data = load(
        (TEXTS, [0, 1, 0, 1]), test=(TEXTS, [0, 1, 0, 1]), tokenizer=lambda text: [len(w) for w in text.split()]
    )
    assert data.train.x[0].tolist() == [4, 4, 4, 0]  # moved by one: 0 is padding
    with pytest.raises(InputError, match="tokenizer is a int"):
        load((TEXTS, [0, 1, 0, 1]), tokenizer=3)


def test_a_hugging_face_tokenizer_keeps_its_ids():
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1, "the": 2, "cat": 3}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    data = load((TEXTS, [0, 1, 0, 1]), test=(TEXTS, [0, 1, 0, 1]), tokenizer=tokenizer)
    assert data.train.x[0, :3].tolist() == [2, 3, 1] and data.input_shape.words == 4


def test_a_column_of_texts_is_the_input(tmp_path):
    table = pandas.DataFrame({"text": TEXTS * 2, "site": ["a", "b"] * 4, "label": [0, 1] * 4})
    data = load(table, test=table)
    assert data.form.kind == "text" and len(split(data, by="column:site")) == 2
    other = table.rename(columns={"text": "words"})
    assert load(other[["words", "label"]], test=other, inputs="words").form.kind == "text"


def test_token_ids_stay_whole_numbers():
    ids = np.arange(1, 13).reshape(4, 3)
    data = load((ids, [0, 1, 0, 1]), test=(ids, [0, 1, 0, 1]), kind="tokens")
    assert data.train.inputs().dtype == torch.int64 and data.input_shape.words == 13
    assert torch.equal(data.train.inputs(), torch.from_numpy(ids))
    ragged = load(([[1, 2, 3], [4]], [0, 1]), test=([[9], []], [0, 1]), kind="tokens")
    assert ragged.train.x.tolist() == [[1, 2, 3], [4, 0, 0]] and ragged.test.x.tolist() == [[1, 0, 0], [1, 0, 0]]
    with pytest.raises(InputError, match="not an array of token ids"):
        load((ids * 0.5, [0, 1, 0, 1]), kind="tokens")
    with pytest.raises(InputError, match=r"Unknown kind of inputs 'token': did you mean 'tokens'"):
        load((ids, [0, 1, 0, 1]), kind="token")


# --- signals, images, dictionaries ---


def test_windows_of_a_signal_are_not_images():
    x = np.random.default_rng(0).normal(5.0, 2.0, (6, 3, 50))
    data = load((x, [0, 1] * 3), test=(x, [0, 1] * 3))
    assert data.input_shape == (3, 50) and data.input_shape.kind == "signal" and "3 channels and 50 steps" in repr(data)
    assert data.train.inputs().mean((0, 2)).abs().max() < 1e-5  # scaled by channel
    assert load((x, [0, 1] * 3), kind="image").input_shape == (1, 3, 50)
    assert load((x[:, :, :3], [0, 1] * 3)).input_shape == (1, 3, 3)  # square: an image


class Items:
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, row):
        return self.items[row]


def test_items_may_be_dictionaries():
    images = Items(
        [{"image": torch.full((1, 4, 4), float(row)), "label": row % 2, "site": "ab"[row % 2]} for row in range(8)]
    )
    data = load(images, test=images)
    assert data.input_shape == (1, 4, 4) and data.columns["site"].tolist() == list("abababab")
    rows = Items([{"age": 30.0 + row, "sex": "fm"[row % 2], "y": torch.tensor(row % 2)} for row in range(8)])
    assert load(rows, test=rows).features == ("age", "sex")
    tokens = Items([{"input_ids": torch.arange(1, row + 2), "label": row % 2} for row in range(8)])
    assert load(tokens, test=tokens).input_shape.words == 9
    strange = Items([{"scan": torch.zeros(3), "label": 0}])
    with pytest.raises(InputError, match=r"Item 0 .* dictionary with scan, label.*pass inputs="):
        load(strange)
    assert load(Items([{"scan": torch.zeros(3), "label": row % 2} for row in range(8)]), inputs="scan").input_shape == (
        3,
    )
