"""HeteroFL against its specification: slices, masks, the scaler, static BatchNorm, what travels, what is measured."""

from dataclasses import replace

import pytest
import torch
from public_problem import exchange, federation, party, problem, same, states
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.evaluate import measure
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Step
from polyfed.core.needs import missing
from polyfed.core.nets import Net
from polyfed.core.samples import Samples
from polyfed.core.settings import Evaluation
from polyfed.core.stage import Batch
from polyfed.core.statistics import collect_statistics
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.heterofl import STATISTICS, HeteroFL, rows_of
from polyfed.models import Scaler, build, levels
from polyfed.models.width import LEVELS
from polyfed.ops.aggregate import extract

AB = ("cnn:4-8@1", "cnn:4-8@0.5")
NORMED = ("cnn:4-8,bn@1", "cnn:4-8,bn@0.5")
PLAIN = {"mask": False, "clip": None, "static_bn": False}
MAIN = Step()


def started(method, models=AB, clients=None, **options):
    """A federation in its first round, before any exchange."""
    run = federation(method, clients or problem((18, 24)), models, **options)
    run.ctx.round = 1
    return run


def replies(run, values):
    """What clients would return whose parameters are all equal to one number."""
    sent = {c: run.method.send(run.server, run.backend.infos[c], MAIN, run.ctx) for c in values}
    return {
        c: Message(
            {"main": {n: torch.full_like(t, values[c]) for n, t in m.params["main"].items()}}, {}, {"samples": 1}
        )
        for c, m in sent.items()
    }


def clones(state):
    return {name: tensor.clone() for name, tensor in state.items()}


# --- levels and slices ---


def test_level_letters_of_both_papers():
    assert levels("resnet18:w16", "a-d-g") == ["resnet18:w16@1", "resnet18:w16@0.7", "resnet18:w16@0.4"]
    assert levels("cnn:16-32,bn", "b2-j1") == ["cnn:16-32,bn@0.9", "cnn:16-32,bn@0.9", "cnn:16-32,bn@0.1"]
    assert levels("mlp:2", "a-b-c-d-e", decay="heterofl") == [f"mlp:2@{r}" for r in (1, 0.5, 0.25, 0.125, 0.0625)]
    assert list(LEVELS["fedfd"].values()) == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]


def test_levels_have_the_widths_of_the_paper():
    with torch.device("meta"):
        widths = [build(m, (3, 32, 32), 10).feature_dim for m in levels("resnet18", "a-b-c-d-e-f-g-h-i-j")]
    assert widths == [512, 461, 410, 359, 308, 256, 205, 154, 103, 52]


@pytest.mark.parametrize(
    "model, mix, decay, words",
    [
        ("cnn:4", "a-k", "fedfd", ("'k'", "a to j")),
        ("cnn:4", "a-f", "heterofl", ("'f'", "a to e")),
        ("cnn:4", "a--b", "fedfd", ("''", "a-d-g")),
        ("cnn:4", "a0", "fedfd", ("'a0'",)),
        ("cnn:4@0.5", "a", "fedfd", ("rate already",)),
        ("cnn:4", "a", "hetero", ("did you mean 'heterofl'",)),
    ],
)
def test_levels_say_what_is_wrong(model, mix, decay, words):
    with pytest.raises(pf.InputError) as error:
        levels(model, mix, decay)
    assert all(word in str(error.value) for word in words)


def test_two_clients_the_slice_is_the_mean_and_the_rest_is_the_wide_clients():
    run = started(HeteroFL(**PLAIN))
    run.method.fuse(run.server, replies(run, {0: 3.0, 1: 5.0}), MAIN, run.ctx)
    weight = run.server.state["stages.0.conv.weight"]  # 8 x 4 channels, of which the narrow client holds 4 x 2
    assert weight.shape == (8, 4, 3, 3)
    expected = torch.full((8, 4), 3.0)
    expected[:4, :2] = 4.0
    assert torch.equal(weight, expected[:, :, None, None].expand_as(weight))
    assert run.server.state["stem.conv.bias"].tolist() == [4, 4, 3, 3]
    assert torch.equal(run.server.state["head.bias"], torch.full((3,), 4.0))  # classes are never cut
    assert torch.equal(run.server.main.state_dict()["stages.0.conv.weight"], weight)


