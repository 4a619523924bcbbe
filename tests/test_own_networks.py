"""Networks of one's own after a run: written for other programs, taken back to plain torch, refused where they must."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import polyfed as pf
from polyfed.core.errors import InputError, first_line
from polyfed.exporting import export


class Cut(nn.Module):
    """A head that takes maps, and a shape after it that only logits have."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(1, 2, 3)
        self.out = nn.Sequential(nn.Flatten(), nn.Linear(72, 10))

    def forward(self, x):
        return self.out(self.body(x).relu()).view(x.shape[0], 10)


def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


def mine():
    return pf.adapt(plain(), head="3", input_shape=(1, 8, 8))


def cut():
    return pf.adapt(Cut(), head="out", input_shape=(1, 8, 8))


def trained(make, folder, **options):
    clients = pf.split(pf.load("digits", limit=(60, 40)), clients=2)
    result = pf.run("local", clients, make, rounds=1, out=folder, **options)
    return pf.load_model(folder, 0, model=make), result, clients


# --- written for other programs ---


@pytest.mark.parametrize("make", [mine, cut])
@pytest.mark.parametrize("format", ["torch", "torchscript", pytest.param("onnx", marks=pytest.mark.long)])
def test_an_own_network_with_features_of_another_size_is_exported(make, format, tmp_path):
    model, _, clients = trained(make, tmp_path / "run", feature_dim=6)
    x = model.inputs(clients.test.x[:5])
    if format == "onnx":
        pytest.importorskip("onnxscript")
        import onnx
        from onnx.reference import ReferenceEvaluator

        loaded = onnx.load(export(model, tmp_path / "one.onnx", "onnx"))
        found = ReferenceEvaluator(loaded).run(None, {loaded.graph.input[0].name: x.numpy()})[0]
        assert np.allclose(found, model.module(x).detach().numpy(), atol=1e-5)
        return
    file = export(model, tmp_path / ("one.pt2" if format == "torch" else "one.ts"), format)
    program = torch.export.load(file).module() if format == "torch" else torch.jit.load(file)
    assert torch.allclose(program(x), model.module(x), atol=1e-6)


def test_what_a_package_says_is_quoted_in_one_line_without_colors():
    told = "\x1b[96mThis is step 1/3\x1b[0m of it.\nNext steps:\n- ask"
    assert first_line(RuntimeError(told)) == "This is step 1/3 of it"
    assert first_line(RuntimeError("\x1b[0m\n")) == "RuntimeError"


def test_a_network_that_cannot_be_written_is_told_in_one_sentence(tmp_path):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.fc = nn.Linear(64, 8), nn.Linear(8, 10)

        def forward(self, x):
            h = self.body(x.flatten(1))
            return self.fc(h.relu() if float(h.detach().sum()) > 1e9 else h)  # a step that depends on what it sees

    model, _, _ = trained(lambda: pf.adapt(Counts(), input_shape=(1, 8, 8)), tmp_path / "run")
    with pytest.raises(InputError) as found:
        export(model, tmp_path / "one.pt2", "torch")
    told = str(found.value)
    assert told.startswith("This network cannot be written as torch (") and "\n" not in told and "\x1b" not in told


# --- refused before training ---


@pytest.mark.parametrize("kind", ["float64", "bfloat16"])
@pytest.mark.parametrize(
    ("make", "options"), [(mine, {}), (mine, {"feature_dim": 6}), (plain, {})], ids=["adapted", "feature_dim", "plain"]
)
def test_a_network_of_other_floats_is_refused_before_training(make, options, kind):
    def given():
        return make().to(getattr(torch, kind))

    clients = pf.split(pf.load("digits", limit=(60, 40)), clients=2)
    with pytest.raises(InputError, match=rf"Model .*given.* computes in {kind}, .* float32: call \.to"):
        pf.run("local", clients, given, rounds=1, **options)


def test_a_network_that_turns_numbers_into_its_own_and_back_is_taken():
    class Exact(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.fc = nn.Linear(64, 8).double(), nn.Linear(8, 10)

        def forward(self, x):
            return self.fc(self.body(x.flatten(1).double()).relu().float())

    clients = pf.split(pf.load("digits", limit=(60, 40)), clients=2)
    assert pf.run("local", clients, Exact, rounds=1).rounds == 1


# --- back to plain torch ---


def test_the_network_inside_is_ones_own_with_its_own_names(tmp_path):
    model, result, _ = trained(mine, tmp_path / "run")
    inside = model.module.model
    assert inside.state_dict().keys() == plain().state_dict().keys()
    assert torch.equal(inside[3].weight, result.models[0].model[3].weight)
    stored = load_file(tmp_path / "run" / "models" / "client-0.safetensors")
    assert stored.keys() == {f"model.{name}" for name in inside.state_dict()}
    assert torch.equal(stored["model.1.weight"], inside[1].weight)


@pytest.mark.parametrize("adapter", ["linear", "avgpool"])
def test_with_feature_dim_the_three_parts_in_a_row_are_the_network(adapter, tmp_path):
    model, _, clients = trained(mine, tmp_path / "run", feature_dim=6, feature_adapter=adapter)
    made, x = model.module, model.inputs(clients.test.x[:5])
    network = nn.Sequential(made.model.model, made.projection, made.head).eval()
    assert torch.equal(network(x), made(x)) and isinstance(made.model.model[3], nn.Identity)
    stored = load_file(tmp_path / "run" / "models" / "client-0.safetensors")
    own = {f"model.model.1.{name}" for name in ("weight", "bias")} | {f"head.{name}" for name in ("weight", "bias")}
    assert stored.keys() == own | ({f"projection.{n}" for n in ("weight", "bias")} if adapter == "linear" else set())
