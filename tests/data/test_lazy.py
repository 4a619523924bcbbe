"""Clients whose data a function makes: the same results, and nothing is made for those who are not active."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.testing.watch import same_states, states, timeless


def part(client: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(client)
    y = rng.integers(0, 3, 6 + client % 2)
    return (np.eye(3)[y].repeat(2, 1) + rng.normal(size=(len(y), 6))).astype(np.float32), y


def lazy(number: int, make=part, **more) -> pf.Clients:
    return pf.Clients.from_function(make, number, lambda client: 6 + client % 2, test=part(99), num_classes=3, **more)


@pytest.mark.parametrize("engine", ["auto", "threads", "batched"])
def test_results_are_those_of_data_that_was_there_from_the_beginning(engine: str) -> None:
    there = pf.Clients.from_parts([part(client) for client in range(5)], test=part(99), num_classes=3, normalize=False)
    runs = [
        pf.run("fedproto", clients, ["mlp:1x8", "mlp:2x8"], 2, feature_dim=4, participation=0.6, engine=engine)
        for clients in (there, lazy(5), lazy(5, keep=1))
    ]
    for other in runs[1:]:
        assert timeless(other.history) == timeless(runs[0].history)
        same_states(states(other), states(runs[0]))


def test_only_active_clients_are_made() -> None:
    asked: list[int] = []

    def noted(client: int) -> tuple[np.ndarray, np.ndarray]:
        asked.append(client)
        return part(client)

    clients = lazy(5000, noted)
    result = pf.run("fedavg", clients, "mlp:1x8", 2, participation=3 / 5000, evaluate="end")
    active = {client for line in result.history for client in line["participants"]}
    assert len(active) == 6 and set(asked) == active | {0}  # the first one tells the form
    assert len(asked) == 7  # and nobody is made twice
    assert len(clients) == 5000 and result.samples[:2] == [6, 7]
    assert clients.label_counts().shape == (5000, 0)  # nobody has looked


def test_the_function_keeps_its_promises() -> None:
    with pytest.raises(pf.InputError, match=r"Client 1 was made with 6 samples .* but 7 of"):
        pf.run("local", lazy(2, lambda client: part(0)), "mlp:1x8", 1)
    with pytest.raises(pf.InputError, match="at least one sample"):
        pf.Clients.from_function(part, 0, 6, test=part(99), num_classes=3)


@pytest.mark.parametrize(
    ("clients", "samples", "told"),
    [
        (1e3, 6, r"clients=1000\.0 is not possible: give a whole number"),
        (3, [6, 6, 6], "samples is a whole number, or a function of the client's number, and no list"),
    ],
)
def test_what_is_no_number_is_refused(clients, samples, told) -> None:
    with pytest.raises(pf.InputError, match=told):
        pf.Clients.from_function(part, clients, samples, test=part(99), num_classes=3)
    assert len(pf.Clients.from_function(part, np.int64(3), np.int64(6), test=part(99), num_classes=3)) == 3


def test_labels_that_were_not_promised_are_refused_with_the_client() -> None:
    def other(client: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = part(client)
        return x, y + 3 * (client == 2)

    with pytest.raises(pf.InputError, match=r"Client 2 was made with labels from 3 to 5, but 3 classes .* are 0 to 2"):
        pf.run("local", lazy(4, other), "mlp:1x8", 1)


def test_of_many_clients_only_those_that_worked_leave_a_model(tmp_path) -> None:
    clients = lazy(1001)
    result = pf.run("fedavg", clients, "mlp:1x8", 2, participation=2 / 1001, evaluate="end", out=tmp_path / "a")
    active = {client for line in result.history for client in line["participants"]}
    files = {file.name for file in (tmp_path / "a" / "models").iterdir()}
    assert files == {*(f"client-{client}.safetensors" for client in active), "server.safetensors", "inputs.json"}
    idle = min(set(range(1001)) - active)
    with pytest.raises(pf.InputError, match=rf"of more than 1000 clients only .* and client {idle} did not"):
        pf.load_model(tmp_path / "a", client=idle)
    assert pf.load_model(tmp_path / "a", client=min(active))
    clients = lazy(1000)
    pf.run("fedavg", clients, "mlp:1x8", 1, participation=2 / 1000, evaluate="end", out=tmp_path / "b")
    assert len(list((tmp_path / "b" / "models").glob("client-*"))) == 1000


def test_other_clients_are_another_fingerprint() -> None:
    assert lazy(3).fingerprint == lazy(3).fingerprint
    assert len({lazy(3).fingerprint, lazy(4).fingerprint, lazy(3, lambda client: part(client + 2)).fingerprint}) == 3


def test_a_view_of_some_rows_holds_what_was_made() -> None:
    samples = lazy(3).train[2]
    some = samples.select(torch.tensor([1, 3]))
    assert len(samples) == 6 and len(some) == 2 and torch.equal(some.labels(), samples.labels()[[1, 3]])
