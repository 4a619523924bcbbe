"""Perceptrons as stacks, everything else as whole clients on threads: a rule that depends on the networks alone.

Why this rule (measurements: `python -m benchmarks.rule`, `results/bench/rule.json`; decision 0016):

- A step of a perceptron costs little arithmetic and much overhead; stacked, it is up to 25 times as fast for a client.
  Convolutions on a CPU are bound by arithmetic: only small ones on tiny images, or with tiny batches, gain.
- A batched matrix product computes each client's matrix as if it were alone, so the numbers of a stack of perceptrons
  do not depend on who shares it: not on the number of workers, of ranks, or of clients that take part. Convolutions of
  several clients are one grouped convolution, whose rounding does depend on it.

So a client's results are the same on every run, for any number of workers, and after a resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from polyfed.core.message import Message
from polyfed.core.method import Replies, Step
from polyfed.core.party import Blueprint, Context
from polyfed.engines.batched import Batched, Job
from polyfed.engines.work import STACK, WHOLE

if TYPE_CHECKING:
    from polyfed.engines.inprocess import InProcess

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


class Auto(Batched):
    """Stacks clients with perceptrons, also a lone one; lets all others work whole."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked: dict[str, bool] = {}  # architecture -> what the rule says
        self.seen: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # modules serve round after round

    def works_whole(self, step: Step, blueprint: Blueprint) -> bool:
        """Let every client work whole whose network is no perceptron."""
        return super().works_whole(step, blueprint) or not self.stacks(blueprint)

    def stacks(self, blueprint: Blueprint) -> bool:
        """Tell what the rule says about an architecture."""
        if blueprint.name not in self.stacked:
            assert blueprint.build is not None
            alone = blueprint.random or "learner" in blueprint.properties
            self.stacked[blueprint.name] = not alone and is_perceptron(blueprint.build())
        return self.stacked[blueprint.name]

    def groups(self, blueprints: Mapping[str, Blueprint]) -> dict[str, str]:
        """Return how clients of each architecture work: as a stack, or whole."""
        return {name: STACK if self.stacks(blueprint) else WHOLE for name, blueprint in sorted(blueprints.items())}

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
