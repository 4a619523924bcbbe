"""Networks of other packages by name: `timm:resnet18`, `torchvision:resnet18`, `hf:distilbert`. Loaded on demand.

They are built from their configuration, with new weights; `timm:NAME,pretrained` takes published ones, and `hf:` with
a folder or an `owner/name` of the Hub takes those that are there.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from polyfed.core.errors import InputError, first_line, unknown
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
    summary="networks for color and grey images of the package torchvision",
    options={"<name>": "a name that torchvision knows; must be given"},
    package="torchvision",
)
def build_torchvision(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> Adapted:
    """Build `torchvision:<name>`; its networks take three channels, of which grey images give each the same."""
    refuse_rate(rate, "torchvision")
    channels = image_shape(input_shape, "torchvision")[0]
    if channels not in (1, 3):
        raise InputError(f"Networks of torchvision take color or grey images, not {channels} channels: use timm.")
    name = _name("torchvision", options)
    models = _package("torchvision.models", "torchvision")
    with _told(f"torchvision:{name}"):
        model = models.get_model(name, weights=None, num_classes=num_classes)
    return adapt(Grey(model) if channels == 1 else model, input_shape=input_shape)


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
    with _told(f"hf:{name}"), _quiet(transformers.utils.logging):
        if "/" in name or Path(name).is_dir():
            if fields:
                field, value = next(iter(fields.items()))
                raise InputError(
                    f"{field}={value} is a field of a type that is built with new weights, but {name} has its own: "
                    "leave it out."
                )
            # A head of another size is made anew: the classes are those of the data.
            how = {"num_labels": num_classes, "ignore_mismatched_sizes": True, "attn_implementation": "eager"}
            model = make.from_pretrained(name, **how)
        else:
            if name not in transformers.CONFIG_MAPPING:
                raise InputError(
                    f"The package transformers knows no type '{name}': give one that it knows (distilbert, bert, "
                    "roberta, ...), a folder with a model, or owner/name of the Hub."
                )
            plain = transformers.AutoConfig.for_model(name)
            for field in fields:
                if not hasattr(plain, field):  # transformers would keep it, and build the type as it is
                    raise unknown(f"field of {name}", field, {*plain.to_dict(), *plain.attribute_map})
            known = {"vocab_size": shape.words, "num_labels": num_classes, "pad_token_id": 0, **fields}
            config = transformers.AutoConfig.for_model(name, **known)
            places = shape[0] + (config.pad_token_id or 0) + 1  # some types count places from behind their padding
            if getattr(config, "max_position_embeddings", places) < places:
                config.max_position_embeddings = places
            model = make.from_config(config, attn_implementation="eager")  # plain attention can be stacked
        texts = Texts(model)
    _check_words(name, texts, shape)
    return adapt(texts, input_shape=input_shape)


class Grey(nn.Module):
    """A network for color images that takes grey ones: each of its channels sees the same."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return cast(Tensor, self.model(x.expand(-1, 3, -1, -1)))


class Texts(nn.Module):
    """A classifier of transformers that takes token ids alone: 0 is padding, which it does not look at.

    Where the model's own padding is another id, all ids of the data are one higher than the model's, because its
    tokenizer was moved up by one to make room for 0 (`Words.given`); they are moved back here.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model
        self.words = int(model.get_input_embeddings().num_embeddings)
        config = model.config
        self.moved = int(config.pad_token_id != 0)
        if config.pad_token_id is None:  # of types that were never padded: the end of a text says that it has ended
            end = config.eos_token_id
            config.pad_token_id = end if isinstance(end, int) and end < self.words else 0
        self.padding = int(config.pad_token_id)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        present = x != 0
        ids = torch.where(present, x - 1, self.padding) if self.moved else x
        if isinstance(head := getattr(self.model, "score", None), nn.Linear):
            # Types that read from left to right ask the head at every word and take the last answer: asked once here,
            # with the last word's vector, so that the head comes last and has one vector a sample.
            steps = self.model.base_model(input_ids=ids, attention_mask=present.long()).last_hidden_state
            last = (present.sum(1) - 1).clamp(min=0)[:, None, None].expand(-1, 1, steps.shape[2])
            return cast(Tensor, head(steps.gather(1, last).squeeze(1)))
        return cast(Tensor, self.model(input_ids=ids, attention_mask=present.long()).logits)


def _check_words(name: str, texts: Texts, shape: InputShape) -> None:
    """Refuse ids that a model does not know, and texts that are longer than it has places for."""
    if texts.words < shape.words - texts.moved:
        raise InputError(
            f"The model 'hf:{name}' knows {texts.words} words, but the data has {shape.words - texts.moved}: load the "
            "data with the tokenizer of that model (tokenizer=..., --tokenizer)."
        )
    was = texts.training
    try:
        with torch.no_grad():
            texts.eval()(torch.ones(1, shape[0], dtype=torch.int64))
    except (IndexError, RuntimeError) as error:
        most = getattr(texts.model.config, "max_position_embeddings", "fewer")
        raise InputError(
            f"The model 'hf:{name}' has no place for texts of {shape[0]} words (max_position_embeddings={most}): load "
            "the data with a smaller length (length=..., --set data.length=...)."
        ) from error
    finally:
        texts.train(was)


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


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Keep transformers from reporting every time that a model is read: it is read once for each client and check."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


class _told:
    """Turn whatever another package says into one sentence."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, InputError) or not isinstance(error, Exception):
            return
        reason = first_line(error)
        raise InputError(f"The model '{self.model}' cannot be built ({reason}).") from error
