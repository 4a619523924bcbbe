"""What a site keeps on its disk: its states by moment, its model, what it has spent and sent, the server's audit.

A state is filed under the moment after which it was taken, so a message that is repeated, or a server that went back to
its checkpoint, finds the right earlier one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.core.checkpoint import added_to, pack_tree, read_json, read_tree, sweep, write_atomic, write_json
from polyfed.core.errors import InputError, MessageError
from polyfed.core.party import Party
from polyfed.core.privacy import LEDGER, Spent, added, epsilon_of, spent_of
from polyfed.flower.codec import Head

PHASES = ("before", "round", "after")
Tag = tuple[int, int, int]  # phase, round, position in the phase: when a state was taken
SERVER = "the server"
AGREED = ("method", "options", "privacy")  # of what a server asks: what the people were told when the site joined


class SiteFolder:
    """The folder of one site, with one below it for each federation that it takes part in."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.secure = True  # noise comes from the operating system; a simulation takes it from the seed
        self.audit = False  # whether to ask for the server's audit
        self.max_epsilon: float | None = None  # the largest epsilon that the people here accept

    def home(self, head: Head) -> Path:
        """Return the folder of this federation's states."""
        federation = head["run"]["federation"]
        if not isinstance(federation, str) or not re.fullmatch(r"[0-9a-f]{8,64}", federation):
            raise MessageError(f"Message from {SERVER} refused: it names no federation.")
        return self.folder / federation

    def path(self, head: Head, tag: Tag) -> Path:
        """Return the file of a state."""
        return self.home(head) / ("state-" + "-".join(map(str, tag)) + ".safetensors")

    def tags(self, head: Head) -> list[Tag]:
        """Return the moments whose states are on disk."""
        return sorted(_tag(path) for path in self.home(head).glob("state-*.safetensors"))

    def keep(self, head: Head, tag: Tag, party: Party) -> None:
        """Write the state, then forget what no repetition can ask for: all but this phase and the last state before."""
        models = {name: dict(module.state_dict()) for name, module in party.models.items()}
        self.home(head).mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep(self.home(head))  # a site has one process: what is half-written is of one that was killed
        write_atomic(self.path(head, tag), pack_tree({"models": models, "memory": party.memory}), private=True)
        known = self.tags(head)
        earlier = [other for other in known if other[:2] < tag[:2]]
        kept = {max(earlier, default=tag), *(other for other in known if other[:2] == tag[:2] and other <= tag)}
        for other in known:
            if other not in kept:
                self.path(head, other).unlink()

    def hold(self, head: Head) -> bool:
        """Hold the server to what the people here were told of this federation; return whether that is new.

        Raises
        ------
        MessageError
            Where it now asks for another method, or for less privacy: each of its messages says what is to be done.
        """
        path = self.home(head) / "agreed.json"
        asked = json.loads(json.dumps({key: head["run"].get(key) for key in AGREED}))  # lists, as they are read back
        if not path.is_file():
            self.home(head).mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(path, asked, private=True)
            return True
        agreed = read_json(path, sealed=True)
        other = next((key for key in AGREED if agreed.get(key) != asked[key]), None)
        if other is not None:
            raise MessageError(
                f"Message from {SERVER} refused: site {self.name} joined for {other} {agreed.get(other)}, but this "
                f"asks for {str(asked[other])[:300]}: a federation of another kind is a new one, which is joined anew."
            )
        return False

    def stay(self, head: Head, samples: int, network: Mapping[str, list[int]]) -> None:
        """Refuse to go on in a federation with another network, or other data, than this site joined it with.

        Raises
        ------
        InputError
            With what is different, and what to do.
        """
        path = self.home(head) / "joined.json"
        if not path.is_file():
            write_json(path, {"samples": samples, "network": dict(network)}, private=True)
            return
        joined = read_json(path, sealed=True)
        before = joined["network"]
        changed = next((n for n in {**before, **network} if before.get(n) != network.get(n)), None)
        if changed is not None:
            raise InputError(
                f"Site {self.name} joined this federation with another network: '{changed}' was "
                f"{_shape(before.get(changed))} and is {_shape(network.get(changed))}. Join with the --model of before."
            )
        if joined["samples"] != samples:
            raise InputError(
                f"Site {self.name} joined this federation with {joined['samples']} training samples and now has "
                f"{samples}: join with the same data as before; new samples can take part in the next federation."
            )

    def ledger(self, head: Head) -> Path:
        """Return the file with what this site has spent of its privacy budget.

        It is not part of a state: a server that went back to its checkpoint asks for a training again, and what that
        costs is spent again.
        """
        return self.home(head) / "privacy.json"

    def spent_elsewhere(self, head: Head, delta: float) -> float:
        """Return the epsilon that this site has spent in other federations, of which its folder knows."""
        others = [path for path in sorted(self.folder.glob("*/privacy.json")) if path != self.ledger(head)]
        spent: Spent = []
        for path in others:
            for item in spent_of({LEDGER: read_json(path, sealed=True)}):
                spent = added(spent, *item)
        return epsilon_of(spent, delta)

    def keep_ledger(self, head: Head, party: Party) -> None:
        """Write down what is spent."""
        if LEDGER in party.memory and self.secure:
            write_json(self.ledger(head), party.memory[LEDGER], private=True)

    @property
    def outcome(self) -> Path:
        """The file with this site's model, as it was measured last."""
        return self.folder / f"{self.name}.safetensors"

    def count(self, head: Head, payload: int) -> None:
        """Add to the bytes that this site sent out in this federation."""
        self.home(head).mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(self.home(head) / "sent.json", {"bytes": self.sent(head) + payload}, private=True)

    def sent(self, head: Head) -> int:
        """Return the bytes that this site sent out in this federation: all heads and bodies of its messages."""
        path = self.home(head) / "sent.json"
        return int(read_json(path, sealed=True)["bytes"]) if path.is_file() else 0

    def read_along(self, head: Head) -> None:
        """Keep what the server tells of its audit."""
        entries = head.get("audit")
        if not self.audit or not isinstance(entries, list):
            return
        self.home(head).mkdir(mode=0o700, parents=True, exist_ok=True)
        with added_to(self.home(head) / "audit.jsonl", 0o600) as file:
            file.write("".join(json.dumps(entry, sort_keys=True) + "\n" for entry in entries))


def _shape(sizes: list[int] | None) -> str:
    return "not there" if sizes is None else f"of shape {sizes}"


def tag_of(head: Head) -> Tag:
    """Return the moment of an exchange."""
    return PHASES.index(head["phase"]), int(head["round"]), int(head["position"])


def last_state(folder: Path, run: Mapping[str, Any]) -> Any:
    """Return the newest state that a site has kept in its folder, or None."""
    paths = sorted((folder / run["federation"]).glob("state-*.safetensors"), key=_tag)
    return read_tree(paths[-1]) if paths else None


def _tag(path: Path) -> Tag:
    phase, number, position = path.stem.removeprefix("state-").split("-")
    return int(phase), int(number), int(position)
