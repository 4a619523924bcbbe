"""pFedAFM: the acceptance properties of its spec."""

import math

import pytest
import torch
from tests.methods.proxy_problem import FULL, Stub, assert_close, assert_equal, federation, held
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.errors import InputError
from polyfed.core.stage import Batch
from polyfed.methods.pfedafm import Mixing, PFedAFM

SAME = ["mlp:1x8", "mlp:2x8"]  # features of one size
PROXY = {"proxy": "mlp:1x8"}
SIZE = 4 * (64 * 8 + 8)  # without a head


def start(method, model="mlp:1x8"):
    """A client as it begins: private network, common extractor."""
    run = federation(method, models=[model], clients=1, run=False)
    run.backend.store.prepare([0], run.ctx)
    party = run.backend.store.open(0, run.ctx)
    return run, party


def test_the_mixture_by_hand():
    mixing = Mixing(2, 0.0)
    mixing.a.data = torch.tensor([0.25, 1.0])
    own, common = torch.tensor([[4.0, 5.0]]), torch.tensor([[8.0, 9.0]])
    assert mixing(own, common).tolist() == [[7.0, 5.0]]
    head = Stub(torch.tensor([[math.log(3.0), 0.0]]), own)

    class Handle(Stub):
        def call(self, name, *inputs):
            return mixing(*inputs)

    nets = {"main": head, "proxy": Stub(common), "mixing": Handle()}
    loss = PFedAFM().mixed_loss(nets, Batch(torch.zeros(1, 1), torch.tensor([1])), {})
    assert head.seen[0].tolist() == [[7.0, 5.0]] and float(loss) == pytest.approx(math.log(4.0))
    PFedAFM().common_loss(nets, Batch(torch.zeros(1, 1), torch.tensor([1])), {})
    assert head.seen[1].tolist() == [[8.0, 9.0]]


def test_one_round_of_one_step_in_each_phase_by_hand():
    method = PFedAFM(**PROXY, mixing=0.6, mixing_lr=0.02)
    run = federation(method, training=FULL, models=["mlp:1x8"], clients=1)
    fresh, party = start(method)
    own, common, mixing = party.main, party.models["proxy"], party.models["mixing"]
    data = fresh.backend.store.data[0].train
    x, y = data.inputs(), data.labels()

    def step(loss, module, rate):
        for parameter, grad in zip(module.parameters(), torch.autograd.grad(loss, module.parameters()), strict=True):
            parameter.data = parameter.data - rate * grad

    def mixed():
        return F.cross_entropy(own.head(mixing(own.features(x), common(x).detach())), y)

    step(mixed(), own, 0.1)
    step(mixed(), mixing, 0.02)
    step(F.cross_entropy(own.head(common(x)), y), common, 0.1)
    assert_close(held(run, 0), own.state_dict())
    assert_close(held(run, 0, "mixing"), mixing.state_dict())
    assert_close(held(run, 0, "proxy"), common.state_dict())
    assert mixing.a.min() < 0.6 < mixing.a.max()


def test_the_mixing_vector_stays_within_its_bounds():
    for begin in (0.0, 0.5, 1.0):
        run = federation(PFedAFM(**PROXY, mixing=begin, mixing_lr=100.0), models=SAME)
        values = torch.cat([held(run, client, "mixing")["a"] for client in range(3)])
        assert values.min() == 0 and values.max() == 1


def test_each_phase_leaves_the_other_part_alone():
    whole, first = (federation(PFedAFM(**PROXY, mixing=0.5, common_epochs=e), models=["cnn:4-8,bn"]) for e in (3, 0))
    for client in range(3):
        assert_equal(held(whole, client), held(first, client))  # the second phase: f_k, h_k and a
        assert_equal(held(whole, client, "mixing"), held(first, client, "mixing"))
    begun, _ = start(PFedAFM(**PROXY), "cnn:4-8,bn")
    assert_equal(first.server.main.state_dict(), begun.server.main.state_dict())  # the first phase: g
    longer = federation(PFedAFM(**PROXY, mixing=0.5), models=["cnn:4-8,bn"])  # one epoch, as the run says
    assert not torch.equal(
        longer.server.main.state_dict()["stem.linear.weight"], whole.server.main.state_dict()["stem.linear.weight"]
    )
    changed = whole.server.main.state_dict()
    assert not any(torch.equal(tensor, changed[name]) for name, tensor in begun.server.main.state_dict().items())


