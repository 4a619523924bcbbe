"""A product is the same wherever its matrices begin in memory; where it is not, people are told."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

from polyfed.core import products
from polyfed.core.products import moved, placed_alike, product, warn_unless_exact


def test_products_of_this_process_do_not_depend_on_places():
    assert placed_alike()


def test_a_moved_matrix_begins_where_it_was_told_to():
    matrix = torch.arange(6.0).view(2, 3)
    here, there = moved(matrix, 0), moved(matrix, 3)
    assert here.data_ptr() % 64 == 0
    assert there.data_ptr() % 64 == 12
    assert torch.equal(here, there) and here.shape == (1, 2, 3)


@pytest.mark.parametrize("turned", [False, True])
def test_it_is_the_product(turned):
    left, right = torch.randn(3, 5), torch.randn(5, 4)
    torch.testing.assert_close(product(left, right, turned, (1, 2, 3))[0], left @ right)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_products_that_depend_on_the_place_are_found_and_told(monkeypatch, place):
    def worse(left, right, turned, offsets):
        found = product(left, right, turned, offsets)
        return found * (1 + 1e-6) if offsets[place] == 2 else found

    monkeypatch.setattr(products, "product", worse)
    placed_alike.cache_clear()
    try:
        with pytest.warns(UserWarning, match="import polyfed before computing with torch, or set MKL_CBWR=AUTO"):
            warn_unless_exact()
    finally:
        placed_alike.cache_clear()


def test_nothing_is_told_where_they_do_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unless_exact()


@pytest.mark.parametrize(("given", "expected"), [(None, "AUTO"), ("COMPATIBLE", "COMPATIBLE")])
def test_the_import_asks_for_it_unless_somebody_asked_for_something_else(given, expected):
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    environment |= {} if given is None else {"MKL_CBWR": given}
    script = "import polyfed, os; print(os.environ['MKL_CBWR'])"
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == expected
