"""Convolutions by frequencies are convolutions: results, gradients, and gradients of gradients."""

import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.ops.frequency import Shape, convolve, could_pay, plan_of
from polyfed.ops.memory import KEPT, _memory, borrowed, returned


def made(samples=3, into=4, channels=5, size=(9, 7), kernel=(5, 3), seed=0):
    rng = torch.Generator().manual_seed(seed)
    shapes = (samples, into, *size), (channels, into, *kernel), (channels,)
    return [torch.randn(shape, generator=rng).requires_grad_() for shape in shapes]


def far(found, wanted):
    """The largest difference beside what the numbers are like."""
    return ((found.double() - wanted).abs().max() / wanted.pow(2).mean().sqrt().clamp_min(1e-9)).item()


@given(
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    kernel=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    reach=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    samples=st.integers(1, 4),
    biased=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_results_and_gradients_are_those_of_a_direct_convolution(sizes, kernel, reach, samples, biased):
    padding = tuple(min(r, k - 1) for r, k in zip(reach, kernel, strict=True))
    if any(size + 2 * p < k for size, p, k in zip(sizes, padding, kernel, strict=True)):
        return
    x, weight, bias = made(samples, 2, 3, sizes, kernel)
    bias = bias if biased else None
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    wanted = F.conv2d(*(None if t is None else t.double() for t in (x, weight, bias)), padding=padding)
    found = convolve(x, weight, bias, padding)
    assert found.shape == wanted.shape
    assert far(found, wanted) < 1e-5
    along = torch.randn(wanted.shape)
    exact = torch.autograd.grad(wanted, tensors, along.double())
    for ours, right in zip(torch.autograd.grad(found, tensors, along), exact, strict=True):
        assert far(ours, right) < 1e-5


def test_by_hand():
    x = torch.arange(9.0).view(1, 1, 3, 3)
    weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).view(1, 1, 2, 2)
    # [0 1 2; 3 4 5; 6 7 8]: each number and twice its neighbor below on the right
    torch.testing.assert_close(convolve(x, weight)[0, 0], torch.tensor([[8.0, 11.0], [17.0, 20.0]]))


def test_dense_maps_are_closer_to_the_truth_than_with_a_direct_convolution():
    x, weight, bias = made(32, 32, 64, (14, 14), (5, 5))
    exact = F.conv2d(x.double(), weight.double(), bias.double(), padding=2)
    direct = far(F.conv2d(x, weight, bias, padding=2), exact)
    assert far(convolve(x, weight, bias, (2, 2)), exact) < direct


def test_errors_are_small_beside_the_largest_number_of_a_map():
    x, weight, _ = made(8, 16, 16, (14, 14), (5, 5))
    for maps in ((x - 1.5).relu().detach(), torch.zeros(8, 16, 14, 14)):
        maps[:, :, 0, 0] = 1e4
        error = (
            convolve(maps, weight, None, (2, 2)).double() - F.conv2d(maps.double(), weight.double(), padding=2)
        ).abs()
        assert error.max() < 1e4 * 3e-6
    assert error[:, :, 8:, 8:].max() > 0  # also where a kernel sees zeros only


def test_the_order_of_axes_is_that_of_the_network():
    x, weight, bias = (tensor.detach() for tensor in made(size=(8, 8), kernel=(5, 5)))
    last = {"memory_format": torch.channels_last}
    assert convolve(x, weight, bias).is_contiguous()
    assert convolve(x.to(**last), weight, bias).is_contiguous(**last)
    assert convolve(x, weight.to(**last), bias).is_contiguous(**last)
    for order in (last, {"memory_format": torch.contiguous_format}):
        tensors = [x.to(**order).requires_grad_(), weight.to(**order).requires_grad_()]
        for gradient in torch.autograd.grad(convolve(*tensors).sum(), tensors):
            assert gradient.is_contiguous(**order)


def test_several_passes_before_the_gradients_do_not_disturb_each_other():
    x, weight, bias = made(size=(8, 8), kernel=(5, 5))
    more = [tensor.detach().clone().requires_grad_() for tensor in made(size=(8, 8), kernel=(5, 5), seed=1)]
    both = convolve(x, weight, bias).square().sum() + convolve(*more).square().sum() * 3
    together = torch.autograd.grad(both, [x, weight, bias, *more])
    alone = [
        *torch.autograd.grad(convolve(x, weight, bias).square().sum(), [x, weight, bias]),
        *torch.autograd.grad(convolve(*more).square().sum() * 3, more),
    ]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_only_what_is_asked_for_has_a_gradient():
    x, weight, bias = made(size=(8, 8), kernel=(5, 5))
    wanted = [torch.autograd.grad(convolve(x, weight, bias).square().sum(), one)[0] for one in (x, weight, bias)]
    for place, one in enumerate((x, weight, bias)):
        others = [tensor.detach() for tensor in (x, weight, bias)]
        others[place] = one
        convolve(*others).square().sum().backward()
        assert torch.equal(one.grad, wanted[place])


