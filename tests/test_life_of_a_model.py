"""From a checkpoint to a run, on with more rounds, and to another script: the life of a client's model."""

from __future__ import annotations

import json
import re
import sys
import warnings

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file, save_file

import polyfed as pf
from polyfed.api import resume
from polyfed.core.errors import InputError
from polyfed.data.described import differences
from polyfed.exporting import export
from polyfed.fusion.files import fuse_files, load_fused
from polyfed.models import build
from polyfed.specs import split_models, weights_of
from polyfed.trained import load_model

CSV = "hospital,age,sex,outcome\n" + "\n".join(
    f"{['north', 'south'][row % 2]},{30 + row % 40},{'fm'[row % 3 == 0]},{'ill' if row % 3 == 0 else 'well'}"
    for row in range(120)
)


def digits(clients=2, **options):
    return pf.split(pf.load("digits", limit=(60, 40)), clients=clients, **options)


@pytest.fixture
def hospitals(tmp_path):
    file = tmp_path / "patients.csv"
    file.write_text(CSV)
    clients = pf.split(pf.load(file, label="outcome"), by="column:hospital")
    training = pf.Training(optimizer="adam", lr=0.02, epochs=5)
    result = pf.run("fedavg", clients, models="tabular:1x8", rounds=3, training=training, out=tmp_path / "run")
    return tmp_path, clients, result


# --- another script ---


def test_a_model_predicts_on_raw_rows(hospitals):
    folder, clients, result = hospitals
    model = load_model(folder / "run", client="north")
    assert model.class_names == ("ill", "well")
    assert torch.equal(model.module.state_dict()["head.weight"], result.models[0].state_dict()["head.weight"])
    assert model.predict([{"age": 40, "sex": "m"}, {"age": 41, "sex": "f"}]) == ["ill", "well"]
    whole = model.predict(folder / "patients.csv")  # a hospital is there and not asked for
    told = [line.split(",")[-1] for line in CSV.splitlines()[1:]]
    assert np.mean([a == b for a, b in zip(whole, told, strict=True)]) > 0.9
    # The same inputs as in training: scaled by the statistics of the run.
    assert torch.allclose(model.inputs(folder / "patients.csv").mean(0)[0], torch.tensor(0.0), atol=0.3)
    with torch.no_grad():
        expected = result.models[0](clients.test.inputs()).softmax(1)
    raw = clients.test.x
    assert raw.shape[1] == 3 and torch.allclose(model.module(model.scaling.apply(raw)).softmax(1), expected)
    with pytest.raises(InputError, match="no column 'sex', which the network needs"):
        model.predict([{"age": 40}])


@pytest.mark.parametrize(("client", "message"), [(2, "they are 0 to 1, or north, south"), ("west", "no client 'west'")])
def test_no_such_client(hospitals, client, message):
    with pytest.raises(InputError, match=message):
        load_model(hospitals[0] / "run", client)


def test_texts_and_images(tmp_path):
    texts = [f"{['good', 'bad'][row % 2]} thing" for row in range(40)]
    clients = pf.split(pf.load((texts, ["yes", "no"] * 20)), clients=2)
    training = pf.Training(optimizer="adam", lr=0.05, epochs=10)
    pf.run("fedavg", clients, models="cnn1d:1x8", rounds=2, training=training, out=tmp_path / "texts")
    assert load_model(tmp_path / "texts", 0).predict(["a good day", "bad"]) == ["yes", "no"]
    images = digits()
    result = pf.run("fedavg", images, models="mlp:1x8", rounds=1, out=tmp_path / "images", feature_dim=6)
    model = load_model(tmp_path / "images", 1)
    with torch.no_grad():
        expected = result.models[1](images.test.inputs()).softmax(1)
    assert torch.allclose(model.probabilities(images.test.x), expected)
    with pytest.raises(InputError, match=r"rows of shape \(1, 9, 9\)"):
        model.predict(np.zeros((2, 9, 9)))


def test_a_network_of_ones_own_is_asked_for(tmp_path):
    def own():
        return pf.adapt(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), head="1")

    result = pf.run("fedavg", digits(), models=own, rounds=1, out=tmp_path / "run")
    with pytest.raises(InputError, match=r"pass what builds it \(model=...\)"):
        load_model(tmp_path / "run", 0)
    again = load_model(tmp_path / "run", 0, model=own)
    assert torch.equal(again.module.head.weight, result.models[0].head.weight)


