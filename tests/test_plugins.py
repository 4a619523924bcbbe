"""Methods, models and data of other packages appear by their entry points."""

import sys
from importlib.metadata import EntryPoint

import pytest

import polyfed as pf
from polyfed import methods
from polyfed.core import plugins as found
from polyfed.models.registry import _registry

MODULE = '''
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
import polyfed as pf
from polyfed.models import build, register

@dataclass(frozen=True)
class Theirs(pf.Method):
    """A method of another package."""
    name: ClassVar[str] = "theirs"

@register("their_net", example="their_net", summary="a network of another package")
def net(options, input_shape, num_classes, rate):
    return build("mlp:1x8", input_shape, num_classes)

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
        "polyfed.methods": [("theirs", "Theirs"), ("fedavg", "Theirs"), ("broken", "Nothing")],
        "polyfed.models": [("their_net", "net")],
        "polyfed.data": [("their_data", "data")],
    }

    def entry_points(group):
        return [EntryPoint(name, f"their_package:{value}", group) for name, value in points[group]]

    def forget():
        found.plugins.cache_clear()
        methods.registry.cache_clear()
        _registry.pop("their_net", None)
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
