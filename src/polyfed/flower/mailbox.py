"""Ask the sites something and collect the answers: deadlines, sites that vanish and come back, too few sites."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flwr.app import Message as Letter

from polyfed.core.errors import MessageError, PolyfedError
from polyfed.flower.codec import Head, pack, unpack

QUICK, SLOW = 0.05, 0.5  # seconds between two looks for answers: at first, and after some time
LOOK = 0.5  # seconds between two looks at who is connected
TRIES = 5  # times a question is put to a site that vanishes and comes back


class TooFewSites(PolyfedError):
    """Not enough sites are left to go on; the run can be resumed."""


class Grid(Protocol):
    """What we use of Flower's grid: its public interface."""

    def push_messages(self, messages: Iterable[Letter]) -> Iterable[str]:
        """Send messages and return their names."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Letter]:
        """Return the replies that are there."""


Question = Callable[[], tuple[Head, bytes]]  # made when it is sent and not kept: it may be as large as a network
Accept = Callable[[int, Head, bytes], Any]  # reads an answer of a client; raises MessageError if it is not believed


@dataclass
class Answers:
    """What came back, as `accept` read it."""

    given: dict[int, Any] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


@dataclass
class Asked:
    """A question on its way to a client."""

    client: int
    node: int
    since: str  # when the node had connected: another moment means that it lost the question


@dataclass
class Mailbox:
    """Sends questions to sites and waits for their answers.

    Attributes
    ----------
    grid, nodes
        Flower's grid, and a function that returns the connected nodes with the moment when each connected.
    node_ids
        Client number -> node of that client, where it is known.
    deadline
        Seconds that a site has for an answer.
    min_sites
        How many answers make an exchange count.
    wait
        Seconds to wait for more sites when too few have answered.
    """

    grid: Grid
    nodes: Callable[[], Mapping[int, str]]
    node_ids: dict[int, int]
    names: Mapping[int, str]
    deadline: float
    min_sites: int
    wait: float
    say: Callable[[str], None]
    refresh: Callable[[], None] = lambda: None
    members: set[int] | None = None  # who takes part, once that is settled
    turned_away: set[tuple[int, str]] = field(default_factory=set)  # nodes, with the moment when each connected

    def ask(self, kind: str, questions: Mapping[int, Question], accept: Accept, quorum: bool = True) -> Answers:
        """Ask the clients and return their answers.

        A site that is away counts as failed at once if enough others answer; one that is slow has until the deadline.

        Raises
        ------
        TooFewSites
            When fewer than `min_sites` have answered by the deadline and after the further wait, or nobody's answer
            can be used.
        """
        exchange = Exchange(self, kind, questions, accept)
        need = min(self.min_sites, len(questions)) if quorum else 0
        start = time.monotonic()
        told = False
        while True:
            exchange.step()
            spent = time.monotonic() - start
            answered = len(exchange.answers.given) + len(exchange.answers.failed)  # a refused answer is one, too
            if not exchange.open or (answered >= need and not exchange.hopeful()):
                break
            if spent > self.deadline and answered >= need:
                break
            if spent > self.deadline + self.wait:
                missing = ", ".join(self.names[client] for client in sorted(exchange.open))
                raise TooFewSites(f"Only {answered} of the {need} sites that are needed answered ({missing} did not).")
            if not told and answered + len(exchange.hopeful()) < need:
                told = True
                patience = self.deadline + self.wait - spent
                self.say(f"Waiting up to {patience:.0f} s: {answered} of {need} sites answered, the others are away.")
            time.sleep(QUICK if spent < 5 else SLOW)
        for client in exchange.open:
            away = client not in exchange.hopeful()
            reason = "is not connected" if away else f"did not answer in {self.deadline:.0f} s"
            exchange.answers.failed[client] = f"{self.names[client]} {reason}"
        if quorum and not exchange.answers.given:
            raise TooFewSites("No site gave a usable answer. " + " ".join(exchange.answers.failed.values()))
        return exchange.answers

    def turn_away(self, online: Mapping[int, str]) -> None:
        """Tell those who come when the federation has begun without them; else they would wait for nothing."""
        for client, node in self.node_ids.items():
            if self.members is None or client in self.members or node not in online:
                continue
            if (node, online[node]) not in self.turned_away:
                self.turned_away.add((node, online[node]))
                self.say(f"{self.names[client]} came too late: the federation has begun without it.")
                dismiss(self.grid, node, f"The federation has begun without site {self.names[client]}.")

    def tell(self, kind: str, clients: Iterable[int], head: Head, patience: float) -> None:
        """Send something that needs no answer to those who are connected, and give it some time to arrive."""
        self.refresh()
        online = self.nodes()
        letters = {
            client: Letter(pack(head), self.node_ids[client], kind, ttl=max(patience, 1.0))
            for client in clients
            if self.node_ids.get(client) in online
        }
        waiting = set(self.grid.push_messages(list(letters.values()))) if letters else set()
        end = time.monotonic() + patience
        while waiting and time.monotonic() < end:
            for letter in self.grid.pull_messages(waiting):
                waiting.discard(letter.metadata.reply_to_message_id)
            time.sleep(QUICK)


def dismiss(grid: Grid, node: int, why: str) -> None:
    """Tell a node that it does not take part, and why."""
    list(grid.push_messages([Letter(pack(refusal(why)), node, "query.end", ttl=60)]))


def refusal(why: str) -> Head:
    """Return the message that ends a site: it says why and exits."""
    return {"kind": "end", "refused": True, "reason": why}


class Exchange:
    """One question to several clients, until it is answered."""

    def __init__(self, mailbox: Mailbox, kind: str, questions: Mapping[int, Question], accept: Accept) -> None:
        self.mailbox = mailbox
        self.kind = kind
        self.questions = questions
        self.accept = accept
        self.open = set(questions)  # clients whose answer is not here and may still come
        self.asked: dict[str, Asked] = {}  # message id -> question
        self.tries = dict.fromkeys(questions, 0)
        self.answers = Answers()
        self.online: Mapping[int, str] = {}
        self.looked = float("-inf")

    def step(self) -> None:
        """Take in answers (first: who answered may be gone by now), look who is there, and ask who was not asked."""
        letters = list(self.mailbox.grid.pull_messages(set(self.asked))) if self.asked else []
        while letters:  # one by one, so that a large answer is gone before the next one is read
            letter = letters.pop(0)
            asked = self.asked.pop(letter.metadata.reply_to_message_id, None)
            if asked is not None and asked.client in self.open:
                self._take(asked, letter)
            del letter
        if time.monotonic() - self.looked > LOOK:
            self.mailbox.refresh()
            self.online = self.mailbox.nodes()
            self.looked = time.monotonic()
            self._forget_lost()
            self._send()
            self.mailbox.turn_away(self.online)

    def hopeful(self) -> set[int]:
        """Return the clients that have a question or could be asked now."""
        waiting = {asked.client for asked in self.asked.values()}
        could = {c for c in self.open if self.mailbox.node_ids.get(c) in self.online and self.tries[c] < TRIES}
        return self.open & (waiting | could)

    def _forget_lost(self) -> None:
        """Drop questions to nodes that went away, also those that came back meanwhile: the question died with them."""
        for message, asked in list(self.asked.items()):
            if self.online.get(asked.node) != asked.since:
                del self.asked[message]

    def _send(self) -> None:
        busy = {asked.client for asked in self.asked.values()}
        for client in sorted(self.open - busy):
            node = self.mailbox.node_ids.get(client)
            if node is None or node not in self.online or self.tries[client] >= TRIES:
                continue
            self.tries[client] += 1
            head, blob = self.questions[client]()
            letter = Letter(pack(head, blob), node, self.kind, ttl=self.mailbox.deadline + self.mailbox.wait + 60)
            del blob
            for message in self.mailbox.grid.push_messages([letter]):
                if message:
                    self.asked[message] = Asked(client, node, self.online[node])
            del letter  # before the next one is made

    def _take(self, asked: Asked, letter: Any) -> None:
        """Take in an answer. An error of Flower's own means that the node is gone, and the question can be repeated."""
        name = self.mailbox.names[asked.client]
        if letter.has_error():
            self.looked = float("-inf")
            if self.tries[asked.client] >= TRIES:
                self.open.discard(asked.client)
                self.answers.failed[asked.client] = f"{name} failed {TRIES} times: {str(letter.error.reason)[:300]}"
            return
        self.open.discard(asked.client)
        try:
            head, blob = unpack(letter.content, name)
            if "error" in head:
                raise MessageError(f"{name}: {str(head['error'])[:500]}")
            self.answers.given[asked.client] = self.accept(asked.client, head, blob)
        except MessageError as error:
            self.answers.failed[asked.client] = str(error)
