import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from polyfed.core import runner
from polyfed.core.errors import TrainingError
from polyfed.core.nets import EVAL, STILL, TRAIN, FunctionalNet, Net, mode
from polyfed.core.party import ClientInfo, Context, Party, PartyData
from polyfed.core.rng import generator, numpy_generator, seed_of, seeded
from polyfed.core.runner import run_stage
from polyfed.core.samples import Samples, Scaling
from polyfed.core.settings import Training
from polyfed.core.stage import Draw, Stage, Update, epoch_plan, is_trainable, learning_rate


def context(**training):
    settings = Training(**{"epochs": 1, "batch_size": 4, "lr": 0.1, **training})
    return Context(0, 1, 1, settings, 2, (3,), 1)


def client(model, n=4, models=None):
    torch.manual_seed(0)
    data = Samples(torch.randn(n, 3), torch.arange(n) % 2)
    party = Party(0, ClientInfo(0, n, "test"), PartyData(data))
    party.models = {"main": model, **(models or {})}
    return party


def cross_entropy(nets, batch, aux):
    return F.cross_entropy(nets["main"](batch.x), batch.y)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 3), st.booleans())
def test_every_sample_is_used_once_an_epoch_and_a_lone_one_joins_its_neighbours(n, size, epochs, join):
    plan = list(epoch_plan(n, size, epochs, None, generator(0, "t"), True, join))
    assert [epoch for epoch, _, _ in plan] == list(range(epochs))
    for _, order, sizes in plan:
        assert sorted(order.tolist()) == list(range(n)) and sum(sizes) == n
        if join and n > 1 and size > 1:
            assert 1 not in sizes
        assert all(s <= size + 1 for s in sizes)


def test_each_epoch_has_a_new_order_and_steps_cut_it():
    (_, first, _), (_, second, _) = epoch_plan(50, 50, 2, None, generator(0, "t"), True, False)
    assert not torch.equal(first, second)
    plan = list(epoch_plan(10, 4, None, 7, generator(0, "t"), True, False))
    assert [sizes for _, _, sizes in plan] == [[4, 4, 2], [4, 4, 2], [4]]
    assert [len(order) for _, order, _ in plan] == [10, 10, 4]


def test_streams_differ_by_every_part_of_their_name():
    seeds = {seed_of(*key) for key in [(0, "a", 0, 0), (1, "a", 0, 0), (0, "b", 0, 0), (0, "a", 1, 0), (0, "a", 0, 1)]}
    assert len(seeds) == 5
    assert seed_of(0, "a", 11, 1) != seed_of(0, "a", 1, 11)


def test_one_step_is_the_gradient_step_of_the_whole_batch():
    model = nn.Linear(3, 2)
    party = client(model)
    x, y = party.train.inputs(), party.train.labels()
    weight = model.weight.detach().clone().requires_grad_()
    bias = model.bias.detach().clone().requires_grad_()
    F.cross_entropy(F.linear(x, weight, bias), y).backward()
    run_stage(Stage(cross_entropy), party, context(), "main/0")
    assert torch.allclose(model.weight, weight - 0.1 * weight.grad, atol=1e-7)
    assert torch.allclose(model.bias, bias - 0.1 * bias.grad, atol=1e-7)


def test_a_stage_returns_the_mean_loss_of_its_batches():
    party = client(nn.Linear(3, 2), 8)
    expected = F.cross_entropy(party.main(party.train.inputs()), party.train.labels())
    found = run_stage(Stage(cross_entropy), party, context(lr=1e-12, epochs=3), "main/0")
    assert found.loss == pytest.approx(float(expected.detach()))
    assert found.steps == 6 and found.rates == pytest.approx(6e-12)


def test_a_network_out_of_aux_computes_the_same_wherever_its_tensors_begin():
    """Those of a message or a file begin anywhere, and convolutions round otherwise there."""
    x, weight = torch.randn(8, 4, 6, 6), torch.randn(4, 4, 3, 3)
    outputs, starts = [], []

    def look(nets, batch, aux):
        outputs.append(F.conv2d(x, aux["net"]["weight"], padding=1))
        starts.append(aux["net"]["weight"].data_ptr() % 64)
        return cross_entropy(nets, batch, aux)

    for place in range(4):
        memory = torch.zeros(weight.numel() + 4)
        moved = memory[place : place + weight.numel()].view(weight.shape).copy_(weight)
        run_stage(Stage(look, aux={"net": {"weight": moved}}), client(nn.Linear(3, 2)), context(), "main/0")
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert starts == [0] * 4


