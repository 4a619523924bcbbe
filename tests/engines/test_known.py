"""Training that several runs begin with is done once, and nobody can tell."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import polyfed as pf
from polyfed.api import execute
from polyfed.compare import compare
from polyfed.engines.known import KnownStages
from polyfed.experiment import experiment
from polyfed.methods.oneshot import OneShot
from polyfed.testing import synthetic
from polyfed.testing.watch import same_states, states, timeless

SHORT = {"rounds": 2, "limit": 150, "clients": 3, "models": ["mlp:1x8", "mlp:2x8"], "epochs": 2, "public": 20}


@pytest.fixture
def ran(monkeypatch):
    """Note the clients of stages that were really run."""
    keep, clients = KnownStages.keep, []

    def noted(self, key, party, trained, seconds):
        clients.append(party.id)
        keep(self, key, party, trained, seconds)

    monkeypatch.setattr(KnownStages, "keep", noted)
    return clients


def test_one_shot_methods_of_a_comparison_train_their_networks_once(ran):
    made = experiment(**SHORT)
    compare(made, ["ams", "ensemble"], seeds=2)
    local = 2 * 2 * 3  # two seeds, two rounds, three clients
    assert len(ran) == local + 2 * 3  # and the networks of the one-shot methods, once a seed


def test_first_rounds_that_are_equal_are_shared_and_later_ones_are_not(ran):
    compare(experiment(**{**SHORT, "models": ["mlp:1x8"]}), ["fedavg", "fedproto"], seeds=1)
    alone, averaged = 2 * 3, 3  # the first round of fedavg is local's; fedproto has a loss of its own
    assert len(ran) == alone + averaged + 2 * 3


@pytest.mark.parametrize("label", ["ams", "ensemble", "fedavg", "fedprox", "scaffold"])
def test_a_run_is_the_same_whether_its_training_was_known_or_not(label):
    made = experiment(**SHORT, methods={"scaffold": {"option": "gradient"}})
    remembered = KnownStages()
    clients = made.base.data.load(0)
    for other in ("local", "ensemble"):
        execute(made.config(other), clients, known=remembered)
    alone = execute(made.config(label), clients)
    shared = execute(made.config(label), clients, known=remembered)
    assert timeless(alone.history) == timeless(shared.history)
    same_states(states(alone), states(shared))
    saved = sum(line["seconds"].get("saved", 0.0) for line in shared.history)
    assert (saved > 0) == (label in ("ams", "ensemble", "fedavg"))  # the others have losses or transforms of their own
    assert shared.cost.seconds["total"] > saved  # the time that it would take by itself


@pytest.mark.parametrize(
    "change",
    [{"lr": 0.2}, {"epochs": 1}, {"batch_size": 8}, {"momentum": 0.5}, {"seed": 1}, {"models": ["mlp:1x8", "mlp:1x9"]}],
)
def test_other_settings_are_other_stages(change, ran):
    remembered = KnownStages()
    clients = experiment(**SHORT).base.data.load(0)
    execute(experiment(**SHORT, method="local").base, clients, known=remembered)
    before = len(ran)
    execute(experiment(**{**SHORT, **change}, method="local").base, clients, known=remembered)
    same = {0, 2} if "models" in change else set()  # clients of the architecture that stayed
    first = ran[before:]
    assert sorted(set(range(3)) - same) == sorted(set(first[: 3 - len(same)]))


VTC = {**SHORT, "models": ["cnn:4-8", "cnn:4-4"], "feature_dim": 64, "data": "digits", "rounds": 3, "clients": 2}
VTC |= {"limit": 60, "method": "fedvtc"}


def of_fedvtc(**options):
    made = experiment(**VTC).base
    return replace(made, method=replace(made.method, samples_per_class=2, finetune_epochs=1, **options))


@pytest.mark.parametrize("option", [{}, {"norm_statistics": "recalibrated"}, {"finetune_epochs": 2}])
def test_methods_that_differ_after_the_rounds_share_all_of_them(option, ran):
    remembered, clients = KnownStages(), experiment(**VTC).base.data.load(0)
    execute(of_fedvtc(), clients, known=remembered)
    assert len(ran) == 3 * 2 + 2  # rounds, and fine-tuning on images that were made
    config = replace(of_fedvtc(), method=replace(of_fedvtc().method, **option))
    alone = execute(config, clients)
    shared = execute(config, clients, known=remembered)
    assert len(ran) == 3 * 2 + 2 + 2  # fine-tuning alone
    assert timeless(alone.history) == timeless(shared.history)
    same_states(states(alone), states(shared))


@pytest.mark.parametrize(
    "option",
    [
        {"lambda_dm": 0.5}, {"kl_weight": 0.5}, {"rec_weight": 0.5}, {"reduction": "sum"}, {"dm_mode": "pointwise"},
        {"dm_latents": "global"}, {"prior_cov": "global_sd"}, {"joint_training": True}, {"alternate": "epoch"},
        {"vtc_lr": 0.5}, {"vtc_optimizer": "adam"}, {"sigma_init": 0.5},
    ],
)  # fmt: skip
def test_methods_whose_rounds_differ_share_none(option, ran):
    """All of its options that concern the rounds: numbers as by itself, whatever was trained before."""
    remembered, clients = KnownStages(), experiment(**VTC).base.data.load(0)
    execute(of_fedvtc(), clients, known=remembered)
    before = len(ran)
    alone = execute(of_fedvtc(**option), clients)
    shared = execute(of_fedvtc(**option), clients, known=remembered)
    assert len(ran) >= before + 3 * 2 + 2
    same_states(states(alone), states(shared))


@dataclass(frozen=True)
class Weighed(pf.FedVTC):
    """Somebody's variant of FedVTC, with a field of its own in its loss."""

    name: ClassVar[str] = "weighed"
    weight: float = 1.0

    def vtc_loss(self, main, vtc, z, batch, aux):
        return self.weight * super().vtc_loss(main, vtc, z, batch, aux)


def test_a_variant_of_fedvtc_does_not_inherit_the_key():
    remembered, clients = KnownStages(), experiment(**VTC).base.data.load(0)
    one, other = (
        replace(of_fedvtc(), method=Weighed(samples_per_class=2, finetune_epochs=1, weight=weight))
        for weight in (1.0, 0.1)
    )
    execute(one, clients, known=remembered)
    same_states(states(execute(other, clients)), states(execute(other, clients, known=remembered)))


@dataclass(frozen=True)
class Heavier(OneShot):
    """A one-shot method with a loss of its own."""

    name: ClassVar[str] = "heavier"

    def loss(self, nets, batch, aux):
        return 2 * super().loss(nets, batch, aux)

    def make_fused(self, server, ctx):
        return self.networks(server, ctx)[0]


def test_a_method_that_changes_the_loss_does_not_inherit_the_key(ran):
    remembered = KnownStages()
    clients = synthetic(2)
    made = experiment(**SHORT).base
    for method in (pf.Ensemble(), Heavier()):
        execute(replace(made, method=method, rounds=1), clients, known=remembered)
    assert len(ran) == 4  # both were trained: nothing was taken from the other


def test_what_is_not_asked_for_is_forgotten_first(ran):
    size = 4 * (64 * 8 + 8 + 8 * 10 + 10)
    remembered = KnownStages(budget=size)
    clients = experiment(**SHORT).base.data.load(0)
    made = experiment(**{**SHORT, "models": ["mlp:1x8"], "rounds": 1}, method="local").base
    for _ in range(2):
        execute(made, clients, known=remembered)
    assert remembered.used == size and len(ran) >= 5  # one of three is remembered at a time
    assert torch.get_default_dtype() == torch.float32
