"""Stacks of fully connected networks, by hand: a few batched matrix products for each step instead of autograd.

The forward and backward passes of all clients' layers are written out, and the update is folded into the product that
makes the gradient. Only the loss itself is differentiated by torch, with respect to the network's outputs: any loss
that calls the whole network, or its features and its head, on the batch can be run this way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyfed.core.stage import Sums
from polyfed.engines.cut import CutProgram, NotCut
from polyfed.engines.stack import Program
from polyfed.engines.stackdata import StackedBatch
from polyfed.engines.steps import Selection, Sgd
from polyfed.models.mlp import MLP
from polyfed.models.project import Projected
from polyfed.models.width import Scaler

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
relu_backward = torch.ops.aten.threshold_backward.default  # what torch's own gradient of a ReLU calls


def is_perceptron(module: nn.Module) -> bool:
    """Tell whether a network consists of linear layers and functions of single values."""
    leaves = [part for part in module.modules() if not any(True for _ in part.children())]
    weights = sum(parameter.numel() for parameter in module.parameters())
    known = sum(p.numel() for part in leaves for p in part.parameters())  # a network may have parameters of its own
    return weights == known and all(type(part) in EXACT or not any(True for _ in part.parameters()) for part in leaves)


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


class DenseProgram(CutProgram):
    """A program whose one network is a perceptron."""

    chain: list[Layer]
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
        try:
            dense.look()
        except NotCut:
            return None
        uses = dense.uses[0, 0]
        if uses is not None and not uses.logits:  # the head has no gradient: the optimizer must leave it alone
            return None
        return dense

    def outputs(self, params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits, `[clients, batch, units]`."""
        *_, features, logits = self.forward(params, x)
        return features, logits

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
        found = self.loss_gradients(0, 0, activations[-2], activations[-1], params, batch)
        delta = found.logits
        moved = self.moved[0]["main"]
        grads: dict[str, Tensor] = {}  # those that the optimizer wants to have whole
        for place in reversed(range(len(self.chain))):
            layer, inputs = self.chain[place], activations[place]
            weight = params[layer.weight]
            before = torch.bmm(delta, weight) if place > self.lowest else None  # with the weights of this step
            if layer.weight in moved:
                self.move(layer.weight, weight, delta.mT, inputs, selection, rate, found.params, grads)
            if layer.bias is not None and layer.bias in moved:
                self.move(layer.bias, params[layer.bias], None, delta.sum(1), selection, rate, found.params, grads)
            if before is None:
                break
            if place == len(self.chain) - 1 and found.features is not None:
                before += found.features
            delta = relu_backward(before, inputs, 0) if self.chain[place - 1].relu else before
        if grads:
            chosen = {"main": {name: params[name] for name in grads}}
            self.optimizers[0].step(chosen, {"main": grads}, selection, rate, None)
        selection.put(self.params, {"main": params})
        return found.values, found.sums

    def move(
        self,
        name: str,
        parameter: Tensor,
        left: Tensor | None,
        right: Tensor,
        selection: Selection,
        rate: float,
        of_params: dict[str, Tensor] | None,
        grads: dict[str, Tensor],
    ) -> None:
        """Move a parameter along `left @ right` or `right` (its gradient through the network) and the loss's own.

        Adam moves all parameters at once: for it the gradient is noted in `grads`.
        """
        optimizer, training = self.optimizers[0], self.optimizers[0].training
        direct = of_params[name] if of_params is not None else None
        if l1 := self.updates[0].l1:
            direct = parameter.sign().mul_(l1) if direct is None else direct.add(parameter.sign(), alpha=l1)
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
            grads[name] = grad
