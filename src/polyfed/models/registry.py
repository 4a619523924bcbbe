"""Models by name: `<name>[:<options>][@<rate>]`, for instance `resnet18:w16,stem=fedin@0.5`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from polyfed.core.errors import InputError, unknown
from polyfed.models.contract import count_parameters

Builder = Callable[["Options", Sequence[int], int, float], nn.Module]

_registry: dict[str, Entry] = {}


def register(name: str, *, example: str, summary: str, options: Sequence[str] = ()) -> Callable[[Builder], Builder]:
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
        How the options look, for error messages; the builder reads them with `options.take`.
    """

    def add(builder: Builder) -> Builder:
        if name in _registry:
            raise InputError(f"A model named '{name}' is registered already: choose another name.")
        _registry[name] = Entry(name, example, summary, tuple(options), builder)
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
    model = entry.builder(options, tuple(input_shape), num_classes, rate)
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
    if name not in _registry and short in _registry and _registry[short].example.startswith(f"{short}-"):
        name = short
        items.insert(0, first)
    if name not in _registry:
        raise unknown("model", name, _registry)
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
    return _registry[name], items, rate


def names() -> list[str]:
    """Return the names of all registered models."""
    return list(_registry)


def describe(input_shape: Sequence[int] = (3, 32, 32), num_classes: int = 10) -> list[dict[str, str | int]]:
    """Return one row per model: name, example, summary, options, and the example's parameters for such data."""
    with torch.device("meta"):  # shapes only: no memory and no random draws
        return [
            {
                "name": entry.name,
                "example": entry.example,
                "summary": entry.summary,
                "options": ", ".join(entry.options),
                "parameters": count_parameters(build(entry.example, input_shape, num_classes)),
            }
            for entry in _registry.values()
        ]


@dataclass(frozen=True)
class Entry:
    """One registered model."""

    name: str
    example: str
    summary: str
    options: tuple[str, ...]
    builder: Builder


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