def test_running_statistics_of_several_widths_are_averaged_entry_by_entry_unless_static():
    run = started(HeteroFL(**PLAIN), NORMED)
    run.method.fuse(run.server, replies(run, {0: 3.0, 1: 5.0}), MAIN, run.ctx)
    assert run.server.state["stem.norm.running_mean"].tolist() == [4, 4, 3, 3]
    assert run.server.state["stages.0.norm.running_var"].tolist() == [4, 4, 4, 4, 3, 3, 3, 3]


def test_one_narrow_client_leaves_everything_outside_its_slice_as_it_was():
    run = started(HeteroFL(**PLAIN))
    before = clones(run.server.state)
    exchange(run, MAIN, clients=(1,))
    trained = party(run, 1).main.state_dict()
    touched = 0
    for name, tensor in run.server.state.items():
        slot = run.method.slots(run.server, run.backend.infos[1], run.ctx)[name]
        part = slot.part or ...
        assert torch.equal(tensor[part], trained[name])
        outside = torch.ones_like(tensor, dtype=torch.bool)
        outside[part] = False
        assert torch.equal(tensor[outside], before[name][outside])
        touched += int(outside.sum())
    assert touched > 0
    assert not torch.equal(run.server.state["head.weight"], before["head.weight"])


def test_slices_are_nested_and_untouched_slices_put_together_are_the_network():
    run = started(HeteroFL(**PLAIN), levels("cnn:6-10", "a-b-d-g-j"), problem((9, 9, 9, 9, 9)))
    before = clones(run.server.state)
    cut = {c: extract(run.server.state, run.method.slots(run.server, i, run.ctx)) for c, i in run.backend.infos.items()}
    for narrow, wide in ((1, 0), (2, 1), (3, 2), (4, 3)):
        for name, tensor in cut[narrow].items():
            assert torch.equal(tensor, cut[wide][name][tuple(slice(0, n) for n in tensor.shape)])
    sent = {c: Message({"main": clones(state)}, {}, {"samples": 7 + c}) for c, state in cut.items()}
    for chosen in ((0, 1, 2, 3, 4), (1, 3), (4,)):
        run.method.fuse(run.server, {c: sent[c] for c in chosen}, MAIN, run.ctx)
        assert all(torch.equal(run.server.state[name], before[name]) for name in before)


@pytest.mark.parametrize("models", [("cnn:4-8,bn",), ("mlp:2x12",)])
def test_at_full_rate_without_companions_it_is_fedavg_with_equal_weights(models):
    clients = problem((18, 24, 30))
    runs = []
    for method in (HeteroFL(**PLAIN), FedAvg(weighting="uniform"), FedAvg()):
        runs.append(federation(method, clients, models, rounds=3, participation=0.67))
        runs[-1].run()
    heterofl, fedavg, weighted = runs
    assert same(states(heterofl), states(fedavg))
    assert all(torch.equal(heterofl.server.state[n], t) for n, t in fedavg.server.state.items())
    assert not same(states(heterofl), states(weighted))


# --- masks ---


def test_masked_loss_by_hand():
    method = HeteroFL()
    logits = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)

    class Fixed(nn.Module):
        def forward(self, x):
            return logits

    nets = {"main": Net(Fixed())}
    batch = Batch(torch.zeros(1, 1), torch.tensor([1]))
    loss = method.loss(nets, batch, {"present": torch.tensor([1.0, 1.0, 0.0])})
    expected = F.cross_entropy(torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([1]))  # 0, not minus infinity
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient[0, 2] == 0 and gradient[0, 0] != 0 and gradient[0, 1] != 0
    everything = method.loss(nets, batch, {"present": torch.ones(3)})
    assert torch.equal(everything, F.cross_entropy(logits, batch.y))


