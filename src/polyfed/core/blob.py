"""Safetensors blobs written with one copy of the tensors and no more: a network may be large, and a machine small.

`safetensors` itself makes two, and refuses tensors that share memory. Reading is left to it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

DTYPES = {  # the widest first, as safetensors lays tensors out
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = {dtype: place for place, dtype in enumerate(DTYPES)}

Named = Iterable[tuple[str, Tensor]]


def blob_of(tensors: Named, metadata: Mapping[str, str]) -> bytes:
    """Return tensors and words as one safetensors blob."""
    ordered = _ordered(tensors)
    return b"".join([_header(ordered, metadata), *(memory_of(tensor) for _, tensor in ordered)])


def blob_bytes(tensors: Named, metadata: Mapping[str, str]) -> int:
    """Return the exact length of `blob_of` without copying a tensor."""
    ordered = _ordered(tensors)
    return len(_header(ordered, metadata)) + sum(tensor.numel() * tensor.element_size() for _, tensor in ordered)


@torch.no_grad()
def all_finite(*tensors: Tensor) -> bool:
    """Tell whether tensors hold neither NaN nor infinity, without a temporary tensor of their size."""
    # Of a tensor that is elsewhere (meta), whoever has the numbers has looked.
    floats = [tensor for tensor in tensors if tensor.is_floating_point() and not tensor.is_meta]
    if math.isfinite(sum([tensor.sum().item() for tensor in floats])):  # what is not finite never adds up to what is
        return True
    # The sum of large numbers may overflow; NaN anywhere makes both ends NaN.
    return all(math.isfinite(end.item()) for tensor in floats if tensor.numel() for end in tensor.aminmax())


def _ordered(tensors: Named) -> list[tuple[str, Tensor]]:
    return sorted(tensors, key=lambda item: (_ORDER[item[1].dtype], item[0]))


def _header(ordered: list[tuple[str, Tensor]], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in ordered:
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def memory_of(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes, where they are if it lies in one piece in the processor's memory."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
