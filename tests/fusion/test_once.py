"""Fusion exists once: what a one-shot method's server predicts with is what `fuse` makes of the same networks."""

import copy
from contextlib import closing

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.method import Step
from polyfed.core.rundir import RunDirectory
from polyfed.core.settings import Settings
from polyfed.fusion import Distillation, Matching
from polyfed.fusion.networks import Averaged, Selection
from polyfed.methods.ams import AMS
from polyfed.methods.ensemble import Ensemble
from polyfed.methods.oneshot_fedavg import OneShotFedAvg
from polyfed.methods.pfnm import PFNM

MIXED = ["mlp:1x8", "mlp:3x8", "cnn:4-6,bn"]
WIDTHS = ["mlp:2x10", "mlp:2x6"]
SHORT = pf.Training(epochs=2, batch_size=8, lr=0.05)


def problem(clients=4, classes=4):
    """Clients that lack some classes: client k misses class k."""
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(classes, 1, 8, 8)).astype(np.float32)

    def draw(n, missing=None):
        y = rng.choice([c for c in range(classes) if c != missing], n)
        return (patterns[y] + 0.5 * rng.normal(size=(n, 1, 8, 8))).astype(np.float32), y

    parts = [draw(20 + k, missing=k) for k in range(clients)]
    return pf.Clients.from_parts(parts, test=draw(60), num_classes=classes, public=draw(30)[0])


def trained(method, clients, models, directory=None, resume=False):
    federation = prepare(method, clients, models, Settings(1, 0, SHORT, pf.Participation()))
    federation.directory = directory
    federation.run(resume)
    return federation


def fused_by(federation):
    return federation.method.fused(federation.server, federation.ctx)


def own_networks(federation):
    return [federation.backend.model(client, federation.ctx) for client in sorted(federation.backend.infos)]


def scores(federation, x):
    with torch.no_grad():
        return federation.method.predict(federation.server, x, federation.ctx)


def assert_same_module(one, other):
    assert type(one) is type(other)
    mine, theirs = one.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        if tensor.is_floating_point():  # integers (a counter of BatchNorm) stay with the clients
            assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    ("method", "kind", "options"),
    [
        (AMS(), Selection, {"method": "ams-top1"}),
        (AMS(top_k=2), Selection, {"method": "ams-topk", "k": 2}),
        (AMS(top_k=0), Selection, {"method": "ams-full"}),
        (AMS(top_k="all"), Selection, {"method": "ams-full"}),
        (AMS(mask_absent=True), Selection, {"mask_absent": True}),
        (AMS(top_k=2, mask_absent=True), Selection, {"method": "ams-topk", "mask_absent": True}),
        (AMS(normalize="zscore"), Selection, {"normalize": "zscore"}),
        (AMS(normalize="temperature"), Selection, {"normalize": "temperature"}),
        (AMS(confidence="first_norm"), Selection, {"confidence": "first_norm"}),
        (AMS(confidence="first_max", mask_absent=True), Selection, {"confidence": "first_max", "mask_absent": True}),
        (AMS(select="greedy"), Selection, {"select": "greedy"}),
        (AMS(select="cluster", keep=2), Selection, {"select": "cluster", "keep": 2}),
        (Ensemble(), Averaged, {"method": "ensemble"}),
        (Ensemble(space="logit"), Averaged, {"method": "ensemble", "space": "logit"}),
        (Ensemble(weights="class"), Averaged, {"method": "ensemble", "weights": "class"}),
        (Ensemble(space="logit", weights="class"), Averaged,
         {"method": "ensemble", "space": "logit", "weights": "class"}),
    ],
)  # fmt: skip
def test_the_server_of_ams_and_ensemble_has_the_module_that_fuse_makes(method, kind, options):
    clients = problem()
    federation = trained(method, clients, MIXED)
    given = {"counts": clients.label_counts(), "public": clients.public}
    if options.get("normalize") == "temperature":
        given["temperatures"] = federation.method.about(federation.server, "temperature")
    expected = pf.fuse(own_networks(federation), **given, **options)
    found = fused_by(federation)
    assert type(found) is kind and not found.training
    assert found.recipe() == expected.recipe()
    assert_same_module(found, expected)
    x = clients.test.inputs()
    with torch.no_grad():
        assert torch.equal(scores(federation, x), expected(x))
    right = (expected(x).argmax(1) == clients.test.labels()).float().mean()
    assert federation.history[-1]["accuracy"]["global"] == pytest.approx(float(right))


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("class_weighting", [True, False])
def test_the_server_of_pfnm_has_the_network_that_fuse_matches(class_weighting, searched):
    # Without sweeps nothing is drawn: a run and a call of `fuse` draw from other streams of the seed.
    clients = problem()
    search = "test" if searched else "none"
    method = PFNM(gamma=5.0, iterations=0, class_weighting=class_weighting, select_on=search)
    federation = trained(method, clients, WIDTHS)
    expected = pf.fuse(
        own_networks(federation),
        "pfnm",
        counts=clients.label_counts() if class_weighting else None,
        matching=Matching(gamma=5.0, iterations=0),
        search=clients.test if searched else None,
        input_shape=clients.input_shape,
    )
    assert_same_module(fused_by(federation), expected)
    x = clients.test.inputs()
    with torch.no_grad():
        assert torch.equal(scores(federation, x), expected(x))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_server_of_one_shot_fedavg_has_the_average_of_fuse(weighting):
    clients = problem()
    federation = trained(OneShotFedAvg(weighting=weighting), clients, ["cnn:4-6,bn"])
    given = {"counts": clients.label_counts(), "weights": weighting}
    assert_same_module(federation.server.main, pf.fuse(own_networks(federation), "average", **given))


