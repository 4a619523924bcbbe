"""Perceptrons as stacks, everything else as whole clients on threads: a rule that depends on the experiment alone.

Why this rule (measurements: `python -m benchmarks.rule`, `results/bench/rule.json`; decision 0016):

- A step of a perceptron costs little arithmetic and much overhead; stacked, it is up to 25 times as fast for a client.
  Convolutions on a CPU are bound by arithmetic: only small ones on tiny images, or with tiny batches, gain.
- A batched matrix product computes each client's matrix as if it were alone, so the numbers of a stack of perceptrons
  do not depend on who shares it: not on the number of workers, of ranks, or of clients that take part. Convolutions of
  several clients are one grouped convolution, whose rounding does depend on it.
- Clients take a step of a stack together when their batches have the same size. Where most last batches have a size of
  their own, as with small clients of unequal sizes, a stack is many lone steps, which cost more than whole clients do:
  perceptrons are stacked where, by the sizes of all clients, the batch size and the participation, at least three share
  a step on average.

So a client's results are the same on every run, for any number of workers, and after a resume.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from polyfed.core.message import Message
from polyfed.core.method import Replies, Step
from polyfed.core.party import Blueprint, ClientInfo, Context
from polyfed.engines.batched import Batched, Job
from polyfed.engines.work import STACK, WHOLE

if TYPE_CHECKING:
    from polyfed.engines.inprocess import InProcess

SHARED = 3  # clients that take a step together on average: with fewer, whole clients are as fast or faster
EXACT = (  # layers whose stacks give every client the numbers that it would have alone in one
    nn.Linear,
    nn.Flatten,
    nn.Identity,
    nn.Dropout,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
)


def is_perceptron(module: nn.Module) -> bool:
    """Tell whether a network consists of linear layers and functions of single values."""
    leaves = [part for part in module.modules() if not any(True for _ in part.children())]
    weights = sum(parameter.numel() for parameter in module.parameters())
    known = sum(p.numel() for part in leaves for p in part.parameters())  # a network may have parameters of its own
    return weights == known and all(type(part) in EXACT or not any(True for _ in part.parameters()) for part in leaves)


def sharing(samples: Sequence[int], batch_size: int, share: float) -> float:
    """Return how many clients take a step of a stack together, on average over the steps of an epoch.

    The i-th full batch is one step for all who have so many; last batches of one size are another. A step that `c`
    clients have is taken by `share * c` of them, and by nobody in a fraction `(1 - share)^c` of the rounds.

    Examples
    --------
    >>> sharing([64, 64, 64], 32, 1.0)  # two steps of three clients
    3.0
    >>> sharing([40, 50, 60], 32, 1.0)  # one of three, and three lone ones
    1.5
    """
    full = Counter(number // batch_size for number in samples)
    steps = [count for rest, count in Counter(number % batch_size for number in samples).items() if rest]
    having = 0
    for most in sorted(full, reverse=True):  # all who have at least so many full batches
        having += full[most]
        below = max((fewer for fewer in full if fewer < most), default=0)
        steps += [having] * (most - below)
    taken = sum(1 - (1 - share) ** count for count in steps)
    return sum(share * count for count in steps) / taken if taken else 0.0


class Auto(Batched):
    """Stacks clients with perceptrons that share their steps, also a lone one of them; lets all others work whole."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked: dict[str, bool] = {}  # architecture -> what the rule says
        self.seen: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # modules serve round after round

    def works_whole(self, step: Step, blueprint: Blueprint) -> bool:
        """Let every client work whole for whose architecture the rule says so."""
        return super().works_whole(step, blueprint) or not self.stacked[blueprint.name]

    def choose(
        self, blueprints: Mapping[str, Blueprint], infos: Mapping[int, ClientInfo], batch_size: int, share: float
    ) -> None:
        """Apply the rule to all clients of a federation, of which a share takes part in a round."""
        samples: dict[str, list[int]] = {name: [] for name in blueprints}
        for info in infos.values():
            samples[info.architecture].append(info.samples)
        for name, blueprint in blueprints.items():
            alone = blueprint.random or "learner" in blueprint.properties
            gains = not alone and sharing(samples[name], batch_size, share) >= SHARED
            assert blueprint.build is not None
            self.stacked[name] = gains and is_perceptron(blueprint.build())

    def groups(self) -> dict[str, str]:
        """Return how clients of each architecture work: as a stack, or whole."""
        return {name: STACK if stacked else WHOLE for name, stacked in sorted(self.stacked.items())}

    def by_stages(self, backend: InProcess, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Let all clients work from stage to stage; what an earlier run had trained already is told."""
        replies = super().by_stages(backend, step, messages, ctx)
        if backend.known is not None:
            replies.saved = backend.known.take_saved() / backend.pool.workers
        return replies

    def run_stages(self, backend: InProcess, step: Step, jobs: Sequence[Job], ctx: Context) -> None:
        """Run the pending stages, but those that an earlier run of a comparison has run: their numbers are the same."""
        known = backend.known
        if known is None:
            super().run_stages(backend, step, jobs, ctx)
            return
        keys, new = {}, []
        for job in jobs:
            assert job.stage is not None and job.party is not None
            keys[job.client] = known.key(job.stage, job.party, ctx, job.name(step))
            found = known.recall(keys[job.client], job.party)
            if found is None:
                new.append((job, job.seconds))
            else:
                job.trained = found
        super().run_stages(backend, step, [job for job, _ in new], ctx)
        for job, before in new:
            assert job.party is not None
            if job.error is not None:
                continue
            known.keep(keys[job.client], job.party, job.trained, job.seconds - before)

    def stackable(self, backend: InProcess, kind: Any, group: Sequence[Job], step: Step, ctx: Context) -> bool:
        """Tell whether a group is to be stacked: a stack of one gives the numbers of a larger one."""
        party = group[0].party
        assert party is not None
        for module in party.models.values():  # a side model may be none
            if module not in self.seen:
                self.seen[module] = is_perceptron(module)
            if not self.seen[module]:
                return False
        return self.possible(backend, kind, list(group), step, ctx)
