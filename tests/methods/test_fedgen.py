"""FedGen: the acceptance properties of its spec."""

import math

import pytest
import torch
from tests.contract.table import synthetic
from torch.nn import functional as F

import polyfed as pf
from polyfed.api import Networks, prepare
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Step
from polyfed.core.nets import Net
from polyfed.core.party import state_of
from polyfed.core.settings import Settings
from polyfed.core.stage import Batch
from polyfed.methods.fedgen import FedGen
from polyfed.methods.fedgen_hetero import FedGenHetero
from polyfed.ops.distance import diversity, kl_divergence

SMALL = {"hidden": 6, "noise_dim": 4, "generator_steps": 2, "generator_batch": 4}
TRAINING = pf.Training(epochs=1, batch_size=8, lr=0.05)


def federation(method, models=("mlp:1x8",), rounds=1, clients=3, feature_dim=None):
    settings = Settings(rounds, training=TRAINING)
    return prepare(method, synthetic(clients), list(models), settings, Networks(feature_dim=feature_dim))


def reply(state, counts):
    return Message({"main": state}, {"counts": torch.tensor(counts, dtype=torch.int32)}, {"samples": sum(counts)})


def uploads(run, seeds, counts):
    """Replies with networks of other weights."""
    found = {}
    for client, (seed, some) in enumerate(zip(seeds, counts, strict=True)):
        torch.manual_seed(seed)
        initial = run.ctx.blueprints[run.ctx.infos[client].architecture].initial
        found[client] = reply({name: torch.randn(t.shape) for name, t in initial.items()}, some)
    return found


def watched(run, replies):
    """Train the generator and return the stage that did it, with the networks that it named."""
    seen = []
    real = run.ctx.run_stage
    run.ctx.run_stage = lambda stage, party, name: (seen.append((stage, party.models)), real(stage, party, name))[1]
    run.ctx.round = 1
    run.method.train_generator(run.server, replies, run.ctx)
    run.ctx.run_stage = real
    return seen[0]


def test_diversity_is_one_where_all_coincide_and_less_where_they_do_not():
    noise = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    assert diversity(noise, torch.ones(2, 3)) == 1
    # ||e||² as a mean over 2 numbers: 4/2 = 2; |z| as a mean over 2: 3/2; mean over the 4 pairs, two of them 0.
    made = torch.tensor([[0.0, 1.0], [3.0, 1.0]])
    assert diversity(noise, made).item() == pytest.approx(math.exp(-(2 * 1.5) / 2))
    assert all(diversity(torch.rand(8, 4), torch.randn(8, 5)) <= 1 for _ in range(5))


def test_shares_of_a_label_sum_to_one_and_labels_without_samples_are_never_drawn():
    run = federation(FedGen(**SMALL))
    stage, _ = watched(run, uploads(run, (1, 2, 3), ([3, 0, 1], [1, 0, 1], [0, 0, 1])))
    shares = torch.stack([stage.aux["shares"][key] for key in "012"])
    assert shares[:, 0].tolist() == [0.75, 0.25, 0.0] and shares[:, 1].tolist() == [0, 0, 0]
    assert shares[:, 2].sum() == pytest.approx(1)
    assert set(stage.data.y.tolist()) == {0}  # of label 2 nobody has more than one sample
    assert run.server.memory["labels"].tolist() == [0]
    watched(run, uploads(run, (1, 2, 3), ([0, 0, 5], [0, 0, 1], [0, 0, 1])))
    assert run.server.memory["labels"].tolist() == [0, 2]  # what it learned before is known still
    run = federation(FedGen(**SMALL))
    stage, _ = watched(run, uploads(run, (1,), ([0, 1, 0],)))
    assert set(stage.data.y.tolist()) == {1}  # a single sample is all there is


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_the_generators_loss_by_hand(weight):
    run = federation(FedGen(**SMALL, diversity=weight))
    replies = uploads(run, (1, 2), ([3, 1, 0], [1, 3, 0]))
    stage, models = watched(run, replies)
    torch.manual_seed(0)
    batch = Batch(torch.zeros(5, 1), torch.tensor([0, 1, 1, 0, 1]), {"noise": torch.rand(5, 4)})
    found = stage.loss({name: Net(module) for name, module in models.items()}, batch, stage.aux)
    z = models["generator"](batch["noise"], batch.y)
    expected = weight * diversity(batch["noise"], z)
    shares = ([0.75, 0.25], [0.25, 0.75])
    for client, share in zip((0, 1), shares, strict=True):
        state = replies[client].params["main"]
        log = (z @ state["head.weight"].T + state["head.bias"]).log_softmax(1)
        expected = expected - sum(share[y] * log[i, y] for i, y in enumerate(batch.y.tolist())) / 5
    torch.testing.assert_close(found, expected)


