"""Methods that are named by where they are: `module:Class`, as the command line takes them."""

import sys

import pytest
import torch

import polyfed as pf
from polyfed import methods
from polyfed.arguments import as_method
from polyfed.core.errors import InputError
from polyfed.core.stage import Stage
from polyfed.methods.fedavg import FedAvg
from polyfed.testing import synthetic
from polyfed.testing.watch import same_states

CODE = """
from dataclasses import dataclass
from typing import ClassVar
import polyfed as pf

@dataclass(frozen=True)
class Mine(pf.Method):
    name: ClassVar[str] = "mine"
    strength: float = 1.0

@dataclass(frozen=True)
class Child(Mine):
    more: float = 0.0

class Nephew(pf.FedAvg):
    name = "nephew"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder that is not on the path, as for an installed command."""
    (tmp_path / "own_module_of_a_user.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    yield tmp_path
    sys.modules.pop("own_module_of_a_user", None)


def test_the_current_folder_counts_while_a_method_is_imported(folder):
    before = list(sys.path)
    method = methods.make("own_module_of_a_user:Mine", {"strength": 2.0})
    assert method.name == "mine" and method.strength == 2.0
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere_at_all:Mine", "Cannot import method 'nowhere_at_all:Mine': No module named"),
        ("own_module_of_a_user:Other", "Cannot import method .* has no attribute 'Other'"),
        ("own_module_of_a_user:pf", "is not a polyfed Method"),
        (":Mine", "write module:Class"),
        ("own_module_of_a_user:", "write module:Class"),
    ],
)
def test_what_cannot_be_imported_is_a_sentence(folder, name, message):
    before = list(sys.path)
    with pytest.raises(InputError, match=message):
        methods.find(name)
    assert sys.path == before


def test_a_base_class_without_a_name_of_its_own_does_not_take_the_place_of_the_method_it_builds_on():
    assert methods.find("fedavg") is FedAvg
    for name, kind in methods.registry().items():
        assert vars(kind)["name"] == name


def test_a_subclass_without_a_name_of_its_own_does_not_pass_as_its_parent(folder):
    with pytest.raises(
        InputError, match=r"^Child has no name of its own and would pass as Mine \('mine'\): write name"
    ):
        methods.find("own_module_of_a_user:Child")
    assert methods.find("own_module_of_a_user:Nephew").name == "nephew"

    class Mine(FedAvg):
        pass

    clients = pf.split("digits", clients=2)
    for given in (Mine, Mine()):
        with pytest.raises(InputError, match="Mine has no name of its own and would pass as FedAvg"):
            pf.run(given, clients, "mlp:1x4", 1)
        with pytest.raises(InputError, match="Mine has no name of its own"):
            pf.compare({"mine": given}, seeds=1, clients=clients, models="mlp:1x4", rounds=1)
    assert as_method(Grandchild()).name == "own"  # a method by itself, whatever it builds on


class Grandchild(FedAvg):
    """A method with a name of its own, in a class that another one builds on."""

    name = "own"


@pytest.mark.parametrize("kind", sorted(methods.registry().values(), key=lambda kind: kind.name))
def test_every_method_of_the_package_has_its_own(kind):
    assert methods.check_name(kind) is kind


class HeadOnly(pf.Method):
    """Trains what its author takes for the name of the head."""

    name = "head_only"

    def __init__(self, head):
        self.head = head

    def local(self, client, step, ctx):
        yield Stage(self.loss, trainable={"main": (self.head,)})


def test_a_part_of_a_network_that_is_not_there_is_named():
    moved = pf.run(HeadOnly("head."), synthetic(2), "mlp:1x8", rounds=1).models[0].state_dict()
    still = pf.Training(lr=1e-30)
    start = pf.run(HeadOnly("head"), synthetic(2), "mlp:1x8", rounds=1, training=still).models[0].state_dict()
    assert [name for name in start if not torch.equal(start[name], moved[name])] == ["head.weight", "head.bias"]
    for engine in ("sequential", "batched"):
        with pytest.raises(InputError, match=r"nothing to train in 'main/0': 'main' has no parameter under 'heads'"):
            pf.run(HeadOnly("heads"), synthetic(2), "mlp:1x8", rounds=1, engine=engine)


def test_networks_that_should_be_equal_are_told_how_far_apart_they_are():
    a, b = ({0: {"head.bias": torch.tensor([1.0, value])}} for value in (2.0, 2.5))
    with pytest.raises(AssertionError, match=r"^head.bias of 0 differs, by 0.5 at most$"):
        same_states(a, b)
    same_states(a, a)
    with pytest.raises(AssertionError, match=r"^head.bias of 0 differs in shape: \[2\] and \[1\]$"):
        same_states(a, {0: {"head.bias": torch.ones(1)}})