def test_a_client_trains_with_its_own_mask_and_a_clipped_gradient():
    run = started(HeteroFL(clip=0.7), clients=problem((18, 24), lacking=1))
    stages = [run.method.stage(party(run, client), run.ctx) for client in (0, 1)]
    assert [stage.aux["present"].tolist() for stage in stages] == [[1, 1, 1], [1, 1, 0]]
    assert [stage.training.clip for stage in stages] == [0.7, 0.7]
    own = HeteroFL(clip=None, mask=False).stage(party(run, 1), run.ctx)
    assert own.training == run.ctx.training and not own.aux
    run.ctx.training = replace(run.ctx.training, clip=0.3)  # the run's own limit is that of a method without one
    assert HeteroFL(clip=None).stage(party(run, 1), run.ctx).training.clip == 0.3


def test_rows_of_classes_that_a_client_lacks_stay_out_of_the_mean():
    run = started(HeteroFL(clip=None, static_bn=False), clients=problem((18, 24), lacking=1))
    assert run.backend.infos[1].label_counts[2] == 0
    before = clones(run.server.state)
    run.method.fuse(run.server, replies(run, {0: 3.0, 1: 5.0}), MAIN, run.ctx)
    weight, bias = run.server.state["head.weight"], run.server.state["head.bias"]
    assert bias.tolist() == [4, 4, 3]
    assert weight[:, 0].tolist() == [4, 4, 3] and weight[:, -1].tolist() == [3, 3, 3]
    run.method.fuse(run.server, replies(run, {1: 9.0}), MAIN, run.ctx)
    assert run.server.state["head.bias"].tolist() == [9, 9, 3]  # nobody holds class 2: its row stays
    run = started(HeteroFL(**PLAIN), clients=problem((18, 24), lacking=1))
    run.method.fuse(run.server, replies(run, {0: 3.0, 1: 5.0}), MAIN, run.ctx)
    assert run.server.state["head.bias"].tolist() == [4, 4, 4]
    assert before.keys() == run.server.state.keys()
    run = started(HeteroFL(clip=None, static_bn=False, weighting="samples"), clients=problem((18, 24), lacking=1))
    told = replies(run, {0: 3.0, 1: 5.0})
    told[1].meta["samples"] = 3
    run.method.fuse(run.server, told, MAIN, run.ctx)
    assert run.server.state["head.bias"].tolist() == [4.5, 4.5, 3]  # (3 + 3·5) / 4


@pytest.mark.parametrize(("mask", "counted"), [(True, [0, 1]), (False, None)])
def test_the_same_rows_stay_out_where_replies_are_compared(mask, counted):
    run = started(HeteroFL(mask=mask), clients=problem((18, 24), lacking=1))
    for client, reply in replies(run, {0: 3.0, 1: 5.0}).items():
        places = run.method.places(run.server, run.backend.infos[client], reply, run.ctx)
        rows = {name: place.rows if place.rows is None else place.rows.tolist() for name, place in places.items()}
        heads = ("params/main/head.weight", "params/main/head.bias")
        assert len(rows) > 4
        assert rows == {name: counted if client == 1 and name in heads else None for name in rows}
        if client == 1 and mask:
            common = torch.arange(3 * 8).view(3, 8)[places[heads[0]].part]  # half of eight columns
            assert common.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]


def test_rows_of_chosen_columns():
    common, rows = torch.arange(12).view(3, 4), torch.tensor([0, 2])
    chosen = (torch.arange(3).view(-1, 1), torch.tensor([[1, 3]]))
    assert common[rows_of(chosen, rows, torch.Size((3, 2)))].tolist() == [[1, 3], [9, 11]]
    assert common[:, 0][rows_of((torch.arange(3),), rows, torch.Size((3,)))].tolist() == [0, 8]


# --- the scaler ---


def test_scalers_divide_in_training_only_and_relative_to_the_global_rate():
    for method, factor in ((HeteroFL(), 2.0), (HeteroFL(global_rate=0.75), 1.5), (HeteroFL(scaler=False), 1.0)):
        client = party(started(method), 1)
        scaler = next(m for m in client.main.modules() if isinstance(m, Scaler))
        x = torch.tensor([1.0, 3.0])
        assert torch.equal(scaler.train()(x), x * factor)
        assert torch.equal(scaler.eval()(x), x)


# --- static BatchNorm ---


