"""Random crops and flips: by hand, from the client's stream, the same in all engines."""

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.core.augment import Augmentation, check_images, is_part
from polyfed.core.errors import InputError
from polyfed.core.rng import generator
from polyfed.core.samples import Samples, Scaling
from polyfed.methods.fedmd import FedMD
from polyfed.testing import synthetic
from polyfed.testing.watch import double_precision, states

PLAIN = Scaling()
IMAGE = torch.arange(1.0, 10).view(1, 1, 3, 3)


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        ((1, 1, 0), [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        ((1, 1, 1), [[3, 2, 1], [6, 5, 4], [9, 8, 7]]),
        ((0, 1, 0), [[0, 0, 0], [1, 2, 3], [4, 5, 6]]),
        ((2, 1, 0), [[4, 5, 6], [7, 8, 9], [0, 0, 0]]),
        ((1, 2, 0), [[2, 3, 0], [5, 6, 0], [8, 9, 0]]),
        ((0, 0, 1), [[0, 0, 0], [2, 1, 0], [5, 4, 0]]),
    ],
)
def test_images_by_hand(drawn, expected):
    found = Augmentation(1, True).apply(IMAGE, torch.tensor([drawn]), PLAIN)
    assert found[0, 0].tolist() == expected


def test_what_comes_in_is_black_and_not_the_mean():
    scaling = Scaling((0.5,), (0.25,), 255.0)
    found = Augmentation(1).apply(torch.ones(1, 1, 2, 2), torch.tensor([[0, 0, 0]]), scaling)
    assert found[0, 0].tolist() == [[-2, -2], [-2, 1]]


def test_all_shifts_and_both_sides_are_drawn_and_none_beyond():
    drawn = Augmentation(2, True).draw(4000, generator(0, "t"))
    assert drawn.shape == (4000, 3)
    assert [sorted(set(column.tolist())) for column in drawn.T] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1]]
    assert 0.45 < drawn[:, 2].double().mean() < 0.55 and 1.9 < drawn[:, 0].double().mean() < 2.1
    assert Augmentation(0, False).draw(50, generator(0, "t")).sum() == 0


@pytest.mark.parametrize("text", ["crop", "crop:0", "crop:-1", "flop", "crop:4,flip", "crop:2+crop:3", ""])
def test_what_is_no_augmentation_is_refused(text):
    with pytest.raises(InputError, match="augment is 'crop:N', 'flip'"):
        pf.Training(augment=text)


def test_inputs_that_are_no_images_are_refused_before_training():
    x, y = np.zeros((6, 4), dtype=np.float32), np.array([0, 1] * 3)
    clients = pf.Clients.from_parts([(x, y), (x, y)], test=(x, y))
    with pytest.raises(InputError, match=r"inputs have shape \[4\]"):
        pf.run("local", clients, "mlp:1x4", 1, pf.Training(augment="flip"))


@pytest.mark.parametrize("model", ["mlp:1x8", "cnn:4-8"])
def test_engines_and_workers_agree_and_it_changes_the_run(model):
    training = pf.Training(epochs=2, batch_size=8, lr=0.05, augment="crop:1+flip")
    with double_precision():
        runs = [
            states(pf.run("fedprox", synthetic(), model, 2, training, engine=engine, workers=workers))
            for engine, workers in (("sequential", 1), ("threads", 3), ("batched", 2))
        ]
        plain = states(pf.run("fedprox", synthetic(), model, 2, pf.Training(epochs=2, batch_size=8, lr=0.05)))
    for name, tensor in runs[0][0].items():
        assert torch.equal(runs[1][0][name], tensor)
        torch.testing.assert_close(runs[2][0][name], tensor, rtol=0, atol=1e-7)
        assert not torch.allclose(plain[0][name], tensor, atol=1e-4)


def test_public_samples_stay_as_they_are_also_in_the_same_storage():
    whole = Samples(torch.zeros(9, 1, 2, 2), torch.zeros(9, dtype=torch.long))
    own, public = whole.select(torch.arange(6)), whole.select(torch.arange(6, 9))
    assert is_part(own.select(torch.tensor([1, 3])), own) and not is_part(public, own)
    assert is_part(public, whole) and not is_part(whole, own)
    clients = pf.split(pf.load("digits", limit=(90, 30)), clients=2, by="iid", public=30)
    method = FedMD(public_epochs=0, private_epochs=0, digest_epochs=1, subset=20)
    seen = []
    distance = FedMD.distance

    def watched(self, nets, batch, aux):
        seen.append(batch.x)
        return distance(self, nets, batch, aux)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedMD, "distance", watched)
        pf.run(method, clients, "mlp:1x4", 1, pf.Training(augment="crop:2"), engine="sequential")
    known = {tuple(row.tolist()) for row in clients.public.inputs().flatten(1)}
    assert seen and all(tuple(row.tolist()) in known for x in seen for row in x.flatten(1))


def test_an_image_is_not_shifted_out_of_sight():
    check_images(pf.Training(augment="crop:7"), (1, 8, 9))
    with pytest.raises(InputError, match=r"augment='crop:8\+flip' may shift images of 9 x 8 pixels out of sight"):
        check_images(pf.Training(augment="crop:8+flip"), (1, 9, 8))
