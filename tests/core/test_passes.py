"""A pass over samples: prediction mode, every sample once and in order, and a network that is left as it was."""

from __future__ import annotations

import torch

from polyfed.core.evaluate import CHUNK
from polyfed.core.passes import count_right, logits_of, pass_over
from polyfed.core.samples import Samples
from polyfed.models import build


def problem(samples: int = 2 * CHUNK + 5):
    torch.manual_seed(0)
    model = build("cnn:4-8,bn", (1, 8, 8), 3).train()
    return model, Samples(torch.randn(samples, 1, 8, 8), torch.arange(samples) % 3)


def test_pieces_cover_the_samples_in_order():
    model, data = problem()
    pieces = pass_over(model, data, lambda x, y: (x, y))
    assert [len(y) for _, y in pieces] == [CHUNK, CHUNK, 5]
    assert torch.equal(torch.cat([x for x, _ in pieces]), data.x)
    assert torch.equal(torch.cat([y for _, y in pieces]), data.y)


def test_the_network_predicts_and_is_then_as_before():
    model, data = problem()
    before = {name: (tensor.clone(), tensor.stride()) for name, tensor in model.state_dict().items()}
    expected = model.eval()(data.x).detach()  # all at once, in the usual layout
    model.train()
    torch.testing.assert_close(logits_of(model, data), expected, rtol=1e-5, atol=1e-5)
    assert model.training and all(module.training for module in model.modules())
    for name, tensor in model.state_dict().items():  # the statistics of BatchNorm, too
        assert torch.equal(tensor, before[name][0]) and tensor.stride() == before[name][1]


def test_weights_are_channels_last_and_nothing_asks_for_gradients_on_the_way():
    model, data = problem()
    weight = model.stages[0].conv.weight
    seen = pass_over(model, data, lambda x, _: (weight.is_contiguous(memory_format=torch.channels_last), model(x)))
    assert all(last and not logits.requires_grad for last, logits in seen)


def test_right_answers_are_counted():
    model, data = problem()
    assert count_right(model, data) == int((logits_of(model, data).argmax(1) == data.y).sum())
    named = Samples(data.x, logits_of(model, data).argmax(1))
    assert count_right(model, named) == len(named)
