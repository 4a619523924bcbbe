"""FedFD against its specification: teachers, projections, the loss, what moves, what travels, and its limit cases."""

import math
from typing import get_args

import pytest
import torch
from public_problem import exchange, federation, party, problem, same, states
from teaching import (
    ADG,
    MAIN,
    NORMED,
    UNLIKE,
    clones,
    equal,
    finished,
    matrices,
    off_identity,
    own_model,
    projections,
    started,
    watched,
)
from torch import nn

import polyfed as pf
from polyfed.core.nets import Net
from polyfed.core.passes import logits_of
from polyfed.core.stage import Batch
from polyfed.core.statistics import collect_statistics
from polyfed.methods import make
from polyfed.methods.feature_teaching import answers
from polyfed.methods.fedfd import FedFD
from polyfed.methods.heterofl import HeteroFL
from polyfed.models import build, levels
from polyfed.ops.aggregate import Part, Slot, scatter_mean
from polyfed.ops.projection import OrthMap, OrthogonalProjection

AS_HETEROFL = {"weighting": "samples", "statistics": "public", "mask": False, "clip": None, "measure": "own"}
STRONG = {"distill_lr": 0.5, "temperature": 0.1}  # so that effects of the distillation are large


# --- aggregation ---


def test_entries_are_averaged_over_their_holders_by_hand():
    values = {0: (4, 1.0), 1: (4, 3.0), 2: (3, 5.0), 3: (2, 7.0), 4: (2, 9.0)}
    parts = [
        Part({"w": torch.full((n, n), v)}, {"w": Slot("w", (slice(0, n), slice(0, n)))}, 1.0)
        for n, v in values.values()
    ]
    expected = torch.full((4, 4), 2.0)  # two holders
    expected[:3, :3] = 3.0  # three
    expected[:2, :2] = 5.0  # all five
    for order in (parts, parts[::-1], [parts[i] for i in (2, 4, 0, 3, 1)]):
        state = {"w": torch.full((5, 4), -1.0)}
        scatter_mean(state, order)
        torch.testing.assert_close(state["w"][:4], expected)
        assert state["w"][4].tolist() == [-1.0] * 4  # held by nobody


# --- projections ---


@pytest.mark.parametrize(
    "models, options, names",
    [
        (ADG, {}, {ADG[1], ADG[2]}),
        (levels("cnn:4-10", "a-a-a"), {}, set()),
        (levels("cnn:4-10", "a-c-d-f-i"), {}, set(levels("cnn:4-10", "c-d-f-i"))),
        (levels("cnn:4-10", "d-g"), {}, {"cnn:4-10@0.4"}),  # the server is as wide as the widest client
        (levels("cnn:4-10", "d-g"), {"server_model": "cnn:4-10@1"}, {"cnn:4-10@0.7", "cnn:4-10@0.4"}),
        (ADG, {"align": False}, {"1", "2", "4", "5"}),
        (ADG, {"distill": "logit"}, set()),
        (ADG, {"distill": "none"}, set()),
    ],
)
def test_there_is_a_projection_for_every_teacher_of_another_width(models, options, names):
    run = started(FedFD(**options), models, problem((9,) * 6))
    assert {name.removeprefix("projection/") for name in projections(run)} == names
    for module in projections(run).values():
        assert isinstance(module, OrthogonalProjection) and module.matrix.shape == (run.server.main.feature_dim,) * 2


def test_projections_start_at_the_scale_that_is_asked_for():
    quarter, eighth = (matrices(started(FedFD(init_scale=scale))) for scale in (0.25, 0.125))
    drawn = torch.cat([matrix.flatten() for matrix in quarter.values()])  # 200 numbers
    assert float(drawn.std()) == pytest.approx(0.25, rel=0.2)
    assert all(torch.equal(quarter[name], 2 * matrix) for name, matrix in eighth.items())


@pytest.mark.parametrize("orth_map", [name for name in get_args(OrthMap) if name != "taylor"])
def test_projections_stay_orthonormal_over_rounds(orth_map):
    run = started(FedFD(orth_map=orth_map, distill_epochs=4, distill_batch=8, distill_lr=0.05, temperature=0.3))
    before = matrices(run)
    for number in (1, 2):
        exchange(run, MAIN, number)
    for name, module in projections(run).items():
        columns = module.columns().detach()
        assert columns.shape[0] == 10 and off_identity(columns.T @ columns) <= 1e-5
        assert float((module.matrix.detach() - before[name]).abs().max()) > 1e-3


