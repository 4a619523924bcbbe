"""How much memory one update needs, counted instead of estimated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.nets import Net
from polyfed.core.stage import Batch, Update, is_trainable


def update_memory(
    update: Update, models: Mapping[str, nn.Module], batch: Batch, aux: Mapping[str, Any]
) -> dict[str, int]:
    """Return the bytes that an update holds when its backward pass begins and ends.

    `parameters`: of all models; `gradients`: of the parameters that move; `activations`: what autograd keeps for the
    backward pass, each tensor once (parameters, buffers and the batch itself are not counted again); `total`.
    Optimiser state is left out: plain SGD has none, Adam has twice the gradients.
    The update is not carried out. Running statistics move as in any training pass. Models and batch may be on the
    device `meta`: nothing is calculated or held then, and the count is the same.
    """
    chosen = {
        key: [p for name, p in models[key].named_parameters() if p.requires_grad and is_trainable(name, prefixes)]
        for key, prefixes in update.trainable.items()
    }
    flags = [(p, p.requires_grad) for module in models.values() for p in module.parameters()]
    given: list[Any] = [batch.x, batch.y, *batch.columns.values(), *aux.values()]
    for module in models.values():
        module.requires_grad_(False)
        given += [*module.parameters(), *module.buffers()]
    known = {_storage(tensor) for tensor in given if isinstance(tensor, Tensor)}
    for group in chosen.values():
        for parameter in group:
            parameter.requires_grad_(True)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in known:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    nets = {key: Net(module) for key, module in models.items()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = [function(nets, batch, aux) for function in update.losses]  # alive, so that no address is used twice
    del losses
    for parameter, asked in flags:
        parameter.requires_grad_(asked)
    sizes = {
        "parameters": sum(_nbytes(p) for module in models.values() for p in module.parameters()),
        "gradients": sum(_nbytes(p) for group in chosen.values() for p in group),
        "activations": sum(kept.values()),
    }
    return {**sizes, "total": sum(sizes.values())}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # a storage, not its address: meta tensors have none


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
