"""Whether matrix products are rounded by where their matrices begin in memory: a stack would then not be exact."""

from __future__ import annotations

import itertools
import warnings
from functools import cache

import torch
from torch import Tensor

SIZES = ((1, 64, 10), (2, 45, 5), (2, 16, 63), (31, 27, 45))  # rows, inner size, columns: of several kinds of kernels
OFFSETS = (1, 2, 3, 4, 8)  # numbers


def moved(matrix: Tensor, offset: int) -> Tensor:
    """Return a copy, as a batch of one, that begins so many numbers behind where torch lets tensors begin."""
    room = torch.empty(matrix.numel() + offset)
    place = room[offset:].view(1, *matrix.shape)
    return place.copy_(matrix)


def product(left: Tensor, right: Tensor, turned: bool, offsets: tuple[int, int, int]) -> Tensor:
    """Return the product of matrices that begin at given places, as will the product; `turned`: by the columns."""
    out = moved(torch.zeros(left.shape[0], right.shape[1]), offsets[2])
    second = moved(right.mT.contiguous(), offsets[1]).mT if turned else moved(right, offsets[1])
    return torch.bmm(moved(left, offsets[0]), second, out=out).clone()


@cache
def placed_alike() -> bool:
    """Tell whether products are the same wherever matrices begin: a millisecond, once."""
    stream = torch.Generator().manual_seed(0)
    for (rows, inner, columns), turned in itertools.product(SIZES, (False, True)):
        left = torch.randn(rows, inner, generator=stream, dtype=torch.float32)
        right = torch.randn(inner, columns, generator=stream, dtype=torch.float32)
        usual = product(left, right, turned, (0, 0, 0))
        for offset in OFFSETS:
            places = ((offset, 0, 0), (0, offset, 0), (0, 0, offset))
            if any(not torch.equal(product(left, right, turned, where), usual) for where in places):
                return False
    return True


def warn_unless_exact() -> None:
    """Say it where clients' numbers may depend, in the last digits, on who shares their stack."""
    if not placed_alike():
        warnings.warn(
            "Matrix products of this process are rounded by where matrices lie in memory, so results may differ in the "
            "last digits with another number of workers: import polyfed before computing with torch, or set "
            "MKL_CBWR=AUTO in the environment (engine='threads' is exact either way).",
            stacklevel=2,
        )
