"""FedGD with TARGET's generator: the acceptance properties of its spec."""

import pytest
import torch
from tests.contract.table import synthetic
from torch.nn import functional as F

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.distill import distill_by
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.nets import Net
from polyfed.core.party import load_state, state_of
from polyfed.core.samples import unlabeled
from polyfed.core.settings import Settings
from polyfed.core.stage import Batch
from polyfed.core.statistics import distances_to_statistics
from polyfed.core.uploads import ensemble_logits, uploaded_copies
from polyfed.methods.fedgd import FedGD
from polyfed.models import build
from polyfed.models.generators import Noise

SMALL = {"noise_dim": 4, "width": 2, "synthesis_batch": 6, "generator_steps": 2, "syntheses": 3, "warm_up": 1}
SMALL |= {"distill_steps": 2}
WIDTHS = ("cnn:4,bn@1", "cnn:4,bn@0.5")
TRAINING = pf.Training(epochs=1, batch_size=8, lr=0.05)


def federation(method, models=WIDTHS, rounds=1, clients=2):
    return prepare(method, synthetic(clients), list(models), Settings(rounds, training=TRAINING))


def uploads(run, seeds=(1, 2)):
    """Replies of networks with other weights and statistics."""
    found = {}
    for client, seed in enumerate(seeds):
        torch.manual_seed(seed)
        initial = run.ctx.blueprints[run.ctx.infos[client].architecture].initial
        state = {n: torch.rand(t.shape) + 0.1 for n, t in initial.items() if t.is_floating_point()}
        found[client] = Message({"main": state}, {}, {"samples": 10})
    return found


def network(run, client, reply):
    module = build(run.ctx.infos[client].architecture, (1, 8, 8), 3)
    load_state(module, reply.params["main"])
    return module.eval()


def watched(run, replies, number=0):
    """Make images and return them with the stage that made them, and its networks."""
    seen = []
    real = run.ctx.run_stage
    run.ctx.run_stage = lambda stage, party, name: (seen.append((stage, dict(party.models))), real(stage, party, name))[
        1
    ]
    run.ctx.round = 1
    images = run.method.synthesize(run.server, uploaded_copies(replies, run.ctx), number, run.ctx)
    run.ctx.run_stage = real
    return images, *seen[0]


def test_the_distance_to_statistics_by_hand():
    norm = torch.nn.BatchNorm2d(2).eval()
    norm.running_mean.copy_(torch.tensor([1.0, 0.0]))
    norm.running_var.copy_(torch.tensor([4.0, 1.0]))
    x = torch.zeros(2, 2, 1, 2)
    x[:, 0] = torch.tensor([[1.0, 3.0], [1.0, 3.0]]).unsqueeze(1)  # mean 2, variance 1
    x[0, 1], x[1, 1] = 3.0, 9.0  # mean 6, variance 9
    with distances_to_statistics([norm]) as found:
        norm(x)
    expected = torch.tensor([1.0, 6.0]).norm() + torch.tensor([-3.0, 8.0]).norm()
    torch.testing.assert_close(found, [expected])
    norm(x)
    assert len(found) == 1  # nobody looks any more


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("weights", [(10.0, 0.5, 1.0), (0.0, 2.0, 3.0), (1.0, 0.0, 0.0)])
def test_the_generators_loss_by_hand(weights, number):
    on_bn, on_labels, on_student = weights
    method = FedGD(**SMALL, bn_weight=on_bn, label_weight=on_labels, adversarial_weight=on_student)
    run = federation(method)
    replies = uploads(run)
    torch.manual_seed(5)
    for parameter in run.server.main.parameters():  # a student that agrees with the teacher on some images
        torch.nn.init.uniform_(parameter, -1, 1)
    _, stage, models = watched(run, replies, number)
    labels = stage.data.y
    with distances_to_statistics(
        [module for name, module in models.items() if name.startswith("teacher/")]
    ) as distances:
        nets = {name: Net(module) for name, module in models.items()}
        stage.loss.keywords["distances"] = distances
        found = stage.loss(nets, Batch(torch.zeros(6, 1), labels), stage.aux)
    images = models["generator"](models["noise"](labels)).detach()
    teachers = [network(run, client, reply) for client, reply in replies.items()]
    with distances_to_statistics(teachers) as by_hand:
        teacher = (teachers[0](images) + teachers[1](images)) / 2
    student = run.server.main.eval()(images)
    agree = student.argmax(1) == teacher.argmax(1)
    p, q = teacher.softmax(1), student.softmax(1)
    apart = (p * (p / q).log()).sum(1)
    expected = on_labels * F.cross_entropy(teacher, labels) + on_bn * sum(by_hand) / 2
    if number >= 1:  # after the warm-up
        expected = expected - on_student * (agree * apart).sum() / 6
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Fixed:
    """A network that gives the same logits whatever it sees."""

    def __init__(self, logits):
        self.logits = torch.tensor(logits)

    def eval(self):
        return self

    def __call__(self, x):
        return self.logits


