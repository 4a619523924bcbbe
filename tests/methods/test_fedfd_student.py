"""FedFD without averaging: who teaches the student, what travels, who learns from it, and its limit cases."""

import math
from types import SimpleNamespace

import pytest
import torch
from public_problem import exchange, federation, party, problem, same, states
from teaching import (
    MAIN,
    NORMED,
    UNLIKE,
    bare_model,
    equal,
    finished,
    off_identity,
    own_model,
    projections,
    started,
    watched,
)
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.passes import logits_of
from polyfed.core.statistics import collect_statistics
from polyfed.methods.feature_teaching import answers
from polyfed.methods.fedfd_student import FedFDStudent, subset_size
from polyfed.methods.local import Local
from polyfed.models import build

SERVER = {"server_model": "cnn:6-12"}


def test_defaults_are_those_of_the_specification():
    method = FedFDStudent()
    assert (method.distill, method.include_full_group, method.logit_weight) == ("feature", True, 1.0)
    assert (method.subset, method.digest_epochs, method.digest_loss) == (0, 1, "l1")
    assert not method.shares  # no weights travel


def test_a_teacher_wider_than_the_server_has_orthonormal_rows():
    run = started(FedFDStudent(server_model="cnn:4-8"), UNLIKE)
    ((name, module),) = projections(run).items()
    assert name == "projection/resnet10:w2" and module.matrix.shape == (16, 16)
    columns = module.columns().detach()
    assert columns.shape == (8, 16) and off_identity(columns @ columns.T) <= 1e-5


def test_unlike_networks_and_a_users_own_learn_without_parameters_travelling():
    models = (*UNLIKE, own_model)
    run = finished(FedFDStudent(**SERVER, subset=16), models, problem((18, 24, 30)), rounds=3)
    names = {name.removeprefix("projection/") for name in projections(run)}
    assert names == {"cnn:4-8", "resnet10:w2", "own_model"}
    up = sum(4 * 16 * (d + 3) for d in (8, 16, 6))  # features and logits on the subset
    assert [line["bytes_up"] for line in run.history] == [up] * 3
    down = 3 * 8  # the seed of the subset; from the second round the student's logits
    assert [line["bytes_down"] for line in run.history] == [down, down + 3 * 4 * 16 * 3, down + 3 * 4 * 16 * 3]
    assert all(0 <= line["accuracy"]["global"] <= 1 and line["distill_loss"] > 0 for line in run.history)
    assert run.server.state == {} and type(run.server.main).__name__ == "ConvNet"


def test_without_a_digest_clients_train_locally_exactly():
    options = {"rounds": 3, "participation": 0.67}
    run = finished(FedFDStudent(**SERVER, digest_epochs=0), UNLIKE, **options)
    base = finished(Local(), UNLIKE, **options)
    assert same(states(run), states(base))
    assert run.history[-1]["bytes_down"] == 2 * 8
    digesting = finished(FedFDStudent(**SERVER), UNLIKE, **options)
    assert not same(states(digesting), states(base))


@pytest.mark.parametrize(
    "untaught", [{"distill_epochs": 0}, {"include_full_group": False, "logit_aux": 0.0, "server_model": "mlp:1x8"}]
)
def test_nobody_learns_from_a_student_that_was_not_taught(untaught):
    models = ("cnn:4-8", "mlp:1x8")  # all as wide as the student of the second case, so that nobody teaches it
    run = finished(FedFDStudent(**SERVER | untaught), models, rounds=3)
    assert same(states(run), states(finished(Local(), models, rounds=3)))
    assert [line["bytes_down"] for line in run.history] == [3 * 8] * 3 and "distill_loss" not in run.history[-1]


def test_clients_digest_the_students_logits_on_the_subset_of_the_round():
    run = started(FedFDStudent(**SERVER, subset=10), UNLIKE)
    infos = run.backend.infos
    first = run.method.send(run.server, infos[0], MAIN, run.ctx)
    assert not first.data  # the student knows nothing yet
    exchange(run, MAIN)
    run.ctx.round = 2
    second = run.method.send(run.server, infos[0], MAIN, run.ctx)
    assert second.meta["subset_seed"] != first.meta["subset_seed"]
    client = party(run, 0)
    client.memory["subset_seed"] = second.meta["subset_seed"]
    expected = logits_of(run.server.main, run.method.exchange.public_subset(client))
    assert torch.equal(second.data["logits"], expected)
    client.inbox = second
    digest, revisit = run.method.local(client, MAIN, run.ctx), None
    stage = next(digest)
    assert torch.equal(stage.columns["target"], expected) and len(stage.data) == 10
    revisit = digest.send(0.0)
    assert revisit.data is None
    other = run.method.local(client, MAIN, run.ctx)
    assert next(other).loss == stage.loss  # engines group clients by comparing losses
    assert not run.method.send(run.server, infos[0], pf.Step("evaluate", who="all", up=False), run.ctx).meta


def test_without_a_digest_the_student_still_learns_on_the_rows_of_the_round():
    run = started(FedFDStudent(**SERVER, subset=10, digest_epochs=0), UNLIKE)
    stages = watched(run)
    for number in (1, 2):
        exchange(run, MAIN, number)
        subset = run.method.exchange.public_subset(party(run, 0))  # the rows that this client answered on
        assert torch.equal(stages[-1].data.index, subset.index)
        said = [logits_of(party(run, c).main, subset) for c in range(3)]
        torch.testing.assert_close(stages[-1].columns["logits"], sum(said) / 3)
    assert not torch.equal(stages[0].data.index, stages[1].data.index)


