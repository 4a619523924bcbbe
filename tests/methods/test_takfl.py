"""TAKFL: the acceptance properties of its spec."""

import math
from dataclasses import replace

import pytest
import torch
from distill_problem import DIGITS, TWO, moved, taught
from public_problem import federation, problem
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.needs import missing
from polyfed.core.nets import Net
from polyfed.core.passes import count_right, logits_of
from polyfed.core.samples import Samples
from polyfed.core.stage import Batch
from polyfed.core.task_vectors import Weights, candidate_rows, learned_row, merge_loss, merged, row_of
from polyfed.methods.feddf import FedDF
from polyfed.methods.takfl import TAKFL
from polyfed.testing import synthetic

QUICK = {"distill_epochs": 2, "distill_batch": 16, "distill_lr": 1e-3}


def prototype(state, name):
    return {key: tensor for key, tensor in state.items() if key.startswith(name)}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


# --- adding up ---


def test_task_vectors_are_added_up_by_their_weights():
    start = {"w": torch.tensor([1.0, 1.0])}
    tasks = [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}]
    assert merged(start, tasks, [0.25, 0.75])["w"].tolist() == [1.25, 2.5]
    assert start["w"].tolist() == [1.0, 1.0]
    norm = merged({"a.running_var": torch.tensor([1.0])}, [{"a.running_var": torch.tensor([-3.0])}], [1.0])
    assert norm["a.running_var"].tolist() == [0.0]


def test_weights_of_zero_leave_the_averages_bit_for_bit():
    off, plain = federation(TAKFL(**QUICK, lam=(0.0, 0.0)), models=TWO), federation(FedDF(distill_steps=0), models=TWO)
    replies = moved(off)
    assert equal(taught(off, replies), taught(plain, replies))
    assert equal(taught(federation(TAKFL(distill_epochs=0), models=TWO), replies), taught(plain, replies))


def test_one_prototype_with_full_weight_and_no_self_term_is_feddf():
    common = {**QUICK, "temperature": 1.0, "distill_steps": None, "distill_clip": None, "distill_cosine": False}
    ours, theirs = federation(TAKFL(**common, self_weight=0.0, distill_weight_decay=0.0)), federation(FedDF(**common))
    replies = moved(ours)
    found, expected = taught(ours, replies), taught(theirs, replies)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    for name, tensor in ours.server.main.state_dict().items():
        assert torch.equal(tensor, found[name if name in found else f"mlp:1x12::{name}"])


def test_a_student_whose_row_is_one_hot_learns_from_that_prototype_only():
    rows = (1.0, 0.0, 0.5, 0.5)  # the smaller from itself, the larger from both
    found = []
    for other in (False, True):
        run = federation(TAKFL(**QUICK, lam=rows), models=TWO)
        replies = moved(run)
        if other:
            replies[1].params["main"] = {n: 2 * t for n, t in replies[1].params["main"].items()}
        found.append(taught(run, replies))
    assert equal(*(prototype(state, "mlp:1x8") for state in found))
    assert not any(torch.equal(t, found[1][n]) for n, t in prototype(found[0], "mlp:2x8").items())


def test_rows_go_from_the_smallest_to_the_largest_prototype():
    """Given in the other order at the command line: the names of architectures play no part."""
    square = (1.0, 2.0, 3.0, 4.0)
    assert row_of(square, 0, [True, True]) == [1.0, 2.0] and row_of(square, 1, [True, True]) == [3.0, 4.0]
    assert row_of((0.2, 0.8), 1, [True, True]) == [0.2, 0.8]
    run = federation(TAKFL(**QUICK, lam=(0.2, 0.8)), models=TWO[::-1])
    taught(run, moved(run))
    weights = run.ctx.records["distillation"]["weights"]
    assert list(weights) == [*TWO] and weights["mlp:1x8"] == {"mlp:1x8": 0.2, "mlp:2x8": 0.8}


def test_the_weight_of_an_absent_teacher_goes_to_the_others():
    assert row_of(None, 0, [True, False, True]) == pytest.approx([0.5, 0.5])
    assert row_of((0.1, 0.5, 0.4), 0, [True, False, True]) == pytest.approx([0.2, 0.8])
    assert row_of((2.0, 1.0, 1.0), 0, [True, True, False]) == pytest.approx([8 / 3, 4 / 3])  # their sum stays 4
    assert row_of((0.0, 1.0), 0, [True, False]) == [0.0]
    run = federation(TAKFL(**QUICK), models=TWO)
    replies = moved(run)
    del replies[1]
    before = {n: t.clone() for n, t in run.server.state.items()}
    state = taught(run, replies)
    assert not any(torch.equal(t, before[n]) for n, t in prototype(state, "mlp:2x8").items())  # still a student
    assert run.ctx.records["distillation"]["weights"] == {name: {"mlp:1x8": 1.0} for name in TWO}


