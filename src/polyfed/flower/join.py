"""`polyfed join`: one site. Connects, answers the server's messages, reconnects, and says what it sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from polyfed.build import other_starts
from polyfed.core.errors import InputError, MessageError, PolyfedError
from polyfed.core.lock import Lock
from polyfed.flower.child import LinkError, last_line
from polyfed.flower.codec import Body, pack, unpack
from polyfed.flower.keys import SiteKeys, check_names, read_site_keys
from polyfed.flower.link import MessageLost, SiteLink
from polyfed.flower.reach import ADVICE, look, wait_for_server
from polyfed.flower.signing import SealCheck
from polyfed.flower.site import Site
from polyfed.flower.sitedata import SiteData, described
from polyfed.flower.watch import pause_after
from polyfed.specs import ModelSpec

LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
QUICK, SLOW = 0.05, 0.5  # seconds between two looks for a message: while something goes on, and after five of silence
REFUSED = 120.0  # seconds of refusals after which a site gives up: a vanished twin is forgotten after 60
PAUSE = 2.0  # seconds before SuperNode is started again
REMIND = 60.0  # seconds between two sentences about a server that is away
LOOK = 1.0  # seconds between two looks at the connection
LOST = 5.0  # seconds without an answer of the server that are worth a sentence
END_SECONDS = 10.0  # seconds for the last words of a site that cannot take part


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
    wait
        Seconds to try until the server answers for the first time.
    audit
        Whether to ask for the server's audit; it is kept with the state.
    max_epsilon
        The largest epsilon, for each sample, with which this site takes part, over all federations that `state` knows
        of; None: what the server asks for.
    """

    server: str
    keys: Path | None
    name: str
    state: Path
    give_up: float = 3600.0
    wait: float = 300.0
    audit: bool = False
    max_epsilon: float | None = None


class EndedEarly(PolyfedError):
    """The server ended the federation because something went wrong."""


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
        When the request cannot be carried out as given, or this site cannot take part in the server's federation.
    LinkError
        When the server cannot be reached or does not let this site in.
    EndedEarly
        When something went wrong at the server.
    """
    keys = check_joining(joining)
    with Lock(joining.state, "--state"):
        return _join(joining, keys, model, data, allow, max_bytes, say)


def _join(
    joining: Joining,
    keys: SiteKeys | None,
    model: ModelSpec,
    data: SiteData,
    allow: Sequence[str],
    max_bytes: int,
    say: Callable[[str], None],
) -> int:
    site = Site(keys.name if keys else joining.name, model, data, joining.state, allow, max_bytes, say)
    site.audit, site.max_epsilon = joining.audit, joining.max_epsilon
    link = SiteLink(joining.server, keys, joining.state / "flower")
    say(f"Site {site.name}: {len(data.train)} training and {len(data.test)} test samples, which stay here.")
    for note in data.notes:
        say(f"Your data: {note}")
    for told in other_starts([model], lambda: described(data)):
        say(f"Warning: {told}")
    say(f"Connecting to {joining.server}; allowed methods: {', '.join(allow) if allow else 'all of this package'}.")
    wait_for_server(joining.server, keys, min(joining.wait, joining.give_up), say)
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
        self.looked = self.told_lost = float("-inf")
        self.lost_since: float | None = None
        self.sent = 0
        self.connected = False
        self.seal = SealCheck(link.keys, joining.state / "orders") if link.keys else None

    def run(self) -> int:
        """Answer messages until the federation ends."""
        leave = float("inf")
        last = time.monotonic()  # when there was something to do
        while self.site.ended is None and time.monotonic() < leave:
            if not self.link.alive():
                self._restart()
            try:
                worked = self._once()
            except (httpx.HTTPError, MessageLost):
                worked = False  # SuperNode is starting, ended while we talked, or the server stopped meanwhile
            if self.site.refused is not None:  # the server hears why, and says goodbye
                leave = min(leave, time.monotonic() + END_SECONDS)
            self._look()
            if worked or (self.connected and self.lost_since is None):
                self.silent_since = time.monotonic()
            elif time.monotonic() - self.silent_since > self.joining.give_up:
                raise LinkError(
                    f"No word from {self.joining.server} for {self.joining.give_up:.0f} s: giving up; {ADVICE}."
                )
            last = time.monotonic() if worked else last
            time.sleep(pause_after(time.monotonic() - last, QUICK, SLOW))
        if self.site.refused is not None:
            raise InputError(self.site.refused)
        if self.site.ended:
            raise EndedEarly(
                f"The federation has ended early: {self.site.ended} This site sent {self.sent:,} bytes in all."
            )
        self.say(f"The federation has ended. This site sent {self.sent:,} bytes in all.")
        for line in self.site.last_words():
            self.say(line)
        return self.sent

    def _look(self) -> None:
        """Look at the connection from time to time, and say what has become of it."""
        now = time.monotonic()
        if now - self.looked < LOOK:
            return
        self.looked = now
        if not self.connected and self.link.connected():
            self.connected = True
            self.refused_since = None
            self.say("Connected.")
        if not self.link.lost():
            if self.lost_since is not None and self.told_lost > self.lost_since:
                self.say("The server answers again.")
            self.lost_since, self.told_lost = None, float("-inf")
            return
        self.lost_since = self.lost_since or now
        if now - self.lost_since >= LOST and now - self.told_lost >= REMIND:
            self.told_lost = now
            left = self.joining.give_up - (now - self.silent_since)
            self.say(f"{self.joining.server} does not answer; trying for {max(left, 0):.0f} s more.")

    def _once(self) -> bool:
        """Answer one message, if there is one."""
        with self.link.task() as task:
            if task is None:
                return False
            try:
                head, blob = unpack(task.message.content, "the server", self.seal.check if self.seal else None)
            except MessageError as error:
                self.say(f"Refused: {error}")
                task.reply(pack({"error": str(error), "spent": False}))
                return True
            if head.get("kind") == "name":
                task.reply(pack({"name": self.site.name}))
                return True
            body = Body(blob)
            del blob
            answer, reply = self.site.answer(head, body)
            task.reply(pack(answer, reply))
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
        if self.connected:
            self.say("The connection was lost; connecting again.")
            return
        now = time.monotonic()
        if self.refused_since is None:
            with suppress(httpx.HTTPError):
                look(self.joining.server, self.link.keys)  # ours, but not with our clock, for instance
        self.refused_since = self.refused_since or now
        left = REFUSED - (now - self.refused_since)
        refused = "Failed to initialize the connection" in words
        advice = (
            f"is '{self.site.name}' one of its sites, with this key, and does no other 'polyfed join' use the same key?"
            if refused
            else f"Flower's process ended ({last_line(words)}); its log is {self.link.folder / 'supernode.log'}."
        )
        if left <= 0:
            raise LinkError(f"{self.joining.server} has not let this site in for {REFUSED:.0f} s: {advice}")
        self.say(f"The server does not let us in yet; trying for {left:.0f} s more: {advice}")


def check_joining(joining: Joining) -> SiteKeys | None:
    """Refuse what is not safe or not possible; return the keys."""
    host, _, port = joining.server.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
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
    check_names([joining.name])
    return None
