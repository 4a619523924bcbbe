"""FedDistill: the acceptance properties of its spec."""

from types import SimpleNamespace

import pytest
import torch
from public_problem import exchange, federation, party, problem, same, states
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Step
from polyfed.core.stage import Batch
from polyfed.methods.feddistill import FedDistill, by_label
from polyfed.methods.feddistill_plus import FedDistillPlus

MAIN = Step()
MIXED = ("mlp:1x8", "cnn:4-8", "mlp:2x8")
F0 = torch.tensor([[1.0, 2.0, 3.0], [0.1, 0.7, 0.3]])  # client 0 holds labels 0 and 2
F1 = torch.tensor([[3.0, 0.0, 1.0], [5.0, 5.0, 2.0]])  # client 1 holds labels 0 and 1
F2 = torch.tensor([[2.0, 4.0, 5.0]])  # client 2 holds label 0


def upload(vectors, labels):
    return Message(data={"logits": vectors, "classes": torch.tensor(labels, dtype=torch.uint8)})


def fused(method=None, replies=None):
    run = federation(method or FedDistill(), models=MIXED)
    run.ctx.round = 1
    replies = replies or {0: upload(F0, [0, 2]), 1: upload(F1, [0, 1]), 2: upload(F2, [0])}
    run.method.fuse(run.server, replies, MAIN, run.ctx)
    return run


def sent(run, client):
    """Label -> target of a client."""
    data = run.method.send(run.server, run.backend.infos[client], MAIN, run.ctx).data
    return dict(zip(data["classes"].tolist(), data["logits"], strict=True)) if data else {}


def test_a_target_is_the_mean_of_the_other_holders():
    run = fused()
    assert {label: target.tolist() for label, target in sent(run, 0).items()} == {0: [2.5, 2, 3], 1: [5, 5, 2]}
    assert {label: target.tolist() for label, target in sent(run, 2).items()} == {
        0: [2.0, 1.0, 2.0],
        1: [5.0, 5.0, 2.0],
        2: F0[1].tolist(),
    }
    for client, own in ((0, F0[0]), (1, F1[0]), (2, F2[0])):  # (M - 1) G_k + F_k = M · mean
        torch.testing.assert_close(2 * sent(run, client)[0] + own, F0[0] + F1[0] + F2[0])


def test_a_label_that_only_this_client_holds_has_no_target():
    assert 2 not in sent(fused(), 0) and 1 not in sent(fused(), 1)
    alone = fused(replies={0: upload(F0, [0, 2])})
    assert sent(alone, 0) == {}  # nothing at all is sent
    assert set(sent(alone, 1)) == {0, 2}


def test_with_two_clients_the_target_is_the_others_vector_exactly():
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 3, 3, generator=rng) * torch.tensor([1e-3, 1e3]).view(2, 1, 1)
    run = fused(replies={0: upload(a, [0, 1, 2]), 1: upload(b, [0, 1, 2])})
    assert torch.equal(torch.stack([*sent(run, 0).values()]), b)
    assert torch.equal(torch.stack([*sent(run, 1).values()]), a)


def test_without_leave_one_out_all_clients_get_the_plain_mean():
    run = fused(FedDistill(leave_one_out=False))
    for client in (0, 1, 2):
        assert {label: target.tolist() for label, target in sent(run, client).items()} == {
            0: [2.0, 2.0, 3.0],
            1: [5.0, 5.0, 2.0],
            2: F0[1].tolist(),
        }


def test_who_missed_the_round_learns_from_all_who_did_not():
    run = fused(replies={0: upload(F0, [0, 2]), 1: upload(F1, [0, 1])})
    assert sent(run, 2)[0].tolist() == [2.0, 1.0, 2.0]


