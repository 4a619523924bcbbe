"""FedMD+Global with LwoF against its specification, and FedAvg as the paper's baseline."""

import copy
from dataclasses import replace

import pytest
import torch
from public_problem import MLP, PRIVATE, PUBLIC, exchange, federation, party, problem, same, states
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.evaluate import measure
from polyfed.core.message import Message
from polyfed.core.nets import Net
from polyfed.core.passes import logits_of
from polyfed.core.stage import Batch
from polyfed.core.statistics import collect_statistics
from polyfed.methods.fedmd import DIGEST, LOGITS, PRETRAIN, REVISIT
from polyfed.models import build, count_parameters

OUTPUTS = PUBLIC + PRIVATE
QUICK = {"subset": 12, "public_epochs": 1, "private_epochs": 1, "digest_epochs": 2, "digest_batch": 8}
BARE = {"subset": 12, "public_epochs": 0, "private_epochs": 0, "digest_epochs": 2, "digest_batch": 8}
BN = "cnn:4-8,bn"


def quick(**options):
    return pf.FedMDGlobal(**{**QUICK, **options})


def bare(**options):
    return pf.FedMDGlobal(**{**BARE, **options})


def after(method, **settings):
    run = federation(method, **settings)
    run.run()
    return run


# --- the paper's models (spec 2.1) ---


def test_thirty_outputs_and_the_parameter_counts_of_the_table():
    outputs = pf.FedMDGlobal().outputs(10, 20)
    assert outputs == 30
    with torch.device("meta"):
        counts = {d: count_parameters(build(f"wrn-{d}-1", (3, 32, 32), outputs)) for d in (10, 16, 22, 28, 34, 40)}
    assert counts == {10: 79_486, 16: 176_926, 22: 274_366, 28: 371_806, 34: 469_246, 40: 566_686}
    zoo = [10] * 6 + [16] * 4 + [22] * 4 + [28] * 4 + [34] * 2
    assert len(zoo) == 20 and round(sum(counts[depth] for depth in zoo) / 1e6, 1) == 4.7


# --- distillation (spec 4, 5) ---


def test_identical_models_make_the_global_update_a_fixed_point():
    """L1 has subgradient 0 at 0: exact zeros, also for three clients, whose mean must be exact."""
    run = federation(bare())
    exchange(run, LOGITS)
    subset, mean = run.method.public_subset(run.server), run.server.memory["logits"]
    fresh = federation(bare())
    for model in (fresh.server.main, *(party(fresh, c).main for c in (0, 1, 2))):
        loss = fresh.method.distance(
            {"main": Net(model)}, Batch(subset.inputs(), subset.labels(), {"target": mean}), {}
        )
        loss.backward()
        assert loss.item() == 0
        assert all(not parameter.grad.any() for parameter in model.parameters())


def test_identical_models_stay_where_they_are():
    start = federation(bare())
    run = federation(bare(digest_loss="l2"))
    exchange(run, LOGITS)
    exchange(run, DIGEST)
    for a, b in zip(
        [*states(start), start.server.main.state_dict()], [*states(run), run.server.main.state_dict()], strict=True
    ):
        for name in a:
            torch.testing.assert_close(a[name], b[name], atol=1e-6, rtol=0)


def test_l1_is_a_mean_or_a_sum_over_outputs():
    student = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], requires_grad=True)
    batch = Batch(student, torch.zeros(2), {"target": torch.tensor([[0.0, 2.0, 5.0], [1.0, -1.0, 1.0]])})
    nets = {"main": lambda x: x}
    mean = bare().distance(nets, batch, {})
    total = bare(l1_reduction="sum_outputs").distance(nets, batch, {})
    assert mean.item() == pytest.approx((1 + 0 + 2 + 1 + 1 + 1) / 6)
    assert total.item() == pytest.approx((1 + 0 + 2 + 1 + 1 + 1) / 2)
    small, large = torch.autograd.grad(mean, student)[0], torch.autograd.grad(total, student)[0]
    torch.testing.assert_close(large, 3 * small)
    assert bare(digest_loss="l2").distance(nets, batch, {}).item() == pytest.approx((1 + 4 + 1 + 1 + 1) / 6)


def test_soft_label_distances_by_hand():
    student, teacher = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[3.0, 0.0, 0.0]])
    batch, nets = Batch(student, torch.zeros(1), {"target": teacher}), {"main": lambda x: x}
    p, q = teacher.softmax(1), student.softmax(1)
    cross = float(-(p * q.log()).sum())
    assert bare(digest_loss="ce").distance(nets, batch, {}).item() == pytest.approx(cross, rel=1e-5)
    divergence = cross + float((p * p.log()).sum())
    assert bare(digest_loss="kl").distance(nets, batch, {}).item() == pytest.approx(divergence, rel=1e-5)


