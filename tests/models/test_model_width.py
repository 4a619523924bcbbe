"""Width slicing: groups, sub-models at a rate, rolled windows, the scaler."""

from __future__ import annotations

import copy
import zlib

import pytest
import torch
from model_examples import EXAMPLES, SMALL, disturb, inputs, make, shapes_of, sliced

from polyfed.core.errors import InputError
from polyfed.core.width import rolled as window
from polyfed.core.width import shapes_at
from polyfed.models import Scaler, activate_scalers, channel_index, scaled
from polyfed.models.width import mesh, take

every = pytest.mark.parametrize("spec", EXAMPLES)


def prefix(group, width):
    return 0


def rolled(salt):
    # another start in every group: only truly tied axes may share a group
    return lambda group, width: zlib.crc32(f"{salt}{group}".encode())


def test_scaled_rounds_up_without_floating_point_noise():
    assert [scaled(64, rate) for rate in (1, 0.9, 0.8, 0.7, 0.4, 0.1, 0.0001)] == [64, 58, 52, 45, 26, 7, 1]
    assert scaled(10, 0.7) == 7 and scaled(10, 1 - 0.3) == 7 and scaled(100, 0.07) == 7


@every
def test_rate_one_is_the_model(spec):
    plain, rated = make(spec), make(f"{spec}@1")
    assert plain.state_dict().keys() == rated.state_dict().keys()
    pairs = zip(plain.state_dict().values(), rated.state_dict().values(), strict=True)
    assert all(torch.equal(tensor, other) for tensor, other in pairs)


@every
def test_groups_cover_every_axis_of_every_tensor(spec):
    model = make(spec, (3, 8, 8))
    groups, widths = model.width_groups(), {}
    assert {name: len(axes) for name, axes in groups.items()} == {
        name: tensor.dim() for name, tensor in model.state_dict().items()
    }
    for name, tensor in model.state_dict().items():
        for axis, size in zip(groups[name], tensor.shape, strict=True):
            if axis is not None:
                group, repeat = axis
                assert size % repeat == 0
                assert widths.setdefault(group, size // repeat) == size // repeat
    assert groups["head.weight"][0] is None and groups["head.bias"] == (None,)
    assert widths


@pytest.mark.parametrize("rate", [0.7, 0.5, 0.05])
@every
def test_prefix_slices_are_the_sub_model(spec, rate):
    full, sub = make(spec, (3, 8, 8)), make(f"{spec}@{rate}", (3, 8, 8))
    state = sliced(full, sub, prefix)
    assert full.state_dict().keys() == sub.state_dict().keys()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == shapes_of(sub)
    assert sub.family == full.family
    sub.load_state_dict(state)
    assert sub.eval()(inputs((3, 8, 8))).isfinite().all()
    groups, wide = full.width_groups(), full.state_dict()
    for name, tensor in state.items():  # a prefix, not just any part
        corner = wide[name][tuple(slice(0, size) for size in tensor.shape)]
        flattened = any(axis is not None and axis[1] > 1 for axis in groups[name])
        assert flattened or torch.equal(tensor, corner)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32)], ids=str)