def test_the_student_of_ams_is_the_student_of_fuse():
    clients = problem()
    method = AMS(distill="unlabeled", student="mlp:1x16", distill_epochs=3, distill_lr=0.01, top_k=2)
    federation = trained(method, clients, MIXED)
    options = Distillation(epochs=3, lr=0.01, batch_size=SHORT.batch_size)
    given = {"distill_into": "mlp:1x16", "public": clients.public, "distillation": options}
    assert_same_module(federation.server.main, pf.fuse(own_networks(federation), "ams-topk", **given))


VARIANTS = [
    (AMS(mask_absent=True, normalize="temperature"), MIXED),
    (AMS(select="greedy"), MIXED),
    (AMS(distill="unlabeled", student="mlp:1x16", distill_epochs=1), MIXED),
    (Ensemble(weights="class"), MIXED),
    (PFNM(), WIDTHS),
]


@pytest.mark.parametrize(("method", "models"), VARIANTS)
def test_a_server_that_was_resumed_after_the_fusion_predicts_the_same(method, models, tmp_path):
    clients = problem(clients=11)  # a checkpoint sorts clients as words: 10 before 2
    with closing(RunDirectory.create(tmp_path / "run", {})) as directory:
        whole = trained(method, clients, models, directory)
    with closing(RunDirectory.open(tmp_path / "run")) as directory:
        resumed = trained(method, clients, models, directory, resume=True)
    x = clients.test.inputs()
    assert "fused" not in resumed.ctx.cache  # nothing was fused again
    assert torch.equal(scores(resumed, x), scores(whole, x))


@pytest.mark.parametrize(("method", "models"), [VARIANTS[0], VARIANTS[3], VARIANTS[4]])
def test_a_fused_module_follows_the_servers_memory(method, models):
    clients = problem()
    federation = trained(method, clients, models)
    x = clients.test.inputs()
    first, before = fused_by(federation), scores(federation, x)
    assert fused_by(federation) is first  # made once
    saved = copy.deepcopy(federation.server.memory)
    replies = {0: federation.method.upload(federation.backend.store.open(0, federation.ctx), federation.ctx)}
    federation.method.fuse(federation.server, replies, Step(), federation.ctx)
    assert not torch.equal(scores(federation, x), before)  # of one client alone
    federation.server.memory = saved  # as a resume does, and a real federation that takes a fusion back
    assert torch.equal(scores(federation, x), before)


def test_uploads_are_held_once():
    federation = trained(AMS(), problem(), MIXED)
    fused = fused_by(federation)
    for network, state in zip(fused.networks, federation.method.about(federation.server, "state"), strict=True):
        own = network.state_dict()
        assert all(own[name].data_ptr() == tensor.data_ptr() for name, tensor in state.items())


@pytest.mark.parametrize(("method", "models"), [VARIANTS[0], VARIANTS[3], VARIANTS[4]])
def test_what_was_first_made_for_measuring_can_be_differentiated(method, models):
    clients = problem()
    federation = trained(method, clients, models)
    x = clients.test.inputs().requires_grad_()
    federation.method.predict(federation.server, x, federation.ctx).sum().backward()
    assert x.grad.abs().sum() > 0
