"""PFNM: gains by hand, exact recovery of permuted copies, and the properties of an assignment."""

import itertools
import math

import pytest
import torch

from polyfed.fusion.chain import shuffled
from polyfed.ops.matching import Layer, Matching, gains, match_networks, match_units, new_gains

RELEASED = {"pop_factor": 1.0, "cap": 10, "max_global": 700, "mu0_bias": 0.1}


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def network(sizes, seed=0):
    """A perceptron in float64 whose units differ clearly."""
    draw = rng(seed)
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        weight = torch.randn((outputs, inputs, 1), generator=draw, dtype=torch.float64)
        layers.append(Layer(weight, torch.randn(outputs, generator=draw, dtype=torch.float64)))
    return layers


def run(layers, x):
    for place, layer in enumerate(layers):
        x = x @ layer.weight.flatten(1).T + layer.bias
        x = x.relu() if place < len(layers) - 1 else x
    return x


def copies(layers, number):
    return [shuffled(layers, rng(100 + j)) for j in range(number)]


def test_gains_of_one_unit_by_hand():
    v, s = torch.tensor([[2.0]], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    total, weight = torch.tensor([[3.0]], dtype=torch.float64), torch.tensor([[2.0]], dtype=torch.float64)
    found = gains(v, s, total, weight, torch.tensor([1]), 4, Matching())
    assert float(found) == pytest.approx(25 / 3 - 9 / 2 + 2 * math.log(1 / 3))
    released = gains(v, s, total, weight, torch.tensor([12]), 20, Matching(pop_factor=1.0, cap=10))
    assert float(released) == pytest.approx(25 / 3 - 9 / 2 + math.log(10 / 10))
    prior = torch.tensor([0.3], dtype=torch.float64)
    fresh = new_gains(v, s, prior, torch.tensor([0.1], dtype=torch.float64), 3, 4, Matching(gamma=5.0))
    base = 2.3**2 / 1.1 - 0.3**2 / 0.1 + 2 * math.log(5 / 4)
    assert fresh.flatten().tolist() == pytest.approx([base, base - 2 * math.log(2), base - 2 * math.log(3)])


def test_gains_of_many_units_are_the_sums_over_coordinates():
    draw = rng()
    v, s = torch.randn((3, 5), generator=draw).double(), torch.rand(5, generator=draw).double() + 0.1
    total, weight = torch.randn((4, 5), generator=draw).double(), torch.rand((4, 5), generator=draw).double() + 0.5
    counts = torch.tensor([1, 2, 3, 4])
    found = gains(v, s, total, weight, counts, 6, Matching())
    for row, column in itertools.product(range(3), range(4)):
        expected = 2 * math.log(int(counts[column]) / (6 - int(counts[column])))
        for d in range(5):
            a, w = float(total[column, d]), float(weight[column, d])
            expected += (float(s[d] * v[row, d]) + a) ** 2 / (float(s[d]) + w) - a**2 / w
        assert float(found[row, column]) == pytest.approx(expected)


@pytest.mark.parametrize("number", [2, 4, 8])
@pytest.mark.parametrize("sizes", [(6, 9, 4), (6, 9, 7, 4)])
def test_permuted_copies_are_recovered_up_to_the_shrinkage(sizes, number):
    original = network(sizes)
    options = Matching(sigma2=1.0, sigma0_2=10.0, gamma=1.0)
    fused = match_networks(copies(original, number), options, rng()).layers
    assert [len(layer.weight) for layer in fused] == list(sizes[1:])
    kappa = number / (number + options.sigma2 / options.sigma0_2)
    undone = [Layer(layer.weight / kappa, layer.bias / kappa) for layer in fused]
    x = torch.randn((50, sizes[0]), generator=rng(7), dtype=torch.float64)
    assert torch.allclose(run(undone, x), run(original, x), rtol=0, atol=1e-8)
    assert not torch.allclose(run(fused, x), run(original, x), atol=1e-3)  # the shrinkage is there


def test_the_shrinkage_vanishes_with_a_flat_prior():
    original = network((6, 9, 4))
    fused = match_networks(copies(original, 4), Matching(sigma0_2=1e6), rng()).layers
    x = torch.randn((50, 6), generator=rng(7), dtype=torch.float64)
    assert float((run(fused, x) - run(original, x)).abs().max()) < 1e-4


@pytest.mark.parametrize("number", [1, 2, 5, 12])
@pytest.mark.parametrize("setting", [(1.0, 1.0, 1.0), (1e-6, 1.0, 1.0), (0.1, 10.0, 1.0)])
def test_the_released_form_shrinks_by_the_known_factors(setting, number):
    sigma2, sigma0_2, gamma = setting
    original = network((8, 12, 5))
    options = Matching(sigma2, sigma0_2, gamma, iterations=5, **RELEASED)
    shares = [torch.full((5,), 1 / number, dtype=torch.float64)] * number
    matched = match_networks(copies(original, number), options, rng(), shares)
    first, last = matched.layers
    assert len(first.weight) == 12

    def k(q):
        return (q / sigma2) / (q / sigma2 + 1 / sigma0_2)

    def with_prior(b, q):
        return (q / sigma2 * b + 0.1 / sigma0_2) / (q / sigma2 + 1 / sigma0_2)

    # The order of global units is that of the first network.
    order = matched.assignments[0][0]
    reference = copies(original, number)[0]
    assert torch.allclose(first.weight[order], k(number) * reference[0].weight, rtol=0, atol=1e-12)
    assert torch.allclose(first.bias[order], with_prior(reference[0].bias, number), rtol=0, atol=1e-12)
    assert torch.allclose(last.weight[:, order], k(1) * reference[1].weight, rtol=0, atol=1e-12)
    assert torch.allclose(last.bias, with_prior(original[1].bias, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("number", [2, 5])
def test_shares_of_a_class_concern_the_weights_into_the_output_only(number):
    """Two hidden layers: every network counts fully for the weights between them, and for their biases."""
    original = network((8, 12, 10, 5))
    options = Matching(0.1, 10.0, 1.0)
    shares = [torch.full((5,), 1 / number, dtype=torch.float64)] * number
    matched = match_networks(copies(original, number), options, rng(), shares)
    assert [len(layer.weight) for layer in matched.layers] == [12, 10, 5]
    low, high = (hidden[0] for hidden in matched.assignments)
    first, second, last = matched.layers
    below, between, above = copies(original, number)[0]
    k = {q: (q / 0.1) / (q / 0.1 + 1 / 10.0) for q in (1, number)}
    assert torch.allclose(first.weight[low], k[number] * below.weight, rtol=0, atol=1e-12)
    assert torch.allclose(first.bias[low], k[number] * below.bias, rtol=0, atol=1e-12)
    assert torch.allclose(second.weight[high][:, low], k[number] * between.weight, rtol=0, atol=1e-12)
    assert torch.allclose(second.bias[high], k[number] * between.bias, rtol=0, atol=1e-12)
    assert torch.allclose(last.weight[:, high], k[1] * above.weight, rtol=0, atol=1e-12)
    assert torch.allclose(last.bias, k[1] * above.bias, rtol=0, atol=1e-12)


def test_a_small_noise_to_prior_ratio_recovers_the_function():
    original = network((8, 12, 5))
    fused = match_networks(copies(original, 5), Matching(1e-6, 1.0, 1.0, **RELEASED), rng()).layers
    x = torch.randn((50, 8), generator=rng(7), dtype=torch.float64)
    assert float((run(fused, x) - run(original, x)).abs().max()) < 1e-4


def test_one_network_keeps_its_width():
    original = network((6, 9, 4))
    fused = match_networks([original], Matching(), rng()).layers
    assert len(fused[0].weight) == 9
    kappa = 1 / 1.1
    assert torch.allclose(run([Layer(f.weight / kappa, f.bias / kappa) for f in fused], torch.eye(6).double()),
                          run(original, torch.eye(6).double()), atol=1e-10)  # fmt: skip


def test_cheap_new_units_keep_weak_copies_apart():
    weak = [Layer(layer.weight * 0.3, layer.bias * 0.3) for layer in network((4, 6, 3))]
    assert len(match_networks(copies(weak, 3), Matching(gamma=50.0), rng()).layers[0].weight) > 6
    assert len(match_networks(copies(weak, 3), Matching(gamma=1e-3), rng()).layers[0].weight) == 6


def different(widths, seed=3):
    return [network((5, width, 3), seed + j) for j, width in enumerate(widths)]


def test_no_two_units_of_a_network_share_a_global_unit_and_no_global_unit_is_idle():
    matched = match_networks(different([7, 4, 9]), Matching(gamma=5.0), rng())
    (hidden,) = matched.assignments
    size = len(matched.layers[0].weight)
    assert [len(units) for units in hidden] == [7, 4, 9]
    assert all(len(set(units.tolist())) == len(units) for units in hidden)
    assert {unit for units in hidden for unit in units.tolist()} == set(range(size))
    assert 9 <= size <= 20


@pytest.mark.parametrize("turned", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("hidden", [[(7,), (4,), (9,)], [(7, 6), (4, 8), (9, 5)]])
def test_the_result_does_not_depend_on_the_order_of_a_networks_units(hidden, turned):
    nets = [network((5, *widths, 3), 3 + j) for j, widths in enumerate(hidden)]
    moved = [shuffled(net, rng(5 + j)) if j in turned else net for j, net in enumerate(nets)]
    x = torch.randn((30, 5), generator=rng(7), dtype=torch.float64)
    one, other = (match_networks(each, Matching(gamma=5.0), rng()).layers for each in (nets, moved))
    assert [layer.weight.shape for layer in one] == [layer.weight.shape for layer in other]
    assert torch.allclose(run(one, x), run(other, x))


def layers_with(units, seed):
    return torch.randn((units, 4), generator=rng(seed), dtype=torch.float64)


def test_the_widest_network_comes_first():
    vectors = [layers_with(units, seed) for seed, units in enumerate((3, 6, 4))]
    ones = [torch.ones(4)] * 3
    _, assigned = match_units(vectors, ones, torch.zeros(4), Matching(iterations=0, gamma=1e-9), rng())
    assert assigned[1].tolist() == list(range(6))  # its units are the first global ones, in their own order


def test_sweeps_improve_on_the_first_pass():
    def spread(vectors, theta, assigned):
        return sum(float((v - theta[units]).square().sum()) for v, units in zip(vectors, assigned, strict=True))

    changed = 0
    for seed in range(6):
        vectors = [layers_with(5, 10 * seed + j) for j in range(4)]
        options = [Matching(iterations=n, gamma=1e-9, sigma0_2=1e6) for n in (0, 4)]
        first, last = (match_units(vectors, [torch.ones(4)] * 4, torch.zeros(4), o, rng()) for o in options)
        assert len(first[0]) == len(last[0]) == 5
        assert spread(vectors, *last) <= spread(vectors, *first) + 1e-6  # flat prior, all matched: least squares
        changed += spread(vectors, *last) < spread(vectors, *first) - 1e-6
    assert changed > 0


def test_the_assignment_is_the_best_of_all():
    draw = rng(2)
    vectors = [torch.randn((3, 2), generator=draw).double() * 2 for _ in range(2)]
    precision = torch.ones(2).double()
    options = Matching(iterations=0)
    _, (first, second) = match_units(vectors, [precision] * 2, torch.zeros(2), options, rng())
    assert first.tolist() == [0, 1, 2]
    total, weight = vectors[0], torch.full((3, 2), 1.1).double()
    gain = torch.cat(
        [
            gains(vectors[1], precision, total, weight, torch.ones(3), 2, options),
            new_gains(vectors[1], precision, torch.zeros(2), torch.full((2,), 0.1).double(), 3, 2, options),
        ],
        dim=1,
    )
    best = max(itertools.permutations(range(6), 3), key=lambda p: sum(float(gain[i, c]) for i, c in enumerate(p)))
    assert [min(c, 3) for c in second.tolist()] == [min(c, 3) for c in best]


def test_a_limit_on_global_units_holds_but_leaves_no_unit_out():
    nets = different([6, 6, 6])
    free = len(match_networks(nets, Matching(gamma=1e6), rng()).layers[0].weight)
    limited = match_networks(nets, Matching(gamma=1e6, max_global=8), rng())
    assert free == 18
    assert len(limited.layers[0].weight) <= 11  # every network may still add one
    assert all(len(units) == 6 for units in limited.assignments[0])
    tight = match_networks(nets, Matching(gamma=1e6, max_global=1), rng())
    assert all(len(set(units.tolist())) == 6 for units in tight.assignments[0])


def test_a_network_without_samples_of_a_class_has_no_say_about_it():
    one, two = network((4, 5, 2), 1), network((4, 5, 2), 1)
    two = [two[0], Layer(two[1].weight + torch.tensor([[[9.0]], [[0.0]]]).double(), two[1].bias + 9.0)]
    shares = [torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.5])]
    fused = match_networks([one, two], Matching(sigma0_2=1e9), rng(), shares).layers
    assert len(fused[0].weight) == 5
    x = torch.randn((20, 4), generator=rng(7), dtype=torch.float64)
    assert torch.allclose(run(fused, x)[:, 0], run(one, x)[:, 0], atol=1e-5)
    assert fused[1].bias[1] == pytest.approx(float(one[1].bias[1]) + 4.5, abs=1e-5)


def test_weights_between_unmatched_units_are_zero():
    # Two hidden layers of strong, orthogonal units: nothing matches, so the fused network runs both side by side.
    def alone(sign):
        eye = torch.eye(2).double().unsqueeze(2) * 30.0 * sign
        return [Layer(eye, torch.zeros(2).double()) for _ in range(3)]

    fused = match_networks([alone(1), alone(-1)], Matching(sigma0_2=1e9), rng()).layers
    assert [tuple(layer.weight.shape[:2]) for layer in fused] == [(4, 2), (4, 4), (2, 4)]
    assert int((fused[1].weight.abs() > 1e-3).sum()) == 4
