"""Who is there: nodes of Flower become sites, and the sites introduce themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message as FlowerMessage

from polyfed.core.errors import InputError, MessageError, PolyfedError
from polyfed.flower.audit import Audit
from polyfed.flower.codec import Head, pack, unpack
from polyfed.flower.keys import read_server_keys
from polyfed.flower.link import ServerLink
from polyfed.flower.mailbox import QUICK, SLOW, Exchange, Mailbox, TooFewSites, refusal, send_refusal
from polyfed.flower.watch import pause_after

END_SECONDS = 5.0  # seconds that a last message has to reach its site
Introductions = dict[str, tuple[Head, bytes]]  # site -> its introduction


class NodeDirectory:
    """Knows which node is which site: by its key, or (insecure) by the name that it gives."""

    def __init__(
        self,
        link: ServerLink,
        sites: list[str],
        authenticated: bool,
        say: Callable[[str], None] = print,
        audit: Audit | None = None,
    ) -> None:
        self.link = link
        self.sites = sites
        self.authenticated = authenticated
        self.say = say
        self.node_ids = {sites.index(name): node for node, name in link.names.items()}
        self.claims: dict[int, str] = {}  # node -> the name that it gave
        self.audit = audit or Audit()
        self.read_at = self._changed_at()

    def _changed_at(self) -> int:
        """Return when the list of the sites' keys was last changed."""
        keys = self.link.keys
        try:
            return (keys.certificate.parent / "federation.json").stat().st_mtime_ns if keys else 0
        except OSError:
            return 0  # it is being replaced

    def _refresh_keys(self) -> None:
        """Take over what 'polyfed keys' changed meanwhile."""
        changed_at, keys = self._changed_at(), self.link.keys
        if keys is None or changed_at in (0, self.read_at):
            return
        self.read_at = changed_at
        try:
            found = read_server_keys(keys.certificate.parent).sites
        except PolyfedError as error:  # somebody is at work there: the keys that we have stay good
            self.say(f"The keys cannot be read again: {error}")
            return
        for name in self.link.change_keys(found):
            what = "renewed" if found.get(name) else "revoked"
            self.say(f"The key of site {name} was {what}.")
            self.audit.write(f"key {what}", name)
        self.node_ids.clear()
        self.node_ids.update({self.sites.index(name): node for node, name in self.link.names.items()})

    def refresh(self) -> None:
        """Ask unknown nodes for their names, where keys do not tell."""
        if self.authenticated:
            self._refresh_keys()
            return
        online = self.link.nodes()
        new = [node for node in online if node not in self.claims]
        if not new:
            return
        ids = self.link.grid.push_messages(
            [FlowerMessage(pack({"kind": "name"}), n, "query.name", ttl=20) for n in new]
        )
        waiting = dict(zip(ids, new, strict=True))
        end = time.monotonic() + 10
        while waiting and time.monotonic() < end:
            for message in self.link.grid.pull_messages(set(waiting)):
                node = waiting.pop(message.metadata.reply_to_message_id, None)
                if node is None or message.has_error():
                    continue
                try:
                    name = str(unpack(message.content, "a new site")[0].get("name"))
                except PolyfedError:
                    name = ""
                self.claims[node] = name
                self._assign(node, name, online)
            time.sleep(0.05)

    def _assign(self, node: int, name: str, online: Mapping[int, str]) -> None:
        """Make a node the site of the name that it gave, if there is one and nobody else is."""
        if name not in self.sites:
            why = f"'{name[:64]}' is none of the sites ({', '.join(self.sites)})."
        elif self.node_ids.get(self.sites.index(name)) in online:
            why = f"A site '{name}' is connected already: stop that one, or choose another --name."
        else:
            self.node_ids[self.sites.index(name)] = node
            return
        self.say(f"Refused a site: {why}")
        send_refusal(self.link.grid, node, why)


@dataclass
class Registration:
    """The sites introduce themselves."""

    mailbox: Mailbox
    run: Head
    sites: list[str]
    say: Callable[[str], None]
    check: Callable[[Mapping[str, Head]], None] = lambda heads: None  # raises where they do not fit together
    read: Callable[[str, Head, bytes], Any] = lambda site, head, blob: None  # raises where one cannot be used
    met: dict[str, Any] = field(default_factory=dict)  # site -> what `read` made of its introduction
    here: set[str] = field(default_factory=set)
    told: int = -1
    refused: dict[int, str | None] = field(default_factory=dict)  # client -> when its node had connected

    def wait(self, known: Introductions) -> Introductions:
        """Wait until all sites have introduced themselves, or for some time until enough have.

        Raises
        ------
        TooFewSites
            When the time is over and too few have come.
        """
        known = self.readable(known)
        new = [number for number, site in enumerate(self.sites) if site not in known]
        questions = dict.fromkeys(new, lambda: ({"kind": "describe", "run": self.run}, b""))
        introductions = dict(known)

        def accept(client: int, head: Head, blob: bytes) -> tuple[Head, bytes]:
            site = self.sites[client]
            self._check({name: other for name, (other, _) in introductions.items()}, site, head)
            self.met[site] = self.read(site, head, blob)
            introductions[site] = head, blob
            if head.get("audit"):
                self.mailbox.audit.ask(client)
            self.mailbox.audit.write(
                "joined", site, samples=head.get("samples"), architecture=str(head.get("architecture"))
            )
            return introductions[site]

        exchange = Exchange(self.mailbox, "query.describe", questions, accept)
        start = time.monotonic()
        while True:
            exchange.step()
            self._refuse(exchange)
            self.here = {
                site for site in introductions if self.mailbox.node_ids.get(self.sites.index(site)) in exchange.online
            }
            spent = time.monotonic() - start
            self._report(self.mailbox.wait - spent)
            if len(self.here) + len(exchange.answers.failed) == len(self.sites):
                break
            if known and not exchange.open and len(self.here) >= self.mailbox.min_sites:
                break
            # Whoever is connected and still at it may finish, within the deadline of any other exchange.
            if spent > self.mailbox.wait + (self.mailbox.deadline if exchange.hopeful() else 0.0):
                break
            time.sleep(pause_after(spent, QUICK, SLOW))
        if len(self.here) < self.mailbox.min_sites:
            away = ", ".join(site for site in self.sites if site not in self.here)
            raise TooFewSites(
                f"Only {len(self.here)} of the {self.mailbox.min_sites} sites that are needed came ({away} did not). "
                + " ".join(exchange.answers.failed.values())
            )
        self.say(f"{len(self.here)} of {len(self.sites)} sites take part.")
        return introductions

    def readable(self, known: Introductions) -> Introductions:
        """Read the introductions of an earlier start; a site whose one cannot be used any more is asked again."""
        found: Introductions = {}
        for site, about in known.items():
            try:
                self.met[site] = self.read(site, *about)
                found[site] = about
            except MessageError as error:
                self.say(f"Asking again: {error}")
        return found

    def _check(self, heads: Mapping[str, Head], site: str, head: Head) -> None:
        """Refuse an introduction that does not fit to those before it."""
        try:
            if head.get("name") != site:
                raise InputError(f"Site {site} calls itself '{str(head.get('name'))[:64]}': it has the wrong keys.")
            self.check({**heads, site: head})
        except InputError as error:
            raise MessageError(str(error)) from error
        except MessageError:
            raise
        except Exception as error:  # an introduction can refuse its site, and never end the server
            raise MessageError(
                f"Site {site} cannot take part: its introduction is not credible ({error!s:.300})."
            ) from error

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
