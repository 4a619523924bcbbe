"""`polyfed fuse --set key=value`: the grammar of all other commands."""

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from polyfed.cli import app
from polyfed.core.errors import InputError
from polyfed.data import load
from polyfed.fusion import Matching, fuse, load_fused
from polyfed.models import build


@pytest.fixture
def networks(tmp_path):
    torch.manual_seed(0)
    made = [build("mlp:1x8", (1, 8, 8), 10).eval() for _ in range(3)]
    for place, network in enumerate(made):
        save_file(network.state_dict(), tmp_path / f"{place}.safetensors")
    return made


def fused_by(folder, *words):
    files = [str(folder / f"{place}.safetensors") for place in range(3)]
    command = ["fuse", *files, "--models", "mlp:1x8", "--out", str(folder / "fused"), *words]
    CliRunner().invoke(app, command, catch_exceptions=False)
    return load_fused(folder / "fused")


@pytest.mark.parametrize(
    ("words", "method", "options"),
    [
        (("--set", "k=3"), "ams-topk", {"k": 3}),
        (("--set", "space=logit"), "ensemble", {"space": "logit"}),
        (
            ("--set", "normalize=temperature", "--set", "temperatures=[1.0, 2.0, 0.5]"),
            "ams-top1",
            {"normalize": "temperature", "temperatures": [1.0, 2.0, 0.5]},
        ),
        (
            ("--set", "matching.gamma=5", "--set", "matching.iterations=1", "--set", "seed=4"),
            "pfnm",
            {"matching": Matching(gamma=5.0, iterations=1), "seed": 4},
        ),
    ],
)
def test_options_are_those_of_python(networks, tmp_path, words, method, options):
    found = fused_by(tmp_path, "--method", method, *words)
    x = load("digits").test.inputs()[:40]
    expected, usual = fuse(networks, method, **options)(x), fuse(networks, method)(x)
    assert torch.equal(found(x), expected)
    assert not torch.equal(expected, usual)  # it says something


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kk=3", "option of fuse 'kk': did you mean 'k'"),
        ("k=many", "fuse: k must be a whole number"),
        ("matching.gama=1", "option of matching 'gama': did you mean 'gamma'"),
        ("matching.gamma=lots", "matching: gamma must be a number"),
        ("k", "--set takes key=value"),
    ],
)
def test_what_is_not_possible_is_refused(networks, tmp_path, text, says):
    with pytest.raises(InputError, match=says):
        fused_by(tmp_path, "--set", text)
    assert not list(tmp_path.glob("fused*"))