class Moments(nn.Module):
    """A norm behind an active scaler."""

    def __init__(self):
        super().__init__()
        self.scaler = Scaler(0.5)
        self.scaler.active = True
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.scaler(x))


def test_statistics_are_the_mean_over_batches_of_means_and_unbiased_variances():
    x = torch.tensor([[1.0, 0.0], [3.0, 4.0], [7.0, 2.0], [5.0, 2.0], [2.0, 8.0]])
    model = Moments()
    model.norm.running_mean.fill_(77)
    assert collect_statistics(model, Samples(x, torch.zeros(5, dtype=torch.long)), 2) == 2  # the last row joins
    first, second = x[:2], x[2:]
    torch.testing.assert_close(model.norm.running_mean, (first.mean(0) + second.mean(0)) / 2)
    torch.testing.assert_close(model.norm.running_var, (first.var(0) + second.var(0)) / 2)
    assert model.norm.momentum == 0.1 and model.training and model.norm.training
    # What is collected is what the norm meets in prediction, where the scaler does nothing.
    output = model.eval()(x[:1])
    torch.testing.assert_close(output, (x[:1] - model.norm.running_mean) / (model.norm.running_var + 1e-5).sqrt())


@pytest.mark.parametrize("batch_size", [1, 4])
def test_statistics_of_a_single_sample_have_its_mean(batch_size):
    model = Moments()
    x = torch.tensor([[1.0, -3.0]])
    assert collect_statistics(model, Samples(x, torch.zeros(1, dtype=torch.long)), batch_size) == 1
    torch.testing.assert_close(model.norm.running_mean, x[0])
    assert torch.equal(model.norm.running_var, torch.zeros(2))


def test_training_leaves_running_statistics_alone():
    run = started(HeteroFL(), NORMED)
    exchange(run, MAIN)
    state = party(run, 0).main.state_dict()
    assert torch.equal(state["stem.norm.running_mean"], torch.zeros(4))
    assert not torch.equal(state["stem.conv.weight"], run.ctx.blueprints[NORMED[0]].initial["stem.conv.weight"])


