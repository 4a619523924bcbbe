"""The parties of a federation: the server and its clients, and what is known about each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyfed.core.errors import MethodError
from polyfed.core.message import Message, State
from polyfed.core.metrics import Metric
from polyfed.core.nets import frozen_names
from polyfed.core.privacy import Privacy
from polyfed.core.rng import SERVER, generator, seeded
from polyfed.core.samples import Samples
from polyfed.core.settings import Training
from polyfed.core.stage import Stage, Trained
from polyfed.core.task import CLASSIFICATION, Task
from polyfed.core.width import Groups

Memory = dict[str, Any]  # tensors, numbers, words, and lists or string-keyed dicts of them: it is checkpointed


@dataclass(frozen=True)
class ClientInfo:
    """All that the server knows about a client."""

    id: int
    samples: int
    architecture: str
    parameters: int = 0
    label_counts: tuple[int, ...] | None = None  # only for methods whose `needs` include "label_counts"
    name: str = ""

    def __str__(self) -> str:
        return f"client {self.id}" + (f" ({self.name})" if self.name else "")


@dataclass(frozen=True)
class Blueprint:
    """What is known about an architecture: enough to lay out, check and (where code is shared) build its states."""

    name: str
    shapes: dict[str, tuple[int, ...]]  # every tensor of the state dict
    buffers: frozenset[str]  # which of them are not parameters
    properties: frozenset[str]  # "features", "split3", "width", "batchnorm", ...
    feature_dim: int | None
    num_classes: int
    family: str | None
    parameters: int
    initial: State = field(repr=False)  # the common initial state of this architecture
    build: Callable[[], nn.Module] | None = field(default=None, repr=False)
    frozen: frozenset[str] = frozenset()  # parameters without gradients: they stay as in `initial`, at every party
    cuts: dict[str, tuple[int, ...]] = field(default_factory=dict)  # "s_in", "s_out": see `cut_shapes`; empty if uncut
    random: bool = False  # its passes draw from torch's global generator (functional dropout, noise)
    width_groups: Groups = field(default_factory=dict, repr=False)  # which axes are hidden channels, if it has widths

    def running_statistics(self) -> frozenset[str]:
        """Return the names of BatchNorm means and variances."""
        return frozenset(filter(is_running_statistic, self.buffers))


def is_running_statistic(name: str) -> bool:
    """Tell whether a tensor is a mean or variance of BatchNorm."""
    return name.endswith(("running_mean", "running_var"))


@dataclass
class PartyData:
    """The data a party can see. A client: its own. The server: the public set and perhaps a validation set.

    `initial`: the weights that a client's model came with, where they are not the common ones of its architecture.
    """

    train: Samples | None = None
    validation: Samples | None = None
    public: Samples | None = None
    initial: State | None = field(default=None, repr=False)
    tests: dict[int, Samples] = field(
        default_factory=dict
    )  # own test data by client: of others only where data is pooled


class Party:
    """The server or one client: its models, what it remembers between rounds, its mail and its data.

    Attributes
    ----------
    models
        `"main"` and any side models. They are live modules whose tensors belong to this party while it is active.
    memory
        Persists across rounds and through checkpoints.
    inbox
        The last message received in this exchange.
    state
        Server only: the shared tensors that view-based methods keep (a superset of the clients' tensors).
    """

    KEPT: ClassVar[frozenset[str]] = frozenset({"id", "info", "data", "models", "memory", "inbox", "state"})

    def __init__(self, id: int, info: ClientInfo | None, data: PartyData) -> None:
        self.id = id
        self.info = info
        self.data = data
        self.models: dict[str, nn.Module] = {}
        self.memory: Memory = {}
        self.inbox = Message()
        self.state: State = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse attributes that a party does not have: after the exchange they would be gone."""
        if name not in self.KEPT:
            raise MethodError(f"{self} keeps no '{name}': what it is to remember belongs into `memory['{name}']`.")
        object.__setattr__(self, name, value)

    @property
    def main(self) -> nn.Module:
        """The party's own network."""
        return self.models["main"]

    @property
    def architecture(self) -> str:
        """The name of a client's architecture."""
        assert self.info is not None, "the server has no architecture of its own"
        return self.info.architecture

    def tensors(self, model: str = "main") -> State:
        """Return a detached view of a model's tensors by name."""
        return state_of(self.models[model])

    @property
    def train(self) -> Samples:
        """The party's own training data."""
        assert self.data.train is not None, "this party has no training data"
        return self.data.train

    @property
    def calibration(self) -> Samples:
        """What a client fits temperatures and thresholds on: its validation data, where it has some, or all it has."""
        held = self.data.validation
        return held if held is not None and len(held) else self.train

    @property
    def public(self) -> Samples:
        """The public set (methods that use it declare `needs = {"public"}`)."""
        assert self.data.public is not None, "this party has no public data"
        return self.data.public

    def __str__(self) -> str:
        return "server" if self.id == SERVER else str(self.info)


@dataclass
class Context:
    """Where in the run we are, and the run's common settings. Given to every hook."""

    seed: int
    round: int  # 1, 2, ...; 0 before the rounds
    rounds: int
    training: Training
    num_classes: int  # or labels, or targets: what a network's outputs stand for
    input_shape: tuple[int, ...]
    clients: int  # how many there are in all
    public_classes: int | None = None  # set when the public data has labels of its own, apart from the private ones
    phase: str = "round"  # before | round | after
    participants: tuple[int, ...] = ()  # of this exchange, in ascending order
    privacy: Privacy = field(default_factory=Privacy)  # of what leaves clients
    own_epochs: int = 0  # for how many epochs a client learns from its samples in the whole run, as the method says
    releases: int = 0  # how often a client tells sums over its samples in the whole run, as the method says
    secure: bool = False  # noise comes from the operating system: in a real federation, where the seed is known to all
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    blueprints: dict[str, Blueprint] = field(default_factory=dict)
    infos: dict[int, ClientInfo] = field(default_factory=dict)  # empty at the clients: they do not know each other
    run_stage: Callable[[Stage, Party, str], Trained] | None = field(default=None, repr=False)
    ask: Callable[[int, Tensor], Tensor] | None = field(default=None, repr=False)  # of the server: see `Asked`
    records: dict[str, Any] = field(default_factory=dict, repr=False)
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)  # what can be computed again: not checkpointed
    task: Task = CLASSIFICATION
    metrics: tuple[Metric, ...] = ()  # what is measured beside the task's score and loss

    @property
    def feature_dim(self) -> int:
        """The size of the features, in methods that need one size at all clients."""
        size = next(iter(self.blueprints.values())).feature_dim
        assert size is not None, "a need of such methods"
        return size

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` makes, made once in a run for this key: it must depend on nothing that changes."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    def forget(self, *keys: Any) -> None:
        """Let what `cached` holds for these keys be made again: what it depends on has changed."""
        for key in keys:
            self.cache.pop(key, None)

    def this_round(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` makes, made once in a round for this key."""
        made = self.cache.get(("round", key))
        if made is None or made[0] != (self.phase, self.round):
            made = self.cache["round", key] = ((self.phase, self.round), make())
        return made[1]

    def replica(self, architecture: str) -> nn.Module:
        """Return the server's network of an architecture, built once: load a state into it before use."""
        blueprint = self.blueprints[architecture]
        assert blueprint.build is not None, f"the server cannot build {architecture}"
        build = blueprint.build
        module: nn.Module = self.cached(("replica", architecture), lambda: build().to(self.device))
        return module

    def rng(self, purpose: str, party: Party | int | None = None) -> torch.Generator:
        """Return a fresh generator for this purpose, this round and this party (None: the server)."""
        client = SERVER if party is None else party if isinstance(party, int) else party.id
        return generator(self.seed, purpose, self.round, client)

    def own_draws(self, purpose: str, party: Party | ClientInfo) -> AbstractContextManager[None]:
        """Return a block for the work of a client; what its network draws by itself comes from the client's stream.

        That is torch's global generator, so such clients wait for each other. Others do not notice.
        """
        info = party.info if isinstance(party, Party) else party
        if info is None or not self.blueprints[info.architecture].random:
            return nullcontext()
        return seeded(self.seed, purpose, self.round, info.id)

    def initialized(self, purpose: str, build: Callable[[], nn.Module]) -> nn.Module:
        """Build a side model from its own seed, the same for all parties that use the same purpose."""
        with seeded(self.seed, f"init/{purpose}"):
            return build().to(self.device)

    def run(self, stage: Stage, party: Party | Mapping[str, nn.Module], name: str = "server") -> Trained:
        """Run a stage here and now (the server's own training inside `fuse`) and return what it tells.

        `party` is the server, or just the networks to train, by the names that the stage's losses know them by.
        """
        assert self.run_stage is not None
        if not isinstance(party, Party):
            models, party = party, Party(SERVER, None, PartyData())
            party.models.update(models)
        return self.run_stage(stage, party, name)

    def log(self, name: str, value: float | int | str | list[Any] | dict[str, Any]) -> None:
        """Put a value of the method into this round's line of the history."""
        self.records[name] = value


