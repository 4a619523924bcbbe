"""FedType: the acceptance properties of its spec."""

import math
from dataclasses import replace

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

import polyfed as pf
from polyfed.core.errors import InputError
from polyfed.core.method import Step
from polyfed.core.passes import count_right, logits_of
from polyfed.core.privacy import check_privacy
from polyfed.core.stage import Batch, Trained
from polyfed.methods.fedtype import FedType
from polyfed.ops.conformal import label_scores, prediction_sets, threshold
from polyfed.ops.selection import fit_temperature

SMALL = {"proxy": "mlp:1x4"}
OFF = {"set_weight": 0.0, "distill_weight": 0.0, "finish": False}
ONE = pf.Training(epochs=1, batch_size=8, lr=0.05)


def a_client(method, clients=3):
    run = federation(method, models=["mlp:1x8"], clients=clients, run=False)
    run.backend.store.prepare([0], run.ctx)
    return run, run.backend.store.open(0, run.ctx)


def test_the_private_loss_by_hand():
    z = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().requires_grad_()
    batch = Batch(torch.zeros(1, 1), torch.tensor([1]), {"sets": torch.tensor([[False, True, True, False]])})
    aux = {"temperature": torch.tensor(1.0), "q": torch.tensor(0.6)}  # its own set: the first two labels
    loss = FedType(randomized=False, set_weight=2.0).private_loss({"main": Stub(z)}, batch, aux)
    agreed = 1 / 3  # one common label of three
    ranking = (math.log(0.5 / 0.3) + math.log(0.5 / 0.15)) / 4
    assert float(loss) == pytest.approx(-math.log(0.3) + 2 * agreed * ranking)
    (grad,) = torch.autograd.grad(loss, z)
    # By -log p[1], and by two of four pairs: label 0 exceeds labels 1 and 2.
    pull = 2 * agreed / 4
    expected = torch.tensor([[0.5 + 2 * pull, 0.3 - 1 - pull, 0.15 - pull, 0.05]])
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize(("lam", "agreed"), [(0.1, 1.0), (0.9, 1 / 3)])  # its own set: three labels, or two
def test_the_private_set_has_the_private_penalty(lam, agreed):
    z = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 2).log()  # a sample twice: everything is a mean over the batch
    batch = Batch(torch.zeros(2, 1), torch.tensor([1, 1]), {"sets": torch.tensor([[False, True, True, False]] * 2)})
    method = FedType(randomized=False, k_reg=1, lam_private=lam, lam_proxy=0.5)
    loss = method.private_loss({"main": Stub(z)}, batch, {"temperature": torch.tensor(1.0), "q": torch.tensor(1.0)})
    ranking = (math.log(0.5 / 0.3) + math.log(0.5 / 0.15)) / 4
    assert float(loss) == pytest.approx(-math.log(0.3) + agreed * ranking)


def test_draws_decide_about_the_last_label_of_the_private_set():
    z = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    aux = {"temperature": torch.tensor(1.0), "q": torch.tensor(0.6)}
    sets = torch.tensor([[False, True, True, False]])
    ranking = (math.log(0.5 / 0.3) + math.log(0.5 / 0.15)) / 4
    for u, agreed in ((0.1, 1 / 3), (0.9, 0.0)):  # {0, 1}, or {0} alone
        batch = Batch(torch.zeros(1, 1), torch.tensor([1]), {"sets": sets, "u": torch.tensor([u])})
        loss = FedType().private_loss({"main": Stub(z)}, batch, aux)
        assert float(loss) == pytest.approx(-math.log(0.3) + agreed * ranking)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_proxys_loss_by_hand(temperature):
    target = torch.tensor([[temperature * math.log(3.0), 0.0]])  # 3/4 and 1/4 at this temperature
    batch = Batch(torch.zeros(1, 1), torch.tensor([0]), {"target": target})
    loss = FedType(distill_weight=3.0, temperature=temperature).proxy_loss(
        {"proxy": Stub(torch.zeros(1, 2))}, batch, {}
    )
    divergence = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert float(loss) == pytest.approx(math.log(2.0) + 3 * divergence / 2)


