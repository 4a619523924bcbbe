"""Methods, models and data of other packages appear by their entry points."""

import sys
from importlib.metadata import EntryPoint

import pytest

import polyfed as pf
from polyfed import methods, models
from polyfed.cli.about import list_data
from polyfed.cli.listing import method_entry, method_rows
from polyfed.core import plugins as found
from polyfed.models.registry import _registry

MODULE = '''
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
import torch
import polyfed as pf
from polyfed.models import build, register

@dataclass(frozen=True)
class Theirs(pf.Method):
    """A method of another package."""
    name: ClassVar[str] = "theirs"

@dataclass(frozen=True)
class Named(pf.Method):
    name: ClassVar[str] = "theirs_too"

class Child(Named):
    """Has the name of its parent."""

class Fresh(pf.FedAvg):
    """Has a name of its own, and no paper."""
    name = "fresh_head"

class Told(pf.FedAvg):
    name = "told"
    paper = "Somebody 2026"

@register("their_net", example="their_net", summary="a network of another package")
def net(options, input_shape, num_classes, rate):
    return build("mlp:1x8", input_shape, num_classes)

@register("their_adapted", example="their_adapted", summary="one that looks at values")
def adapted(options, input_shape, num_classes, rate):
    size = input_shape[0] * input_shape[1] * input_shape[2]
    layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(size, 5), torch.nn.Linear(5, num_classes))
    return pf.adapt(layers, input_shape=input_shape, num_classes=num_classes)

@register("their_broken", example="their_broken", summary="one that cannot be built")
def broken(options, input_shape, num_classes, rate):
    raise ZeroDivisionError

def data():
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    return pf.load((x[:40], y[:40]), test=(x[40:], y[40:]))
'''


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Offer the module's parts, and a broken one, as another package would."""
    (tmp_path / "their_package.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    points = {
        "polyfed.methods": [
            ("theirs", "Theirs"),
            ("fedavg", "Theirs"),
            ("broken", "Nothing"),
            ("theirs_too", "Child"),
            ("fresh_head", "Fresh"),
            ("told", "Told"),
        ],
        "polyfed.models": [("their_net", "net"), ("their_adapted", "adapted"), ("their_broken", "broken")],
        "polyfed.data": [("their_data", "data")],
    }

    def entry_points(group):
        return [EntryPoint(name, f"their_package:{value}", group) for name, value in points[group]]

    def forget():
        found.plugins.cache_clear()
        methods.registry.cache_clear()
        for name in ("their_net", "their_adapted", "their_broken"):
            _registry.pop(name, None)
        sys.modules.pop("their_package", None)

    monkeypatch.setattr(found, "entry_points", entry_points)
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.filterwarnings("ignore:.*left out:UserWarning", "ignore:.*no Method:UserWarning")
def test_what_other_packages_offer_is_found_by_name(installed):
    clients = pf.split("their_data", clients=2, by="iid")
    result = pf.run("theirs", clients, "their_net", 1)
    assert result.method == "theirs" and result.architectures == ["their_net", "their_net"]
    assert ("their_data", "another package") in [(row["name"], row["found"]) for row in pf.data.describe_sources()]
    assert methods.reference(type(methods.make("theirs"))) == "theirs"


@pytest.mark.filterwarnings("ignore:.*left out:UserWarning", "ignore:.*no Method:UserWarning")
def test_no_page_of_ours_is_named_for_a_method_of_another_package(installed):
    assert method_entry("theirs")["page"] is None
    assert method_entry("fedavg")["page"] == "docs/methods/fedavg.md"


@pytest.mark.filterwarnings("ignore:.*left out:UserWarning", "ignore:.*no Method:UserWarning")
def test_a_method_of_another_package_is_not_from_the_paper_of_its_base(installed):
    papers = {row["method"]: row["paper"] for row in method_rows()}
    assert (papers["fresh_head"], papers["told"], papers["fedavg"]) == ("", "Somebody 2026", "McMahan et al. 2017")
    assert method_entry("fresh_head")["paper"] == "" and method_entry("told")["paper"] == "Somebody 2026"


@pytest.mark.filterwarnings("ignore:.*left out:UserWarning", "ignore:.*no Method:UserWarning")
def test_what_is_not_known_of_a_data_set_of_another_package_is_left_blank(installed, capsys):
    list_data(as_json=False)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "their_data" in line]
    assert row.split() == ["their_data", "another", "package"]


@pytest.mark.filterwarnings("ignore:.*left out:UserWarning")
def test_an_entry_point_of_a_class_that_has_its_name_from_another_is_left_out(installed):
    with pytest.warns(UserWarning, match="'theirs_too' of polyfed.methods is no Method of that name"):
        assert "theirs_too" not in methods.registry()


def test_a_package_that_cannot_be_loaded_keeps_nobody_from_working(installed):
    with pytest.warns(UserWarning) as told:
        known = methods.registry()
    words = " ".join(str(warning.message) for warning in told)
    assert "'broken' of the package" in words and "cannot be loaded (AttributeError" in words
    assert "'fedavg' of polyfed.methods is no Method of that name" in words
    assert known["fedavg"] is pf.FedAvg and "broken" not in known


def test_a_base_of_methods_does_not_take_the_place_of_the_method_whose_name_it_inherits():
    for name, kind in methods.registry().items():
        assert vars(kind)["name"] == name
    assert methods.find("fedavg") is pf.FedAvg


def test_models_of_another_package_are_listed_whatever_they_do(installed):
    listed = {row["name"]: row["parameters"] for row in models.describe()}
    assert listed["their_net"] == 3 * 32 * 32 * 8 + 8 + 8 * 10 + 10
    assert listed["their_adapted"] == 3 * 32 * 32 * 5 + 5 + 5 * 10 + 10
    assert listed["their_broken"] == ""