def test_steps_follow_the_decaying_rate():
    """Where the rate vanishes after an epoch, or after a round, nothing moves any more."""
    one, two = nn.Linear(3, 2), nn.Linear(3, 2)
    two.load_state_dict(one.state_dict())
    start = one.weight.detach().clone()
    run_stage(Stage(cross_entropy), client(one), context(), "main/0")
    run_stage(Stage(cross_entropy), client(two), context(epochs=5, decay=1e-12), "main/0")
    assert torch.allclose(one.weight, two.weight, atol=1e-7) and not torch.allclose(one.weight, start, atol=1e-3)
    later = one.weight.detach().clone()
    run_stage(Stage(cross_entropy), client(one), replace(context(round_decay=1e-12), round=2), "main/0")
    assert torch.equal(one.weight, later)


def test_gradients_of_several_losses_are_combined_by_the_stage():
    def zero(nets, batch, aux):
        return (nets["main"].parameters()["bias"] * 0).sum() + 0 * cross_entropy(nets, batch, aux)

    def keep_second(grads, aux):
        return grads[1]

    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    run_stage(Stage((cross_entropy, zero), gradients=keep_second), client(model), context(), "main/0")
    assert torch.equal(model.weight, before)


def test_alternating_updates_move_only_their_own_parameters():
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    seen = []

    def loss(nets, batch, aux):
        seen.append([next(iter(nets[key].parameters().values())).requires_grad for key in ("main", "side")])
        return F.cross_entropy(nets["main"](batch.x) + nets["side"](batch.x), batch.y)

    updates = (Update((loss,), {"main": None}), Update((loss,), {"side": ("bias",)}))
    before = second.weight.detach().clone()
    run_stage(Stage(updates=updates), client(first, models={"side": second}), context(), "main/0")
    assert seen == [[True, False], [False, False]]
    assert torch.equal(second.weight, before)
    assert all(p.requires_grad for p in (*first.parameters(), *second.parameters()))


def test_projection_is_applied_after_the_step():
    def positive(moved):
        return {"main": {name: value.clamp(min=0) for name, value in moved["main"].items()}}

    model = nn.Linear(3, 2)
    run_stage(Stage(cross_entropy, project=positive), client(model), context(), "main/0")
    assert (model.weight >= 0).all()


def test_a_loss_that_is_not_a_number_names_client_round_and_batch():
    def broken(nets, batch, aux):
        return cross_entropy(nets, batch, aux) * torch.where(batch.y.sum() >= 0, float("nan"), 1.0)

    with pytest.raises(
        TrainingError, match=r"client 0 became nan in round 1, batch 1 of 'main/0'.*smaller lr \(now 0.1"
    ):
        run_stage(Stage(broken), client(nn.Linear(3, 2)), context(), "main/0")