@pytest.mark.parametrize(
    "format", ["safetensors", "torch", "torchscript", pytest.param("onnx", marks=pytest.mark.long)]
)
def test_export(hospitals, format, tmp_path):
    if format == "onnx":
        pytest.importorskip("onnxscript")
    model = load_model(hospitals[0] / "run", 0)
    out = export(model, tmp_path / f"north.{format}", format)
    x = model.inputs([{"age": 40, "sex": "m"}] * 3)
    if format == "safetensors":
        assert torch.equal(load_file(out)["head.bias"], model.module.head.bias)
    if format == "torch":
        assert torch.allclose(torch.export.load(out).module()(x), model.module(x))
    if format == "torchscript":
        assert torch.allclose(torch.jit.load(out)(x), model.module(x))
    if format == "onnx":
        import onnx
        from onnx.reference import ReferenceEvaluator

        loaded = onnx.load(out)
        onnx.checker.check_model(loaded)
        (name,) = [item.name for item in loaded.graph.input]
        found = ReferenceEvaluator(loaded).run(None, {name: x.numpy()})[0]
        assert np.allclose(found, model.module(x).detach().numpy(), atol=1e-5)
    with pytest.raises(InputError, match="format is safetensors, torch, torchscript or onnx"):
        export(model, out, "pickle")


@pytest.mark.parametrize(
    ("name", "format", "belongs"),
    [("a.safetensors", "onnx", "safetensors"), ("a.onnx", "safetensors", "onnx"), ("a.pt2", "torchscript", "torch"),
     ("a.pt", "safetensors", "torchscript"), ("a.ONNX", "torch", "onnx")],
)  # fmt: skip
def test_an_ending_of_another_format_is_refused(hospitals, name, format, belongs, tmp_path):
    with pytest.raises(InputError, match=f"{name} .* a file of the format {belongs}, not {format}"):
        export(load_model(hospitals[0] / "run", 0), tmp_path / name, format)
    assert not (tmp_path / name).exists()


# --- from a checkpoint ---


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_a_client_begins_from_a_file(tmp_path, ending):
    torch.manual_seed(5)
    given = build("mlp:1x8", (1, 8, 8), 10)
    file = tmp_path / f"weights.{ending}"
    save_file(given.state_dict(), file) if ending == "safetensors" else torch.save(
        {"state_dict": given.state_dict()}, file
    )
    training = pf.Training(lr=1e-30)
    models = [f"mlp:1x8={file}", "mlp:1x8"]
    result = pf.run("local", digits(), models=models, rounds=1, training=training)
    assert result.architectures == ["mlp:1x8", "mlp:1x8"]  # one architecture, two beginnings
    assert torch.equal(result.models[0].head.weight, given.head.weight)
    assert not torch.equal(result.models[1].head.weight, given.head.weight)
    with pytest.raises(InputError, match=r"read as mlp:2x8, does not fit"):
        pf.run("local", digits(), models=f"mlp:2x8={file}", rounds=1)
    with pytest.raises(InputError, match=r"Cannot read .*nowhere"):
        pf.run("local", digits(), models="mlp:2x8=nowhere.safetensors", rounds=1)


@pytest.mark.parametrize(
    ("change", "says"),
    [(lambda t: t, None),
     (lambda t: t.assign(age=t.age * 2), r"another scaling \(age: mean"),
     (lambda t: t.assign(sex=t.sex + "x"), "other values of the columns sex"),
     (lambda t: t.assign(outcome=t.outcome.map({"ill": "b", "well": "a"})), "other classes .ill, well against a")],
)  # fmt: skip
def test_a_beginning_that_was_trained_for_something_else_is_said(hospitals, change, says):
    folder, _, _ = hospitals
    table = change(pandas.read_csv(folder / "patients.csv"))
    clients = pf.split(pf.load(table, label="outcome"), by="column:hospital")
    start = f"tabular:1x8={folder / 'run' / 'models' / 'client-0.safetensors'}"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pf.run("local", clients, models=start, rounds=1)
    told = [str(one.message) for one in found if "trained for something else" in str(one.message)]
    assert told == [] if says is None else re.search(says, told[0])