def test_switched_off_private_networks_train_alone_and_proxies_are_fedavg():
    run = federation(FedType(**SMALL, **OFF), 2, ONE)
    alone = federation(pf.Local(), 2, ONE)
    for client in range(3):
        assert_equal(held(run, client), held(alone, client))
    run = federation(FedType(**SMALL, **OFF), 2, FULL)  # all samples at once: their order does not matter
    assert_close(run.server.main.state_dict(), averaged(start_of("mlp:1x4"), 2, FULL, "uniform"))


def test_epochs_alternate_and_each_moves_one_network():
    method = FedType(**SMALL)
    run, party = a_client(method)
    run.ctx.training = pf.Training(epochs=2)
    work = method.local(party, Step(), run.ctx)
    stages = [next(work)] + [work.send(Trained()) for _ in range(3)]
    assert [list(stage.trainable) for stage in stages] == [["main"], ["proxy"], ["main"], ["proxy"]]
    assert all(stage.epochs == 1 for stage in stages)
    assert torch.equal(stages[1].columns["target"], logits_of(party.main, party.train))
    assert stages[0].columns["sets"].shape == (len(party.train), 3) and stages[0].columns["sets"].any(1).all()
    with pytest.raises(StopIteration) as ended:
        work.send(Trained())
    assert set(ended.value.value.params) == {"proxy"}


def trained_client(method):
    """A client after two rounds: its networks know something."""
    run = federation(method, 2, ONE, models=["mlp:1x8"])
    return run, run.backend.store.open(0, run.ctx)


def test_the_proxys_sets_are_calibrated_on_its_own_scores():
    method = FedType(**SMALL, randomized=False, alpha=0.4, k_reg=1, lam_proxy=0.01, lam_private=0.7)
    run, party = trained_client(method)
    party.memory["accuracy"] = count_right(party.main, party.train) / len(party.train) + 0.3
    stage = method.private_stage(party, "main/0", run.ctx)
    y = party.train.labels()
    z = logits_of(party.models["proxy"], party.train)
    t = fit_temperature(z, y)
    lam = 0.01 + 0.99 * 0.3  # after a drop by 0.3
    q = threshold(label_scores(z, y, t, lam, 1), 0.4)
    assert torch.equal(stage.columns["sets"], prediction_sets(z, t, q, lam, 1))
    assert not torch.equal(stage.columns["sets"], prediction_sets(z, t, q, 0.01, 1))
    assert stage.columns["sets"][torch.arange(len(y)), y].float().mean() >= 0.6
    z = logits_of(party.main, party.train)
    t = fit_temperature(z, y)
    torch.testing.assert_close(stage.aux["temperature"], torch.tensor(t))
    torch.testing.assert_close(stage.aux["q"], threshold(label_scores(z, y, t, 0.7, 1), 0.4))


def test_validation_data_calibrate_where_there_are_some():
    method = FedType(**SMALL, randomized=False, k_reg=1, alpha=0.5, lam_private=0.3)
    run, party = trained_client(method)
    everything = method.calibrated(party, "main", 0.5, "main/0", run.ctx)
    others = replace(party.train, y=(party.train.y + 1) % 3)  # labels that the network does not expect
    held_out = party.data.validation = others.select(torch.arange(5))
    t, q = method.calibrated(party, "main", 0.5, "main/0", run.ctx)
    z = logits_of(party.main, held_out)
    torch.testing.assert_close(t, torch.tensor(fit_temperature(z, held_out.labels())))
    torch.testing.assert_close(q, threshold(label_scores(z, held_out.labels(), t, 0.5, 1), 0.5))
    assert not torch.isclose(q, everything[1])
    stage = method.private_stage(party, "main/0", run.ctx)  # labels beyond the first have the private penalty
    torch.testing.assert_close(stage.aux["q"], threshold(label_scores(z, held_out.labels(), t, 0.3, 1), 0.5))


