"""`polyfed join`: one site. Connects, answers the server's messages, reconnects, and says what it sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from polyfed.backends.flower.codec import Parcel, pack, unpack
from polyfed.backends.flower.keys import SiteKeys, read_site_keys
from polyfed.backends.flower.link import LinkError, SiteLink
from polyfed.backends.flower.site import Site
from polyfed.backends.flower.sitedata import SiteData
from polyfed.build import ModelSpec
from polyfed.core.errors import InputError, MessageError

LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
QUICK, SLOW = 0.05, 0.2  # seconds between two looks for a message: while something is going on, and else
REFUSED = 120.0  # seconds of refusals after which a site gives up: a vanished twin is forgotten after 60
PAUSE = 2.0  # seconds before SuperNode is started again


@dataclass(frozen=True)
class Joining:
    """How a site reaches the server.

    Attributes
    ----------
    server
        `HOST:PORT`.
    keys
        The folder `site-NAME` that this site got; None is insecure and works on one machine only.
    name
        The site's name where there are no keys.
    state
        Where this site keeps its model between rounds.
    give_up
        Seconds without a server after which the site stops.
    """

    server: str
    keys: Path | None
    name: str
    state: Path
    give_up: float = 3600.0


def join(
    joining: Joining,
    model: ModelSpec,
    data: SiteData,
    allow: Sequence[str] = (),
    max_bytes: int = 1 << 30,
    say: Callable[[str], None] = print,
) -> int:
    """Take part in a federation until it ends; return the bytes that were sent out.

    Raises
    ------
    InputError
        When the request cannot be carried out as given.
    LinkError
        When the server cannot be reached or refuses this site.
    """
    keys = _check(joining)
    site = Site(keys.name if keys else joining.name, model, data, joining.state, allow, max_bytes, say)
    link = SiteLink(joining.server, keys, joining.state / "flower")
    say(f"Site {site.name}: {len(data.train)} training and {len(data.test)} test samples, which stay here.")
    say(f"Connecting to {joining.server}; allowed methods: {', '.join(allow) if allow else 'all of this package'}.")
    try:
        return Attendance(link, site, joining, say).run()
    finally:
        link.close()


class Attendance:
    """The loop of a site: keep SuperNode alive, take messages, answer."""

    def __init__(self, link: SiteLink, site: Site, joining: Joining, say: Callable[[str], None]) -> None:
        self.link = link
        self.site = site
        self.joining = joining
        self.say = say
        self.refused_since: float | None = None
        self.silent_since = time.monotonic()
        self.sent = 0
        self.connected = False

    def run(self) -> int:
        """Answer messages until the federation ends."""
        pause = SLOW
        while self.site.ended is None:
            if not self.link.alive():
                self._restart()
            try:
                worked = self._once()
            except httpx.HTTPError:
                worked = False  # SuperNode is starting, or ended while we talked
            if worked:
                self.silent_since = time.monotonic()
            elif time.monotonic() - self.silent_since > self.joining.give_up:
                raise LinkError(f"No word from {self.joining.server} for {self.joining.give_up:.0f} s: giving up.")
            pause = QUICK if worked else min(SLOW, pause * 1.2)
            if not self.connected and self.link.connected():
                self.connected = True
                self.refused_since = None
                self.say("Connected.")
            time.sleep(pause)
        reason = f" early: {self.site.ended}" if self.site.ended else ""
        self.say(f"The federation has ended{reason}. This site sent {self.sent:,} bytes in all.")
        return self.sent

    def _once(self) -> bool:
        """Answer one message, if there is one."""
        with self.link.task() as task:
            if task is None:
                return False
            try:
                head, blob = unpack(task.letter.content, "the server")
            except MessageError as error:
                task.reply(pack({"error": str(error)}))
                return True
            if head.get("kind") == "name":
                task.reply(pack({"name": self.site.name}))
                return True
            parcel = Parcel(blob)
            del blob
            answer, body = self.site.answer(head, parcel)
            task.reply(pack(answer, body))
            if "run" in head and "error" not in answer:
                self.sent = self.site.sent(head)
        if self.site.ended is not None:
            time.sleep(1.0)  # SuperNode carries the last reply to the server
        return True

    def _restart(self) -> None:
        """Start SuperNode; find out why it ended if it did."""
        words = self.link.words()
        if self.link.child is not None:
            self._explain(words)
            self.link.close()
            time.sleep(PAUSE)
        self.connected = False
        self.link.open()

    def _explain(self, words: str) -> None:
        """Say why the connection ended; stop where trying again is of no use."""
        if "CERTIFICATE_VERIFY_FAILED" in words or "certificate verify failed" in words:
            raise LinkError(
                f"{self.joining.server} does not have the certificate that our ca.crt vouches for: check the address, "
                "and that the keys in this folder belong to this federation."
            )
        if "SSL" in words and "handshake" in words:
            raise LinkError(f"{self.joining.server} does not speak TLS: is it the right port, and not --insecure?")
        if "Failed to initialize the connection" in words:
            now = time.monotonic()
            self.refused_since = self.refused_since or now
            if now - self.refused_since > REFUSED:
                raise LinkError(
                    f"{self.joining.server} has refused this site for {REFUSED:.0f} s: is '{self.site.name}' one of "
                    "its sites, with this key, and does no other 'polyfed join' use the same key?"
                )
            self.say("The server does not let us in yet; trying again.")
        else:
            self.say("The connection was lost; connecting again.")


def _check(joining: Joining) -> SiteKeys | None:
    host, _, port = joining.server.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"--server is HOST:PORT, not '{joining.server}'.")
    if joining.keys is not None:
        return read_site_keys(joining.keys)
    if host not in LOOPBACK:
        raise InputError(
            f"Without keys a site talks to this machine only, but --server is {host}: ask the server for a folder of "
            "keys and pass it with --keys."
        )
    if not joining.name:
        raise InputError("Without keys a site needs a name: --name north.")
    return None