def test_statistics_of_a_width_are_the_mean_over_all_batches_of_its_clients():
    run = started(HeteroFL(), NORMED, problem((9, 16, 30)))  # clients 0 and 2 are wide, with 1 and 4 batches of 8
    exchange(run, MAIN)
    exchange(run, STATISTICS)
    found = {}
    for client in (0, 2):
        model = run.ctx.blueprints[NORMED[0]].build()
        model.load_state_dict({n: t for n, t in run.server.state.items() if "::" not in n}, strict=False)
        found[client] = (collect_statistics(model, run.backend.store.data[client].train, 8), model.state_dict())
    assert [found[c][0] for c in (0, 2)] == [1, 4]
    for name in ("stem.norm.running_mean", "stages.0.norm.running_var"):
        expected = (found[0][1][name] + 4 * found[2][1][name]) / 5
        torch.testing.assert_close(run.server.state[f"{NORMED[0]}::{name}"], expected)
        torch.testing.assert_close(run.server.main.state_dict()[name], expected)
        assert not torch.allclose(run.server.state[f"{NORMED[1]}::{name}"], expected[: len(expected) // 2])


def test_public_statistics_are_collected_by_the_server_for_every_width():
    run = started(HeteroFL(statistics="public"), NORMED)
    exchange(run, MAIN)
    for client, name in ((0, NORMED[0]), (1, NORMED[1])):
        message = run.method.send(run.server, run.backend.infos[client], EVALUATE, run.ctx)
        model = run.ctx.blueprints[name].build()
        model.load_state_dict(message.params["main"], strict=False)
        collect_statistics(model, run.server.public, run.ctx.training.batch_size)
        for key in ("stem.norm.running_mean", "stages.0.norm.running_var"):
            assert torch.equal(message.params["main"][key], model.state_dict()[key])
            assert float(model.state_dict()[key].std()) > 0


# --- what travels ---


def test_bytes_are_those_of_the_slices():
    sizes = [sum(p.numel() for p in build(m, (1, 8, 8), 3).parameters()) for m in NORMED]
    channels = [4 + 8, 2 + 4]
    for statistics in ("clients", "public"):
        run = federation(HeteroFL(statistics=statistics), problem((18, 24)), NORMED)
        run.run()
        (line,) = run.history
        up, down = sum(4 * p + 8 for p in sizes), sum(4 * p for p in sizes)
        if statistics == "clients":  # every client fetches the fused weights and returns two numbers a channel
            up, down = up + sum(8 * c + 8 for c in channels), 2 * down
        assert (line["bytes_up"], line["bytes_down"]) == (up, down)


def test_statistics_are_only_collected_when_models_are_measured():
    run = federation(HeteroFL(), problem((18, 24)), NORMED, rounds=2)
    run.settings = type(run.settings)(2, training=run.settings.training, evaluation=Evaluation(0))
    run.run()
    first, last = run.history
    assert first["bytes_up"] < last["bytes_up"]


# --- what is measured ---


def test_own_models_are_measured_as_they_were_trained():
    run = federation(HeteroFL(statistics="public", measure="own"), problem((18, 24, 1)), NORMED, rounds=2)
    history = run.run()
    for client in range(3):
        own = party(run, client)
        accuracy = measure(run.method, own, run.test, run.ctx).accuracy
        assert accuracy == history[-1]["accuracy"]["per_client"][client]
        again = run.ctx.blueprints[own.info.architecture].build()
        again.load_state_dict(own.main.state_dict())
        collect_statistics(again, own.train, run.ctx.training.batch_size)
        assert torch.equal(again.stem.norm.running_mean, own.main.stem.norm.running_mean)
    assert not same(states(run)[:1], [run.server.main.state_dict()])


# --- refusals ---


@pytest.mark.parametrize(
    "options, words",
    [
        ({"statistics": "all"}, ("statistics", "'clients' or 'public'", "'all'")),
        ({"measure": "both"}, ("measure", "'slice' or 'own'")),
        ({"measure": "own"}, ("measure='own'", "statistics='public'")),
        ({"global_rate": 0.0}, ("global_rate",)),
    ],
)
def test_values_that_make_no_sense_are_refused(options, words):
    with pytest.raises(pf.InputError) as error:
        HeteroFL(**options).check()
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "models, words",
    [
        (("cnn:4-8", "mlp:1x12"), ("client 1", "mlp:1x12")),
        ((lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),), ("client 0", "one family", "of none")),
    ],
)
def test_networks_that_are_not_widths_of_one_are_refused(models, words):
    with pytest.raises(pf.InputError) as error:
        federation(HeteroFL(), problem((18, 24)), models)
    assert all(word in str(error.value) for word in words)


def test_processes_divide_the_means_unless_the_server_does_more():
    class More(HeteroFL):
        name = "more"

        def refine(self, server, replies, ctx):
            """Look at all of it."""

    for method, divided in ((HeteroFL(), True), (More(), False)):
        run = started(method)
        places = run.method.fused_into(run.server, run.backend.infos[1], Step(), run.ctx)
        assert (places is not None) == divided
        assert places is None or places["params/main/head.weight"] == "head.weight"


@pytest.mark.parametrize(("measure", "widths"), [("slice", ["@0.5", "@1"]), ("own", ["@1"])])
def test_the_server_collects_statistics_for_networks_that_are_measured_with_them(measure, widths):
    models = ("cnn:4-8,bn@0.5", "cnn:4-8,bn@1", "cnn:4-8,bn@0.5")
    run = federation(HeteroFL(statistics="public", measure=measure), problem((18, 24, 12)), models)
    assert [blueprint.name for blueprint, _ in run.method.measured(run.ctx)] == [f"cnn:4-8,bn{w}" for w in widths]


@pytest.mark.parametrize(("mask", "refused"), [(True, True), (False, False)])
def test_a_mask_needs_to_know_the_classes_of_every_client(mask, refused):
    run = started(HeteroFL())
    silent = [replace(info, label_counts=None) for info in run.backend.infos.values()]
    found = missing(HeteroFL(mask=mask), silent, run.ctx.blueprints, None, (1, 8, 8))
    words = "the number of samples of each class at every client, but client 0 does not give them"
    assert found == (words if refused else None)
