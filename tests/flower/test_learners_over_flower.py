"""Sites with learners that are no networks: the same numbers as in one process, and nothing of them but answers."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import problem
import pytest
from test_same_result import TRAINING
from test_simulation import no_runtime  # noqa: F401

import polyfed as pf
from polyfed.config import Config
from polyfed.core.errors import InputError, MessageError
from polyfed.core.settings import Execution
from polyfed.flower.describe import read_introduction
from polyfed.flower.running import Given, make_federation, run_federation
from polyfed.flower.serve import start_directory
from polyfed.flower.site import Site

MODELS = [problem.forest, "sklearn:LogisticRegression", "mlp:1x16"]
FEDMD = pf.FedMD(subset=20, public_epochs=0, private_epochs=1)


def introductions(method, tmp_path, models=MODELS):
    config = Config(method, method.name, 1)
    directory, run = start_directory(config, tmp_path / "run", problem.SITES, False)
    told = {}
    for number, name in enumerate(problem.SITES):
        site = Site(name, models[number], problem.part(number), tmp_path / name, say=lambda text: None)
        told[name] = site.answer({"kind": "describe", "run": run}, b"")
    public = problem.clients().public
    return Given(method, config.settings(), run, problem.SITES, directory, public), told


@pytest.mark.parametrize("method", [FEDMD, pf.FedDF(distill_steps=5)], ids=lambda method: method.name)
def test_the_network_changes_nothing_for_learners(method, no_runtime):  # noqa: F811
    alone, together = (
        pf.run(method, problem.clients(), MODELS, 2, TRAINING, engine=engine) for engine in ("sequential", "flower")
    )
    for here, there in zip(alone.history, together.history, strict=True):
        for key in ("accuracy", "loss", "bytes_up", "bytes_down"):
            assert here.get(key) == there.get(key), (here["round"], key)
    x = problem.clients().test.inputs()
    assert all((alone.models[client](x) == together.models[client](x)).all() for client in range(3))


def test_processes_of_learners_give_the_same_numbers(local_federation, tmp_path):
    models = ["problem:forest", "sklearn:LogisticRegression", "mlp:1x16"]
    local_federation.models.write_text(json.dumps(dict(zip(problem.SITES, models, strict=True))))
    data, every_round = problem.clients(), Execution(checkpoint_seconds=0.0)
    config = Config(FEDMD, "fedmd", 2, training=TRAINING, execution=every_round)
    directory, run = start_directory(config, tmp_path / "run", problem.SITES, False)
    given = Given(FEDMD, config.settings(), run, problem.SITES, directory, data.public, None, data.test)
    together = run_federation(local_federation.post(), given)
    alone = pf.run(FEDMD, data, MODELS, 2, TRAINING, engine="sequential")
    for here, there in zip(alone.history, together.history, strict=True):
        for key in ("accuracy", "loss", "bytes_up", "bytes_down"):
            assert here.get(key) == there.get(key), (here["round"], key)


def test_a_server_knows_of_a_learner_that_it_is_none_of_its_networks(tmp_path):
    given, told = introductions(FEDMD, tmp_path)
    head = told["south"][0]
    assert head["model"] is None and head["shapes"] == {} and head["architecture"] == "sklearn:LogisticRegression"
    _, blueprint = read_introduction("south", *told["south"], FEDMD, given.run, 1 << 20)
    assert blueprint.build is None and blueprint.properties == {"learner", "weighted"}


def test_a_server_makes_no_estimator_from_a_name(tmp_path):
    given, told = introductions(FEDMD, tmp_path)
    head, blob = told["south"]
    for change in ({"model": "sklearn:LogisticRegression"}, {"model": "sklearn:LogisticRegression", "properties": []}):
        with pytest.raises(MessageError, match="south cannot take part"):
            read_introduction("south", {**head, **change}, blob, FEDMD, given.run, 1 << 20)
    shapes = {"shapes": {"weight": [2, 2]}, "dtypes": {"weight": "float32"}}
    with pytest.raises(MessageError, match="a model that is no network has neither tensors nor features"):
        read_introduction("south", {**head, **shapes}, blob, FEDMD, given.run, 1 << 20)


@pytest.mark.parametrize("method", [pf.FedAvg(), pf.Ensemble()], ids=lambda method: method.name)
def test_what_needs_more_than_answers_refuses_the_site_before_training(method, tmp_path):
    given, told = introductions(method, tmp_path)
    with pytest.raises(InputError, match=r"client 0 \(north\)"):
        make_federation(None, given, told, ())


def test_a_site_without_skops_says_that_its_learner_has_no_file_and_what_to_install(tmp_path, monkeypatch):
    said = []
    _, run = start_directory(Config(FEDMD, "fedmd", 1), tmp_path / "run", problem.SITES, False)
    site = Site("north", MODELS[0], problem.part(0), tmp_path / "north", say=said.append)
    head = {"run": run, "round": 1}
    party = SimpleNamespace(models={"main": site.network(site.method(head), run)[1]})
    monkeypatch.setattr(site, "figures", lambda head, body: ({}, party))
    monkeypatch.setitem(sys.modules, "skops.io", None)
    for _ in range(2):  # every round
        assert site.measure(head, b"") == ({"measures": {}}, b"")
    assert [line.startswith("Your model has no file: A learner in a file") for line in said] == [True]
    assert "pip install 'polyfed[learners]'" in said[0] and site.last_words() == said