def test_permuting_a_batch_permutes_the_loss_terms_only():
    run = federation(quick())
    net = {"main": Net(party(run, 0).main).eval()}
    x, y = run.server.public.inputs(), run.server.public.labels()
    columns = {"target": torch.randn(40, OUTPUTS), "copy": torch.randn(40, OUTPUTS)}
    order = torch.randperm(40)
    mixed = Batch(x[order], y[order], {name: column[order] for name, column in columns.items()})
    for loss in (run.method.distance, run.method.lwof_loss):
        aux = {"shift": torch.tensor(PUBLIC)}
        torch.testing.assert_close(loss(net, Batch(x, y, columns), aux), loss(net, mixed, aux))


def test_server_and_clients_learn_from_the_same_rows():
    seen = []

    class Watched(pf.FedMDGlobal):
        name = "watched"

        def distillation(self, data, target, ctx):
            seen.append((data.index.tolist(), target))
            return super().distillation(data, target, ctx)

    after(Watched(**QUICK), rounds=2)
    first, second = seen[:4], seen[4:]  # the server, then three clients
    assert len(second) == 4 and first[0][0] != second[0][0]
    for group in (first, second):
        assert all(index == group[0][0] and torch.equal(target, group[0][1]) for index, target in group)


def test_the_server_learns_to_give_the_mean_logits():
    run = federation(quick(digest_epochs=30, digest_lr=0.1, server_model="mlp:2x32"))
    exchange(run, PRETRAIN, round=0)
    start = copy.deepcopy(run.server.main)
    exchange(run, LOGITS)
    subset, mean = run.method.public_subset(run.server), run.server.memory["logits"]
    far, near = (float((logits_of(m, subset) - mean).abs().mean()) for m in (start, run.server.main))
    assert near < 0.5 * far
    assert run.ctx.records["server_loss"] > 0


# --- LwoF (spec 5) ---


@pytest.mark.parametrize("rho", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("scaled", [False, True])
def test_value_and_gradient_of_the_penalty(rho, scaled):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, OUTPUTS, generator=draw, dtype=torch.float64, requires_grad=True)
    before = torch.randn(6, OUTPUTS, generator=draw, dtype=torch.float64)
    y, beta = torch.tensor([0, 1, 2, 0, 1, 2]), 0.7
    method = bare(beta=beta, rho=rho, scale_rho2=scaled)
    loss = method.lwof_loss({"main": lambda x: x}, Batch(logits, y, {"copy": before}), {"shift": torch.tensor(PUBLIC)})
    p, q = (before / rho).softmax(1), (logits / rho).softmax(1)
    weight = beta * (rho**2 if scaled else 1.0)
    task = F.cross_entropy(logits, y + PUBLIC)
    torch.testing.assert_close(loss, task - weight * (p * q.log()).sum(1).mean())
    gradient = torch.autograd.grad(loss - task, logits)[0]
    torch.testing.assert_close(gradient, (weight * (q - p) / (rho * 6)).detach())


def test_the_penalty_of_the_copy_itself_is_its_entropy_and_pulls_nowhere():
    logits = torch.randn(4, OUTPUTS, dtype=torch.float64, requires_grad=True)
    batch = Batch(logits, torch.zeros(4, dtype=torch.long), {"copy": logits.detach()})
    aux = {"shift": torch.tensor(PUBLIC)}
    penalty = bare().lwof_loss({"main": lambda x: x}, batch, aux) - F.cross_entropy(logits, batch.y + PUBLIC)
    p = (logits / 2).softmax(1)
    torch.testing.assert_close(penalty, -(p * p.log()).sum(1).mean())
    assert torch.autograd.grad(penalty, logits)[0].abs().max() < 1e-6


def test_beta_zero_is_lwof_off_bit_for_bit():
    models = (BN, "mlp:1x12")
    zero, off = after(quick(beta=0.0), models=models, rounds=2), after(quick(lwof=False), models=models, rounds=2)
    on = after(quick(), models=models, rounds=2)
    assert same(states(zero), states(off)) and not same(states(on), states(off))


