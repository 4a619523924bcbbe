"""How a run is done, whatever the method: each setting is written down here, once.

The command line, TOML files, `config.json`, a resume and the report all use these fields (see `polyfed.config`).
Nothing here needs torch, so that `polyfed --help` answers at once.
"""

from __future__ import annotations

import re
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
    setting,
    split_names,
)
from polyfed.core.privacy import Privacy
from polyfed.core.trust import Trust

if TYPE_CHECKING:
    import torch

    from polyfed.core.party import ClientInfo


def check_augmentation(text: str) -> None:
    """Refuse what is neither `crop:N`, `flip` nor both joined by `+`."""
    if not re.fullmatch(r"flip|crop:[1-9]\d*(\+flip)?|flip\+crop:[1-9]\d*", text):
        raise InputError(f"training: augment is 'crop:N', 'flip' or 'crop:N+flip', not '{text}'.")


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
    schedule
        `constant`, or `cosine`: over the run's rounds the learning rate falls to zero along half a wave.
    milestones, milestone_decay
        After each of these rounds the learning rate is multiplied by `milestone_decay`.
    warm_up
        In so many first rounds the learning rate rises in equal steps to its full value.
    augment
        Random changes of a client's own images while it trains: `crop:4` (shifts by up to four pixels), `flip`
        (mirrored), `crop:4+flip`.
    """

    epochs: AtLeastOne = setting(1)
    batch_size: AtLeastOne = setting(32)
    optimizer: OptimizerName = setting("sgd")
    lr: Positive = setting(0.05)
    momentum: PartShare = setting(0.0)
    weight_decay: NotNegative = 0.0
    clip: Positive | None = None
    decay: Positive = 1.0
    decay_every: AtLeastOne = 1
    round_decay: Positive = 1.0
    schedule: Literal["constant", "cosine"] = "constant"
    milestones: tuple[AtLeastOne, ...] = ()
    milestone_decay: Positive = 0.1
    warm_up: Count = 0
    augment: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "training")
        if self.augment is not None:
            check_augmentation(self.augment)

    @property
    def is_plain(self) -> bool:
        """Whether a step is the learning rate times the gradient and nothing else."""
        other = self.momentum or self.weight_decay or self.clip is not None
        return self.optimizer == "sgd" and not other


def training_of(options: object, prefix: str, run: Training, **more: Any) -> Training:
    """Return how a method trains beside the run's own training, by its fields `PREFIX_lr`, `PREFIX_batch` and so on.

    A learning rate or batch size of None is the run's; everything else that has no field is Training's default.
    """
    names = {"batch": "batch_size"} | {name: name for name in ("lr", "optimizer", "momentum", "weight_decay", "clip")}
    own = {name: getattr(options, f"{prefix}_{field}", None) for field, name in names.items()}
    told = {name: value for name, value in own.items() if value is not None}
    return Training(**({"lr": run.lr, "batch_size": run.batch_size} | told | more))


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

    share: SomeShare = setting(1.0, short="participation")
    dropout: PartShare = 0.0
    who: Literal["random", "weakest"] = setting("random", short="drop", option=False)

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
        places = torch.randperm(len(ids), generator=rng)[:wanted].tolist()  # of a million the others cost nothing more
        chosen = [ids[place] for place in places]
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
    metrics
        What to measure beside the score of the task, by name: a,b,c (none given: the task's own).
    patience
        Stop after so many rounds without a better result on the clients' validation data (none: all rounds are run).
    """

    every: Count = setting(1, short="evaluate")
    clients: AtLeastOne | None = setting(None, short="evaluate_clients")
    samples: AtLeastOne | None = setting(None, short="evaluate_samples")
    metrics: tuple[str, ...] = setting(())
    patience: AtLeastOne | None = setting(None)

    def __post_init__(self) -> None:
        every: Any = self.every
        if isinstance(every, str):
            text = every.strip().removeprefix("every=")
            if text != "end" and not text.isdigit():
                raise InputError(f"evaluate is 'every=N' or 'end', not '{every}'.")
            object.__setattr__(self, "every", 0 if text == "end" else int(text))
        metrics: Any = self.metrics
        if isinstance(metrics, str):
            object.__setattr__(self, "metrics", split_names(metrics))
        check_fields(self, "evaluation")


@dataclass(frozen=True)
class Execution:
    """How clients share the machine. Workers and checkpoints never change a result; an engine changes its last digits.

    Attributes
    ----------
    engine
        `auto`, small networks as stacks, all others on threads; `threads`, whole clients on threads;
        `sequential`; `batched`, clients of one architecture as one stack wherever possible; `flower`, the apps of a
        real federation in Flower's simulation.
    workers
        Threads that train clients (by default as many as torch uses).
    device
        Where active clients compute: `cpu`, `cuda`, or `auto`, a GPU if there is one.
    checkpoint_seconds
        At least so long between two checkpoints; 0: one after every round.
    """

    engine: Literal["auto", "sequential", "threads", "batched", "flower"] = setting("auto")
    workers: AtLeastOne | None = setting(None)
    device: str = setting("cpu")
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
    trust: Trust = field(default_factory=Trust)
    privacy: Privacy = field(default_factory=Privacy)

    def __post_init__(self) -> None:
        check_fields(self, "run")
