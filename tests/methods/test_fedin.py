"""FedIN: the acceptance list of its specification, item by item."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.build import make_blueprint
from polyfed.core.checkpoint import pack_tree
from polyfed.core.errors import InputError, MessageError
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Step
from polyfed.core.needs import check_needs
from polyfed.core.nets import EVAL, FunctionalNet, Net, mode
from polyfed.core.party import ClientInfo, Context, Party, PartyData, state_of
from polyfed.core.runner import run_stage
from polyfed.core.samples import Samples
from polyfed.core.stage import Batch
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fedin import FedIN
from polyfed.methods.fedprox import FedProx
from polyfed.models import build, count_parameters
from polyfed.models.contract import cut_shapes, parameter_parts
from polyfed.ops.noise import noisy

SHAPE = (1, 8, 8)
CLASSES = 3
DEPTHS = ("resnet:1-1,w4", "resnet:1-2,w4")
BLUEPRINTS = {DEPTHS[0]: make_blueprint(DEPTHS[0], DEPTHS[0], SHAPE, CLASSES, 0, None, "linear")}
RULES = {
    "simple": {},
    "simple, unit": {"outer_scale": "unit"},
    "simple, lam": {"lam": 0.6},
    "none": {"combine": "none"},
    "analytic": {"combine": "analytic"},
    "analytic, global": {"combine": "analytic", "alleviation_scope": "global"},
    "analytic, add": {"combine": "analytic", "analytic_add_local": True, "lam": 0.6},
}


def images(sizes=(14, 9, 11), seed=0, classes=CLASSES):
    """Noisy class patterns; client 0 lacks the last class."""
    rng = np.random.default_rng(seed)
    patterns = rng.normal(size=(classes, *SHAPE)).astype(np.float32)

    def draw(n, labels=classes):
        y = rng.integers(0, labels, n)
        return (patterns[y] + 0.5 * rng.normal(size=(n, *SHAPE))).astype(np.float32), y

    parts = [draw(n, classes if k else classes - 1) for k, n in enumerate(sizes)]
    return pf.Clients.from_parts(parts, test=draw(30), num_classes=classes, name="patterns")


def run(method, clients=None, models=DEPTHS, rounds=2, lr=0.05, epochs=1, **more):
    training = pf.Training(epochs=epochs, batch_size=4, lr=lr)
    return pf.run(method, clients or images(), models, rounds=rounds, training=training, **more)


def watched(**options):
    """A FedIN that keeps every message: `.down` and `.up` are lists of (round, client, message)."""

    class Watched(FedIN):
        name = "watched"
        down: ClassVar[list] = []
        up: ClassVar[list] = []
        pools: ClassVar[list] = []

        def send(self, server, info, step, ctx):
            message = super().send(server, info, step, ctx)
            if step.name != EVALUATE.name:
                self.down.append((ctx.round, info.id, message.detached()))
            return message

        def fuse(self, server, replies, step, ctx):
            self.up.extend((ctx.round, client, reply.detached()) for client, reply in replies.items())
            super().fuse(server, replies, step, ctx)
            self.pools.append(server.memory.get("pool"))

    return Watched(**options)


def states(result):
    return {client: result.models[client].state_dict() for client in result.models}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for client in first:
        for name in first[client]:
            assert torch.equal(first[client][name], second[client][name]), (client, name)


# --- one client and its stage, by hand ---


def party(model="resnet:1-1,w4", samples=6, pairs=5, seed=0, dtype=torch.float64):
    """A client in round 2 that has received weights (a little off its own) and pairs, in double precision."""
    rng = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = build(model, SHAPE, CLASSES).to(dtype)
    data = Samples(
        torch.randn(samples, *SHAPE, generator=rng).to(dtype), torch.randint(0, CLASSES, (samples,), generator=rng)
    )
    client = Party(0, ClientInfo(0, samples, model), PartyData(train=data))
    client.models["main"] = module
    s_in, s_out = cut_shapes(module, SHAPE).values()
    received = {n: t + 0.1 * torch.randn(t.shape, generator=rng) for n, t in state_of(module, buffers=False).items()}
    data = {"s_in": torch.rand(pairs, *s_in, generator=rng), "s_out": torch.rand(pairs, *s_out, generator=rng)}
    client.inbox = Message({"main": received}, {name: t.to(dtype) for name, t in data.items()} if pairs else {})
    return client


def context(round=2, **training):
    training = {"epochs": 1, "batch_size": 64, "lr": 0.1, **training}
    return Context(0, round, 2, pf.Training(**training), CLASSES, SHAPE, 2, blueprints=dict(BLUEPRINTS))


def whole_batch(client):
    return Batch(client.train.inputs(), client.train.labels())


def gradient(loss, module):
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True))


def both_gradients(client, mu):
    """G_local and G_IN of the client's first step, without the library's losses."""
    module = copy.deepcopy(client.main).train()
    x, y = client.train.inputs(), client.train.labels()
    anchor = client.inbox.params["main"]
    prox = sum((p - anchor[name]).pow(2).sum() for name, p in module.named_parameters())
    local = gradient(F.cross_entropy(module(x), y) + mu / 2 * prox, module)
    if len(client.inbox.data["s_in"]) == 1:
        module.eval()  # a single pair has no batch statistics
    feature = gradient((module.middle(client.inbox.data["s_in"]) - client.inbox.data["s_out"]).pow(2).mean(), module)
    return local, feature


def expected_step(method, local, feature, parts):
    """The combined gradient, written down from the specification (section 5)."""
    middle = [name for name, part in parts.items() if part == "middle"]
    a = {name: float((local[name] ** 2).sum()) for name in middle}
    b = {name: float((local[name] * feature[name]).sum()) for name in middle}
    if method.alleviation_scope == "global":
        a, b = dict.fromkeys(middle, sum(a.values())), dict.fromkeys(middle, sum(b.values()))
    step = {}
    for name in local:
        if name not in middle:
            halved = method.combine == "simple" and method.outer_scale == "same"
            step[name] = local[name] * (method.lam / 2 if halved else 1)
        elif method.combine == "simple":
            step[name] = feature[name] + method.lam / 2 * local[name]
        elif method.combine == "none":
            step[name] = feature[name] + local[name]
        else:
            step[name] = feature[name] if b[name] >= 0 else feature[name] - b[name] / a[name] * local[name]
            if method.analytic_add_local:
                step[name] = step[name] + method.lam / 2 * local[name]
    return step, b


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pairs", [5, 1])
def test_a_step_follows_the_rule(rule, pairs):
    method = FedIN(**RULES[rule])
    client, ctx = party(pairs=pairs, seed=5), context(lr=0.1)
    before = {name: p.detach().clone() for name, p in client.main.named_parameters()}
    step, b = expected_step(method, *both_gradients(client, method.mu), parameter_parts(client.main, SHAPE))
    assert min(b.values()) < 0  # there is a conflict to resolve
    assert len(set(b.values())) == 1 or max(b.values()) > 0  # and, tensor by tensor, an agreement
    run_stage(method.stage(client, ctx), client, ctx, "main/0")
    for name, p in client.main.named_parameters():
        assert torch.allclose((before[name] - p) / 0.1, step[name], atol=1e-10), name


@pytest.mark.parametrize("lam", [1.0, 0.3])
def test_one_backward_pass_is_the_simple_rule(lam):
    method, client = FedIN(lam=lam), party()
    nets, batch = {"main": Net(client.main)}, whole_batch(client)
    aux = {"anchor": client.inbox.params["main"], **client.inbox.data}
    once = gradient(method.joint_loss(nets, batch, aux), client.main)
    local = gradient(method.loss(nets, batch, aux), client.main)
    feature = gradient(method.feature_loss(nets, batch, aux), client.main)
    middle = {name: torch.ones(()) for name in method.middle_names(client, context())}
    assert len(middle) > 5
    combined = method.alleviate(({"main": local}, {"main": feature}), {"middle": middle})["main"]
    for name in once:
        assert torch.allclose(once[name], feature[name] + lam / 2 * local[name], atol=1e-12), name
        assert torch.allclose(once[name], combined[name], atol=1e-12), name


def test_the_feature_loss_leaves_stem_and_head_alone():
    client = party()
    loss = FedIN().feature_loss({"main": Net(client.main)}, whole_batch(client), client.inbox.data)
    found = gradient(loss, client.main)
    parts = parameter_parts(client.main, SHAPE)
    assert set(parts.values()) == {"stem", "middle", "head"}
    for name, g in found.items():
        assert (float(g.abs().sum()) > 0) == (parts[name] == "middle"), name


def test_own_pairs_with_unchanged_weights_teach_nothing():
    method, ctx = FedIN(feature_batch=4), context()
    client = party("mlp:3x6")
    pairs = method.features(client, ctx)
    loss = method.feature_loss({"main": Net(client.main)}, whole_batch(client), pairs)
    assert loss.item() == 0.0
    assert all(float(g.abs().sum()) == 0 for g in gradient(loss, client.main).values())
    # With BatchNorm the same holds in prediction mode, in which the pairs were made.
    client = party()
    pairs = method.features(client, ctx)
    with mode(client.main, EVAL):
        assert torch.equal(client.main.middle(pairs["s_in"]), pairs["s_out"])


def test_the_proximal_term_is_zero_at_the_start_and_pulls_back():
    client = party()
    nets, batch = {"main": Net(client.main)}, whole_batch(client)
    start = {name: p.detach().clone() for name, p in client.main.named_parameters()}
    plain = gradient(FedIN(mu=0).loss(nets, batch, {"anchor": start}), client.main)
    assert torch.equal(FedIN(mu=0.4).loss(nets, batch, {"anchor": start}), FedIN(mu=0).loss(nets, batch, {}))
    away = {name: p + 0.5 for name, p in start.items()}
    pulled = gradient(FedIN(mu=0.4).loss(nets, batch, {"anchor": away}), client.main)
    for name in start:
        assert torch.allclose(pulled[name] - plain[name], torch.full_like(start[name], 0.4 * -0.5), atol=1e-12), name
    assert FedIN().mu / 2 == 0.05


def test_other_clients_features_do_not_enter_batch_statistics():
    plain, with_pairs = party(pairs=0), party()
    with_pairs.inbox.params = plain.inbox.params
    for client in (plain, with_pairs):
        run_stage(FedIN().stage(client, context()), client, context(), "main/0")
    for name, buffer in plain.main.named_buffers():
        assert torch.equal(buffer, with_pairs.main.get_buffer(name)), name
    assert not torch.equal(plain.main.head.weight, with_pairs.main.head.weight)


@pytest.mark.parametrize("rule", ["simple", "analytic"])
def test_a_single_pair_and_a_single_sample_with_batch_norm(rule):
    for samples, pairs in ((6, 1), (1, 5), (1, 1)):
        client = party("resnet10:w4", samples, pairs)  # its last map has one pixel
        statistics = {name: buffer.clone() for name, buffer in client.main.named_buffers()}
        run_stage(FedIN(**RULES[rule]).stage(client, context()), client, context(), "main/0")
        if samples == 1:
            assert all(torch.equal(b, statistics[n]) for n, b in client.main.named_buffers())


@pytest.mark.parametrize("rule", ["simple", "analytic", "analytic, global"])
def test_two_clients_in_one_program(rule):
    method = FedIN(noise=0.5, **RULES[rule])
    clients = [party(seed=seed) for seed in (1, 2)]
    stages = [method.stage(client, context()) for client in clients]
    assert stages[0].all_updates()[0].losses == stages[1].all_updates()[0].losses  # engines compare these
    losses = stages[0].all_updates()[0].losses
    batches = []
    for seed, (client, stage) in enumerate(zip(clients, stages, strict=True)):
        rng = torch.Generator().manual_seed(seed)
        batches.append(whole_batch(client))
        batches[-1].columns = {name: draw.sample(6, rng).double() for name, draw in stage.draws.items()}

    def step(params, buffers, x, y, columns, aux):
        def value(params, buffers, number):
            nets = {"main": FunctionalNet(clients[0].main, params, buffers)}
            return losses[number](nets, Batch(x, y, columns), aux)

        gradients = tuple({"main": torch.func.grad(value)(params, buffers, number)} for number in range(len(losses)))
        return gradients[0]["main"] if len(losses) == 1 else method.alleviate(gradients, aux)["main"]

    def stacked(trees):
        first = trees[0]
        if isinstance(first, dict):
            return {key: stacked([tree[key] for tree in trees]) for key in first}
        return torch.stack([tree.detach() for tree in trees])

    inputs = [
        (dict(c.main.named_parameters()), dict(c.main.named_buffers()), b.x, b.y, b.columns, s.aux)
        for c, b, s in zip(clients, batches, stages, strict=True)
    ]
    together = torch.func.vmap(step)(*(stacked([own[i] for own in inputs]) for i in range(6)))
    for number, (client, batch, stage) in enumerate(zip(clients, batches, stages, strict=True)):
        nets = {"main": Net(client.main)}
        alone = tuple({"main": gradient(loss(nets, batch, stage.aux), client.main)} for loss in losses)
        alone = alone[0]["main"] if len(losses) == 1 else method.alleviate(alone, stage.aux)["main"]
        for name in alone:
            assert torch.allclose(together[name][number], alone[name], atol=1e-12), name


def test_the_middle_of_one_layer_networks_has_nothing_to_learn():
    client, method = party("mlp:1x6"), FedIN(combine="analytic")
    stage = method.stage(client, context())
    assert stage.gradients is None and stage.loss == method.loss


# --- noise ---


def test_noise_has_the_promised_size():
    rng = torch.Generator().manual_seed(0)
    s = 3 * torch.rand(20, 5, 12, 12, generator=rng) ** 2
    added = noisy(s, 0.8, torch.randn(s.shape, generator=rng)) - s
    assert float(added.std()) == pytest.approx(0.8 * float(s.std()), rel=0.05)
    s[:, 0] *= 10
    added = noisy(s, 0.8, torch.randn(s.shape, generator=rng), "channel") - s
    for channel in range(5):
        assert float(added[:, channel].std()) == pytest.approx(0.8 * float(s[:, channel].std()), rel=0.05)
    # One value has no spread: a single row takes that of the whole tensor, and does not leave without noise.
    row, unit = torch.arange(4.0)[None], torch.randn(1, 4, generator=rng)
    assert torch.equal(noisy(row, 0.8, unit, "channel"), noisy(row, 0.8, unit))
    assert not torch.isclose(noisy(row, 0.8, unit, "channel"), row).any()


def test_no_gradient_flows_through_the_size_of_the_noise():
    s = torch.randn(4, 5, requires_grad=True)
    (g,) = torch.autograd.grad(noisy(s, 2.0, torch.randn(4, 5)).sum(), s)
    assert torch.equal(g, torch.ones(4, 5))


def test_features_leave_with_noise_at_both_cuts():
    client, ctx = party("resnet:1-1,w32", samples=60, dtype=torch.float32), context()
    clean = FedIN(feature_batch=60).features(client, ctx)
    sent = FedIN(feature_batch=60, noise=0.8).features(client, ctx)
    assert clean["s_in"].numel() >= 10_000 and clean["s_out"].numel() >= 3_000
    assert float((sent["s_in"] - clean["s_in"]).std()) == pytest.approx(0.8 * float(clean["s_in"].std()), rel=0.05)
    with torch.no_grad(), mode(client.main, EVAL):
        from_noisy = client.main.middle(sent["s_in"])  # s_out is made from the noisy s_in, then gets its own noise
    assert float((sent["s_out"] - from_noisy).std()) == pytest.approx(0.8 * float(from_noisy.std()), rel=0.05)


def test_every_client_and_round_has_its_own_noise_and_its_own_batch():
    client = party("mlp:2x6", samples=20)
    for method in (FedIN(feature_batch=4), FedIN(feature_batch=20, noise=0.5)):
        seen = []
        for client.id, number in ((0, 1), (0, 2), (1, 1)):
            ctx = context(round=number)
            sent = method.features(client, ctx)["s_in"]
            if method.noise:  # what is left without the clean features of the same rows
                sent = (sent - replace(method, noise=0.0).features(client, ctx)["s_in"]).flatten()
            seen.append(sent)
        assert not any(torch.allclose(seen[a], seen[b], atol=1e-3) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_local_training_feels_the_noise_and_received_pairs_get_none():
    method, client = FedIN(noise=0.8, mu=0.2), party()
    stage = method.stage(client, context())
    s_in, s_out = cut_shapes(client.main, SHAPE).values()
    assert stage.draws["noise_in"].shape == (None, *s_in) and stage.draws["noise_out"].shape == (None, *s_out)
    batch = whole_batch(client)
    batch.columns = {"noise_in": torch.randn(6, *s_in).double(), "noise_out": torch.randn(6, *s_out).double()}
    nets = {"main": Net(client.main).eval()}
    with torch.no_grad(), mode(client.main, EVAL):
        s = client.main.stem(batch.x)
        s = s + 0.8 * s.std(correction=0) * batch["noise_in"]
        z = client.main.middle(s)
        z = z + 0.8 * z.std(correction=0) * batch["noise_out"]
        prox = sum((p - client.inbox.params["main"][n]).pow(2).sum() for n, p in client.main.named_parameters())
        by_hand = F.cross_entropy(client.main.head(z), batch.y) + 0.2 / 2 * prox
    assert method.loss(nets, batch, stage.aux).item() == pytest.approx(float(by_hand), rel=1e-12)
    assert torch.equal(
        method.feature_loss(nets, batch, stage.aux), FedIN().feature_loss(nets, whole_batch(client), stage.aux)
    )


def test_predictions_are_free_of_noise():
    client, x = party(), torch.randn(4, *SHAPE).double()
    with torch.no_grad(), mode(client.main, EVAL):
        clean = client.main(x)
        assert torch.equal(FedIN(noise=5.0).predict(client, x, context()), clean)


# --- what travels ---


def test_bytes_are_those_of_the_specification():
    method = watched(feature_batch=4)
    result = run(method, images((14, 3, 11)), rounds=2)
    width = 4 * 8 * 8 + 8  # s_in 4x8x8 and s_out 8
    sent = {client: 4 * count_parameters(result.models[client]) for client in range(3)}
    assert {(r, c): m.nbytes() for r, c, m in method.down} == {
        (1, 0): sent[0], (1, 1): sent[1], (1, 2): sent[2],  # round 1 has no pairs
        (2, 0): sent[0] + 4 * 4 * width, (2, 1): sent[1] + 4 * 4 * width, (2, 2): sent[2] + 4 * 4 * width,
    }  # fmt: skip
    assert {(r, c): m.nbytes() for r, c, m in method.up} == {
        (r, c): sent[c] + 4 * min(4, n) * width + 8 for r in (1, 2) for c, n in enumerate((14, 3, 11))
    }
    assert result.history[1]["bytes_up"] == sum(m.nbytes() for r, _, m in method.up if r == 2)
    assert result.history[1]["bytes_down"] == sum(m.nbytes() for r, _, m in method.down if r == 2)


def test_neither_images_nor_labels_nor_statistics_travel():
    clients = images()
    method = watched(feature_batch=4)
    run(method, clients)
    for _, client, reply in method.up:
        assert set(reply.data) == {"s_in", "s_out"} and set(reply.meta) == {"samples"}
        assert not any("running" in name or "tracked" in name for name in reply.params["main"])
        assert all(t.is_floating_point() for _, t in reply.tensors())
        own = clients.client(client)[0].inputs().flatten(1)
        flat = reply.data["s_in"].view(-1, 64)
        assert float(torch.cdist(flat, own).min()) > 0.1  # no channel of s_in is an image
    for _, _, message in method.down:
        assert set(message.data) <= {"s_in", "s_out"} and not message.meta


def test_the_paper_s_parameter_counts():
    with torch.device("meta"):
        zoo = [build(f"resnet{depth}:stem=fedin", (3, 32, 32), 10) for depth in (10, 14, 18, 22, 26)]
        s_in, s_out = cut_shapes(zoo[0], (3, 32, 32)).values()
    mean = sum(count_parameters(model) for model in zoo) / 5
    features = FedIN().feature_batch * (math.prod(s_in) + math.prod(s_out))
    assert (s_in, s_out) == ((64, 8, 8), (512,))
    assert (round(mean / 1e6, 2), round((mean + features) / 1e6, 2)) == (12.28, 12.35)


def test_measuring_asks_for_no_pairs_and_changes_nothing():
    ctx, server = context(), Party(-1, None, PartyData())
    blueprints, infos = hand_made()
    ctx.blueprints, ctx.infos = blueprints, infos
    method = FedIN()
    method.setup_server(server, infos, ctx)
    server.memory["pool"] = {"s_in": torch.ones(2, 1), "s_out": torch.ones(2, 1), "sender": torch.tensor([1, 1])}
    before = pack_tree(server.memory)
    assert method.send(server, infos[0], EVALUATE, ctx).data == {}
    assert set(method.send(server, infos[0], Step(), ctx).data) == {"s_in", "s_out"}
    assert method.send(server, infos[1], Step(), ctx).data == {}  # the pool without its own pairs is empty
    assert pack_tree(server.memory) == before


# --- pairs ---

SENDER = torch.tensor([0] * 4 + [1] * 4 + [2] * 4)


@pytest.mark.parametrize("client", range(4))
def test_pairs_come_from_others_and_only_once(client):
    rows = FedIN(feature_batch=6).sample_pairs(SENDER, client, context())
    assert len(rows) == len(set(rows.tolist())) == 6
    assert client not in SENDER[rows].tolist()
    everything = FedIN(feature_batch=16).sample_pairs(SENDER, client, context())
    assert sorted(everything.tolist()) == [row for row in range(12) if SENDER[row] != client]
    assert len(FedIN(feature_batch=6, feature_samples=3).sample_pairs(SENDER, client, context())) == 3


def test_every_pair_of_others_is_equally_likely():
    counts = torch.zeros(12)
    for seed in range(600):
        counts[FedIN(feature_batch=2).sample_pairs(SENDER, 1, replace(context(), seed=seed))] += 1
    assert counts[4:8].sum() == 0
    assert all(110 < count < 190 for count in counts[SENDER != 1].tolist())  # 150 expected


def test_other_ways_to_draw_pairs():
    one = FedIN(feature_batch=3, pairs="one_client")
    seen = set()
    for seed in range(20):
        senders = SENDER[one.sample_pairs(SENDER, 0, replace(context(), seed=seed))].tolist()
        assert len(senders) == 3 and len(set(senders)) == 1
        seen.update(senders)
    assert seen == {1, 2}
    common = FedIN(feature_batch=9, pairs="common")
    draws = [common.sample_pairs(SENDER, client, context()).tolist() for client in range(3)]
    assert draws[0] == draws[1] == draws[2] and set(SENDER[draws[0]].tolist()) == {0, 1, 2}
    assert len(common.sample_pairs(torch.zeros(4), 0, context())) == 0  # nothing but its own: as if there were no pool
    pooled = FedIN(feature_batch=4)
    assert pooled.sample_pairs(SENDER, 0, context()).tolist() != pooled.sample_pairs(SENDER, 3, context()).tolist()


def test_rows_of_a_pair_stay_together():
    method = watched(feature_batch=4)
    run(method, rounds=2)
    up = {client: reply.data for r, client, reply in method.up if r == 1}
    known = {
        tuple(s_in.flatten().tolist()): s_out.tolist()
        for data in up.values()
        for s_in, s_out in zip(data["s_in"], data["s_out"], strict=True)
    }
    for r, client, message in method.down:
        if r == 2:
            for s_in, s_out in zip(message.data["s_in"], message.data["s_out"], strict=True):
                assert known[tuple(s_in.flatten().tolist())] == s_out.tolist()
                assert not any(torch.equal(s_in, own) for own in up[client]["s_in"])


def test_clients_of_one_architecture_learn_from_each_other_s_pairs_too():
    method = watched(feature_batch=4)
    taught = run(method, models=DEPTHS[:1], rounds=2)
    assert {(r, c): len(m.data.get("s_in", ())) for r, c, m in method.down} == {
        (r, c): 4 * (r - 1) for r in (1, 2) for c in range(3)
    }
    with pytest.raises(AssertionError):
        assert_same(states(taught), states(run(FedIN(use_in=False), models=DEPTHS[:1], rounds=2)))


def test_with_pretraining_the_first_round_has_pairs():
    method = watched(feature_batch=4, pretrain_epochs=1)
    run(method, rounds=1)
    assert {(r, len(m.data.get("s_in", ()))) for r, _, m in method.down} == {(0, 0), (1, 4)}


def test_partial_participation_keeps_only_the_last_round_s_pairs():
    method = watched(feature_batch=4)
    result = run(method, images((9, 9, 9, 9)), rounds=4, participation=0.5)
    chosen = [line["participants"] for line in result.history]
    assert len({tuple(c) for c in chosen}) > 1 and all(len(c) == 2 for c in chosen)
    for number, pool in enumerate(method.pools):
        assert sorted(set(pool["sender"].tolist())) == chosen[number] and len(pool["sender"]) == 8
    for r, client, message in method.down:
        others = [c for c in chosen[r - 2] if c != client] if r > 1 else []
        assert len(message.data.get("s_in", ())) == min(4, 4 * len(others))
    pack_tree(method.pools[-1])  # can be checkpointed


@pytest.mark.parametrize("pairs", ["pool", "common", "one_client"])
def test_a_lone_participant_trains_as_in_fedprox(pairs):
    clients = images((12,))
    assert_same(
        states(run(FedIN(pairs=pairs), clients, DEPTHS[:1], rounds=3)),
        states(run(FedProx(buffers="local"), clients, DEPTHS[:1], rounds=3)),
    )


# --- limit cases ---


@pytest.mark.parametrize("models", [DEPTHS, ("mlp:2x8", "mlp:3x8"), ("cnn:4-8,bn",)], ids=["resnet", "mlp", "one"])
@pytest.mark.parametrize("view", ["auto", "same_arch"])
def test_switched_off_it_is_fedavg(models, view):
    off = run(FedIN(mu=0.0, use_in=False, view=view, noise=0.8), models=models)
    base = run(FedAvg(view=view, buffers="local"), models=models)
    assert_same(states(off), states(base))
    assert [line["accuracy"] for line in off.history] == [line["accuracy"] for line in base.history]
    assert off.cost.bytes == base.cost.bytes


def test_without_features_and_in_the_first_round_it_is_fedprox():
    base = FedProx(mu=0.3, buffers="local")
    assert_same(states(run(FedIN(mu=0.3, use_in=False))), states(run(base)))
    assert_same(states(run(FedIN(mu=0.3), rounds=1)), states(run(base, rounds=1)))
    with pytest.raises(AssertionError):
        assert_same(states(run(FedIN(mu=0.3))), states(run(base)))


def test_defaults_are_those_of_the_specification():
    method = FedIN()
    assert (method.mu, method.lam, method.noise) == (0.1, 1.0, 0.0)
    assert (method.feature_batch, method.feature_samples) == (16, None)
    assert (method.combine, method.alleviation_scope, method.outer_scale) == ("simple", "tensor", "same")
    assert (method.weighting, method.buffers, method.prox_anchor) == ("samples", "local", "received")
    assert (method.sigma, method.pairs, method.use_in, method.analytic_add_local) == ("tensor", "pool", True, False)


@pytest.mark.long
def test_every_switch_changes_the_run():
    options = [
        {}, {"mu": 0.0}, {"combine": "none"}, {"combine": "analytic"}, {"lam": 0.5}, {"outer_scale": "unit"},
        {"combine": "analytic", "alleviation_scope": "global"}, {"combine": "analytic", "analytic_add_local": True},
        {"noise": 0.8}, {"noise": 0.8, "sigma": "channel"}, {"feature_batch": 3}, {"feature_samples": 2},
        {"pairs": "one_client"}, {"pairs": "common"}, {"prox_anchor": "own"}, {"view": "same_arch"},
        {"weighting": "uniform"}, {"buffers": "average"},
    ]  # fmt: skip
    ends = set()
    for option in options:
        result = run(FedIN(**{"feature_batch": 4, **option}), images((8, 4, 6)), ("cnn:2-4-4,bn", "cnn:2-4-4,bn@1"))
        ends.add(float(sum(t.double().sum() for t in states(result)[1].values())))
    assert len(ends) == len(options)


def test_the_own_anchor_is_the_end_of_the_client_s_last_round():
    method, ctx = FedIN(prox_anchor="own", use_in=False), context(round=1)
    client = party(pairs=0)
    received = client.inbox.params["main"]
    assert all(torch.equal(t, received[name]) for name, t in method.anchor(client).items())
    work = method.local(client, Step(), ctx)
    run_stage(next(work), client, ctx, "main/0")
    with pytest.raises(StopIteration):
        work.send(0.0)
    ended = {name: p.detach().clone() for name, p in client.main.named_parameters()}
    with torch.no_grad():
        for p in client.main.parameters():
            p.zero_()
    client.inbox = Message({"main": {name: torch.ones_like(t) for name, t in received.items()}})
    assert all(torch.equal(t, ended[name]) for name, t in method.anchor(client).items())
    assert all(torch.equal(t, torch.ones_like(t)) for t in FedIN().anchor(client).values())


# --- aggregation ---


class Tower(nn.Module):
    """A hand-made network of scalars: stem, `depth` blocks, head."""

    family = "tower"
    feature_dim = num_classes = 1

    def __init__(self, depth):
        super().__init__()
        self.stem = nn.Linear(1, 1, bias=False)
        self.blocks = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(depth)])
        self.head = nn.Linear(1, 1, bias=False)

    def middle(self, s):
        return self.blocks(s)

    def features(self, x):
        return self.middle(self.stem(x))

    def forward(self, x):
        return self.head(self.features(x))


def hand_made():
    blueprints = {n: make_blueprint(Tower(d), n, (1,), 1, 0, None, "linear") for n, d in (("one", 1), ("two", 2))}
    infos = {0: ClientInfo(0, 1, "one"), 1: ClientInfo(1, 3, "two")}
    for name, blueprint in blueprints.items():  # inputs are single numbers here
        blueprints[name] = replace(blueprint, build=None)
    return blueprints, infos


def fused(method, replies):
    """The server's state after it fused the replies, from the state of all ones."""
    server, ctx = Party(-1, None, PartyData()), replace(context(), input_shape=(1,))
    ctx.blueprints, ctx.infos = hand_made()
    method.setup_server(server, ctx.infos, ctx)
    server.state = {name: torch.ones_like(t) for name, t in server.state.items()}
    method.fuse(server, replies, Step(), ctx)
    return {name: t.item() for name, t in server.state.items()}


