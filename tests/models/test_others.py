"""Networks of other packages by name, and heads that are found without being named."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.errors import InputError
from polyfed.core.shape import InputShape
from polyfed.models import build, check_model

TEXT = InputShape((6,), words=20)


class Named(nn.Module):
    def __init__(self, name, own=False):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.add_module(name, nn.Linear(5, 3))
        self.name = name
        if own:
            self.get_classifier = lambda: getattr(self, name)

    def forward(self, x):
        return getattr(self, self.name)(self.first(x).relu())


@pytest.mark.parametrize(("name", "own"), [("fc", False), ("classifier", False), ("score", False), ("strange", True)])
def test_a_head_is_found_and_told(name, own, caplog):
    caplog.set_level(logging.INFO, "polyfed.models")
    model = pf.adapt(Named(name, own), input_shape=(4,))
    assert model.head_name == name and model.feature_dim == 5 and f"is '{name}'" in caplog.text
    assert pf.adapt(Named(name, own)).head_name == name  # also without trying it out


def test_the_right_one_of_several_is_found():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
            self.fc = nn.Linear(4, 3)  # not used

        def forward(self, x):
            return self.classifier[2](self.classifier[1](self.classifier[0](x)))

    assert pf.adapt(Two(), input_shape=(4,)).head_name == "classifier.2"


def test_no_head_is_told():
    with pytest.raises(InputError, match=r"no linear layer that could be its head"):
        pf.adapt(nn.Sequential(nn.ReLU()))
    with pytest.raises(InputError, match=r"No head of Sequential was found among 0: "):
        pf.adapt(nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), input_shape=(4,))


@pytest.mark.parametrize(
    ("spec", "shape", "package"),
    [("timm:resnet18", (3, 32, 32), "timm"), ("torchvision:resnet18", (3, 32, 32), "torchvision.models"),
     ("hf:distilbert", TEXT, "transformers")],
)  # fmt: skip
def test_a_package_that_is_not_there_is_told(spec, shape, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=r"pip install 'polyfed\[|does not work with"):
        build(spec, shape, 3)


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ("hf:distilbert", (4,), "takes texts"),
        ("timm:resnet18", TEXT, "needs images"),
        ("timm", (3, 8, 8), "needs a name"),
        ("torchvision:resnet18", (5, 8, 8), "color or grey images, not 5 channels: use timm"),
        ("hf:distilbert@0.5", TEXT, "no width rates"),
    ],
)
def test_wrong_uses_are_told(spec, shape, message):
    with pytest.raises(InputError, match=message):
        build(spec, shape, 3)


SMALL = "hf:distilbert,dim=16,n_layers=1,n_heads=2,hidden_dim=16"


def test_a_small_distilbert_from_its_configuration():
    pytest.importorskip("transformers")
    model = build(SMALL, TEXT, 3)
    assert model.head_name == "model.classifier" and model.feature_dim == 16
    check_model(model, TEXT)
    x = torch.tensor([[3, 4, 0, 0, 0, 0]])
    with torch.no_grad():
        before = model.eval()(x)
        model.model.model.get_input_embeddings().weight[0] = 9.0
        torch.testing.assert_close(model(x), before)  # nobody looks at padding


def test_a_distilbert_and_a_network_of_the_zoo_learn_together():
    pytest.importorskip("transformers")
    texts = [f"{['good', 'bad'][row % 2]} thing {row % 3}" for row in range(60)]
    clients = pf.split(pf.load((texts, np.arange(60) % 2)), clients=2, public=12)
    training = pf.Training(optimizer="adam", lr=0.01, epochs=4)
    result = pf.run("fedmd", clients, models=[SMALL, "cnn1d:1x8"], rounds=1, training=training)
    assert result.accuracy()["mean"] > 0.8


def test_networks_of_timm_and_torchvision():
    pytest.importorskip("timm", exc_type=Exception)  # it may be there for another torch
    for spec, head in (("timm:resnet18", "fc"), ("torchvision:resnet18", "fc")):
        model = build(spec, (3, 32, 32), 4)
        assert model.head_name == head and model.feature_dim == 512


def test_a_network_of_torchvision_sees_grey_images_in_three_equal_channels(monkeypatch):
    class Small(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.first = nn.Conv2d(3, 4, 3)
            self.fc = nn.Linear(4, num_classes)

        def forward(self, x):
            return self.fc(self.first(x).relu().mean((2, 3)))

    stand_in = SimpleNamespace(get_model=lambda name, weights, num_classes: Small(num_classes))
    monkeypatch.setitem(sys.modules, "torchvision.models", stand_in)  # no torchvision fits this machine's torch
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=stand_in))
    x = torch.randn(2, 1, 8, 8)
    model = build("torchvision:small", (1, 8, 8), 4)
    assert model.head_name == "model.fc" and model.feature_dim == 4
    torch.testing.assert_close(model(x), model.model.model(x.repeat(1, 3, 1, 1)))
    check_model(model, InputShape((1, 8, 8)))


def test_a_type_that_transformers_does_not_know_is_one_sentence():
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match="knows no type 'nosuch'") as found:
        build("hf:nosuch", InputShape((8,), words=50), 2)
    assert len(str(found.value)) < 200


@pytest.mark.parametrize(
    ("field", "says"),
    [("n_layer", "Unknown field of distilbert 'n_layer': did you mean 'n_layers'"),
     ("depth_of_it_all", "Unknown field of distilbert 'depth_of_it_all': known are: .*n_layers")],
)  # fmt: skip
def test_an_unknown_field_of_a_type_is_refused_with_the_nearest(field, says):
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match=says):
        build(f"hf:distilbert,{field}=1", TEXT, 2)


def test_other_names_that_a_type_has_for_its_fields_are_known():
    pytest.importorskip("transformers")
    small = "hf:distilbert,hidden_size=16,num_hidden_layers=1,num_attention_heads=2,hidden_dim=16"
    assert build(small, TEXT, 2).feature_dim == 16


# --- models of transformers from local files ---


def saved_model(folder, kind, words=20, **more):
    """Write a tiny model with random weights, as `save_pretrained` does."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
        "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    }.get(kind, {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16})
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, vocab_size=words, **{**sizes, "num_labels": 3, **more})
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "padding"), [("distilbert", 0), ("bert", 0), ("roberta", 1), ("xlm-roberta", 1), ("gpt2", None)]
)
def test_a_model_from_local_files_says_what_it_said_and_does_not_look_at_padding(tmp_path, kind, padding):
    kept = saved_model(tmp_path / "kept", kind, max_position_embeddings=12)
    moved = int(padding != 0)
    model = build(f"hf:{tmp_path / 'kept'}", InputShape((6,), words=20 + moved), 3).eval()
    own = torch.tensor([[5, 6, 7], [8, 9, 10]])
    x = torch.cat([own + moved, torch.zeros(2, 3, dtype=torch.int64)], 1)
    with torch.no_grad():
        if kept.config.pad_token_id is None:
            kept.config.pad_token_id = 0
        torch.testing.assert_close(model(x), kept(input_ids=own, attention_mask=torch.ones_like(own)).logits)
    check_model(model, InputShape((6,), words=20 + moved))


