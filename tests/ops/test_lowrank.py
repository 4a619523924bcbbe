"""Low-rank states: what is kept, what it costs, and the way back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.ops.lowrank import compress, expand, pack, unpack

SIZES = st.integers(1, 9)


def random(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(SIZES, SIZES, st.floats(0.01, 1.0), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_the_rank_is_the_least_that_keeps_the_energy(m, n, energy, seed):
    matrix = random((m, n), seed).double()
    u, s, v = compress(matrix, energy)
    every = torch.linalg.svdvals(matrix).square()
    rank = len(s)
    assert u.shape == (m, rank) and v.shape == (rank, n) and 1 <= rank <= min(m, n)
    assert every[:rank].sum() >= energy * every.sum() * (1 - 1e-12)
    assert every[: rank - 1].sum() < energy * every.sum() * (1 + 1e-12)
    lost = (matrix - expand((u, s, v))).square().sum()
    torch.testing.assert_close(lost, every[rank:].sum(), rtol=1e-6, atol=1e-12)


@given(SIZES, SIZES, st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_all_of_the_energy_loses_nothing(m, n, seed):
    matrix = random((m, n), seed)
    torch.testing.assert_close(expand(compress(matrix, 1.0)), matrix, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("energy", [0.5, 0.95, 0.999999])
def test_a_matrix_of_rank_one_has_rank_one(energy):
    matrix = torch.outer(random(6), random(4, 1))
    factors = compress(matrix, energy)
    assert len(factors[1]) == 1
    torch.testing.assert_close(expand(factors), matrix)


def test_a_diagonal_by_hand():
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0]))  # energies 9, 4 and 1 of 14
    assert [len(compress(matrix, e)[1]) for e in (0.5, 9 / 14, 0.65, 13 / 14, 0.95, 1.0)] == [1, 1, 2, 2, 3, 3]
    torch.testing.assert_close(expand(compress(matrix, 0.65)), torch.diag(torch.tensor([3.0, 2.0, 0.0])))


def test_zeros_have_rank_zero():
    u, s, v = compress(torch.zeros(4, 3), 0.95)
    assert u.shape == (4, 0) and s.shape == (0,) and v.shape == (0, 3)
    assert torch.equal(expand((u, s, v)), torch.zeros(4, 3))


def test_a_state_travels_as_one_row_and_comes_back():
    state = {
        "kernel": random((6, 2, 3, 3)),
        "bias": random(6, 1),
        "weight": random((5, 7), 2),
        "number": torch.tensor(2.5),
        "nothing": torch.zeros(3, 4),
    }
    values, ranks = pack(state, 1.0)
    assert ranks.dtype == torch.int16 and ranks.tolist() == [6, 0, 5]  # by name: kernel, nothing, weight
    assert len(values) == 6 * (6 + 18 + 1) + 5 * (5 + 7 + 1) + 6 + 1
    again = unpack(values, ranks, state)
    assert again.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-5, atol=1e-5)
    turned = dict(reversed(state.items()))
    assert torch.equal(pack(turned, 1.0)[0], values)
    for name, tensor in unpack(values, ranks, turned).items():
        assert torch.equal(tensor, again[name])


def test_what_is_named_travels_as_it_is():
    state = {"bias": random(3), "rows": random((7, 3), 1), "weight": torch.outer(random(4), random(5, 2))}
    values, ranks = pack(state, 0.5, {"rows", "bias"})
    assert ranks.tolist() == [-1, 1] and len(values) == 3 + 7 * 3 + (4 + 5 + 1)
    again = unpack(values, ranks, state)
    assert torch.equal(again["rows"], state["rows"]) and torch.equal(again["bias"], state["bias"])
    torch.testing.assert_close(again["weight"], state["weight"])