def reply(client, samples, **values):
    names = {"stem": "stem.weight", "first": "blocks.0.weight", "second": "blocks.1.weight", "head": "head.weight"}
    state = {names[key]: torch.full((1, 1), float(value)) for key, value in values.items()}
    features = {"s_in": torch.zeros(2, 1), "s_out": torch.zeros(2, 1)}
    return {client: Message({"main": state}, features, {"samples": samples})}


def test_layers_are_averaged_over_those_who_have_them():
    replies = reply(0, 1, stem=4, first=8, head=0) | reply(1, 3, stem=0, first=4, second=7, head=2)
    by_layer = {"stem.weight": 1.0, "blocks.0.weight": 5.0, "blocks.1.weight": 7.0, "head.weight": 1.5}
    assert fused(FedIN(), replies) == by_layer
    assert fused(FedIN(view="owned", weighting="uniform"), replies)["blocks.0.weight"] == 6.0
    alone = reply(0, 1, stem=4, first=8, head=3)
    assert fused(FedIN(), alone)["blocks.1.weight"] == 1.0  # nobody sent it: it keeps its value
    same = reply(0, 1, stem=4, first=8, head=3) | reply(1, 3, stem=4, first=8, second=5, head=3)
    assert list(fused(FedIN(), same).values()) == [4.0, 8.0, 5.0, 3.0]


