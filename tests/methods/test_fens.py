"""FENS: the acceptance properties of its spec."""

from dataclasses import replace

import pytest
import torch
from tests.methods.proxy_problem import assert_close, assert_equal, federation, held
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.errors import InputError, PolyfedError
from polyfed.core.message import Message
from polyfed.core.needs import missing
from polyfed.core.party import shared_state
from polyfed.core.passes import logits_of
from polyfed.core.stage import Trained
from polyfed.fusion.combining import Combined, Combiner, network_of
from polyfed.fusion.files import load_fused, write_fused
from polyfed.fusion.networks import Averaged
from polyfed.methods.fens import COMBINE, FENS, MODELS, UPLOAD
from polyfed.models import build

MIXED = ["mlp:1x8", "mlp:2x12", "cnn:4-8"]
X = torch.randn(7, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def networks(count=3):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [build("mlp:1x8", (1, 8, 8), 4).eval() for _ in range(count)]


def floats(module):
    return sum(parameter.numel() for parameter in module.parameters())


# --- the combiner ---


def test_the_numbers_of_the_paper():
    assert floats(Combiner("mlp", 20, 10, 2)) == 8450 == 20 * 20 * 10 * 2 + 20 * 2 + 20 * 2 * 10 + 10
    assert Message(params={"combiner": Combiner("mlp", 20, 10, 2).state_dict()}).nbytes() == 33800
    assert floats(Combiner("mlp", 20, 10, 4)) == 16890
    assert floats(Combiner("class", 20, 10)) == 200
    assert floats(Combiner("client", 20, 10)) == 21


def test_combiners_by_hand():
    logits = torch.tensor([[[1.0, 2.0], [3.0, 5.0]]])  # one sample, two networks, two classes
    by_class, by_client, mlp = (Combiner(kind, 2, 2, 1) for kind in ("class", "client", "mlp"))
    by_class.weight.data = torch.tensor([[1.0, 10.0], [2.0, 0.0]])
    assert by_class(logits).tolist() == [[7.0, 20.0]]
    by_client.weight.data, by_client.bias.data = torch.tensor([[2.0], [-1.0]]), torch.tensor([0.5])
    assert by_client(logits).tolist() == [[-0.5, -0.5]]
    first, last = mlp.layers[1], mlp.layers[3]
    first.weight.data, first.bias.data = torch.tensor([[1.0, 0, 0, -1], [0, 1, 1, 0]]), torch.tensor([3.0, 1.0])
    last.weight.data, last.bias.data = torch.tensor([[1.0, 2.0], [4.0, 0.0]]), torch.tensor([0.0, 7.0])
    assert mlp(logits).tolist() == [[12.0, 7.0]]  # hidden: relu(1 - 5 + 3) = 0 and 2 + 3 + 1 = 6


@pytest.mark.parametrize("kind", ["class", "client"])
def test_untrained_weights_are_the_ensembles_mean_of_logits(kind):
    many = networks()
    torch.testing.assert_close(Combined(many, Combiner(kind, 3, 4))(X), Averaged(many, "logit")(X))


def test_one_hot_weights_are_that_clients_network_and_one_network_is_itself():
    many = networks()
    combiner = Combiner("class", 3, 4)
    combiner.weight.data = torch.tensor([[0.0], [1.0], [0.0]]).expand(3, 4).clone()
    assert torch.equal(Combined(many, combiner)(X), many[1](X))
    assert torch.equal(Combined(many[:1], Combiner("class", 1, 4))(X), many[0](X))


@pytest.mark.parametrize("kind", ["mlp", "class", "client"])
def test_a_combined_network_is_saved_and_read_again(kind, tmp_path):
    combiner = Combiner(kind, 3, 4, hidden=3)
    for parameter in combiner.parameters():
        parameter.data += 0.1 * torch.arange(parameter.numel()).view(parameter.shape)
    fused = Combined(networks(), combiner).eval()
    about = {"kind": fused.kind, "models": ["mlp:1x8"] * 3, "options": fused.recipe(), "projections": [None] * 3}
    write_fused(fused, {**about, "input_shape": {"sizes": [1, 8, 8]}, "num_classes": 4}, tmp_path / "fused")
    assert torch.equal(load_fused(tmp_path / "fused")(X), fused(X))


# --- the method ---


def federated(run=True, models=MIXED, rounds=2, **options):
    return federation(FENS(combiner_rounds=rounds, **options), models=models, run=run)


def opened(run, client=0):
    run.backend.store.prepare([client], run.ctx)
    return run.backend.store.open(client, run.ctx)


def test_held_out_samples_are_apart_and_the_same_whenever_asked():
    run = federated(False, held_out=0.3)
    party = opened(run, 2)
    own, apart = run.method.split(party, run.ctx)
    n = len(party.train)
    assert len(apart) == round(0.3 * n)
    assert sorted([*own.index.tolist(), *apart.index.tolist()]) == sorted(party.train.index.tolist())
    run.ctx.round = 7
    assert torch.equal(run.method.split(party, run.ctx)[1].index, apart.index)
    everything, same = FENS(held_out=0.0).split(party, run.ctx)
    assert everything is same is party.train
    party.data.train = party.train.select(torch.tensor([4, 2]))
    assert [len(part) for part in FENS(held_out=0.9).split(party, run.ctx)] == [1, 1]
    assert [len(part) for part in FENS(held_out=0.01).split(party, run.ctx)] == [1, 1]
    party.data.train = party.train.select(torch.tensor([0]))
    assert [len(part) for part in FENS().split(party, run.ctx)] == [1, 1]


def test_a_network_learns_from_the_rest_alone():
    run = federated(False, held_out=0.3)
    party = opened(run)
    work = run.method.local(party, UPLOAD, run.ctx)
    stage = next(work)
    own, apart = run.method.split(party, run.ctx)
    assert torch.equal(stage.data.index, own.index) and not set(own.index.tolist()) & set(apart.index.tolist())
    with pytest.raises(StopIteration) as ended:
        work.send(Trained())
    assert_equal(ended.value.value.params["main"], shared_state(party.main))


def test_every_client_asks_all_networks_in_the_order_of_clients():
    run = federated(rounds=1)
    uploaded = run.method.networks(run.server, run.ctx)
    for client in range(3):
        party = run.backend.store.open(client, run.ctx)
        _, apart = run.method.split(party, run.ctx)
        expected = torch.stack([logits_of(network, apart) for network in uploaded], 1)
        assert torch.equal(party.memory["logits"], expected)


def test_one_step_of_the_combiner_by_hand():
    run = federated(rounds=1, combiner_lr=0.5, held_out=0.4)
    start = federated(False).server.models["combiner"]
    party = run.backend.store.open(1, run.ctx)
    _, apart = run.method.split(party, run.ctx)
    loss = F.cross_entropy(start(party.memory["logits"]), apart.labels())
    grads = torch.autograd.grad(loss, list(start.parameters()))
    expected = {n: p.detach() - 0.5 * g for (n, p), g in zip(start.named_parameters(), grads, strict=True)}
    assert_close(held(run, 1, "combiner"), expected)


def test_a_client_counts_with_all_its_samples():
    run = federated(False)
    party = opened(run, 2)
    party.memory["logits"] = torch.zeros(3, 3, 3)
    work = run.method.local(party, COMBINE, run.ctx)
    next(work)
    with pytest.raises(StopIteration) as ended:
        work.send(Trained())
    assert ended.value.value.meta == {"samples": len(party.train)} == {"samples": 28}


def test_the_run_sgd_settings_do_not_reach_the_combiner():
    run = federated(False)
    run.ctx.training = pf.Training(optimizer="adam", lr=3.0, weight_decay=1.0, clip=0.1, batch_size=2)
    party = opened(run)
    party.memory["logits"] = torch.zeros(2, 3, 3)
    stage = next(run.method.local(party, COMBINE, run.ctx))
    assert stage.steps == 1 and stage.trainable == {"combiner": None}
    assert (stage.training.optimizer, stage.training.lr, stage.training.batch_size) == ("sgd", 1.0, 128)
    assert (stage.training.momentum, stage.training.weight_decay, stage.training.clip) == (0.0, 0.0, None)


def test_fedadam_by_hand():
    run = federated(False, combiner="client", server_lr=0.1, beta_1=0.5, beta_2=0.75)
    a = run.server.models["combiner"]
    a.load_state_dict({"weight": torch.zeros(3, 1), "bias": torch.zeros(1)})

    def replies(*values):
        state = [{"weight": torch.full((3, 1), v), "bias": torch.full((1,), v)} for v in values]
        counts = (10, 30)
        return {c: Message(params={"combiner": state[c]}, meta={"samples": counts[c]}) for c in range(2)}

    run.method.fuse(run.server, replies(4.0, 0.0), COMBINE, run.ctx)  # D = 1/4 · 4 = 1
    first = 0.1 * 0.5 / (0.25**0.5 + 1e-3)
    assert a.bias.item() == pytest.approx(first)
    run.method.fuse(run.server, replies(2 + first, 2 + first), COMBINE, run.ctx)  # D = 2
    m, v = 0.5 * 0.5 + 0.5 * 2, 0.75 * 0.25 + 0.25 * 4
    assert a.bias.item() == pytest.approx(first + 0.1 * m / (v**0.5 + 1e-3))
    assert a.weight.flatten().tolist() == pytest.approx([a.bias.item()] * 3)


@pytest.mark.parametrize("kind", ["mlp", "class", "client"])
def test_without_a_server_step_the_combiner_stays_as_it_starts(kind):
    run, fresh = federated(combiner=kind, server_lr=0.0, rounds=3), federated(False, combiner=kind)
    start = fresh.server.models["combiner"].state_dict()
    assert_equal(run.server.models["combiner"].state_dict(), start)
    assert not torch.equal(held(run, 0, "combiner")[next(iter(start))], next(iter(start.values())))  # clients do move


def test_without_a_server_step_it_is_the_ensemble_of_the_uploads():
    run = federated(combiner="class", server_lr=0.0, rounds=3)
    uploaded = run.method.networks(run.server, run.ctx)
    x = run.test.inputs()
    with torch.no_grad():
        torch.testing.assert_close(run.method.predict(run.server, x, run.ctx), Averaged(uploaded, "logit")(x))


def test_the_server_predicts_with_the_current_combiner_and_is_what_counts():
    run = federated(server_lr=0.5, rounds=3)
    x, y = run.test.inputs(), run.test.labels()
    fused = Combined(run.method.networks(run.server, run.ctx), run.server.models["combiner"])
    right = float((fused(x).argmax(1) == y).float().mean())
    accuracy = run.history[-1]["accuracy"]
    assert accuracy["global"] == accuracy["mean"] == pytest.approx(right)
    start = federated(False).server.models["combiner"].state_dict()
    moved = run.server.models["combiner"].state_dict()
    assert not any(torch.equal(moved[name], tensor) for name, tensor in start.items())
    assert len({line["accuracy"]["global"] for line in run.history}) > 1


def test_bytes_are_the_networks_once_and_the_combiner_in_every_round():
    run = federated(rounds=4)
    sizes = [4 * run.backend.infos[client].parameters for client in range(3)]
    combiner = 4 * floats(run.server.models["combiner"])
    for client in range(3):
        others = [other for other in range(3) if other != client]
        names = "|".join(run.backend.infos[other].architecture for other in others)
        assert run.meter.bytes["up"][client] == sizes[client] + 4 * (combiner + 8)
        assert run.meter.bytes["down"][client] == sum(sizes[o] for o in others) + len(names) + 4 * combiner
    first, *rounds = run.history
    assert first["phase"] == "before" and first["bytes_up"] == sum(sizes)
    assert [line["bytes_up"] for line in rounds] == [3 * (combiner + 8)] * 4


def test_a_site_builds_what_it_does_not_know_by_its_name():
    run = federated(False)
    known = run.ctx.blueprints
    run.ctx.blueprints = {}
    for name in ("mlp:1x8", "cnn:4-8,bn", "mlp:2x12>5"):
        module = build(name.split(">")[0], (1, 8, 8), 3)
        module = pf.models.with_feature_dim(module, 5) if ">" in name else module
        found = network_of(name, shared_state(module), run.ctx)
        assert not found.training
        assert torch.equal(found(X), module.eval()(X))
    with pytest.raises(InputError, match="NotHere"):
        network_of("NotHere", {}, run.ctx)
    run.ctx.blueprints = known


def test_somebodys_missing_network_ends_the_run():
    run = federated(False)
    with pytest.raises(PolyfedError, match="needs the network of client 0, which did not come"):
        run.method.fuse(run.server, {1: Message(), 2: Message()}, UPLOAD, run.ctx)


def test_clients_are_measured_by_their_own_networks():
    run = federated(rounds=1)
    party = run.backend.store.open(1, run.ctx)
    right = (party.main.eval()(run.test.inputs()).argmax(1) == run.test.labels()).float().mean()
    assert run.history[-1]["accuracy"]["own"]["per_client"][1] == pytest.approx(float(right))
    assert not run.method.send(run.server, run.backend.infos[0], pf.core.method.EVALUATE, run.ctx).params


def test_one_client_alone_receives_nothing():
    run = federation(FENS(combiner_rounds=1), models=["mlp:1x8"], clients=1)
    message = run.method.send(run.server, run.backend.infos[0], MODELS, run.ctx)
    assert message.nbytes() == 0
    assert run.backend.store.records[0].memory["logits"].shape[1] == 1


@pytest.mark.parametrize("options", [{"combiner": "tree"}, {"held_out": 1.0}, {"combiner_lr": 0.0}, {"beta_2": 1.0}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        FENS(**options)


def test_networks_that_the_server_can_build_are_needed():
    run = federated(False)
    hidden = {name: replace(blueprint, build=None) for name, blueprint in run.ctx.blueprints.items()}
    found = missing(FENS(), list(run.backend.infos.values()), hidden, None, (1, 8, 8))
    assert found == "architectures that the server can build, but the model of client 0 is known to that client only"
