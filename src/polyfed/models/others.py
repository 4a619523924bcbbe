"""Networks of other packages by name: `timm:resnet18`, `torchvision:resnet18`, `hf:distilbert`. Loaded on demand.

They are built from their configuration, with new weights; `timm:NAME,pretrained` takes published ones, and `hf:` with
a folder or an `owner/name` of the Hub takes those that are there.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polyfed.core.errors import InputError
from polyfed.core.shape import InputShape
from polyfed.models.adapt import Adapted, adapt
from polyfed.models.network import FITTING, image_shape, refuse_rate
from polyfed.models.registry import Options, register


@register(
    "timm",
    example="timm:resnet18",
    summary="networks for images of the package timm",
    options={"<name>": "a name that timm knows; must be given", "pretrained": "begin from the published weights"},
    package="timm",
)
def build_timm(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> Adapted:
    """Build `timm:<name>[,pretrained]` for images of any number of channels."""
    refuse_rate(rate, "timm")
    channels = image_shape(input_shape, "timm")[0]
    name, published = _name("timm", options), options.take("pretrained") is not None
    timm = _package("timm", "timm")
    with _told(f"timm:{name}"):
        model = timm.create_model(name, pretrained=published, num_classes=num_classes, in_chans=channels)
    return adapt(model, input_shape=input_shape)


@register(
    "torchvision",
    example="torchvision:resnet18",
    summary="networks for color images of the package torchvision",
    options={"<name>": "a name that torchvision knows; must be given"},
    package="torchvision",
)
def build_torchvision(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> Adapted:
    """Build `torchvision:<name>`; its networks take three channels."""
    refuse_rate(rate, "torchvision")
    if image_shape(input_shape, "torchvision")[0] != 3:
        raise InputError(f"Networks of torchvision take three channels, not {input_shape[0]}: use timm or the zoo.")
    name = _name("torchvision", options)
    models = _package("torchvision.models", "torchvision")
    with _told(f"torchvision:{name}"):
        model = models.get_model(name, weights=None, num_classes=num_classes)
    return adapt(model, input_shape=input_shape)


@register(
    "hf",
    example="hf:distilbert",
    summary="networks for texts of Hugging Face transformers",
    options={
        "<type, folder or owner/name>": "a type is built with new weights, a folder or a name of the Hub with its own",
        "<field>=<number>": "a field of the type's configuration, for instance n_layers=2",
    },
    inputs=InputShape((64,), words=1000),
    package="transformers",
)
def build_hf(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> Adapted:
    """Build `hf:<type>[,<field>=<number>]` from a configuration, or `hf:<folder>` with the weights that are there."""
    refuse_rate(rate, "hf")
    shape = InputShape(input_shape)
    if shape.kind != "text":
        raise InputError(
            f"The model 'hf' takes texts (kind='tokens' or 'text'), but the data has shape {tuple(shape)} "
            f"({shape.kind}): use {FITTING[shape.kind]}."
        )
    name = _name("hf", options)
    fields: dict[str, int] = {}
    while found := options.take(r"(\w+)=(\d+)"):
        fields[found[1]] = int(found[2])
    transformers = _package("transformers", "transformers")
    make = transformers.AutoModelForSequenceClassification
    with _told(f"hf:{name}"):
        if "/" in name or Path(name).is_dir():
            model = make.from_pretrained(name, num_labels=num_classes, attn_implementation="eager")
            _check_words(name, model, shape)
        else:
            if name not in transformers.CONFIG_MAPPING:
                raise InputError(
                    f"The package transformers knows no type '{name}': give one that it knows (distilbert, bert, "
                    "roberta, ...), a folder with a model, or owner/name of the Hub."
                )
            known = {"vocab_size": shape.words, "num_labels": num_classes, "pad_token_id": 0, **fields}
            config = transformers.AutoConfig.for_model(name, **known)
            if getattr(config, "max_position_embeddings", shape[0]) < shape[0]:
                config.max_position_embeddings = shape[0]
            model = make.from_config(config, attn_implementation="eager")  # plain attention can be stacked
    return adapt(Texts(model), input_shape=input_shape)


class Texts(nn.Module):
    """A classifier of transformers that takes token ids alone: 0 is padding, which it does not look at."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.model(input_ids=x, attention_mask=(x != 0).long()).logits
        return logits


def _check_words(name: str, model: nn.Module, shape: InputShape) -> None:
    has = int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    if has < shape.words:
        raise InputError(
            f"The model 'hf:{name}' knows {has} words, but the data has ids up to {shape.words - 1}: load the data "
            "with the tokenizer of that model (tokenizer=...)."
        )


def _name(kind: str, options: Options) -> str:
    found = options.take(r"[^=]+")
    if found is None:
        raise InputError(f"The model '{kind}' needs a name: write for instance '{kind}:NAME'.")
    return found[0]


def _package(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(f"Networks of {name} need that package ({error}): pip install 'polyfed[{name}]'.") from error
    except (ImportError, RuntimeError, OSError) as error:  # installed, but for another torch
        raise InputError(
            f"The package {name} does not work with the installed torch ({error}): install the one that fits it."
        ) from error


class _told:
    """Turn whatever another package says into one sentence."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, InputError) or not isinstance(error, Exception):
            return
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise InputError(f"The model '{self.model}' cannot be built ({reason}).") from error