def test_by_architecture_a_lone_member_gets_its_own_weights_back():
    replies = reply(0, 1, stem=4, first=8, head=0) | reply(1, 3, stem=0, first=4, second=7, head=2)
    state = fused(FedIN(view="same_arch"), replies)
    assert [state[f"one::{n}.weight"] for n in ("stem", "blocks.0", "head")] == [4.0, 8.0, 0.0]
    assert [state[f"two::{n}.weight"] for n in ("stem", "blocks.0", "blocks.1", "head")] == [0.0, 4.0, 7.0, 2.0]


def test_single_members_learn_from_others_only_through_features():
    models, clients = ("mlp:2x8", "mlp:3x8", "mlp:4x8"), images()
    alone = run(FedProx(view="same_arch"), clients, models)
    assert_same(states(run(FedIN(view="same_arch", use_in=False), clients, models)), states(alone))
    taught = states(run(FedIN(view="same_arch"), clients, models))
    assert all(
        not torch.equal(taught[c]["layers.0.linear.weight"], states(alone)[c]["layers.0.linear.weight"])
        for c in range(3)
    )
    # Regression on the others' pairs brings the middle closer to them.
    client = party("mlp:3x8")
    before = FedIN().feature_loss({"main": Net(client.main)}, whole_batch(client), client.inbox.data)
    ctx = context(epochs=60, lr=0.05)
    run_stage(FedIN(view="same_arch").stage(client, ctx), client, ctx, "main/0")
    after = FedIN().feature_loss({"main": Net(client.main)}, whole_batch(client), client.inbox.data)
    assert after.item() < 0.7 * before.item()


