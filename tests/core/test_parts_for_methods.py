"""Parts that several methods are made of, on numbers that can be checked by hand."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.build import make_blueprint
from polyfed.core.choice import Choice, competing
from polyfed.core.distill import distill_by
from polyfed.core.heads import Head, head_loss, head_of, head_stage, train_head
from polyfed.core.looking import gradient_through_a_step
from polyfed.core.message import Message
from polyfed.core.nets import Net, features_and_logits
from polyfed.core.party import ClientInfo, Context, Party, PartyData, cloned
from polyfed.core.runner import run_stage
from polyfed.core.samples import Samples, drawn, set_apart, unlabeled
from polyfed.core.stage import Batch, Stage, Trained, learning_rates
from polyfed.core.subset import hear_subset, known_subset, public_subset, subset_seed, tell_subset
from polyfed.core.uploads import ensemble_logits
from polyfed.core.views import at_rate, name_at
from polyfed.core.width import corner_of
from polyfed.methods.fedavg import FedAvg
from polyfed.models import build
from polyfed.ops.aggregate import Slot, part_of, part_way
from polyfed.ops.choice import Weights
from polyfed.ops.distance import l1_norm
from polyfed.ops.lowrank import changed, packed_change, packed_difference


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


def test_a_part_of_a_tensor_is_where_it_is():
    whole = torch.zeros(2, 3)
    part_of(whole, Slot("w", (slice(0, 1), slice(0, 2)))).add_(1)
    assert part_of(whole, Slot("w")) is whole
    whole.add_(1)
    assert whole.tolist() == [[2.0, 2.0, 1.0], [1.0, 1.0, 1.0]]


def test_parameters_have_places_and_buffers_none():
    shape, classes = (1, 8, 8), 3
    blueprint = make_blueprint("cnn:4,bn", "cnn:4,bn", shape, classes, 0, None, "linear")
    ctx = Context(0, 1, 1, pf.Training(), classes, shape, 1, blueprints={"cnn:4,bn": blueprint})
    found = FedAvg().parameter_slots(ClientInfo(0, 5, "cnn:4,bn"), ctx)
    assert "stem.norm.running_mean" not in found and {"stem.norm.weight", "head.bias"} <= set(found)


def test_samples_apart_are_in_order_and_a_single_one_is_both():
    data = unlabeled(torch.arange(10.0).unsqueeze(1))
    rest, apart = (part.inputs().flatten().tolist() for part in set_apart(data, 3, torch.Generator().manual_seed(1)))
    assert len(apart) == 3 and sorted(rest + apart) == list(range(10))
    assert rest == sorted(rest) and apart == sorted(apart)
    one = data.select(torch.tensor([4]))
    assert set_apart(one, 1, torch.Generator()) == (one, one)


def test_drawn_samples_are_all_where_there_are_no_more():
    data = unlabeled(torch.arange(10.0).unsqueeze(1))
    some = drawn(data, 4, torch.Generator().manual_seed(1)).inputs().flatten().tolist()
    assert len(set(some)) == 4 and some != sorted(some)
    assert sorted(drawn(data, 40, torch.Generator()).inputs().flatten().tolist()) == list(range(10))


def test_a_client_calibrates_on_validation_data_where_it_has_some():
    train, held = unlabeled(torch.zeros(3, 1)), unlabeled(torch.ones(2, 1))
    for validation, expected in ((held, held), (None, train), (unlabeled(torch.zeros(0, 1)), train)):
        assert Party(0, None, PartyData(train, validation)).calibration is expected


def test_a_state_travels_under_another_name_and_the_message_stays_as_it_was():
    message = Message({"main": {"w": torch.ones(1)}, "side": {}}, {"x": torch.zeros(1)}, {"samples": 3})
    other = message.renamed("main", "slice")
    assert set(other.params) == {"slice", "side"} and other.params["slice"] is message.params["main"]
    assert other.data == message.data and other.meta == message.meta and set(message.params) == {"main", "side"}
    assert message.renamed("slice", "main").params.keys() == message.params.keys()


def test_a_field_that_must_stay_is_refused_by_name():
    FedAvg().must_stay("why", view="auto", pretrain_epochs=0)
    with pytest.raises(pf.InputError, match=r"^fedavg: pretrain_epochs must stay 0: nothing is averaged\.$"):
        FedAvg(pretrain_epochs=2).must_stay("nothing is averaged", view="auto", pretrain_epochs=0)


@pytest.mark.parametrize("other", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"clip": 1.0}, {"optimizer": "adam"}])
def test_a_plain_step_is_the_gradient_times_the_rate(other):
    assert pf.Training(lr=0.3, decay=0.5).is_plain and not pf.Training(**other).is_plain


def test_the_rates_of_all_steps_of_a_finished_stage():
    training = pf.Training(lr=0.8, epochs=2, decay=0.5)
    assert learning_rates(Stage(), Trained(steps=4), training, 1) == [0.8, 0.8, 0.4, 0.4]
    assert learning_rates(Stage(epochs=4), Trained(steps=4), training, 1) == [0.8, 0.4, 0.2, 0.1]


def test_logits_are_those_of_the_features():
    net, x = Net(build("mlp:1x4", (3,), 2)), torch.randn(5, 3)
    z, logits = features_and_logits(net, x)
    assert torch.equal(z, net.features(x)) and torch.equal(logits, net(x)) and z.shape == (5, 4)


def test_the_gradient_through_a_step_by_hand():
    """w = 2 and v = 3: first = (w - v)²/2 · x, so w' = w - eta·x·(w - v) and d w'²/dv = 2 w' · eta·x."""

    class Number(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.w * x

    client = Party(0, None, PartyData())
    client.models["main"] = Number()
    study, quiz = (Samples(torch.tensor([[value]]), torch.tensor([0])) for value in (0.5, 1.0))
    one = torch.ones(())

    def first(net, x, y, v):
        return ((net(one) - v).square() / 2 * x).sum()

    found = gradient_through_a_step(
        client,
        (study, first),
        (quiz, lambda net, x, y: net(x).square().sum()),
        torch.tensor(3.0),
        0.4,
        at_server(),
        "a",
    )
    moved = 2 - 0.4 * 0.5 * (2 - 3)
    assert found.item() == pytest.approx(2 * moved * 0.4 * 0.5) and client.main.w.item() == 2.0
    assert not found.requires_grad  # it is told, not trained through


def test_a_difference_of_states_is_packed_as_a_change():
    old, new = {"w": torch.eye(2)}, {"w": torch.tensor([[2.0, 0.0], [0.0, 1.0]])}
    torch.testing.assert_close(changed(old, packed_difference(new, old, 1.0)), new)


def test_fields_of_a_method_say_how_a_head_is_trained():
    class Options:
        head_epochs, head_lr, head_batch = 7, 0.25, None

    data, ctx = unlabeled(torch.zeros(3, 2)), at_server()
    stage = head_stage(Options(), "head", data, ctx, ("fc.weight", "fc.bias"))
    assert (stage.epochs, stage.training.lr, stage.training.batch_size) == (7, 0.25, 2) and stage.received
    assert stage.data is data and stage.trainable == {"main": ("fc.weight", "fc.bias")}
    assert head_stage(Options(), "head", data, ctx).trainable == {"main": None}


def test_a_head_is_found_in_a_state():
    blueprint = make_blueprint("mlp:1x4", "mlp:1x4", (3,), 2, 0, None, "linear")
    assert head_of(blueprint.initial, blueprint).keys() == {"head.weight", "head.bias"}


def test_an_ensemble_has_the_mean_logits():
    networks, x = [build("mlp:1x4", (3,), 2) for _ in range(3)], torch.randn(5, 3)
    expected = sum(network(x) for network in networks) / 3
    torch.testing.assert_close(ensemble_logits(networks, x), expected.detach())
