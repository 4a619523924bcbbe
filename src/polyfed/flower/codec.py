"""What travels inside a Flower message: a small JSON head and one safetensors blob. Never a pickle, never code.

The blob rides in a Flower `Array` because Flower cuts arrays into pieces and moves them side by side; Flower itself
never looks inside it.
"""

from __future__ import annotations

import gc
import json
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.core.errors import MessageError

Head = dict[str, Any]

MAX_HEAD = 1 << 20  # bytes of JSON: settings and descriptions of shapes
LARGE = 1 << 22  # bytes of a blob: below, looking for garbage costs more than it brings
_FORM = "polyfed.message"


class Parcel:
    """The body of a message, given away once: nobody up the call stack keeps a large one alive meanwhile."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    def take(self) -> bytes:
        """Return the body and forget it."""
        body, self.body = self.body, b""
        return body


def pack(head: Head, blob: bytes = b"") -> RecordDict:
    """Return the content of a Flower message."""
    content = RecordDict({"head": ConfigRecord({"json": json.dumps(head)})})
    if blob:
        content["body"] = ArrayRecord({"blob": Array("uint8", (len(blob),), _FORM, blob)})
    return content


def unpack(content: RecordDict, sender: str) -> tuple[Head, bytes]:
    """Return head and blob of a Flower message from outside; the blob is taken out of it.

    Raises
    ------
    MessageError
        With the sender's name, when the content is not of our form.
    """
    try:
        text = content.config_records["head"]["json"]
        if not isinstance(text, str) or len(text) > MAX_HEAD:
            raise ValueError("its head is not a short text")
        head = json.loads(text)
        if not isinstance(head, dict):
            raise ValueError("its head is not a table")
        blob = b""
        if "body" in content:
            array = content.array_records["body"]["blob"]
            blob = array.data
            if array.stype != _FORM or tuple(array.shape) != (len(blob),):
                raise ValueError("it declares another size or form than it has")
            del array, content["body"]
            if len(blob) > LARGE:
                gc.collect()  # what Flower made the blob from hangs in reference cycles, three times its size
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise MessageError(f"Message from {sender} refused: it cannot be read ({error}).") from error
    return head, blob
