"""BatchNorm statistics, collected again over some samples."""

from __future__ import annotations

import torch
from torch import nn

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
    device = next(model.parameters()).device
    model.eval()
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None
    batches = split_batches(torch.arange(len(data)), batch_size, join_single=True)
    for positions in batches:
        x = data.inputs(positions).to(device)
        model(x if len(x) > 1 else torch.cat([x, x]))
    for norm, value in zip(norms, momentum, strict=True):
        norm.momentum = value
    model.train()
    return len(batches)
