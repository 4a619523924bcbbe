"""PFNM as a method: what travels, what the server matches, and how a setting is chosen."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.rng import generator, seed_of
from polyfed.core.settings import Settings
from polyfed.fusion.chain import layers_of, read_chain, write_chain
from polyfed.methods.pfnm import PFNM
from polyfed.ops.matching import GRID, Matching, match_networks
from polyfed.ops.selection import class_weights

WIDTHS = ["mlp:2x10", "mlp:2x6"]
SHORT = pf.Training(epochs=4, batch_size=8, optimizer="adam", lr=0.01)


def problem(validation=0.0, clients=3, classes=4):
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(classes, 6)).astype(np.float32)

    def draw(n, missing=None):
        y = rng.choice([c for c in range(classes) if c != missing], n)
        return (patterns[y] + 0.4 * rng.normal(size=(n, 6))).astype(np.float32), y

    parts = [draw(30 + k, missing=k) for k in range(clients)]
    return pf.Clients.from_parts(parts, test=draw(80), num_classes=classes, validation=validation)


def trained(method, clients=None, models=WIDTHS, participation=1.0):
    federation = prepare(method, clients or problem(), models, Settings(1, 0, SHORT, pf.Participation(participation)))
    federation.run()
    return federation


def client_models(federation):
    return [federation.backend.model(c, federation.ctx).eval() for c in sorted(federation.backend.infos)]


def candidate(federation, clients, settings, shares=True):
    """Match the clients' networks outside of the method."""
    models = client_models(federation)
    own = list(class_weights(torch.as_tensor(clients.label_counts()))) if shares else None
    matched = match_networks([layers_of(m) for m in models], settings, generator(0, "matching", 1), own)
    return write_chain(models[0], matched.layers).eval()


def accuracy(module, samples):
    with torch.no_grad():
        return float((module(samples.inputs()).argmax(1) == samples.labels()).double().mean())


@pytest.mark.parametrize("class_weighting", [True, False])
def test_the_server_holds_the_matched_network(class_weighting):
    clients = problem()
    federation = trained(PFNM(gamma=5.0, class_weighting=class_weighting), clients)
    expected = candidate(federation, clients, Matching(gamma=5.0), class_weighting)
    x = clients.test.inputs()
    with torch.no_grad():
        scores = federation.method.predict(federation.server, x, federation.ctx)
        assert torch.allclose(scores, expected(x), atol=1e-6)
    record = federation.history[-1]["pfnm"]
    assert record["widths"] == [expected.stem.linear.out_features, expected.head.in_features]
    assert record["selected_on"] == "none"
    assert "uploads" not in federation.server.memory  # only the fused network is kept


def test_all_settings_reach_the_matching_which_draws_from_its_own_stream(monkeypatch):
    options = {"sigma2": 0.5, "sigma0_2": 4.0, "gamma": 2.0, "mu0": 0.1, "mu0_bias": 0.2, "iterations": 1}
    options |= {"pop_factor": 1.5, "cap": 7, "max_global": 90}
    seen = []

    def noted(networks, settings, rng, shares):
        seen.append((settings, rng.initial_seed()))
        return match_networks(networks, settings, rng, shares)

    monkeypatch.setattr("polyfed.fusion.matching.match_networks", noted)
    trained(PFNM(**options))
    assert seen == [(Matching(**options), seed_of(0, "matching", 1))]
    grid = PFNM(**options, select_on="train").settings()
    own = {name: value for name, value in options.items() if name not in ("sigma2", "sigma0_2", "gamma")}
    assert grid == [Matching(*setting, **own) for setting in GRID]


def test_new_uploads_replace_the_fused_network():
    clients = problem()
    federation = trained(PFNM(class_weighting=False), clients)
    x = clients.test.inputs()
    before = federation.method.predict(federation.server, x, federation.ctx).detach()
    model = client_models(federation)[1]
    reply = Message({"main": dict(model.state_dict())}, {"counts": torch.tensor(clients.label_counts()[1])})
    federation.method.fuse(federation.server, {1: reply}, Step(), federation.ctx)
    after = federation.method.predict(federation.server, x, federation.ctx).detach()
    alone = match_networks([layers_of(model)], Matching(), generator(0, "matching", 1))
    with torch.no_grad():
        assert torch.allclose(after, write_chain(model, alone.layers)(x), atol=1e-6)
    assert not torch.allclose(after, before, atol=1e-2)


