"""Dropout in a stack: which masks a pass asks for, and masks drawn from each client's own stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from polyfed.core.runner import _DROPOUTS


class Recorder(TorchFunctionMode):
    """Note which dropout masks a pass asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch.Size, float]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _DROPOUTS:
            return function(*args, **(kwargs or {}))
        return self.dropout(_DROPOUTS[function], *args, **(kwargs or {}))

    def dropout(self, dims: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Note the mask of one call, and drop nothing."""
        if training and p != 0.0:
            shape = input.shape if dims == 0 else torch.Size((*input.shape[:2], *(1,) * (input.dim() - 2)))
            self.calls.append((shape, p))
        return input


class Masks(TorchFunctionMode):
    """Use the masks that were drawn for this pass, in the order of the calls."""

    def __init__(self, masks: list[Tensor] | None) -> None:
        super().__init__()
        self.masks = iter(masks or ())
        self.needed = bool(masks)

    def __enter__(self) -> Masks:
        return super().__enter__() if self.needed else self

    def __exit__(self, *details: Any) -> None:
        if self.needed:
            super().__exit__(*details)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _DROPOUTS:
            return function(*args, **(kwargs or {}))
        return self.dropout(*args, **(kwargs or {}))

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Drop what the next mask says."""
        if not training or p == 0.0:
            return input
        kept = next(self.masks)
        return input * kept.to(input.dtype) / (1.0 - p) if p < 1.0 else input * 0.0