def test_without_orthogonality_the_matrices_are_free():
    run = started(FedFD(orthogonal=False, distill_epochs=8, **STRONG))
    exchange(run, MAIN)
    shapes = {name: tuple(module.matrix.shape) for name, module in projections(run).items()}
    assert shapes == {f"projection/{ADG[1]}": (10, 7), f"projection/{ADG[2]}": (10, 4)}
    assert all(off_identity(m.columns().detach().T @ m.columns().detach()) > 0.01 for m in projections(run).values())


def test_a_width_that_is_absent_leaves_its_matrix_and_the_divisor_alone():
    run = started(FedFD(**STRONG))
    stages, before = watched(run), matrices(run)
    exchange(run, MAIN, clients=(0, 1))
    assert list(stages[0].columns) == [f"feature/{ADG[1]}"]
    after = matrices(run)
    assert torch.equal(after[f"projection/{ADG[2]}"], before[f"projection/{ADG[2]}"])
    assert not torch.equal(after[f"projection/{ADG[1]}"], before[f"projection/{ADG[1]}"])


def test_projections_persist_or_are_drawn_anew():
    kept, fresh = (started(FedFD(proj_persist=p, distill_lr=1e-12)) for p in (True, False))
    first = matrices(kept)
    assert equal(first, matrices(fresh))
    for run in (kept, fresh):
        exchange(run, MAIN)
    assert all(torch.allclose(t, first[n], atol=1e-9) for n, t in matrices(kept).items())
    again = matrices(fresh)
    assert all(float((t - first[n]).abs().max()) > 1e-3 for n, t in again.items())
    exchange(fresh, MAIN, 2)
    assert all(float((t - again[n]).abs().max()) > 1e-3 for n, t in matrices(fresh).items())


# --- teachers ---


def test_teachers_are_uniform_means_of_the_features_of_the_uploaded_networks():
    run = started(FedFD(), clients=problem((18, 24, 30, 9, 40)))  # clients 0, 3: wide; 1, 4: middle; 2: narrow
    stages = watched(run)
    exchange(run, MAIN)
    said = {c: answers(party(run, c).main, run.server.public, True, False)["features"] for c in range(5)}
    (stage,) = stages
    assert list(stage.columns) == [f"feature/{ADG[1]}", f"feature/{ADG[2]}"]
    torch.testing.assert_close(stage.columns[f"feature/{ADG[1]}"], (said[1] + said[4]) / 2)
    assert torch.equal(stage.columns[f"feature/{ADG[2]}"], said[2])
    assert stage.data is run.server.public and stage.training.batch_size == 64
    assert (stage.training.lr, stage.training.momentum, stage.training.optimizer) == (0.01, 0.9, "sgd")


def test_without_alignment_every_client_is_a_teacher():
    run = started(FedFD(align=False), clients=problem((18, 24, 30, 9, 40)))
    stages = watched(run)
    exchange(run, MAIN)
    assert list(stages[0].columns) == ["feature/1", "feature/2", "feature/4"]
    said = answers(party(run, 4).main, run.server.public, True, False)["features"]
    assert torch.equal(stages[0].columns["feature/4"], said)


def test_teachers_with_static_norms_use_statistics_of_the_public_data():
    run = started(FedFD(), NORMED)
    stages = watched(run)
    exchange(run, MAIN)
    for client in (1, 2):
        model = run.ctx.blueprints[NORMED[client]].build()
        model.load_state_dict(party(run, client).main.state_dict())
        collect_statistics(model, run.server.public, run.ctx.training.batch_size)  # as for the global network
        expected = answers(model, run.server.public, True, False)["features"]
        torch.testing.assert_close(stages[0].columns[f"feature/{NORMED[client]}"], expected)
        own = answers(party(run, client).main, run.server.public, True, False)["features"]
        assert float((own - expected).abs().max()) > 0.01  # with statistics of its own data it would say something else


def test_teachers_with_ordinary_norms_use_the_statistics_that_they_upload():
    run = started(FedFD(static_bn=False), NORMED)
    stages = watched(run)
    exchange(run, MAIN)
    expected = answers(party(run, 1).main, run.server.public, True, False)["features"]
    torch.testing.assert_close(stages[0].columns[f"feature/{NORMED[1]}"], expected)


