"""FedDF and FedFusion: the acceptance properties of their spec."""

from dataclasses import replace

import pytest
import torch
from distill_problem import DIGITS, TWO, moved, taught
from public_problem import exchange, federation, party, problem, same, states
from tests.contract.table import synthetic

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.method import EVALUATE, Step
from polyfed.core.passes import logits_of
from polyfed.core.settings import Settings
from polyfed.methods import distillation
from polyfed.methods.distillation import worth_keeping
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.feddf import FedDF
from polyfed.methods.feddf_hetero import FedDFHetero
from polyfed.methods.fedfd import FedFD
from polyfed.methods.heterofl import HeteroFL
from polyfed.ops.distance import kl_divergence

MAIN = Step()
WIDTHS = ("mlp:1x16@1", "mlp:1x16@0.5")
QUICK = {"distill_steps": 4, "distill_batch": 16}
SGD = {"distill_optimizer": "sgd", "distill_cosine": False, "distill_clip": None}


def kl_to(run, architecture, targets):
    """The distance of a prototype's network to targets on the public data."""
    model = run.ctx.replica(architecture)
    slots = run.method.slots_of(run.ctx.blueprints[architecture], run.ctx)
    model.load_state_dict({n: run.server.state[slot.key] for n, slot in slots.items()})
    return float(kl_divergence(logits_of(model, run.server.public), targets))


# --- the ensemble ---


def test_the_teacher_of_two_networks_is_the_mean_of_their_logits_exactly():
    run = federation(FedDF(), problem(sizes=(18, 24)), TWO)
    replies = moved(run)
    replies[0].meta["samples"] = 3  # however many samples each of them has
    each = []
    for client, reply in replies.items():
        model = party(run, client).main
        model.load_state_dict(reply.params["main"])
        each.append(logits_of(model, run.server.public))
    data, target = run.method.lesson(replies, run.server.public, run.ctx)
    assert torch.equal(target, (each[0] + each[1]) / 2) and data is run.server.public
    method = FedDF(ensemble="probs", temperature=2.0)
    _, target = method.lesson(replies, run.server.public, run.ctx)
    mean = ((each[0] / 2).softmax(1) + (each[1] / 2).softmax(1)) / 2
    torch.testing.assert_close((target / 2).softmax(1), mean)


def test_a_class_that_all_networks_exclude_leaves_the_mean_probabilities_finite(monkeypatch):
    """Logits 200 apart: the second probability is exactly zero in float32."""
    logits = [torch.tensor([[200.0, 0.0]]), torch.tensor([[300.0, 0.0]])]
    monkeypatch.setattr(distillation, "uploaded_logits", lambda replies, data, ctx: iter(logits))
    _, target = FedDF(ensemble="probs").lesson({}, None, None)
    assert target[0, 0] == 0 and -70 < target[0, 1] < -69  # the logarithm of 1e-30
    student = torch.zeros(1, 2, requires_grad=True)
    loss = kl_divergence(student, target)
    assert loss.item() == pytest.approx(0.693147, abs=1e-6)  # log 2
    assert torch.autograd.grad(loss, student)[0].tolist() == [[-0.5, 0.5]]


def test_mean_probabilities_have_the_gradient_of_the_mean_of_the_losses():
    rng = torch.Generator().manual_seed(0)
    first, second, student = torch.randn(3, 5, 4, generator=rng)
    student.requires_grad_(True)
    mean = ((first.softmax(1) + second.softmax(1)) / 2).log()
    (one,) = torch.autograd.grad(kl_divergence(student, mean), student)
    both = (kl_divergence(student, first) + kl_divergence(student, second)) / 2
    torch.testing.assert_close(one, torch.autograd.grad(both, student)[0])


def test_uploads_without_statistics_predict_with_those_of_the_public_data():
    run = federation(FedDF(buffers="local"), models=("cnn:4-8,bn",))
    replies = moved(run)
    assert not any("running" in name for name in replies[0].params["main"])
    _, first = run.method.lesson(replies, run.server.public, run.ctx)
    for buffer in run.ctx.replica("cnn:4-8,bn").buffers():
        buffer.fill_(7)  # what another network left behind plays no part
    assert torch.equal(run.method.lesson(replies, run.server.public, run.ctx)[1], first)


