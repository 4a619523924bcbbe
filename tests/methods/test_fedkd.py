"""FedKD: the acceptance properties of its spec."""

import math

import numpy as np
import pytest
import torch
from tests.methods.proxy_problem import (
    FULL,
    SGD,
    Stub,
    assert_close,
    assert_equal,
    averaged,
    federation,
    held,
    size_of,
    start_of,
)
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Step
from polyfed.core.party import shared_state
from polyfed.core.settings import Settings
from polyfed.core.shape import InputShape
from polyfed.core.stage import Batch
from polyfed.core.traffic import Told, expected_bytes
from polyfed.methods.fedkd import FedKD
from polyfed.models import build
from polyfed.models.embeddings import embedding_names
from polyfed.ops.lowrank import packed_difference

BATCH = Batch(torch.zeros(1, 1), torch.tensor([0]))
SMALL = {"proxy": "mlp:1x4"}
ALONE = {"distill_weight": 0.0, "hidden_weight": 0.0}
LOSSLESS = {"e_0": 1.0, "e_1": 1.0}


def pair(requires_grad=False):
    """A mentor that does not know (1/2, 1/2) and a mentee that is rather right (3/4, 1/4), with hidden states."""
    even, sure = torch.zeros(1, 2), torch.tensor([[math.log(3.0), 0.0]])
    even.requires_grad_(requires_grad)
    mentor = Stub(even, torch.tensor([[1.0, 2.0]]))
    mentee = Stub(sure, torch.tensor([[3.0]]))
    return {"main": mentor, "proxy": mentee, "map": lambda z: torch.cat([z, 0 * z], 1)}


def test_the_losses_by_hand():
    method = FedKD(distill_weight=2.0, hidden_weight=3.0)
    c = math.log(2.0) + math.log(4 / 3)
    hidden = 3 * ((3 - 1) ** 2 + (0 - 2) ** 2) / 2
    of_mentee = 2 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5))  # KL(mentee || mentor)
    of_mentor = 2 * (0.5 * math.log(2 / 3) + 0.5 * math.log(2.0))  # KL(mentor || mentee)
    assert float(method.mentor_loss(pair(), BATCH, {})) == pytest.approx(math.log(2.0) + (of_mentee + hidden) / c)
    assert float(method.mentee_loss(pair(), BATCH, {})) == pytest.approx(math.log(4 / 3) + (of_mentor + hidden) / c)
    plain = FedKD(hidden_weight=0.0).mentor_loss(pair(), BATCH, {})
    assert float(plain) == pytest.approx(math.log(2.0) + of_mentee / 2 / c)
    only = FedKD(distill_weight=0.0, hidden_weight=3.0).mentor_loss(pair(), BATCH, {})
    assert float(only) == pytest.approx(math.log(2.0) + hidden / c)
    certain = Stub(torch.tensor([[200.0, 0.0]]))  # both losses are exactly 0, and nothing is divided by them
    assert float(FedKD(hidden_weight=0.0).mentor_loss({"main": certain, "proxy": certain}, BATCH, {})) == 0


@pytest.mark.parametrize("detached", [True, False])
def test_the_scale_is_a_number_or_not(detached):
    nets = pair(requires_grad=True)
    z = nets["main"].logits
    loss = FedKD(detach_scale=detached, hidden_weight=0.0).mentor_loss(nets, BATCH, {})
    (found,) = torch.autograd.grad(loss, z)
    own = F.cross_entropy(z, BATCH.y)
    taught = F.kl_div(F.log_softmax(z, 1), torch.tensor([[0.75, 0.25]]), reduction="batchmean")
    c = own + math.log(4 / 3)
    (expected,) = torch.autograd.grad(own + taught / (float(c) if detached else c), z)
    torch.testing.assert_close(found, expected)