def test_logit_teacher_is_the_mean_of_all_clients_logits():
    run = started(FedFD(distill="logit"))
    stages = watched(run)
    exchange(run, MAIN)
    said = [logits_of(party(run, c).main, run.server.public) for c in range(3)]
    assert list(stages[0].columns) == ["logits"]
    torch.testing.assert_close(stages[0].columns["logits"], sum(said) / 3)


# --- the loss ---


class Given(nn.Module):
    """A network whose features are its input, with a head of ones."""

    def features(self, x):
        return x

    def head(self, z):
        return z @ torch.ones(z.shape[1], 2).cumsum(1)


def loss_of(method, columns, z, modules=()):
    nets = {"main": Net(Given()), **{name: Net(module) for name, module in dict(modules).items()}}
    return method.distillation_loss(nets, Batch(z, torch.zeros(len(z)), columns), {})


def kl(p, q):
    return float((p * (p / q).log()).sum(1).mean())


def test_loss_is_the_mean_over_teachers_by_hand():
    z = torch.tensor([[1.0, 2.0, 0.0], [0.5, 0.0, 1.0]])
    narrow, full = torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    turn = OrthogonalProjection(3, 2)
    with torch.no_grad():
        turn.matrix[0, 1] = -math.pi / 2  # first two features turned by a right angle: (a, b, c) -> (b, -a)
    columns = {"feature/narrow": narrow, "feature/full": full}
    projected = torch.tensor([[2.0, -1.0], [0.0, -0.5]])
    torch.testing.assert_close(turn(z).detach(), projected)
    for tau in (1.0, 0.5):
        terms = [
            kl(torch.softmax(teacher / tau, 1), torch.softmax(student / tau, 1))
            for student, teacher in ((projected, narrow), (z, full))
        ]
        method = FedFD(temperature=tau, static_bn=False)
        found = float(loss_of(method, columns, z, {"projection/narrow": turn}).detach())
        assert found == pytest.approx(sum(terms) / 2, abs=1e-6)
    swapped = FedFD(kl_direction="student_teacher", static_bn=False)
    one = {"feature/narrow": narrow}
    expected = kl(torch.softmax(projected, 1), torch.softmax(narrow, 1))
    assert float(loss_of(swapped, one, z, {"projection/narrow": turn}).detach()) == pytest.approx(expected, abs=1e-6)
    squared = FedFD(feature_loss="mse", static_bn=False)
    expected = float((projected - narrow).pow(2).mean())
    assert float(loss_of(squared, one, z, {"projection/narrow": turn}).detach()) == pytest.approx(expected, abs=1e-6)


def test_logit_term_is_added_with_its_weight():
    z, logits = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]])
    divergence = kl(torch.softmax(logits, 1), torch.softmax(torch.tensor([[3.0, 6.0]]), 1))
    feature = kl(torch.tensor([[0.5, 0.5]]), torch.softmax(z, 1))
    columns = {"feature/a": torch.zeros(1, 2), "logits": logits}
    found = float(loss_of(FedFD(logit_aux=0.25, static_bn=False), columns, z))
    assert found == pytest.approx(feature + 0.25 * divergence, abs=1e-6)
    only = float(loss_of(FedFD(distill="logit", static_bn=False), {"logits": logits}, z))
    assert only == pytest.approx(divergence, abs=1e-6)
    # At a temperature of 2 both terms have half of all logits.
    warm = FedFD(logit_aux=0.25, static_bn=False, temperature=2.0)
    divergence = kl(torch.softmax(logits / 2, 1), torch.softmax(torch.tensor([[1.5, 3.0]]), 1))
    feature = kl(torch.tensor([[0.5, 0.5]]), torch.softmax(z / 2, 1))
    assert float(loss_of(warm, columns, z)) == pytest.approx(feature + 0.25 * divergence, abs=1e-6)


def test_the_full_group_takes_part_when_asked():
    columns = {}
    for option in (False, True):
        run = started(FedFD(include_full_group=option))
        stages = watched(run)
        exchange(run, MAIN)
        columns[option] = list(stages[0].columns)
    narrow = [f"feature/{ADG[1]}", f"feature/{ADG[2]}"]
    assert columns == {False: narrow, True: [f"feature/{ADG[0]}", *narrow]}


def test_with_one_width_there_is_nothing_to_distil_unless_asked():
    models = ["cnn:4-10@1"]
    skipped, base = finished(FedFD(**STRONG), models), finished(HeteroFL(**AS_HETEROFL), models)
    assert equal(skipped.server.state, base.server.state)
    assert "distill_loss" not in skipped.history[-1]
    asked = finished(FedFD(include_full_group=True, **STRONG), models)
    assert not equal(asked.server.state, base.server.state)


