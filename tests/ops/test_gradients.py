"""Gradient alleviation against hand-computed numbers, a general solver and duality."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from polyfed.ops.gradients import add_local, inner, multiplier, project

SHAPES = {"weight": (3, 4), "bias": (5,)}


def pair(seed, conflict=None):
    """Random G_IN and G_local in double precision; `conflict` turns the sign of every <G_IN, G_local>."""
    rng = torch.Generator().manual_seed(seed)
    local = {name: torch.randn(shape, generator=rng, dtype=torch.float64) for name, shape in SHAPES.items()}
    feature = {name: torch.randn(shape, generator=rng, dtype=torch.float64) for name, shape in SHAPES.items()}
    if conflict is not None:
        for name, g in feature.items():
            turned = (inner(g, local[name]) < 0) != conflict
            feature[name] = -g if turned else g
    return feature, local


def norm(tensor):
    return float(tensor.pow(2).sum().sqrt())


def solved(feature, local):
    """min ||G - Z||^2 with <Z, L> >= 0, by a general solver."""
    g, h = feature.flatten().numpy(), local.flatten().numpy()
    found = minimize(
        lambda z: ((g - z) ** 2).sum(),
        np.zeros_like(g),
        jac=lambda z: 2 * (z - g),
        constraints=[{"type": "ineq", "fun": lambda z: z @ h, "jac": lambda z: h}],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 200},
    )
    assert found.success
    return torch.from_numpy(found.x).view_as(feature)


def dual_value(m, a, b):
    """Return the dual at multiplier m: -(m^2/4)·a - m·b."""
    return -(m**2) / 4 * a - m * b


def primal_value(feature, combined):
    """Return ||G_IN - Z||^2, over all tensors together."""
    return sum((feature[name] - z).pow(2).sum() for name, z in combined.items())


def test_by_hand():
    # a = 25, b = 3·1 + 4·(-2) = -5, m* = 10/25, Z = (1, -2) + (1/5)·(3, 4)
    feature, local = {"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([3.0, 4.0])}
    assert multiplier(torch.tensor(25.0), torch.tensor(-5.0)) == pytest.approx(0.4)
    assert project(feature, local)["w"].tolist() == pytest.approx([1.6, -1.2])
    assert primal_value(feature, project(feature, local)) == pytest.approx(1.0)  # b^2/a
    assert add_local(feature, local, 1.0)["w"].tolist() == [2.5, 0.0]  # Eq. 13 with lambda = 1


def test_one_vector_by_hand():
    # Together a = 2 and b = 3 - 1 = 2: no conflict. The second tensor alone has a = 1 and b = -1.
    feature = {"w": torch.tensor([3.0]), "v": torch.tensor([-1.0])}
    local = {"w": torch.tensor([1.0]), "v": torch.tensor([1.0])}
    assert {n: z.item() for n, z in project(feature, local, "global").items()} == {"w": 3.0, "v": -1.0}
    assert {n: z.item() for n, z in project(feature, local, "tensor").items()} == {"w": 3.0, "v": 0.0}
    # With w = -3 they conflict together: a = 2, b = -4, Z = G + 2·L.
    feature["w"] = torch.tensor([-3.0])
    assert {n: z.item() for n, z in project(feature, local, "global").items()} == {"w": -1.0, "v": 1.0}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("conflict", [True, False])
def test_it_equals_a_general_solver(seed, conflict):
    feature, local = pair(seed, conflict)
    z = project(feature, local)
    for name in SHAPES:
        assert torch.allclose(z[name], solved(feature[name], local[name]), atol=1e-6)
    joined = [torch.cat([g[name].flatten() for name in SHAPES]) for g in (feature, local)]
    together = project(feature, local, "global")
    assert torch.allclose(torch.cat([together[n].flatten() for n in SHAPES]), solved(*joined), atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_distance_agreement_and_idempotence(seed):
    feature, local = pair(seed, conflict=True)
    z = project(feature, local)
    for name in SHAPES:
        a, b = inner(local[name], local[name]), inner(local[name], feature[name])
        assert float((feature[name] - z[name]).pow(2).sum()) == pytest.approx(float(b * b / a), rel=1e-10)
        assert float(inner(z[name], local[name])) >= -1e-6 * norm(z[name]) * norm(local[name])
        assert torch.allclose(project(z, local)[name], z[name], atol=1e-12)
    together = project(feature, local, "global")
    assert sum(float(inner(together[name], local[name])) for name in SHAPES) == pytest.approx(0.0, abs=1e-10)


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_agreeing_gradients_are_left_alone(scope):
    feature, local = pair(0, conflict=False)
    z = project(feature, local, scope)
    assert all(torch.equal(z[name], feature[name]) for name in SHAPES)


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_without_a_local_gradient_the_other_is_followed(scope):
    feature, local = pair(0)
    z = project(feature, {name: torch.zeros_like(g) for name, g in local.items()}, scope)
    assert all(torch.equal(z[name], feature[name]) for name in SHAPES)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("conflict", [True, False])
def test_strong_duality(seed, conflict):
    feature, local = pair(seed, conflict)
    for name in SHAPES:
        a, b = inner(local[name], local[name]), inner(local[name], feature[name])
        best = multiplier(a, b)
        primal = primal_value({name: feature[name]}, project({name: feature[name]}, {name: local[name]}))
        assert float(dual_value(best, a, b)) == pytest.approx(float(primal), abs=1e-8)
        grid = torch.linspace(0, 20, 2001, dtype=torch.float64)
        assert float(dual_value(grid, a, b).max()) <= float(dual_value(best, a, b)) + 1e-12
        assert float(best) == (pytest.approx(float(-2 * b / a)) if conflict else 0.0)


numbers = st.floats(-10, 10, allow_nan=False, width=32)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6))
def test_any_numbers_give_a_step_that_agrees(values):
    g, h = (torch.tensor(column, dtype=torch.float64) for column in zip(*values, strict=True))
    z = project({"w": g}, {"w": h})["w"]
    assert torch.isfinite(z).all()
    assert float(inner(z, h)) >= -1e-6 * max(norm(g), 1e-30) * norm(h)


def test_the_simple_rule_does_not_promise_agreement():
    rng = torch.Generator().manual_seed(0)
    g, h = torch.randn(2, 20000, 12, generator=rng, dtype=torch.float64)
    violated = float((((g + h / 2) * h).sum(1) < 0).double().mean())
    assert violated == pytest.approx(0.056, abs=0.006)
    worst = int((g * h).sum(1).argmin())
    z = add_local({"w": g[worst]}, {"w": h[worst]}, 1.0)["w"]
    assert float(inner(z, h[worst])) < 0 < float(inner(project({"w": g[worst]}, {"w": h[worst]})["w"], h[worst])) + 1e-9


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_many_clients_at_once(scope):
    pairs = [pair(seed) for seed in range(4)]
    feature, local = ({n: torch.stack([p[side][n] for p in pairs]) for n in SHAPES} for side in (0, 1))
    batched = torch.func.vmap(lambda g, h: project(g, h, scope))(feature, local)
    for client, (g, h) in enumerate(pairs):
        for name, z in project(g, h, scope).items():
            assert torch.allclose(batched[name][client], z, atol=1e-12)


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_where_nothing_is_trained_there_is_nothing_to_project(scope):
    assert project({}, {}, scope) == {}
