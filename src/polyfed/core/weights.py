"""Tensors of trained networks in files: safetensors, or what `torch.save` wrote, read without running any code."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from polyfed.core.checkpoint import CHECKSUM, sum_of_state
from polyfed.core.errors import InputError

KEY = "polyfed"  # of a model's file: under which its header says how to use it
TORCH = (".pt", ".pth", ".bin", ".ckpt")
WRAPPERS = ("state_dict", "model_state_dict", "model")  # under which a training script keeps them


def read_state(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a network by name.

    Raises
    ------
    InputError
        If the file cannot be read, or holds something else.
    """
    if path.suffix not in TORCH:
        try:
            with safe_open(path, framework="pt") as file:
                words = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InputError(f"Cannot read {path} ({error}): give a safetensors file of a trained network.") from error
        if CHECKSUM in words and words[CHECKSUM] != sum_of_state(words, tensors):  # files of others have none
            raise InputError(f"{path} is damaged (wrong checksum): restore it, or write it again.")
        return tensors
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise InputError(
            f"Cannot read {path} ({reason}): give a file with tensors only, as torch.save(model.state_dict(), ...) "
            "writes it."
        ) from error
    for key in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(f"{path} holds no tensors by name: save model.state_dict().")
    return {str(name): tensor for name, tensor in found.items()}


def header_of(path: Path) -> dict[str, Any] | None:
    """Return what the file of a model says about its use (`polyfed export` and sites write it), where it says so."""
    if path.suffix in TORCH:
        return None
    try:
        with safe_open(path, framework="pt") as file:
            found: dict[str, Any] = json.loads((file.metadata() or {}).get(KEY, "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"Cannot read {path} ({error}): give a safetensors file of a trained network.") from error
    return found if "scaling" in found else None


def fill(network: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Load a state that must fit; `source` is named where it does not.

    Raises
    ------
    InputError
        With the first tensor that does not.
    """
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise InputError(f"{source} does not fit: {first}") from error