@pytest.mark.parametrize("models", [ADG, NORMED])
def test_distillation_lowers_its_loss(models):
    runs = [
        started(FedFD(distill_epochs=e, distill_batch=8, distill_lr=0.05, temperature=0.3), models) for e in (1, 15)
    ]
    found = []
    for run in runs:
        stages = watched(run)
        exchange(run, MAIN)
        columns = stages[0].columns
        nets = {name: Net(module) for name, module in run.server.models.items()}
        batch = Batch(run.server.public.inputs(), run.server.public.labels(), columns)
        found.append(float(run.method.distillation_loss(nets, batch, {}).detach()))
    assert found[1] < 0.8 * found[0]


# --- what moves ---


@pytest.mark.parametrize("models", [ADG, NORMED])
def test_distillation_moves_the_extractor_and_the_projections_but_not_the_head(models):
    plain, taught = started(FedFD(distill="none"), models), started(FedFD(**STRONG), models)
    drawn = matrices(taught)
    for run in (plain, taught):
        exchange(run, MAIN)
    for name in plain.server.state:
        head, statistics = name.startswith("head."), "running" in name
        assert statistics or torch.equal(plain.server.state[name], taught.server.state[name]) == head, name
    own = taught.server.main.state_dict()
    assert all(torch.equal(t, taught.server.state[n]) for n, t in own.items() if n in taught.server.state)
    assert all(not torch.equal(t, drawn[n]) for n, t in matrices(taught).items())
    assert same(states(plain), states(taught))  # the uploaded networks belong to the clients


def test_a_logit_term_moves_the_head_too():
    plain, taught = started(FedFD(distill="none")), started(FedFD(logit_aux=0.5))
    for run in (plain, taught):
        exchange(run, MAIN)
    assert not torch.equal(plain.server.state["head.weight"], taught.server.state["head.weight"])


def test_what_was_distilled_reaches_the_clients():
    run = started(FedFD(**STRONG))
    exchange(run, MAIN)
    message = run.method.send(run.server, run.backend.infos[2], MAIN, run.ctx)
    sent = message.params["main"]["stages.0.conv.weight"]
    assert torch.equal(sent, run.server.main.state_dict()["stages.0.conv.weight"][:4, :2])


def test_statistics_are_those_of_the_distilled_network_on_public_data():
    run = started(FedFD(**STRONG), NORMED)
    exchange(run, MAIN)
    model = run.ctx.blueprints[NORMED[0]].build()
    model.load_state_dict({n: t for n, t in run.server.state.items() if "::" not in n}, strict=False)
    collect_statistics(model, run.server.public, run.ctx.training.batch_size)
    found = run.server.main.state_dict()
    assert all(torch.equal(t, found[n]) for n, t in model.state_dict().items() if "running" in n)


@pytest.mark.parametrize("measure, collected", [("own", {NORMED[0]}), ("slice", set(NORMED))])
def test_public_statistics_are_collected_for_the_networks_that_are_measured_with_them(measure, collected):
    run = started(FedFD(measure=measure), NORMED)
    before = {name: tensor.clone() for name, tensor in run.server.state.items() if "::" in name}
    exchange(run, MAIN)
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, run.server.state[name])}
    assert {name.split("::")[0] for name in moved} == collected


def test_distillation_leaves_statistics_that_clients_collect_alone():
    run = started(FedFD(statistics="clients", measure="slice", **STRONG), NORMED)
    before = {name: tensor.clone() for name, tensor in run.server.state.items() if "running" in name}
    exchange(run, MAIN)
    assert before and all(torch.equal(run.server.state[name], tensor) for name, tensor in before.items())


def test_without_static_norms_the_students_statistics_move_and_are_shared():
    plain, taught = (started(FedFD(static_bn=False, distill=d), NORMED) for d in ("none", "feature"))
    for run in (plain, taught):
        exchange(run, MAIN)
    name = "stem.norm.running_mean"
    assert not torch.equal(plain.server.state[name], taught.server.state[name])
    assert torch.equal(taught.server.main.state_dict()[name], taught.server.state[name])


# --- limit cases ---


