import pytest
import torch

from polyfed.build import make_blueprint
from polyfed.core.errors import InputError
from polyfed.core.views import Full, Owned, Prefix, SameArch, Shared, contains, resolve_view
from polyfed.ops.aggregate import extract


def blueprints(*models):
    made = [make_blueprint(model, model, (1, 8, 8), 3, 0, None, "linear") for model in models]
    return {blueprint.name: blueprint for blueprint in made}


def test_full_wants_one_architecture():
    with pytest.raises(InputError, match=r"View 'full' needs one architecture.*mlp:1, mlp:2"):
        Full().layout(blueprints("mlp:1", "mlp:2"))


def test_owned_is_the_union_of_layers_started_from_the_largest():
    prints = blueprints("resnet10:w4", "resnet14:w4")
    state = Owned().layout(prints)
    floats = {n for n, t in prints["resnet14:w4"].initial.items() if t.is_floating_point()}
    assert set(state) == floats
    for name in state:
        assert torch.equal(state[name], prints["resnet14:w4"].initial[name])


def test_owned_refuses_two_shapes_under_one_name():
    with pytest.raises(InputError, match="one shape for each name"):
        Owned().layout(blueprints("mlp:1x8", "mlp:1x16"))


def test_same_arch_keeps_architectures_apart():
    prints = blueprints("mlp:1", "mlp:2")
    state = SameArch().layout(prints)
    slots = SameArch().slots(prints["mlp:1"], prints)
    assert torch.equal(extract(state, slots)["head.weight"], prints["mlp:1"].initial["head.weight"])
    assert len(state) == len(prints["mlp:1"].initial) + len(prints["mlp:2"].initial)


def test_prefix_cuts_the_first_channels_and_never_inputs_or_classes():
    prints = blueprints("cnn:8-16,bn@1", "cnn:8-16,bn@0.5")
    state = Prefix().layout(prints)
    cut = extract(state, Prefix().slots(prints["cnn:8-16,bn@0.5"], prints))
    for name, shape in prints["cnn:8-16,bn@0.5"].shapes.items():
        if prints["cnn:8-16,bn@0.5"].initial[name].is_floating_point():
            assert tuple(cut[name].shape) == shape
            full = prints["cnn:8-16,bn@1"].initial[name]
            assert torch.equal(cut[name], full[tuple(slice(0, n) for n in shape)])
    assert cut["head.weight"].shape[0] == 3


def test_prefix_refuses_shapes_that_do_not_nest():
    with pytest.raises(InputError, match="nested shapes"):
        Prefix().layout(blueprints("cnn:8-16", "cnn:16-8"))


def test_shared_names_parts_and_explains_what_is_missing():
    prints = blueprints("mlp:1x8", "mlp:2x8")
    assert set(Shared(("head",)).layout(prints)) == {"head.weight", "head.bias"}
    with pytest.raises(InputError, match=r"no tensor of mlp:2x8 under top: its names start with"):
        Shared(("top",)).layout(prints)
    assert Shared(()).layout(prints) == Shared(()).slots(prints["mlp:1x8"], prints) == {}
    with pytest.raises(InputError, match="set feature_dim"):
        Shared(("head",)).layout(blueprints("mlp:1x8", "mlp:1x16"))


def test_auto_takes_the_most_that_can_be_shared():
    assert isinstance(resolve_view("auto", blueprints("mlp:1"), True), Full)
    assert isinstance(resolve_view("auto", blueprints("resnet10:w4", "resnet14:w4"), True), Owned)
    assert isinstance(resolve_view("auto", blueprints("mlp:1", "cnn:4-8"), True), SameArch)
    assert isinstance(resolve_view("auto", blueprints("cnn:8-16@1", "cnn:8-16@0.5"), True), SameArch)
    assert resolve_view("shared:head+stem", blueprints("mlp:1"), True) == Shared(("head", "stem"), True)
    with pytest.raises(InputError, match="Unknown view 'fuull'"):
        resolve_view("fuull", blueprints("mlp:1"), True)


def test_integers_are_never_shared_and_buffers_only_if_asked():
    prints = blueprints("cnn:8,bn")
    assert not any("num_batches" in name for name in Full().layout(prints))
    assert any("running_mean" in name for name in Full().layout(prints))
    assert not any("running" in name for name in Full(buffers=False).layout(prints))


def test_an_architecture_contains_another_where_every_tensor_is_a_slice_of_its_own():
    deep, wide, narrow = blueprints("mlp:3x8", "mlp:2x8", "mlp:2x4").values()
    assert contains(wide, narrow) and not contains(narrow, wide)
    assert not contains(wide, deep)  # it lacks a layer
    assert contains(deep, deep)
