"""CCVR: the acceptance properties of its spec (F5)."""

import pytest
import torch
from tests.contract.table import synthetic
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.api import prepare
from polyfed.config import Networks
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.prototypes import packed_moments
from polyfed.core.settings import Participation, Settings
from polyfed.core.stage import Batch
from polyfed.methods.ccvr import CCVR
from polyfed.ops.moments import Moments, class_moments, gaussian_samples, merged_moments, pooled_moments, root_of

SGD = pf.Training(epochs=1, batch_size=8, lr=0.05)
FEW = {"samples_per_class": 8, "head_epochs": 2}
HEAD = ("head.weight", "head.bias")
KINDS = ["full", "shared", "diag"]


def federation(method, rounds=1, models=("mlp:1x4",), clients=3, share=1.0, feature_dim=None, training=SGD):
    settings = Settings(rounds, training=training, participation=Participation(share))
    made = prepare(method, synthetic(clients), list(models), settings, Networks(feature_dim=feature_dim))
    made.run()
    return made


# --- moments ---


def covariance_of(features, labels, kind):
    """What numpy would say of all features together."""
    classes = labels.unique()
    each = [features[labels == label] for label in classes]
    if kind == "shared":
        scatter = sum((z - z.mean(0)).T @ (z - z.mean(0)) for z in each)
        return scatter / (len(features) - len(classes))
    full = [z.T.cov() if len(z) > 1 else torch.zeros(z.shape[1], z.shape[1]).double() for z in each]
    return torch.stack([s.diag() if kind == "diag" else s for s in full])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[], [1], [1, 2, 3], [20], [1, 7, 30, 31]])
def test_pooled_moments_are_those_of_all_features_together(kind, cuts):
    rng = torch.Generator().manual_seed(len(cuts))
    features = torch.randn(40, 5, generator=rng, dtype=torch.float64) @ torch.randn(5, 5, generator=rng).double() + 3
    labels = torch.randint(0, 4, (40,), generator=rng) * 2  # class numbers with gaps
    parts = list(zip(features.tensor_split(cuts), labels.tensor_split(cuts), strict=True))
    found = pooled_moments([class_moments(z, y, kind) for z, y in parts], kind)
    assert found.classes.tolist() == sorted(set(labels.tolist()))
    assert found.counts.tolist() == [int((labels == label).sum()) for label in found.classes]
    for label, mean in zip(found.classes, found.means, strict=True):
        torch.testing.assert_close(mean, features[labels == label].mean(0), rtol=0, atol=1e-10)
    torch.testing.assert_close(found.covariance, covariance_of(features, labels, kind), rtol=0, atol=1e-10)


def test_moments_by_hand():
    """Class 0: 1 and 3 at one client, 8 at another. Mean 4; squares 9 + 1 + 16 = 26, by 2: 13."""
    one = class_moments(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0]))
    other = class_moments(torch.tensor([[8.0]]), torch.tensor([0]))
    assert one.means.tolist() == [[2.0]] and one.covariance.tolist() == [[[2.0]]]
    assert other.covariance.tolist() == [[[0.0]]]
    both = pooled_moments([one, other])
    assert both.means.tolist() == [[4.0]] and both.covariance.tolist() == [[[13.0]]] and both.counts.tolist() == [3]


def test_the_root_is_symmetric_and_a_ridge_comes_only_where_it_is_needed():
    definite = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    for ridge in (0.0, 0.5):
        root = root_of(definite, ridge)
        torch.testing.assert_close(root, root.T)
        torch.testing.assert_close(root @ root, definite)
    singular = torch.ones(2, 2)
    torch.testing.assert_close(root_of(singular) @ root_of(singular), singular)
    root = root_of(singular, 0.5)  # mean variance 1
    torch.testing.assert_close(root @ root, singular + 0.5 * torch.eye(2))
    assert root_of(torch.tensor([4.0, 9.0])).tolist() == [2.0, 3.0]
    assert root_of(torch.zeros(2, 2), 0.5).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert root_of(torch.tensor([[1.0, 1.001], [1.001, 1.0]])).isfinite().all()  # an eigenvalue below zero