def test_copy_logits_once_are_those_of_every_batch_and_the_copy_stays():
    """The stage against a plain loop that keeps a frozen copy and asks it batch by batch, on a net with BatchNorm."""
    method = bare(beta=2.0)
    run = federation(method, models=(BN,), training=pf.Training(epochs=2, batch_size=7, lr=0.05))
    client = party(run, 2)
    frozen = copy.deepcopy(client.main).eval()
    student = copy.deepcopy(client.main)
    work = method.revisit(client, run.ctx)
    stage = next(work)
    column = stage.columns["copy"].clone()

    orders = []
    original = stage.loss

    def spy(nets, batch, aux):
        orders.append((batch.x.clone(), batch.y.clone()))
        return original(nets, batch, aux)

    stage.loss = spy
    run.ctx.run(stage, client, "main/0")
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05)
    student.train()
    for x, y in orders:
        with torch.no_grad():
            target = (frozen(x) / 2).softmax(1)
        z = student(x)
        loss = F.cross_entropy(z, y) - 2.0 * (target * (z / 2).log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert len(orders) == 2 * 5
    for name, tensor in client.main.state_dict().items():
        torch.testing.assert_close(tensor, student.state_dict()[name], atol=1e-5, rtol=1e-4)
    assert torch.equal(stage.columns["copy"], column)  # the copy M'_k exists as its outputs only
    torch.testing.assert_close(column, frozen(client.train.inputs()).detach())


def test_the_copy_is_the_model_after_the_global_update():
    noted = []

    class Watched(pf.FedMDGlobal):
        name = "watched"

        def revisit(self, client, ctx):
            noted.append(logits_of(client.main, client.train))
            work = super().revisit(client, ctx)
            stage = next(work)
            assert torch.equal(stage.columns["copy"], noted[-1])
            yield stage

    run = federation(Watched(**QUICK))
    for step, number in ((PRETRAIN, 0), (LOGITS, 1), (DIGEST, 1)):
        exchange(run, step, number)
    distilled = [logits_of(party(run, c).main, party(run, c).train) for c in (0, 1, 2)]
    exchange(run, REVISIT, 1)
    assert all(torch.equal(a, b) for a, b in zip(noted, distilled, strict=True))


def test_the_larger_beta_the_less_the_local_update_moves_the_logits():
    moved = []
    for beta in (0.0, 1.0, 10.0):
        training = pf.Training(epochs=8, batch_size=8, lr=0.05)
        run = federation(quick(beta=beta), training=training)
        for step, number in ((PRETRAIN, 0), (LOGITS, 1), (DIGEST, 1)):
            exchange(run, step, number)
        before = [logits_of(party(run, c).main, party(run, c).train) for c in (0, 1, 2)]
        exchange(run, REVISIT, 1)
        now = [logits_of(party(run, c).main, party(run, c).train) for c in (0, 1, 2)]
        moved.append(sum(float((a - b).abs().mean()) for a, b in zip(before, now, strict=True)))
    assert moved[0] > 1.3 * moved[1] > 1.3 * 1.3 * moved[2] > 0


# --- the limits of the method (spec 9) ---


def test_without_global_model_and_lwof_it_is_fedmd_bit_for_bit():
    models = (BN, "mlp:1x12")
    off = after(quick(global_model=False, lwof=False), models=models, rounds=2)
    fedmd = after(pf.FedMD(**QUICK), models=models, rounds=2)
    assert same(states(off), states(fedmd))
    assert off.server.models == {} and off.history[-1]["accuracy"]["global"] is None
    assert [line["bytes_up"] for line in off.history] == [line["bytes_up"] for line in fedmd.history]


def test_the_global_model_does_not_change_the_clients():
    with_server, without = after(quick(server_model="mlp:3x8"), rounds=2), after(quick(global_model=False), rounds=2)
    assert same(states(with_server), states(without))


def test_defaults_are_those_of_the_specification():
    method = pf.FedMDGlobal()
    assert (method.subset, method.digest_epochs, method.digest_batch, method.digest_loss) == (5000, 5, 64, "l1")
    assert (method.public_epochs, method.private_epochs, method.l1_reduction) == (20, 20, "mean")
    assert (method.lwof, method.beta, method.rho, method.scale_rho2) == (True, 1.0, 2.0, False)
    assert (method.global_model, method.server_init, method.eval_outputs) == (True, "random", "all")
    assert (method.bn_recalibrate, method.digest_lr) == (False, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [("nothing", r"fedmd_global needs public data.*--public"), ("inputs", r"fedmd_global needs .* with labels")],
)
def test_what_it_needs_is_asked_for_before_anything_trains(given, words):
    clients = problem(labelled=False)
    if given == "nothing":
        x, y = clients.client(0)[0].inputs().numpy(), clients.client(0)[0].labels().numpy()
        clients = pf.Clients.from_parts([(x, y)], test=(x, y), num_classes=PRIVATE)
    with pytest.raises(pf.InputError, match=words):
        federation(quick(), clients)


@pytest.mark.parametrize("global_model", [True, False])
def test_a_copys_outputs_for_unchanged_images_are_refused_for_changed_ones(global_model):
    changed = pf.Training(epochs=1, batch_size=8, lr=0.05, augment="flip")
    with pytest.raises(pf.InputError, match=r"fedmd_global: .*'flip'.*: leave augment out, or set lwof=false\.$"):
        federation(quick(global_model=global_model), training=changed)
    for off in ({"lwof": False}, {"beta": 0.0}):
        plain = after(bare(**off), training=replace(changed, augment=None))
        assert not same(states(after(bare(**off), training=changed)), states(plain))


# --- the server's model ---


def test_the_servers_model_is_the_largest_of_the_clients_or_the_one_named():
    models = ("mlp:1x4", "mlp:2x20", "mlp:1x8")
    default = federation(quick(), models=models)
    assert count_parameters(default.server.main) == count_parameters(party(default, 1).main)
    named = federation(quick(server_model="cnn:4-8"), models=models)
    assert type(named.server.main).__name__ == "ConvNet" and named.server.main.num_classes == OUTPUTS
    same_name = federation(quick(server_model="mlp:2x20"), models=models)
    assert same([dict(same_name.server.main.state_dict())], [dict(default.server.main.state_dict())])


def test_a_server_that_cannot_build_the_clients_model_asks_for_one():
    run = federation(quick())
    run.ctx.blueprints = {name: replace(b, build=None) for name, b in run.ctx.blueprints.items()}
    with pytest.raises(pf.InputError, match=r"cannot build mlp:1x12.*server_model"):
        run.method.setup_server(run.server, run.backend.infos, run.ctx)
    with pytest.raises(pf.InputError, match=r"(?i)unknown model 'wnr'"):
        federation(quick(server_model="wnr"))


def test_server_init_public_learns_the_public_labels_before_round_one_and_costs_nothing():
    training = pf.Training(epochs=1, batch_size=8, lr=0.1)
    accuracy = {}
    for start in ("random", "public"):
        run = federation(quick(server_init=start, public_epochs=8), training=training, rounds=1)
        stages, original = [], run.ctx.run_stage
        run.ctx.run_stage = lambda stage, *rest, s=stages, o=original: s.append(stage) or o(stage, *rest)
        run._phase("before", 0, run.plan.before, evaluate=True)
        assert [stage.epochs for stage in stages] == ([8] if start == "public" else [])  # the server's own training
        public = run.server.public
        right = logits_of(run.server.main, public).argmax(1) == public.labels()
        accuracy[start] = float(right.float().mean())
        assert (run.history[0]["bytes_up"], run.history[0]["bytes_down"]) == (0, 0)
    assert accuracy["public"] > 0.95 > accuracy["random"]


# --- outputs, labels, stages (spec 2, 6) ---


def test_initial_distilled_personalised_and_global_accuracy_are_in_the_history():
    run = federation(quick(), rounds=2)
    before, *rounds = run.run()
    assert list(before["stages"]) == ["initial"]
    for line in rounds:
        assert list(line["stages"]) == ["distilled"]
        assert len(line["stages"]["distilled"]["per_client"]) == 3
        assert line["server_loss"] > 0
    assert rounds[-1]["accuracy"]["global"] == measure(run.method, run.server, run.test, run.ctx).accuracy


def test_the_distilled_stage_is_measured_between_the_two_updates():
    run = federation(quick(), rounds=1)
    line = run.run()[-1]
    again = federation(quick(), rounds=1)
    for step, number in ((PRETRAIN, 0), (LOGITS, 1), (DIGEST, 1)):
        exchange(again, step, number)
    x, y = again.test.inputs(), again.test.labels() + PUBLIC
    right = [float((party(again, c).main.eval()(x).argmax(1) == y).float().mean()) for c in (0, 1, 2)]
    assert line["stages"]["distilled"]["per_client"] == pytest.approx(right)


def test_among_private_outputs_every_model_is_at_least_as_good_as_among_all():
    everything = federation(quick(private_epochs=0), rounds=1)
    lines = everything.run()
    private = federation(quick(private_epochs=0, eval_outputs="private"), rounds=1)
    others = private.run()
    assert same(states(everything), states(private))
    gained = 0.0
    for line, other in zip(lines, others, strict=True):
        for low, high in zip(line["accuracy"]["per_client"], other["accuracy"]["per_client"], strict=True):
            assert high >= low
            gained += high - low
        assert other["accuracy"]["global"] >= line["accuracy"]["global"]
        assert line["accuracy"]["private"] == pytest.approx(other["accuracy"]["mean"])
        assert line["accuracy"]["global_private"] == pytest.approx(other["accuracy"]["global"])
        assert "private" not in other["accuracy"]
    assert gained > 0  # before private training, public classes are often the answer


# --- the wire (spec 3) ---


def test_bytes_are_those_of_the_specification():
    before, *rounds = federation(quick(), models=(BN, "mlp:1x12"), rounds=2).run()
    assert (before["bytes_up"], before["bytes_down"]) == (0, 0)
    for line in rounds:
        assert line["bytes_up"] == 3 * 4 * 12 * OUTPUTS
        assert line["bytes_down"] == 3 * (8 + 4 * 12 * OUTPUTS)


def test_at_the_papers_size_a_client_sends_600_kilobytes():
    message = Message(data={"logits": torch.zeros(pf.FedMDGlobal().subset, pf.FedMDGlobal().outputs(10, 20))})
    assert message.nbytes() == 600_000


def test_only_logits_on_public_samples_leave_a_client():
    """A client of the same model with other private data would say the same in its first message."""
    replies = {}

    class Watched(pf.FedMDGlobal):
        name = "watched"

        def fuse(self, server, received, step, ctx):
            replies.update(received)
            super().fuse(server, received, step, ctx)

    exchange(federation(Watched(**BARE)), LOGITS)
    for reply in replies.values():
        assert (list(reply.data), reply.params, reply.meta) == (["logits"], {}, {})
        assert reply.data["logits"].shape == (12, PRIVATE)
        assert torch.equal(reply.data["logits"], replies[0].data["logits"])


# --- edge cases (spec 10) ---


@pytest.mark.parametrize("models", [MLP, (BN,), ("wrn-10-1",)])
def test_a_client_with_one_sample_and_one_that_lacks_a_class_take_part(models):
    run = federation(quick(), problem(sizes=(1, 9, 17), lacking=1), models=models, rounds=2)
    lines = run.run()
    assert all(0 <= line["loss"] < 100 for line in lines)
    assert all(torch.isfinite(tensor).all() for state in states(run) for tensor in state.values())


def test_part_of_the_clients_take_part():
    run = federation(quick(), rounds=4, participation=0.67)
    for line in run.run()[1:]:
        assert len(line["participants"]) == 2
        assert line["bytes_up"] == 2 * 4 * 12 * OUTPUTS


def test_an_own_module_through_adapt():
    class Own(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(0.2))
            self.fc = nn.Linear(10, num_classes)

        def forward(self, x):
            return self.fc(self.body(x))

    def own(num_classes):
        return pf.adapt(Own(num_classes), head="fc", input_shape=(1, 8, 8))

    training = pf.Training(epochs=2, batch_size=8, lr=0.05)
    result = pf.run(quick(), problem(), [own, "mlp:1x12"], rounds=2, training=training)
    again = pf.run(quick(), problem(), [own, "mlp:1x12"], rounds=2, training=training)
    assert result.models[0].num_classes == OUTPUTS
    assert result.accuracy() == again.accuracy()
    with pytest.raises(pf.InputError, match="5 outputs"):
        pf.run(quick(), problem(), [pf.adapt(Own(3), head="fc")], rounds=1, training=training)


def test_recalibrated_statistics_are_those_of_the_public_subset():
    run = federation(quick(bn_recalibrate=True, digest_batch=12), models=(BN,))
    run.run()
    client = party(run, 0)
    with torch.no_grad():
        maps = client.main.stem.conv(run.method.public_subset(client).inputs())
    torch.testing.assert_close(client.main.stem.norm.running_mean, maps.mean((0, 2, 3)), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(client.main.stem.norm.running_var, maps.var((0, 2, 3)), atol=1e-5, rtol=1e-4)
    plain = federation(quick(digest_batch=12), models=(BN,))
    plain.run()
    for name, parameter in party(plain, 0).main.named_parameters():
        assert torch.equal(parameter, dict(client.main.named_parameters())[name])
    assert not torch.allclose(party(plain, 0).main.stem.norm.running_mean, client.main.stem.norm.running_mean)


def test_collecting_statistics_draws_no_random_numbers_and_survives_a_lone_sample():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 4), nn.BatchNorm1d(4, momentum=0.3))
    data = problem().public
    state = torch.get_rng_state()
    assert collect_statistics(model, data, 13) == 3  # 40 = 13 + 13 + 13 + a lone one
    assert torch.equal(torch.get_rng_state(), state)
    assert model[3].momentum == 0.3 and all(module.training for module in model.modules())
    assert collect_statistics(model, data.select(torch.tensor([5])), 13) == 1
    assert torch.isfinite(model[3].running_var).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": -1.0}, "beta must not be negative, got -1.0"),
        ({"rho": 0.0}, "rho must be above 0, got 0.0"),
        ({"l1_reduction": "sum"}, "l1_reduction is 'mean' or 'sum_outputs', not 'sum'"),
        ({"l1_reduction": "sum_outputs", "digest_loss": "l2"}, "needs digest_loss='l1', not 'l2'"),
        ({"server_init": "zero"}, "server_init is 'random' or 'public', not 'zero'"),
        ({"eval_outputs": "some"}, "eval_outputs is 'all' or 'private', not 'some'"),
        ({"server_init": "public", "public_epochs": 0}, "server_init='public' needs public_epochs"),
        ({"subset": 0}, "fedmd_global: subset must be at least 1"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, words):
    with pytest.raises(pf.InputError, match=words):
        pf.FedMDGlobal(**options).check()


