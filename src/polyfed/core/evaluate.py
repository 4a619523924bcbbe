"""Measure a party's predictions: inference mode, large batches."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from polyfed.core.backend import Measure
from polyfed.core.method import Method
from polyfed.core.nets import EVAL, mode
from polyfed.core.party import Context, Party
from polyfed.core.samples import Samples

CHUNK = 1024  # rows at once: large enough for full speed, small enough for the activations of a deep network


@torch.inference_mode()
def measure(method: Method, party: Party, data: Samples, ctx: Context) -> Measure:
    """Return accuracy and cross-entropy of a party's predictions on some samples.

    Scores beyond the clients' classes belong to classes of the public data: no sample is one of them.
    """
    right = private = 0
    further = False
    loss = 0.0
    modes = [mode(module, EVAL) for module in party.models.values()]
    for block in modes:
        block.__enter__()
    try:
        for x, y in data.chunks(CHUNK):
            scores = method.predict(party, x.to(ctx.device), ctx).float()
            target = y.to(ctx.device)
            right += int((scores.argmax(1) == target).sum())
            further = scores.shape[1] > ctx.num_classes
            if further:
                private += int((scores[:, : ctx.num_classes].argmax(1) == target).sum())
            loss += float(F.cross_entropy(scores, target, reduction="sum"))
    finally:
        for block in modes:
            block.__exit__(None, None, None)
    return Measure(right / len(data), loss / len(data), len(data), private / len(data) if further else None)
