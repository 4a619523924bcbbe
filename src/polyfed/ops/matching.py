"""Match the hidden units of several networks and average the matched ones (PFNM).

Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni, ICML 2019. https://arxiv.org/abs/1905.12022

Model: global units theta_i ~ N(mu0, sigma0² I); unit l of network j is a noisy copy of one global unit, v_jl ~
N(theta_c(j,l), 1/s_j), and no two units of one network are copies of the same global unit. How many global units there
are is not fixed (a Beta-Bernoulli process of mass gamma). Everything is computed in float64.

In the code: s = `precision`, A = `total`, S = `weight`, mu0/sigma0² = `prior`, 1/sigma0² = `prior_weight`, m =
`counts`, J = `networks`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

GRID = tuple(product((1.0, 0.1), (10.0, 1.0), (1.0, 1e-3, 50.0)))  # sigma2, sigma0_2, gamma to search over
RELEASED_GRID = tuple(product((1.0, 0.1, 0.5), (1.0, 10.0), (1.0, 1e-3, 50.0)))  # that of the authors' program
SHARE_FLOOR = 1e-10  # a network without samples of a class has almost no say about it, but sums stay above zero


@dataclass(frozen=True)
class Matching:
    """Settings of the matching; the defaults are the model's MAP form.

    Attributes
    ----------
    sigma2, sigma0_2
        Variance of a network's units around the global ones, and of the prior. Matched weights shrink towards the prior
        mean; the shrinkage vanishes as `sigma2 / sigma0_2` goes to 0.
    gamma
        Mass of the Beta-Bernoulli process: larger values make new global units cheaper.
    mu0, mu0_bias
        Prior means of weights and of biases.
    iterations
        Sweeps over all networks, in random order, after the first pass.
    pop_factor, cap, max_global
        Weight of the popularity term ln(m / (J - m)), limit of the count m in it, and limit of the number of global
        units. The model gives 2 and no limits; the released program has 1, 10 and 700 (with `mu0_bias=0.1`). The last
        is soft: each network may still add one unit, or as many as it has more than there are.
    """

    sigma2: float = 1.0
    sigma0_2: float = 10.0
    gamma: float = 1.0
    mu0: float = 0.0
    mu0_bias: float = 0.0
    iterations: int = 3
    pop_factor: float = 2.0
    cap: int | None = None
    max_global: int | None = None


RELEASED = Matching(sigma0_2=1.0, mu0_bias=0.1, iterations=5, pop_factor=1.0, cap=10, max_global=700)


@dataclass(frozen=True)
class Layer:
    """One weight layer `[out, in, r]`: r is 1, or the numbers that one input unit owns (kernel, flattened map)."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Matched:
    """The fused network, and for every hidden layer and network the global unit of each of its units."""

    layers: list[Layer]
    assignments: list[list[Tensor]]  # [hidden layer][network] -> [units]


def gains(
    vectors: Tensor, precision: Tensor, total: Tensor, weight: Tensor, counts: Tensor, networks: int, options: Matching
) -> Tensor:
    """Return `[L_j, L]`, the gain of giving each unit of a network to each existing global unit.

    `sum_d [(s v + A)² / (s + S) - A² / S] + pop_factor · ln(m / (J - m))`, with A = `total`, S = `weight` `[L, D]`.
    """
    scaled = precision * vectors
    joint = 1.0 / (precision + weight)
    fit = (
        scaled.square() @ joint.T
        + 2.0 * scaled @ (total * joint).T
        + (total.square() * joint - total.square() / weight).sum(dim=1)
    )
    held = counts.double() if options.cap is None else counts.double().clamp_max(options.cap)
    return fit + options.pop_factor * torch.log(held / (networks - held))


def new_gains(
    vectors: Tensor, precision: Tensor, prior: Tensor, prior_weight: Tensor, new: int, networks: int, options: Matching
) -> Tensor:
    """Return `[L_j, new]`, the gain of making a unit the q-th new global unit.

    `sum_d [(s v + mu0/sigma0²)² / (s + 1/sigma0²) - (mu0/sigma0²)² sigma0²] - 2 ln q + 2 ln(gamma / J)`.
    """
    fit = ((precision * vectors + prior).square() / (precision + prior_weight)).sum(dim=1)
    fit = fit - (prior.square() / prior_weight).sum()
    number = torch.arange(1, new + 1, dtype=torch.float64)
    return fit.unsqueeze(1) - 2.0 * number.log() + 2.0 * math.log(options.gamma / networks)


