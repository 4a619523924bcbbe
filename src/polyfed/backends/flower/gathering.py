"""Who is there: nodes of Flower become sites, and the sites introduce themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flwr.app import Message as Letter

from polyfed.backends.flower.codec import Head, pack, unpack
from polyfed.backends.flower.link import ServerLink
from polyfed.backends.flower.post import QUICK, Exchange, Post, TooFewSites
from polyfed.core.errors import PolyfedError

Met = dict[str, tuple[Head, bytes]]  # site -> its introduction


class Hall:
    """Knows which node is which site: by its key, or (insecure) by the name that it gives."""

    def __init__(self, link: ServerLink, sites: list[str], authenticated: bool) -> None:
        self.link = link
        self.sites = sites
        self.authenticated = authenticated
        self.seats = {sites.index(name): node for node, name in link.names.items()}
        self.claims: dict[int, str] = {}  # node -> the name that it gave

    def refresh(self) -> None:
        """Ask unknown nodes for their names, where keys do not tell."""
        if self.authenticated:
            return
        online = self.link.nodes()
        new = [node for node in online if node not in self.claims]
        if not new:
            return
        ids = self.link.grid.push_messages([Letter(pack({"kind": "name"}), n, "query.name", ttl=20) for n in new])
        waiting = dict(zip(ids, new, strict=True))
        end = time.monotonic() + 10
        while waiting and time.monotonic() < end:
            for letter in self.link.grid.pull_messages(set(waiting)):
                node = waiting.pop(letter.metadata.reply_to_message_id, None)
                if node is None or letter.has_error():
                    continue
                try:
                    name = str(unpack(letter.content, "a new site")[0].get("name"))
                except PolyfedError:
                    name = ""
                self.claims[node] = name
                seated = self.seats.get(self.sites.index(name)) if name in self.sites else None
                if name in self.sites and seated not in online:
                    self.seats[self.sites.index(name)] = node
            time.sleep(0.05)


@dataclass
class Gathering:
    """The sites introduce themselves."""

    post: Post
    run: Head
    sites: list[str]
    say: Callable[[str], None]
    here: set[str] = field(default_factory=set)
    told: int = -1

    def wait(self, known: Met) -> Met:
        """Wait until all sites have introduced themselves, or for some time until enough have.

        Raises
        ------
        TooFewSites
            When the time is over and too few have come.
        """
        new = [number for number, site in enumerate(self.sites) if site not in known]
        questions = dict.fromkeys(new, lambda: ({"kind": "describe", "run": self.run}, b""))
        exchange = Exchange(self.post, "query.describe", questions, lambda client, head, blob: (head, blob))
        met = dict(known)
        start = time.monotonic()
        while True:
            exchange.step()
            met.update({self.sites[client]: answer for client, answer in exchange.answers.given.items()})
            self.here = {site for site in met if self.post.seats.get(self.sites.index(site)) in exchange.online}
            spent = time.monotonic() - start
            self._report(self.post.wait - spent)
            if len(self.here) + len(exchange.answers.failed) == len(self.sites):
                break
            if known and not exchange.open and len(self.here) >= self.post.min_sites:
                break
            # Whoever is connected and still at it may finish, within the deadline of any other exchange.
            if spent > self.post.wait + (self.post.deadline if exchange.hopeful() else 0.0):
                break
            time.sleep(QUICK)
        for why in exchange.answers.failed.values():
            self.say(f"Not taking part: {why}")
        if len(self.here) < self.post.min_sites:
            away = ", ".join(site for site in self.sites if site not in self.here)
            raise TooFewSites(
                f"Only {len(self.here)} of the {self.post.min_sites} sites that are needed came ({away} did not): "
                "start them with 'polyfed join', then 'polyfed serve' again. "
                + " ".join(exchange.answers.failed.values())
            )
        self.say(f"{len(self.here)} of {len(self.sites)} sites take part.")
        return met

    def _report(self, left: float) -> None:
        away = [site for site in self.sites if site not in self.here]
        if len(self.here) != self.told and away:
            self.told = len(self.here)
            patience = f"waiting up to {max(left, 0):.0f} s for {', '.join(away)}"
            self.say(f"{self.told} of {len(self.sites)} sites are here; {patience}.")
