"""What the server writes down for others: who joined, what arrived, what was refused. A site can ask for it."""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

from polyfed.core.checkpoint import added_to, checked, with_checksum
from polyfed.core.errors import PolyfedError

FILE = "audit.jsonl"
WORDS = 500  # letters of one reason
TOLD_AT_ONCE = 400  # lines that travel with one message

Entry = dict[str, Any]


class Audit:
    """A file with one line for each event; without a folder nothing is kept."""

    def __init__(self, folder: Path | None = None) -> None:
        self.path = folder / FILE if folder is not None else None
        self.told: dict[int, int] = {}  # client that asks -> bytes of the file that it has been sent

    def write(self, event: str, site: str | None = None, **more: Any) -> None:
        """Write down an event.

        Raises
        ------
        PolyfedError
            When the disk does not take it: what is not on record must not happen.
        """
        entry: Entry = {"time": round(time.time(), 3), "event": event}
        entry |= {"site": site} if site is not None else {}
        entry |= {key: value[:WORDS] if isinstance(value, str) else value for key, value in more.items()}
        if self.path is None:
            return
        try:
            with added_to(self.path) as file:
                file.write(json.dumps(with_checksum(entry), sort_keys=True) + "\n")
        except OSError as error:
            raise PolyfedError(f"Cannot write {self.path} ({error.strerror}).") from error

    def ask(self, client: int) -> None:
        """Note that a client wants to read along."""
        self.told.setdefault(client, 0)

    def news(self, client: int) -> list[Entry]:
        """Return the entries that a client asked for and has not been sent."""
        if client not in self.told or self.path is None or not self.path.is_file():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.told[client])
            lines = [line for line in islice(file, TOLD_AT_ONCE) if line.endswith(b"\n")]
        self.told[client] += sum(map(len, lines))
        return [_entry(line) for line in lines]


def _entry(line: bytes) -> Entry:
    """Return an entry; one that a full disk or a flipped bit spoiled is told as such, and ends nobody's work."""
    try:
        found = checked(json.loads(line))
    except (ValueError, RecursionError):
        found = None
    return found if found is not None else {"event": "damaged", "line": line[:WORDS].decode(errors="replace")}