# --- the tasks ---


def test_the_loss_of_a_task_by_hand():
    logits, target, own = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    batch = Batch(logits, torch.zeros(4), {"target": target, "own": own})
    found = TAKFL(temperature=3.0, self_temperature=20.0, self_weight=0.5).task_loss({"main": lambda x: x}, batch, {})

    def kl(teacher, t):
        p = (teacher / t).softmax(1)
        return float((p * (p.log() - (logits / t).log_softmax(1))).sum()) / 4

    assert float(found) == pytest.approx(9 * kl(target, 3.0) + 0.5 * 400 * kl(own, 20.0), rel=1e-4)


def test_targets_of_a_task_are_its_prototypes_mean_logits_and_the_averages_own(monkeypatch):
    seen = []

    def noted(options, student, data, targets, ctx, name, **more):
        seen.append((name, targets["target"], targets["own"]))
        return 0.0

    monkeypatch.setattr("polyfed.methods.takfl.distill_by", noted)
    run = federation(TAKFL(), models=TWO)
    replies = moved(run)
    taught(run, replies)
    first, second = FedDF(), FedDF()
    both = first.lesson({c: replies[c] for c in (0, 2)}, run.server.public, run.ctx)[1]
    alone = second.lesson({1: replies[1]}, run.server.public, run.ctx)[1]
    names, targets, own = zip(*seen, strict=True)
    assert names == (
        "distill/mlp:1x8",
        "distill/mlp:1x8/mlp:2x8",
        "distill/mlp:2x8/mlp:1x8",
        "distill/mlp:2x8",
    )
    for found, expected in zip(targets, (both, alone, both, alone), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(own[0], own[1]) and torch.equal(own[2], alone)  # the lone member is its prototype's average


def test_every_task_starts_from_the_average(monkeypatch):
    def shifted(options, student, data, targets, ctx, name, **more):
        with torch.no_grad():
            for parameter in student.parameters():
                parameter.add_(1.0)
        return 0.0

    run, plain = federation(TAKFL(lam=(0.25, 0.75)), models=TWO), federation(FedDF(distill_steps=0), models=TWO)
    replies = moved(run)
    start = taught(plain, replies)
    monkeypatch.setattr("polyfed.methods.takfl.distill_by", shifted)
    for name, tensor in taught(run, replies).items():
        torch.testing.assert_close(tensor, start[name] + 1.0)


def test_teachers_of_a_prototype_count_alike_and_its_average_by_samples(monkeypatch):
    """Uploads of 1 and 3 samples: the average has 1/4 and 3/4 of them, the ensemble a half of each one's logits."""
    seen = []
    monkeypatch.setattr("polyfed.methods.takfl.distill_by", lambda *given, **more: seen.append(given[3]))
    run = federation(TAKFL(), problem((18, 24)), ("mlp:1x8",))
    replies = moved(run)
    replies[1].meta["samples"] = 3
    one, two = (replies[client].params["main"] for client in (0, 1))

    def logits(state):
        model = run.ctx.blueprints["mlp:1x8"].build()
        model.load_state_dict(state)
        return logits_of(model, run.server.public)

    average = {name: 0.25 * one[name] + 0.75 * two[name] for name in one}
    taught(run, replies)
    ((target, own),) = [(targets["target"], targets["own"]) for targets in seen]
    torch.testing.assert_close(target, (logits(one) + logits(two)) / 2)
    torch.testing.assert_close(own, logits(average))
    assert not torch.allclose(target, 0.25 * logits(one) + 0.75 * logits(two), rtol=1e-2)


def test_task_vectors_have_running_statistics_too(monkeypatch):
    def shifted(options, student, data, targets, ctx, name, **more):
        for tensor in student.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(1.0)

    model = ("cnn:4-8,bn",)
    run, plain = federation(TAKFL(lam=(0.5,)), models=model), federation(FedDF(distill_steps=0), models=model)
    replies = moved(run)
    start = taught(plain, replies)
    monkeypatch.setattr("polyfed.methods.takfl.distill_by", shifted)
    found = taught(run, replies)
    assert sum("running" in name for name in found) == 4
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, start[name] + 0.5)


