"""The gate in front of SuperLink: what each caller may ask, how large, how often, how slowly.

Flower checks the signature of a site's call. It does not look at what the call holds, so the gate does: a site may send
replies of its own to the server, one message in a call, and nothing to anybody else; it may store no more than one
message has; and it is cut off when it calls too often or sends too slowly. A quota counts calls that Flower accepted:
nobody can use up a site's quota without that site's key.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

PIECE = 5 << 20  # bytes: Flower cuts arrays into pieces of this size
OVERHEAD = 64 << 10  # bytes: of a request beside its piece
SECONDS = 60.0  # until a request must be here as a whole
CALLS, WINDOW = 2000, 10.0  # so many calls of a site in so many seconds; a message of 1 GB takes 200
CLOCKS = 300  # seconds by which the clocks of a site and the server may differ
SERVER = 1  # Flower's number of the server's node
SECRET_HEADER = b"x-polyfed-secret"
MARK = "x-polyfed"  # a header by which a site knows that it has found a server of ours
PUSH, PIECES = "/v1/fleet/push-messages", "/v1/fleet/push-object"


@dataclass
class Caller:
    """What a site has done."""

    calls: deque[float] = field(default_factory=deque)  # when, of those in the window
    stored: int = 0  # bytes since its last message was announced

    def often(self, now: float) -> bool:
        """Tell whether it calls too often."""
        while self.calls and now - self.calls[0] > WINDOW:
            self.calls.popleft()
        return len(self.calls) >= CALLS


class Gate:
    """Lets through what each caller may ask, and nothing that is too large, too slow or too much."""

    def __init__(self, app: Any, secret: bytes, max_bytes: int) -> None:
        self.app = app
        self.secret = secret
        self.quota = max_bytes + (1 << 20) + OVERHEAD  # a blob, the head of the message, and what Flower adds
        # A reply comes as one call that names its pieces and one call for each piece.
        self.limits = {
            PUSH: 4096 + 160 * (max_bytes // PIECE + 8),
            "/v1/fleet/": PIECE + OVERHEAD,
            "/v1/runtime/": PIECE + OVERHEAD,
            "/v1/control/": 1 << 20,
        }
        self.callers: dict[int, Caller] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Check one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        path = scope.get("path", "")
        limit = next((most for start, most in self.limits.items() if path.startswith(start)), None)
        if scope["type"] != "http" or limit is None or not self.allowed(path, scope):
            await refuse(send, 403)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > limit:
            await refuse(send, 413)
            return
        try:
            body = await asyncio.wait_for(_body(receive, limit), SECONDS)
        except TimeoutError:
            await refuse(send, 408)
            return
        if body is None:
            await refuse(send, 413)
            return
        if not path.startswith("/v1/fleet/"):
            await self.app(scope, _given(body, receive), send)
            return
        await self.fleet(path, body, scope, receive, send)

    async def fleet(self, path: str, body: bytes, scope: Any, receive: Any, send: Any) -> None:
        """Check what a site's call holds, and count it if Flower accepts it."""
        node, fits = look(path, body)
        caller = self.callers.get(node, Caller())
        now = time.monotonic()
        if not fits:
            await refuse(send, 403)
            return
        if caller.often(now):
            await refuse(send, 429)
            return
        if path == PIECES and caller.stored + len(body) > self.quota:
            await refuse(send, 413)
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] < 300:
                self.callers.setdefault(node, caller).calls.append(now)
                if path == PUSH:
                    caller.stored = 0
                elif path == PIECES:
                    caller.stored += len(body)
            await send(message)

        await self.app(scope, _given(body, receive), counted)

    def allowed(self, path: str, scope: Any) -> bool:
        """Tell whether this caller may use this interface; Fleet calls are checked by Flower itself."""
        if path.startswith("/v1/fleet/"):
            return True
        caller, own = (scope.get("client") or ("", 0))[0], (scope.get("server") or ("", 0))[0]
        if not (caller in ("127.0.0.1", "::1") or caller == own):
            return False
        given = dict(scope["headers"]).get(SECRET_HEADER, b"")
        return path.startswith("/v1/runtime/") or hmac.compare_digest(given, self.secret)


def look(path: str, body: bytes) -> tuple[int, bool]:
    """Return whose call it says it is, and whether a site may make such a call."""
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

    kind: Any = PROTOBUF_REQUEST_TYPES.get(("POST", path))
    if kind is None:
        return 0, True  # Flower has no such call, and says so
    try:
        request = kind.FromString(body)
    except Exception:  # no such message: Flower refuses it in its own words
        return 0, path != PUSH
    node = request.node.node_id if "node" in kind.DESCRIPTOR.fields_by_name else 0
    if path != PUSH:
        return node, True
    told = [message.metadata for message in request.messages_list]
    replies = [about for about in told if about.reply_to_message_id and about.dst_node_id == SERVER]
    own = all(about.src_node_id == node for about in told)
    return node, own and len(told) == len(replies) == len(request.message_object_trees) == 1


async def _body(receive: Any, limit: int) -> bytes | None:
    """Return the whole body of a request, or None if it is too large or breaks off."""
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > limit:
            return None
    return b"".join(parts)


def _given(body: bytes, receive: Any) -> Any:
    """Return what hands a body on that was read already."""
    messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return messages.pop() if messages else await receive()

    return again


async def refuse(send: Any, status: int) -> None:
    """Answer without a word of explanation: whoever asks knows what they asked."""
    headers = [(b"content-length", b"0"), (MARK.encode(), b"1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