def test_teachers_predict_and_the_student_trains_where_there_is_batchnorm():
    """Logits do not depend on who else is in a batch; the student's statistics move although its weights hardly do."""
    options = {**QUICK, **SGD, "distill_lr": 1e-12}
    run = federation(FedDF(**options), problem(sizes=(18,)), models=("cnn:4-8,bn",))
    replies = moved(run)
    model = party(run, 0).main.eval()
    model.load_state_dict(replies[0].params["main"], strict=False)
    with torch.no_grad():
        alone = torch.cat([model(x) for x, _ in run.server.public.chunks(1)])
    torch.testing.assert_close(run.method.lesson(replies, run.server.public, run.ctx)[1], alone)
    for name, tensor in taught(run, replies).items():
        uploaded = replies[0].params["main"][name.split("::")[-1]]
        assert torch.allclose(tensor, uploaded, rtol=0, atol=1e-6) == ("running" not in name), name


# --- what is distilled, and where ---


def test_every_prototype_moves_from_its_average_towards_the_ensemble_of_all():
    start = federation(FedDF(distill_steps=0), models=TWO)
    replies = moved(start)
    run = federation(FedDF(distill_steps=60, distill_lr=0.01), models=TWO)
    targets = run.method.lesson(replies, run.server.public, run.ctx)[1]
    taught(start, replies), taught(run, replies)
    for architecture in TWO:
        assert kl_to(run, architecture, targets) < 0.3 * kl_to(start, architecture, targets)


def test_zero_steps_leave_the_average_of_each_prototype():
    run = federation(FedDF(distill_steps=0), models=TWO)  # clients 0 and 2 have the first, 1 the second
    replies = moved(run)
    replies[0].meta["samples"], replies[2].meta["samples"] = 1, 3
    state = taught(run, replies)
    for name in replies[0].params["main"]:
        mean = replies[0].params["main"][name] / 4 + 3 * replies[2].params["main"][name] / 4
        torch.testing.assert_close(state[f"mlp:1x8::{name}"], mean)
    for name, tensor in replies[1].params["main"].items():
        assert torch.equal(state[f"mlp:2x8::{name}"], tensor)


def test_a_prototype_without_clients_this_round_is_distilled_too():
    run, off = federation(FedDF(**QUICK), models=TWO), federation(FedDF(distill_steps=0), models=TWO)
    replies = moved(run)
    del replies[1]
    before = {n: t.clone() for n, t in off.server.state.items()}
    assert all(torch.equal(t, before[n]) for n, t in taught(off, replies).items() if n.startswith("mlp:2x8"))
    assert not any(torch.equal(t, before[n]) for n, t in taught(run, replies).items())


def test_one_client_without_norms_stays_as_it_is():
    run = federation(FedDF(**{**QUICK, **SGD, "distill_lr": 0.1}), problem(sizes=(20,)))
    replies = moved(run)
    for name, tensor in taught(run, replies).items():
        torch.testing.assert_close(tensor, replies[0].params["main"][name.split("::")[-1]], rtol=0, atol=1e-6)


def test_public_labels_play_no_part():
    found = []
    for labels in (None, 1):
        run = federation(FedDF(**QUICK), models=TWO)
        if labels is not None:
            public = run.server.public
            run.server.data.public = replace(public, y=1 - public.y)
        found.append(taught(run, moved(run)))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_the_servers_training_is_that_of_the_options(monkeypatch):
    seen = {}

    def noted(student, data, targets, ctx, training, **more):
        seen.update(more, training=training, student=student)
        return type("Trained", (), {"loss": 0.0})

    monkeypatch.setattr("polyfed.core.distill.distill", noted)
    run = federation(FedDF())
    taught(run, moved(run))
    assert seen["training"] == pf.Training(batch_size=128, optimizer="adam", lr=1e-3, clip=5.0)
    assert (seen["steps"], seen["epochs"], seen["temperature"], seen["cosine"]) == (1000, None, 1.0, True)
    assert (seen["validation"], seen["every"], seen["patience"]) == (None, 100, 1000)
    run = federation(FedDF(distill_steps=None, distill_epochs=3, distill_weight_decay=0.1, temperature=2.0))
    taught(run, moved(run))
    assert (seen["steps"], seen["epochs"], seen["temperature"]) == (None, 3, 2.0)
    assert seen["training"].weight_decay == 0.1
    run = federation(FedDFHetero(), models=WIDTHS)
    taught(run, moved(run))
    assert seen["training"] == pf.Training(batch_size=64, lr=0.01, momentum=0.9)
    assert (seen["steps"], seen["epochs"], seen["cosine"]) == (None, 1, False)