def test_one_round_of_one_step_by_hand():
    method = FedKD(**SMALL, **LOSSLESS, proxy_lr=0.03)
    run = federation(method, training=FULL, clients=1, models=["mlp:1x8"])
    fresh = federation(method, clients=1, models=["mlp:1x8"], run=False)
    fresh.backend.store.prepare([0], fresh.ctx)
    party = fresh.backend.store.open(0, fresh.ctx)
    mentor, mentee, bridge = (party.models[name] for name in ("main", "proxy", "map"))
    assert bridge.weight.shape == (8, 4) and bridge.bias is None
    data = fresh.backend.store.data[0].train
    x, y = data.inputs(), data.labels()

    def step(student, teacher, moved, rate):
        own, other = F.cross_entropy(student(x), y), F.cross_entropy(teacher(x), y)
        taught = F.kl_div(F.log_softmax(student(x), 1), F.softmax(teacher(x).detach(), 1), reduction="batchmean")
        hidden = F.mse_loss(mentor.features(x), bridge(mentee.features(x)))
        loss = own + (taught + hidden) / (own + other).item()
        for parameter, grad in zip(moved, torch.autograd.grad(loss, moved), strict=True):
            parameter.data = parameter.data - rate * grad

    step(mentor, mentee, list(mentor.parameters()), 0.1)
    step(mentee, mentor, [*mentee.parameters(), *bridge.parameters()], 0.03)
    for name, module in (("main", mentor), ("proxy", mentee), ("map", bridge)):
        assert_close(held(run, 0, name), module.state_dict())
    assert_close(run.server.main.state_dict(), mentee.state_dict())


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_without_teaching_and_loss_it_is_fedavg_of_mentees(weighting):
    run = federation(FedKD(**SMALL, **ALONE, **LOSSLESS, weighting=weighting), 3)
    expected = averaged(start_of("mlp:1x4"), 3, SGD, weighting)
    assert_close(run.server.main.state_dict(), expected, rtol=1e-4, atol=1e-5)
    alone = federation(pf.Local(), 3)
    for client in range(3):
        assert_equal(held(run, client), held(alone, client))


def test_the_energy_grows_from_round_to_round():
    run = federation(FedKD(**SMALL, e_0=0.5, e_1=0.9), 4, run=False)
    energies = []
    for run.ctx.round in (1, 2, 3, 4):
        energies.append(run.method.energy(run.ctx))
    assert energies == pytest.approx([0.6, 0.7, 0.8, 0.9])


def test_little_energy_is_rank_one_in_both_directions():
    run = federation(FedKD(**SMALL, e_0=0.01, e_1=0.01), 2)
    numbers = (4 + 64 + 1) + 4 + (3 + 4 + 1) + 3  # r(m + n + 1) of both matrices with r = 1, and both biases
    size = 4 * numbers + 2 * 2
    assert run.meter.bytes["up"] == dict.fromkeys(range(3), 2 * size)
    assert run.meter.bytes["down"] == dict.fromkeys(range(3), size)  # nothing in the first round: all hold the start
    one = federation(FedKD(**SMALL, e_0=0.01, e_1=0.01))
    change = one.server.main.state_dict()["stem.linear.weight"] - start_of("mlp:1x4").state_dict()["stem.linear.weight"]
    assert torch.linalg.matrix_rank(change, atol=1e-6) == 1
    weighted = federation(FedKD(**SMALL, e_0=0.01, e_1=0.01, weighting="samples"))
    assert weighted.meter.bytes["up"][0] == size + 8


def test_bytes_follow_the_ranks():
    run = federation(FedKD(**SMALL, e_0=0.9, e_1=0.9), 2)
    change = run.server.memory["change"]["packed"]
    ranks = dict(zip(["head.weight", "stem.linear.weight"], change["ranks"].tolist(), strict=True))
    assert len(change["change"]) == ranks["head.weight"] * (3 + 4 + 1) + ranks["stem.linear.weight"] * 69 + 4 + 3
    assert set(run.meter.kinds) == {f"main/{way}/data/{what}" for way in ("up", "down") for what in ("change", "ranks")}


def test_embeddings_are_not_compressed():
    """Even with next to no energy, the mean of the clients' changes arrives whole; matrices arrive with rank one."""
    texts = [f"{'good' if row % 2 else 'bad'} thing {row}" for row in range(24)]
    clients = pf.split(pf.load((texts, np.arange(24) % 2)), 2, by="iid")
    method = FedKD(proxy="cnn1d:1x4", e_0=0.01, e_1=0.01)
    run = prepare(method, clients, ["lstm:1x6"], Settings(1, training=SGD))
    run.run()
    mentee = shared_state(run.server.main)
    (words,) = embedding_names(run.server.main)
    matrices = sorted(name for name, tensor in mentee.items() if tensor.dim() > 1)
    packed = run.server.memory["change"]["packed"]
    assert dict(zip(matrices, packed["ranks"].tolist(), strict=True)) == {m: -1 if m == words else 1 for m in matrices}
    mean = (held(run, 0, "proxy")[words] + held(run, 1, "proxy")[words]) / 2
    torch.testing.assert_close(mentee[words], mean)
    assert torch.linalg.matrix_rank(mean - start_of_words(run, words)) > 1
    factors = sum(len(mentee[m]) + mentee[m][0].numel() + 1 for m in matrices if m != words)
    vectors = sum(tensor.numel() for tensor in mentee.values() if tensor.dim() < 2)
    numbers = mentee[words].numel() + factors + vectors
    assert run.meter.bytes["up"] == dict.fromkeys(range(2), 4 * numbers + 2 * len(matrices))
    told = Told(method, run.ctx, 0, Message(data=packed), {"proxy": held(run, 0, "proxy")}, None, None)
    assert expected_bytes(FedKD.traffic["main"].up, told) == 4 * numbers + 2 * len(matrices)