def test_the_student_learns_its_head_from_the_mean_logits():
    run = started(FedFDStudent(**SERVER, distill_epochs=20, distill_batch=8, distill_lr=0.05), UNLIKE)
    stages, head = watched(run), run.server.main.head.weight.detach().clone()
    exchange(run, MAIN)
    (stage,) = stages
    subset = run.method.exchange.public_subset(run.server)
    said = [logits_of(party(run, c).main, subset) for c in range(3)]
    torch.testing.assert_close(stage.columns["logits"], sum(said) / 3)
    assert set(stage.columns) == {"feature/cnn:4-8", "feature/resnet10:w2", "logits"}
    assert not torch.equal(run.server.main.head.weight, head)
    before = logits_of(build("cnn:6-12", (1, 8, 8), 3), subset)
    target = torch.softmax(stage.columns["logits"], 1)
    after = logits_of(run.server.main, subset)
    assert F.cross_entropy(after, target) < F.cross_entropy(before, target)


def test_the_student_predicts_with_statistics_of_all_public_data():
    run = started(FedFDStudent(server_model="cnn:6-12,bn", subset=10), UNLIKE)
    exchange(run, MAIN)
    again = build("cnn:6-12,bn", (1, 8, 8), 3)
    again.load_state_dict(run.server.main.state_dict())
    collect_statistics(again, run.server.public, run.ctx.training.batch_size)
    assert equal(again.state_dict(), run.server.main.state_dict())
    assert float(again.stem.norm.running_mean.abs().max()) > 0


def test_networks_of_one_width_but_unlike_build_are_two_teachers():
    run = started(FedFDStudent(**SERVER), ("cnn:4-8", "mlp:1x8", "cnn:4-8"))
    stages = watched(run)
    exchange(run, MAIN)
    subset = run.method.exchange.public_subset(run.server)
    said = [answers(party(run, c).main, subset, True, False)["features"] for c in range(3)]
    assert torch.equal(stages[0].columns["feature/mlp:1x8"], said[1])
    torch.testing.assert_close(stages[0].columns["feature/cnn:4-8"], (said[0] + said[2]) / 2)


def test_teachers_as_wide_as_the_student_take_part():
    run = started(FedFDStudent(), UNLIKE)
    assert run.server.main.feature_dim == 16  # the largest of the clients' networks
    stages = watched(run)
    exchange(run, MAIN)
    assert set(projections(run)) == {"projection/cnn:4-8"}
    assert set(stages[0].columns) == {"feature/cnn:4-8", "feature/resnet10:w2", "logits"}
    left_out = started(FedFDStudent(include_full_group=False), UNLIKE)
    stages = watched(left_out)
    exchange(left_out, MAIN)
    assert set(stages[0].columns) == {"feature/cnn:4-8", "logits"}


def test_logit_distillation_sends_logits_only():
    run = finished(FedFDStudent(**SERVER, distill="logit", subset=16), UNLIKE, rounds=1)
    assert run.history[0]["bytes_up"] == 3 * 4 * 16 * 3 and not projections(run)


def test_public_labels_change_nothing():
    runs = [finished(FedFDStudent(), NORMED, problem((18, 24, 30), labelled=flag)) for flag in (True, False)]
    assert not torch.equal(*(run.server.public.labels() for run in runs))
    assert equal(runs[0].server.main.state_dict(), runs[1].server.main.state_dict())
    assert same(states(runs[0]), states(runs[1]))


@pytest.mark.parametrize("public", [40, 9, 1])
def test_small_clients_missing_classes_and_partial_participation(public):
    clients = problem((1, 24, 2, 30, 17, 3), public=public, lacking=1)
    run = finished(FedFDStudent(distill_batch=8), NORMED, clients, rounds=3, participation=0.5)
    assert all(len(line["participants"]) == 3 for line in run.history)
    assert all(math.isfinite(line["loss"]) and 0 <= line["accuracy"]["global"] <= 1 for line in run.history)
    assert all(bool(t.isfinite().all()) for t in run.server.main.state_dict().values())


@pytest.mark.parametrize(
    "options, words",
    [
        ({"distill": "none"}, ("distill", "'feature' or 'logit'", "'none'")),
        ({"digest_loss": "l3"}, ("digest_loss", "l1")),
        ({"subset": -1}, ("subset", "negative")),
    ],
)
def test_values_that_make_no_sense_are_refused(options, words):
    with pytest.raises(pf.InputError) as error:
        FedFDStudent(**options)
    assert str(error.value).startswith("fedfd_student: ") and all(word in str(error.value) for word in words)


def test_networks_without_features_are_refused():
    with pytest.raises(pf.InputError, match=r"features\(x\).*client 0.*polyfed.adapt"):
        federation(FedFDStudent(), problem(), (bare_model,))


def test_without_a_subset_all_public_samples_are_exchanged():
    assert FedFDStudent(subset=7).exchange.subset == 7
    assert FedFDStudent(subset=0).exchange.subset > 10**15  # more than any public data has


@pytest.mark.parametrize(("subset", "taken"), [(0, 30), (7, 7), (31, 30)])
def test_bytes_are_told_for_no_more_public_samples_than_there_are(subset, taken):
    told = SimpleNamespace(method=FedFDStudent(subset=subset), public=range(30))
    assert subset_size(told) == taken