@pytest.mark.parametrize("kind", KINDS)
def test_virtual_features_have_the_moments_that_they_are_drawn_from(kind):
    first, second = torch.tensor([[4.0, 1.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 9.0]])
    covariance = {"full": torch.stack([first, second]), "shared": first, "diag": torch.tensor([[4.0, 1.0], [1.0, 9.0]])}
    means = torch.tensor([[0.0, 5.0], [-3.0, 0.0]])
    told = Moments(torch.tensor([1, 4]), torch.tensor([9, 9]), means, covariance[kind])
    drawn = gaussian_samples(told, kind, 20_000, torch.Generator().manual_seed(0), 0.0).split(20_000)
    for place, z in enumerate(drawn):
        torch.testing.assert_close(z.mean(0), means[place], rtol=0, atol=0.06)
        wanted = {"full": covariance["full"][place], "shared": first, "diag": covariance["diag"][place].diag()}[kind]
        torch.testing.assert_close(z.T.cov(), wanted, rtol=0, atol=0.25)


@pytest.mark.parametrize("kind", KINDS)
def test_classes_that_nobody_held_keep_their_last_gaussian(kind):
    old = class_moments(torch.tensor([[1.0], [2.0], [7.0]]), torch.tensor([0, 0, 2]), kind)
    new = class_moments(torch.tensor([[5.0], [9.0]]), torch.tensor([1, 0]), kind)
    both = merged_moments(old, new, kind)
    assert both.classes.tolist() == [0, 1, 2] and both.means.flatten().tolist() == [9.0, 5.0, 7.0]
    assert torch.equal(both.covariance, new.covariance) or kind != "shared"
    assert both.covariance.shape[0] == (1 if kind == "shared" else 3)
    assert merged_moments(None, new, kind) is new


# --- the server's form ---


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_head_changes_and_everybody_gets_it(kind):
    ours = federation(CCVR(covariance=kind, **FEW), rounds=2, models=["cnn:4-8,bn"])
    plain = federation(pf.FedAvg(), rounds=2, models=["cnn:4-8,bn"])
    for name, tensor in plain.server.state.items():
        assert torch.equal(ours.server.state[name], tensor) == (name not in HEAD), name
    for name, tensor in ours.server.main.state_dict().items():
        assert name not in ours.server.state or torch.equal(tensor, ours.server.state[name])
    for client in range(3):
        held = ours.backend.store.records[client].states["main"]
        assert all(torch.equal(held[name], ours.server.state[name]) for name in ours.server.state)


def test_the_statistics_are_those_of_all_features_under_the_mean_model():
    run = federation(CCVR(**FEW), models=["cnn:4-8,bn"])
    data = synthetic(3)
    x = torch.cat([samples.inputs() for samples in data.train])
    y = torch.cat([samples.labels() for samples in data.train])
    with torch.no_grad():
        z = run.server.main.eval().features(x)  # the extractor is as it was averaged
    expected = class_moments(z.double(), y)
    found = run.server.memory["statistics"]
    torch.testing.assert_close(found["means"].double(), expected.means, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["covariance"].double(), expected.covariance, rtol=1e-3, atol=1e-6)


def test_the_head_is_trained_on_virtual_features_alone_by_plain_sgd():
    method = CCVR(samples_per_class=5, head_epochs=3, head_lr=0.2, head_batch=100)
    run = federation(CCVR(samples_per_class=0), training=pf.Training(momentum=0.9, weight_decay=0.1, batch_size=3))
    start = {name: run.server.state[name].clone() for name in HEAD}
    statistics = {
        "classes": torch.tensor([0, 2], dtype=torch.uint8),
        "counts": torch.tensor([4, 4], dtype=torch.int32),
        "means": torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]]),
        "covariance": torch.eye(4).expand(2, 4, 4).contiguous(),
    }
    run.ctx.round = 7
    method.fuse(run.server, {0: Message(data=statistics)}, pf.Step("statistics"), run.ctx)
    rng = run.ctx.rng("virtual")
    z = torch.cat([mean + torch.randn(5, 4, generator=rng) for mean in statistics["means"]])
    head = nn.Linear(4, 3)
    with torch.no_grad():
        head.weight.copy_(start["head.weight"])
        head.bias.copy_(start["head.bias"])
    optimizer = torch.optim.SGD(head.parameters(), lr=0.2)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(head(z), torch.tensor([0] * 5 + [2] * 5)).backward()
        optimizer.step()
    torch.testing.assert_close(run.server.state["head.weight"], head.weight.detach())
    torch.testing.assert_close(run.server.state["head.bias"], head.bias.detach())
    assert torch.equal(run.server.main.state_dict()["head.bias"], run.server.state["head.bias"])


