"""Tensors of trained networks in files: safetensors, or what `torch.save` wrote, read without running any code."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from polyfed.core.checkpoint import CHECKSUM, sum_of_state
from polyfed.core.errors import InputError, first_line

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
        reason = first_line(error)
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


# What training scripts put before all names (`torch.nn.DataParallel`), and `adapt` before those of other packages.
WRAPPED = (("module.", ""), ("model.", ""), ("", "model."), ("module.", "model."), ("", "model.model."))


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


class DoesNotFit(InputError):
    """Tensors of a file are not those of the network that they are for."""


def fill(network: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Load a state that must fit; `source` is named where it does not.

    Raises
    ------
    DoesNotFit
        With the first tensor that does not.
    """
    state = _called_alike(network.state_dict(), state)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        told = _unlike(network.state_dict(), state) or first_line(error)
        raise DoesNotFit(f"{source} does not fit: {told}") from error


def begin(network: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Load a state for a network that learns on from it: a last layer for other outputs begins anew, and that is said.

    Raises
    ------
    DoesNotFit
        With the first tensor that does not.
    """
    own = network.state_dict(keep_vars=True)
    state = _called_alike(own, state)
    head = getattr(network, "head", None)
    last = {id(tensor) for tensor in head.state_dict(keep_vars=True).values()} if isinstance(head, nn.Module) else set()
    other = [name for name in own if name in state and own[name].shape != state[name].shape]
    wider = all(id(own[name]) in last and own[name].shape[1:] == state[name].shape[1:] for name in other)
    if other and wider and state.keys() == own.keys():
        outputs = f"{len(state[other[0]])} outputs, but here are {len(own[other[0]])}"
        told = f"The last layer of {source} has {outputs}: it begins anew, all others as in the file."
        warnings.warn(told, stacklevel=2)
        state = {**state, **{name: tensor.detach() for name, tensor in own.items() if id(tensor) in last}}
    fill(network, state, source)


def _called_alike(network: Mapping[str, Tensor], file: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors under the names of a network where only what stands before all names is another."""
    for old, new in WRAPPED:
        named = {new + name.removeprefix(old): tensor for name, tensor in file.items() if name.startswith(old)}
        if named.keys() == network.keys() and len(named) == len(file):
            return named
    return file


def _unlike(network: Mapping[str, Tensor], file: Mapping[str, Tensor]) -> str:
    """Say what the tensors of a file are that a network does not have, or has in another shape."""
    missing = [name for name in network if name not in file]
    strange = [name for name in file if name not in network]
    if missing or strange:
        said = [f"it has no tensor '{missing[0]}'{_more(missing)}"] if missing else []
        said += [f"the network has no '{strange[0]}'{_more(strange)}"] if strange else []
        return f"{', and '.join(said)}: name the network that the file was saved from."
    other = [name for name in network if network[name].shape != file[name].shape]
    if not other:
        return ""
    more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
    there, here = (" x ".join(map(str, tensors[other[0]].shape)) for tensors in (file, network))
    return (
        f"its tensor '{other[0]}' is {there}, that of the network {here}{more}: it was saved from a network of "
        "another size, or for other inputs or classes."
    )


def _more(names: Sequence[str]) -> str:
    return f" (nor {len(names) - 1} more)" if len(names) > 1 else ""