def test_defaults_are_those_of_the_specification():
    method = FedFD()
    assert (method.weighting, method.scaler, method.static_bn, method.mask) == ("samples", True, True, False)
    assert (method.distill, method.align, method.orthogonal, method.proj_persist) == ("feature", True, True, True)
    assert (method.orth_map, method.init_scale, method.temperature) == ("matrix_exp", 0.01, 1.0)
    assert (method.kl_direction, method.feature_loss) == ("teacher_student", "kl")
    assert (method.distill_epochs, method.distill_batch, method.distill_lr) == (1, 64, 0.01)
    assert (method.distill_optimizer, method.distill_momentum) == ("sgd", 0.9)
    assert (method.include_full_group, method.logit_weight) == (False, 0.0)


@pytest.mark.parametrize("models", [ADG, NORMED])
@pytest.mark.parametrize("off", [{"distill": "none"}, {"distill_epochs": 0}])
def test_without_distillation_it_is_heterofl_exactly(models, off):
    options = {"rounds": 3, "participation": 0.67}
    run, base = finished(FedFD(**off), models, **options), finished(HeteroFL(**AS_HETEROFL), models, **options)
    assert equal(run.server.state, base.server.state)
    assert same(states(run), states(base))
    for a, b in zip(run.history, base.history, strict=True):
        assert (a["accuracy"], a["loss"], a["bytes_up"]) == (b["accuracy"], b["loss"], b["bytes_up"])


def test_without_distillation_and_with_heterofls_defaults_it_is_heterofl_too():
    defaults = {name: getattr(HeteroFL(), name) for name in AS_HETEROFL}
    run, base = finished(FedFD(distill="none", **defaults), NORMED), finished(HeteroFL(), NORMED)
    assert equal(run.server.state, base.server.state) and same(states(run), states(base))


def test_both_ablations_together_are_logit_distillation():
    bare, logit = finished(FedFD(align=False, orthogonal=False)), finished(FedFD(distill="logit"))
    assert equal(bare.server.state, logit.server.state)
    for one in ({"align": False}, {"orthogonal": False}):
        assert not equal(finished(FedFD(**one)).server.state, logit.server.state)


def test_a_lone_client_as_wide_as_the_server_has_no_logits_to_teach():
    options = {"models": ["cnn:4-10@1"], "clients": problem((18,)), "rounds": 1}
    taught, plain = (finished(FedFD(distill=d, **STRONG), **options) for d in ("logit", "none"))
    for name, tensor in plain.server.state.items():
        torch.testing.assert_close(taught.server.state[name], tensor, atol=1e-5, rtol=0)
    assert taught.history[-1]["distill_loss"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"distill": "logit"}])
def test_public_labels_change_nothing(options):
    runs = [finished(FedFD(**options), NORMED, problem((18, 24, 30), labelled=flag)) for flag in (True, False)]
    labels = [run.server.public.labels() for run in runs]
    assert not torch.equal(*labels)
    assert equal(runs[0].server.main.state_dict(), runs[1].server.main.state_dict())
    assert same(states(runs[0]), states(runs[1]))


# --- the server's own width ---


def test_a_wider_server_learns_its_outer_ring_from_distillation_only():
    models, server = levels("cnn:4-10", "d-g"), {"server_model": "cnn:4-10@1"}
    plain, taught = (started(FedFD(distill=d, **server, **STRONG), models) for d in ("none", "feature"))
    start = clones(plain.server.state)
    assert start["stages.0.conv.weight"].shape[:2] == (10, 4)
    for run in (plain, taught):
        exchange(run, MAIN)
    ring = {name: run.server.state["stages.0.conv.weight"][7:] for name, run in (("plain", plain), ("taught", taught))}
    assert torch.equal(ring["plain"], start["stages.0.conv.weight"][7:])
    assert not torch.equal(ring["taught"], ring["plain"])
    assert not torch.equal(plain.server.state["stages.0.conv.weight"], start["stages.0.conv.weight"])
    assert taught.method.serves(taught.server) and taught.server.main.feature_dim == 10


@pytest.mark.parametrize("spec", ["cnn:4-10@0.1", "cnn:4-12@1", "mlp:1x200"])
def test_a_server_that_does_not_contain_the_clients_networks_is_refused(spec):
    with pytest.raises(pf.InputError, match="does not contain cnn:4-10@1"):
        started(FedFD(server_model=spec))


DEEP_NARROW = ("resnet10:w4@1", "resnet14:w4@0.4")  # one family; the wider, which has more parameters, lacks blocks


