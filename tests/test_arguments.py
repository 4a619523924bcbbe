"""Wrong arguments of `pf.run` are refused in a sentence that names them, before anything happens."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from torch import nn

import polyfed as pf
from polyfed.core.errors import InputError

sys.path.insert(0, str(Path(__file__).parent / "contract"))
from table import synthetic


class Net(nn.Module):
    """A network that cannot be made without a number that nobody gave."""

    def __init__(self, width, num_classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, num_classes))

    def forward(self, x):
        return self.layers(x)


@dataclass(frozen=True)
class Needy(pf.Method):
    """A method with a hyper-parameter that has no default."""

    name: ClassVar[str] = "needy"
    mu: float


WRONG = {
    "a class that needs arguments": ({"method": Needy}, "method=Needy needs arguments.*mu.*pass an object"),
    "a number as method": ({"method": 3}, r"method is a name such as 'fedavg' or an object such as .*, not 3"),
    "no method": ({"method": None}, "method is a name .*, not None"),
    "another class as method": ({"method": Net}, "method is a name .*, not the class Net"),
    "a data set": ({"clients": pf.load("digits", limit=60)}, r"clients is what pf.split\(.*\) returns, not a Dataset"),
    "the name of a data set": ({"clients": "digits"}, r"clients is what pf.split\(.*\) returns, not 'digits'"),
    "a number of clients": ({"clients": 3}, "clients is what .* returns, not 3"),
    "training as dict": ({"training": {"lr": 0.1}}, "training must be a Training, got"),
    "rounds as word": ({"rounds": "many"}, "rounds must be a whole number, got 'many'"),
    "part of a round": ({"rounds": 1.5}, "rounds must be a whole number, got 1.5"),
    "a truth as rounds": ({"rounds": True}, "rounds must be a whole number.*, got True"),
    "no rounds": ({"rounds": None}, "rounds must be a whole number, got None"),
    "a word as seed": ({"seed": "x"}, "seed must be a whole number, got 'x'"),
    "workers as word": ({"workers": "two"}, "workers must be a whole number, got 'two'"),
    "features as word": ({"feature_dim": "x"}, "feature_dim must be a whole number, got 'x'"),
    "part of a client": ({"evaluate_clients": 1.5}, "evaluation: clients must be a whole number, got 1.5"),
    "part of a sample": ({"evaluate_samples": 0}, "evaluation: samples must be at least 1, got 0"),
    "participation as word": ({"participation": "half"}, "participation is a share such as 0.5 or a .*, not 'half'"),
    "seconds as word": ({"checkpoint_seconds": "x"}, "checkpoint_seconds must be a number, got 'x'"),
    "models by name": ({"models": {"a": "mlp:1"}}, "models has a model for 'a', which is no client: they are 0 to 1"),
    "an array": ({"models": np.zeros(3)}, "models .*not a"),
    "a class with arguments": ({"models": Net}, "Net needs width, which polyfed cannot give: .*a function"),
    "no models": ({"models": []}, "models is empty: name at least one"),
    "models None": ({"models": None}, "models .*not None"),
    "a number as engine": ({"engine": 5}, "engine is .*threads.*, not '5'"),
    "a number as device": ({"device": 0}, "device must be a word, got 0"),
    "a number as out": ({"out": 5}, "out is the path of a new directory, not 5"),
    "one observer": ({"observers": print}, "observers is a list of functions"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_refused_by_its_name(name):
    arguments, words = WRONG[name]
    with pytest.raises(InputError, match=words):
        pf.run(
            **{"method": "local", "clients": synthetic(2, public=False), "models": "mlp:1x8", "rounds": 1} | arguments
        )


def test_a_file_is_no_place_for_a_run(tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match=f"Cannot write to out={out}: {tmp_path / 'file'} is a file"):
            pf.run("local", synthetic(2, public=False), "mlp:1x8", 1, out=out)
    assert (tmp_path / "file").read_text() == "mine"


def test_what_is_meant_is_understood(tmp_path):
    clients = synthetic(2, public=False)
    by_class = pf.run(pf.FedAvg, clients, ("mlp:1x8",), np.int64(1), seed=np.int32(3), out=tmp_path / "run")
    by_name = pf.run("fedavg", clients, "mlp:1x8", 1, seed=3)
    assert by_class.accuracy() == by_name.accuracy() and by_class.config == by_name.config


def test_models_by_the_name_or_number_of_a_client():
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    parts = {"north": (x[:20], [0, 1] * 10), "south": (x[20:], [0, 1] * 10)}
    clients = pf.Clients.from_parts(parts, test="own")
    for models in ({"south": "mlp:1x8", "north": "mlp:2x8"}, {1: "mlp:1x8", 0: "mlp:2x8"}):
        assert pf.run("local", clients, models, 1).architectures == ["mlp:2x8", "mlp:1x8"]
    pf.compare(["fedavg"], clients=clients, models={"south": "mlp:1x8", "north": "mlp:1x8"}, rounds=1, seeds=1)
    with pytest.raises(InputError, match="models has a model for 'west', which is no client: they are north, south"):
        pf.run("local", clients, {"north": "mlp:1x8", "west": "mlp:1x8"}, 1)
    with pytest.raises(InputError, match="models has no model for client south: give each client one"):
        pf.run("local", clients, {"north": "mlp:1x8"}, 1)
