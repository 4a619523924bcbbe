"""One table over all registered models: every one keeps the contract."""

from __future__ import annotations

import pytest
import torch
from model_examples import EXAMPLES, OTHERS, SHAPES, SMALL, inputs, make
from safetensors.torch import load, save
from torch.func import functional_call, stack_module_state, vmap

from polyfed.models import check_model, names, parameter_parts, properties

both = pytest.mark.parametrize("shape", SHAPES, ids=str)
every = pytest.mark.parametrize("spec", EXAMPLES)


def test_the_table_covers_the_registry():
    tried = [*EXAMPLES, *(spec for spec, _ in OTHERS)]
    covered = {spec.partition(":")[0] for spec in tried} | {spec.partition("-")[0] for spec in tried}
    others = {"timm", "torchvision", "hf", "sklearn", "xgboost", "lightgbm"}  # test_others.py and test_learner.py
    assert set(names()) <= covered | others


@both
@every
def test_parts_make_up_the_whole(spec, shape):
    model, x = make(spec, shape).eval(), inputs(shape)
    with torch.no_grad():
        logits = model(x)
        assert logits.shape == (4, 7)
        assert model.features(x).shape == (4, model.feature_dim)
        assert torch.equal(model.head(model.features(x)), logits)
        assert torch.equal(model.middle(model.stem(x)), model.features(x))
        torch.testing.assert_close(model(x[:1]), logits[:1], rtol=1e-4, atol=1e-4)
    check_model(model, shape)


@both
@every
def test_every_parameter_gets_a_gradient(spec, shape):
    model = make(spec, shape).train()
    torch.nn.functional.cross_entropy(model(inputs(shape)), torch.arange(4)).backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not idle
    # The head and something in front of it must really move (a dead ReLU may silence single layers, not all).
    assert model.head.weight.grad.abs().sum() > 0
    assert sum(p.grad.abs().sum() > 0 for p in model.parameters()) > 0.8 * len(list(model.parameters()))


@every
def test_declared_properties(spec):
    model = make(spec)
    held = properties(model)
    assert {"features", "split3", "width"} <= held
    assert ("batchnorm" in held) == (spec.startswith(("resnet", "wrn")) or spec.endswith("bn"))
    assert ("mlp" in held) == spec.startswith("mlp")
    assert "dropout" not in held and "exits" not in held
    assert isinstance(model.family, str)


@pytest.mark.parametrize("spec", SMALL)
def test_parameter_parts_follow_the_names(spec):
    parts = parameter_parts(make(spec), (1, 8, 8))
    expected = {"stem": "stem", "head": "head"}
    assert parts == {name: expected.get(name.partition(".")[0], "middle") for name in parts}
    assert list(parts) == [name for name, _ in make(spec).named_parameters()]


@every
def test_state_survives_safetensors(spec):
    model, other = make(spec), make(spec, seed=5)
    other.load_state_dict(load(save(model.state_dict())))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("spec", SMALL)
def test_two_stacked_states_equal_one_by_one(spec):
    # double precision: what is compared is the program, not the summation order
    models = [make(spec, (1, 8, 8), seed=seed).double().train() for seed in (0, 1)]
    x = torch.stack([inputs((1, 8, 8), 6, seed).double() for seed in (3, 4)])
    base = make(spec).double().train()
    parameters, buffers = stack_module_state(models)
    parameters = {name: tensor.detach() for name, tensor in parameters.items()}
    together = vmap(lambda p, b, x: functional_call(base, (p, b), (x,)))(parameters, buffers, x)
    for place, model in enumerate(models):
        torch.testing.assert_close(together[place], model(x[place]), rtol=1e-5, atol=1e-5)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffers[name][place], buffer, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ("mlp:1x16", "mlp:3x16"),
        ("mlp:3x16@0.5", "mlp:1x16"),
        ("resnet10:w4", "resnet26:w4"),
        ("resnet14:w4,stem=fedin", "resnet34:w4,stem=fedin"),
        ("resnet50:w2", "resnet101:w2"),
        ("wrn-10-1", "wrn-22-1"),
    ],
)
def test_a_family_is_aligned_by_name(small, large):
    a, b = make(small), make(large)
    assert a.family == b.family
    if "@" not in small:
        shapes = {name: tensor.shape for name, tensor in b.state_dict().items()}
        assert all(shapes[name] == tensor.shape for name, tensor in a.state_dict().items())
        groups = b.width_groups()
        assert all(groups[name] == axes for name, axes in a.width_groups().items() if name != "head.weight")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("mlp:2x16", "mlp:2x20"),
        ("resnet10:w4", "resnet10:w8"),
        ("resnet10:w4", "resnet10:w4,stem=fedin"),
        ("resnet18:w4", "resnet18:w4,pre"),
        ("resnet34:w4", "resnet50:w4"),
        ("cnn:6-10", "cnn:6-10,bn"),
        ("resnet:1-1,w4", "resnet:1-1-1,w4"),
        ("resnet:1-1,w4", "resnet:1-1,w4,stem_width=2"),
    ],
)
def test_what_cannot_be_averaged_by_name_is_another_family(one, other):
    assert make(one).family != make(other).family


@pytest.mark.parametrize("side", [14, 64])
@pytest.mark.parametrize("spec", ["cnn:6-10-12", "cnn2", "convnet", "resnet10:w4", "resnet10:w4,stem=fedin"])
def test_other_image_sizes(spec, side):
    check_model(make(spec, (3, side, side)), (3, side, side))


@pytest.mark.parametrize("spec", ["resnet18:w4,pre", "wrn-10-1"])
def test_preactivation_block_by_hand(spec):
    block = make(spec).eval().stages[1][0]
    x = torch.randn(2, block.conv1.conv.in_channels, 6, 6)
    activated = block.before1.norm(x).relu()
    inner = block.conv1.conv(activated)
    residual = torch.nn.functional.conv2d(activated, block.shortcut.conv.weight, block.shortcut.conv.bias, stride=2)
    expected = block.conv2.conv(block.before2.norm(inner).relu()) + residual
    assert inner.shape[-1] == 3  # the first convolution carries the stride
    torch.testing.assert_close(block(x), expected)


def test_bottleneck_strides_on_its_3x3_convolution():
    block = make("resnet50:w4").stages[1][0]
    assert [layer.conv.kernel_size[0] for layer in block.layers] == [1, 3, 1]
    assert [layer.conv.stride[0] for layer in block.layers] == [1, 2, 1]


def test_pooling_before_the_activation_changes_neither_values_nor_gradients():
    stage = make("cnn:4-4", (1, 8, 8)).stem
    x = inputs((1, 8, 8)).round()  # many equal values: ties must fall to the same pixel
    direction = torch.randn(4, 4, 4, 4)
    expected = torch.nn.functional.max_pool2d(stage.conv(x).relu(), 2)
    wanted = torch.autograd.grad(expected, list(stage.parameters()), direction)
    found = stage(x)
    assert torch.equal(found, expected)
    for one, other in zip(torch.autograd.grad(found, list(stage.parameters()), direction), wanted, strict=True):
        assert torch.equal(one, other)


def test_pooling_stops_before_the_map_vanishes():
    with torch.no_grad():
        for side, last in ((8, 2), (14, 3), (28, 3), (32, 4), (64, 8)):
            model = make("cnn:4-4-4", (1, side, side))
            assert model.stages(model.stem(inputs((1, side, side)))).shape[-1] == last
