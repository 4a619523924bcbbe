import pytest
import torch

import polyfed as pf
from polyfed.core.errors import InputError


def test_some_classes_of_a_set_are_numbered_from_zero():
    whole, some = pf.load("digits"), pf.load("digits/5-7")
    assert some.num_classes == 3
    assert some.class_names == whole.class_names[5:8]
    rows = torch.nonzero((whole.train.labels() >= 5) & (whole.train.labels() <= 7)).flatten()
    assert torch.equal(some.train.labels(), whole.train.labels(rows) - 5)
    assert torch.equal(some.train.inputs(), whole.train.inputs(rows))
    assert some.fingerprint != whole.fingerprint


def test_other_classes_can_be_public_data_and_the_recipe_repeats():
    from polyfed.data import from_recipe

    clients = pf.split(pf.load("digits/0-4"), clients=3, public="digits/5-9:100")
    assert (clients.num_classes, clients.public_classes, len(clients.public)) == (5, 5, 100)
    assert from_recipe(clients.recipe).fingerprint == clients.fingerprint


def test_classes_that_are_not_there_are_refused():
    with pytest.raises(InputError, match="has the classes 0 to 9, so 5-12 is not possible"):
        pf.load("digits/5-12")
