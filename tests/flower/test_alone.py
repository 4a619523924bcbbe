"""A site ends with a model for its people, and knows what it would have reached by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import problem
import pytest
import torch
from safetensors.torch import load_file

import polyfed as pf
from polyfed.config import Networks
from polyfed.core.errors import MessageError, RunDirectoryError
from polyfed.core.party import ClientInfo, Context
from polyfed.core.settings import Settings
from polyfed.data import Clients
from polyfed.flower import alone as alone_module
from polyfed.flower.alone import ask_alone
from polyfed.flower.describe import read_introduction
from polyfed.flower.mailbox import Answers
from polyfed.flower.serve import run_head
from polyfed.flower.site import Site
from polyfed.methods import make

TRAINING = pf.Training(epochs=2, batch_size=8, lr=0.05)
ROUNDS = 3
MODELS = ["mlp:1x8", "mlp:2x8", "cnn:4"]


def head_of(method: str, number: int) -> dict:
    run = run_head(make(method), Settings(ROUNDS, 0, training=TRAINING), Networks(), "0123456789abcdef")
    return {"run": run, "id": number, "architecture": MODELS[number], "clients": 3, "rounds": ROUNDS}


def site_of(number: int, folder: Path, allow: tuple[str, ...] = ()) -> Site:
    data = problem.part(number)
    from polyfed.flower.sitedata import as_site_data

    return Site(problem.SITES[number], MODELS[number], as_site_data(data), folder, allow, say=lambda text: None)


@pytest.mark.parametrize("number", range(3))
def test_a_site_alone_reaches_what_local_training_reaches_in_a_simulation(number, tmp_path):
    """To the last bit: the same initial weights, batches and settings."""
    answer, blob = site_of(number, tmp_path, allow=("fedproto",)).answer(
        {**head_of("fedproto", number), "kind": "alone"}, b""
    )
    result = pf.run("local", problem.clients(), MODELS, rounds=ROUNDS, training=TRAINING, engine="sequential")
    assert answer["measures"]["test"][0] == result.accuracy()["per_client"][number] and blob == b""


def test_a_site_that_is_asked_again_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(alone_module, "PATIENCE", 0.0)  # nothing is done in no time
    site, head = site_of(0, tmp_path), {**head_of("fedproto", 0), "kind": "alone"}
    assert site.answer(head, b"")[0] == {"done": 0}
    monkeypatch.setattr(alone_module, "PATIENCE", 60.0)
    whole = site.answer(head, b"")[0]
    assert whole["done"] == ROUNDS and site.answer(head, b"")[0] == whole
    assert site_of(0, tmp_path).answer(head, b"")[0] == whole  # another process, the same folder


class Box:
    """Asks sites in this process."""

    def __init__(self, sites: dict[int, Site], broken: dict[int, dict] | None = None) -> None:
        self.sites, self.broken = sites, broken or {}

    def ask(self, kind, questions, accept, quorum=True, when=""):
        answers = Answers()
        for client, question in questions.items():
            head, blob = question()
            told = self.broken[client] if client in self.broken else self.sites[client].answer(head, blob)[0]
            try:
                answers.given[client] = accept(client, told, b"")
            except MessageError as error:
                answers.failed[client] = str(error)
        return answers


def context() -> Context:
    return Context(0, 1, ROUNDS, TRAINING, 3, (1, 8, 8), 3)


def test_the_server_collects_what_every_site_reaches_alone(tmp_path):
    infos = {number: ClientInfo(number, 20, MODELS[number], 1) for number in range(3)}
    box = Box({number: site_of(number, tmp_path / str(number)) for number in range(3)})
    found = ask_alone(box, head_of("fedproto", 0)["run"], infos, context(), ROUNDS, lambda text: None)
    local = pf.run("local", problem.clients(), MODELS, rounds=ROUNDS, training=TRAINING, engine="sequential")
    assert found["per_client"] == local.accuracy()["per_client"] == found["personal"]["per_client"]
    assert found["clients"] == [0, 1, 2]


@pytest.mark.parametrize("told", [{"done": 0}, {"done": "x"}, {}, {"done": 99}])
def test_a_site_that_does_not_get_on_is_left_out_and_named(told, tmp_path):
    infos = {number: ClientInfo(number, 20, MODELS[number], 1, name=problem.SITES[number]) for number in range(2)}
    said: list[str] = []
    box = Box({0: site_of(0, tmp_path)}, {1: told})
    found = ask_alone(box, head_of("fedproto", 0)["run"], infos, context(), ROUNDS, said.append)
    assert found["clients"] == [0] and len(said) == 1 and "south" in said[0]


def test_a_measured_site_has_its_model_as_one_file_for_raw_inputs(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(50, 10, (60, 3)).astype(np.float32)
    clients = Clients.from_parts(
        [(x, np.where(x[:, 0] > 50, "ill", "well"))], test=(x, np.where(x[:, 0] > 50, "ill", "well"))
    )
    from polyfed.flower.sitedata import as_site_data

    site = Site("north", "mlp:1x8", as_site_data(clients), tmp_path, say=lambda text: None)
    head = {
        **head_of("local", 0),
        "architecture": "mlp:1x8",
        "phase": "round",
        "round": 1,
        "position": 0,
        "participants": [0],
    }
    site.answer({**head, "kind": "work", "step": {"name": "main", "who": "all", "down": True, "up": True}}, b"")
    figure = site.answer({**head, "kind": "measure"}, b"")[0]["measures"]["test"][0]
    model = pf.load_model(tmp_path / "north.safetensors")
    right = [told == true for told, true in zip(model.predict(x), np.where(x[:, 0] > 50, "ill", "well"), strict=True)]
    assert np.mean(right) == pytest.approx(figure) and model.about["name"] == "north"
    assert any("north.safetensors" in line and "load_model" in line for line in site.last_words())
    assert all(
        torch.equal(t, model.module.state_dict()[n]) for n, t in load_file(tmp_path / "north.safetensors").items()
    )


def test_a_network_of_a_sites_own_is_never_imported_because_a_file_says_so(tmp_path):
    from polyfed.flower.sitedata import as_site_data

    site = Site("north", problem.own, as_site_data(problem.north()), tmp_path, say=lambda text: None)
    head = {
        **head_of("local", 0),
        "architecture": "own",
        "phase": "round",
        "round": 1,
        "position": 0,
        "participants": [0],
    }
    site.answer({**head, "kind": "measure"}, b"")
    with pytest.raises(RunDirectoryError, match=r"network of your own \(problem:own\): pass what builds it"):
        pf.load_model(tmp_path / "north.safetensors")
    assert pf.load_model(tmp_path / "north.safetensors", model=problem.own).module.model.last.out_features == 3
    assert pf.load_model(tmp_path / "north.safetensors", model="problem:own").module.model.last.out_features == 3


@pytest.mark.parametrize("model", ["os:abort", "mlp:1x8=secret.safetensors"])
def test_the_server_runs_no_code_and_reads_no_file_that_a_site_names(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from polyfed.build import make_blueprint
    from polyfed.flower.describe import introduce
    from polyfed.flower.sitedata import as_site_data

    data, method = as_site_data(problem.north()), make("fedavg")
    own = make_blueprint("mlp:1x8", "mlp:1x8", data.input_shape, data.num_classes, 0, None, "linear")
    head = {**introduce(method, "mlp:1x8", data, own)[0], "model": model}
    with pytest.raises(MessageError, match="is not one of the zoo"):
        read_introduction("north", head, b"", method, head_of("fedavg", 0)["run"], 1 << 20)


def test_a_site_that_begins_from_a_checkpoint_sends_its_weights_instead_of_a_name(tmp_path, monkeypatch):
    """The server has no such file: it lays out what the site describes and starts from what it sends."""
    monkeypatch.chdir(tmp_path)
    from safetensors.torch import save_file

    from polyfed.build import make_blueprint
    from polyfed.flower.describe import introduce
    from polyfed.flower.sitedata import as_site_data

    data, method = as_site_data(problem.north()), make("fedavg")
    spec, settings = "mlp:1x8=mine.safetensors", (data.input_shape, data.num_classes, 0, None, "linear")
    plain = make_blueprint("mlp:1x8", "mlp:1x8", *settings)
    save_file({name: torch.ones_like(tensor) for name, tensor in plain.initial.items()}, "mine.safetensors")
    head, blob = introduce(method, spec, data, make_blueprint(spec, "mlp:1x8", *settings))
    (tmp_path / "mine.safetensors").unlink()
    _, blueprint = read_introduction(
        "north", {"name": "north", **head}, blob, method, head_of("fedavg", 0)["run"], 1 << 20
    )
    assert head["model"] is None and all((tensor == 1).all() for tensor in blueprint.initial.values())


def test_a_site_that_got_a_key_later_takes_part_when_the_federation_goes_on(tmp_path):
    from polyfed.api import prolonged
    from polyfed.config import Config
    from polyfed.core.rundir import RunDirectory
    from polyfed.flower.serve import start_directory
    from polyfed.stored import read_config

    config = Config(make("fedavg"), "fedavg", 3)
    directory, run = start_directory(config, tmp_path / "run", ["north", "south"], resume=False)
    directory.close()
    longer = prolonged(tmp_path / "run", read_config(tmp_path / "run"), 5)
    directory, again = start_directory(longer, tmp_path / "run", ["north", "south", "west"], resume=True)
    directory.close()
    kept = RunDirectory.read_config(tmp_path / "run")
    assert kept["sites"] == ["north", "south", "west"] and kept["rounds"] == 5 == again["rounds"]
    assert kept["federation"] == run["federation"] == again["federation"]
    for others in (["south", "north", "west"], ["north"]):
        with pytest.raises(RunDirectoryError, match="holds a federation of other sites"):
            start_directory(longer, tmp_path / "run", others, resume=True)