@pytest.mark.parametrize("before", ["", "module.", "model."])
def test_a_checkpoint_of_another_package_begins_with_its_own_names(tmp_path, before):
    def body(outputs):
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, outputs)
        )

    given = body(10)
    file = tmp_path / "weights.pt"
    torch.save({before + name: tensor for name, tensor in given.state_dict().items()}, file)
    (tmp_path / "own_net.py").write_text(
        "import polyfed as pf\nfrom torch import nn\n\n\ndef make(num_classes):\n"
        "    layers = nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, num_classes)\n"
        "    return pf.adapt(nn.Sequential(*layers), input_shape=(1, 8, 8))\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        result = pf.run("local", digits(), f"own_net:make={file}", rounds=1, training=pf.Training(lr=1e-30))
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("own_net", None)
    assert torch.equal(result.models[0].model[1].weight, given[1].weight)


def test_a_last_layer_for_other_classes_begins_anew_and_that_is_said(tmp_path):
    given = build("mlp:1x8", (1, 8, 8), 1000)
    torch.save(given.state_dict(), tmp_path / "many.pt")
    with pytest.warns(
        UserWarning, match=r"many.pt, read as mlp:1x8, has 1000 outputs, but here are 10: it begins anew"
    ):
        result = pf.run("local", digits(), f"mlp:1x8={tmp_path / 'many.pt'}", rounds=1, training=pf.Training(lr=1e-30))
    state = result.models[0].state_dict()
    first = next(name for name in state if not name.startswith("head"))
    assert torch.equal(state[first], given.state_dict()[first]) and state["head.weight"].shape == (10, 8)


def test_a_beginning_of_other_columns_is_refused_in_one_sentence(hospitals, tmp_path):
    folder, _, _ = hospitals
    table = pandas.read_csv(folder / "patients.csv").assign(weight=70.0)
    clients = pf.split(pf.load(table, label="outcome"), by="column:hospital")
    file = folder / "run" / "models" / "client-0.safetensors"
    with pytest.raises(InputError) as found:
        pf.run("local", clients, models=f"tabular:1x8={file}", rounds=1)
    assert str(found.value) == (
        f"No network for your data can begin from {file}, which was trained for something else, by its header (there "
        "against your data): other columns (age, sex against age, sex, weight). Give a file that was trained for the "
        "same inputs and classes, or name the model without one."
    )
    save_file(load_file(file), tmp_path / "bare.safetensors")  # no header, which would say it
    with pytest.raises(InputError, match=r"'\S+' is \d+ x \d+, that of the network \d+ x .*other inputs or classes\.$"):
        pf.run("local", clients, models=f"tabular:1x8={tmp_path / 'bare.safetensors'}", rounds=1)


def test_classes_in_another_order_are_said_loudest(hospitals):
    about = load_model(hospitals[0] / "run", 0).about
    turned = {**about, "class_names": ["well", "ill"]}
    assert differences(turned, about) == ["THE SAME CLASSES IN ANOTHER ORDER (well, ill against ill, well)"]


def test_model_strings_with_weights_are_read():
    assert split_models("resnet10:w4,stem=fedin=a.pt,mlp:2=b.safetensors,mlp") == [
        "resnet10:w4,stem=fedin=a.pt",
        "mlp:2=b.safetensors",
        "mlp",
    ]
    assert weights_of("resnet10:w4,stem=fedin=a.pt")[0] == "resnet10:w4,stem=fedin"
    assert weights_of("resnet10:w4,stem=fedin") == ("resnet10:w4,stem=fedin", None)


def test_a_file_that_runs_code_is_refused(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(InputError, match="tensors only"):
        pf.run("local", digits(), models=f"mlp:1x8={tmp_path / 'module.pt'}", rounds=1)


# --- more rounds ---


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "scaffold"])
def test_a_finished_run_goes_on_as_if_it_had_not_stopped(tmp_path, method):
    settings = {"models": "mlp:1x8", "training": pf.Training(lr=0.1), "participation": 0.5}
    whole = pf.run(method, digits(4), rounds=4, out=tmp_path / "whole", **settings)
    pf.run(method, digits(4), rounds=2, out=tmp_path / "part", **settings)
    longer = resume(tmp_path / "part", rounds=4)
    assert longer.rounds == 4
    for client in range(4):
        for name, tensor in whole.models[client].state_dict().items():
            assert torch.equal(longer.models[client].state_dict()[name], tensor)
    plain = [[{k: v for k, v in line.items() if k != "seconds"} for line in run.history] for run in (whole, longer)]
    assert plain[0] == plain[1]
    assert json.loads((tmp_path / "part" / "config.json").read_text())["rounds"] == 4


