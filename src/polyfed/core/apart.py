"""Messages stay what they were: parties of one process have them in common, those of two machines each have a copy.

Copying every message would cost more than some methods take to train. So they are shared, and a hook that writes into
one (`total += reply.data["x"]`, `inbox.mul_(0.9)`) is refused: it would change what belongs to somebody else, and the
same method would give other results between machines. torch counts the writes into every tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from polyfed.core.errors import MethodError
from polyfed.core.message import Message

Tensors = dict[int, list[Tensor]]  # of each client's message, in the message's own order


def tensors_of(messages: Mapping[int, Message]) -> Tensors:
    """Return the tensors of all messages, which a hook could take out of them."""
    return {
        client: [*(t for state in message.params.values() for t in state.values()), *message.data.values()]
        for client, message in messages.items()
    }


def writes(tensors: Tensors) -> list[list[int]]:
    """Return how often each tensor was written into (torch does not count that where gradients are forbidden)."""
    return [[0 if tensor.is_inference() else tensor._version for tensor in own] for own in tensors.values()]


def check_unwritten(
    tensors: Tensors, before: list[list[int]], messages: Mapping[int, Message], who: str, what: str
) -> None:
    """Refuse a method whose hook `who` has written into one of the messages since `before`.

    Raises
    ------
    MethodError
        With the tensor, and how to write it.
    """
    now = writes(tensors)
    if now == before:
        return
    for client, old, new in zip(tensors, before, now, strict=True):
        place = next((place for place, (a, b) in enumerate(zip(old, new, strict=True)) if a != b), None)
        if place is not None:
            written = tensors[client][place]
            named = (name for name, tensor in messages[client].tensors() if tensor is written)
            raise MethodError(
                f"{who} wrote into '{next(named, 'a tensor')}' of {what.format(client)}: it belongs to the sender, and "
                "between machines this would be a copy. Write into a copy (`tensor.clone()`, or `a = a + b` for "
                "`a += b`)."
            )
