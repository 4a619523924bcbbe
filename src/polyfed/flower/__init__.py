"""Real federations: the method objects of a simulation over a network, on Flower (`pip install polyfed[flower]`).

`serve.py` and `join.py` are the two sides that people start, `backend.py` is the backend that the round loop drives at
the server, `site.py` does a site's work, and `link.py` is the only file that touches Flower's inside.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from polyfed.core.errors import InputError

OLDEST, TOO_NEW = (1, 41), (1, 42)

# Flower reads these when it is imported: nothing is reported to anybody, and nothing is looked up on the internet.
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
os.environ.update(QUIET)


def plain(text: str) -> str:
    """Return text of other parties without control characters: it is printed on somebody's terminal."""
    return "".join(letter if letter.isprintable() else " " if letter in "\n\t" else "?" for letter in text)


def require_flower() -> None:
    """Refuse to go on without a Flower that this package was tested with.

    Raises
    ------
    InputError
        With the command that installs it.
    """
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise InputError("Real federations need Flower: pip install 'polyfed[flower]'.") from None
    numbers = tuple(int(part) for part in found.split(".")[:2])
    if not OLDEST <= numbers < TOO_NEW:
        raise InputError(
            f"Flower {found} is installed, but this version of polyfed works with "
            f"{'.'.join(map(str, OLDEST))}: pip install 'polyfed[flower]'."
        )
