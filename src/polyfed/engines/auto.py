"""Small networks as stacks, everything else as whole clients on threads: a rule that depends on the experiment alone.

Why this rule (measurements: `python -m benchmarks.rule`, `results/bench/rule.json`; decision 0016):

- A step of a perceptron costs little arithmetic and much overhead; stacked, it is up to 19 times as fast for a client.
  Convolutions of small images gain as well, up to 8 times; how much follows from the numbers that a convolution
  unfolds in a step (`convolutions.py`). Larger ones are bound by arithmetic, and oneDNN knows better ways.
- A batched matrix product computes each client's matrix as if it were alone, so the numbers of such a stack do not
  depend on who shares it: not on the number of workers, of ranks, or of clients that take part. What would run under
  `vmap` and has convolutions works one by one instead: its rounding does depend on it.
- Clients take a step of a stack together when their batches have the same size. Where most last batches have a size of
  their own, as with small clients of unequal sizes, a stack is many lone steps. How many share a step on average
  follows from the sizes of all clients, the batch size and the participation.
- Cross-entropy of perceptrons and convolutional networks of the zoo is differentiated by hand: perceptrons gain from it
  even alone, convolutions from two clients on. Anything else goes through `vmap`, whose bookkeeping is worth it from
  about six clients on; with fewer, clients are stacked in stages of such plain training only.

So a client's results are the same on every run, for any number of workers, and after a resume.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from polyfed.core.message import Message
from polyfed.core.method import Replies, Step
from polyfed.core.party import Blueprint, ClientInfo, Context
from polyfed.core.products import warn_unless_exact
from polyfed.engines.batched import Batched, Job
from polyfed.engines.convolutions import is_small
from polyfed.engines.dense import is_perceptron
from polyfed.engines.work import PLAIN, STACK, WHOLE

if TYPE_CHECKING:
    from polyfed.engines.inprocess import InProcess

# Clients that take a step together on average, from which on a stack is faster than whole clients.
PERCEPTRONS, CONVOLUTIONS = 1, 2  # while their loss is plain cross-entropy
OTHERS = 6  # with any other loss


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


def way_of(module: nn.Module, input_shape: tuple[int, ...], shared: float, batch_size: int) -> str:
    """Return how clients of a network work fastest, if so many share a step on average: `stack`, `plain`, `whole`."""
    if is_perceptron(module):
        needed = PERCEPTRONS
    elif is_small(module, input_shape, batch_size):
        needed = CONVOLUTIONS
    else:
        return WHOLE
    shared = round(shared, 6)  # a sum of powers: never by its last digits
    return STACK if shared >= OTHERS else PLAIN if shared >= needed else WHOLE


class Auto(Batched):
    """Stacks clients that gain from it, also a lone one of them; lets all others work whole."""

    exact = True

    def __init__(self) -> None:
        super().__init__()
        self.ways: dict[str, str] = {}  # architecture -> what the rule says

    def works_whole(self, step: Step, blueprint: Blueprint) -> bool:
        """Let every client work whole for whose architecture the rule says so."""
        return super().works_whole(step, blueprint) or self.ways[blueprint.name] == WHOLE

    def choose(
        self,
        blueprints: Mapping[str, Blueprint],
        infos: Mapping[int, ClientInfo],
        batch_size: int,
        share: float,
        input_shape: tuple[int, ...],
    ) -> None:
        """Apply the rule to all clients of a federation, of which a share takes part in a round."""
        samples: dict[str, list[int]] = {name: [] for name in blueprints}
        for info in infos.values():
            samples[info.architecture].append(info.samples)
        for name, blueprint in blueprints.items():
            alone = blueprint.random or "learner" in blueprint.properties
            assert blueprint.build is not None
            shared = sharing(samples[name], batch_size, share)
            self.ways[name] = WHOLE if alone else way_of(blueprint.build(), input_shape, shared, batch_size)
        if any(way != WHOLE for way in self.ways.values()):
            warn_unless_exact()

    def groups(self) -> dict[str, str]:
        """Return how clients of each architecture work: as a stack, as one in plain training only, or whole."""
        return dict(sorted(self.ways.items()))

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
            assert job.stage is not None and job.party is not None and job.party.info is not None
            way = self.ways[job.party.info.architecture]  # stacked or not: the last digits differ
            keys[job.client] = known.key(job.stage, job.party, ctx, f"{way} {job.name(step)}")
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

    def stackable(self, backend: InProcess, kind: Any, group: list[Job], step: Step, ctx: Context) -> bool:
        """Tell whether a group is to be stacked: a stack of one gives the numbers of a larger one."""
        return self.possible(backend, kind, group, step, ctx)

    def only_plain(self, job: Job) -> bool:
        """Tell whether too few clients of an architecture share a step for losses other than cross-entropy."""
        assert job.party is not None and job.party.info is not None
        return self.ways[job.party.info.architecture] == PLAIN
