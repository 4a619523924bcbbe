"""Last layers by themselves: where they are in a network, and their training on features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.message import State
from polyfed.core.party import Blueprint, Context, fill, load_state, state_of
from polyfed.core.samples import Samples
from polyfed.core.settings import training_of
from polyfed.core.stage import Aux, Batch, Stage, Trained
from polyfed.ops.aggregate import IndexMap, Slot


def linear_head(blueprint: Blueprint) -> IndexMap | None:
    """Return the names of the last layer's weight and bias, under these keys; None where they are not to be found."""
    shapes, classes = blueprint.shapes, blueprint.num_classes
    for name in reversed(shapes):
        module, _, kind = name.rpartition(".")
        bias = f"{module}.bias".removeprefix(".")
        if kind == "weight" and shapes[name] == (classes, blueprint.feature_dim) and shapes.get(bias) == (classes,):
            return {name: Slot("weight"), bias: Slot("bias")}
    return None


def head_misfit(blueprints: Mapping[str, Blueprint]) -> str | None:
    """Return what is missing where a head is to be trained or replaced by itself, in words; None if nothing is."""
    for name, blueprint in blueprints.items():
        head = linear_head(blueprint)
        if head is None or head.keys() & blueprint.frozen:
            return f"networks that end in a linear layer with a bias, free to be trained, but {name} does not"
    return None


def head_names(blueprint: Blueprint) -> tuple[str, ...]:
    """Return the names of the last layer's weight and bias."""
    return tuple(linear_head(blueprint) or ())


def head_of(state: State, blueprint: Blueprint) -> State:
    """Return the last layer's weight and bias out of a state, by their names in the network."""
    return {name: state[name] for name in head_names(blueprint)}


class Head(nn.Linear):
    """A last layer as a network of its own, whose inputs are features."""

    def head(self, z: Tensor) -> Tensor:
        """Return the logits of features."""
        return self(z)  # type: ignore[no-any-return]


def head_loss(nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
    """Return the cross-entropy of a head's answers to features: of a whole network's, or of one by itself."""
    return F.cross_entropy(nets["main"].head(batch.x), batch.y)


def head_stage(
    options: object, prefix: str, data: Samples, ctx: Context, names: tuple[str, ...] | None = None
) -> Stage:
    """Return the training of a head on features, made of what was received, as the fields of a method say.

    The fields are `PREFIX_epochs` and those of `training_of`: `PREFIX_lr`, `PREFIX_batch`, ... `names` are those of the
    head inside a whole network; without them it is one by itself.
    """
    return Stage(
        head_loss,
        trainable={"main": names},
        data=data,
        received=True,
        epochs=getattr(options, f"{prefix}_epochs"),
        training=training_of(options, prefix, ctx.training),
    )


def train_head(head: State, stage: Stage, ctx: Context, name: str) -> Trained:
    """Train, at the server, a head that is given by its weight and bias; they get what was learned."""
    weight, bias = head.values()
    module = Head(weight.shape[1], len(bias)).to(ctx.device, weight.dtype)
    load_state(module, {"weight": weight, "bias": bias})
    trained = ctx.run(stage, {"main": module}, name)
    fill(head, dict(zip(head, state_of(module).values(), strict=True)))
    return trained