def test_a_heavy_self_term_holds_the_student_where_it_is():
    options = {
        **QUICK,
        "distill_optimizer": "sgd",
        "distill_weight_decay": 0.0,
        "distill_lr": 1e-4,
        "distill_epochs": 40,
    }
    away = []
    for weight in (0.0, 3.0):
        run = federation(TAKFL(**options, self_weight=weight), models=TWO)
        replies = moved(run)
        start = taught(federation(FedDF(distill_steps=0), models=TWO), replies)
        away.append(sum(float((t - start[n]).pow(2).sum()) for n, t in taught(run, replies).items()))
    assert away[1] < 0.9 * away[0]


def test_public_labels_play_no_part():
    found = []
    for flip in (False, True):
        run = federation(TAKFL(**QUICK), models=TWO)
        if flip:
            run.server.data.public = replace(run.server.public, y=1 - run.server.public.y)
        found.append(taught(run, moved(run)))
    assert equal(*found)


# --- tuned weights ---


def test_candidates_grow_with_the_prototype_and_become_more_unequal():
    rows = candidate_rows(3, 4, torch.Generator().manual_seed(0))
    assert len(rows) == 13 and rows[0] == [1 / 3] * 3
    for row in rows:
        assert row == sorted(row) and sum(row) == pytest.approx(1.0)
    largest = [sum(row[-1] for row in rows[1 + 4 * k : 5 + 4 * k]) / 4 for k in range(3)]
    assert largest == sorted(largest) and largest[0] < largest[2]
    many = candidate_rows(2, 4000, torch.Generator().manual_seed(1))[1:4001]
    share = sum(row[0] for row in many) / len(many)  # of nearly exponential draws; of uniform ones 0.307
    assert share == pytest.approx(0.25, abs=0.01)


def test_candidates_are_powers_of_exponential_draws():
    """The smaller of two such draws has a third of the larger one in the median; of their powers the power of that."""
    rows = candidate_rows(2, 2000, torch.Generator().manual_seed(2))[1:]
    ratios = torch.tensor([row[0] / row[1] for row in rows], dtype=torch.float64).view(3, 2000).median(1).values
    assert (ratios.log() / math.log(1 / 3)).tolist() == pytest.approx([1, 5, 10], rel=0.05)


def test_the_best_candidate_on_the_data_apart_wins_and_the_uniform_one_among_equals(monkeypatch):
    run = federation(TAKFL(**QUICK, merge="heuristic", select_on="public", candidates=2), DIGITS, TWO)
    scores = iter([3, 1, 5, 5, 2, 0, 0] + [4] * 7)
    monkeypatch.setattr("polyfed.core.task_vectors.count_right", lambda model, data: next(scores))
    taught(run, moved(run))
    rows = [candidate_rows(2, 2, run.ctx.rng(f"candidates/{name}")) for name in TWO]
    weights = run.ctx.records["distillation"]["weights"]
    assert [*weights["mlp:1x8"].values()] == rows[0][2] and [*weights["mlp:2x8"].values()] == [0.5, 0.5]


def test_learned_weights_prefer_the_task_that_is_right():
    """One task has a hidden unit for each class, the other spoils it: five steps of 0.05 apart, 1 / (1 + exp(-0.5))."""
    method = TAKFL(merge="learned", select_on="public", holdout=0.5)
    run = federation(method, DIGITS, ("mlp:1x8",))
    data, validation = method.split(run.server, run.ctx)
    held = method.held(run.server, run.ctx.blueprints["mlp:1x8"], run.ctx)
    start = {name: tensor.clone() for name, tensor in held.items()}
    x, y = validation.inputs().flatten(1), F.one_hot(validation.labels(), 10).float()
    good = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for label in range(8):  # a hidden unit for each of eight classes
        good["stem.linear.weight"][label] = (x * y[:, label : label + 1]).mean(0)
        good["head.weight"][label, label] = 1.0
    bad = {name: -tensor for name, tensor in good.items()}
    row = learned_row("mlp:1x8", start, [bad, good], data, validation, run.ctx)
    assert sum(row) == pytest.approx(1.0) and row[1] == pytest.approx(0.6225, abs=0.002)
    assert row == learned_row("mlp:1x8", start, [bad, good], data, validation, run.ctx)


