"""What a hostile site might answer instead of its honest reply."""

from __future__ import annotations

import json
import pickle
import struct
from typing import Any

import torch

from polyfed.core.message import Message

Head = dict[str, Any]


def spoil(how: str, head: Head, blob: bytes) -> tuple[Head, bytes]:
    """Return a spoilt reply."""
    message = Message.from_bytes(blob)
    state = message.params.get("main", {})
    first = next(iter(state), "")
    if how == "honest":
        return head, blob
    if how == "shape":
        state[first] = torch.zeros(7, 7)
    elif how == "name":
        state["evil"] = torch.zeros(2)
    elif how == "model":
        message.params["backdoor"] = {"weight": torch.zeros(2)}
    elif how == "missing":
        del state[first]
    elif how == "dtype":
        state[first] = state[first].double()
    elif how == "nan":
        state[first] = state[first].clone().fill_(float("nan"))
    elif how == "inf":
        state[first] = state[first].clone().fill_(float("inf"))
    elif how == "huge":  # finite, but everybody who starts from it computes nonsense
        state[first] = state[first].clone().fill_(3e38)
    elif how == "heavy":  # more weight in the mean than all others together
        message.meta["samples"] = 10**30
    elif how == "negative":
        message.meta["samples"] = -5
    elif how == "no-meta":
        message.meta.clear()
    elif how == "word":
        message.meta["samples"] = "many"
    elif how == "class-beyond":
        message.data["classes"] = torch.full_like(message.data["classes"], 200)
    elif how == "class-twice":
        message.data["classes"] = torch.zeros_like(message.data["classes"])
    elif how == "ragged":
        message.data["prototypes"] = message.data["prototypes"][:1]
    elif how == "width":
        message.data["prototypes"] = torch.zeros(len(message.data["classes"]), 3)
    elif how == "random":
        return head, torch.randint(0, 256, (500,), dtype=torch.uint8).numpy().tobytes()
    elif how == "pickle":
        return head, pickle.dumps({"weights": [1.0, 2.0]})
    elif how == "truncated":
        return head, message.to_bytes()[:-10]
    elif how == "declared":  # the header promises more than there is
        blob = message.to_bytes()
        (length,) = struct.unpack("<Q", blob[:8])
        header = json.loads(blob[8 : 8 + length])
        last = max((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"][1])
        header[last]["data_offsets"][1] += 4000
        text = json.dumps(header).encode()
        return head, struct.pack("<Q", len(text)) + text + blob[8 + length :]
    elif how == "header":  # a header of ten exabytes
        return head, struct.pack("<Q", 1 << 63) + b"{}"
    elif how == "large":
        state[first] = torch.zeros(200_000)
    elif how == "loss":
        return {**head, "loss": float("nan")}, blob
    elif how == "empty":
        return head, b""
    elif how == "head":
        return {"loss": "x" * 100}, blob
    elif how == "crash":
        return {"error": "x" * 5000}, b""
    return head, message.to_bytes()