def state_of(module: nn.Module, buffers: bool = True) -> State:
    """Return a detached view of a module's tensors by name."""
    if buffers:
        return {name: tensor.detach() for name, tensor in module.state_dict().items()}
    return {name: tensor.detach() for name, tensor in module.named_parameters()}


def shared_state(model: nn.Module) -> State:
    """Return what training makes of a network: parameters that are not frozen and float buffers, no integers."""
    frozen = frozen_names(model)
    return {n: tensor for n, tensor in state_of(model).items() if tensor.is_floating_point() and n not in frozen}


def cloned(state: Mapping[str, Tensor]) -> State:
    """Return a state in tensors of its own: what training moves later does not change it."""
    return {name: tensor.clone() for name, tensor in state.items()}


def remembered(party: Party, name: str, like: Mapping[str, Tensor]) -> State:
    """Return a state that a party keeps under a name, where the given tensors are: zeros until there is one."""
    kept: State = party.memory.get(name, {})
    return {n: kept[n].to(t.device) if n in kept else torch.zeros_like(t) for n, t in like.items()}


def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy the given tensors into the module; names that it does not have are an error."""
    fill(module.state_dict(), state)


@torch.no_grad()
def fill(state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy the given tensors into those of the same names."""
    if values:
        torch._foreach_copy_([state[name] for name in values], list(values.values()))