def test_the_servers_steps_change_the_generator_only_and_heads_come_to_agree_on_it():
    run = federation(
        FedGen(**SMALL | {"generator_steps": 300, "generator_batch": 16}, generator_lr=0.02, diversity=0.1)
    )
    replies = uploads(run, (1, 2), ([9, 9, 9], [9, 9, 9]))
    before = {name: t.clone() for name, t in state_of(run.server.models["generator"]).items()}
    uploaded = [reply.params["main"] for reply in replies.values()]
    others = [run.server.state, state_of(run.server.main), state_of(run.ctx.replica("mlp:1x8")), *uploaded]
    kept = [{name: t.clone() for name, t in state.items()} for state in others]
    watched(run, replies)
    generator = run.server.models["generator"]
    assert not any(torch.equal(state_of(generator)[name], t) for name, t in before.items())
    assert all(torch.equal(state[n], t) for state, was in zip(others, kept, strict=True) for n, t in was.items())
    labels = torch.arange(3).repeat(20)
    z = generator.eval()(torch.rand(60, 4), labels)
    for client in replies:
        state = replies[client].params["main"]
        right = (z @ state["head.weight"].T + state["head.bias"]).argmax(1) == labels
        assert right.float().mean() > 0.8


def test_the_generators_learning_rate_fades_by_rounds():
    run = federation(FedGen(**SMALL, decay=0.5))
    stage, _ = watched(run, uploads(run, (1,), ([9, 9, 9],)))
    training = stage.training
    assert (training.optimizer, training.lr, training.weight_decay, training.round_decay) == ("adam", 3e-4, 1e-2, 0.5)
    assert stage.steps == 2 and len(stage.data) == 8 and stage.trainable == {"generator": None}
    assert stage.draws["noise"].kind == "uniform"


def client_stage(method, round=2, labels=(0, 2), models=("mlp:1x8",)):
    """Return a client, and what it trains with once there is a generator."""
    run = federation(method, models)
    run.server.memory["labels"] = torch.tensor(labels)
    run.ctx.round = round
    client = run.backend.store.open(1, run.ctx)
    client.inbox = run.method.send(run.server, client.info, Step(), run.ctx)
    return client, run.method.stage(client, run.ctx)


@pytest.mark.parametrize(("alpha", "beta"), [(3.0, 0.0), (0.0, 3.0), (2.0, 5.0)])
def test_the_clients_loss_by_hand(alpha, beta):
    client, stage = client_stage(FedGen(**SMALL, alpha=alpha, beta=beta, decay=0.5))
    torch.manual_seed(0)
    drawn = {
        "noise": torch.rand(6, 4),
        "drawn": torch.rand(4, 4),
        "label": torch.tensor([0.0, 0.49, 0.51, 0.999999999]),
    }
    batch = Batch(torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 2, 1, 0, 1]), drawn)
    found = stage.loss({name: Net(module) for name, module in client.models.items()}, batch, stage.aux)
    main, generator = client.main, client.models["generator"].eval()
    labels = torch.tensor([0, 0, 2, 2])  # uniform numbers, turned into one of the two labels that are known
    logits = main(batch.x)
    expected = F.cross_entropy(logits, batch.y)
    expected = expected + 4 / 8 * alpha / 2 * F.cross_entropy(main.head(generator(drawn["drawn"], labels)), labels)
    target = main.head(generator(drawn["noise"], batch.y)).detach()
    expected = expected + beta / 2 * kl_divergence(logits, target)
    torch.testing.assert_close(found, expected)
    ours, by_hand = (torch.autograd.grad(loss, main.head.weight, retain_graph=True) for loss in (found, expected))
    torch.testing.assert_close(ours, by_hand)  # the target of the KL divergence does not move