def start_of_words(run, words):
    """The embedding that everybody began with."""
    return run.ctx.initialized("proxy", lambda: run.method.build_proxy(run.ctx)).state_dict()[words]


def test_embeddings_of_words_and_of_columns_are_found():
    assert embedding_names(build("tabular:1x8", InputShape((12,), groups=(3, 5)), 2)) == {
        "stem.0.tables.0",
        "stem.0.tables.1",
    }
    assert embedding_names(nn.Sequential(nn.EmbeddingBag(5, 2), nn.Linear(2, 3))) == {"0.weight"}
    assert embedding_names(nn.Embedding(5, 2)) == {"weight"} and not embedding_names(nn.Linear(2, 3))


def test_a_change_of_zero_has_rank_zero():
    run = federation(FedKD(**SMALL))
    g = shared_state(run.server.main)
    told = packed_difference(g, g, 0.95, embedding_names(run.server.main))
    before = {name: tensor.clone() for name, tensor in g.items()}
    run.method.fuse(run.server, {0: Message(data=told)}, Step(), run.ctx)
    assert told["ranks"].tolist() == [0, 0] and told["change"].tolist() == [0.0] * (3 + 4)  # both biases
    assert_equal(shared_state(run.server.main), before)


def after_receiving(run, client):
    """What a client has after the message it would get now."""
    party = run.backend.store.open(client, run.ctx, scratch=True)
    party.inbox = run.method.send(run.server, run.backend.infos[client], EVALUATE, run.ctx)
    run.method.receive(party, EVALUATE, run.ctx)
    return party


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_everybody_gets_the_servers_mentee_whether_it_missed_rounds_or_not(rounds):
    run = federation(FedKD(proxy="cnn:4,bn", e_0=0.5, e_1=0.6), rounds, clients=4, share=0.5)
    kinds = set()
    for client in range(4):
        party = after_receiving(run, client)
        kinds.add("whole" if party.inbox.params else "change")
        expected = {n: t for n, t in run.server.main.state_dict().items() if t.is_floating_point()}
        found = party.models["proxy"].state_dict()
        assert_equal({name: found[name] for name in expected}, expected)
        assert_equal(party.memory["common"], expected)
    assert kinds == {"whole", "change"}
    whole = next(c for c in range(4) if c not in run.server.memory["change"]["holders"])
    message = run.method.send(run.server, run.backend.infos[whole], Step(), run.ctx)
    assert message.nbytes() == size_of(start_of("cnn:4,bn"))


def test_after_a_round_without_replies_everybody_gets_the_whole_mentee():
    run = federation(FedKD(**SMALL))
    for number, whole in ((1, False), (2, False), (3, True)):
        run.ctx.round = number
        message = run.method.send(run.server, run.backend.infos[0], Step(), run.ctx)
        assert bool(message.params) == whole


def test_the_mean_of_the_changes_is_weighted():
    uniform, weighted = (federation(FedKD(**SMALL, **LOSSLESS, weighting=w)) for w in ("uniform", "samples"))
    shares = [info.samples for info in weighted.backend.infos.values()]
    for run, weights in ((uniform, [1, 1, 1]), (weighted, shares)):
        each = [held(run, client, "proxy")["head.weight"] for client in range(3)]
        expected = sum(a * tensor for a, tensor in zip(weights, each, strict=True)) / sum(weights)
        torch.testing.assert_close(run.server.main.state_dict()["head.weight"], expected, rtol=1e-4, atol=1e-5)


def test_running_statistics_move_once_a_batch():
    run = federation(FedKD(proxy="cnn:4,bn"), training=FULL, models=["cnn:4-8,bn"])
    for model in ("main", "proxy"):
        counters = [int(t) for name, t in held(run, 0, model).items() if name.endswith("num_batches_tracked")]
        assert counters and set(counters) == {1}


def test_hidden_states_need_features_and_outputs_do_not():
    assert "features" in FedKD().requirements()
    assert "features" not in FedKD(hidden_weight=0.0).requirements()
    assert "map" not in federation(FedKD(**SMALL, hidden_weight=0.0)).backend.store.records[0].states


@pytest.mark.parametrize("options", [{"e_0": 0.0}, {"e_1": 1.5}, {"distill_weight": -1.0}, {"proxy_lr": 0.0}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        FedKD(**options)
