"""Clients that join a run which has begun: what the server has for them is new, everything else as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.errors import InputError
from polyfed.core.party import Party


def together(new: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return what was saved, with further entries of tables: those of clients or architectures that are new."""
    both = {key: together(new[key], value) for key, value in saved.items() if _tables(new.get(key), value)}
    return {**new, **saved, **both}


def _tables(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


def check_room(server: Party, saved: Mapping[str, Any], who: Sequence[str]) -> None:
    """Refuse clients whose networks would change what the server has already: its tensors must keep their places.

    Raises
    ------
    InputError
        Naming them.
    """
    shapes = {name: tensor.shape for name, tensor in server.state.items()}
    moved = [name for name, tensor in saved["state"].items() if shapes.get(name) != tensor.shape]
    if moved or set(saved["models"]) != set(server.models):
        raise InputError(
            f"The network of {', '.join(who)} does not fit what the server of this run has: give it an architecture "
            "that other clients of the run have."
        )