# --- people's models and data ---


class Own(nn.Module):
    """A user's network, which knows nothing of polyfed."""

    def __init__(self, blocks):
        super().__init__()
        self.entry = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(*[nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(blocks)])
        self.out = nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.out(self.body(self.entry(x)).flatten(1))


def shallow():
    return pf.adapt(Own(1), head="out", stem="entry", input_shape=SHAPE)


def deep():
    return pf.adapt(Own(3), head="out", stem="entry", input_shape=SHAPE)


@pytest.mark.parametrize(
    ("options", "reached"), [({}, 0.6), ({"combine": "analytic", "noise": 0.5}, 0.4)], ids=["simple", "analytic"]
)
def test_a_user_s_own_module(options, reached):
    method = watched(feature_batch=4, **options)
    result = run(method, images((40, 30, 30)), models=(shallow, deep), rounds=3, epochs=3)
    assert [len(m.data["s_in"]) for r, _, m in method.down if r > 1] == [4] * 6
    assert result.accuracy()["worst"] > reached
    client = party(dtype=torch.float32)
    client.models["main"], client.info = deep(), ClientInfo(0, 6, "deep")
    assert set(method.middle_names(client, context())) == {
        f"model.body.{n}.0.{kind}" for n in range(3) for kind in ("weight", "bias")
    }
    assert make_blueprint(deep, "deep", SHAPE, CLASSES, 0, None, "linear").cuts == {"s_in": (4, 4, 4), "s_out": (64,)}


