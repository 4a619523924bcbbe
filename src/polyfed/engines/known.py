"""Training that several runs of a comparison begin with is done once.

All one-shot methods train the same networks on the same data, many others begin with the same plain epochs, and some
differ in what comes after the rounds only. A stage is a function of its start, data, settings and streams, so where all
of these are equal the result is, bit for bit.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from polyfed.core.learner import Learner
from polyfed.core.message import State
from polyfed.core.method import Method
from polyfed.core.party import Context, Party, fill
from polyfed.core.runner import run_stage
from polyfed.core.stage import Stage, Trained

BUDGET = 1 << 30  # bytes of networks that are remembered; those not asked for longest are forgotten


@dataclass(frozen=True)
class Known:
    """What a stage made of a client's networks, and what it took."""

    states: dict[str, State]
    trained: Trained
    seconds: float
    size: int


class KnownStages:
    """Remembers finished stages, for runs with one seed on the same data in one process.

    Plain training is remembered in the first round only: later ones hardly ever begin with equal networks.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self.budget = budget
        self.used = 0
        self.saved = 0.0  # seconds that were not needed again, since somebody last asked
        self._known: OrderedDict[bytes, Known] = OrderedDict()
        self._lock = Lock()

    def run(self, stage: Stage, party: Party, ctx: Context, name: str) -> Trained:
        """Run a stage, or recall what it made the last time."""
        key = self.key(stage, party, ctx, name)
        known = self.recall(key, party)
        if known is not None:
            return known
        start = time.perf_counter()
        trained = run_stage(stage, party, ctx, name)
        self.keep(key, party, trained, time.perf_counter() - start)
        return trained

    def recall(self, key: bytes | None, party: Party) -> Trained | None:
        """Give a client what the stage with this key made the last time; None: it must be run."""
        with self._lock:
            known = self._known.get(key) if key is not None else None
            if key is None or known is None:
                return None
            self._known.move_to_end(key)
            self.saved += known.seconds
        for model, state in known.states.items():
            fill(party.tensors(model), state)
        return known.trained

    def take_saved(self) -> float:
        """Return the seconds saved since the last call."""
        with self._lock:
            saved, self.saved = self.saved, 0.0
        return saved

    def key(self, stage: Stage, party: Party, ctx: Context, name: str) -> bytes | None:
        """Return what tells a stage from all others, or None where it depends on more than can be compared."""
        if ctx.privacy.on or not is_comparable(stage, ctx.round) or isinstance(party.models["main"], Learner):
            return None  # what a learner starts from is in its memory, and that it fitted before is known to itself
        data = stage.data if stage.data is not None else party.train
        digest = hashlib.blake2b(digest_size=16)
        settings = (stage.training or ctx.training, stage.epochs, stage.steps, stage.shuffle, stage.sum_gradients)
        place = (ctx.seed, ctx.round, ctx.rounds, ctx.phase, party.id, name, str(ctx.device), torch.get_default_dtype())
        kind = tuple((model, type(module).__qualname__) for model, module in party.models.items())
        samples = (data.x.data_ptr(), tuple(data.x.shape), data.y.data_ptr(), data.scaling, ctx.task)
        updates = tuple((len(u.losses), sorted(u.trainable.items()), u.training, u.l1) for u in stage.all_updates())
        leaves, spec = tree_flatten((dict(stage.aux), stage.columns))
        named = (stage.key, updates, tuple(stage.draws.items()), str(spec))
        digest.update(repr((named, settings, place, kind, samples)).encode())
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                digest.update(repr((tuple(leaf.shape), leaf.dtype)).encode())
                _add(digest, leaf)
            else:
                digest.update(repr(leaf).encode())
        if data.index is not None:
            _add(digest, data.index)
        for model in party.models:
            for tensor_name, tensor in party.tensors(model).items():
                digest.update(tensor_name.encode())
                _add(digest, tensor)
        return digest.digest()

    def keep(self, key: bytes | None, party: Party, trained: Trained, seconds: float) -> None:
        """Remember what a stage made of a client's networks."""
        if key is None:
            return
        states = {model: {n: t.clone() for n, t in party.tensors(model).items()} for model in party.models}
        size = sum(t.numel() * t.element_size() for state in states.values() for t in state.values())
        with self._lock:
            self._known[key] = Known(states, trained, seconds, size)
            self.used += size
            while self.used > self.budget:
                _, oldest = self._known.popitem(last=False)
                self.used -= oldest.size


def is_comparable(stage: Stage, number: int) -> bool:
    """Tell whether a stage of a round is plain training on the task's loss, or one that its author named with `key`."""
    if stage.until or stage.rate_factor:
        return False
    if stage.key is not None:
        return number <= 1 or stage.data is None  # samples that were made may lie where others lay before
    plain = getattr(stage.loss, "__func__", None) is Method.loss and stage.gradients is None and stage.project is None
    return plain and number <= 1 and not (stage.updates or stage.columns or stage.aux or stage.draws)


def _add(digest: hashlib.blake2b, tensor: Tensor) -> None:
    digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