def test_a_saved_head_of_another_size_is_made_anew_without_a_report(tmp_path, capsys):
    saved_model(tmp_path / "kept", "bert")
    capsys.readouterr()
    with pytest.raises(InputError, match="n_layers=1 is a field of a type that is built with new weights"):
        build(f"hf:{tmp_path / 'kept'},n_layers=1", TEXT, 5)
    assert build(f"hf:{tmp_path / 'kept'}", TEXT, 5)(torch.ones(2, 6, dtype=torch.int64)).shape == (2, 5)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (InputShape((6,), words=30), "knows 20 words, but the data has 29: load the data with the tokenizer"),
        (InputShape((13,), words=20), "no place for texts of 13 words .max_position_embeddings=14."),
    ],
)
def test_data_that_does_not_fit_a_saved_model_is_told(tmp_path, shape, words):
    saved_model(tmp_path / "kept", "roberta", max_position_embeddings=14)  # 12 words: places begin behind the padding
    with pytest.raises(InputError, match=words):
        build(f"hf:{tmp_path / 'kept'}", shape, 3)


def test_a_new_roberta_has_places_for_the_longest_texts():
    pytest.importorskip("transformers")
    small = "hf:roberta,hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
    build(f"{small},max_position_embeddings=9", InputShape((9,), words=20), 2)(torch.ones(1, 9, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["distilbert", "roberta"])
def test_a_saved_model_and_its_tokenizer_learn_with_another_network(tmp_path, kind):
    tokenizers = pytest.importorskip("tokenizers")
    start = ["<s>", "<pad>", "<unk>"] if kind == "roberta" else ["[PAD]", "[UNK]"]
    names = [*start, "good", "bad", "thing", "0", "1", "2"]
    vocabulary = {word: number for number, word in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=start[-1]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    saved_model(tmp_path / "kept", kind, words=len(names))
    tokenizer.save(str(tmp_path / "kept" / "tokenizer.json"))
    texts = [f"{['good', 'bad'][row % 2]} thing {row % 3}" for row in range(60)]
    data = pf.load((texts, np.arange(60) % 2), tokenizer=str(tmp_path / "kept"))
    clients = pf.split(data, clients=2, public=12)
    training = pf.Training(optimizer="adam", lr=0.01, epochs=4)
    result = pf.run(
        "fedmd", clients, models=[f"hf:{tmp_path / 'kept'}", "cnn1d:1x8"], rounds=1, training=training,
        out=tmp_path / "run",
    )  # fmt: skip
    assert result.accuracy()["mean"] > 0.8
    said = pf.load_model(tmp_path / "run", 0).predict(["good thing 1", "bad thing 2"])
    assert said == ["0", "1"]