def test_the_proxys_penalty_grows_when_the_private_network_became_worse():
    method = FedType(**SMALL, lam_proxy=0.4)
    _, party = a_client(method)
    accuracy = count_right(party.main, party.train) / len(party.train)
    assert method.current_lam(party) == 0.4  # nothing to compare with yet
    assert party.memory["accuracy"] == accuracy
    party.memory["accuracy"] = accuracy + 0.3
    assert method.current_lam(party) == pytest.approx(0.4 + 0.6 * 0.3)
    party.memory["accuracy"] = accuracy - 0.3
    assert method.current_lam(party) == 0.4


def test_draws_are_new_in_every_epoch_and_for_every_use():
    method = FedType(**SMALL)
    run, party = a_client(method)
    drawn = [method.draws(moment, 9, party, run.ctx) for moment in ("main/0/sets", "main/1/sets", "main/0/main")]
    assert len({tuple(u.tolist()) for u in drawn}) == 3
    assert torch.equal(drawn[0], method.draws("main/0/sets", 9, party, run.ctx))
    assert FedType(randomized=False).draws("main/0/sets", 9, party, run.ctx) is None


def test_both_directions_of_teaching_matter():
    on, no_sets, no_distillation = (
        federation(FedType(**SMALL, finish=False, k_reg=1, **more), 1, ONE)
        for more in ({}, {"set_weight": 0.0}, {"distill_weight": 0.0})
    )
    for client in range(3):
        assert not torch.equal(held(on, client)["head.weight"], held(no_sets, client)["head.weight"])
        assert_equal(held(on, client), held(no_distillation, client))  # the proxy learns after the private network
    name = "head.weight"
    assert not torch.equal(on.server.main.state_dict()[name], no_distillation.server.main.state_dict()[name])


def test_after_the_last_round_everybody_trains_once_more_and_sends_nothing():
    size = size_of(start_of("mlp:1x4"))
    run = federation(FedType(**SMALL), 2, ONE, clients=4, share=0.5)
    assert [line["phase"] for line in run.history] == ["round", "round", "after"]
    taken = [sum(client in line["participants"] for line in run.history[:2]) for client in range(4)]
    assert 0 in taken
    assert run.meter.bytes["up"] == {client: n * size for client, n in enumerate(taken) if n}
    assert run.meter.bytes["down"] == {client: (n + 1) * size for client, n in enumerate(taken)}
    never = taken.index(0)
    name = run.backend.infos[never].architecture
    assert not torch.equal(held(run, never)["head.weight"], run.ctx.blueprints[name].initial["head.weight"])
    plain = federation(FedType(**SMALL, finish=False, weighting="samples"), 1, ONE)
    assert [line["phase"] for line in plain.history] == ["round"]
    assert plain.meter.bytes["up"] == dict.fromkeys(range(3), size + 8)


def test_sets_that_depend_on_all_samples_at_once_are_more_than_noise_in_training_covers():
    pytest.importorskip("dp_accounting")
    privacy = pf.Privacy(noise_multiplier=1.0)
    with pytest.raises(InputError, match=r"calibrated on all samples together \(set_weight=0 can be private\)"):
        check_privacy(privacy, FedType())
    check_privacy(privacy, FedType(set_weight=0.0))


@pytest.mark.parametrize(
    "options", [{"alpha": 1.0}, {"k_reg": -1}, {"lam_proxy": 1.5}, {"temperature": 0.0}, {"set_weight": -1.0}]
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        FedType(**options)


@pytest.mark.parametrize("weights", [{}, {"set_weight": 0.0}, {"distill_weight": 0.0}])
def test_targets_of_unchanged_images_are_refused_for_changed_ones(weights):
    with pytest.raises(InputError, match=r"fedtype: .*'flip'.*: leave augment out, or set .* to 0\.$"):
        federation(FedType(**SMALL, **weights), training=replace(ONE, augment="flip"), run=False)


def test_without_such_targets_images_may_be_changed():
    plain, changed = (federation(FedType(**SMALL, **OFF), 1, replace(ONE, augment=how)) for how in (None, "crop:2"))
    assert not torch.equal(held(plain, 0)["head.weight"], held(changed, 0)["head.weight"])


def test_noise_is_planned_for_all_epochs_on_own_samples():
    assert FedType(finish=True).own_epochs(3, 5) == 36  # two networks, five rounds and the last training
    assert FedType(finish=False).own_epochs(3, 5) == 30