@pytest.mark.parametrize("models, server", [(DEEP_NARROW, None), (DEEP_NARROW[1:], "resnet10:w4@1")])
def test_a_server_that_lacks_blocks_of_a_client_is_refused(models, server):
    with pytest.raises(
        pf.InputError, match=r"resnet10:w4@1 does not contain resnet14:w4@0.4.*server_model.*fedfd_student"
    ):
        started(FedFD(server_model=server), models)


def test_a_deeper_server_contains_the_clients_and_distils_into_every_block():
    plain, taught = (started(FedFD(distill=d, server_model="resnet14:w4@1"), DEEP_NARROW) for d in ("none", "feature"))
    for run in (plain, taught):
        exchange(run, MAIN)
    parameters = dict(taught.server.main.named_parameters())
    assert parameters.keys() == {n for n in taught.server.state if "running" not in n}
    assert all(torch.equal(taught.server.state[n], plain.server.state[n]) == n.startswith("head.") for n in parameters)


def test_without_distillation_no_client_must_contain_the_others():
    run, base = (finished(m, DEEP_NARROW, rounds=1) for m in (FedFD(distill="none"), HeteroFL(**AS_HETEROFL)))
    assert equal(run.server.state, base.server.state)


# --- real federations ---


@pytest.mark.parametrize("models", [ADG, NORMED])
def test_bytes_are_those_of_the_slices(models):
    sizes = [sum(p.numel() for p in build(m, (1, 8, 8), 3).parameters()) for m in models]
    run = finished(FedFD(), models, rounds=1)
    assert run.history[0]["bytes_down"] == sum(4 * p for p in sizes)
    assert run.history[0]["bytes_up"] == sum(4 * p + 8 for p in sizes)


@pytest.mark.parametrize("options", [{}, {"static_bn": False}, {"distill": "logit"}])
@pytest.mark.parametrize("public", [40, 9, 1])
def test_small_clients_missing_classes_and_partial_participation(options, public):
    clients = problem((1, 24, 2, 30, 17, 3), public=public, lacking=1)
    method = FedFD(**options, distill_batch=8)
    run = finished(method, NORMED, clients, rounds=3, participation=0.5)
    assert all(len(line["participants"]) == 3 for line in run.history)
    assert all(math.isfinite(line["loss"]) and 0 <= line["accuracy"]["global"] <= 1 for line in run.history)
    assert all(bool(t.isfinite().all()) for t in run.server.main.state_dict().values())


# --- refusals ---


@pytest.mark.parametrize(
    "options, words",
    [
        ({"distill": "features"}, ("distill", "'feature', 'logit' or 'none'", "'features'")),
        ({"orth_map": "exp"}, ("orth_map", "matrix_exp")),
        ({"kl_direction": "both"}, ("kl_direction", "teacher_student")),
        ({"feature_loss": "l1"}, ("feature_loss", "mse")),
        ({"distill_optimizer": "lion"}, ("distill_optimizer", "sgd")),
        ({"temperature": 0.0}, ("temperature", "above 0")),
        ({"distill_batch": 0}, ("distill_batch", "at least 1")),
        ({"distill_epochs": -1}, ("distill_epochs", "negative")),
        ({"logit_aux": -0.5}, ("logit_aux", "negative")),
        ({"view": "same_arch"}, ("widest network", "view is 'prefix'", "same_arch")),
        ({"buffers": "local", "static_bn": False}, ("buffers='local'", "static_bn=True")),
    ],
)
def test_values_that_make_no_sense_are_refused(options, words):
    with pytest.raises(pf.InputError) as error:
        FedFD(**options).check()
    assert str(error.value).startswith("fed") and all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "method, models, public, words",
    [
        (FedFD(), ADG, 0, ("public data", "--public")),
        (FedFD(), UNLIKE, 40, ("one family", "client 1", "resnet10:w2")),
        (FedFD(), (own_model,), 40, ("one family", "client 0", "own_model")),
    ],
)
def test_unmet_needs_are_named(method, models, public, words):
    clients = problem((18, 24, 30))
    if not public:
        clients = pf.Clients.from_parts([(torch.rand(9, 1, 8, 8), torch.arange(9) % 3)], test=clients.test)
    with pytest.raises(pf.InputError) as error:
        federation(method, clients, models)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("option", ["aggregation", "subset", "digest_epochs"])
def test_options_of_the_variant_without_averaging_are_unknown(option):
    with pytest.raises(pf.InputError, match=f"option of method fedfd '{option}'"):
        make("fedfd", {option: 1})
