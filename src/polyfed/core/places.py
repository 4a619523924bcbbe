"""Where entries of different clients' messages meet: the common ground on which replies are compared and combined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from polyfed.core.message import Message, State
from polyfed.core.party import ClientInfo, Context
from polyfed.ops.aggregate import Index, IndexMap


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of a message belongs.

    Attributes
    ----------
    key, shape
        Tensors of equal keys are parts of one common tensor of this shape.
    part
        Which entries of it (None: all).
    rows
        Which rows of the message's tensor count (None: all).
    """

    key: str
    shape: tuple[int, ...]
    part: Index | None = None
    rows: Tensor | None = None


def kind_of(name: str) -> str:
    """Return the kind of a tensor by its name on the wire: `params/main`, `data/control`."""
    return "/".join(name.split("/", 2)[:2])


def default_places(
    combines: Mapping[str, str], slots: IndexMap, state: State, info: ClientInfo, message: Message, ctx: Context
) -> dict[str, Place]:
    """Return the places that follow from a method's declaration and its view.

    What the view knows lies where it says; rows of classes lie under their class; anything else meets what has the same
    name and shape, and states of networks only those of the same architecture.
    """
    found: dict[str, Place] = {}
    for name, tensor in message.tensors():
        kind = kind_of(name)
        how, rest = combines.get(kind), name.removeprefix(kind).removeprefix("/")
        if how is None or how == "rows" or not tensor.is_floating_point():
            continue
        if how == "classes" and "classes" in message.data:
            classes = message.data["classes"].long()
            found[name] = Place(name, (ctx.num_classes, *tensor.shape[1:]), (classes,))
        elif rest in slots and slots[rest].key in state:
            slot = slots[rest]
            found[name] = Place(f"{kind}/{slot.key}", tuple(state[slot.key].shape), slot.part)
        else:
            owner = f"{info.architecture}::" if kind == "params/main" else ""
            found[name] = Place(f"{owner}{name}@{tuple(tensor.shape)}", tuple(tensor.shape))
    return found
