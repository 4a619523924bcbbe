"""Adapters: the contract for a user's own module, and equal feature dimensions."""

from __future__ import annotations

import copy

import pytest
import torch
from model_examples import inputs, make, shapes_of, sliced
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from polyfed.core.errors import InputError
from polyfed.models import adapt, check_model, count_parameters, parameter_parts, properties, with_feature_dim

SHAPE = (3, 12, 12)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        return (x + self.bn(self.conv(x))).relu()


class Vision(nn.Module):
    """Looks like a torchvision ResNet: layers called by name, flattened by a function, batch size from the input."""

    def __init__(self, classes=5):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Residual(4), Residual(4))
        self.layer2 = nn.Sequential(nn.Conv2d(4, 6, 3), Residual(6))
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(6, classes)

    def forward(self, x):
        batch = x.shape[0]
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        x = self.layer2(self.layer1(x))
        x = x.mean((2, 3)).view(batch, -1)
        return self.fc(self.dropout(x))


class Nested(nn.Module):
    """Cut points inside other modules, and a head of several layers."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleDict(
            {"first": nn.Conv2d(3, 4, 3), "rest": nn.Sequential(nn.ReLU(), nn.Conv2d(4, 2, 3))}
        )
        self.out = nn.ModuleDict(
            {"classifier": nn.Sequential(nn.Flatten(), nn.Linear(128, 8), nn.ReLU(), nn.Linear(8, 5))}
        )

    def forward(self, x):
        return self.out["classifier"](self.backbone["rest"](self.backbone["first"](x)))


def sequential():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)
    )


CASES = [
    (Vision, {"head": "fc", "stem": "maxpool"}),
    (Vision, {"head": "fc", "stem": "layer1"}),
    (Vision, {"head": "fc", "stem": "layer1.0"}),
    (Vision, {"head": "fc", "stem": "bn1"}),
    (Nested, {"head": "out.classifier", "stem": "backbone.first"}),
    (sequential, {"head": "5", "stem": "2"}),
    (sequential, {"head": "5", "stem": "0"}),
]
cases = pytest.mark.parametrize(("factory", "cuts"), CASES)


def adapted(factory, cuts, seed=0):
    torch.manual_seed(seed)
    return adapt(factory(), **cuts, input_shape=SHAPE)


@cases
def test_adapted_models_keep_the_contract(factory, cuts):
    model, x = adapted(factory, cuts), inputs(SHAPE)
    check_model(model, SHAPE)
    assert {"features", "split3"} <= properties(model) and "width" not in properties(model)
    assert model.num_classes == 5
    model.eval()
    assert torch.equal(model(x), model.model(x))
    assert torch.equal(model.head(model.features(x)), model(x))
    assert torch.equal(model.middle(model.stem(x)), model.features(x))
    assert model(x[:1]).shape == (1, 5)


@cases
def test_training_through_the_parts_is_training_the_model(factory, cuts):
    whole, parts, x = adapted(factory, cuts), adapted(factory, cuts), inputs(SHAPE)
    losses = []
    for model, run in ((whole, whole), (parts, lambda x: parts.head(parts.middle(parts.stem(x))))):
        model.train()
        torch.manual_seed(1)  # dropout
        loss = nn.functional.cross_entropy(run(x), torch.tensor([0, 1, 2, 3]))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
    # every layer saw the batch exactly once: the zeros that start `middle` leave no trace in BatchNorm
    for (name, one), other in zip(whole.named_buffers(), parts.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    assert all(layer.training for layer in parts.modules())


def test_middle_takes_features_of_another_client():
    model, s = adapted(*CASES[1]).train(), torch.randn(7, 4, 6, 6)
    before = model.model.bn1.running_mean.clone()
    model.middle(s).sum().backward()
    assert torch.equal(model.model.bn1.running_mean, before)
    assert model.model.conv1.weight.grad is None
    assert model.model.layer2[0].weight.grad.abs().sum() > 0


@cases
def test_parts_of_the_parameters(factory, cuts):
    parts = parameter_parts(adapted(factory, cuts), SHAPE)
    assert set(parts) == {name for name, _ in adapted(factory, cuts).named_parameters()}
    first = {"Vision": "model.conv1.weight", "Nested": "model.backbone.first.weight", "sequential": "model.0.weight"}
    assert parts[first[factory.__name__]] == "stem"
    assert all((part == "head") == name.startswith(f"model.{cuts['head']}") for name, part in parts.items())


@cases
def test_state_names_are_those_of_the_user_under_a_prefix(factory, cuts):
    model = adapted(factory, cuts)
    assert list(model.state_dict()) == [f"model.{name}" for name in factory().state_dict()]


@pytest.mark.parametrize("part", ["forward", "features", "split"])
@cases
def test_stacked_states_equal_one_by_one(factory, cuts, part):
    models = [adapted(factory, cuts, seed).double().train() for seed in (0, 1)]
    for model in models:
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
    x = torch.stack([inputs(SHAPE, seed=seed).double() for seed in (3, 4)])

    class Caller(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            if part == "split":
                return self.net.head(self.net.middle(self.net.stem(x)))
            return self.net(x) if part == "forward" else self.net.head(self.net.features(x))

    callers = [Caller(model) for model in models]
    parameters, buffers = stack_module_state(callers)
    parameters = {name: tensor.detach() for name, tensor in parameters.items()}
    base = copy.deepcopy(callers[0])

    def loss(p, b, x):
        return functional_call(base, (p, b), (x,)).square().sum()

    gradients = vmap(grad(loss), randomness="different")(parameters, buffers, x)
    for place, caller in enumerate(callers):
        caller(x[place]).square().sum().backward()
        for name, parameter in caller.named_parameters():
            torch.testing.assert_close(gradients[name][place], parameter.grad, rtol=1e-5, atol=1e-5)
        for name, buffer in caller.named_buffers():
            torch.testing.assert_close(buffers[name][place], buffer, rtol=1e-5, atol=1e-5)


def test_without_input_shape_sizes_come_from_the_head():
    model = adapt(Vision(), "fc")
    assert (model.feature_dim, model.num_classes) == (6, 5)
    assert properties(model) == {"features", "batchnorm", "dropout"}
    assert not hasattr(model, "stem") and not hasattr(model, "family")
    check_model(model, SHAPE)


def test_declared_members_of_the_user_are_passed_on():
    inner = make("cnn:4-6", SHAPE)
    model = adapt(inner, "head", input_shape=SHAPE)
    assert model.family == inner.family
    assert model.width_groups() == {f"model.{name}": axes for name, axes in inner.width_groups().items()}


class LogSoftmax(Vision):
    def forward(self, x):
        return super().forward(x).log_softmax(1)


class Tuple(Vision):
    def forward(self, x):
        return super().forward(x), 1


class Images(Vision):
    def forward(self, x):
        return super().forward(x)[:, :, None]


class Unused(Vision):
    def __init__(self):
        super().__init__()
        self.old = nn.Linear(6, 5)


class Around(Vision):
    """The input goes around layer1."""

    def forward(self, x):
        x = self.conv1(x)
        x = self.layer2(self.layer1(x) + x)
        return self.fc(x.mean((2, 3)))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (Vision(), {"head": "fcc"}, "did you mean 'fc'"),
        (Vision(), {"head": "fc", "stem": "layer3"}, "did you mean 'layer"),
        (Vision(), {"head": "layer1"}, "without a linear layer.*'fc'"),
        (Vision(), {"head": ""}, "Unknown submodule"),
        (Vision(), {"head": "fc", "stem": "layer1", "input_shape": None}, "needs input_shape"),
        (LogSoftmax(), {"head": "fc"}, "softmax"),
        (Tuple(), {"head": "fc"}, "a tuple"),
        (Images(), {"head": "fc"}, r"\(2, 5, 1\)"),
        (Unused(), {"head": "old"}, "never reaches the head 'old'"),
        (Around(), {"head": "fc", "stem": "layer1"}, "does not decide"),
        (Vision(), {"head": "fc", "input_shape": (1, 12, 12)}, "cannot take inputs"),
        (Vision(), {"head": "fc", "num_classes": 4}, "num_classes=4"),
        (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), {"head": "0", "input_shape": (3,)}, "come last"),
        (nn.Sequential(nn.Flatten(), nn.LazyLinear(5)), {"head": "1", "input_shape": None}, "needs input_shape"),
        (nn.ReLU(), {"head": "fc"}, "it has none"),
    ],
)
def test_wrong_cuts_are_explained(model, options, words):
    with pytest.raises(InputError, match=words):
        adapt(model, **{"input_shape": SHAPE} | options)


def test_a_failing_forward_leaves_the_module_usable():
    model = adapted(*CASES[1]).train()
    with pytest.raises(RuntimeError):
        model.middle(torch.zeros(2, 9, 6, 6))
    assert "forward" not in vars(model.model.fc) and "forward" not in vars(model.model.layer1)
    assert all(layer.training for layer in model.modules())
    assert model(inputs(SHAPE)).shape == (4, 5)


@pytest.mark.parametrize("kind", ["linear", "avgpool"])
@pytest.mark.parametrize("source", ["resnet10:w4", "mlp:2x20", "cnn2", "user"])
def test_equal_feature_dimensions(source, kind):
    model = adapted(*CASES[1]) if source == "user" else make(source, SHAPE, 5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wide = with_feature_dim(model, 9, kind)
    assert wide.feature_dim == 9 and wide.num_classes == 5
    check_model(wide, SHAPE)
    assert "split3" in properties(wide)
    assert hasattr(wide, "width_groups") == (kind == "linear" and source != "user")
    wide.train()(inputs(SHAPE)).sum().backward()
    assert all(parameter.grad is not None for parameter in wide.parameters())  # the old head is gone
    old_head = count_parameters(model.head)
    projection = (model.feature_dim + 1) * 9 if kind == "linear" else 0
    assert count_parameters(wide) == count_parameters(model) - old_head + projection + 9 * 5 + 5
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert wide.model is not model
    if source != "user":
        assert wide.family == f"{model.family}+{kind}9"
    else:
        assert not hasattr(wide, "family")


def test_a_model_that_fits_is_returned_unchanged():
    model = make("mlp:2x20")
    assert with_feature_dim(model, 20) is model


def test_projection_by_hand():
    model, x = make("mlp:1x6", (4,), 3), torch.randn(2, 4)
    pooled = with_feature_dim(model, 3, "avgpool")
    assert torch.allclose(pooled.features(x), model.features(x).view(2, 3, 2).mean(2))
    projected = with_feature_dim(model, 3)
    by_hand = model.features(x) @ projected.projection.weight.T + projected.projection.bias
    assert torch.allclose(projected.features(x), by_hand, atol=1e-6)
    assert (projected.features(torch.randn(50, 4)) < 0).any()  # no activation


@pytest.mark.parametrize("source", ["resnet10:w4", "mlp:2x20", "cnn2"])
def test_projected_models_scale_in_width(source):
    full, sub = (with_feature_dim(make(f"{source}{rate}"), 9) for rate in ("", "@0.5"))
    state = sliced(full, sub, lambda group, width: 0)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == shapes_of(sub)
    other = copy.deepcopy(full)
    other.load_state_dict(sliced(full, full, lambda group, width: 3))
    x = inputs((1, 8, 8))
    torch.testing.assert_close(other.eval()(x), full.eval()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"), [({"d": 0}, "at least 1"), ({"d": 3, "kind": "conv"}, "kind of projection")]
)
def test_wrong_projections_are_explained(options, words):
    with pytest.raises(InputError, match=words):
        with_feature_dim(make("mlp:1x4"), **options)
