"""Networks with a classifier behind every stage, whole and cut."""

from __future__ import annotations

import pytest
import torch
from model_examples import disturb, inputs, make, shapes_of, sliced
from torch.func import functional_call, stack_module_state, vmap

from polyfed.cli.listing import model_entry, model_text
from polyfed.core.errors import InputError
from polyfed.models import build, check_model, count_parameters, properties, signature

SHAPE = (3, 16, 16)
WHOLE = {
    "cnn:6-10-12": 3,
    "cnn:6-10-12,bn": 3,
    "resnet10:w4": 4,
    "resnet:1-2,w6,stem=pool,stem_width=4": 2,
    "resnet50:w2": 4,
}

every = pytest.mark.parametrize("spec", WHOLE)


@every
def test_every_stage_has_an_exit_and_the_last_one_is_the_model(spec):
    model = make(f"{spec},exits", SHAPE).eval()
    x = inputs(SHAPE)
    logits = model.exits(x)
    assert [z.shape for z in logits] == [(4, 7)] * WHOLE[spec]
    assert torch.equal(logits[-1], model(x))
    assert properties(model) >= {"exits", "features", "split3", "width"}
    assert "exits" not in properties(make(spec, SHAPE))
    check_model(model, SHAPE)


@every
def test_a_cut_network_is_a_part_of_the_whole_one(spec):
    whole = make(f"{spec},exits", SHAPE).eval()
    disturb(whole)
    x = inputs(SHAPE)
    for count in range(1, WHOLE[spec] + 1):
        cut = make(f"{spec},exits={count}", SHAPE, seed=count).eval()
        held = {name: signature(whole)[name] for name in signature(cut)}  # every name is there, in the same shape
        assert held == signature(cut)
        assert (held == signature(whole)) == (count == WHOLE[spec])
        cut.load_state_dict({name: whole.state_dict()[name] for name in held})
        assert all(torch.equal(a, b) for a, b in zip(cut.exits(x), whole.exits(x)[:count], strict=True))
        assert torch.equal(cut(x), whole.exits(x)[count - 1])
        assert cut.family == whole.family != make(spec, SHAPE).family
        check_model(cut, SHAPE)


@every
def test_one_seed_gives_cut_and_whole_networks_the_same_weights(spec):
    whole, cut = make(f"{spec},exits", SHAPE).state_dict(), make(f"{spec},exits=2", SHAPE).state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in cut.items())


@every
def test_the_body_is_that_of_the_ordinary_network(spec):
    plain, whole = make(spec, SHAPE), make(f"{spec},exits", SHAPE)
    body = {name: value for name, value in signature(plain).items() if not name.startswith("head")}
    assert body == {name: value for name, value in signature(whole).items() if not name.startswith("head")}


@pytest.mark.parametrize("rate", [0.7, 0.05])
@every
def test_widths_are_slices_of_the_whole_network(spec, rate):
    whole, narrow = make(f"{spec},exits", SHAPE), make(f"{spec},exits=2@{rate}", SHAPE)
    assert narrow.family == whole.family
    assert narrow.width_groups().keys() == narrow.state_dict().keys()
    assert {name: whole.width_groups()[name] for name in narrow.state_dict()} == narrow.width_groups()
    for start in (0, 3):
        narrow.load_state_dict(sliced(whole, narrow, lambda group, width, start=start: start))
        assert all(z.isfinite().all() for z in narrow.exits(inputs(SHAPE)))


@every
def test_the_same_channels_everywhere_do_not_change_any_exit(spec):
    """Rolling the channels of every group leaves the function as it is: each classifier is tied to its own stage."""
    model, rolled = (make(f"{spec},exits", SHAPE, seed=seed).double().eval() for seed in (0, 9))
    disturb(model)
    rolled.load_state_dict(sliced(model, rolled, lambda group, width: len(group)))
    x = inputs(SHAPE).double()
    for z, again in zip(model.exits(x), rolled.exits(x), strict=True):
        torch.testing.assert_close(again, z)


def test_sizes_by_hand():
    count = {n: count_parameters(build(f"cnn:4-8,exits={n}", (1, 8, 8), 10)) for n in (1, 2)}
    first = 4 * 9 + 4 + (4 * 10 + 10)  # convolution and classifier
    assert count == {1: first, 2: first + 8 * 4 * 9 + 8 + (8 * 10 + 10)}
    half = build("cnn:4-8,exits@0.5", (1, 8, 8), 10)
    assert shapes_of(half) == {
        "stem.conv.weight": (2, 1, 3, 3),
        "stem.conv.bias": (2,),
        "stages.0.conv.weight": (4, 2, 3, 3),
        "stages.0.conv.bias": (4,),
        "head.0.weight": (10, 2),
        "head.0.bias": (10,),
        "head.1.weight": (10, 4),
        "head.1.bias": (10,),
    }


def test_every_tensor_learns_from_the_exits_and_early_classifiers_not_from_the_last():
    model = make("resnet10:w4,exits", SHAPE).train()
    sum(torch.nn.functional.cross_entropy(z, torch.arange(4)) for z in model.exits(inputs(SHAPE))).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    model.zero_grad()
    model(inputs(SHAPE)).sum().backward()
    idle = {name for name, p in model.named_parameters() if p.grad is None}
    assert idle == {f"head.{number}.{kind}" for number in range(3) for kind in ("weight", "bias")}


@pytest.mark.parametrize("spec", ["cnn:4-8,bn,exits", "resnet:1-1,w4,exits"])
def test_exits_can_be_stacked(spec):
    models = [make(spec, (1, 8, 8), seed=seed).double() for seed in (0, 1)]
    x = torch.stack([inputs((1, 8, 8), 6, seed).double() for seed in (3, 4)])
    parameters, buffers = stack_module_state([model.eval() for model in models])

    class Exits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make(spec, (1, 8, 8)).double().eval()

        def forward(self, x):
            return self.net.exits(x)

    base = Exits()
    state = {f"net.{name}": tensor.detach() for name, tensor in {**parameters, **buffers}.items()}
    together = vmap(lambda s, x: functional_call(base, s, (x,)))(state, x)
    for place, model in enumerate(models):
        for z, expected in zip(together, model.exits(x[place]), strict=True):
            torch.testing.assert_close(z[place], expected)


@pytest.mark.parametrize("count", ["0", "3", "12"])
def test_there_are_as_many_exits_as_stages(count):
    with pytest.raises(InputError, match="has 2 stages: write exits, or exits=1 to exits=2"):
        make(f"cnn:4-8,exits={count}")


def test_preactivation_networks_have_none():
    with pytest.raises(InputError, match="leave out pre"):
        make("resnet18:w4,pre,exits")
    with pytest.raises(InputError, match="Unknown option for the model 'wrn'"):
        make("wrn-10-1:exits")


@pytest.mark.parametrize("name", ["resnet", "resnet18", "cnn"])
def test_the_list_of_models_shows_the_option(name):
    assert "exits[=<number>]" in model_text(model_entry(name))
