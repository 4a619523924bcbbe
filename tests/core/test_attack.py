"""Malicious clients of a simulation: who they are, what they send, and that they never count."""

import pytest
import torch

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.attack import alie_z, falsified, malicious, marked, poisoned_samples
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.samples import Samples
from polyfed.core.settings import Settings, Training
from polyfed.core.trust import Attack, Trust
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fedproto import FedProto
from polyfed.testing.setting import synthetic
from polyfed.testing.watch import same_lines

SMALL = Training(epochs=1, batch_size=8)


def test_who_is_malicious_comes_from_the_seed():
    attack = Attack("signflip", 0.2, 1.0)
    drawn = [malicious(attack, list(range(10)), seed) for seed in range(20)]
    assert all(len(bad) == 2 for bad in drawn) and len(set(drawn)) > 5
    assert malicious(attack, list(range(10)), 3) == drawn[3]
    assert malicious(Attack("signflip", 0.99, 1.0), [0, 1], 0) < {0, 1}  # somebody stays honest
    assert malicious(None, [0, 1], 0) == frozenset()


def sent_instead(name, strength, honest=(1.0, 3.0), own=7.0):
    made = prepare(FedAvg(), synthetic(3, public=False), ("mlp:1x4",), Settings(1))
    sent = {c: made.method.send(made.server, made.ctx.infos[c], Step(), made.ctx).detached() for c in range(3)}
    start = sent[0].params["main"]
    replies = {
        c: Message({"main": {n: t + change for n, t in start.items()}}, meta={"samples": 1})
        for c, change in enumerate((*honest, own))
    }
    kept = {c: message.detached() for c, message in replies.items()}
    found = falsified(
        Attack(name, 0.3, strength), frozenset({2}), made.method, made.server, sent, replies, Step(), made.ctx
    )
    for client in (0, 1):
        assert found[client] is replies[client]
    for (_, a), (_, b) in zip(replies[2].tensors(), kept[2].tensors(), strict=True):
        assert torch.equal(a, b)  # the client's own memory stays as it is
    return torch.cat([t.flatten() for t in found[2].params["main"].values()]), torch.cat(
        [t.flatten() for t in start.values()]
    )


def test_messages_by_hand():
    told, start = sent_instead("signflip", 1.0)
    assert torch.allclose(told, -(start + 7))
    told, start = sent_instead("scale", 1000.0)
    assert torch.allclose(told, 1000 * (start + 7))
    told, _ = sent_instead("constant", 4.0)
    assert (told == 4).all()
    # The honest changes are 1 and 3: mean 2, deviation 1.
    told, start = sent_instead("ipm", 0.5)
    assert torch.allclose(told, start - 0.5 * 2, atol=1e-5)
    told, start = sent_instead("alie", 1.5)
    assert torch.allclose(told, start + 2 - 1.5 * 1, atol=1e-5)
    told, start = sent_instead("random", 1.0)
    assert not torch.allclose(told, start + 7, atol=0.1)


def test_the_z_of_alie():
    # Baruch et al. 2019: 50 workers, 24 corrupted: two more are needed, 24 of 26 honest ones lie closer; z = 1.43.
    assert alie_z(50, 24) == pytest.approx(1.43, abs=0.005)


def test_labels_and_marks_in_the_data():
    data = Samples(torch.zeros(40, 1, 8, 8), torch.arange(40) % 4)
    assert poisoned_samples(Attack("labelflip", 0.2, 1.0), data, 4, 0, 0).labels().tolist() == [
        3 - i % 4 for i in range(40)
    ]
    data.x[0, 0, 0, 0] = 16.0
    found = poisoned_samples(Attack("backdoor", 0.2, 0.5), data, 4, 0, 0)
    hit = found.x[:, 0, 7, 7] == 16
    assert 5 < int(hit.sum()) < 35 and (found.labels()[hit] == 0).all()
    assert torch.equal(found.labels()[~hit], data.labels()[~hit])
    assert data.x[:, 0, 7, 7].max() == 0  # shared storage is not touched
    assert (marked(data.x)[:, 0, 6:, 6:] == 16).all()


def test_an_attack_by_nobody_is_refused():
    """A tenth of four clients is nobody: the rule that is tried would seem to hold."""
    with pytest.raises(InputError, match=r"of 4 clients that is nobody, one is 0.25"):
        pf.run("fedavg", synthetic(public=False), ["mlp:1x8"], rounds=1, attack="signflip:0.1", progress=False)
    with pytest.raises(InputError, match="share of samples with a backdoor"):
        Trust(attack="backdoor:0.5:7")


def test_an_attack_changes_nothing_but_the_messages_of_malicious_clients():
    """With their messages left out, the first round's honest training is that of the clean run."""
    clean = pf.run("fedproto", synthetic(5, public=False), rounds=1, training=SMALL)
    hit = pf.run("fedproto", synthetic(5, public=False), rounds=1, training=SMALL, attack="signflip:0.2")
    honest = hit.accuracy()["clients"]
    assert len(honest) == 4
    assert hit.accuracy()["per_client"] == [clean.accuracy()["per_client"][client] for client in honest]


def test_an_attack_is_the_same_with_other_workers_and_when_resumed(tmp_path):
    def attacked(**more):
        return pf.run(
            "fedavg", synthetic(5, public=False), rounds=2, training=SMALL, attack="random:0.4", robust="median", **more
        )

    same_lines(attacked(workers=1), attacked(workers=3))


def test_attacks_on_what_is_not_sent_are_refused():
    with pytest.raises(InputError, match="falsifies logits, but fedproto sends"):
        pf.run(FedProto(), synthetic(public=False), attack="lma:0.2")
    with pytest.raises(InputError, match="falsifies class means"):
        pf.run(FedAvg(), synthetic(public=False), attack="protoflip:0.2")
