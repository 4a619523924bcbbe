"""Acceptance properties of FedProto (specification F1)."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.build import make_blueprint
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.nets import Net
from polyfed.core.party import ClientInfo, Context, Party, PartyData
from polyfed.core.prototypes import (
    class_means,
    class_numbers,
    class_sums,
    mean_prototypes,
    merged,
    packed_means,
    spread,
)
from polyfed.core.rng import SERVER
from polyfed.core.stage import Batch
from polyfed.methods.fedproto import FedProto
from polyfed.models import build


def means_of(model, samples):
    party = Party(0, ClientInfo(0, len(samples), "m"), PartyData(samples))
    party.models["main"] = model
    return class_means(party, Context(0, 1, 1, pf.Training(), 3, (5,), 1))


def packed(values, classes, counts):
    return {
        "prototypes": torch.tensor(values),
        "classes": torch.tensor(classes, dtype=torch.uint8),
        "counts": torch.tensor(counts, dtype=torch.int32),
    }


def clients(sizes=(12, 20), classes=3, seed=0):
    rng = np.random.default_rng(seed)
    made = [(rng.normal(size=(n, 5)).astype(np.float32), rng.integers(0, classes, n)) for n in sizes]
    return pf.Clients.from_parts(made, test=made[0], num_classes=classes, normalize=False)


def test_prototypes_average_over_their_holders():
    replies = [packed([[1.0, 1.0], [4.0, 0.0]], [0, 1], [3, 1]), packed([[8.0, 4.0], [5.0, 5.0]], [1, 2], [3, 2])]
    by_samples = mean_prototypes(replies, 4)
    assert by_samples["classes"].tolist() == [0, 1, 2]
    assert by_samples["prototypes"].tolist() == [[1.0, 1.0], [7.0, 3.0], [5.0, 5.0]]
    assert mean_prototypes(replies, 4, "uniform")["prototypes"][1].tolist() == [6.0, 2.0]


def test_a_class_without_holders_keeps_its_prototype():
    old, new = packed([[1.0], [2.0]], [0, 2], [1, 1]), packed([[9.0]], [2], [1])
    both = merged(old, new, 3)
    assert both["classes"].tolist() == [0, 2]
    assert both["prototypes"].tolist() == [[1.0], [9.0]]


def test_the_global_prototype_is_the_mean_over_all_samples_of_a_class():
    data = clients()
    model = build("mlp:1x8", (5,), 3).eval()
    replies = [means_of(model, samples) for samples in data.train]
    x = torch.cat([s.inputs() for s in data.train])
    y = torch.cat([s.labels() for s in data.train])
    full, known = spread(mean_prototypes(replies, 3), 3, 8)
    for label in range(3):
        assert torch.allclose(full[label], model.features(x[y == label]).mean(0), atol=1e-6)
    assert known.tolist() == [1, 1, 1]


def test_bytes_are_those_of_the_formula():
    data = clients()
    result = pf.run(FedProto(), data, ["mlp:1x8"], rounds=2)
    held = [int((np.array(s.label_counts(3)) > 0).sum()) for s in data.train]
    for client, classes in enumerate(held):
        assert result.cost.bytes["up"][client] == 2 * (4 * (classes * 8 + classes) + classes)
        assert result.cost.bytes["down"][client] == 4 * 3 * 8 + 3  # nothing in the first round


def test_the_term_vanishes_at_the_prototype_and_for_unknown_classes():
    model = build("mlp:1x8", (5,), 3)
    x, y = torch.randn(4, 5), torch.tensor([0, 0, 1, 2])
    batch = Batch(x, y)
    method, plain = FedProto(lam=3.0), FedProto(lam=0.0)
    features = model.features(x).detach()
    base = plain.loss({"main": Net(model)}, batch, {})
    unknown = {"prototypes": torch.randn(3, 8), "known": torch.zeros(3)}
    assert torch.equal(method.loss({"main": Net(model)}, batch, unknown), base)
    at = {"prototypes": torch.stack([features[0], features[2], features[3]]), "known": torch.ones(3)}
    same = Batch(x[[0, 2, 3]], y[[0, 2, 3]])
    assert torch.allclose(
        method.loss({"main": Net(model)}, same, at), plain.loss({"main": Net(model)}, same, {}), atol=1e-7
    )


def test_the_term_is_the_mean_square_over_batch_and_coordinates():
    model = build("mlp:1x8", (5,), 3)
    x, y = torch.randn(4, 5), torch.tensor([0, 0, 1, 2])
    target = torch.randn(3, 8)
    aux = {"prototypes": target, "known": torch.tensor([1.0, 1.0, 0.0])}
    with_term = FedProto(lam=2.0).loss({"main": Net(model)}, Batch(x, y), aux)
    base = FedProto(lam=0.0).loss({"main": Net(model)}, Batch(x, y), aux)
    squares = (model.features(x) - target[y]).pow(2)
    squares[3] = 0
    assert torch.allclose(with_term - base, 2.0 * squares.mean(), atol=1e-6)
    assert torch.equal(FedProto(lam=2.0).collecting_loss({"main": Net(model)}, Batch(x, y), aux)[0], with_term)


def test_at_its_prototype_a_feature_is_not_pulled():
    """The gradient is that of cross-entropy alone, bit for bit; away from it, it is not."""
    model = build("mlp:1x8", (5,), 3)
    x, y = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), torch.arange(3)
    at = model.features(x).detach()

    def slope(lam, prototypes):
        aux = {"prototypes": prototypes, "known": torch.ones(3)}
        loss = FedProto(lam=lam).loss({"main": Net(model)}, Batch(x, y), aux)
        return torch.autograd.grad(loss, model.stem.linear.weight)[0]

    assert torch.equal(slope(3.0, at), slope(0.0, at))
    assert not torch.allclose(slope(3.0, at + 1), slope(0.0, at), atol=1e-3)


def test_the_prototypes_of_a_single_client_are_the_global_ones():
    data = clients(sizes=(12,))
    result = pf.run(FedProto(), data, ["mlp:1x8"], rounds=1)
    alone = means_of(result.models[0].eval(), data.train[0])
    found = result.server.memory["prototypes"]
    assert found["classes"].tolist() == alone["classes"].tolist() == [0, 1, 2]
    torch.testing.assert_close(found["prototypes"], alone["prototypes"])


def test_there_is_no_pull_in_the_first_round_and_one_in_the_second():
    data, training = clients(), pf.Training(epochs=2, batch_size=8, lr=0.1)
    for rounds, equal in ((1, True), (2, False)):
        ours, alone = (pf.run(m, data, ["mlp:1x8"], rounds, training) for m in (FedProto(lam=5.0), pf.Local()))
        for client in (0, 1):
            mine, own = (run.models[client].state_dict() for run in (ours, alone))
            assert all(torch.equal(mine[name], tensor) for name, tensor in own.items()) == equal


@pytest.mark.parametrize(
    ("classes", "dim", "gigabytes"), [(10, 980, 0.94), (10, 4096, 3.93), (100, 4096, 39.32), (200, 4096, 78.64)]
)
def test_prototypes_have_the_size_of_fedvtcs_cost_table(classes, dim, gigabytes):
    """Its Table 2: 12,000 messages each way. Class numbers and counts, which it leaves out, come on top here."""
    told = packed([0.0], list(range(classes)), [1] * classes) | {"prototypes": torch.zeros(classes, dim)}
    server = Party(SERVER, None, PartyData())
    FedProto().fuse(server, {0: Message(data=told)}, Step(), context(classes, dim))
    down, up = FedProto().send(server, None, Step(), context(classes, dim)), Message(data=told)
    prototypes = 12_000 * (down.nbytes() - classes + up.nbytes() - 5 * classes)
    assert prototypes == 24_000 * 4 * classes * dim and round(prototypes / 1e9, 2) == gigabytes


def context(classes=4, dim=2):
    return Context(0, 1, 1, pf.Training(), classes, (dim,), 2)


@pytest.mark.parametrize(("weighting", "expected"), [("samples", 7.0), ("uniform", 6.0)])
def test_the_server_averages_as_it_is_told_and_keeps_what_nobody_held(weighting, expected):
    method, server = FedProto(weighting=weighting), Party(SERVER, None, PartyData())
    replies = {0: Message(data=packed([[4.0]], [1], [1])), 1: Message(data=packed([[8.0], [5.0]], [1, 2], [3, 2]))}
    method.fuse(server, replies, Step(), context())
    assert server.memory["prototypes"]["prototypes"].tolist() == [[expected], [5.0]]
    method.fuse(server, {0: Message(data=packed([[9.0]], [1], [1]))}, Step(), context())
    sent = method.send(server, None, Step(), context())
    assert sent.data["classes"].tolist() == [1, 2]
    assert sent.data["prototypes"].tolist() == [[9.0], [5.0]]


def test_a_client_trains_towards_the_prototypes_that_it_received():
    client = Party(0, None, PartyData())
    client.models["main"] = build("mlp:1x2", (2,), 4)
    client.inbox = Message(data=packed([[1.0, 2.0], [3.0, 4.0]], [3, 1], [1, 1]))
    stage = next(FedProto().local(client, Step(), context()))
    assert stage.aux["prototypes"].tolist() == [[0.0, 0.0], [3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]
    assert stage.aux["known"].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("options", [{"lam": -1.0}, {"weighting": "size"}, {"predict_with": "tail"}, {"collect": "x"}])
def test_values_that_make_no_sense_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        FedProto(**options).check()


class Plane(nn.Module):
    """Features are the inputs themselves; the head always says class 3."""

    def features(self, x):
        return x

    def forward(self, x):
        return torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(len(x), 4)


def test_prediction_by_nearest_prototype_excludes_unknown_classes():
    x = torch.tensor([[0.1, 0.0], [5.0, 1.0], [9.0, 9.0], [0.0, 0.0]])
    someone = Party(0, None, PartyData())
    someone.models["main"] = Plane()
    someone.inbox = Message(data=packed([[0.0, 0.0], [6.0, 0.0], [9.0, 8.0]], [1, 2, 3], [1, 1, 1]))
    ctx = context()
    method = FedProto(predict_with="prototype")
    scores = method.predict(someone, x, ctx)
    assert scores.argmax(1).tolist() == [1, 2, 3, 1]  # never 0, which has no prototype, although zeros would be near
    assert scores[0, 1:].tolist() == pytest.approx([-0.1, -5.9, -((8.9**2 + 8.0**2) ** 0.5)])
    assert FedProto().predict(someone, x, ctx).argmax(1).tolist() == [3] * 4  # the head
    someone.inbox = Message()
    assert method.predict(someone, x, ctx).argmax(1).tolist() == [3] * 4  # there are no prototypes yet


def test_clients_are_measured_by_the_prototypes_that_they_would_receive():
    data = clients(classes=4)
    result = pf.run(FedProto(predict_with="prototype"), data, ["mlp:1x8"], rounds=2)
    full, _ = spread(result.server.memory["prototypes"], 4, 8)
    for client, value in enumerate(result.accuracy()["per_client"]):
        with torch.no_grad():
            nearest = torch.cdist(result.models[client].eval().features(data.test.inputs()), full).argmin(1)
        assert value == pytest.approx(float((nearest == data.test.labels()).double().mean()))


def test_feature_sizes_that_differ_are_refused_with_both_clients():
    with pytest.raises(
        InputError, match=r"client 0 has 8 features and client 1 has 16: set feature_dim.*Methods that would"
    ):
        pf.run(FedProto(), clients(), ["mlp:1x8", "mlp:1x16"])
    result = pf.run(FedProto(), clients(), ["mlp:1x8", "mlp:1x16"], rounds=1, feature_dim=8)
    assert len(result.accuracy()["per_client"]) == 2


@pytest.mark.parametrize("epochs", [1, 3])
def test_prototypes_collected_while_training_are_those_of_the_network_before_its_steps(epochs):
    data = clients()
    training = pf.Training(epochs=epochs, batch_size=100, lr=0.5 if epochs == 1 else 1e-9)
    result = pf.run(FedProto(collect="training", weighting="samples"), data, ["mlp:1x8"], 1, training)
    start = make_blueprint("mlp:1x8", "mlp:1x8", (5,), 3, 0, None, "linear").build()
    expected = mean_prototypes([means_of(start, samples) for samples in data.train], 3)
    torch.testing.assert_close(result.server.memory["prototypes"]["prototypes"], expected["prototypes"])
    after = pf.run(FedProto(), data, ["mlp:1x8"], 1, training).server.memory["prototypes"]["prototypes"]
    assert (epochs > 1) == torch.allclose(after, expected["prototypes"], atol=1e-5)


def test_prototypes_from_before_the_training_are_those_of_the_last_rounds_network():
    """As FedTGP's released program has them."""
    data, training, model = clients(), pf.Training(epochs=2, batch_size=8, lr=0.2), "mlp:1x8"
    start = make_blueprint(model, model, (5,), 3, 0, None, "linear").build()
    first = mean_prototypes([means_of(start, samples) for samples in data.train], 3)
    one, two = (pf.run(FedProto(lam=0.0, collect="before"), data, [model], rounds, training) for rounds in (1, 2))
    torch.testing.assert_close(one.server.memory["prototypes"]["prototypes"], first["prototypes"])
    second = mean_prototypes([means_of(one.models[k], samples) for k, samples in enumerate(data.train)], 3)
    torch.testing.assert_close(two.server.memory["prototypes"]["prototypes"], second["prototypes"])
    assert not torch.allclose(first["prototypes"], second["prototypes"], atol=1e-3)