@pytest.mark.parametrize(
    ("method", "training", "rounds", "message"),
    [
        ("fedavg", pf.Training(), 1, "it has 2 already"),
        ("fedavg", pf.Training(schedule="cosine"), 4, "falls along the number of rounds"),
        ("fedkd", pf.Training(), 4, "depends on the number of rounds"),
        ("oneshot_fedavg", pf.Training(), 4, "number of rounds of its own"),
    ],
)
def test_more_rounds_that_would_be_another_run_are_refused(tmp_path, method, training, rounds, message):
    pf.run(method, digits(), models="mlp:1x8", rounds=2, training=training, out=tmp_path / "run")
    with pytest.raises(InputError, match=message):
        resume(tmp_path / "run", rounds=rounds)


# --- fusing ---


def test_models_of_a_run_with_feature_dim_can_be_fused(tmp_path):
    clients = digits()
    result = pf.run("local", clients, models=["mlp:1x8", "mlp:2x12"], rounds=1, feature_dim=6, out=tmp_path / "run")
    files = [tmp_path / "run" / "models" / f"client-{client}.safetensors" for client in (0, 1)]
    torch.save(result.models[0].state_dict(), tmp_path / "first.pt")
    fused = fuse_files(
        [tmp_path / "first.pt", files[1]], ["mlp:1x8", "mlp:2x12"], "ensemble", input_shape=(1, 8, 8), num_classes=10,
        out=tmp_path / "fused",
    )  # fmt: skip
    x = clients.test.inputs()
    with torch.no_grad():
        assert torch.allclose(load_fused(tmp_path / "fused")(x), fused.eval()(x))


def test_values_and_labels_are_predicted_in_words_and_units(tmp_path):
    x = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32)
    pressure = 120 + 10 * x[:, 0]
    clients = pf.split(pf.load((x, pressure), task="regression"), clients=2)
    result = pf.run("local", clients, "mlp:1x16", rounds=2, out=tmp_path / "values")
    model = load_model(tmp_path / "values", 0)
    outputs = result.task.predictions(result.models[0](model.inputs(x[:5])))
    assert model.predict(x[:5]) == pytest.approx(outputs[:, 0].tolist()) and abs(np.mean(model.predict(x)) - 120) < 20
    with pytest.raises(InputError, match="predicts values, not probabilities"):
        model.probabilities(x)
    labels = (x[:, :3] > 0).astype(int)
    clients = pf.split(pf.load((x, labels), task="multilabel", class_names=["a", "b", "c"]), clients=2)
    pf.run("local", clients, "mlp:1x16", rounds=1, out=tmp_path / "labels")
    model = load_model(tmp_path / "labels", 0)
    told = model.predict(x[:6])
    assert told == [[n for n, p in zip("abc", row, strict=True) if p > 0.5] for row in model.probabilities(x[:6])]


def test_a_tokenizer_that_was_given_is_given_again(tmp_path):
    def letters(text):
        return [1 + ord(letter) - ord("a") for letter in text if letter.isalpha()]

    texts = ["aab", "bba", "aaa", "bbb"] * 10
    data = pf.load((texts, ["x", "y"] * 20), tokenizer=letters)
    pf.run("local", pf.split(data, clients=2), "lstm:1x8", rounds=1, out=tmp_path / "run")
    with pytest.raises(InputError, match="pass it again"):
        load_model(tmp_path / "run", 0).predict(["ab"])
    assert load_model(tmp_path / "run", 0, tokenizer=letters).predict(["ab"])[0] in ("x", "y")


def test_a_file_of_a_run_is_a_model_by_itself_and_predicts_on_the_command_line(hospitals, tmp_path):
    from typer.testing import CliRunner

    from polyfed.cli import app

    folder = hospitals[0]
    file = tmp_path / "north.safetensors"
    file.write_bytes((folder / "run" / "models" / "client-0.safetensors").read_bytes())
    alone, of_run = load_model(file), load_model(folder / "run", client=0)
    rows = pandas.read_csv(folder / "patients.csv")[:9]
    rows.to_csv(tmp_path / "new.csv", index=False)
    assert alone.predict(rows) == of_run.predict(rows) and alone.about["name"] == "north"
    done = CliRunner().invoke(app, ["predict", str(file), str(tmp_path / "new.csv"), "--out", str(tmp_path / "p.csv")])
    assert done.exit_code == 0, done.output
    written = pandas.read_csv(tmp_path / "p.csv")
    assert written["prediction"].tolist() == of_run.predict(rows)
    assert np.allclose(written[list(alone.class_names)], alone.probabilities(rows))
    with pytest.raises(InputError, match="needs a client to be named"):
        load_model(folder / "run")
