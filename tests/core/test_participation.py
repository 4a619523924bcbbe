"""Who takes part in a round: shares, drop-out at random, and the same weak clients always missing."""

from collections import Counter

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.core.party import ClientInfo
from polyfed.core.settings import Participation


def infos(*sizes):
    return {client: ClientInfo(client, 10, "net", parameters=size) for client, size in enumerate(sizes)}


def draws(participation, clients, rounds=200):
    return [participation.select(clients, torch.Generator().manual_seed(seed)) for seed in range(rounds)]


TWENTY = infos(*[79] * 6, *[176] * 4, *[274] * 4, *[371] * 4, *[469] * 2)  # the zoo of FedMD+Global


@pytest.mark.parametrize(("share", "number"), [(1.0, 20), (0.6, 12), (0.4, 8)])
def test_so_many_of_the_twenty_clients_take_part(share, number):
    for chosen in draws(Participation(share), TWENTY, 20):
        assert len(chosen) == len(set(chosen)) == number
        assert list(chosen) == sorted(chosen) and set(chosen) <= set(TWENTY)


@pytest.mark.parametrize("participation", [Participation(0.4), Participation(dropout=0.6)])
def test_at_random_everybody_has_the_same_chance(participation):
    rounds = 2000
    counts = Counter(client for chosen in draws(participation, TWENTY, rounds) for client in chosen)
    spread = (rounds * 0.4 * 0.6) ** 0.5  # binomial
    assert all(abs(counts[client] - 0.4 * rounds) < 5 * spread for client in TWENTY)


def test_dropping_out_at_random_leaves_the_rest():
    assert {len(chosen) for chosen in draws(Participation(dropout=0.4), TWENTY, 50)} == {12}
    assert {len(chosen) for chosen in draws(Participation(0.5, dropout=0.2), TWENTY, 50)} == {8}


@pytest.mark.parametrize(("dropout", "kept"), [(0.4, range(8, 20)), (0.6, range(12, 20)), (0.0, range(20))])
def test_the_weakest_are_missing_for_good(dropout, kept):
    assert set(draws(Participation(dropout=dropout, who="weakest"), TWENTY, 20)) == {tuple(kept)}


def test_the_weakest_are_those_with_the_smallest_models_wherever_they_stand():
    assert set(draws(Participation(dropout=0.5, who="weakest"), infos(9, 1, 7, 3), 10)) == {(0, 2)}


def test_among_equal_models_the_first_clients_count_as_weakest():
    """FedAvg has one architecture; its clients still come in the order of the heterogeneous zoo."""
    assert set(draws(Participation(dropout=0.6, who="weakest"), infos(*[5] * 20), 10)) == {tuple(range(12, 20))}


def test_a_share_is_drawn_from_those_who_are_not_missing():
    chosen = draws(Participation(0.4, dropout=0.5, who="weakest"), infos(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), 100)
    assert all(len(c) == 4 and set(c) <= set(range(5, 10)) for c in chosen)
    assert len(set(chosen)) == 5
    few = draws(Participation(0.8, dropout=0.5, who="weakest"), infos(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), 10)
    assert set(few) == {(5, 6, 7, 8, 9)}


@pytest.mark.parametrize("who", ["random", "weakest"])
@pytest.mark.parametrize("clients", [1, 2, 3])
def test_there_is_always_somebody(who, clients):
    for share in (0.01, 1.0):
        for dropout in (0.0, 0.5, 0.99):
            assert all(draws(Participation(share, dropout, who), infos(*range(1, clients + 1)), 5))


def federation_of(participation, rounds=4):
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(8, 5)).astype(np.float32), rng.integers(0, 2, 8)) for _ in range(5)]
    clients = pf.Clients.from_parts(parts, test=parts[0], num_classes=2)
    return pf.run(pf.FedAvg(), clients, ["mlp:1x4"], rounds=rounds, participation=participation)


def test_a_run_honours_it():
    weakest = federation_of(Participation(dropout=0.6, who="weakest"))
    assert [line["participants"] for line in weakest.history] == [[3, 4]] * 4
    rounds = [tuple(line["participants"]) for line in federation_of(0.4, 8).history]
    assert {len(chosen) for chosen in rounds} == {2} and len(set(rounds)) > 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"share": 0.0}, "share must be above 0, got 0.0"),
        ({"dropout": 1.0}, "dropout must be below 1"),
        ({"dropout": 0.5, "who": "slow"}, "'random' or 'weakest', not 'slow'"),
    ],
)
def test_shares_that_make_no_sense_are_refused(options, words):
    with pytest.raises(pf.InputError, match=words):
        Participation(**options)
