"""Who is there: nodes of Flower become sites, and the sites introduce themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message as Letter

from polyfed.core.errors import InputError, MessageError, PolyfedError
from polyfed.flower.codec import Head, pack, unpack
from polyfed.flower.link import ServerLink
from polyfed.flower.mailbox import QUICK, Exchange, Mailbox, TooFewSites, dismiss, refusal

END_SECONDS = 5.0  # seconds that a last message has to reach its site
Met = dict[str, tuple[Head, bytes]]  # site -> its introduction


class NodeDirectory:
    """Knows which node is which site: by its key, or (insecure) by the name that it gives."""

    def __init__(
        self, link: ServerLink, sites: list[str], authenticated: bool, say: Callable[[str], None] = print
    ) -> None:
        self.link = link
        self.sites = sites
        self.authenticated = authenticated
        self.say = say
        self.node_ids = {sites.index(name): node for node, name in link.names.items()}
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
                self._seat(node, name, online)
            time.sleep(0.05)

    def _seat(self, node: int, name: str, online: Mapping[int, str]) -> None:
        """Give a node the seat of the name that it gave, if there is one and it is free."""
        if name not in self.sites:
            why = f"'{name[:64]}' is none of the sites ({', '.join(self.sites)})."
        elif self.node_ids.get(self.sites.index(name)) in online:
            why = f"A site '{name}' is connected already: stop that one, or choose another --name."
        else:
            self.node_ids[self.sites.index(name)] = node
            return
        self.say(f"Refused a site: {why}")
        dismiss(self.link.grid, node, why)


@dataclass
class Gathering:
    """The sites introduce themselves."""

    mailbox: Mailbox
    run: Head
    sites: list[str]
    say: Callable[[str], None]
    check: Callable[[Mapping[str, Head]], None] = lambda heads: None  # raises where they do not fit together
    here: set[str] = field(default_factory=set)
    told: int = -1
    refused: dict[int, str | None] = field(default_factory=dict)  # client -> when its node had connected

    def wait(self, known: Met) -> Met:
        """Wait until all sites have introduced themselves, or for some time until enough have.

        Raises
        ------
        TooFewSites
            When the time is over and too few have come.
        """
        new = [number for number, site in enumerate(self.sites) if site not in known]
        questions = dict.fromkeys(new, lambda: ({"kind": "describe", "run": self.run}, b""))
        met = dict(known)

        def accept(client: int, head: Head, blob: bytes) -> tuple[Head, bytes]:
            self._check({site: other for site, (other, _) in met.items()}, self.sites[client], head)
            met[self.sites[client]] = head, blob
            return met[self.sites[client]]

        exchange = Exchange(self.mailbox, "query.describe", questions, accept)
        start = time.monotonic()
        while True:
            exchange.step()
            self._refuse(exchange)
            self.here = {site for site in met if self.mailbox.node_ids.get(self.sites.index(site)) in exchange.online}
            spent = time.monotonic() - start
            self._report(self.mailbox.wait - spent)
            if len(self.here) + len(exchange.answers.failed) == len(self.sites):
                break
            if known and not exchange.open and len(self.here) >= self.mailbox.min_sites:
                break
            # Whoever is connected and still at it may finish, within the deadline of any other exchange.
            if spent > self.mailbox.wait + (self.mailbox.deadline if exchange.hopeful() else 0.0):
                break
            time.sleep(QUICK)
        if len(self.here) < self.mailbox.min_sites:
            away = ", ".join(site for site in self.sites if site not in self.here)
            raise TooFewSites(
                f"Only {len(self.here)} of the {self.mailbox.min_sites} sites that are needed came ({away} did not). "
                + " ".join(exchange.answers.failed.values())
            )
        self.say(f"{len(self.here)} of {len(self.sites)} sites take part.")
        return met

    def _check(self, heads: Mapping[str, Head], site: str, head: Head) -> None:
        """Refuse an introduction that does not fit to those before it."""
        try:
            if head.get("name") != site:
                raise InputError(f"Site {site} calls itself '{str(head.get('name'))[:64]}': it has the wrong keys.")
            self.check({**heads, site: head})
        except InputError as error:
            raise MessageError(str(error)) from error
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise MessageError(f"Site {site} cannot take part: its introduction is not credible ({error}).") from error

    def _refuse(self, exchange: Exchange) -> None:
        """Tell refused sites why, once; ask again whoever has come back since then."""
        for client, why in list(exchange.answers.failed.items()):
            since = exchange.online.get(self.mailbox.node_ids.get(client, 0))
            if client not in self.refused:
                self.refused[client] = since
                self.say(f"Not taking part: {why}")
                self.mailbox.tell("query.end", [client], refusal(why), END_SECONDS)
            elif since not in (None, self.refused[client]):
                del self.refused[client], exchange.answers.failed[client]
                exchange.open.add(client)
                exchange.tries[client] = 0

    def _report(self, left: float) -> None:
        away = [site for site in self.sites if site not in self.here]
        if len(self.here) != self.told and away:
            self.told = len(self.here)
            patience = f"waiting up to {max(left, 0):.0f} s for {', '.join(away)}"
            self.say(f"{self.told} of {len(self.sites)} sites are here; {patience}.")