def test_weights_fade_to_a_floor_and_labels_stay_in_range():
    _, stage = client_stage(FedGen(**SMALL, alpha=8.0, beta=0.5, decay=0.5), round=4)
    assert stage.aux["alpha"].item() == pytest.approx(4 / 8 * 8 * 0.125)
    assert stage.aux["beta"].item() == pytest.approx(0.5 * 0.125)
    _, stage = client_stage(FedGen(**SMALL, alpha=1.0, beta=1.0, decay=0.5), round=100)
    assert stage.aux["beta"].item() == pytest.approx(1e-4)
    client, stage = client_stage(FedGen(**SMALL), labels=(0, 1, 2))
    drawn = {"noise": torch.rand(2, 4), "drawn": torch.rand(4, 4), "label": torch.full((4,), 1 - 2**-24)}
    batch = Batch(torch.randn(2, 1, 8, 8), torch.tensor([0, 1]), drawn)  # times 3, this rounds to 3
    assert stage.loss({n: Net(m) for n, m in client.models.items()}, batch, stage.aux).isfinite()


def test_the_first_round_is_fedavgs():
    ours, plain = federation(FedGen(**SMALL)), federation(pf.FedAvg())
    ours.run(), plain.run()
    assert ours.server.state.keys() == plain.server.state.keys()
    assert all(torch.equal(ours.server.state[name], tensor) for name, tensor in plain.server.state.items())


def test_clients_leave_the_generator_alone_and_it_comes_in_the_second_round():
    run = federation(FedGen(**SMALL), rounds=2)
    run.run()
    sent = state_of(run.server.models["generator"])
    for record in run.backend.store.records.values():
        own = record.states["generator"]
        assert own["norm.num_batches_tracked"] == 0
        assert not torch.equal(own["hidden.weight"], sent["hidden.weight"])  # that of the first round
    assert run.server.memory["labels"].tolist() == [0, 1, 2]
    measured = run.method.send(run.server, run.backend.infos[0], EVALUATE, run.ctx)
    assert set(measured.params) == {"main"} and not measured.data  # nobody predicts with the generator


@pytest.mark.parametrize(("share", "models", "dim"), [("model", ("mlp:1x8",), None), ("head", ("mlp:1x8", "cnn:4"), 8)])
def test_bytes(share, models, dim):
    run = federation(FedGen(**SMALL, share=share), models, rounds=2, feature_dim=dim)
    run.run()
    shared = sum(t.numel() for t in run.server.state.values())
    if share == "head":
        assert shared == 8 * 3 + 3
    generator = (4 + 3) * 6 + 6 + 4 * 6 + 6 * 8 + 8  # two linear layers, a BatchNorm
    assert run.meter.bytes["up"] == dict.fromkeys(range(3), 2 * (4 * shared + 4 * 3 + 8))
    assert run.meter.bytes["down"] == dict.fromkeys(range(3), 2 * 4 * shared + 4 * generator + 3)


def test_heads_are_shared_and_extractors_are_not():
    run = federation(FedGen(**SMALL, share="head"), ("mlp:1x8", "cnn:4"), rounds=2, feature_dim=8)
    run.run()
    assert set(run.server.state) == {"head.weight", "head.bias"}
    assert "main" not in run.server.models


def test_what_does_not_go_together_is_refused():
    with pytest.raises(InputError, match="the view is 'shared:head'"):
        FedGen(share="head", view="full")
    with pytest.raises(InputError, match="generator_batch must be at least 2"):
        FedGen(generator_batch=1)
    with pytest.raises(InputError, match="alpha must not be negative"):
        FedGen(alpha=-1.0)
    with pytest.raises(InputError, match="features of the same size"):
        federation(FedGen(share="head"), ("mlp:1x8", "mlp:1x9"))
    with pytest.raises(InputError, match="nothing would be averaged"):
        federation(FedGen(), ("mlp:1x8", "cnn:4", "cnn:8"), feature_dim=8)


