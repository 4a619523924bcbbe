"""Messages and clients' states as trees that can travel: see `link.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from polyfed.core.checkpoint import Tree
from polyfed.core.message import Message


def packed(messages: Mapping[int, Message]) -> Tree:
    """Return messages as a tree in which a tensor that several of them share stands once."""
    tensors: list[Tensor] = []
    places: dict[Any, int] = {}

    def place(tensor: Tensor) -> int:
        key = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        if not tensor.numel() or key not in places:
            places[key] = len(tensors)
            tensors.append(tensor)
        return places[key]

    content = {
        str(client): {
            "params": {model: {n: place(t) for n, t in state.items()} for model, state in message.params.items()},
            "data": {name: place(tensor) for name, tensor in message.data.items()},
            "meta": dict(message.meta),
        }
        for client, message in sorted(messages.items())
    }
    return {"tensors": tensors, "messages": content}


def unpacked(tree: Tree) -> dict[int, Message]:
    """Return the messages again; what they shared, they share."""
    tensors = tree["tensors"]
    return {
        client: Message(
            {model: {n: tensors[i] for n, i in state.items()} for model, state in found["params"].items()},
            {name: tensors[i] for name, i in found["data"].items()},
            found["meta"],
        )
        for client, found in by_client(tree["messages"]).items()
    }


def by_word(by_client: Mapping[int, Any]) -> dict[str, Any]:
    """Return a table of clients with words as keys, as a tree has them."""
    return {str(client): value for client, value in sorted(by_client.items())}


def by_client(tree: Mapping[str, Any]) -> dict[int, Any]:
    """Return the table again."""
    return {int(word): tree[word] for word in sorted(tree, key=int)}