def test_the_global_model_of_one_architecture_is_the_distilled_one():
    run = federation(FedDF(**QUICK))
    state = taught(run, moved(run))
    for name, tensor in run.server.main.state_dict().items():
        assert torch.equal(tensor, state[name if name in state else f"mlp:1x12::{name}"])


def test_bytes_are_those_of_fedavg_with_the_clients_own_architecture():
    run, plain = federation(FedDF(**QUICK), models=TWO), federation(FedAvg(view="same_arch"), models=TWO)
    run.run(), plain.run()
    assert run.meter.bytes == plain.meter.bytes
    assert run.meter.bytes["up"][1] == 4 * (64 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3) + 8


# --- choosing by labelled data ---


def test_public_samples_to_choose_by_are_set_apart_and_stay_the_same():
    run = federation(FedDF(**QUICK, select_on="public", holdout=0.25), DIGITS)
    data, validation = run.method.split(run.server, run.ctx)
    assert (len(data), len(validation)) == (30, 10)
    assert sorted([*data.index.tolist(), *validation.index.tolist()]) == sorted(run.server.public.index.tolist())
    run.ctx.round = 5
    assert run.method.split(run.server, run.ctx)[1].index.tolist() == validation.index.tolist()
    assert federation(FedDF(**QUICK), DIGITS).method.split(run.server, run.ctx) == (run.server.public, None)


def test_the_best_student_is_kept(monkeypatch):
    """With targets that make the student worse, the one of the first look is the best."""
    monkeypatch.setattr(FedDF, "lesson", lambda self, replies, data, ctx: (data, -50.0 * data_targets(data)))
    options = {"distill_lr": 0.05, "check_every": 2, "patience": 6, "select_on": "public", "distill_batch": 40}
    found = []
    for more in ({"distill_steps": 2}, {"distill_steps": 200}):
        run = federation(FedDF(**options, distill_cosine=False, **more), DIGITS)
        found.append(taught(run, moved(run)))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def data_targets(data):
    return torch.nn.functional.one_hot(data.labels(), 10).float()


def test_networks_near_chance_or_far_below_the_others_are_dropped():
    assert worth_keeping([0.5, 0.6, 0.11, 0.55], 0.1) == [True, True, False, True]
    assert worth_keeping([0.5, 0.6, 0.12, 0.55], 0.1) == [True, True, False, True]  # by 1.5 deviations
    assert worth_keeping([0.5, 0.6, 0.4, 0.55], 0.1) == [True, True, False, True]  # mean .5125, deviation .0740
    assert worth_keeping([0.5, 0.6, 0.41, 0.55], 0.1) == [True, True, True, True]  # mean .515, deviation .0702
    assert worth_keeping([0.1, 0.05], 0.1) == [True, True]  # all or none
    assert worth_keeping([0.7], 0.1) == [True]


def test_steps_decide_whether_there_is_distillation_and_epochs_where_there_are_none():
    found = {steps: [FedDF(distill_steps=steps, distill_epochs=n).distills for n in (0, 1)] for steps in (None, 0, 5)}
    assert found == {None: [False, True], 0: [False, False], 5: [True, True]}


def test_a_dropped_network_neither_enters_the_average_nor_teaches(monkeypatch):
    asked = []
    monkeypatch.setattr(distillation, "worth_keeping", lambda *what: asked.append(what) or [True, False, True])
    monkeypatch.setattr(distillation, "count_right", lambda network, data: 3)
    options = {**QUICK, "select_on": "public", "drop_worst": True}
    run, without = federation(FedDF(**options), DIGITS), federation(FedDF(**{**options, "drop_worst": False}), DIGITS)
    replies = moved(run)
    dropped = taught(run, replies)
    assert run.ctx.records["dropped"] == [1]
    held_out = len(run.method.split(run.server, run.ctx)[1])
    assert asked == [([3 / held_out] * 3, 0.1)]  # ten classes
    del replies[1]
    assert all(torch.equal(tensor, dropped[name]) for name, tensor in taught(without, replies).items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drop_worst": True}, "drop_worst needs labelled data at the server: set select_on"),
        ({"view": "owned"}, "view is 'same_arch' or 'full', not 'owned'"),
        ({"distill_steps": -1}, "distill_steps must not be negative"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"holdout": 0.0}, "holdout must be above 0"),
        ({"ensemble": "votes"}, "ensemble is"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, words):
    with pytest.raises(pf.InputError, match=words):
        FedDF(**options)


