"""What each site would have reached by itself: the gain of a real federation.

After the last round every site trains once more, from the same initial weights and with the same settings, for as many
rounds as the federation had, on nothing but its own data: the method `local`. Only figures leave the site.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from polyfed.core.backend import Measure
from polyfed.core.errors import MessageError
from polyfed.core.party import ClientInfo, Context
from polyfed.core.summary import summarize
from polyfed.flower.backend import read_measure
from polyfed.flower.codec import Body, Head
from polyfed.flower.mailbox import Mailbox
from polyfed.flower.whatleaves import privacy_of
from polyfed.methods.local import Local

if TYPE_CHECKING:
    from polyfed.flower.site import Site

PATIENCE = 20.0  # seconds that a site trains before it answers, so that nobody's deadline passes; it is asked again


# --- at a site ---


def train_alone(site: Site, head: Head) -> Head:
    """Train for a while, and tell how many rounds are done; after the last one, tell what was reached.

    The states are kept as those of a federation of their own, so that a site that is killed goes on where it was.
    """
    if privacy_of(head["run"]).on:
        raise MessageError("Message from the server refused: to train alone would spend privacy that nobody counts.")
    rounds, start = int(head["rounds"]), time.monotonic()
    own = hashlib.sha256(f"alone in {site.home(head).name}".encode()).hexdigest()[:16]
    run = {**head["run"], "federation": own, "method": Local.name, "options": {}, "rounds": rounds}
    about = {**head, "run": run, "phase": "round", "position": 0, "participants": []}
    (step,) = Local().plan().round
    words = {"name": step.name, "who": step.who, "down": step.down, "up": step.up}
    done = max((number for _, number, _ in site.tags(about)), default=0)
    while done < rounds and time.monotonic() - start < PATIENCE:
        done += 1
        site.work({**about, "round": done, "step": words}, Body(b""))
    if done < rounds:
        return {"done": done}
    measures = site.figures({**about, "round": rounds}, Body(b""))[0]
    return {"done": done, "measures": measures}


# --- at the server ---


def ask_alone(
    mailbox: Mailbox,
    run: Head,
    infos: Mapping[int, ClientInfo],
    ctx: Context,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Let every site train by itself and return what they reached, on the test data and on their own."""
    waiting, done = set(infos), dict.fromkeys(infos, 0)
    found: dict[str, dict[int, Measure]] = {"test": {}, "personal": {}}

    def accept(client: int, head: Head, blob: bytes) -> None:
        number = head.get("done")
        if "measures" in head:
            for part, measures in found.items():
                measure = read_measure(head, part, ctx)
                if measure is not None:
                    measures[client] = measure
            waiting.discard(client)
        elif not isinstance(number, int) or not done[client] < number < rounds:
            raise MessageError(f"Message from {infos[client]} refused: it does not get on with its training.")
        else:
            done[client] = number

    while waiting:
        questions = {
            client: lambda client=client: (
                {
                    "kind": "alone",
                    "run": run,
                    "id": client,
                    "architecture": infos[client].architecture,
                    "clients": len(infos),
                    "rounds": rounds,
                },
                b"",
            )
            for client in sorted(waiting)
        }
        answers = mailbox.ask("query.alone", questions, accept, quorum=False, when="alone")
        for client in sorted(waiting - answers.given.keys()):
            why = answers.failed.get(client, f"{infos[client]} does not answer any more.")
            say(f"What it would have reached alone is not known: {why}")
            waiting.discard(client)
    parts = {part: {**summarize(measures), "clients": sorted(measures)} for part, measures in found.items() if measures}
    return {**parts.get("test", {}), **({"personal": parts["personal"]} if "personal" in parts else {})}
