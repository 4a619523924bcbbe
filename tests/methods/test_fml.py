"""FML: the acceptance properties of its spec."""

import copy
import math

import pytest
import torch
from tests.methods.proxy_problem import (
    FULL,
    MODELS,
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
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.errors import InputError
from polyfed.core.stage import Batch
from polyfed.methods.fml import FML

BATCH = Batch(torch.zeros(1, 1), torch.tensor([0]))
SURE = torch.tensor([[math.log(3.0), 0.0]])  # probabilities 3/4 and 1/4
EVEN = torch.zeros(1, 2)


@pytest.mark.parametrize(("which", "student", "teacher"), [("private", "main", "proxy"), ("meme", "proxy", "main")])
def test_the_losses_by_hand(which, student, teacher):
    nets = {student: Stub(EVEN), teacher: Stub(SURE)}
    method = FML(**{"alpha" if which == "private" else "beta": 0.25})
    divergence = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)  # KL(teacher || student)
    expected = 0.25 * math.log(2.0) + 0.75 * divergence
    assert getattr(method, f"{which}_loss")(nets, BATCH, {}) == pytest.approx(expected, rel=1e-6)


def test_equal_networks_have_nothing_to_teach_each_other():
    nets = {"main": Stub(SURE), "proxy": Stub(SURE)}
    for loss in (FML(alpha=0.0).private_loss, FML(beta=0.0).meme_loss):
        assert loss(nets, BATCH, {}) == 0


def test_one_round_of_one_step_by_hand():
    run = federation(FML(proxy="mlp:1x4", alpha=0.3, beta=0.6), training=FULL, clients=1, models=["mlp:1x8"])
    private, meme = run.ctx.blueprints["mlp:1x8"].build(), start_of("mlp:1x4")
    data = run.backend.store.data[0].train
    x, y = data.inputs(), data.labels()
    for student, teacher, share in ((private, meme, 0.3), (meme, private, 0.6)):
        z = student(x)
        target = F.softmax(teacher(x).detach(), 1)
        mutual = F.kl_div(F.log_softmax(z, 1), target, reduction="batchmean")
        loss = share * F.cross_entropy(z, y) + (1 - share) * mutual
        for parameter, grad in zip(student.parameters(), torch.autograd.grad(loss, student.parameters()), strict=True):
            parameter.data -= 0.1 * grad
    assert_close(held(run, 0), private.state_dict())
    assert_close(held(run, 0, "proxy"), meme.state_dict())
    assert_close(run.server.main.state_dict(), meme.state_dict())


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("training", [SGD, pf.Training(momentum=0.9, clip=0.5, epochs=2, batch_size=8)])
def test_without_mutual_terms_it_is_fedavg_of_memes_and_local_training(weighting, training):
    run = federation(FML(proxy="mlp:1x4", alpha=1.0, beta=1.0, weighting=weighting), 2, training)
    assert_equal(run.server.main.state_dict(), averaged(start_of("mlp:1x4"), 2, training, weighting))
    alone = federation(pf.Local(), 2, training)
    for client in range(3):
        assert_equal(held(run, client), held(alone, client))


def test_memes_alone_travel_and_their_mean_comes_back():
    uniform, weighted = (federation(FML(proxy="cnn:4,bn", weighting=w)) for w in ("uniform", "samples"))
    size = size_of(start_of("cnn:4,bn"))
    for run, more in ((uniform, 0), (weighted, 8)):
        assert run.meter.bytes["down"] == dict.fromkeys(range(3), size)
        assert run.meter.bytes["up"] == dict.fromkeys(range(3), size + more)
        assert {kind.split("/", 2)[2] for kind in run.meter.kinds} == {"params/proxy", *(["meta"] if more else [])}
    shares = [info.samples for info in weighted.backend.infos.values()]
    name = "head.weight"
    each = [held(weighted, client, "proxy")[name] for client in range(3)]
    total = sum(share * tensor for share, tensor in zip(shares, each, strict=True))
    torch.testing.assert_close(weighted.server.main.state_dict()[name], total / sum(shares))
    torch.testing.assert_close(
        uniform.server.main.state_dict()[name], sum(held(uniform, c, "proxy")[name] for c in range(3)) / 3
    )


def test_the_meme_is_measured_as_the_global_model_and_clients_by_their_own():
    run = federation(FML(proxy="mlp:1x4"), 2)
    right = run.server.main(run.test.inputs()).argmax(1) == run.test.labels()
    assert run.history[-1]["accuracy"]["global"] == pytest.approx(float(right.float().mean()))
    own = copy.deepcopy(run.backend.model(0, run.ctx)).eval()
    right = own(run.test.inputs()).argmax(1) == run.test.labels()
    assert run.history[-1]["accuracy"]["per_client"][0] == pytest.approx(float(right.float().mean()))


def test_running_statistics_move_once_a_batch():
    run = federation(FML(proxy="cnn:4,bn"), training=FULL, models=["cnn:4-8,bn"])
    for model in ("main", "proxy"):
        counters = [t for name, t in held(run, 0, model).items() if name.endswith("num_batches_tracked")]
        assert counters and all(int(counter) == 1 for counter in counters)


def test_the_private_networks_stay_at_home():
    run = federation(FML(proxy="mlp:1x4"), 2, models=MODELS)
    assert not any("main" in kind.split("/")[2:] for kind in run.meter.kinds)
    assert not torch.equal(held(run, 0)["head.weight"], held(run, 2)["head.weight"])  # one architecture, two networks


@pytest.mark.parametrize("options", [{"alpha": 1.5}, {"beta": -0.1}, {"weighting": "equal"}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        FML(**options)


def test_an_unknown_proxy_is_refused_before_anything_trains():
    with pytest.raises(InputError, match="mpl"):
        federation(FML(proxy="mpl:1x4"), run=False)