# --- width slices ---

WIDTHS = ("mlp:1x8@1", "mlp:1x8@0.5")  # 8 features, and 4


def test_the_head_of_a_slice_is_given_the_first_generated_features():
    run = federation(FedGenHetero(**SMALL, diversity=0.0), WIDTHS)
    replies = uploads(run, (1, 2), ([3, 1, 0], [1, 3, 0]))
    stage, models = watched(run, replies)
    torch.manual_seed(0)
    batch = Batch(torch.zeros(3, 1), torch.tensor([0, 1, 1]), {"noise": torch.rand(3, 4)})
    found = stage.loss({name: Net(module) for name, module in models.items()}, batch, stage.aux)
    z = models["generator"](batch["noise"], batch.y)
    assert z.shape == (3, 8)
    expected = 0
    for client, features, share in ((0, 8, [0.75, 0.25]), (1, 4, [0.25, 0.75])):
        state = replies[client].params["main"]
        assert state["head.weight"].shape == (3, features)
        log = (z[:, :features] @ state["head.weight"].T + state["head.bias"]).log_softmax(1)
        expected = expected - sum(share[y] * log[i, y] for i, y in enumerate(batch.y.tolist())) / 3
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mask", [True, False])
def test_the_loss_of_a_narrow_client_by_hand(mask):
    """Own samples with HeteroFL's masked loss; generated ones of any label, and the KL divergence, without a mask."""
    method = FedGenHetero(**SMALL, alpha=3.0, beta=5.0, decay=0.5, mask=mask)
    client, stage = client_stage(method, models=WIDTHS)
    assert client.main.feature_dim == 4 and stage.training.clip == 1.0
    torch.manual_seed(0)
    drawn = {"noise": torch.rand(5, 4), "drawn": torch.rand(4, 4), "label": torch.tensor([0.1, 0.2, 0.7, 0.9])}
    batch = Batch(torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 1, 0, 1]), drawn)
    present = torch.tensor([1.0, 1.0, 0.0])
    aux = {**stage.aux, "present": present} if mask else stage.aux
    found = stage.loss({name: Net(module) for name, module in client.models.items()}, batch, aux)
    main, generator = client.main, client.models["generator"].eval()
    labels = torch.tensor([0, 0, 2, 2])
    logits = main(batch.x)
    expected = F.cross_entropy(logits * present if mask else logits, batch.y)
    made = main.head(generator(drawn["drawn"], labels)[:, :4])
    expected = expected + 4 / 8 * 3 / 2 * F.cross_entropy(made, labels)
    target = main.head(generator(drawn["noise"], batch.y)[:, :4]).detach()
    expected = expected + 5 / 2 * kl_divergence(logits, target)
    torch.testing.assert_close(found, expected)


def test_slices_keep_static_batchnorm_and_statistics_travel_alone():
    run = federation(FedGenHetero(**SMALL), ("cnn:4-8,bn@1", "cnn:4-8,bn@0.5"), rounds=2)
    statistics = run.plan.round[-1]
    run.run()
    client = run.backend.store.open(1, run.ctx)
    nets = {name: Net(module) for name, module in client.models.items()}
    before = client.main.stem.norm.num_batches_tracked.clone()
    batch = Batch(torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 1, 0, 1]))
    run.method.own_loss(nets, batch, {})
    assert client.main.stem.norm.num_batches_tracked == before
    message = run.method.send(run.server, client.info, statistics, run.ctx)
    assert set(message.params) == {"main"} and not message.data
    assert run.server.models["generator"].output.out_features == 8  # as the widest network
    assert run.server.main.feature_dim == 8  # there is a global model


def test_widths_share_slices_of_the_whole_network():
    with pytest.raises(InputError, match="share is 'model', not 'head'"):
        FedGenHetero(share="head")
    with pytest.raises(InputError, match="of one family"):
        federation(FedGenHetero(), ("mlp:1x8", "cnn:8"))
