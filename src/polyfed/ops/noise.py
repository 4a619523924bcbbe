"""Noise that hides what features tell about the samples they were computed from."""

from __future__ import annotations

from torch import Tensor


def noisy(s: Tensor, scale: float, unit: Tensor, sigma: str = "tensor") -> Tensor:
    """Return s + zeta·sigma(s)·epsilon, with sigma(s) the standard deviation of s (no gradient flows through it).

    `scale` is zeta, `unit` the standard normal epsilon, and `sigma` says what sigma(s) is taken over: the whole
    `tensor`, or each `channel`.
    """
    fixed = s.detach()
    if sigma == "channel" and s.numel() > s.shape[1]:  # a channel of one value has no spread: no noise would be added
        spread = fixed.std(dim=[d for d in range(s.dim()) if d != 1], correction=0, keepdim=True)
    else:
        spread = fixed.std(correction=0)
    return s + scale * spread * unit
