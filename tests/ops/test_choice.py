"""Choices of entries, packed."""

import pytest
import torch

from polyfed.ops.choice import Weights, largest, pack_choice, share_of, unpack_choice


def test_bits_by_hand():
    chosen = torch.tensor([1, 0, 1, 0, 0, 0, 0, 1, 0, 1], dtype=torch.bool)
    packed = pack_choice(chosen)
    assert packed.tolist() == [1 + 4 + 128, 2] and packed.dtype == torch.uint8
    assert torch.equal(unpack_choice(packed, 10), chosen)


@pytest.mark.parametrize(
    ("length", "count", "size"), [(7, 7, 1), (64, 2, 8), (64, 3, 8), (64, 1, 4), (1000, 30, 120), (33, 0, 0)]
)
def test_the_shorter_form_is_taken_and_read_again(length, count, size):
    chosen = torch.zeros(length, dtype=torch.bool)
    chosen[torch.randperm(length, generator=torch.Generator().manual_seed(0))[:count]] = True
    packed = pack_choice(chosen)
    assert packed.nbytes == size == min(-(-length // 8), 4 * count)
    assert torch.equal(unpack_choice(packed, length), chosen)


@pytest.mark.parametrize(
    ("size", "chosen", "theta"),
    [
        (0.5, [1, 0, 0, 1], 0.5),
        (0.75, [1, 1, 0, 1], 0.3),
        (0.74, [1, 0, 0, 1], 0.5),
        (0.01, [0, 0, 0, 1], 0.8),
        (1, [1] * 4, 0.0),
    ],
)
def test_the_largest_by_hand(size, chosen, theta):
    found, threshold = largest(torch.tensor([0.5, -0.3, 0.1, -0.8]), size)
    assert found.tolist() == list(map(bool, chosen)) and float(threshold) == pytest.approx(theta)


def test_of_equal_weights_the_first_is_kept():
    found, threshold = largest(torch.tensor([1.0, -2.0, 2.0, -2.0, 2.0]), 0.4)
    assert found.tolist() == [False, True, True, False, False] and float(threshold) == 2


@pytest.mark.parametrize(
    ("number", "size", "count"), [(10, 0.5, 5), (10, 0.29, 2), (100, 0.29, 29), (10, 0.01, 1), (10, 1.0, 10)]
)
def test_a_share_is_rounded_down_and_never_none(number, size, count):
    assert share_of(number, size) == count  # 0.29 · 100 is 28.999999999999996 to a computer


def test_groups_have_the_numbers_of_their_tensors():
    weights = Weights([["a", "b"], ["c"]], {"a": (2, 3), "b": (2,), "c": (4, 1, 2)})
    assert weights.group_lengths == [8, 8] and weights.lengths == [6, 2, 8]
