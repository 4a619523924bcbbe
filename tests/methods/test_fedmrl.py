"""FedMRL: the acceptance properties of its spec."""

import math

import pytest
import torch
from tests.methods.proxy_problem import (
    FULL,
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
from polyfed.core.errors import InputError
from polyfed.core.stage import Batch
from polyfed.methods.fedmrl import FedMRL


def test_the_worked_example():
    projector = nn.Linear(3, 2)
    projector.load_state_dict({"weight": torch.tensor([[1.0, 0, 1], [0, 1, 0]]), "bias": torch.zeros(2)})
    common = Stub(torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([[1.0]]))
    private = Stub(torch.tensor([[math.log(7.0), 0.0]]), torch.tensor([[2.0, 3.0]]))
    nets = {"proxy": common, "main": private, "projector": projector}
    batch = Batch(torch.zeros(1, 1), torch.tensor([0]))
    loss = FedMRL(m_g=2.0, m_k=3.0).loss(nets, batch, {})
    assert private.seen[0].tolist() == [[4.0, 2.0]] and common.seen[0].tolist() == [[4.0]]
    assert float(loss) == pytest.approx(2 * math.log(4.0) + 3 * math.log(8 / 7), rel=1e-6)


def test_one_round_of_one_step_by_hand():
    run = federation(FedMRL(proxy="mlp:1x4"), training=FULL, clients=1, models=["mlp:1x8"])
    own, common = run.ctx.blueprints["mlp:1x8"].build(), start_of("mlp:1x4")
    fresh = federation(FedMRL(proxy="mlp:1x4"), clients=1, models=["mlp:1x8"], run=False)
    fresh.backend.store.prepare([0], fresh.ctx)
    projector = nn.Linear(4 + 8, 8)
    projector.load_state_dict(held(fresh, 0, "projector"))
    data = run.backend.store.data[0].train
    x, y = data.inputs(), data.labels()
    q = projector(torch.cat([common.features(x), own.features(x)], 1))
    loss = F.cross_entropy(common.head(q[:, :4]), y) + F.cross_entropy(own.head(q), y)
    loss.backward()
    for name, module in (("main", own), ("proxy", common), ("projector", projector)):
        expected = {n: p.detach() - 0.1 * p.grad for n, p in module.named_parameters()}
        assert_close(held(run, 0, name), expected)


def test_a_client_predicts_with_the_common_model_that_it_would_receive():
    run = federation(FedMRL(proxy="mlp:1x4"), models=["mlp:1x8"])
    x = run.test.inputs()
    own = run.ctx.blueprints["mlp:1x8"].build()
    own.load_state_dict(held(run, 1))
    projector = nn.Linear(12, 8)
    projector.load_state_dict(held(run, 1, "projector"))
    with torch.no_grad():
        logits = own.head(projector(torch.cat([run.server.main.features(x), own.features(x)], 1)))
    right = (logits.argmax(1) == run.test.labels()).float().mean()
    assert run.history[-1]["accuracy"]["per_client"][1] == pytest.approx(float(right))
    assert run.history[-1]["accuracy"]["loss"] != 0 and run.history[-1]["accuracy"]["global"] is None


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_reading_the_common_features_only_is_fedavg_of_the_small_model(weighting):
    training = pf.Training(epochs=2, batch_size=8, lr=0.05, momentum=0.9)
    method = FedMRL(proxy="mlp:1x4", projector="common", m_k=0.0, weighting=weighting)
    run = federation(method, 2, training)
    assert_equal(run.server.main.state_dict(), averaged(start_of("mlp:1x4"), 2, training, weighting))


@pytest.mark.parametrize("projector", ["private", "common"])
def test_a_fixed_projector_stays(projector):
    run = federation(FedMRL(proxy="mlp:1x4", projector=projector), models=["mlp:1x8"])
    state = held(run, 0, "projector")
    zero, one = torch.zeros(8, 4), torch.eye(8)
    expected = torch.cat([zero, one], 1) if projector == "private" else torch.cat([one, zero], 1)
    assert torch.equal(state["weight"], expected) and not state["bias"].any()


def test_the_projector_is_each_clients_own_and_kept():
    one, two = (federation(FedMRL(proxy="mlp:1x4"), rounds, models=["mlp:1x8"]) for rounds in (1, 2))
    assert not torch.equal(held(one, 0, "projector")["weight"], held(one, 1, "projector")["weight"])
    assert not torch.equal(held(one, 0, "projector")["weight"], held(two, 0, "projector")["weight"])
    assert not any("projector" in kind for kind in two.meter.kinds)


@pytest.mark.parametrize("proxy", ["mlp:1x4", "cnn:4,bn"])
@pytest.mark.parametrize("models", [["mlp:1x8"], ["mlp:2x16", "cnn:4-8"]])
def test_bytes_are_those_of_the_small_model_whatever_the_private_ones_are(models, proxy):
    run = federation(FedMRL(proxy=proxy), models=models)
    size = size_of(start_of(proxy))
    assert run.meter.bytes["down"] == dict.fromkeys(range(3), size)
    assert run.meter.bytes["up"] == dict.fromkeys(range(3), size + 8)


def test_the_small_models_features_can_be_made_fewer():
    run = federation(FedMRL(proxy="mlp:1x30", d1=3), models=["mlp:1x8"])
    assert run.server.main.feature_dim == 3
    assert held(run, 0, "projector")["weight"].shape == (8, 11)
    assert run.meter.bytes["down"][0] == 4 * (64 * 30 + 30 + 30 * 3 + 3 + 3 * 3 + 3)


def test_the_small_model_may_have_as_many_features_as_the_private_ones():
    run = federation(FedMRL(proxy="mlp:1x8"), models=["mlp:1x8"])
    assert held(run, 0, "projector")["weight"].shape == (8, 16)


def test_networks_without_features_are_refused():
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(InputError, match=r"fedmrl needs a model with features\(x\) and head\(z\), but client 0 has"):
        federation(FedMRL(proxy="mlp:1x4"), models=[lambda: plain], run=False)


def test_more_common_than_private_features_are_refused():
    with pytest.raises(InputError, match=r"has \(16\), but client 0 has mlp:1x8 with 8: set a smaller d1"):
        federation(FedMRL(proxy="mlp:1x16"), models=["mlp:1x8"], run=False)


@pytest.mark.parametrize("options", [{"m_g": 0.0, "m_k": 0.0}, {"m_g": -1.0}, {"d1": 0}, {"projector": "none"}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        FedMRL(**options)
