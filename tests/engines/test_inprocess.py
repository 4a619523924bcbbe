"""Stored clients: what they cost while they do not work, and how they are measured."""

import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.checkpoint import pack_tree
from polyfed.core.errors import InputError
from polyfed.core.evaluate import few
from polyfed.core.layout import beside_weights, channels_last, is_able
from polyfed.core.message import Message
from polyfed.core.party import fill
from polyfed.core.settings import Evaluation, Participation, Settings
from polyfed.core.stage import batch_sizes, epoch_plan
from polyfed.engines import inprocess
from polyfed.engines.store import Layout, Memory, ModuleSlot, Record, StateTable

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from table import synthetic


def federation(method="local", clients=8, models=("mlp:1x8",), rounds=2, share=0.25, **settings):
    chosen = Settings(rounds, participation=Participation(share), **settings)
    made = prepare(pf.methods.make(method), synthetic(clients), list(models), chosen)
    return made


@pytest.fixture
def measured(monkeypatch):
    """List the clients whose models were really measured."""
    seen = []
    measure = inprocess.measure_chunks

    def watched(method, party, *rest):
        seen.append(party.id)
        return measure(method, party, *rest)

    monkeypatch.setattr(inprocess, "measure_chunks", watched)
    return seen


def test_only_clients_that_were_active_have_a_record():
    run = federation(rounds=1)
    assert not run.backend.store.records
    line = run.run()[0]
    assert sorted(run.backend.store.records) == line["participants"] and len(line["participants"]) == 2


def test_a_restored_client_has_its_tensors_and_its_memory():
    run = federation(rounds=1)
    run.run()
    trees = run.backend.changed()
    for tree in trees.values():
        tree["memory"]["number"] = 7
    again = federation(rounds=1)
    again.backend.restore(trees)
    assert len(trees) == 2 and again.backend.store.records.keys() == trees.keys()
    for client, tree in trees.items():
        party = again.backend.store.open(client, again.ctx)
        assert party.memory == {"number": 7}
        for name, tensor in party.main.state_dict().items():
            assert torch.equal(tensor, tree["models"]["main"][name])
        assert not torch.equal(party.main.head.weight, again.backend.blueprints["mlp:1x8"].initial["head.weight"])


def test_a_model_is_measured_once_and_again_only_when_it_changed(measured):
    run = federation("local", rounds=3)
    run.run()
    first, second, third = (line["participants"] for line in run.history)
    # Round 1: its two participants and, for the six clients that never worked, one of them; then only participants.
    assert len(measured) == 3 + len(second) + len(third)
    assert set(measured[:3]) - set(first) and set(measured[3:5]) == set(second)
    assert len(run.history[0]["accuracy"]["per_client"]) == 8


def test_equal_global_models_are_measured_once(measured):
    run = federation("fedavg", rounds=2)
    run.run()
    assert len(measured) == 2
    assert len(set(run.history[1]["accuracy"]["per_client"])) == 1


def test_only_clients_with_nothing_but_the_same_message_predict_the_same():
    backend = federation("local", clients=3, rounds=1, share=1.0).backend
    whole = {name: tensor.clone() for name, tensor in backend.blueprints["mlp:1x8"].initial.items()}
    other = {name: tensor.clone() for name, tensor in whole.items()}
    assert backend.identity(0, Message({"main": whole})) == backend.identity(1, Message({"main": whole})) is not None
    assert backend.identity(0, Message({"main": whole})) != backend.identity(1, Message({"main": other}))
    assert backend.identity(0, Message({"main": {"head.bias": whole["head.bias"]}})) is None  # the rest is its own
    backend.store.records[2] = Record({"main": whole}, memory={"own": 1})
    assert backend.identity(2, Message({"main": whole})) is None
    backend.store.records[2] = Record({"main": whole, "side": whole})
    assert backend.identity(2, Message({"main": whole})) is None