@pytest.mark.parametrize(("kind", "each", "once"), [("full", 16, 0), ("diag", 4, 0), ("shared", 0, 16)])
def test_bytes_of_the_servers_form(kind, each, once):
    run = federation(CCVR(covariance=kind, **FEW), rounds=2)
    weights, head = 64 * 4 + 4 + 4 * 3 + 3, 4 * 3 + 3
    for client, samples in enumerate(synthetic(3).train):
        held = sum(count > 0 for count in samples.label_counts(3))
        assert run.meter.bytes["down"][client] == 4 * (2 * weights + weights + head)
        assert run.meter.bytes["up"][client] == 2 * (4 * weights + 8) + 4 * (held * (1 + 4 + each) + once) + held


def test_in_every_round_the_next_model_has_the_calibrated_head():
    run = federation(CCVR(when="every_round", **FEW), rounds=2)
    assert [step.name for step in run.plan.round] == ["main", "statistics"] and not run.plan.after
    weights = 64 * 4 + 4 + 4 * 3 + 3
    assert run.meter.bytes["down"][0] == 2 * 2 * 4 * weights
    first = federation(CCVR(when="every_round", **FEW), rounds=1)
    plain = federation(pf.FedAvg(), rounds=1)
    sent = first.method.send(first.server, first.backend.infos[0], first.plan.round[0], first.ctx).params["main"]
    assert set(sent) == set(plain.server.state)
    assert all(torch.equal(sent[n], plain.server.state[n]) == (n not in HEAD) for n in sent)


# --- the clients' form ---


def test_every_client_keeps_its_extractor_and_fits_its_own_head():
    method = CCVR(form="clients", **FEW)
    models = ["mlp:1x8", "cnn:4-8,bn", "mlp:2x8"]
    ours = federation(method, rounds=2, models=models, feature_dim=4)
    plain = federation(pf.Local(), rounds=2, models=models, feature_dim=4)
    for client in range(3):
        mine, theirs = (run.backend.store.records[client].states["main"] for run in (ours, plain))
        assert all(torch.equal(mine[name], tensor) == (name not in HEAD) for name, tensor in theirs.items())


def test_clients_train_on_draws_of_their_own_from_the_pooled_gaussians():
    run = federation(CCVR(form="clients", **FEW), rounds=1)
    stages = []
    for client in range(2):
        party = run.backend.store.open(client, run.ctx)
        party.inbox = run.method.send(run.server, run.backend.infos[client], run.plan.after[1], run.ctx)
        stages.append(next(run.method.local(party, run.plan.after[1], run.ctx)))
    assert stages[0].data.y.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert not torch.equal(stages[0].data.x, stages[1].data.x)
    assert stages[0].trainable == {"main": HEAD} and stages[0].epochs == 2
    net = {"main": party.main}
    expected = F.cross_entropy(party.main.head(stages[1].data.x), stages[1].data.y)
    torch.testing.assert_close(stages[1].loss(net, Batch(stages[1].data.x, stages[1].data.y), {}), expected)


@pytest.mark.parametrize(("kind", "each", "once"), [("full", 16, 0), ("diag", 4, 0), ("shared", 0, 16)])
@pytest.mark.parametrize("when", ["final", "every_round"])
def test_bytes_of_the_clients_form(when, kind, each, once):
    rounds = 2
    run = federation(CCVR(form="clients", when=when, covariance=kind, **FEW), rounds=rounds)
    times = 1 if when == "final" else rounds
    for client, samples in enumerate(synthetic(3).train):
        held = sum(count > 0 for count in samples.label_counts(3))
        assert run.meter.bytes["up"][client] == times * (4 * (held * (1 + 4 + each) + once) + held)
        assert run.meter.bytes["down"][client] == times * (4 * (3 * (4 + each) + once) + 3)


@pytest.mark.parametrize(
    ("classes", "dim", "gigabytes"), [(10, 980, 46.62), (10, 4096, 807.47), (100, 4096, 825.16), (200, 4096, 844.82)]
)
def test_shared_statistics_have_the_size_of_fedvtcs_cost_table_but_for_one_vector(classes, dim, gigabytes):
    """Its Table 2: 12,000 uploads of (C + 1)·d + d² numbers; here are counts and class numbers in place of a vector.

    The table has 0.01 less for the first two, and for the last (200 classes) this figure in another row.
    """
    means, covariance = torch.zeros(classes, dim, device="meta"), torch.zeros(dim, dim, device="meta")
    numbers = torch.arange(classes)
    message = Message(data=packed_moments(Moments(numbers, numbers, means, covariance), classes))
    assert message.nbytes() == 4 * (classes * (dim + 1) + dim * dim) + classes
    table = message.nbytes() - 5 * classes + 4 * dim
    assert round(12_000 * table / 1e9, 2) == gigabytes


def told(features, labels, kind="full"):
    found = class_moments(features, labels, kind)
    return Message(data=packed_moments(found, 3))


