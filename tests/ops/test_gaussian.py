"""The variational losses of FedVTC against torch.distributions and hand-computed numbers."""

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence
from torch.func import vmap

from polyfed.ops.gaussian import (
    class_latents,
    distribution_matching,
    gaussian_kl,
    reconstruction_error,
    reparameterized,
)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=rng(seed))


@pytest.mark.parametrize("prior_sd", [None, "vector"])
def test_kl_is_that_of_torch(prior_sd):
    z, prototype = normal(6, 5), normal(6, 5, seed=1)
    sd = normal(5, seed=2).exp()
    prior = torch.ones(5) if prior_sd is None else normal(5, seed=3).exp()
    expected = kl_divergence(Independent(Normal(z, sd), 1), Independent(Normal(prototype, prior.expand(6, 5)), 1))
    found = gaussian_kl(z, sd, prototype) if prior_sd is None else gaussian_kl(z, sd, prototype, prior)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_kl_is_zero_for_the_prior_itself():
    z, sd = normal(3, 4), normal(4, seed=1).exp()
    torch.testing.assert_close(gaussian_kl(z, torch.ones(4), z), torch.zeros(3))
    torch.testing.assert_close(gaussian_kl(z, sd, z, sd), torch.zeros(3), rtol=0, atol=1e-6)


def test_gradients_of_the_kl():
    z, prototype = normal(1, 4).requires_grad_(), normal(1, 4, seed=1)
    sd = (normal(4, seed=2).exp()).requires_grad_()
    gaussian_kl(z, sd, prototype).sum().backward()
    torch.testing.assert_close(z.grad, (z - prototype).detach())
    torch.testing.assert_close(sd.grad, (sd - 1 / sd).detach())


def test_without_a_prototype_the_kl_does_not_pull_the_mean():
    z = normal(2, 3).requires_grad_()
    sd = torch.full((3,), 0.5)
    kl = gaussian_kl(z, sd, torch.zeros(2, 3), known=torch.tensor([1.0, 0.0]))
    kl.sum().backward()
    assert torch.equal(z.grad[1], torch.zeros(3)) and (z.grad[0] != 0).all()
    torch.testing.assert_close(kl[1], gaussian_kl(z[1:], sd, z[1:])[0])


def test_reparameterized_moments_and_gradient():
    mean, sd = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 1.0, 2.0])
    draws = reparameterized(mean, sd, normal(10_000, 3))
    torch.testing.assert_close(draws.mean(0), mean, rtol=0.05, atol=0.0)
    torch.testing.assert_close(draws.std(0), sd, rtol=0.05, atol=0.0)
    sd.requires_grad_()
    noise = normal(3, seed=1)
    reparameterized(mean, sd, noise).sum().backward()
    assert torch.equal(sd.grad, noise)


def test_reconstruction_error_by_hand():
    images, target = torch.full((2, 1, 2, 2), 0.25), torch.full((2, 1, 2, 2), 0.25)
    images[0] += 0.5  # four pixels of 0.25
    images[1, 0, 0, 0] += 1.0  # one pixel of 1
    assert reconstruction_error(images, target).item() == pytest.approx((1.0 + 1.0) / 2)
    assert reconstruction_error(images, target, "mean").item() == pytest.approx((0.25 + 0.25) / 2)


PROTOTYPES = torch.tensor([[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]])
FEATURES = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [2.0, 1.0]])
LABELS = torch.tensor([0, 0, 1])


def test_matching_by_hand():
    everybody = torch.ones(3)
    # Class 0: the mean is the prototype. Class 1: distance 1. Class 2 is not in the batch.
    assert distribution_matching(FEATURES, LABELS, PROTOTYPES, everybody).item() == pytest.approx((0 + 1) / 2)
    further = FEATURES + torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])  # twice as far: four times as much
    assert distribution_matching(further, LABELS, PROTOTYPES, everybody).item() == pytest.approx((0 + 4) / 2)
    assert distribution_matching(FEATURES, LABELS, PROTOTYPES, everybody, "pointwise").item() == pytest.approx(1.0)


@pytest.mark.parametrize(("mode", "expected"), [("class_mean", 0.0), ("pointwise", 1.0)])
def test_classes_without_prototype_are_left_out_of_matching(mode, expected):
    known = torch.tensor([1.0, 0.0, 1.0])
    assert distribution_matching(FEATURES, LABELS, PROTOTYPES, known, mode).item() == pytest.approx(expected)
    assert distribution_matching(FEATURES, LABELS, PROTOTYPES, torch.zeros(3), mode).item() == 0.0


@pytest.mark.parametrize("mode", ["class_mean", "pointwise"])
def test_matching_is_zero_on_the_prototypes(mode):
    assert distribution_matching(PROTOTYPES[LABELS], LABELS, PROTOTYPES, torch.ones(3), mode).item() == 0.0


def test_pointwise_matching_is_never_below_that_of_class_means():
    """Jensen's inequality, class by class; over several classes it holds where they have equally many samples."""
    for seed in range(5):
        features, labels = normal(12, 4, seed=seed), torch.arange(12) % 3
        prototypes = normal(3, 4, seed=seed + 50)
        low, high = (
            distribution_matching(features, labels, prototypes, torch.ones(3), mode)
            for mode in ("class_mean", "pointwise")
        )
        assert high >= low


@pytest.mark.parametrize("mode", ["class_mean", "pointwise"])
def test_matching_of_many_clients_at_once(mode):
    features, labels = normal(4, 6, 5), torch.randint(0, 3, (4, 6), generator=rng(1))
    prototypes, known = normal(3, 5, seed=2), torch.tensor([1.0, 1.0, 0.0])
    together = vmap(lambda z, y: distribution_matching(z, y, prototypes, known, mode))(features, labels)
    one_by_one = [distribution_matching(features[k], labels[k], prototypes, known, mode) for k in range(4)]
    torch.testing.assert_close(together, torch.stack(one_by_one))


def test_latents_of_a_class():
    prototype, sd = torch.tensor([2.0, -4.0]), torch.tensor([0.1, 0.4])
    latents = class_latents(prototype, sd, 10_000, rng())
    torch.testing.assert_close(latents.mean(0), prototype, rtol=0.05, atol=0.0)
    torch.testing.assert_close(latents.std(0), sd, rtol=0.05, atol=0.0)
    assert torch.equal(class_latents(prototype, sd, 3, rng(7)), class_latents(prototype, sd, 3, rng(7)))