def test_measuring_leaves_clients_as_they_are():
    run = federation("local", clients=3, rounds=1, share=1.0)
    run.run()
    before = {client: pack_tree(record.tree()) for client, record in run.backend.store.records.items()}
    zeros = {n: torch.zeros_like(t) for n, t in run.backend.blueprints["mlp:1x8"].initial.items()}
    found = run.backend.evaluate({client: Message({"main": zeros}) for client in before}, run.ctx)
    assert [measure.loss for measure in found.values()] == pytest.approx([math.log(3)] * 3)  # of what was received
    assert {client: pack_tree(record.tree()) for client, record in run.backend.store.records.items()} == before


def test_a_line_has_mean_spread_and_worst_of_its_clients():
    (line,) = federation("local", clients=3, rounds=1, share=1.0, training=pf.Training(lr=0.01)).run()
    found = line["accuracy"]
    values = found["per_client"]
    assert len(set(values)) > 1
    assert found["mean"] == pytest.approx(sum(values) / 3) and found["worst"] == min(values)
    assert found["std"] == pytest.approx((sum((value - found["mean"]) ** 2 for value in values) / 3) ** 0.5)


def test_the_samples_that_stand_for_all_are_drawn_from_the_seed():
    test = synthetic(2).test
    first, again, other = (
        few(test, Settings(1, seed, evaluation=Evaluation(samples=9))).index.tolist() for seed in (0, 0, 1)
    )
    assert first == again != other
    assert len(set(first)) == 9 and first == sorted(first) != list(range(9))
    assert few(test, Settings(1)) is test and few(test, Settings(1, evaluation=Evaluation(samples=len(test)))) is test


def test_some_clients_stand_for_all_until_the_end():
    run = federation("local", rounds=3, evaluation=Evaluation(clients=3))
    full = federation("local", rounds=3)
    few, again, last = (line["accuracy"] for line in run.run())
    everybody = [line["accuracy"]["per_client"] for line in full.run()]
    assert few["clients"] == again["clients"] and len(few["clients"]) == 3
    assert few["per_client"] == [everybody[0][client] for client in few["clients"]]
    assert "clients" not in last and last["per_client"] == everybody[2]
    with pytest.raises(InputError, match="clients must be at least 1, got 0"):
        pf.run("local", synthetic(2), rounds=1, evaluate_clients=0)


@pytest.mark.parametrize("method", ["local", "heterofl"])  # the clients' own models, and one of the server's
def test_some_samples_stand_for_all_until_the_end(method):
    run = federation(method, rounds=3, evaluation=Evaluation(samples=7))
    first, _, last = (line["accuracy"] for line in run.run())
    full = [line["accuracy"] for line in federation(method, rounds=3).run()]
    assert first["samples"] == 7 and "samples" not in last
    assert last == full[2]
    sevenths = [7 * value for value in first["per_client"]]
    assert sevenths == pytest.approx([round(value) for value in sevenths])
    if method == "heterofl":
        assert 7 * first["global"] == pytest.approx(round(7 * first["global"]))
    with pytest.raises(InputError, match="samples must be at least 1, got 0"):
        pf.run("local", synthetic(2), rounds=1, evaluate_samples=0)


def test_states_beyond_the_budget_are_in_files_and_the_same(monkeypatch):
    here = pf.run("fedavg", synthetic(), ["cnn:4-8,bn"], 2)
    files = []
    take = torch.from_file

    def watched(*args, **kwargs):
        files.append(args)
        return take(*args, **kwargs)

    monkeypatch.setattr(torch, "from_file", watched)
    monkeypatch.setattr("polyfed.prepare.InProcess", partial(inprocess.InProcess, memory_budget=1000))
    there = pf.run("fedavg", synthetic(), ["cnn:4-8,bn"], 2)
    assert files
    for client in here.models:
        for name, tensor in here.models[client].state_dict().items():
            assert torch.equal(tensor, there.models[client].state_dict()[name])


def test_neighbouring_rows_are_one_table_and_others_are_not():
    state = {"a": torch.arange(3.0), "n": torch.tensor(7), "b": torch.ones(2, 2)}
    state_table = StateTable(Layout(state), 5, Memory(1 << 30))
    numbers = [state_table.take() for _ in range(5)]
    for number in numbers:
        fill(state_table.state(number), {name: tensor + number for name, tensor in state.items()})
    stacked = state_table.layout.stacked(state_table.together([1, 2, 3]))
    assert stacked["a"].tolist() == [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0], [3.0, 4.0, 5.0]]
    assert stacked["n"].tolist() == [8, 9, 10] and stacked["b"].shape == (3, 2, 2)
    stacked["b"][1] = 0.0
    assert state_table.state(2)["b"].sum() == 0.0  # the same memory
    assert state_table.together([1, 3]) is None and state_table.together([2, 1]) is None