def test_bytes_are_weights_and_class_counts():
    federation = trained(PFNM())
    sizes = [sum(p.numel() for p in model.parameters()) for model in client_models(federation)]
    assert federation.meter.bytes["up"] == {c: 4 * (n + 4) for c, n in enumerate(sizes)}
    assert federation.meter.total("down") == 0


def test_only_participants_are_matched():
    federation = trained(PFNM(gamma=1e-6), participation=0.34, models=["mlp:1x10", "mlp:1x6", "mlp:1x8"])
    (taken,) = federation.history[-1]["participants"]
    assert federation.history[-1]["pfnm"]["widths"] == [[10, 6, 8][taken]]


@pytest.mark.parametrize("where", ["train", "validation"])
def test_a_setting_is_chosen_by_what_the_clients_get_right(where):
    clients = problem(validation=0.3 if where == "validation" else 0.0)
    federation = trained(PFNM(select_on=where), clients)
    parts = clients.train if where == "train" else clients.validation
    total = sum(len(part) for part in parts)
    scores = []
    for sigma2, sigma0_2, gamma in GRID:
        module = candidate(federation, clients, Matching(sigma2, sigma0_2, gamma))
        scores.append(sum(accuracy(module, part) * len(part) for part in parts) / total)
    record = federation.history[-1]["pfnm"]
    assert record["accuracy"] == pytest.approx(max(scores))
    assert max(scores) > min(scores)
    best = GRID[scores.index(max(scores))]
    assert (record["sigma2"], record["sigma0_2"], record["gamma"]) == best
    assert record["selected_on"] == where
    assert federation.server.data.validation is None


def test_scoring_costs_the_candidates_down_and_their_counts_up():
    plain, searched = trained(PFNM()), trained(PFNM(select_on="train"))
    more = {c: searched.meter.bytes["up"][c] - plain.meter.bytes["up"][c] for c in range(3)}
    assert more == dict.fromkeys(range(3), 4 * len(GRID) + 8)
    clients = problem()
    numbers = sum(
        sum(p.numel() for p in candidate(searched, clients, Matching(*setting)).parameters()) for setting in GRID
    )
    assert searched.meter.bytes["down"] == dict.fromkeys(range(3), 4 * numbers)


def test_choosing_on_the_test_set_is_possible_only_by_name_and_is_reported():
    clients = problem()
    federation = trained(PFNM(select_on="test"), clients)
    scores = [accuracy(candidate(federation, clients, Matching(*setting)), clients.test) for setting in GRID]
    record = federation.history[-1]["pfnm"]
    assert record["selected_on"] == "test"
    assert record["accuracy"] == pytest.approx(max(scores)) == federation.history[-1]["accuracy"]["global"]
    assert trained(PFNM(), clients).server.data.validation is None


def test_choosing_on_validation_data_that_nobody_has_is_refused():
    with pytest.raises(InputError, match="no client has any"):
        trained(PFNM(select_on="validation"))


def test_mixed_depths_are_refused_with_methods_that_would_work():
    with pytest.raises(InputError, match=r"pfnm needs networks of the same depth.*ams.*ensemble"):
        trained(PFNM(), models=["mlp:1x8", "mlp:2x8"])


def own(activation=nn.ReLU, width=8, biases=(True, True)):
    """A user's perceptron for `problem`, built anew for every client."""

    def perceptron():
        first, last = (nn.Linear(*sizes, bias=b) for sizes, b in zip(((6, width), (width, 4)), biases, strict=True))
        return nn.Sequential(first, activation(), last)

    return perceptron


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (["mlp:1x8", own()], r"pfnm needs networks that differ in width only.*other names.*ams"),
        ([own(biases=(True, False)), own(biases=(False, True))], r"pfnm needs networks that differ in width only"),
        ([own(), own(nn.Tanh)], r"not applicable.*differ in more than their widths"),
    ],
)
@pytest.mark.parametrize("select_on", ["none", "train"])
def test_perceptrons_of_other_kinds_are_refused_before_training(models, words, select_on, monkeypatch):
    monkeypatch.setattr(PFNM, "loss", lambda *given: pytest.fail("a client has trained"))
    with pytest.raises(InputError, match=words):
        trained(PFNM(select_on=select_on), models=models)


