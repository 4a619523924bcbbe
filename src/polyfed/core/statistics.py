"""BatchNorm statistics: collected again over some samples, or compared with those of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.layout import channels_last
from polyfed.core.samples import Samples
from polyfed.core.stage import split_batches


@torch.no_grad()
def collect_statistics(model: nn.Module, data: Samples, batch_size: int) -> int:
    """Replace running statistics by the arithmetic mean over batches (momentum None); return the number of batches.

    All other layers are in prediction mode: the statistics are used there, and an active scaler or dropout would change
    what the norms see. A last sample alone joins the batch before it; a batch of one sample holds it twice.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momentum = [norm.momentum for norm in norms]
    device = next((parameter.device for parameter in model.parameters()), data.x.device)
    batches = split_batches(torch.arange(len(data)), batch_size, join_single=True)
    with channels_last({"main": model}, tuple(data.x.shape[1:])):
        model.eval()
        for norm in norms:
            norm.train()
            norm.reset_running_stats()
            norm.momentum = None
        for positions in batches:
            x = data.inputs(positions).to(device)
            model(x if len(x) > 1 else torch.cat([x, x]))
    for norm, value in zip(norms, momentum, strict=True):
        norm.momentum = value
    model.train()
    return len(batches)


@contextmanager
def distances_to_statistics(networks: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect, at every pass in the block, how far inputs of BatchNorm layers are from the running statistics.

    One number for each layer: the distance of the means, and that of the variances.
    """
    found: list[Tensor] = []

    def look(norm: Any, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        axes = [0, *range(2, x.dim())]  # all but the channels
        found.append((x.mean(axes) - norm.running_mean).norm() + (x.var(axes, correction=0) - norm.running_var).norm())

    norms = [m for net in networks for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    hooks = [norm.register_forward_pre_hook(look) for norm in norms]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
