"""What travels inside a Flower message: a small JSON head and one safetensors blob. Never a pickle, never code.

The blob rides in a Flower `Array` because Flower cuts arrays into pieces and moves them side by side; Flower itself
never looks inside it.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.core.errors import MessageError
from polyfed.flower import plain

Head = dict[str, Any]

MAX_HEAD = 1 << 20  # bytes of JSON: settings and descriptions of shapes
LARGE = 1 << 22  # bytes of a blob: below, looking for garbage costs more than it brings
_FORM = "polyfed.message"


class Body:
    """The body of a message, given away once: nobody up the call stack keeps a large one alive meanwhile."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    def take(self) -> bytes:
        """Return the body and forget it."""
        body, self.body = self.body, b""
        return body


Check = Callable[[Mapping[str, Any], str, bytes], None]  # raises where that is not what the server would have added


def pack(head: Head, blob: bytes = b"") -> RecordDict:
    """Return the content of a Flower message."""
    content = RecordDict({"head": ConfigRecord({"json": json.dumps(head)})})
    if blob:
        content["body"] = ArrayRecord({"blob": Array("uint8", (len(blob),), _FORM, blob)})
    return content


def seal(content: RecordDict, sign: Callable[[str, bytes], Mapping[str, str | bytes]]) -> None:
    """Add to a packed message what the server signs it with."""
    text = content.config_records["head"]["json"]
    assert isinstance(text, str)
    blob = content.array_records["body"]["blob"].data if "body" in content else b""
    content["head"] = ConfigRecord({"json": text, **sign(text, blob)})


def unpack(content: RecordDict, sender: str, check: Check | None = None) -> tuple[Head, bytes]:
    """Return head and blob of a Flower message from outside; the blob is taken out of it.

    Words of the head are cleaned of control characters here, where they come in: they are printed in many places.

    Raises
    ------
    MessageError
        With the sender's name, when the content is not of our form or (`check`) not signed as it must be.
    """
    try:
        text = content.config_records["head"]["json"]
        if not isinstance(text, str) or len(text) > MAX_HEAD:
            raise ValueError("its head is not a short text")
        head = _plain(json.loads(text))
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
        if check is not None:
            check(content.config_records["head"], text, blob)
    except MessageError:
        raise
    except Exception as error:  # whatever a stranger's message provokes is a reason to refuse it
        raise MessageError(f"Message from {sender} refused: it cannot be read ({error!s:.300}).") from error
    return head, blob


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
