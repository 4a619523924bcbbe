"""The process of Flower's SuperLink, with a gate in front: `python -m polyfed.flower.superlink ...`.

SuperLink serves three interfaces on one port: Fleet for the sites (each call signed with a registered key), Runtime for
the server's own process, and Control, which may register keys and start runs. Without an account service Control
accepts everybody, so here it asks for a secret that only `polyfed serve` knows, and Runtime answers this machine only.
"""

from __future__ import annotations

import argparse
import hmac
import os
import sys
from pathlib import Path
from typing import Any

from polyfed.flower.watch import die_with_parent

PIECE = 5 << 20  # bytes: Flower cuts arrays into pieces of this size
OVERHEAD = 64 << 10  # bytes: of a request beside its piece
SECRET_HEADER = b"x-polyfed-secret"
MARK = "x-polyfed"  # a header by which a site knows that it has found a server of ours


def main() -> None:
    """Read our own options, put the gate in front, and hand the rest to Flower."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--secret-file", type=Path, required=True)
    parser.add_argument("--max-bytes", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    own, rest = parser.parse_known_args()
    die_with_parent(own.parent)
    secret = own.secret_file.read_bytes()

    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    earlier = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(Gate, secret=secret, max_bytes=own.max_bytes), *earlier())
    sys.argv = ["flower-superlink", *rest]
    flower_superlink()


class Gate:
    """Lets through what each caller may ask, and nothing that is too large."""

    def __init__(self, app: Any, secret: bytes, max_bytes: int) -> None:
        self.app = app
        self.secret = secret
        # A reply comes as one call that names its pieces and one call for each piece.
        self.limits = {
            "/v1/fleet/push-messages": 4096 + 160 * (max_bytes // PIECE + 8),
            "/v1/fleet/": PIECE + OVERHEAD,
            "/v1/runtime/": PIECE + OVERHEAD,
            "/v1/control/": 1 << 20,
        }

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
        received = 0
        too_large = False

        async def counted() -> Any:
            nonlocal received, too_large
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                too_large = True
                return {"type": "http.disconnect"}
            return message

        async def answered(message: Any) -> None:
            if too_large:  # what the application says about the cut request does not matter
                if message["type"] == "http.response.start":
                    await refuse(send, 413)
                return
            await send(message)

        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > limit:
            await refuse(send, 413)
            return
        await self.app(scope, counted, answered)

    def allowed(self, path: str, scope: Any) -> bool:
        """Tell whether this caller may use this interface; Fleet calls are checked by Flower itself."""
        if path.startswith("/v1/fleet/"):
            return True
        caller, own = (scope.get("client") or ("", 0))[0], (scope.get("server") or ("", 0))[0]
        if not (caller in ("127.0.0.1", "::1") or caller == own):
            return False
        given = dict(scope["headers"]).get(SECRET_HEADER, b"")
        return path.startswith("/v1/runtime/") or hmac.compare_digest(given, self.secret)


async def refuse(send: Any, status: int) -> None:
    """Answer without a word of explanation: whoever asks knows what they asked."""
    headers = [(b"content-length", b"0"), (MARK.encode(), b"1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    os.umask(0o077)
    main()