def test_rows_in_different_blocks_are_not_together(monkeypatch):
    monkeypatch.setattr("polyfed.engines.store.BLOCK_BYTES", 128)
    state_table = StateTable(Layout({"a": torch.zeros(16)}), 10, Memory(1 << 30))  # 64 bytes a row, two rows a block
    for _ in range(4):
        state_table.take()
    assert state_table.size == 2 and state_table.together([0, 1]) is not None and state_table.together([1, 2]) is None


def test_attached_buffers_count_their_own_writes():
    """Rows of one block must not share autograd's count of in-place writes: workers would disturb each other."""
    table = torch.zeros(2, 4)
    module_slots = [ModuleSlot(nn.BatchNorm1d(4)) for _ in range(2)]
    for row, slot in zip(table, module_slots, strict=True):
        slot.attach({"running_mean": row})
    first, second = (slot.module.running_mean for slot in module_slots)
    before = second._version
    first.add_(1.0)
    assert second._version == before and table[0].tolist() == [1.0] * 4


class Viewing(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(144, 3)

    def forward(self, x):
        return self.head(self.conv(x).view(len(x), -1))


def test_what_is_compared_with_a_weight_gets_its_layout():
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.LazyLinear(3))
    module(torch.zeros(1, 2, 8, 8))
    anchor = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    other = torch.randn(4, 2, 3, 3)
    aux = {"anchor": anchor, "0.weight": torch.randn(3), "map": other, "number": 2.0}
    assert beside_weights(aux, {"main": module}) is aux  # the weights have the usual order
    with channels_last({"main": module}, (2, 8, 8)):
        found = beside_weights(aux, {"main": module})
        assert found["anchor"]["0.weight"].stride() == module[0].weight.stride() != anchor["0.weight"].stride()
    assert torch.equal(found["anchor"]["0.weight"], anchor["0.weight"])
    assert found["anchor"]["2.weight"] is anchor["2.weight"]
    assert found["0.weight"] is aux["0.weight"]  # another shape
    assert found["map"] is other  # another name
    assert found["number"] == 2.0


def test_weights_are_channels_last_only_inside_and_keep_their_values():
    module = nn.Conv2d(1, 4, 3)
    weight = module.weight
    storage = weight.data_ptr()
    with channels_last({"main": module}, (1, 8, 8)):
        assert weight.data_ptr() != storage and weight.stride(1) == 1
        with torch.no_grad():
            weight.fill_(2.0)
    assert weight.data_ptr() == storage and weight.is_contiguous() and bool((weight == 2.0).all())


def test_networks_that_call_view_keep_the_usual_order():
    module = Viewing()
    assert not is_able(module, (2, 8, 8))
    assert module.conv.weight.is_contiguous() and module.training
    assert is_able(nn.Conv2d(2, 4, 3), (2, 8, 8))
    assert not is_able(nn.Linear(3, 3), (3,))


@pytest.mark.parametrize(
    ("samples", "size", "join", "expected"),
    [
        (10, 4, False, [4, 4, 2]),
        (9, 4, False, [4, 4, 1]),
        (9, 4, True, [4, 5]),
        (1, 4, True, [1]),
        (8, 4, True, [4, 4]),
    ],
)
def test_sizes_of_batches(samples, size, join, expected):
    assert batch_sizes(samples, size, join) == expected


def test_epochs_see_every_sample_once_and_steps_cut_the_last_one():
    plan = list(epoch_plan(10, 4, None, 5, torch.Generator().manual_seed(0)))
    assert [(epoch, sizes) for epoch, _, sizes in plan] == [(0, [4, 4, 2]), (1, [4, 4])]
    assert sorted(plan[0][1].tolist()) == list(range(10)) and len(set(plan[1][1].tolist())) == 8
    assert list(epoch_plan(0, 4, None, 5, torch.Generator())) == []