@pytest.mark.parametrize(("samples", "batch"), [(10, 10), (100, 64)])
def test_weights_are_learned_in_batches_of_64_where_there_are_so_many(samples, batch, monkeypatch):
    run, stages = federation(TAKFL(), models=("mlp:1x8",)), []
    monkeypatch.setattr(type(run.ctx), "run", lambda ctx, stage, models, name: stages.append(stage))
    start = run.method.held(run.server, run.ctx.blueprints["mlp:1x8"], run.ctx)
    validation = Samples(torch.zeros(samples, 1, 8, 8), torch.zeros(samples, dtype=torch.long))
    assert learned_row("mlp:1x8", start, [start, start], validation, validation, run.ctx) == [0.5, 0.5]
    training = stages[0].training
    assert (training.optimizer, training.lr, training.epochs, training.batch_size) == ("adamw", 0.05, 5, batch)


def test_the_loss_of_the_weights_is_that_of_the_merged_network():
    run = federation(TAKFL(), models=("mlp:1x8",))
    start = {n: t.clone() for n, t in run.server.state.items()}
    start = {n.split("::")[-1]: t for n, t in start.items()}
    rng = torch.Generator().manual_seed(0)
    tasks = [{n: torch.randn(t.shape, generator=rng) for n, t in start.items()} for _ in range(2)]
    network = run.ctx.replica("mlp:1x8")
    weights = Weights(2)
    with torch.no_grad():
        weights.logits.copy_(torch.tensor([0.0, 1.0]))
        weights.scale.fill_(0.5)
    batch = Batch(torch.randn(4, 1, 8, 8, generator=rng), torch.tensor([0, 1, 2, 0]))
    stacked = {n: torch.stack([task[n] for task in tasks]) for n in start}
    loss = merge_loss({"main": Net(network), "weights": Net(weights)}, batch, {"start": start, "tasks": stacked})
    network.load_state_dict(merged(start, tasks, weights.logits.detach().softmax(0).tolist()))
    torch.testing.assert_close(loss, F.cross_entropy(0.5 * network(batch.x), batch.y))


def test_tuned_weights_run_and_choose_no_worse_than_uniform():
    run = federation(TAKFL(**QUICK, merge="heuristic", select_on="public", holdout=0.5, candidates=3), DIGITS, TWO)
    plain = federation(TAKFL(**QUICK, select_on="public", holdout=0.5), DIGITS, TWO)
    replies = moved(run)
    taught(run, replies), taught(plain, replies)
    for name in TWO:
        right = []
        for each in (run, plain):
            model = each.ctx.replica(name)
            model.load_state_dict(each.method.held(each.server, each.ctx.blueprints[name], each.ctx))
            right.append(count_right(model, each.method.split(each.server, each.ctx)[1]))
        assert right[0] >= right[1]


def test_bytes_are_those_of_feddf():
    ours, theirs = federation(TAKFL(**QUICK), models=TWO), federation(FedDF(distill_steps=1), models=TWO)
    ours.run(), theirs.run()
    assert ours.meter.bytes == theirs.meter.bytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"merge": "learned"}, "merge='learned' needs labelled data at the server: set select_on"),
        ({"self_weight": -1.0}, "self_weight must not be negative"),
        ({"self_temperature": 0.0}, "self_temperature must be above 0"),
        ({"candidates": 0}, "candidates must be at least 1"),
        ({"ensemble": "probs"}, "ensemble is 'logits'"),
        ({"check_every": 10}, "check_every must stay 100: labelled data is for lambda"),
        ({"patience": 10}, "patience must stay 1000"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, words):
    with pytest.raises(pf.InputError, match=words):
        TAKFL(**options)


def test_a_wrong_number_of_weights_is_refused_before_training():
    with pytest.raises(pf.InputError, match=r"lam has 3 numbers, but there are 2 architectures.*or 4 row by row"):
        federation(TAKFL(lam=(1.0, 0.0, 0.0)), problem(), TWO)


def test_clients_that_are_no_networks_are_refused_before_training():
    """They have no task vectors: FedDF takes them."""
    forest = pytest.importorskip("sklearn.ensemble").RandomForestClassifier(3)
    with pytest.raises(pf.InputError, match="takfl needs"):
        federation(TAKFL(), problem(), ("mlp:1x8", forest))
    federation(FedDF(), problem(), ("mlp:1x8", forest))


def test_public_data_and_networks_that_the_server_can_build_are_needed():
    with pytest.raises(pf.InputError, match="takfl needs public data at all parties"):
        federation(TAKFL(), synthetic(3, public=False))
    run = federation(TAKFL())
    hidden = {name: replace(blueprint, build=None) for name, blueprint in run.ctx.blueprints.items()}
    found = missing(TAKFL(), list(run.backend.infos.values()), hidden, run.server.public, (1, 8, 8))
    assert found == "architectures that the server can build, but the model of client 0 is known to that client only"
