"""Perceptrons side by side as one block-diagonal network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from polyfed.core.errors import InputError
from polyfed.fusion.chain import sample_inputs, weight_layers
from polyfed.fusion.checks import check_networks
from polyfed.ops.selection import top_k_scores


def fuse_blockdiag(
    models: Sequence[nn.Module],
    k: int | None = 1,
    activation: Callable[[Tensor], Tensor] = torch.relu,
    input_shape: Sequence[int] | None = None,
) -> BlockNetwork:
    """Join perceptrons of equal depth into one block-diagonal network; k None sums its last blocks (AMS-full).

    Raises
    ------
    InputError
        If the networks are not perceptrons of one depth with this activation.
    """
    models = list(models)
    check_networks(models)
    for place, model in enumerate(models):
        for name, layer in model.named_modules():
            if not isinstance(layer, nn.Linear) and next(layer.parameters(recurse=False), None) is not None:
                raise InputError(
                    "The block-diagonal form is not applicable: it needs fully connected networks of one depth, but "
                    f"layer '{name}' of network {place} is a {type(layer).__name__}."
                )
    layers = [weight_layers(model) for model in models]
    if len({len(own) for own in layers}) > 1:
        raise InputError("The block-diagonal form is not applicable: it needs fully connected networks of one depth.")
    weights = [[layer.weight.detach() for _, layer in own] for own in layers]
    biases = [[None if layer.bias is None else layer.bias.detach() for _, layer in own] for own in layers]
    joined = BlockNetwork(weights, biases, k, activation).eval()
    x = sample_inputs(models[0], input_shape)
    with torch.no_grad():
        expected = torch.stack([copy.deepcopy(model).eval()(x) for model in models])
        if not torch.allclose(joined.logits(x), expected, rtol=1e-4, atol=1e-4):
            raise InputError(
                "The block-diagonal form is not applicable: the networks do something else between their layers than "
                "the given activation."
            )
    return joined


class BlockNetwork(nn.Module):
    """Several perceptrons of one depth as one: stacked first layers, then block-diagonal ones.

    Nothing mixes before the end: the last layer keeps its J blocks apart. It shows what AMS does; it is no faster.
    """

    def __init__(
        self,
        weights: Sequence[Sequence[Tensor]],
        biases: Sequence[Sequence[Tensor | None]],
        k: int | None,
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.k = k
        self.activation = activation
        self.count = len(weights)
        self.layers = nn.ModuleList()
        for place in range(len(weights[0])):
            blocks = [own[place] for own in weights]
            joined = torch.cat(blocks) if place == 0 else torch.block_diag(*blocks)
            parts = [own[place] for own in biases]
            with_bias = any(part is not None for part in parts)
            layer = nn.Linear(joined.shape[1], joined.shape[0], bias=with_bias)
            layer.weight = nn.Parameter(joined.clone())
            if with_bias:
                zeros = [block.new_zeros(len(block)) for block in blocks]
                layer.bias = nn.Parameter(
                    torch.cat([zero if part is None else part for part, zero in zip(parts, zeros, strict=True)])
                )
            self.layers.append(layer)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of all networks, `[J, B, C]`."""
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        x = self.layers[-1](x)
        return x.reshape(len(x), self.count, -1).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores, `[B, C]`."""
        return top_k_scores(self.logits(x), self.k)