def match_units(
    vectors: Sequence[Tensor],
    precisions: Sequence[Tensor],
    prior_mean: Tensor,
    options: Matching,
    rng: torch.Generator,
) -> tuple[Tensor, list[Tensor]]:
    """Match the units of one layer over all networks.

    Parameters
    ----------
    vectors
        For each network `[L_j, D]`, one row for each unit.
    precisions
        For each network `[D]`, 1 / variance of each coordinate.
    prior_mean
        `[D]`.
    options, rng
        Settings, and the order of the sweeps.

    Returns
    -------
    tuple
        The MAP global units `[L, D]`, and for each network the global unit of each of its units.
    """
    vectors = [v.double() for v in vectors]
    precisions = [s.double() for s in precisions]
    networks = len(vectors)
    prior_weight = torch.full_like(prior_mean, 1.0 / options.sigma0_2, dtype=torch.float64)
    prior = prior_mean.double() * prior_weight
    book = _Book(prior, prior_weight, networks)
    for j in sorted(range(networks), key=lambda j: (-len(vectors[j]), j)):  # the widest network comes first
        book.place(j, vectors[j], precisions[j], options)
    for _ in range(options.iterations):
        for j in torch.randperm(networks, generator=rng).tolist():
            book.remove(j, vectors[j], precisions[j])
            book.place(j, vectors[j], precisions[j], options)
    assignments = [book.assigned[j] for j in range(networks)]
    # Summed afresh: units that were taken out and put back would leave rounding errors behind.
    total = prior.repeat(len(book.counts), 1)
    weight = prior_weight.repeat(len(book.counts), 1)
    for v, s, units in zip(vectors, precisions, assignments, strict=True):
        total[units] += s * v
        weight[units] += s
    return total / weight, assignments


def match_networks(
    networks: Sequence[Sequence[Layer]],
    options: Matching,
    rng: torch.Generator,
    shares: Sequence[Tensor] | None = None,
) -> Matched:
    """Fuse networks of the same depth, from the top hidden layer down.

    A unit is the vector [bias, outgoing weights]; outgoing weights into a hidden layer are first put into the global
    order found for that layer (zeros where the network has no such unit), and units of the first hidden layer carry
    their incoming weights too.

    Parameters
    ----------
    networks
        Layers of each network, from the input up: at least one hidden layer, the last gives the logits.
    options, rng
        Settings, and the order of the sweeps.
    shares
        For each network `[C]`, its share rho_jc in the training samples of each class: how much it counts for the
        weights into that output. None: 1 for all.
    """
    networks = [[Layer(a.weight.cpu(), None if a.bias is None else a.bias.cpu()) for a in each] for each in networks]
    shares = None if shares is None else [share.cpu() for share in shares]  # the assignment is solved on the CPU
    depth = len(networks[0])
    assert depth > 1 and all(len(network) == depth for network in networks), "hidden layers, the same number in all"
    classes = len(networks[0][-1].weight)
    rho = [torch.ones(classes) for _ in networks] if shares is None else [s.clamp_min(SHARE_FLOOR) for s in shares]
    rho = [share.double() for share in rho]
    fused: list[Layer | None] = [None] * depth
    assignments: list[list[Tensor]] = []
    outgoing = [network[-1].weight.double() for network in networks]
    bias_above = _output_bias(networks, rho, options)
    for hidden in reversed(range(depth - 1)):
        top = hidden == depth - 2
        vectors, precisions = [], []
        for j, network in enumerate(networks):
            parts, certain = _unit_parts(network[hidden], outgoing[j], hidden == 0, rho[j] if top else None)
            vectors.append(torch.cat(parts, dim=1))
            precisions.append(torch.cat(certain) / options.sigma2)
        mean = _prior_mean(networks[0][hidden], vectors[0].shape[1], options)
        theta, assigned = match_units(vectors, precisions, mean, options, rng)
        assignments.insert(0, assigned)
        bias, above, below = _cut(theta, networks[0][hidden], outgoing[0].shape, hidden == 0)
        fused[hidden + 1] = Layer(above, bias_above)
        bias_above = bias
        if below is not None:
            fused[0] = Layer(below, bias)
        else:
            outgoing = [
                _scatter(network[hidden].weight.double(), units, len(theta))
                for network, units in zip(networks, assigned, strict=True)
            ]
    return Matched([layer for layer in fused if layer is not None], assignments)