def test_a_class_that_nobody_held_in_a_round_stays_known():
    run, step = federation(CCVR(form="clients", samples_per_class=0)), pf.Step("statistics")
    assert run.server.state == {}  # nothing is averaged
    for labels, known in (([0, 0, 1, 1], [0, 1]), ([2, 2, 1, 1], [0, 1, 2])):
        run.method.fuse(run.server, {0: told(torch.randn(4, 4), torch.tensor(labels))}, step, run.ctx)
        assert run.server.memory["statistics"]["classes"].tolist() == known


def test_a_class_with_one_sample_in_all_is_left_out_unless_the_covariance_is_shared():
    for kind, expected in (("full", [0, 2]), ("shared", [0, 1, 2])):
        run = federation(CCVR(form="clients", covariance=kind, samples_per_class=0))
        replies = {0: told(torch.randn(5, 4), torch.tensor([0, 0, 1, 2, 2]), kind)}
        run.method.fuse(run.server, replies, pf.Step("statistics"), run.ctx)
        assert run.server.memory["statistics"]["classes"].tolist() == expected
        assert len(run.server.memory["statistics"]["means"]) == len(expected)


def test_nothing_is_calibrated_where_no_class_has_a_gaussian():
    run = federation(CCVR(samples_per_class=0))
    before = run.server.state["head.weight"].clone()
    replies = {0: told(torch.ones(1, 4), torch.tensor([1]))}
    CCVR(**FEW).fuse(run.server, replies, pf.Step("statistics"), run.ctx)
    assert torch.equal(run.server.state["head.weight"], before)


@pytest.mark.parametrize(("classes", "count"), [(10, 500), (11, 1000)])
def test_so_many_features_are_drawn_where_nobody_says_how_many(classes, count):
    run = federation(CCVR(samples_per_class=0))
    run.ctx.num_classes = classes
    known = {"classes": torch.tensor([3]), "means": torch.zeros(1, 2), "covariance": torch.eye(2)[None]}
    assert len(CCVR().calibration(known, None, run.ctx).data) == count


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples_per_class": -1}, "samples_per_class"),
        ({"head_epochs": 0}, "head_epochs"),
        ({"head_lr": 0.0}, "head_lr"),
        ({"ridge": -1.0}, "ridge"),
        ({"covariance": "low"}, "covariance"),
        ({"view": "owned"}, "view must stay 'auto'"),
        ({"form": "clients", "pretrain_epochs": 1}, "pretrain_epochs must stay 0"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        CCVR(**options)


def test_what_it_needs_is_told_before_training():
    with pytest.raises(InputError, match=r"one architecture at all clients.*form=clients"):
        federation(CCVR(), models=["mlp:1x4", "mlp:2x4"])
    with pytest.raises(InputError, match="client 0 has 4 features and client 1 has 8"):
        federation(CCVR(form="clients"), models=["mlp:1x4", "mlp:1x8"])
    with pytest.raises(InputError, match="linear layer with a bias, free to be trained, but frozen_head does not"):
        federation(CCVR(), models=[frozen_head])


def frozen_head():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 3))
    model[3].requires_grad_(False)
    return pf.adapt(model, head="3")


@pytest.mark.parametrize(("kind", "shape", "placed"), [("shared", (4, 4), False), ("full", (3, 4, 4), True)])
def test_a_shared_covariance_belongs_to_no_class_where_replies_are_compared(kind, shape, placed):
    run = federation(CCVR(form="clients", covariance=kind, samples_per_class=0))
    features = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    told = packed_moments(class_moments(features, torch.tensor([0, 0, 0, 2, 2, 2]), kind), 3)
    place = run.method.places(run.server, run.backend.infos[0], Message(data=told), run.ctx)["data/covariance"]
    assert place.shape[-len(shape) :] == shape and (place.part is not None) == placed


def test_virtual_features_have_the_ridge_where_a_class_has_no_spread():
    run = federation(CCVR(**FEW))
    covariance = torch.diag(torch.tensor([4.0, 0.0, 0.0, 0.0]))  # a mean variance of 1
    told = {"classes": torch.tensor([1]), "means": torch.full((1, 4), 5.0), "covariance": covariance[None]}
    stage = CCVR(samples_per_class=500, ridge=0.25).calibration(told, None, run.ctx)
    flat = stage.data.inputs()[:, 1:]  # 1500 numbers with a standard deviation of sqrt(0.25 · 1)
    assert float(flat.mean()) == pytest.approx(5.0, abs=0.05)
    assert float(flat.std()) == pytest.approx(0.5, rel=0.1)