def test_clipping_limits_the_step():
    model = nn.Linear(3, 2)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    run_stage(Stage(cross_entropy), client(model), context(clip=0.01), "main/0")
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.linalg.norm(after - before) == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_columns_and_draws_reach_the_loss_and_do_not_disturb_the_order():
    orders = []
    x = client(nn.Linear(3, 2), 9).train.inputs()

    def look(nets, batch, aux):
        orders.append(batch["position"].tolist())
        assert torch.equal(batch.x, x[batch["position"]])
        if "noise" in batch:
            assert batch["noise"].shape == (len(batch.y), 5)
        return cross_entropy(nets, batch, aux)

    columns = {"position": torch.arange(9)}
    run_stage(Stage(look, columns=columns), client(nn.Linear(3, 2), 9), context(), "main/0")
    run_stage(
        Stage(look, columns=columns, draws={"noise": Draw((None, 5))}), client(nn.Linear(3, 2), 9), context(), "main/0"
    )
    once = [position for batch in orders[: len(orders) // 2] for position in batch]
    assert orders[: len(orders) // 2] == orders[len(orders) // 2 :]
    assert sorted(once) == list(range(9)) != once


def test_masks_of_dropout_do_not_disturb_the_order():
    orders = []

    def look(nets, batch, aux):
        orders.append(batch["position"].tolist())
        return cross_entropy(nets, batch, aux)

    for between in (nn.Identity(), nn.Dropout(0.5)):
        party = client(nn.Sequential(nn.Linear(3, 4), between, nn.Linear(4, 2)), 9)
        run_stage(Stage(look, columns={"position": torch.arange(9)}), party, context(epochs=3), "main/0")
    assert len(orders) == 2 * 9 and orders[:9] == orders[9:]


def test_orders_draws_and_masks_are_those_of_the_client_and_the_round():
    def seen(id, round):
        found = []

        def look(nets, batch, aux):
            dropped = nets["main"](torch.ones(len(batch.y), 3))
            found.append((batch["position"].tolist(), batch["noise"].tolist(), (dropped == 0).tolist()))
            return dropped.sum() * nets["scale"].parameters()["weight"].sum()

        party = client(nn.Dropout(0.5), 16, {"scale": nn.Linear(1, 1)})
        party.id = id
        stage = Stage(look, trainable={"scale": None}, columns={"position": torch.arange(16)})
        run_stage(replace(stage, draws={"noise": Draw((None,))}), party, replace(context(), round=round), "main/0")
        return [list(kind) for kind in zip(*found, strict=True)]

    first, later, other = seen(0, 1), seen(0, 2), seen(1, 1)
    assert seen(0, 1) == first
    for kind in range(3):
        assert first[kind] != later[kind] and first[kind] != other[kind] and later[kind] != other[kind]


def test_draws_are_normal_or_uniform():
    rng = torch.Generator().manual_seed(0)
    normal, uniform = Draw((None, 3)).sample(500, rng), Draw((None, 3), "uniform").sample(500, rng)
    assert normal.shape == uniform.shape == (500, 3)
    assert float(normal.min()) < -2 and abs(float(normal.mean())) < 0.1
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1 and abs(float(uniform.mean()) - 0.5) < 0.05


def test_inputs_may_be_collected_in_small_pieces(monkeypatch):
    weights = []
    for values in (runner.PIECE, 20, 1):  # 6 samples at once, 1 sample
        monkeypatch.setattr(runner, "PIECE", values)
        torch.manual_seed(2)
        model = nn.Linear(3, 2)
        run_stage(Stage(cross_entropy), client(model, 11), context(epochs=2, batch_size=3), "main/0")
        weights.append(model.weight.detach())
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_the_global_generator_is_seeded_inside_and_left_alone_outside():
    torch.manual_seed(4)
    expected = torch.rand(3)
    drawn = []
    for outside, seed, purpose in ((4, 0, "a"), (5, 0, "a"), (4, 1, "a"), (4, 0, "b")):
        torch.manual_seed(outside)
        with seeded(seed, purpose):
            drawn.append(torch.rand(3))
        if outside == 4:
            assert torch.equal(torch.rand(3), expected)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[3])


def test_numpy_streams_follow_the_same_tree():
    keys = [(0, "a", 0, 0), (1, "a", 0, 0), (0, "b", 0, 0), (0, "a", 1, 0), (0, "a", 0, 1)]
    assert len({float(numpy_generator(*key).random()) for key in keys}) == 5
    assert numpy_generator(*keys[0]).random() == numpy_generator(*keys[0]).random()


def test_dropout_draws_from_the_clients_stream_not_from_the_global_generator():
    def build():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 32), nn.Dropout(0.5), nn.Linear(32, 2))

    results = []
    for seed in (5, 6):
        model = build()
        party = client(model, 8)
        torch.manual_seed(seed)
        run_stage(Stage(cross_entropy), party, context(epochs=3), "main/0")
        results.append(model[0].weight.detach().clone())
    assert torch.equal(*results)
    model = build()
    run_stage(Stage(cross_entropy), client(model, 8), replace(context(epochs=3), seed=1), "main/0")
    assert not torch.equal(model[0].weight, results[0])


def test_a_single_sample_is_learned_even_with_batch_norm():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = model[0].weight.detach().clone()
    run_stage(Stage(cross_entropy), client(model, 1), context(), "main/0")
    assert not torch.equal(model[0].weight, before)


def test_still_uses_the_batch_but_leaves_running_statistics_alone():
    norm = nn.BatchNorm1d(3)
    x = torch.randn(8, 3) * 5 + 2
    still = Net(norm).still()(x)
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert int(norm.num_batches_tracked) == 0
    trained = Net(norm)(x)
    assert torch.allclose(still, trained)
    assert not torch.equal(norm.running_mean, torch.zeros(3))
    evaluated = Net(norm).eval()(x)
    assert not torch.allclose(evaluated, trained)
    assert norm.training and norm.track_running_stats


