"""What people bring that does not fit: handled and said, or a sentence."""

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed as pf
from polyfed.core.errors import InputError

RNG = np.random.default_rng(0)


def picture(*shape):
    return RNG.integers(0, 255, shape, dtype=np.uint8)


class Items(torch.utils.data.Dataset):
    def __init__(self, make, number=40):
        self.make, self.number = make, number

    def __len__(self):
        return self.number

    def __getitem__(self, row):
        return self.make(row)


@pytest.mark.parametrize("as_items", [False, True])
def test_grey_and_color_images_together_become_color_and_that_is_said(as_items):
    images = [picture(8, 8) if row % 2 else picture(8, 8, 3) for row in range(20)]
    source = Items(lambda row: (images[row], row % 2), 20) if as_items else (images, [0, 1] * 10)
    data = pf.load(source, test=source)
    assert data.input_shape == (3, 8, 8) and data.train.x.dtype == torch.uint8
    assert torch.equal(data.train.x[1], torch.from_numpy(images[1]).expand(3, 8, 8))
    assert torch.equal(data.train.x[0], torch.from_numpy(images[0]).permute(2, 0, 1))
    assert any("10 grey images" in note and "all are color" in note for note in data.notes)


@pytest.mark.parametrize("as_items", [False, True])
def test_images_of_unequal_size_need_a_size_and_then_work(as_items):
    images = [picture(8, 8) if row % 2 else picture(12, 10) for row in range(20)]
    source = Items(lambda row: (images[row], row % 2), 20) if as_items else (images, [0, 1] * 10)
    with pytest.raises(InputError, match=r"images of 2 different sizes, .*: pass resize=\(height, width\)"):
        pf.load(source, test=source)
    data = pf.load(source, test=source, resize=(8, 8))
    assert data.input_shape == (1, 8, 8) and torch.equal(data.train.x[1, 0], torch.from_numpy(images[1]))


def test_token_ids_of_dictionaries_are_tokens_and_masks_count():
    """What a mask leaves out is padding here, whatever number it has."""

    def item(row):
        real = 1 + row % 3
        return {
            "input_ids": [5 + row % 2] * real + [9] * (3 - real),
            "attention_mask": [1] * real + [0] * (3 - real),
            "label": row % 2,
        }

    data = pf.load(Items(item), test=Items(item))
    assert data.form.kind == "tokens" and data.train.x.dtype == torch.int64
    assert data.train.x[:3].tolist() == [[5, 0, 0], [6, 6, 0], [5, 5, 5]]
    result = pf.run("local", pf.split(data, clients=2), "lstm:1x8", rounds=1)
    assert len(result.models) == 2


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"input_ids": [0, 3], "attention_mask": [1, 1], "label": 0}, "token 0 that its mask keeps"),
        ({"input_ids": [2, 3], "attention_mask": [1], "label": 0}, "2 token ids but a mask of 1"),
    ],
)
def test_masks_that_do_not_fit_are_a_sentence(item, words):
    with pytest.raises(InputError, match=words):
        pf.load(Items(lambda row: item))


def test_a_missing_label_is_called_that():
    labels = np.array([0.0, 1.0, np.nan, 1.0] * 5)
    with pytest.raises(InputError, match=r"Row 2 of the training set of 'own data' has no label \(5 such rows\)"):
        pf.load((np.zeros((20, 3), np.float32), labels))


def test_a_few_test_rows_of_words_are_read_as_the_training_rows_were():
    train = pd.DataFrame({"ward": ["x", "y"] * 20, "label": [0, 1] * 20})
    data = pf.load(train, test=pd.DataFrame({"ward": ["x", "z"], "label": [0, 1]}))
    assert any("training does not know (z)" in note for note in data.notes)


def test_lists_of_test_sets_for_split_are_a_short_sentence():
    x = np.zeros((20, 3), np.float32)
    with pytest.raises(InputError) as caught:
        pf.split(pf.load((x, [0, 1] * 10)), clients=2, test=[(x, [0, 1] * 10)] * 2)
    assert "Clients.from_parts" in str(caught.value) and len(str(caught.value)) < 250