def test_a_users_own_perceptrons_of_several_widths_are_matched():
    federation = trained(PFNM(select_on="train"), models=[own(nn.Tanh), own(nn.Tanh, 5)], participation=0.67)
    fused = federation.method.fused(federation.server, federation.ctx)
    assert isinstance(fused[1], nn.Tanh)
    assert federation.server.memory["like"] == min(federation.history[-1]["participants"])


def test_choosing_on_a_test_set_that_the_server_does_not_have_is_refused_before_training():
    federation = trained(PFNM())
    with pytest.raises(InputError, match="select_on='test' needs a test set at the server"):
        PFNM(select_on="test").setup_server(federation.server, federation.ctx.infos, federation.ctx)


def images(clients=2):
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(12, 1, 8, 8)).astype(np.float32), np.arange(12) % 3) for _ in range(clients)]
    return pf.Clients.from_parts(parts, test=parts[0], num_classes=3)


def test_convolutions_are_let_in_by_name_and_norms_are_not():
    with pytest.raises(InputError, match="fully connected networks"):
        trained(PFNM(), images(), ["cnn:3-4"])
    federation = trained(PFNM(convolutions=True), images(), ["cnn:3-4"])
    assert len(federation.history[-1]["pfnm"]["widths"]) == 2
    with pytest.raises(InputError, match=r"not applicable.*BatchNorm2d"):
        trained(PFNM(convolutions=True), images(), ["cnn:3-4,bn"])


@pytest.mark.parametrize("class_weighting", [False, True])
def test_identical_clients_give_their_network_shrunk(class_weighting):
    rng = np.random.default_rng(0)
    part = (rng.normal(size=(20, 6)).astype(np.float32), np.arange(20) % 4)
    clients = pf.Clients.from_parts([part, part], test=part, num_classes=4)
    settings = Settings(1, 0, pf.Training(epochs=3, batch_size=20, lr=0.1), pf.Participation())
    federation = prepare(PFNM(class_weighting=class_weighting), clients, ["mlp:1x9"], settings)
    federation.run()
    one, two = client_models(federation)
    x = clients.test.inputs()
    with torch.no_grad():
        assert torch.allclose(one(x), two(x), atol=1e-6)  # full batches: the same training
        fused = write_chain(one, layers_of(federation.method.fused(federation.server, federation.ctx)))
        for name, parameter in fused.named_parameters():
            copies = 1 if class_weighting and name.startswith("head") else 2  # shares of a class sum to 1
            parameter /= copies / (copies + 0.1)
        assert torch.allclose(fused(x), one(x), atol=1e-5)
    assert federation.history[-1]["pfnm"]["widths"] == [9]
    assert read_chain(one)[0].weight.shape == (9, 6, 1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sigma2": 0.0}, "sigma2"),
        ({"sigma0_2": 0.0}, "sigma0_2"),
        ({"gamma": -1.0}, "gamma"),
        ({"iterations": -1}, "iterations"),
        ({"pop_factor": -0.5}, "pop_factor"),
        ({"cap": 0}, "cap"),
        ({"max_global": 0}, "max_global"),
        ({"select_on": "public"}, "select_on"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, field):
    with pytest.raises(InputError, match=field):
        trained(PFNM(**options))


def test_the_released_form_has_the_authors_settings_and_grid():
    assert PFNM(form="released").settings() == [Matching(1.0, 1.0, 1.0, 0.0, 0.1, 5, 1.0, 10, 700)]
    grid = PFNM(form="released", select_on="train").settings()
    assert len(grid) == 18 and {s.gamma for s in grid} == {1.0, 1e-3, 50.0}
    assert {s.sigma2 for s in grid} == {1.0, 0.1, 0.5} and {s.sigma0_2 for s in grid} == {1.0, 10.0}
    assert {(s.mu0_bias, s.iterations, s.pop_factor, s.cap, s.max_global) for s in grid} == {(0.1, 5, 1.0, 10, 700)}
    with pytest.raises(InputError, match="leave its settings alone"):
        PFNM(form="released", gamma=2.0)