@pytest.mark.parametrize("kind", [TRAIN, STILL, EVAL])
def test_the_functional_handle_gives_the_same_outputs(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x = torch.randn(6, 3)
    params, buffers = dict(model.named_parameters()), {n: b.clone() for n, b in model.named_buffers()}
    functional = FunctionalNet(model, params, buffers, kind)(x)
    assert torch.equal(functional, Net(model, kind)(x))
    with mode(model, TRAIN):
        assert model.training


def test_prefixes_name_whole_parts():
    assert is_trainable("head.weight", ("head",))
    assert is_trainable("head.weight", ("head.",))  # as people write it, too
    assert not is_trainable("header.weight", ("head",))
    assert is_trainable("anything", None)


def test_learning_rates_decay_by_epoch_and_by_round():
    training = Training(lr=1.0, decay=0.8, decay_every=2, round_decay=0.5)
    assert [learning_rate(training, 1, e) for e in range(4)] == [1.0, 1.0, 0.8, 0.8]
    assert learning_rate(training, 3, 0) == 0.25


def test_schedules_over_the_rounds():
    cosine = Training(lr=2.0, schedule="cosine")
    assert [learning_rate(cosine, t, 0, 4) for t in (1, 3)] == pytest.approx([2.0, 1.0])
    assert learning_rate(cosine, 4, 0, 4) == pytest.approx(1 + math.cos(math.pi * 3 / 4))
    steps = Training(lr=1.0, milestones=(2, 3), milestone_decay=0.1)
    assert [learning_rate(steps, t, 0, 5) for t in range(1, 6)] == pytest.approx([1, 1, 0.1, 0.01, 0.01])
    rising = Training(lr=1.0, warm_up=3)
    assert [learning_rate(rising, t, 0, 9) for t in range(1, 6)] == pytest.approx([0.25, 0.5, 0.75, 1, 1])


def test_what_a_loss_gives_beside_itself_is_added_up():
    def counting(nets, batch, aux):
        counts = torch.zeros(2).index_add(0, batch.y, torch.ones(len(batch.y)))
        return cross_entropy(nets, batch, aux), {"counts": counts}

    trained = run_stage(Stage(counting), client(nn.Linear(3, 2), 7), context(epochs=3), "main/0")
    assert trained.sums["counts"].tolist() == [12, 9]


def test_gradients_are_added_up_as_they_are_before_anything_else():
    """One batch of all samples and a transform that stops everything: each step has the same gradient."""
    party = client(nn.Linear(3, 2))
    loss = F.cross_entropy(party.main(party.train.inputs()), party.train.labels())
    expected = torch.autograd.grad(loss, party.main.weight)[0]
    start = party.main.weight.detach().clone()

    def stopped(grads, aux):
        return {"main": {name: 0 * grad for name, grad in grads[0]["main"].items()}}

    stage = Stage(cross_entropy, gradients=stopped, sum_gradients=True)
    trained = run_stage(stage, party, context(epochs=5, clip=1e-9), "main/0")
    torch.testing.assert_close(trained.gradients["main"]["weight"], 5 * expected)
    assert torch.equal(party.main.weight, start)


def test_a_stage_at_the_server_may_stop_early_and_change_its_pace():
    seen = []
    stage = Stage(cross_entropy, until=lambda step: step == 3, rate_factor=lambda step: seen.append(step) or 0.5**step)
    trained = run_stage(stage, client(nn.Linear(3, 2), 8), context(epochs=9), "main/0")
    assert trained.steps == 3 and seen == [0, 1, 2]
    assert trained.rates == pytest.approx(0.1 * (1 + 0.5 + 0.25))


def test_a_network_with_other_tensors_is_another_network():
    model, other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    for net in (Net(model), FunctionalNet(model, dict(model.named_parameters()), {})):
        assert torch.equal(net.replaced(other.state_dict())(x), other(x))
        narrow = {"0.weight": model[0].weight[:2], "0.bias": model[0].bias[:2], "1.weight": model[1].weight[:, :2]}
        expected = F.linear(F.linear(x, narrow["0.weight"], narrow["0.bias"]), narrow["1.weight"], model[1].bias)
        assert torch.equal(net.replaced(narrow)(x), expected)
        with pytest.raises(KeyError, match="no tensor 'z'"):
            net.replaced({"z": x})


def test_scaling_is_undone_exactly():
    scaling = Scaling((0.5, 0.25), (0.2, 0.1), 255.0)
    x = torch.randint(0, 256, (4, 2, 3, 3), dtype=torch.uint8)
    assert torch.allclose(scaling.undo(scaling.apply(x)), x / 255.0, atol=1e-6)


def test_a_loss_sees_an_anchor_in_the_layout_of_its_weight():
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    party = client(module)
    party.data = PartyData(Samples(torch.randn(4, 2, 8, 8), torch.arange(4) % 2))
    anchor = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    seen = []

    def penalised(nets, batch, aux):
        seen.append((nets["main"].parameters()["0.weight"].stride(), aux["anchor"]["0.weight"].stride()))
        return cross_entropy(nets, batch, aux)

    run_stage(Stage(penalised, aux={"anchor": anchor}), party, replace(context(), input_shape=(2, 8, 8)), "main/0")
    assert seen == [((18, 1, 6, 2), (18, 1, 6, 2))]
    assert anchor["0.weight"].stride() == (18, 9, 3, 1)  # the caller's own stays as it was