def test_the_loss_by_hand():
    logits = torch.tensor([[0.0, 1.0, 2.0], [1.0, 1.0, 0.0], [2.0, 0.0, 0.0]], requires_grad=True)
    y = torch.tensor([0, 2, 0])
    targets, known = torch.tensor([[3.0, 1.0, 0.0], [9.0, 9.0, 9.0], [0.0, 0.0, 0.0]]), torch.tensor([1.0, 1.0, 0.0])
    loss, sums = FedDistill(lam=0.5).distill_loss(
        {"main": lambda x: x}, Batch(logits, y), {"targets": targets, "known": known}
    )
    p, q = targets[0].softmax(0), logits.log_softmax(1)
    soft = -(p @ q[0] + p @ q[2]) / 3  # label 2 has no target; the mean is over the batch
    torch.testing.assert_close(loss, F.cross_entropy(logits, y) + 0.5 * soft)
    assert sums["logits"].tolist() == [[2.0, 1.0, 2.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    assert sums["counts"].tolist() == [2.0, 0.0, 1.0]
    assert loss.requires_grad and not sums["logits"].requires_grad  # they would keep every step's graph


def test_with_privacy_the_upload_is_the_means_that_got_noise(monkeypatch):
    means = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 7.0, 7.0]])
    counts = torch.tensor([2.0, 0.5, 0.0])  # with noise, too: no label 2
    monkeypatch.setattr("polyfed.methods.feddistill.class_means_of", lambda *given: (means, counts))
    run = federation(FedDistill())
    run.ctx.privacy = SimpleNamespace(on=True)
    work = run.method.local(party(run, 0), MAIN, run.ctx)
    next(work)
    with pytest.raises(StopIteration) as ended:
        work.send(None)
    told = ended.value.value.data
    assert told["classes"].tolist() == [0, 1] and told["logits"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_the_upload_is_the_mean_of_the_logits_seen_while_training():
    """With one batch an epoch and a rate of almost nothing, that is the mean over the samples of a label."""
    training = pf.Training(epochs=2, batch_size=100, lr=1e-12)
    run = federation(FedDistill(), problem(lacking=1), training=training)
    client = party(run, 1)
    with torch.no_grad():
        logits = client.main(client.train.inputs())
    exchange(run, MAIN)
    found = run.server.memory["uploads"]["1"]
    assert found["classes"].tolist() == [0, 1] and found["classes"].dtype == torch.uint8
    for label in (0, 1):
        expected = logits[client.train.labels() == label].mean(0)
        torch.testing.assert_close(found["logits"][label], expected, atol=1e-5, rtol=1e-5)


def test_logits_of_all_epochs_count():
    """The first epoch's mean moves towards the second's where training moves."""
    means = []
    for epochs in (1, 2):
        run = federation(FedDistill(), training=pf.Training(epochs=epochs, batch_size=100, lr=0.5))
        exchange(run, MAIN)
        means.append(by_label(run.server.memory["uploads"]["0"], run.ctx)[0])
    first = federation(FedDistill(), training=pf.Training(epochs=1, batch_size=100, lr=0.5))
    exchange(first, MAIN)
    after = party(first, 0)
    with torch.no_grad():
        second = after.main(after.train.inputs())
    y = after.train.labels()
    own = torch.stack([second[y == label].mean(0) for label in range(3)])
    torch.testing.assert_close(means[1], (means[0] + own) / 2, atol=1e-5, rtol=1e-5)


def test_there_is_no_term_in_the_first_round_and_one_in_the_second():
    ours, local = federation(FedDistill(), rounds=2, models=MIXED), federation(pf.Local(), rounds=2, models=MIXED)
    for number, equal in ((1, True), (2, False)):
        for run in (ours, local):
            exchange(run, MAIN, round=number)
        assert same(states(ours), states(local)) == equal


def test_bytes_are_c_k_times_c_up_and_one_byte_for_each_label():
    run = federation(FedDistill(), problem(lacking=1), rounds=2, models=MIXED)
    first, second = run.run()
    assert first["bytes_up"] == second["bytes_up"] == (3 + 2 + 3) * (4 * 3 + 1)
    assert first["bytes_down"] == 0
    assert second["bytes_down"] == 3 * 3 * (4 * 3 + 1)  # two others hold label 2 for each, or one does


def test_with_averaging_the_weights_travel_too():
    run = federation(FedDistillPlus(), rounds=2)
    first, second = run.run()
    size = 4 * sum(tensor.numel() for tensor in run.server.state.values())
    assert first["bytes_up"] == second["bytes_up"] == 3 * (size + 8 + 3 * (4 * 3 + 1))
    assert (first["bytes_down"], second["bytes_down"]) == (3 * size, 3 * (size + 3 * (4 * 3 + 1)))


def test_pretraining_with_averaging_is_that_of_fedavg_and_the_round_after_it_has_no_targets_yet():
    ours, plain = (federation(m(pretrain_epochs=2), rounds=1) for m in (FedDistillPlus, pf.FedAvg))
    ours.run(), plain.run()
    for name, tensor in plain.server.state.items():
        assert torch.equal(ours.server.state[name], tensor)
    message = ours.method.send(ours.server, ours.backend.infos[0], EVALUATE, ours.ctx)
    assert message.params["main"] and message.data["logits"].shape == (3, 3)


def test_a_negative_weight_is_refused():
    with pytest.raises(pf.InputError, match="lam must not be negative"):
        FedDistill(lam=-1.0)
