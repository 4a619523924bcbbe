"""Ask the sites something and collect the answers: deadlines, sites that vanish and come back, too few sites."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flwr.app import Message as FlowerMessage

from polyfed.core.errors import MessageError, PolyfedError
from polyfed.flower import plain
from polyfed.flower.audit import Audit
from polyfed.flower.codec import Head, pack, unpack
from polyfed.flower.watch import pause_after

QUICK, SLOW = 0.05, 0.5  # seconds between two looks for answers: at first, and after five
LOOK = 0.5  # seconds between two looks at who is connected
TRIES = 5  # times a question is put to a site that vanishes and comes back


class TooFewSites(PolyfedError):
    """Not enough sites are left to go on; the run can be resumed."""


class Grid(Protocol):
    """What we use of Flower's grid: its public interface."""

    def push_messages(self, messages: Iterable[FlowerMessage]) -> Iterable[str]:
        """Send messages and return their names."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[FlowerMessage]:
        """Return the replies that are there."""


Question = Callable[[], tuple[Head, bytes]]  # made when it is sent and not kept: it may be as large as a network
Accept = Callable[[int, Head, bytes], Any]  # reads an answer of a client; raises MessageError if it cannot be used


@dataclass
class Answers:
    """What came back, as `accept` read it."""

    given: dict[int, Any] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    spent: set[int] = field(default_factory=set)  # of these, those whose privacy budget is used up


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
    budgets: bool = False  # whether sites have privacy budgets that can be used up
    members: set[int] | None = None  # who takes part, once that is settled
    refused_late: set[tuple[int, str]] = field(default_factory=set)  # nodes, with the moment when each connected
    audit: Audit = field(default_factory=Audit)

    def ask(
        self, kind: str, questions: Mapping[int, Question], accept: Accept, quorum: bool = True, when: str = ""
    ) -> Answers:
        """Ask the clients and return their answers; `when` is for the audit.

        A site that is away counts as failed at once if enough others answer; one that is slow has until the deadline.

        Raises
        ------
        TooFewSites
            When fewer than `min_sites` have answered by the deadline and after the further wait, or nobody's answer
            can be used.
        """
        exchange = Exchange(self, kind, questions, accept, when)
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
            time.sleep(pause_after(spent, QUICK, SLOW))
        for client in exchange.open:
            away = client not in exchange.hopeful()
            reason = "is not connected" if away else f"did not answer in {self.deadline:.0f} s"
            exchange.answers.failed[client] = f"{self.names[client]} {reason}"
            self.audit.write("missing", self.names[client], kind=kind, when=when, why=reason)
        return self.usable(exchange.answers, quorum)

    def usable(self, answers: Answers, quorum: bool) -> Answers:
        """Return the answers; refuse to go on with none, unless nobody has a privacy budget left to answer with."""
        if quorum and not answers.given and answers.failed.keys() - answers.spent:
            raise TooFewSites("No site gave a usable answer. " + " ".join(answers.failed.values()))
        return answers

    def refuse_late_sites(self, online: Mapping[int, str]) -> None:
        """Tell those who come when the federation has begun without them; else they would wait for nothing."""
        for client, node in self.node_ids.items():
            if self.members is None or client in self.members or node not in online:
                continue
            if (node, online[node]) not in self.refused_late:
                self.refused_late.add((node, online[node]))
                self.say(f"{self.names[client]} came too late: the federation has begun without it.")
                self.audit.write("refused", self.names[client], why="it came too late")
                send_refusal(self.grid, node, f"The federation has begun without site {self.names[client]}.")

    def tell(self, kind: str, clients: Iterable[int], head: Head, patience: float) -> None:
        """Send something that needs no answer to those who are connected, and give it some time to arrive."""
        self.refresh()
        online = self.nodes()
        messages = {
            client: FlowerMessage(
                pack(self.with_news(client, head)), self.node_ids[client], kind, ttl=max(patience, 1.0)
            )
            for client in clients
            if self.node_ids.get(client) in online
        }
        waiting = set(self.grid.push_messages(list(messages.values()))) if messages else set()
        end = time.monotonic() + patience
        while waiting and time.monotonic() < end:
            for message in self.grid.pull_messages(waiting):
                waiting.discard(message.metadata.reply_to_message_id)
            time.sleep(QUICK)

    def tell_comers(self, kind: str, clients: Iterable[int], head: Head, patience: float) -> None:
        """Send something that needs no answer to whoever connects within some time after the last one did."""
        away, end = set(clients), time.monotonic() + patience
        while away and time.monotonic() < end:
            self.refresh()
            online = self.nodes()
            here = {client for client in away if self.node_ids.get(client) in online}
            if here:
                self.tell(kind, here, head, patience)
                away, end = away - here, time.monotonic() + patience
            time.sleep(QUICK)

    def with_news(self, client: int, head: Head) -> Head:
        """Add what a client that reads along has not been told of the audit."""
        news = self.audit.news(client)
        return {**head, "audit": news} if news else head


def send_refusal(grid: Grid, node: int, why: str) -> None:
    """Tell a node that it does not take part, and why."""
    list(grid.push_messages([FlowerMessage(pack(refusal(why)), node, "query.end", ttl=60)]))


def refusal(why: str) -> Head:
    """Return the message that ends a site: it says why and exits."""
    return {"kind": "end", "refused": True, "reason": why}


class Exchange:
    """One question to several clients, until it is answered."""

    def __init__(
        self, mailbox: Mailbox, kind: str, questions: Mapping[int, Question], accept: Accept, when: str = ""
    ) -> None:
        self.mailbox = mailbox
        self.kind = kind
        self.when = when
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
        messages = list(self.mailbox.grid.pull_messages(set(self.asked))) if self.asked else []
        while messages:  # one by one, so that a large answer is gone before the next one is read
            message = messages.pop(0)
            asked = self.asked.pop(message.metadata.reply_to_message_id, None)
            if asked is not None and asked.client in self.open:
                self._take(asked, message)
            del message
        if time.monotonic() - self.looked > LOOK:
            self.mailbox.refresh()
            self.online = self.mailbox.nodes()
            self.looked = time.monotonic()
            self._forget_lost()
            self._send()
            self.mailbox.refuse_late_sites(self.online)

    def hopeful(self) -> set[int]:
        """Return the clients that have a question or could be asked now."""
        waiting = {asked.client for asked in self.asked.values()}
        could = {c for c in self.open if self.mailbox.node_ids.get(c) in self.online and self.tries[c] < TRIES}
        return self.open & (waiting | could)

    def _forget_lost(self) -> None:
        """Drop questions to nodes that went away, also those that came back meanwhile: the question died with them."""
        for message_id, asked in list(self.asked.items()):
            if self.online.get(asked.node) != asked.since:
                del self.asked[message_id]

    def _send(self) -> None:
        busy = {asked.client for asked in self.asked.values()}
        for client in sorted(self.open - busy):
            node = self.mailbox.node_ids.get(client)
            if node is None or node not in self.online or self.tries[client] >= TRIES:
                continue
            self.tries[client] += 1
            head, blob = self.questions[client]()
            content = pack(self.mailbox.with_news(client, head), blob)
            message = FlowerMessage(content, node, self.kind, ttl=self.mailbox.deadline + self.mailbox.wait + 60)
            del blob, content
            for message_id in self.mailbox.grid.push_messages([message]):
                if message_id:
                    self.asked[message_id] = Asked(client, node, self.online[node])
            del message  # before the next one is made

    def _take(self, asked: Asked, message: Any) -> None:
        """Take in an answer. An error of Flower's own means that the node is gone, and the question can be repeated."""
        name = self.mailbox.names[asked.client]
        if message.has_error():
            self.looked = float("-inf")
            if self.tries[asked.client] >= TRIES:
                self.open.discard(asked.client)
                self.answers.failed[asked.client] = plain(f"{name} failed {TRIES} times: {message.error.reason!s:.300}")
            return
        self.open.discard(asked.client)
        size = 0
        try:
            head, blob = unpack(message.content, name)
            size = len(blob)
            if "error" in head:
                self.answers.spent |= {asked.client} if self.mailbox.budgets and head.get("spent") is True else set()
                raise MessageError(f"{name}: {str(head['error'])[:500]}")
            self.answers.given[asked.client] = self.accept(asked.client, head, blob)
        except MessageError as error:
            self.answers.failed[asked.client] = plain(str(error))
        except Exception as error:  # what a site sends can refuse that site, and never end the server
            words = plain(f"{type(error).__name__}: {error!s:.300}")
            self.answers.failed[asked.client] = f"Message from {name} refused: it cannot be used ({words})."
        why = self.answers.failed.get(asked.client)
        event = {"event": "arrived"} if why is None else {"event": "refused", "why": why}
        self.mailbox.audit.write(**event, site=name, kind=self.kind, when=self.when, bytes=size)
