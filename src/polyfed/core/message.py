"""The only thing that crosses between server and clients, in every backend.

A message holds named model states (possibly partial or sliced), named tensors, and a few numbers or words. It
travels as one safetensors blob, never as a pickle. Its size is counted, not estimated: `nbytes()` is the payload
(what the cost formulas of the papers count) and `wire_bytes()` is the exact length of the serialized blob.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from safetensors.torch import load
from torch import Tensor

from polyfed.core.blob import DTYPES, all_finite, blob_bytes, blob_of
from polyfed.core.errors import MessageError

State = dict[str, Tensor]
MetaValue = int | float | str

NUMBER_BYTES = 8  # one number of `meta`
MAX_META_VALUES = 256
MAX_WORD = 10_000  # letters of a word of `meta`
MAX_TENSORS = 20_000  # of one message; the largest networks have a few thousand
MAX_HEADER = 1 << 24  # bytes that describe them
MAX_AXES = 16
MAX_NUMBER = 1 << 63
_WIDTHS = {name: dtype.itemsize for dtype, name in DTYPES.items()}
_PARAMS, _DATA = "params", "data"


@dataclass
class Message:
    """What one party tells another in one exchange.

    Attributes
    ----------
    params
        Model name -> state: parameters (and shared buffers) of a model, whole, partial or sliced.
    data
        Logits, prototypes, features, statistics: any other tensors.
    meta
        A few numbers and words: sample counts, seeds, levels.
    """

    params: dict[str, State] = field(default_factory=dict)
    data: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, MetaValue] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with its name on the wire."""
        for model, state in self.params.items():
            for name, tensor in state.items():
                yield f"{_PARAMS}/{model}/{name}", tensor
        for name, tensor in self.data.items():
            yield f"{_DATA}/{name}", tensor

    def group(self, name: str) -> State:
        """Return the tensors of `data` that are named `name/...`, by the rest of their names (control variates, ...).

        Such a group is one row of the report's table; `message.data |= grouped("control", state)` adds one.
        """
        return {key.partition("/")[2]: tensor for key, tensor in self.data.items() if key.partition("/")[0] == name}

    def renamed(self, model: str, other: str) -> Message:
        """Return this message with the state of a model, if there is one, under another name."""
        params = {other if name == model else name: state for name, state in self.params.items()}
        return Message(params, self.data, self.meta)

    def nbytes(self) -> int:
        """Return the payload: bytes of all tensors, eight for each number, the length of each word."""
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors())
        return size + sum(len(v.encode()) if isinstance(v, str) else NUMBER_BYTES for v in self.meta.values())

    def kinds(self) -> dict[str, int]:
        """Return payload bytes by kind (`params/main`, `data/prototypes`, `meta`): what the report shows."""
        sizes: dict[str, int] = {}
        for name, tensor in self.tensors():
            kind = "/".join(name.split("/")[:2])
            sizes[kind] = sizes.get(kind, 0) + tensor.numel() * tensor.element_size()
        rest = self.nbytes() - sum(sizes.values())
        return {**sizes, "meta": rest} if rest else sizes

    def wire_bytes(self) -> int:
        """Return the exact length of `to_bytes()` without copying a tensor."""
        return blob_bytes(self.tensors(), self._metadata())

    def to_bytes(self) -> bytes:
        """Serialise to one safetensors blob."""
        return blob_of(self.tensors(), self._metadata())

    @staticmethod
    def from_bytes(blob: bytes, max_bytes: int | None = None, sender: str = "unknown sender") -> Message:
        """Read a message that came from outside.

        Only the container is checked here (size, format, finite numbers); whether names and shapes are what the
        method expects is checked by whoever reads it (`polyfed.flower.expect`).

        Raises
        ------
        MessageError
            With the sender's name, when the blob is too large or damaged.
        """
        if max_bytes is not None and len(blob) > max_bytes:
            raise MessageError(f"Message from {sender} refused: {len(blob)} bytes, the limit is {max_bytes}.")
        try:
            meta = _read_header(blob)
            tensors = load(blob)
        except Exception as error:  # whatever a stranger's bytes provoke is a reason to refuse them
            raise MessageError(f"Message from {sender} refused: it cannot be read ({error!s:.300}).") from error
        message = Message(meta=_checked_meta(meta, sender))
        for name, tensor in tensors.items():
            if not all_finite(tensor):
                raise MessageError(f"Message from {sender} refused: '{name[:100]}' holds NaN or infinite values.")
            kind, _, rest = name.partition("/")
            if kind == _DATA and rest:
                message.data[rest] = tensor
            elif kind == _PARAMS and "/" in rest:
                model, _, parameter = rest.partition("/")
                message.params.setdefault(model, {})[parameter] = tensor
            else:
                raise MessageError(f"Message from {sender} refused: unexpected tensor name '{name[:100]}'.")
        return message

    def detached(self) -> Message:
        """Return a copy that shares no memory with any model: what leaves a party must not change afterwards."""
        return Message(
            {m: {n: t.detach().clone() for n, t in state.items()} for m, state in self.params.items()},
            {n: t.detach().clone() for n, t in self.data.items()},
            dict(self.meta),
        )

    def _metadata(self) -> dict[str, str]:
        return {"meta": json.dumps(self.meta, sort_keys=True)}


