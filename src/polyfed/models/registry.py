"""Models by name: `<name>[:<options>][@<rate>]`, for instance `resnet18:w16,stem=fedin@0.5`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polyfed.core.errors import InputError, unknown
from polyfed.core.plugins import plugins
from polyfed.core.shape import InputShape
from polyfed.models.contract import count_parameters, properties

Builder = Callable[["Options", Sequence[int], int, float], nn.Module]

_registry: dict[str, Entry] = {}


def register(
    name: str,
    *,
    example: str,
    summary: str,
    options: Mapping[str, str] | Sequence[str] = (),
    inputs: InputShape | None = None,
    package: str | None = None,
) -> Callable[[Builder], Builder]:
    """Register `builder(options, input_shape, num_classes, rate) -> nn.Module` under a name.

    Parameters
    ----------
    name
        What people type. If the example is written `name-a-b`, that is read as `name:a-b`.
    example
        A full model string, used in tables and in error messages.
    summary
        A few words for `polyfed models`.
    options
        How each option looks, and what it means and is without it; the builder reads them with `options.take`.
    inputs
        Inputs that the example can take, where they are not images; tables count its parameters for them.
    package
        Another package that the network comes from; tables leave out its parameters.
    """

    def add(builder: Builder) -> Builder:
        if name in _registry:
            raise InputError(f"A model named '{name}' is registered already: choose another name.")
        told = dict(options) if isinstance(options, Mapping) else dict.fromkeys(options, "")
        _registry[name] = Entry(name, example, summary, told, builder, inputs, package)
        return builder

    return add


def build(spec: str, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Build a model from its string, for inputs of one shape (without the batch axis).

    Raises
    ------
    InputError
        The name, an option, the rate or a size is not valid; the sentence names the nearest valid one.
    """
    entry, items, rate = parse(spec)
    if not input_shape or any(size < 1 for size in input_shape):
        raise InputError(f"The input shape {tuple(input_shape)} is not a shape of data: give positive sizes.")
    if num_classes < 1:
        raise InputError(f"A model needs at least one class, not {num_classes}.")
    options = Options(spec, items)
    model = entry.builder(options, InputShape(input_shape), num_classes, rate)
    if options.items:
        raise unknown(f"option for the model '{entry.name}'", options.items[0], entry.options or ["(none)"])
    return model


def parse(spec: str) -> tuple[Entry, list[str], float]:
    """Split a model string into its registry entry, its options and its width rate."""
    body, at, rate_text = spec.strip().partition("@")
    name, colon, options_text = body.partition(":")
    items = [item.strip() for item in options_text.split(",")] if colon else []
    if colon and not all(items):
        raise InputError(f"An option is empty in the model '{spec}': write for instance 'resnet18:w16'.")
    short, _, first = name.partition("-")
    known = _known()
    if name not in known and short in known and known[short].example.startswith(f"{short}-"):
        name = short
        items.insert(0, first)
    if name not in known:
        raise unknown("model", name, known)
    rate = 1.0
    if at:
        try:
            rate = float(rate_text)
        except ValueError:
            rate = float("nan")
        if not 0 < rate <= 1:
            raise InputError(
                f"The width rate '{rate_text}' in the model '{spec}' is not in (0, 1]: write for instance '{body}@0.5'."
            )
    return known[name], items, rate


def names() -> list[str]:
    """Return the names of all registered models."""
    return list(_known())


def _known() -> dict[str, Entry]:
    """Return all models: an entry point of another package registers its own when it is loaded."""
    plugins("models")
    return _registry


def describe(input_shape: Sequence[int] = (3, 32, 32), num_classes: int = 10) -> list[dict[str, Any]]:
    """Return one row per model: name, example, summary, options, and the example's parameters for such data."""
    return [
        {**row, "options": ", ".join(row["options"])}
        for row in (describe_one(name, input_shape, num_classes) for name in _known())
    ]


def describe_one(name: str, input_shape: Sequence[int] = (3, 32, 32), num_classes: int = 10) -> dict[str, Any]:
    """Return everything about one model: each option with its meaning, and what its networks offer to methods.

    Raises
    ------
    InputError
        For an unknown name, with the nearest known one.
    """
    if name not in _known():
        raise unknown("model", name, _known())
    entry = _registry[name]
    made = None if entry.package else _example(entry, input_shape, num_classes)
    return {
        "name": name,
        "example": entry.example,
        "summary": entry.summary,
        "options": entry.options,
        "inputs": InputShape(entry.inputs or input_shape).kind,
        "offers": sorted(properties(made)) if made is not None else [],
        "parameters": "" if made is None else count_parameters(made),
    }


def _example(entry: Entry, input_shape: Sequence[int], num_classes: int) -> nn.Module | None:
    """Return the example of a model; None where that of another package cannot be built, which ends no listing."""
    shape = entry.inputs or input_shape
    with torch.device("meta"), suppress(Exception):  # shapes only: no memory and no random draws
        return build(entry.example, shape, num_classes)
    with torch.random.fork_rng(), suppress(Exception):  # `adapt` looks at values while it is built
        return build(entry.example, shape, num_classes)
    return None


@dataclass(frozen=True)
class Entry:
    """One registered model."""

    name: str
    example: str
    summary: str
    options: dict[str, str]  # how it looks -> what it means
    builder: Builder
    inputs: InputShape | None = None
    package: str | None = None


class Options:
    """The options of one model string; a builder takes those that it knows, and leftovers are an error."""

    def __init__(self, spec: str, items: list[str]) -> None:
        self.spec = spec
        self.items = items

    def take(self, pattern: str) -> re.Match[str] | None:
        """Remove and return the first option that matches a regular expression as a whole."""
        for item in self.items:
            if found := re.fullmatch(pattern, item):
                self.items.remove(item)
                return found
        return None
