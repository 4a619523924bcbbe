"""Parts that several methods are made of, on numbers that can be checked by hand."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.build import make_blueprint
from polyfed.core.choice import Choice, competing
from polyfed.core.distill import distill_by
from polyfed.core.heads import Head, head_loss, train_head
from polyfed.core.message import Message
from polyfed.core.party import Context, Party, PartyData, cloned
from polyfed.core.runner import run_stage
from polyfed.core.samples import Samples, unlabeled
from polyfed.core.stage import Batch, Stage
from polyfed.core.subset import hear_subset, known_subset, public_subset, subset_seed, tell_subset
from polyfed.core.views import at_rate, name_at
from polyfed.core.width import corner_of
from polyfed.ops.aggregate import part_way
from polyfed.ops.choice import Weights
from polyfed.ops.distance import l1_norm
from polyfed.ops.lowrank import changed, packed_change


def at_server(**given):
    ctx = Context(0, 1, 1, pf.Training(lr=0.5, batch_size=2), 2, (2,), 1, **given)
    ctx.run_stage = lambda stage, party, name: run_stage(stage, party, ctx, name)
    return ctx


@pytest.mark.parametrize(("rate", "expected"), [(1.0, 5.0), (0.25, 2.0), (0.0, 1.0), (2.0, 9.0)])
def test_a_part_of_the_way_from_one_to_five(rate, expected):
    state = {"moved": torch.tensor([1.0]), "other": torch.tensor([1.0])}
    with part_way(state, ["moved"], rate):
        for tensor in state.values():
            tensor.fill_(5.0)
    assert state["moved"].item() == expected and state["other"].item() == 5.0


def test_a_copy_of_a_state_does_not_follow_it():
    state = {"w": torch.tensor([1.0])}
    copy = cloned(state)
    state["w"].add_(1)
    assert copy["w"].item() == 1.0


def test_chosen_weights_travel_and_come_back_to_their_places():
    weights = Weights([["a", "b"]], {"a": (2, 2), "b": (2,)})
    choice = Choice(weights, torch.tensor([True, False, False, True, True, True]))
    again = Choice.unpacked(weights, choice.packed())
    assert torch.equal(again.chosen, choice.chosen)
    state = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([5.0, 6.0])}
    values = choice.values_of(state)
    assert values.tolist() == [1.0, 4.0, 5.0, 6.0]
    choice.put(state, 10 * values)
    assert state["a"].tolist() == [[10.0, 0.0], [0.0, 40.0]] and state["b"].tolist() == [50.0, 60.0]
    part, slots = choice.part(values)
    assert part["a"].tolist() == [1.0, 4.0] and part["b"].tolist() == [5.0, 6.0] and slots["b"].part is None
    assert [axis.tolist() for axis in slots["a"].part] == [[0, 1], [0, 1]]
    assert choice.place("kept").part[0].tolist() == [0, 3, 4, 5] and choice.place("kept").shape == (6,)


def test_norms_do_not_compete():
    blueprint = make_blueprint("cnn:4,bn", "cnn:4,bn", (1, 8, 8), 3, 0, None, "linear")
    everything, by_layer = competing(blueprint, False), competing(blueprint, True)
    assert everything.groups == [["stem.conv.weight", "head.weight", "head.bias"]]
    assert by_layer.groups == [["stem.conv.weight"], ["head.weight", "head.bias"]]


def test_a_head_is_trained_where_its_tensors_are():
    head = {"head.weight": torch.zeros(2, 2), "head.bias": torch.zeros(2)}
    data = Samples(torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.tensor([0, 1]))
    train_head(head, Stage(head_loss, data=data, epochs=1), at_server(), "head")
    # One step of 0.5 against the mean of (p - y) z with p = 1/2: 0.5 · 0.5 · 2 / 2 = 0.25, and twice that for 4.
    assert head["head.weight"].tolist() == [[0.25, -0.5], [-0.25, 0.5]] and head["head.bias"].tolist() == [0.0, 0.0]
    network = Head(2, 2)
    batch = Batch(data.x, data.y)
    assert head_loss({"main": network}, batch, {}) == nn.functional.cross_entropy(network(data.x), data.y)


def test_a_narrower_blueprint_has_the_first_entries():
    widest = make_blueprint("mlp:1x8", "mlp:1x8", (1, 2, 2), 3, 0, None, "linear")
    half = at_rate(widest, 0.5)
    assert half.name == name_at("mlp:1x8", 0.5) == "mlp:1x8*0.5" and at_rate(widest, 1) is widest
    assert half.parameters == 4 * 4 + 4 + 3 * 4 + 3 and half.build is None
    for name, tensor in half.initial.items():
        assert torch.equal(tensor, widest.initial[name][tuple(slice(0, n) for n in tensor.shape)])
    held = corner_of(widest.initial, half.shapes)
    assert sum(int(tensor.sum()) for tensor in held.values()) == half.parameters
    assert all(held[name].shape == tensor.shape for name, tensor in widest.initial.items())


def test_all_who_hear_the_seed_have_the_same_rows_and_the_others_none():
    public = unlabeled(torch.arange(20.0).unsqueeze(1))
    first, second = (Party(number, None, PartyData(public=public)) for number in (0, 1))
    hear_subset(first)
    assert known_subset(first) is None
    for party in (first, second):
        party.inbox = tell_subset(Message(), at_server())
        hear_subset(party)
    assert known_subset(first) == subset_seed(at_server())
    rows = public_subset(first, 5).inputs()
    assert len(rows) == 5 and torch.equal(rows, public_subset(second, 5).inputs())
    assert len(public_subset(first, None)) == len(public_subset(first, 100)) == 20


def test_a_packed_change_is_added():
    state = {"w": torch.eye(3), "b": torch.zeros(3)}
    change = {"w": torch.ones(3, 3), "b": torch.tensor([1.0, 2.0, 3.0])}
    packed = packed_change(change, 1.0)
    assert packed["ranks"].tolist() == [1]
    moved = changed(state, packed)
    torch.testing.assert_close(moved["w"], torch.eye(3) + 1)
    assert moved["b"].tolist() == [1.0, 2.0, 3.0] and changed(state, {})["w"] is state["w"]


def test_the_l1_norm_is_over_all_parameters():
    assert l1_norm({"a": torch.tensor([-1.0, 2.0]), "b": torch.tensor([[3.0]])}) == 6
    assert l1_norm({}) == 0


def test_fields_of_a_method_say_how_it_distills():
    class Options:
        distill_lr, distill_batch, distill_epochs, temperature = 0.25, 4, 3, 2.0

    student = nn.Linear(2, 2)
    with torch.no_grad():
        student.weight.zero_(), student.bias.zero_()
    data, targets = unlabeled(torch.eye(2).repeat(2, 1)), 2 * torch.eye(2).repeat(2, 1)
    server = at_server()
    told = []
    server.run_stage = lambda stage, party, name: told.append((stage, name)) or run_stage(stage, party, server, name)
    loss = distill_by(Options(), student, data, targets, server, name="lesson")
    ((stage, name),) = told
    assert name == "lesson" and stage.epochs == 3 and stage.steps is None and stage.rate_factor is None
    assert (stage.training.lr, stage.training.batch_size, stage.aux["temperature"].item()) == (0.25, 4, 2.0)
    Options.distill_steps, Options.distill_cosine = 2, True
    assert distill_by(Options(), student, data, targets, server) < loss
    stage, _ = told[-1]
    assert stage.steps == 2 and stage.epochs is None and stage.rate_factor is not None
