"""A method says what each party sends and learns. Everything else is shared.

A method is a frozen dataclass: its fields are its hyper-parameters. It overrides the hooks it needs; the defaults
make a client train on its own data with the task's loss and send nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from polyfed.core.errors import InputError, PolyfedError, TrainingError
from polyfed.core.fields import check_fields
from polyfed.core.message import Message
from polyfed.core.party import Blueprint, ClientInfo, Context, Party, fill
from polyfed.core.places import Place, default_places
from polyfed.core.privacy import BudgetSpent, Releases
from polyfed.core.stage import Aux, Batch, Stage, Trained
from polyfed.core.traffic import Symbol, Traffic
from polyfed.ops.aggregate import IndexMap

Combination = Literal["mean", "classes", "rows", "apart"]
Local = Generator[Stage, Trained, Message | None]


@dataclass(frozen=True)
class Step:
    """One exchange: down to the clients, work there, up again, fuse.

    Attributes
    ----------
    name
        Tells the hooks which exchange this is.
    who
        `selected`: this round's participants; `all`: every client.
    evaluate
        Measure all clients' models after this step under this name (`"distilled"`, for instance).
    when
        `always`, or `evaluation`: only in rounds whose models are measured.
    """

    name: str = "main"
    who: str = "selected"
    down: bool = True
    up: bool = True
    evaluate: str | None = None
    when: str = "always"


@dataclass(frozen=True)
class Plan:
    """The exchanges before, in, and after the rounds. `rounds` fixes their number (one-shot methods)."""

    before: tuple[Step, ...] = ()
    round: tuple[Step, ...] = (Step(),)
    after: tuple[Step, ...] = ()
    rounds: int | None = None


EVALUATE = Step("evaluate", who="all", up=False)  # what a client would receive now: used to measure its model


@dataclass(frozen=True)
class Method:
    """Base of all methods; see `methods/fedproto.py` for a short complete one.

    Class attributes
    ----------------
    name, paper, family
        What `polyfed methods` prints; `family` is what kind of thing travels.
    needs
        Properties of models and data, checked before anything trains (see `core/needs.py`).
    sends
        For people: what leaves a client.
    shares
        Names of models whose parameters may appear in messages; the contract tests hold the method to it.
    combines
        How `fuse` combines each kind of thing in a reply (`params/main`, `data/logits`, as in the report's table):
        `mean`, entry by entry over the clients that hold it, with whatever weights; `classes`, the same with rows that
        belong to the classes in `data/classes`; `rows`, samples' features that are put together; `apart`, each client's
        on its own. Rules against bad senders slot in by it (see `core/robust.py`); empty: none can.
    traffic, symbols
        What an exchange costs, by the name of its step, in formulas (see `core/traffic.py`); steps that are not named
        cost nothing. The letters that only this method has are in `symbols`. None: not told.
    pools_data
        A control that breaks the rules on purpose: all data in one place. Simulation only.
    outcome
        Whose model the method is for: `clients`, or `server` (one-shot fusion, where clients keep their networks).
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    family: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    sends: ClassVar[str] = "nothing"
    shares: ClassVar[frozenset[str]] = frozenset()
    combines: ClassVar[Mapping[str, Combination]] = {}
    traffic: ClassVar[Mapping[str, Traffic] | None] = None
    symbols: ClassVar[Mapping[str, Symbol]] = {}
    pools_data: ClassVar[bool] = False
    outcome: ClassVar[str] = "clients"
    knows_rounds: ClassVar[bool] = False  # what it does in a round depends on how many there are in all

    def __post_init__(self) -> None:
        check_fields(self, self.name or type(self).__name__)
        self.check()

    def check(self) -> None:
        """Refuse hyper-parameters that do not go together; raise `InputError`. Called when the object is made.

        What one field may be is said by its type (see `core/fields.py`).
        """

    def must_stay(self, why: str, **values: object) -> None:
        """Refuse, in `check`, other values of fields that come from a base class and have no say here."""
        for name, value in values.items():
            if getattr(self, name) != value:
                raise InputError(f"{self.name}: {name} must stay {value!r}: {why}.")

    def requirements(self) -> frozenset[str]:
        """Return `needs`, where it depends on hyper-parameters."""
        return self.needs

    def takes_learners(self) -> bool:
        """Tell whether a client may be any learner: one that is fitted and asked, without weights or gradients.

        Then what its stages teach is all in their data and labels (or `Stage.targets`), and nothing of a client is used
        but `party.main(x)`.
        """
        return False

    def misfit(
        self, infos: Sequence[ClientInfo], blueprints: Mapping[str, Blueprint], input_shape: tuple[int, ...]
    ) -> str | None:
        """Return what else is missing, in words, once all `needs` are met (sizes that do not fit, for instance)."""
        return None

    def outputs(self, private_classes: int, public_classes: int | None) -> int:
        """Return how many outputs every model needs (more than the private classes where public labels count too)."""
        return private_classes

    def selects_on_test(self) -> bool:
        """Tell whether the server gets the test set to choose settings by (a paper's protocol; always reported)."""
        return False

    def beyond_training(self) -> str | None:
        """Return what clients tell of their samples that is more than their training makes of them; None: nothing.

        Noise in training covers all that is computed from the trained network (and public data), and `releases` are
        noisy by themselves. A method says None where that is all that leaves.
        """
        return self.sends if self.sends != "nothing" else None

    def releases(self) -> Releases:
        """Return how often a client tells sums over its samples: those of `core/releases.py`, which noise can cover."""
        return Releases()

    def own_epochs(self, epochs: int, rounds: int) -> int:
        """Return for how many epochs a client learns from its own samples in a whole run, at most.

        Noise is planned for them; `epochs` are those of the training settings. Whoever learns for more stops early.
        """
        return epochs * rounds

    def numbers(self, info: ClientInfo, ctx: Context) -> Mapping[str, tuple[float, float]]:
        """Return the least and the most that numbers in a reply (`meta`) can be, by the client's samples and the plan.

        A server of strangers holds each site to it; what is not named may be anything that is not negative.
        """
        return {}

    # --- at the server, which never sees a client object ---

    def plan(self) -> Plan:
        """Return the exchanges of this method."""
        return Plan()

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Lay out the server's state, side models and memory. Called once."""

    def slots(self, server: Party, info: ClientInfo, ctx: Context) -> IndexMap:
        """Return which part of the server's state this client holds (its view)."""
        return {}

    def places(self, server: Party, info: ClientInfo, message: Message, ctx: Context) -> dict[str, Place]:
        """Return where the entries of a message that `combines` names meet those of other clients, by wire name."""
        return default_places(self.combines, self.slots(server, info, ctx), server.state, info, message, ctx)

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Return what this client receives at the start of a step."""
        return Message()

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Take in the replies of a step, in ascending client id. May train at the server with `ctx.run`."""

    def fused_into(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> dict[str, str] | None:
        """Return the key of the server's state that `fuse` averages each tensor of a reply into, by wire name.

        None: fusing is more than that. A method that says it promises that `fuse` treats each key on its own: called
        with replies that hold the tensors of some keys, then with those of the others (or of none), it does what one
        call does. Several processes share the work then (`engines/ranks.py`). Whoever overrides `fuse` says it anew.
        """
        return None

    # --- at the client, which never sees the server: its inbox is all it knows ---

    def setup_client(self, client: Party, ctx: Context) -> None:
        """Add side models and first memories. Must give the same result whenever it is called."""

    def receive(self, client: Party, step: Step, ctx: Context) -> None:
        """Take in what the inbox holds: by default, states of models that the client has replace its own.

        Called at the start of every exchange and, on a copy of the client, wherever its model is measured or handed
        out (step `evaluate`): what is unpacked here is part of the model, what `local` unpacks is not.
        """
        for model, state in client.inbox.params.items():
            if model in client.models:
                fill(client.tensors(model), state)

    def loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return the loss of the default local stage; pure in (parameters, batch, aux)."""
        return batch.loss(nets["main"](batch.x))

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Do the client's work of a step: yield stages, return the reply."""
        yield Stage(self.loss)
        return None

    # --- at either ---

    def serves(self, server: Party) -> bool:
        """Tell whether the server has a model of its own to measure."""
        return "main" in server.models

    def predict(self, party: Party, x: Tensor, ctx: Context) -> Tensor:
        """Return the outputs of a party's model (logits, scores or values) for evaluation, in prediction mode."""
        logits: Tensor = party.main(x)
        return logits


def unchanged(method: Method, base: type[Method], *hooks: str) -> bool:
    """Tell whether a method has these hooks as a base class wrote them."""
    return all(getattr(type(method), hook) is getattr(base, hook) for hook in hooks)


@dataclass
class Replies:
    """What came back from an exchange."""

    messages: dict[int, Message] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # client -> why it is missing
    broken: set[int] = field(default_factory=set)  # of these, those whose training broke down
    spent: set[int] = field(default_factory=set)  # and those whose privacy budget is used up
    epsilon: dict[int, float] = field(default_factory=dict)  # client -> its privacy loss so far, where there is noise
    saved: float = 0.0  # seconds of training that an earlier run had done already
    fuse: Callable[[Party, Mapping[int, Message]], None] | None = None  # where their tensors stayed in other processes

    def leave_out(self, client: int, error: PolyfedError) -> None:
        """Note why a client is missing."""
        self.failed[client] = str(error)
        if isinstance(error, TrainingError):
            self.broken.add(client)
        if isinstance(error, BudgetSpent):
            self.spent.add(client)

    def add(self, others: Replies) -> None:
        """Take in what came back from other clients."""
        self.messages.update(others.messages)
        self.losses.update(others.losses)
        self.seconds.update(others.seconds)
        self.failed.update(others.failed)
        self.broken.update(others.broken)
        self.spent.update(others.spent)
        self.epsilon.update(others.epsilon)
        self.saved += others.saved