@pytest.mark.parametrize("rule", ["simple", "analytic"])
@pytest.mark.parametrize("models", [("resnet10:w4", "resnet14:w4"), ("mlp:2x8", "mlp:3x8")], ids=["bn", "no bn"])
def test_a_client_with_one_sample_and_one_without_some_classes(rule, models):
    method = watched(noise=0.2, **RULES[rule])
    run(method, images((8, 1, 9)), models, rounds=3, lr=0.01)
    assert {len(m.data["s_in"]) for _, client, m in method.up if client == 1} == {1}
    assert all(torch.isfinite(t).all() for _, _, m in method.up for _, t in m.tensors())


def test_it_learns():
    result = run(FedIN(), images((40, 30, 30)), ("mlp:2x16", "mlp:3x16"), rounds=4, epochs=4)
    assert result.accuracy()["worst"] > 0.8


# --- refusals ---


def never_trained(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("it must be refused before training")

    monkeypatch.setattr(FedIN, "local", fail)


def test_different_cuts_are_refused_with_clients_and_shapes(monkeypatch):
    never_trained(monkeypatch)
    with pytest.raises(InputError, match=r"s_in .* \[8\] at client 0 \(mlp:2x8\) and \[4, 4, 4\] at client 1") as error:
        run(FedIN(), models=("mlp:2x8", "cnn:4-8"))
    assert "stem" in str(error.value)
    with pytest.raises(InputError, match=r"s_out .* \[8\] at client 0 \(cnn:4-8\) and \[6\] at client 1") as error:
        run(FedIN(), models=("cnn:4-8", "cnn:4-6"))
    assert "feature_dim" in str(error.value)


def test_cuts_of_models_that_the_server_cannot_build_are_compared_by_their_descriptions():
    blueprints, infos = hand_made()
    blueprints["two"] = replace(blueprints["two"], cuts={"s_in": (1,), "s_out": (2,)})
    problem = (
        "fedin needs s_out of one shape at every client, but it is [1] at client 0 (one) and [2] at client 1 (two)"
    )
    with pytest.raises(InputError) as error:
        check_needs(FedIN(), list(infos.values()), blueprints, None, (1,))
    assert str(error.value) == f"{problem}: set feature_dim (--feature-dim N) to give all models features of one size."
    check_needs(FedIN(use_in=False), list(infos.values()), blueprints, None, (1,))


def test_a_common_feature_size_makes_them_fit_and_without_features_all_models_do():
    run(FedIN(), models=("cnn:4-8", "cnn:4-6"), feature_dim=5)
    run(FedIN(use_in=False), models=("mlp:2x8", "cnn:4-8"))


def test_a_model_that_cannot_be_cut_is_refused(monkeypatch):
    never_trained(monkeypatch)

    def uncut():
        return pf.adapt(Own(1), head="out", input_shape=SHAPE)

    with pytest.raises(InputError, match=r"fedin needs a model that can be cut in three.*client 0.*adapt"):
        run(FedIN(), models=(uncut,))


def live(replies, *rounds):
    """A federation of strangers after it fused the replies, then further rounds; and who was left out in each."""
    kind = pytest.importorskip("polyfed.flower.backend", reason="needs the extra flower").LiveFederation
    federation = kind.__new__(kind)
    federation.method, federation.server = FedIN(), Party(-1, None, PartyData())
    federation.ctx = replace(context(), input_shape=(1,))
    federation.ctx.blueprints, infos = hand_made()
    federation.ctx.infos = infos = {**infos, 2: ClientInfo(2, 1, "one")}
    federation.backend = type("Sites", (), {"infos": infos})()
    federation.method.setup_server(federation.server, infos, federation.ctx)
    left_out = []
    for told in (replies, *rounds):
        left_out.append({})
        federation._fuse(Step(), told, left_out[-1])
    return federation.server, left_out


def test_features_of_other_shapes_than_the_network_s_are_refused():
    wrong = reply(0, 1, stem=1, first=1, head=1) | reply(1, 3, stem=1, first=1, second=1, head=1)
    wrong[1].data["s_in"] = torch.zeros(2, 5)
    with pytest.raises(MessageError, match=r"client 1 refused: s_in is \[5\], .* \[1\].*stem"):
        fused(FedIN(), wrong)
    wrong[1].data = {"s_in": torch.zeros(2, 1), "s_out": torch.zeros(2, 3)}
    with pytest.raises(MessageError, match=r"client 1 refused: s_out is \[3\], .* \[1\].*feature_dim"):
        fused(FedIN(), {1: wrong[1]})
    wrong[1].data = {"s_in": torch.zeros(3, 1), "s_out": torch.zeros(2, 1)}
    with pytest.raises(MessageError, match="client 1 refused"):
        fused(FedIN(), wrong)


def test_a_site_with_other_features_is_left_out_and_the_others_count():
    good = reply(0, 1, stem=1, first=1, head=1) | reply(2, 1, stem=3, first=1, head=1)
    wrong = reply(1, 3, stem=9, first=9, second=9, head=9)
    wrong[1].data["s_in"] = torch.zeros(2, 5)
    both = {client: (good | wrong)[client] for client in range(3)}
    server, left_out = live(both, wrong, both)
    assert [list(round) for round in left_out] == [[1]] * 3 and "client 1" in left_out[0][1]
    assert server.state["stem.weight"].item() == 2.0 and server.memory["pool"]["sender"].tolist() == [0, 0, 2, 2]
    pack_tree(server.memory)  # can be checkpointed


@pytest.mark.parametrize(
    "options",
    [
        {"combine": "sum"}, {"alleviation_scope": "layer"}, {"outer_scale": "half"}, {"pairs": "all"}, {"lam": -1.0},
        {"sigma": "row"}, {"prox_anchor": "old"}, {"noise": -0.1}, {"noise": float("nan")}, {"feature_batch": 0},
        {"feature_samples": 0}, {"mu": -1.0},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_values_that_make_no_sense_are_refused(options):
    with pytest.raises(InputError, match=f"fedin: {next(iter(options))} "):
        FedIN(**options).check()


def test_noise_on_what_is_sent_leaves_the_first_round_of_training_alone():
    clients = pf.split(pf.load("digits", limit=(120, 40)), clients=2, by="iid")
    models = ["resnet:1-1,w4,stem=pool", "resnet:1-2,w4,stem=pool"]
    plain, sent, both = (
        pf.run(FedIN(noise=noise, noise_at=where), clients, models, rounds=1).models[1].state_dict()
        for noise, where in ((0.0, "everywhere"), (0.8, "sent"), (0.8, "everywhere"))
    )
    assert all(torch.equal(plain[name], sent[name]) for name in plain)  # there are no pairs to learn from yet
    assert not all(torch.equal(plain[name], both[name]) for name in plain)
    two = [pf.run(FedIN(noise=noise, noise_at="sent"), clients, models, rounds=2).models[1] for noise in (0.0, 0.8)]
    assert not torch.equal(*(net.state_dict()["head.weight"] for net in two))  # pairs of round 1 were noisy


@pytest.mark.parametrize(("pairs", "equal"), [("pool", False), ("common", True)])
def test_clients_draw_for_themselves_unless_one_draw_is_for_everybody(pairs, equal):
    first, second = (FedIN(feature_batch=6, pairs=pairs).sample_pairs(SENDER, client, context()) for client in (98, 99))
    assert len(first) == len(second) == 6 and torch.equal(first, second) == equal  # neither has sent any


def test_noise_without_a_proximal_term_needs_no_anchor():
    def same(x):
        return x

    nets = {"main": SimpleNamespace(stem=same, middle=same, head=same)}
    draws = dict.fromkeys(("noise_in", "noise_out"), torch.zeros(1, 2))
    loss = FedIN(mu=0.0, noise=0.5).loss(nets, Batch(torch.zeros(1, 2), torch.tensor([1]), draws), {})
    assert float(loss) == pytest.approx(math.log(2.0))