def test_only_images_on_which_student_and_teacher_agree_count_against_the_student():
    method = FedGD(**SMALL, bn_weight=0.0, label_weight=0.0)
    nets = {
        "generator": lambda z: z,
        "noise": lambda x: x,
        "teacher/0": Fixed([[4.0, 0.0], [0.0, 2.0]]),
        "teacher/1": Fixed([[0.0, 0.0], [2.0, 8.0]]),
        "student": Fixed([[1.0, 0.0], [1.0, 0.0]]),
    }
    found = method.synthesis_loss(nets, Batch(torch.zeros(2, 1), torch.tensor([0, 1])), {"adversarial": 3.0}, [])
    p, q = torch.tensor([2.0, 0.0]).softmax(0), torch.tensor([1.0, 0.0]).softmax(0)  # of the first image
    torch.testing.assert_close(found, -3 * (p * (p / q).log()).sum() / 2)  # they do not agree on the second


def test_making_images_moves_the_generator_and_no_classifier():
    run = federation(FedGD(**SMALL))
    replies = uploads(run)
    generator = {n: t.clone() for n, t in state_of(run.server.models["generator"]).items() if t.is_floating_point()}
    held = [state_of(run.server.main), run.server.state, *(reply.params["main"] for reply in replies.values())]
    kept = [{name: t.clone() for name, t in state.items()} for state in held]
    images, stage, models = watched(run, replies, number=2)
    for place, reply in replies.items():
        teacher = state_of(models[f"teacher/{place}"])
        assert all(torch.equal(teacher[name], t) for name, t in reply.params["main"].items())
    assert images.shape == (6, 1, 8, 8) and not images.requires_grad
    now = state_of(run.server.models["generator"])
    assert not any(torch.equal(now[name], t) for name, t in generator.items() if name.endswith("weight"))
    assert all(torch.equal(state[n], t) for state, before in zip(held, kept, strict=True) for n, t in before.items())
    # Images are those of the last step: all of them from the trained generator and the trained noise.
    torch.testing.assert_close(images, models["generator"](models["noise"](images)).detach())
    drawn = torch.randn(6, 4, generator=run.ctx.rng("synthesis-noise/2"))
    moved = (models["noise"](images) - drawn).abs().max()
    assert 0.005 < moved < 0.03  # two steps of noise_lr = 0.01
    assert stage.training.lr == 2e-3 and stage.steps == 2 and not stage.shuffle
    assert stage.data.y.min() >= 0 and stage.data.y.max() < 3


def test_without_its_weight_the_student_plays_no_part_and_a_teacher_like_it_gives_nothing():
    run = federation(FedGD(**SMALL, adversarial_weight=0.0))
    replies = uploads(run)
    _, stage, models = watched(run, replies, number=2)
    nets = {name: Net(module) for name, module in models.items() if name != "student"}
    assert stage.loss(nets, Batch(torch.zeros(6, 1), stage.data.y), stage.aux).isfinite()
    run = federation(FedGD(**SMALL, bn_weight=0.0, label_weight=0.0), WIDTHS[:1])
    (reply,) = uploads(run, (1,)).values()
    load_state(run.server.main, reply.params["main"])
    _, stage, models = watched(run, {0: reply}, number=2)
    nets = {name: Net(module) for name, module in models.items()}
    assert stage.loss(nets, Batch(torch.zeros(6, 1), stage.data.y), stage.aux).abs() < 1e-6


