"""Stacks whose loss is cut off at the network's outputs: the loss is differentiated by itself, the network apart.

A loss that calls the whole network, or its features and its head, on the batch needs no more of the network than what
it said of that batch. So a stack can run the network in a way of its own (`dense.py`, `convolutions.py`), and only the
few numbers behind it go through `vmap`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from polyfed.core.method import Method
from polyfed.core.stage import Batch, Sums, split_loss
from polyfed.core.task import CLASSIFICATION
from polyfed.engines.stack import Program
from polyfed.engines.stackdata import StackedBatch
from polyfed.engines.steps import Selection


class NotCut(RuntimeError):
    """A loss uses the network in a way that only the whole network can answer."""


@dataclass
class Uses:
    """What a loss asks its network for."""

    features: bool = False
    logits: bool = False
    params: bool = False
    moving: bool = False  # a pass that moves running statistics


@dataclass
class OutputGradients:
    """Losses of a batch, what they gave beside themselves, and their gradients."""

    values: Tensor
    sums: Sums
    logits: Tensor
    features: Tensor | None = None
    params: dict[str, Tensor] | None = None  # of terms on the parameters themselves


class CutProgram(Program):
    """A program of one network that is asked for its outputs only."""

    uses: dict[tuple[int, int], Uses | None]  # of each loss of each update; None: cross-entropy of the whole network

    def outputs(self, params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits, `[clients, batch, ...]`, without moving anything."""
        raise NotImplementedError

    def is_plain(self) -> bool:
        """Tell whether nothing of it goes through `vmap`: cross-entropy of the whole network is all there is."""
        ways = (way for update in self.updates for way in (update.gradients, update.project))
        return all(uses is None for uses in self.uses.values()) and all(way is None for way in ways)

    def look(self) -> None:
        """See what each loss asks for; raises `NotCut` where that is more than outputs."""
        self.uses = {}
        for number, update in enumerate(self.updates):
            for place, loss in enumerate(update.losses):
                plain = getattr(loss, "__func__", None) is Method.loss and self.ctx.task == CLASSIFICATION
                self.uses[number, place] = None if plain else self._asked(loss)

    def _asked(self, loss: Any) -> Uses:
        """Call a loss once for the first client to see which outputs it uses."""
        selection = Selection([0], len(self.members))
        positions = [torch.arange(min(2, len(self.members[0].data)))]
        streams = [*self.draws, *self.changes]
        before = [stream.get_state() for stream in streams]
        x, y, columns = self.batch([0], positions)
        for stream, state in zip(streams, before, strict=True):  # looking must not use up a client's draws
            stream.set_state(state)
        params, buffers = ({n: t[:1] for n, t in tree["main"].items()} for tree in (self.params, self.buffers))
        features, logits = self.outputs(params, buffers, x)
        aux = self.first_aux(self.chosen_aux(selection))
        one = x[0]  # the same object in both: a loss asks about the batch by it
        cut = self.handle(one, features[0], logits[0], {name: tensor[0] for name, tensor in params.items()})
        batch = Batch(one, y[0], {k: c[0] for k, c in columns.items()}, self.ctx.task)
        loss({"main": cut}, batch, aux)
        return cut.used

    def handle(self, x: Tensor, features: Tensor, logits: Tensor, params: dict[str, Tensor]) -> Cut:
        """Return what a loss sees in place of the network."""
        return Cut(x, features, logits, params)

    def loss_gradients(
        self, number: int, place: int, features: Tensor, logits: Tensor, params: dict[str, Tensor], batch: StackedBatch
    ) -> OutputGradients:
        """Return the values of a loss, and its gradients by outputs, features and (directly) parameters."""
        uses = self.uses[number, place]
        if uses is None:
            log_probabilities = torch.log_softmax(logits, 2)
            target = batch.y.unsqueeze(2)
            values = -log_probabilities.gather(2, target).squeeze(2).mean(1)
            delta = log_probabilities.exp_().scatter_(2, target, -1.0, reduce="add")
            return OutputGradients(values, {}, delta.div_(logits.shape[1]))
        outputs = {"logits": logits}
        if uses.features:
            outputs["features"] = features
        used = params if uses.params else {}
        function, task = self.updates[number].losses[place], self.ctx.task

        def pure(outputs: Any, used: Any, features: Any, x: Any, y: Any, columns: Any, aux: Any) -> tuple[Tensor, Sums]:
            cut = self.handle(x, outputs.get("features", features), outputs["logits"], used)
            return split_loss(function({"main": cut}, Batch(x, y, columns, task), aux))

        wanted = (0, 1) if used else (0,)
        taken = vmap(grad_and_value(pure, argnums=wanted, has_aux=True), in_dims=(0, 0, 0, 0, 0, 0, self.aux_dims))
        grads, (values, sums) = taken(outputs, used, features, batch.x, batch.y, batch.columns, batch.aux)
        of_params = grads[1] if used else None
        return OutputGradients(values.detach(), sums, grads[0]["logits"], grads[0].get("features"), of_params)


class Cut:
    """A network that already knows its answers for the batch, and predicts as it trains."""

    def __init__(self, x: Tensor, features: Tensor, logits: Tensor, params: dict[str, Tensor]) -> None:
        self._x, self._features, self._logits, self._params = x, features, logits, params
        self.used = Uses()
        self._moves = True

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits of the batch."""
        self.used.logits = True
        self.used.moving |= self._moves
        return self._logits if x is self._x else self._refuse()

    def features(self, x: Tensor) -> Tensor:
        """Return the features of the batch."""
        self.used.features = True
        self.used.moving |= self._moves
        return self._features if x is self._x else self._refuse()

    def head(self, z: Tensor) -> Tensor:
        """Return the logits of the batch's features."""
        self.used.logits = True
        return self._logits if z is self._features else self._refuse()

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        self.used.params = True
        return self._params

    def still(self) -> Cut:
        """Return the same network, which answers the same and leaves running statistics alone."""
        twin = type(self)(self._x, self._features, self._logits, self._params)
        twin.used, twin._moves = self.used, False
        return twin

    def eval(self) -> Cut:
        """Return the same network: it predicts as it trains."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Refuse all else (its parts, its module, other tensors in it): only the outputs are known."""
        return self._refuse()

    @staticmethod
    def _refuse() -> Tensor:
        raise NotCut("the loss needs more of the network than its outputs")