def _unit_parts(layer: Layer, outgoing: Tensor, first: bool, share: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return the pieces of the unit vectors of a layer, and how certain each coordinate is (in units of 1/sigma²)."""
    units = len(layer.weight)
    parts, certain = [], []
    if layer.bias is not None:
        parts.append(layer.bias.double().unsqueeze(1))
        certain.append(torch.ones(1, dtype=torch.float64))
    parts.append(outgoing.transpose(0, 1).reshape(units, -1))
    out, _, repeat = outgoing.shape
    known = torch.ones(out, dtype=torch.float64) if share is None else share
    certain.append(known.repeat_interleave(repeat))
    if first:
        parts.append(layer.weight.double().reshape(units, -1))
        certain.append(torch.ones(parts[-1].shape[1], dtype=torch.float64))
    return parts, certain


def _prior_mean(layer: Layer, size: int, options: Matching) -> Tensor:
    mean = torch.full((size,), options.mu0, dtype=torch.float64)
    if layer.bias is not None:
        mean[0] = options.mu0_bias
    return mean


def _cut(theta: Tensor, layer: Layer, above: torch.Size, first: bool) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Undo `_unit_parts` for the global units: bias, weights of the layer above, incoming weights."""
    out, _, repeat = above
    units = len(theta)
    start = 0 if layer.bias is None else 1
    bias = theta[:, 0] if start else None
    end = start + out * repeat
    outgoing = theta[:, start:end].reshape(units, out, repeat).transpose(0, 1).contiguous()
    incoming = theta[:, end:].reshape(units, *layer.weight.shape[1:]) if first else None
    return bias, outgoing, incoming


def _scatter(weight: Tensor, units: Tensor, size: int) -> Tensor:
    """Put the rows of a layer into the global order of its units, zeros elsewhere."""
    full = weight.new_zeros((size, *weight.shape[1:]))
    full[units] = weight
    return full


def _output_bias(networks: Sequence[Sequence[Layer]], rho: Sequence[Tensor], options: Matching) -> Tensor | None:
    """Return `(sum_j rho_j b_j / sigma² + mu0_bias / sigma0²) / (sum_j rho_j / sigma² + 1 / sigma0²)`."""
    if networks[0][-1].bias is None:
        return None
    total = torch.full_like(rho[0], options.mu0_bias / options.sigma0_2)
    weight = torch.full_like(rho[0], 1.0 / options.sigma0_2)
    for network, share in zip(networks, rho, strict=True):
        bias = network[-1].bias
        assert bias is not None, "a bias in all networks or in none"
        total += share * bias.double() / options.sigma2
        weight += share / options.sigma2
    return total / weight


class _Book:
    """The global units found so far: precision-weighted sums A, precisions S, and how many networks use each."""

    def __init__(self, prior: Tensor, prior_weight: Tensor, networks: int) -> None:
        self.prior, self.prior_weight, self.networks = prior, prior_weight, networks
        self.total = prior.new_zeros((0, len(prior)))
        self.weight = prior.new_zeros((0, len(prior)))
        self.counts = torch.zeros(0, dtype=torch.long)
        self.assigned: dict[int, Tensor] = {}

    def place(self, j: int, vectors: Tensor, precision: Tensor, options: Matching) -> None:
        """Give every unit of a network an existing or a new global unit, so that the sum of gains is largest."""
        from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

        size, units = len(self.counts), len(vectors)
        new = units if options.max_global is None else min(units, max(options.max_global - size, 1))
        new = max(new, units - size)  # no unit may be left over, whatever the limit
        gain = torch.cat(
            [
                gains(vectors, precision, self.total, self.weight, self.counts, self.networks, options),
                new_gains(vectors, precision, self.prior, self.prior_weight, new, self.networks, options),
            ],
            dim=1,
        )
        _, columns = linear_sum_assignment(gain.numpy(), maximize=True)
        chosen = torch.as_tensor(columns)
        fresh = chosen >= size
        # Which new column a unit got means nothing (all orders have the same total gain): they keep their own order.
        chosen[fresh] = size + torch.arange(int(fresh.sum()))
        self._grow(int(fresh.sum()))
        self.total[chosen] += precision * vectors
        self.weight[chosen] += precision
        self.counts[chosen] += 1
        self.assigned[j] = chosen

    def remove(self, j: int, vectors: Tensor, precision: Tensor) -> None:
        """Take a network's units out; global units that nobody uses any more disappear."""
        units = self.assigned.pop(j)
        self.total[units] -= precision * vectors
        self.weight[units] -= precision
        self.counts[units] -= 1
        kept = self.counts > 0
        renumbered = torch.cumsum(kept, dim=0) - 1
        self.assigned = {other: renumbered[chosen] for other, chosen in self.assigned.items()}
        self.total, self.weight, self.counts = self.total[kept], self.weight[kept], self.counts[kept]

    def _grow(self, number: int) -> None:
        self.total = torch.cat([self.total, self.prior.repeat(number, 1)])
        self.weight = torch.cat([self.weight, self.prior_weight.repeat(number, 1)])
        self.counts = torch.cat([self.counts, torch.zeros(number, dtype=torch.long)])
