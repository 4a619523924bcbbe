"""How a run is done, whatever the method: each setting is written down here, once.

The command line, TOML files, `config.json`, a resume and the report all use these fields (see `polyfed.config`).
Nothing here needs torch, so that `polyfed --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from polyfed.core.errors import InputError
from polyfed.core.fields import (
    AtLeastOne,
    Count,
    NotNegative,
    OptimizerName,
    PartShare,
    Positive,
    SomeShare,
    check_fields,
)

if TYPE_CHECKING:
    import torch

    from polyfed.core.party import ClientInfo


@dataclass(frozen=True)
class Training:
    """How a client trains when the method does not say otherwise.

    Attributes
    ----------
    epochs
        Local epochs in a round.
    batch_size
        Local batch size.
    optimizer
        The rule of a step.
    lr
        Learning rate.
    momentum
        Of sgd.
    weight_decay
        As torch's optimizers understand it.
    clip
        Limit of the gradient's norm.
    decay, decay_every
        The learning rate is multiplied by `decay` after every `decay_every` epochs of a stage.
    round_decay
        The learning rate is multiplied by this after every round.
    """

    epochs: AtLeastOne = 1
    batch_size: AtLeastOne = 32
    optimizer: OptimizerName = "sgd"
    lr: Positive = 0.05
    momentum: PartShare = 0.0
    weight_decay: NotNegative = 0.0
    clip: Positive | None = None
    decay: Positive = 1.0
    decay_every: AtLeastOne = 1
    round_decay: Positive = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "training")


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round.

    Attributes
    ----------
    share
        Share of the clients drawn at random for each round (at least one client).
    dropout
        Share of the clients that miss the round.
    who
        Who drops out: `random`, other clients each round; `weakest`, those with the smallest models, for good.
    """

    share: SomeShare = 1.0
    dropout: PartShare = 0.0
    who: Literal["random", "weakest"] = "random"

    def __post_init__(self) -> None:
        check_fields(self, "participation")

    def select(self, infos: Mapping[int, ClientInfo], rng: torch.Generator) -> tuple[int, ...]:
        """Return this round's participants in ascending order; never none."""
        import torch

        ids = sorted(infos)
        missing = min(round(self.dropout * len(ids)), len(ids) - 1)
        if missing and self.who == "weakest":
            by_size = sorted(ids, key=lambda i: (infos[i].parameters, i))
            ids = sorted(by_size[missing:])
            missing = 0
        wanted = max(1, round(self.share * len(infos)))
        order = [ids[i] for i in torch.randperm(len(ids), generator=rng).tolist()]
        chosen = order[: min(wanted, len(order))]
        # Those who drop out do so after they were drawn: the round goes on with the others.
        lost = min(round(self.dropout * len(chosen)), len(chosen) - 1) if missing else 0
        return tuple(sorted(chosen[: len(chosen) - lost]))


@dataclass(frozen=True)
class Evaluation:
    """When models are measured, and on how much; at the end always all of them on all samples.

    Attributes
    ----------
    every
        Measure after every so many rounds: `every=N` or N; `end` (or 0), only at the end.
    clients
        Before the end measure only so many clients, always the same.
    samples
        Before the end measure on so many test samples only, always the same.
    """

    every: Count = 1
    clients: AtLeastOne | None = None
    samples: AtLeastOne | None = None

    def __post_init__(self) -> None:
        every: Any = self.every
        if isinstance(every, str):
            text = every.strip().removeprefix("every=")
            if text != "end" and not text.isdigit():
                raise InputError(f"evaluate is 'every=N' or 'end', not '{every}'.")
            object.__setattr__(self, "every", 0 if text == "end" else int(text))
        check_fields(self, "evaluation")


@dataclass(frozen=True)
class Execution:
    """How clients share the machine. Workers and checkpoints never change a result; an engine changes its last digits.

    Attributes
    ----------
    engine
        `sequential`; `threads`, whole clients on several threads; `batched`, clients of one architecture as one stack;
        `auto`, whichever of the two is faster; `flower`, the apps of a real federation in Flower's simulation.
    workers
        Threads that train clients (by default as many as torch uses).
    device
        Where active clients compute: `cpu`, `cuda`, or `auto`, a GPU if there is one.
    checkpoint_seconds
        At least so long between two checkpoints; 0: one after every round.
    """

    engine: Literal["auto", "sequential", "threads", "batched", "flower"] = "threads"
    workers: AtLeastOne | None = None
    device: str = "cpu"
    checkpoint_seconds: NotNegative = 10.0

    def __post_init__(self) -> None:
        check_fields(self, "execution")


@dataclass(frozen=True)
class Settings:
    """All that a federation needs to know besides its method, models and data."""

    rounds: AtLeastOne
    seed: int = 0
    training: Training = field(default_factory=Training)
    participation: Participation = field(default_factory=Participation)
    evaluation: Evaluation = field(default_factory=Evaluation)
    execution: Execution = field(default_factory=Execution)

    def __post_init__(self) -> None:
        check_fields(self, "run")