# --- FedAvg, the paper's baseline (spec 7) ---

FULL = pf.Training(epochs=3, batch_size=100, lr=0.1)  # full batches: the order of samples does not matter


def one_client_thrice():
    x, y = problem(sizes=(20,)).client(0)[0].inputs().numpy(), problem(sizes=(20,)).client(0)[0].labels().numpy()
    return pf.Clients.from_parts([(x, y)] * 3, test=(x, y), num_classes=PRIVATE, normalize=False)


def test_fedavg_with_all_of_identical_clients_is_a_fixed_point_of_averaging():
    three, alone = federation(pf.FedAvg(), one_client_thrice(), training=FULL), None
    three.run()
    alone = federation(pf.Local(), one_client_thrice(), training=FULL)
    alone.run()
    for name, tensor in three.server.state.items():
        torch.testing.assert_close(tensor, states(alone)[0][name], atol=1e-6, rtol=1e-5)
    before = {name: tensor.clone() for name, tensor in three.server.state.items()}
    replies = {c: Message(params={"main": dict(before)}, meta={"samples": 20}) for c in (0, 1, 2)}
    three.method.fuse(three.server, replies, three.plan.round[0], three.ctx)
    for name, tensor in three.server.state.items():
        torch.testing.assert_close(tensor, before[name], atol=1e-7, rtol=1e-6)