def test_the_ensemble_is_the_mean_of_logits():
    run = federation(FedGD(**SMALL))
    replies = uploads(run)
    images = torch.randn(5, 1, 8, 8)
    expected = sum(network(run, client, reply)(images) for client, reply in replies.items()) / 2
    torch.testing.assert_close(ensemble_logits(uploaded_copies(replies, run.ctx), images), expected.detach())


def test_the_student_learns_on_the_pool_after_the_warm_up_and_goes_back(monkeypatch):
    run = federation(FedGD(**SMALL))
    seen = []

    def noted(method, student, data, targets, ctx, name):
        seen.append((name, len(data), targets.shape))
        torch.testing.assert_close(targets, ensemble_logits(uploaded_copies(replies, ctx), data.x))
        return distill_by(method, student, data, targets, ctx, name=name)

    monkeypatch.setattr("polyfed.methods.fedgd.distill_by", noted)
    replies = uploads(run)
    run.ctx.round = 1
    before = {name: t.clone() for name, t in run.server.state.items()}
    run.method.refine(run.server, replies, run.ctx)
    assert seen == [("distill/1", 12, (12, 3)), ("distill/2", 18, (18, 3))]
    own = state_of(run.server.main)
    assert all(torch.equal(own[name], t) and not torch.equal(t, before[name]) for name, t in run.server.state.items())
    run.ctx.round = 2
    run.method.refine(run.server, replies, run.ctx)
    assert [rows for _, rows, _ in seen] == [12, 18, 12, 18]  # images of an earlier round are gone


def test_networks_without_batchnorm_have_no_statistics_to_be_near_to():
    run = federation(FedGD(**SMALL, label_weight=0.5, bn_weight=10.0), ("mlp:1x8@1", "mlp:1x8@0.5"))
    _, stage, models = watched(run, uploads(run))
    nets = {name: Net(module) for name, module in models.items()}
    found = stage.loss(nets, Batch(torch.zeros(6, 1), stage.data.y), stage.aux)
    images = models["generator"](models["noise"](stage.data.y)).detach()
    teacher = (models["teacher/0"](images) + models["teacher/1"](images)) / 2
    torch.testing.assert_close(found, 0.5 * F.cross_entropy(teacher, stage.data.y))


def test_distillation_brings_the_student_nearer():
    run = federation(FedGD(**SMALL | {"distill_steps": 60}), ("mlp:1x8@1", "mlp:1x8@0.5"))
    replies = uploads(run)
    images = torch.randn(40, 1, 8, 8)
    targets = ensemble_logits(uploaded_copies(replies, run.ctx), images)
    data = unlabeled(images)

    def distance():
        return 400 * F.kl_div(
            (run.server.main(images) / 20).log_softmax(1), (targets / 20).softmax(1), reduction="batchmean"
        )

    before = distance().item()
    still = distill_by(FedGD(**SMALL, distill_lr=1e-12), run.server.main, data, targets, run.ctx)
    assert still == pytest.approx(before, rel=1e-3)  # T = 20
    loss = distill_by(run.method, run.server.main, data, targets, run.ctx, name="distill/0")
    assert distance() < 0.5 * before and loss < before


def test_bytes_are_heterofls():
    ours, plain = (federation(method) for method in (FedGD(**SMALL), pf.HeteroFL(static_bn=False)))
    ours.run(), plain.run()
    assert ours.meter.bytes == plain.meter.bytes


def test_noise_moves_at_its_own_speed():
    drawn = torch.randn(3, 2)
    noise = Noise(drawn, 5.0)
    torch.testing.assert_close(noise(drawn), drawn)
    with torch.no_grad():
        noise.values.add_(0.1)
    torch.testing.assert_close(noise(drawn), drawn + 0.5)


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"warm_up must be below syntheses \(10\), got 20"):
        FedGD(warm_up=20)  # the released preset
    with pytest.raises(InputError, match="synthesis_batch must be at least 2"):
        FedGD(synthesis_batch=1)
    for options in ({"static_bn": True}, {"buffers": "local"}):
        with pytest.raises(InputError, match="statistics of uploaded networks: set static_bn=false"):
            federation(FedGD(**options))
    federation(FedGD(static_bn=True), ("mlp:1x8@1", "mlp:1x8@0.5"))  # without BatchNorm there is nothing to lack