def grouped(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state as one group of a message's `data` (see `Message.group`)."""
    return {f"{name}/{key}": tensor for key, tensor in state.items()}


def _read_header(blob: bytes) -> Any:
    """Check what a blob says about its tensors, before anything is made of them; return the meta part as it came."""
    (length,) = struct.unpack("<Q", blob[:8])
    if length > min(MAX_HEADER, len(blob) - 8):
        raise ValueError(f"it declares a header of {length} bytes")
    header = json.loads(blob[8 : 8 + length])
    words = header.pop("__metadata__", {})
    if len(header) > MAX_TENSORS:
        raise ValueError(f"it has {len(header)} tensors, the limit is {MAX_TENSORS}")
    for name, about in header.items():
        shape, (start, end) = about["shape"], about["data_offsets"]
        sizes = [size for size in shape if type(size) is int and 0 <= size < MAX_NUMBER]
        if about["dtype"] not in _WIDTHS or len(sizes) != len(shape) or len(shape) > MAX_AXES:
            raise ValueError(f"'{name[:100]}' has no type or shape that we know")
        # Without the empty axes, too: libraries multiply the others, and the product must fit into a number.
        if (
            math.prod(size for size in sizes if size) >= MAX_NUMBER
            or end - start != math.prod(sizes) * _WIDTHS[about["dtype"]]
        ):
            raise ValueError(f"'{name[:100]}' has another size than it declares")
    return json.loads(words.get("meta", "{}"))


def _checked_meta(meta: object, sender: str) -> dict[str, MetaValue]:
    if not isinstance(meta, Mapping) or len(meta) > MAX_META_VALUES:
        raise MessageError(f"Message from {sender} refused: its meta part is not a small table.")
    for key, value in meta.items():
        name = str(key)[:60]
        if not isinstance(key, str) or isinstance(value, bool) or not isinstance(value, int | float | str):
            raise MessageError(f"Message from {sender} refused: meta value '{name}' is neither a number nor a word.")
        if isinstance(value, float) and not -1e300 < value < 1e300:
            raise MessageError(f"Message from {sender} refused: meta value '{name}' is not finite.")
        if isinstance(value, int) and not -MAX_NUMBER <= value < MAX_NUMBER:
            raise MessageError(f"Message from {sender} refused: meta value '{name}' is beyond every count.")
        if isinstance(value, str) and len(value) > MAX_WORD:
            raise MessageError(f"Message from {sender} refused: meta value '{name}' has {len(value)} letters.")
    return dict(meta)