def test_samples_are_counted_once_however_many_epochs_saw_them():
    features, labels = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([2, 0, 2])
    sums = class_sums(features, labels, 4)
    assert sums["features"].tolist() == [[2.0], [0.0], [7.0], [0.0]] and sums["counts"].tolist() == [1, 0, 2, 0]
    told = packed_means(3 * sums["features"], 3 * sums["counts"], 4, passes=3)
    assert told["prototypes"].tolist() == [[2.0], [3.5]]
    assert told["classes"].tolist() == [0, 2] and told["counts"].tolist() == [1, 2]


def test_counts_and_bytes_do_not_depend_on_when_prototypes_are_collected():
    data, told = clients(), {}
    fuse = FedProto.fuse

    class Noted(FedProto):
        name = "noted"

        def fuse(self, server, replies, step, ctx):
            told[self.collect] = [reply.data["counts"].tolist() for reply in replies.values()]
            fuse(self, server, replies, step, ctx)

    runs = [
        pf.run(Noted(collect=collect), data, ["mlp:1x8"], 1, pf.Training(epochs=2, batch_size=8))
        for collect in ("after", "before", "training")
    ]
    assert told["after"] == told["training"] == [list(filter(None, s.label_counts(3))) for s in data.train]
    assert told["before"] == told["after"]
    assert runs[0].cost.bytes == runs[1].cost.bytes == runs[2].cost.bytes


def test_sums_that_are_told_have_no_gradient():
    sums = class_sums(torch.tensor([[1.0], [3.0]], requires_grad=True), torch.tensor([0, 0]), 2)
    assert sums["features"].tolist() == [[4.0], [0.0]] and not sums["features"].requires_grad


def test_class_numbers_past_256_classes_take_two_bytes():
    assert class_numbers(torch.tensor([255]), 256).dtype == torch.uint8
    assert class_numbers(torch.tensor([256, 3]), 257).tolist() == [256, 3]


def test_a_class_that_is_new_joins_those_that_are_known():
    old, new = packed([[1.0]], [2], [1]), packed([[5.0]], [0], [1])
    both = merged(old, new, 3)
    assert both["prototypes"].tolist() == [[5.0], [1.0]] and both["classes"].tolist() == [0, 2]


def test_prototypes_are_spread_where_they_are():
    there = {
        "prototypes": torch.zeros(1, 2, device="meta"),
        "classes": torch.zeros(1, dtype=torch.uint8, device="meta"),
    }
    full, known = spread(there, 3, 2)
    assert full.device.type == known.device.type == "meta" and full.shape == (3, 2)
