"""Stacks of fully connected networks, by hand: a few batched matrix products for each step instead of autograd.

The forward and backward passes of all clients' layers are written out, and the update is folded into the product that
makes the gradient. Only the loss itself is differentiated by torch, with respect to the network's outputs: any loss
that calls the whole network, or its features and its head, on the batch can be run this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from polyfed.core.method import Method
from polyfed.core.stage import Batch, Sums, split_loss
from polyfed.core.task import CLASSIFICATION
from polyfed.engines.stack import Program
from polyfed.engines.stackdata import StackedBatch
from polyfed.engines.steps import Selection, Sgd
from polyfed.models.mlp import MLP
from polyfed.models.project import Projected
from polyfed.models.width import Scaler

relu_backward = torch.ops.aten.threshold_backward.default  # what torch's own gradient of a ReLU calls


class NotCut(RuntimeError):
    """A loss uses the network in a way that only the whole network can answer."""


@dataclass(frozen=True)
class Layer:
    """A linear layer by the names of its tensors, with a ReLU behind it or not."""

    weight: str
    bias: str | None
    relu: bool


def chain_of(module: nn.Module) -> list[Layer] | None:
    """Return the layers of a plain perceptron (flatten, linear and ReLU only; the last is the head), or None."""
    if any(isinstance(part, Scaler) and part.active and part.rate != part.reference for part in module.modules()):
        return None
    if type(module) is MLP:
        hidden = ["stem.linear", *[f"layers.{number}.linear" for number in range(len(module.layers))]]
        return [_layer(module, name, True) for name in hidden] + [_layer(module, "head", False)]
    if type(module) is Projected and type(module.model) is MLP and module.kind == "linear":
        hidden = ["stem.linear", *[f"layers.{number}.linear" for number in range(len(module.model.layers))]]
        body = [_layer(module, f"model.{name}", True) for name in hidden]
        return [*body, _layer(module, "projection", False), _layer(module, "head", False)]
    return None


def _layer(module: nn.Module, name: str, relu: bool) -> Layer:
    linear = module.get_submodule(name)
    return Layer(f"{name}.weight", f"{name}.bias" if linear.bias is not None else None, relu)


def suits(program: Program) -> DenseProgram | None:
    """Return the program in its fast form, or None where it has none."""
    (update, *further) = program.updates
    if further or list(program.modules) != ["main"] or len(update.losses) > 1 or update.trainable != {"main": None}:
        return None
    training = update.training or program.training
    if update.gradients is not None or update.project is not None or training.clip is not None:
        return None
    if program.stage.sum_gradients:  # they are never formed here
        return None
    chain = chain_of(program.modules["main"])
    return None if chain is None else DenseProgram.over(program, chain)


def advance(tensor: Tensor, left: Tensor | None, right: Tensor, beta: float, alpha: float) -> None:
    """`tensor = beta * tensor + alpha * left @ right` in one pass; without `left`, the product is `right` itself."""
    if left is not None:
        tensor.baddbmm_(left, right, beta=beta, alpha=alpha)
    else:
        (tensor if beta == 1.0 else tensor.mul_(beta)).add_(right, alpha=alpha)


class DenseProgram(Program):
    """A program whose one network is a perceptron."""

    chain: list[Layer]
    plain: bool  # the loss is the cross-entropy of the whole network
    uses: dict[str, bool]
    lowest: int  # place in the chain of the first layer that moves

    @classmethod
    def over(cls, program: Program, chain: list[Layer]) -> DenseProgram | None:
        """Take over another program's data and states, if its loss can be cut at the network's outputs."""
        dense = cls.__new__(cls)
        dense.__dict__.update(program.__dict__)
        dense.chain = chain
        moved = dense.moved[0]["main"].keys()
        moving = [place for place, layer in enumerate(chain) if {layer.weight, layer.bias} & moved]
        dense.lowest = min(moving, default=0)
        loss = program.updates[0].losses[0]
        dense.plain = getattr(loss, "__func__", None) is Method.loss and program.ctx.task == CLASSIFICATION
        dense.uses = {"features": False, "logits": True, "params": False}
        if not dense.plain:
            try:
                dense._look()
            except NotCut:
                return None
            if not dense.uses["logits"]:  # the head has no gradient: the optimizer must leave it alone
                return None
        return dense

    def _look(self) -> None:
        """Call the loss once for the first client to see which outputs it uses."""
        selection = Selection([0], len(self.members))
        positions = [torch.arange(min(2, len(self.members[0].data)))]
        streams = [*self.draws, *self.changes]
        before = [stream.get_state() for stream in streams]
        x, y, columns = self.batch([0], positions)
        for stream, state in zip(streams, before, strict=True):  # looking must not use up a client's draws
            stream.set_state(state)
        activations = self.forward({name: t[:1] for name, t in self.params["main"].items()}, x)
        params = {name: tensor[0] for name, tensor in self.params["main"].items()}
        aux = self.first_aux(self.chosen_aux(selection))
        cut = Cut(x[0], activations[-2][0], activations[-1][0], params)
        batch = Batch(x[0], y[0], {k: c[0] for k, c in columns.items()}, self.ctx.task)
        self.updates[0].losses[0]({"main": cut}, batch, aux)
        self.uses = cut.used

    def forward(self, params: dict[str, Tensor], x: Tensor) -> list[Tensor]:
        """Return the input of every layer and the output of the last, `[clients, batch, units]`."""
        activations = [x.flatten(2)]
        for layer in self.chain:
            weight = params[layer.weight].mT
            if layer.bias is None:
                out = torch.bmm(activations[-1], weight)
            else:
                out = torch.baddbmm(params[layer.bias].unsqueeze(1), activations[-1], weight)
            activations.append(out.relu_() if layer.relu else out)
        return activations

    def update(self, number: int, batch: StackedBatch) -> tuple[Tensor, Sums]:
        """Take one optimizer step; return the clients' losses, and what the loss gave beside itself."""
        selection, rate = batch.selection, batch.rate
        params = selection.take(self.params)["main"]
        activations = self.forward(params, batch.x)
        values, sums, delta, of_features, of_params = self.loss_gradients(activations, params, batch)
        optimizer = self.optimizers[0]
        if not isinstance(optimizer, Sgd):
            optimizer.steps[selection.clients] += 1  # type: ignore[attr-defined]
        moved = self.moved[0]["main"]
        for place in reversed(range(len(self.chain))):
            layer, inputs = self.chain[place], activations[place]
            weight = params[layer.weight]
            before = torch.bmm(delta, weight) if place > self.lowest else None  # with the weights of this step
            if layer.weight in moved:
                self.move(layer.weight, weight, delta.mT, inputs, selection, rate, of_params)
            if layer.bias is not None and layer.bias in moved:
                self.move(layer.bias, params[layer.bias], None, delta.sum(1), selection, rate, of_params)
            if before is None:
                break
            if place == len(self.chain) - 1 and of_features is not None:
                before += of_features
            delta = relu_backward(before, inputs, 0) if self.chain[place - 1].relu else before
        selection.put(self.params, {"main": params})
        return values, sums

    def move(
        self,
        name: str,
        parameter: Tensor,
        left: Tensor | None,
        right: Tensor,
        selection: Selection,
        rate: float,
        of_params: dict[str, Tensor] | None,
    ) -> None:
        """Move a parameter along `left @ right` or `right` (its gradient through the network) and the loss's own."""
        optimizer, training = self.optimizers[0], self.optimizers[0].training
        direct = of_params[name] if of_params is not None else None
        key = ("main", name)
        if isinstance(optimizer, Sgd) and not optimizer.velocity:
            decay = 1 - rate * training.weight_decay
            if direct is not None:
                direct = direct.mul(-rate)
            advance(parameter, left, right, decay, -rate)
            if direct is not None:
                parameter.add_(direct)
        elif isinstance(optimizer, Sgd):
            kept = optimizer.velocity[key]
            velocity = selection.pick(kept)
            advance(velocity, left, right, training.momentum, 1.0)
            if direct is not None:
                velocity.add_(direct)
            if training.weight_decay:
                velocity.add_(parameter, alpha=training.weight_decay)
            selection.put_back(kept, velocity)
            parameter.add_(velocity, alpha=-rate)
        else:
            grad = right if left is None else torch.bmm(left, right)
            if direct is not None:
                grad.add_(direct)
            optimizer.move(key, parameter, grad, selection, rate)

    def loss_gradients(
        self, activations: Sequence[Tensor], params: dict[str, Tensor], batch: StackedBatch
    ) -> tuple[Tensor, Sums, Tensor, Tensor | None, dict[str, Tensor] | None]:
        """Return the losses, their sums, and their gradients by outputs, features and (directly) parameters."""
        logits = activations[-1]
        if self.plain:
            log_probabilities = torch.log_softmax(logits, 2)
            target = batch.y.unsqueeze(2)
            values = -log_probabilities.gather(2, target).squeeze(2).mean(1)
            delta = log_probabilities.exp_().scatter_(2, target, -1.0, reduce="add")
            return values, {}, delta.div_(logits.shape[1]), None, None
        outputs = {"logits": logits}
        if self.uses["features"]:
            outputs["features"] = activations[-2]
        used = params if self.uses["params"] else {}
        function, task = self.updates[0].losses[0], self.ctx.task

        def pure(outputs: Any, used: Any, features: Any, x: Any, y: Any, columns: Any, aux: Any) -> tuple[Tensor, Sums]:
            cut = Cut(x, outputs.get("features", features), outputs["logits"], used)
            return split_loss(function({"main": cut}, Batch(x, y, columns, task), aux))

        wanted = (0, 1) if used else (0,)
        taken = vmap(grad_and_value(pure, argnums=wanted, has_aux=True), in_dims=(0, 0, 0, 0, 0, 0, self.aux_dims))
        inputs = (batch.x, batch.y, batch.columns, batch.aux)
        grads, (values, sums) = taken(outputs, used, activations[-2], *inputs)
        return values.detach(), sums, grads[0]["logits"], grads[0].get("features"), grads[1] if used else None


class Cut:
    """A network that already knows its answers for the batch."""

    def __init__(self, x: Tensor, features: Tensor, logits: Tensor, params: dict[str, Tensor]) -> None:
        self._x, self._features, self._logits, self._params = x, features, logits, params
        self.used = {"features": False, "logits": False, "params": False}

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits of the batch."""
        self.used["logits"] = True
        return self._logits if x is self._x else self._refuse()

    def features(self, x: Tensor) -> Tensor:
        """Return the features of the batch."""
        self.used["features"] = True
        return self._features if x is self._x else self._refuse()

    def head(self, z: Tensor) -> Tensor:
        """Return the logits of the batch's features."""
        self.used["logits"] = True
        return self._logits if z is self._features else self._refuse()

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        self.used["params"] = True
        return self._params

    def still(self) -> Cut:
        """Return the same network: it has no running statistics."""
        return self

    def eval(self) -> Cut:
        """Return the same network: it predicts as it trains."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Refuse all else (its parts, its module, other tensors in it): only the outputs are known."""
        return self._refuse()

    @staticmethod
    def _refuse() -> Tensor:
        raise NotCut("the loss needs more of the network than its outputs")