def test_a_frozen_extractor_keeps_its_statistics_and_the_private_ones_move_once_a_batch():
    run = federation(PFedAFM(proxy="cnn:8,bn", common_epochs=0), training=FULL, models=["cnn:4-8,bn"])
    counters = {m: [int(t) for n, t in held(run, 0, m).items() if "tracked" in n] for m in ("main", "proxy")}
    assert set(counters["main"]) == {1} and set(counters["proxy"]) == {0}


def test_with_a_at_zero_the_head_learns_on_common_features():
    method = PFedAFM(**PROXY, mixing=0.0, mixing_lr=0.0, common_epochs=0)
    run = federation(method, training=FULL, models=["mlp:1x8"], clients=1)
    fresh, party = start(method)
    data = fresh.backend.store.data[0].train
    z = party.models["proxy"](data.inputs()).detach()
    loss = F.cross_entropy(party.main.head(z), data.labels())
    grads = torch.autograd.grad(loss, party.main.head.parameters())
    expected = {n: t.clone() for n, t in party.main.state_dict().items()}
    expected["head.weight"] -= 0.1 * grads[0]
    expected["head.bias"] -= 0.1 * grads[1]
    assert_close(held(run, 0), expected)
    assert torch.equal(held(run, 0)["stem.linear.weight"], expected["stem.linear.weight"])


@pytest.mark.parametrize("training", [pf.Training(momentum=0.9, epochs=2, batch_size=8, clip=0.3), FULL])
def test_with_a_fixed_at_one_it_is_local_training(training):
    run = federation(PFedAFM(**PROXY, mixing_lr=0.0), 2, training, SAME)
    alone = federation(pf.Local(), 2, training, SAME)
    for client in range(3):
        assert_equal(held(run, client), held(alone, client))
    assert run.history[-1]["accuracy"]["per_client"] == alone.history[-1]["accuracy"]["per_client"]


def test_a_client_predicts_with_the_common_extractor_that_it_would_receive():
    run = federation(PFedAFM(**PROXY, mixing=0.3, mixing_lr=0.0), models=["mlp:1x8"])
    own = run.ctx.blueprints["mlp:1x8"].build()
    own.load_state_dict(held(run, 2))
    x = run.test.inputs()
    with torch.no_grad():
        logits = own.head(0.3 * own.features(x) + 0.7 * run.server.main(x))
    right = (logits.argmax(1) == run.test.labels()).float().mean()
    assert run.history[-1]["accuracy"]["per_client"][2] == pytest.approx(float(right))
    assert run.history[-1]["accuracy"]["global"] is None


def test_the_extractor_alone_travels_and_its_weighted_mean_comes_back():
    run = federation(PFedAFM(**PROXY), models=SAME)
    assert run.meter.bytes["down"] == dict.fromkeys(range(3), SIZE)
    assert run.meter.bytes["up"] == dict.fromkeys(range(3), SIZE + 8)
    shares = [info.samples for info in run.backend.infos.values()]
    total = sum(n * held(run, c, "proxy")["stem.linear.weight"] for c, n in enumerate(shares))
    torch.testing.assert_close(run.server.main.state_dict()["stem.linear.weight"], total / sum(shares))


def test_the_extractor_gets_features_of_the_clients_size():
    run = federation(PFedAFM(proxy="mlp:1x5"), models=SAME)
    assert run.meter.bytes["down"][0] == 4 * (64 * 5 + 5 + 5 * 8 + 8)


def test_clients_with_features_of_several_sizes_are_refused():
    with pytest.raises(InputError, match="features of the same size"):
        federation(PFedAFM(), models=["mlp:1x8", "mlp:1x9"], run=False)


@pytest.mark.parametrize("options", [{"mixing": 1.5}, {"mixing_lr": -0.1}, {"common_epochs": -1}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        PFedAFM(**options)


def test_noise_is_planned_for_all_epochs_on_own_samples():
    assert PFedAFM(common_epochs=2).own_epochs(3, 5) == 25 and PFedAFM().own_epochs(3, 5) == 30