def test_pretraining_is_local_training_from_the_common_start_and_a_weighted_average():
    pretrained = federation(pf.FedAvg(pretrain_epochs=3), training=replace(FULL, epochs=1))
    pretrained._phase("before", 0, pretrained.plan.before, evaluate=True)
    alone = federation(pf.Local(), training=FULL)
    alone.run()
    sizes, each = (18, 24, 30), states(alone)
    for name, tensor in pretrained.server.state.items():
        expected = sum(n * state[name] for n, state in zip(sizes, each, strict=True)) / sum(sizes)
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=1e-5)
    line = pretrained.history[0]
    assert line["phase"] == "before" and line["bytes_up"] > 0 and line["bytes_down"] > 0


def test_no_pretraining_is_plain_fedavg():
    assert pf.FedAvg().plan() == pf.Plan() == pf.FedAvg(pretrain_epochs=0).plan()
    assert [step.name for step in pf.FedAvg(pretrain_epochs=1).plan().before] == ["pretrain"]
    with pytest.raises(pf.InputError, match="pretrain_epochs must not be negative"):
        pf.FedAvg(pretrain_epochs=-1).check()


@pytest.mark.parametrize("method", [pf.FedAvg, pf.FedProx, pf.HeteroFL])
def test_everybody_pretrains_even_where_few_take_part(method):
    run = federation(method(pretrain_epochs=2), participation=0.4, models=(BN,), rounds=1)
    before, first = run.run()
    assert before["phase"] == "before" and before["loss"] > 0
    assert len(first["participants"]) == 1
    assert run.meter.kinds["pretrain/up/params/main"] == 3 * run.meter.kinds["main/up/params/main"]
