"""Projections between feature spaces: matrices with orthonormal columns, built from unconstrained parameters.

A square parameter `A` gives the skew-symmetric `W = A - A^T`, and `W` an orthogonal `Q`, by default `exp(W)`.
(`gram_schmidt` forms no W: it makes the columns of `I + A` orthonormal.) Gradient steps on `A` then never leave the
orthogonal matrices. A projection from D to d features is the upper left `D x d` block
of a `Q` of size `max(D, d)`: orthonormal columns when d < D, orthonormal rows when d > D.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.ops.distance import kl_divergence

OrthMap = Literal["matrix_exp", "series", "taylor", "cayley", "gram_schmidt"]

SMALL = 0.5  # spectral norm up to which eight terms of the series are as good as float32


def skew(parameter: Tensor) -> Tensor:
    """Return `W = A - A^T`, exactly skew-symmetric."""
    return parameter - parameter.mT


def taylor(matrix: Tensor, terms: int = 8) -> Tensor:
    """Return `sum_{i <= terms} W^i / i!`; good only while the spectral norm of W is small (below 1 for 8 terms)."""
    identity = _identity(matrix)
    total = identity
    for i in range(terms, 0, -1):  # Horner: I + W (I + W/2 (I + W/3 (...)))
        total = identity + matrix @ total / i
    return total


def series(matrix: Tensor, terms: int = 8) -> Tensor:
    """Return `exp(W)` by the series on `W / 2^s`, squared s times, with s such that the scaled norm is at most 1/2."""
    # ||W||_2^2 = ||W W||_2 <= ||W W||_F for skew-symmetric W: a bound from one product instead of an SVD.
    held = matrix.detach()
    norm = float((held @ held).norm()) ** 0.5
    squarings = max(0, math.ceil(math.log2(norm / SMALL))) if 0 < norm < math.inf else 0
    total = taylor(matrix / 2**squarings, terms)
    for _ in range(squarings):
        total = total @ total
    return total


def cayley(matrix: Tensor) -> Tensor:
    """Return `(I - W/2)^-1 (I + W/2)`, orthogonal for skew-symmetric W and equal to `exp(W)` up to third order."""
    identity = _identity(matrix)
    solution: Tensor = torch.linalg.solve(identity - matrix / 2, identity + matrix / 2)
    return solution


def gram_schmidt(matrix: Tensor) -> Tensor:
    """Return the columns of a square matrix made orthonormal one after the other, from the first to the last."""
    q, r = torch.linalg.qr(matrix)
    # Gram-Schmidt is the factorisation whose R has a positive diagonal.
    sign = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(q.dtype)
    orthonormal: Tensor = q * sign.unsqueeze(-2)
    return orthonormal


def orthogonal(parameter: Tensor, orth_map: OrthMap = "matrix_exp", terms: int = 8) -> Tensor:
    """Return the orthogonal matrix of a square parameter; zeros give the identity under every map."""
    if orth_map == "gram_schmidt":
        return gram_schmidt(_identity(parameter) + parameter)
    matrix = skew(parameter)
    if orth_map == "cayley":
        return cayley(matrix)
    if orth_map == "matrix_exp":
        return torch.matrix_exp(matrix)
    return series(matrix, terms) if orth_map == "series" else taylor(matrix, terms)


KL_DIRECTIONS = ("teacher_student", "student_teacher")


def feature_kl(student: Tensor, teacher: Tensor, temperature: float = 1.0, direction: str = KL_DIRECTIONS[0]) -> Tensor:
    """Return the KL divergence between softmaxes over the feature dimension, mean over the batch.

    `teacher_student` is `KL(p || q)` with `p = softmax(teacher / T)` and `q = softmax(student / T)`, the usual
    direction of distillation; `student_teacher` is `KL(q || p)`.
    """
    if direction == "student_teacher":
        return kl_divergence(teacher, student, temperature)
    return kl_divergence(student, teacher, temperature)


def feature_distance(
    student: Tensor, teacher: Tensor, kind: str = "kl", temperature: float = 1.0, direction: str = KL_DIRECTIONS[0]
) -> Tensor:
    """Return `feature_kl`, or (`mse`) the mean squared difference."""
    return F.mse_loss(student, teacher) if kind == "mse" else feature_kl(student, teacher, temperature, direction)


class OrthogonalProjection(nn.Module):
    """`z -> z M_d` from D to d features, with orthonormal columns (rows where d > D); at first the identity's block.

    In the terms of docs/methods/fedfd.md, `matrix` is A_d and `columns()` is M_d.
    """

    def __init__(self, inputs: int, outputs: int, orth_map: OrthMap = "matrix_exp", terms: int = 8) -> None:
        super().__init__()
        self.inputs, self.outputs, self.orth_map, self.terms = inputs, outputs, orth_map, terms
        size = max(inputs, outputs)
        self.matrix = nn.Parameter(torch.zeros(size, size))

    @torch.no_grad()
    def reset(self, rng: torch.Generator, scale: float) -> None:
        """Draw A_d from `N(0, scale^2)`."""
        self.matrix.copy_(torch.randn(self.matrix.shape, generator=rng) * scale)

    def columns(self) -> Tensor:
        """Return M_d, `[D, d]`."""
        return orthogonal(self.matrix, self.orth_map, self.terms)[: self.inputs, : self.outputs]

    def forward(self, z: Tensor) -> Tensor:
        """Return the projected features."""
        return z @ self.columns()


class LinearProjection(nn.Module):
    """`z -> z M_d` with a free matrix and no bias, the projection without orthogonality: `matrix` itself is M_d."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(inputs, outputs))

    @torch.no_grad()
    def reset(self, rng: torch.Generator, scale: float) -> None:
        """Draw the matrix as torch draws a linear layer: uniform within 1/sqrt(D) (`scale` plays no part)."""
        bound = 1 / math.sqrt(self.matrix.shape[0])
        self.matrix.copy_((2 * torch.rand(self.matrix.shape, generator=rng) - 1) * bound)

    def columns(self) -> Tensor:
        """Return M_d, `[D, d]`."""
        return self.matrix

    def forward(self, z: Tensor) -> Tensor:
        """Return the projected features."""
        return z @ self.matrix


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