@pytest.mark.parametrize("spec", SMALL)
def test_rolling_the_whole_width_does_not_change_the_function(spec, shape):
    model, other = make(spec, shape).double(), make(spec, shape, seed=9).double()
    disturb(model)
    x = inputs(shape).double()
    for salt in range(3):
        other.load_state_dict(sliced(model, model, rolled(salt)))
        assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        torch.testing.assert_close(other.eval()(x), model.eval()(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other.train()(x), copy.deepcopy(model).train()(x), rtol=1e-5, atol=1e-5)


def test_indices_by_hand():
    groups = {"w": (("a", 1), ("b", 2)), "v": (None,), "n": ()}
    index = channel_index(groups, {"w": (4, 6), "v": (3,), "n": ()}, {"w": (2, 4), "v": (3,), "n": ()}, window(2))
    assert index["w"][0].tolist() == [2, 3]
    assert index["w"][1].tolist() == [4, 5, 0, 1]  # channels 2 and 0 of three, two columns each
    assert index["v"] == (None,) and index["n"] == ()
    full = torch.arange(24.0).view(4, 6)
    assert take(full, index["w"]).tolist() == [[16, 17, 12, 13], [22, 23, 18, 19]]
    assert torch.equal(full[mesh(index["w"], full.shape)], take(full, index["w"]))
    full[mesh(index["w"], full.shape)] = -1
    assert (full == -1).sum() == 8
    assert torch.tensor(5.0)[mesh((), ())] == 5


def test_a_window_that_is_everything_is_none():
    index = channel_index({"w": (("a", 1),)}, {"w": (4,)}, {"w": (4,)}, window(4))
    assert index["w"] == (None,)


@pytest.mark.parametrize(
    ("sub", "words"),
    [
        ({"u": (2, 4)}, "no tensor 'u'"),
        ({"w": (5, 4)}, "cannot hold 5 of 4"),
        ({"w": (2, 3)}, "columns to a channel"),
        ({"w": (2, 4), "v": (3,)}, "width group 'a'"),
        ({"w": (2,)}, "numbers of axes"),
        ({"z": (2,)}, "never sliced"),
    ],
)
def test_models_that_do_not_fit_are_refused(sub, words):
    groups = {"w": (("a", 1), ("b", 2)), "v": (("a", 1),), "z": (None,)}
    with pytest.raises(InputError, match=words):
        channel_index(groups, {"w": (4, 6), "v": (4,), "z": (3,)}, sub, window(0))


def test_bottleneck_outputs_scale_by_planes():
    # 4 * ceil(0.3 * 6) = 8, while ceil(0.3 * 24) = 8 too; at 0.35: 4 * 3 = 12, not ceil(8.4) = 9
    model = make("resnet50:w6@0.35")
    assert model.stages[0][0].layers[2].conv.out_channels == 12
    assert model.feature_dim == 4 * scaled(48, 0.35)


@pytest.mark.parametrize("rate", [0.9, 0.7, 0.5, 0.35, 0.3, 0.05])
@every
def test_shapes_at_a_rate_are_those_of_the_constructor(spec, rate):
    full = make(spec, (3, 8, 8))
    assert shapes_at(full.width_groups(), shapes_of(full), rate) == shapes_of(make(f"{spec}@{rate}", (3, 8, 8)))


def test_scaler_divides_only_in_active_training():
    scaler, x = Scaler(0.25), torch.ones(3)
    assert torch.equal(scaler(x), x)
    scaler.active = True
    assert torch.equal(scaler(x), 4 * x)
    assert torch.equal(scaler.eval()(x), x)
    assert not scaler.state_dict()


@every
def test_scalers_follow_every_hidden_layer(spec):
    model = make(f"{spec}@0.5")
    scalers = [layer for layer in model.modules() if isinstance(layer, Scaler)]
    assert scalers and all(scaler.rate == 0.5 and not scaler.active for scaler in scalers)
    weights = [name for name, p in model.named_parameters() if p.dim() > 1 and not name.startswith("head.")]
    norms = [layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    if norms and hasattr(model, "last"):
        assert len(scalers) == len(norms)  # one before every norm
    else:
        assert len(scalers) == len(weights)
    activate_scalers(model)
    assert all(scaler.active for scaler in scalers)
    activate_scalers(model, False)
    assert not any(scaler.active for scaler in scalers)


@pytest.mark.parametrize("spec", ["cnn:6-10-12,bn", "resnet10:w4", "resnet18:w4,pre", "resnet50:w4", "wrn-10-1"])
def test_scalers_stand_before_norms_which_take_the_factor_away(spec):
    model, x = make(f"{spec}@0.5", (3, 8, 8)).double(), inputs((3, 8, 8)).double()
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.eps = 1e-12
    plain = model.train()(x)
    activate_scalers(model)
    torch.testing.assert_close(model.train()(x), plain, rtol=1e-6, atol=1e-6)


def test_active_scaler_changes_training_of_an_mlp_only():
    model, x = make("mlp:2x16@0.5"), inputs((1, 8, 8))
    before, evaluated = model.train()(x), model.eval()(x)
    activate_scalers(model)
    assert not torch.allclose(model.train()(x), before)
    assert torch.equal(model.eval()(x), evaluated)