def test_gradients_can_be_differentiated_and_taken_twice():
    x, weight, bias = (tensor.detach().requires_grad_() for tensor in made(size=(8, 8), kernel=(5, 5)))

    def penalty(convolution):
        (gradient,) = torch.autograd.grad(convolution(x, weight, bias).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, weight])

    for one, other in zip(penalty(convolve), penalty(F.conv2d), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-2)
    loss = convolve(x, weight, bias).square().sum()
    first = torch.autograd.grad(loss, [x, weight, bias], retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, [x, weight, bias]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    places = [block.data_ptr() for block in _memory.free]
    assert len(places) == len(set(places))  # nothing was given back twice


def test_numbers_do_not_depend_on_what_was_computed_before_or_in_which_thread():
    x, weight, bias = made(16, 16, 16, (14, 14), (5, 5))

    def all_numbers():
        y = convolve(x, weight, bias, (2, 2))
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, weight, bias])]

    first = all_numbers()
    convolve(*made(40, 16, 24, (20, 11), (7, 5)), (1, 2)).sum().backward()
    found = [all_numbers()]
    thread = threading.Thread(target=lambda: found.append(all_numbers()))
    thread.start()
    thread.join()
    assert len(found) == 2
    for numbers in found:
        assert all(torch.equal(one, other) for one, other in zip(numbers, first, strict=True))


def test_memory_is_used_again_and_does_not_grow():
    _memory.free.clear()
    tensors = made(size=(8, 8), kernel=(5, 5))
    convolve(*tensors).sum().backward()
    blocks = {block.data_ptr() for block in _memory.free}
    assert len(blocks) == 2
    for _ in range(3):
        convolve(*tensors).sum().backward()
        with torch.no_grad():
            convolve(*tensors)
    assert {block.data_ptr() for block in _memory.free} == blocks
    taken = [borrowed(size) for size in range(1000, 1000 + KEPT + 8)]
    for block in taken:
        returned(block)
    assert len(_memory.free) == KEPT
    assert min(len(block) for block in _memory.free) >= 1008  # small ones go first
    _memory.free.clear()


def test_a_transform_is_the_discrete_one():
    shape = Shape((6, 5), (3, 3), (1, 2))
    (high, half), wide = shape.frequencies, 5 + 2
    assert (high, half) == (7, 4)
    maps = torch.randn(6, 5, 2, dtype=torch.float64).float()
    out = torch.empty(2, high * half, 2)
    plan_of(shape).inputs.there(maps, out)
    wanted = torch.fft.rfft2(maps.double(), s=(high, wide), dim=(0, 1)).flatten(0, 1)
    torch.testing.assert_close(out.double(), torch.stack([wanted.real, wanted.imag]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "samples", "into", "channels", "pays"),
    [
        (Shape((14, 14), (5, 5), (2, 2)), 32, 32, 64, True),  # FedAvg's network, second convolution
        (Shape((28, 28), (5, 5), (2, 2)), 32, 1, 32, False),  # and the first
        (Shape((12, 12), (5, 5), (0, 0)), 10, 32, 64, False),  # few samples: the weights are transformed for them
        (Shape((8, 8), (3, 3), (1, 1)), 64, 128, 128, False),  # small kernels never
        (Shape((14, 14), (5, 5), (2, 2)), 10, 32, 64, False),  # 160 products for a number
        (Shape((14, 14), (5, 5), (2, 2)), 64, 16, 32, True),  # 233
        (Shape((28, 28), (5, 5), (2, 2)), 64, 16, 32, False),  # 280, but of large maps
        (Shape((32, 32), (7, 7), (3, 3)), 32, 32, 64, True),
        (Shape((33, 33), (7, 7), (3, 3)), 32, 32, 64, False),  # large maps take longer to transform
    ],
)
def test_frequencies_are_for_large_kernels_and_many_channels(shape, samples, into, channels, pays):
    assert shape.pays(samples, into, channels) is pays


@given(
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(5, 9),
    st.integers(1, 32),
    st.integers(0, 4),
    st.integers(1, 500),
)
@settings(deadline=None)
def test_what_pays_could_pay(into, channels, kernel, size, padding, samples):
    if size + 2 * padding < kernel or 2 * padding >= kernel:  # results are not larger than inputs
        return
    if Shape((size, size), (kernel, kernel), (padding, padding)).pays(samples, into, channels):
        assert could_pay(into, channels, (kernel, kernel))


def test_few_channels_never_pay():
    assert could_pay(16, 32, (5, 5))
    assert not could_pay(6, 16, (5, 5))
    assert not could_pay(1, 64, (7, 7))
    assert not could_pay(512, 512, (3, 3))