def test_choosing_by_labels_that_are_not_there_is_refused_before_training():
    with pytest.raises(pf.InputError, match="needs public data with the clients' own classes"):
        federation(FedDF(select_on="public"))
    with pytest.raises(pf.InputError, match="needs labels of the public data"):
        prepare(FedDF(select_on="public"), synthetic(2), ["mlp:1x8"], Settings(1))
    with pytest.raises(pf.InputError, match="feddf needs public data at all parties"):
        prepare(FedDF(), synthetic(2, public=False), ["mlp:1x8"], Settings(1))
    assert federation(FedDF(select_on="test")).server.data.validation is not None


# --- width slices: FedFusion ---


def test_distilled_slices_are_those_of_fedfds_logit_distillation():
    """One batch an epoch: no order of samples to differ in."""
    common = {"weighting": "samples", "distill_batch": 40, "distill_epochs": 3}
    fusion = {"statistics": "public", "mask": False, "clip": None, "measure": "own"}
    ours = federation(FedDFHetero(**common, **fusion), models=WIDTHS, rounds=2)
    theirs = federation(FedFD(**common, distill="logit"), models=WIDTHS, rounds=2)
    ours.run(), theirs.run()
    for name, tensor in theirs.server.state.items():
        torch.testing.assert_close(ours.server.state[name], tensor, rtol=1e-5, atol=1e-6)
    plain = federation(HeteroFL(weighting="samples", **fusion), models=WIDTHS, rounds=2)
    plain.run()
    assert not any(torch.allclose(ours.server.state[n], t, rtol=1e-3) for n, t in plain.server.state.items())


def test_clients_get_slices_of_the_distilled_network():
    run = federation(FedDFHetero(), models=WIDTHS)
    exchange(run, MAIN)
    sent = run.method.send(run.server, run.backend.infos[1], MAIN, run.ctx).params["main"]
    widest = run.server.main.state_dict()
    for name, tensor in sent.items():
        assert torch.equal(tensor, widest[name][tuple(slice(0, n) for n in tensor.shape)])
    assert len(states(run)) == 3 and not same(states(run)[:1], states(run)[2:])


def test_statistics_come_from_everybody_also_where_the_worst_are_dropped(monkeypatch):
    fuse, seen = HeteroFL.fuse, {}

    def noted(self, server, replies, step, ctx):
        seen[step.name] = list(replies)
        fuse(self, server, replies, step, ctx)

    monkeypatch.setattr(HeteroFL, "fuse", noted)
    monkeypatch.setattr(FedDFHetero, "kept", lambda self, server, replies, ctx: {0: replies[0]})
    federation(FedDFHetero(), models=("cnn:4-8,bn@1", "cnn:4-8,bn@0.5")).run()
    assert seen == {"main": [0], "statistics": [0, 1, 2]}


def test_a_learner_hears_what_the_ensemble_said_and_tells_its_number_of_samples(monkeypatch):
    run = federation(FedDF(**QUICK), problem((18, 24)), ("sklearn:LogisticRegression", "mlp:1x8"))
    info, told = run.backend.infos[0], {}
    assert not run.method.send(run.server, info, MAIN, run.ctx).data  # nobody has said anything yet
    fuse = FedDF.fuse
    monkeypatch.setattr(
        FedDF, "fuse", lambda self, server, replies, *more: (told.update(replies), fuse(self, server, replies, *more))
    )
    exchange(run, MAIN)
    assert [told[client].meta["samples"] for client in (0, 1)] == [18, 24]
    said = run.method.send(run.server, info, MAIN, run.ctx).data["logits"]
    assert said.shape == (40, 3) and torch.equal(said, run.server.memory["ensemble"])
    assert not run.method.send(run.server, info, EVALUATE, run.ctx).data