# --- parts as files and frames, by name ---


@pytest.fixture
def frames():
    def frame(number, words):
        age = RNG.normal(60, 9, number)
        return pd.DataFrame(
            {"age": age, "ward": RNG.choice(words, number), "outcome": np.where(age > 60, "ill", "well")}
        )

    return {"north": frame(40, ["a", "b"]), "south": frame(60, ["b", "c"])}


def test_two_frames_as_own_test_sets_are_no_pair_of_arrays(frames):
    clients = pf.Clients.from_parts(list(frames.values()), test=list(frames.values()), label="outcome")
    assert [len(own) for own in clients.own_test] == [40, 60] and len(clients.test) == 100


def test_parts_may_be_files_by_name_with_a_share_as_own_test_data(frames, tmp_path):
    for name, frame in frames.items():
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    files = {name: tmp_path / f"{name}.csv" for name in frames}
    clients = pf.Clients.from_parts(files, test=0.25, label="outcome")
    assert clients.names == ("north", "south") and clients.class_names == ("ill", "well")
    assert [len(own) for own in clients.own_test] == [10, 15] and [len(part) for part in clients.train] == [30, 45]
    assert len(clients.test) == 25 and clients.input_shape.groups == (3,)
    tested = pf.Clients.from_parts(files, test={"south": files["south"], "north": files["north"]}, label="outcome")
    assert [len(own) for own in tested.own_test] == [40, 60]
    with pytest.raises(InputError, match="test set for 'west', but the clients are north, south"):
        pf.Clients.from_parts(files, test={"west": files["north"]}, label="outcome")
    with pytest.raises(InputError, match=r"There is no file .*absent.csv for client 0"):
        pf.Clients.from_parts([tmp_path / "absent.csv"], test=0.2, label="outcome")


# --- whose rows scale ---


def test_each_client_may_scale_by_its_own_training_rows(frames):
    clients = pf.Clients.from_parts(frames, test="own", label="outcome", scaling="own")
    for part in clients.train:
        age = part.inputs()[:, 0]
        assert float(age.mean()) == pytest.approx(0, abs=1e-5) and float(age.std(unbiased=False)) == pytest.approx(
            1, abs=1e-4
        )
    assert clients.train[0].scaling != clients.train[1].scaling
    assert clients.own_test[1].scaling == clients.train[1].scaling
    both = torch.cat([own.inputs() for own in clients.own_test])
    assert torch.equal(clients.test.inputs(), both)
    together = pf.Clients.from_parts(frames, test="own", label="outcome")
    assert together.train[0].scaling == together.train[1].scaling and together.fingerprint != clients.fingerprint


def test_models_of_clients_with_scales_of_their_own_predict_on_raw_rows(frames, tmp_path):
    clients = pf.Clients.from_parts(frames, test="own", label="outcome", scaling="own")
    result = pf.run("local", clients, "mlp:1x8", rounds=3, out=tmp_path / "run")
    for number, name in enumerate(clients.names):
        own = clients.own_test[number]
        model = pf.load_model(tmp_path / "run", client=name)
        assert model.scaling == clients.train[number].scaling
        assert torch.equal(model.module(own.inputs()), result.models[number](own.inputs()))
    pooled = pf.run("centralized", clients, "mlp:1x8", rounds=1)
    assert 0 <= pooled.accuracy()["mean"] <= 1


def test_what_is_common_to_all_has_no_place_where_each_scales_for_itself(frames):
    data = pf.load("digits", limit=(100, 50))
    with pytest.raises(InputError, match="scaling='own' needs test='own'"):
        pf.split(data, clients=2, scaling="own")
    with pytest.raises(InputError, match="Unknown scaling 'each'"):
        pf.split(data, clients=2, scaling="each")
    assert pf.split(data, clients=2, test="own", scaling="own").recipe["scaling"] == "own"
