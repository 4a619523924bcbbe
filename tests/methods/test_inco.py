"""InCo: the acceptance properties of its spec."""

import math

import pytest
import torch
from tests.contract.table import synthetic

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.settings import Settings
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fedprox import FedProx
from polyfed.methods.inco import InCo, partners
from polyfed.models import build

STAGES = ("resnet:1-1,w4,stem=pool", "resnet:3-2,w4,stem=pool")


def federation(method, models=STAGES, rounds=1, clients=2):
    settings = Settings(rounds, training=pf.Training(epochs=1, batch_size=8, lr=0.05))
    made = prepare(method, synthetic(clients), list(models), settings)
    made.run()
    return made


def kernel(*values):
    return torch.tensor(values, dtype=torch.float64).reshape(1, 1, 1, -1)


def draw(*shape, seed=0):
    return 0.03 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_mixture_by_hand():
    """g_0 = (3, 4), g_k = (0, 10): theta = 40/25, sizes 5 and 10."""
    found = InCo().mixed(kernel(3.0, 4.0), kernel(0.0, 10.0))
    expected = kernel((0 + 1.6 * 0.6) * 7.5, (1 + 1.6 * 0.8) * 7.5)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    limited = InCo(theta_max=0.5).mixed(kernel(3.0, 4.0), kernel(0.0, 10.0))
    torch.testing.assert_close(limited, kernel(0.3 * 7.5, 1.4 * 7.5), rtol=1e-6, atol=0)
    against = InCo().mixed(kernel(3.0, 4.0), kernel(0.0, -10.0))  # theta is never negative
    torch.testing.assert_close(against, kernel(0.96 * 7.5, (-1 + 1.28) * 7.5), rtol=1e-6, atol=0)
    huge = InCo().mixed(kernel(1.0, 0.0), kernel(100.0, 0.0))
    torch.testing.assert_close(huge, kernel(6 * 50.5, 0.0), rtol=1e-6, atol=0)  # theta = 5, not 100


def test_the_projection_by_hand():
    rule = InCo(rule="projection")
    torch.testing.assert_close(rule.mixed(kernel(3.0, 4.0), kernel(0.0, -10.0)), kernel(4.8, -3.6), rtol=1e-6, atol=0)
    assert torch.equal(rule.mixed(kernel(3.0, 4.0), kernel(0.0, 10.0)), kernel(0.0, 10.0))


def test_equal_orthogonal_and_absent_updates():
    g = draw(5, 4, 3, 3)
    torch.testing.assert_close(InCo().mixed(g, g), 2 * g, rtol=1e-3, atol=0)
    g0, gk = kernel(0.03, 0.0, 0.0), kernel(0.0, 0.01, 0.02)
    size = math.hypot(0.01, 0.02)
    torch.testing.assert_close(InCo().mixed(g0, gk), gk * (size + 0.03) / (2 * size), rtol=1e-3, atol=0)
    torch.testing.assert_close(InCo().mixed(torch.zeros_like(g), g), g / 2, rtol=1e-3, atol=0)
    assert torch.equal(InCo().mixed(g, torch.zeros_like(g)), torch.zeros_like(g))


@pytest.mark.parametrize("rule", ["code", "projection"])
def test_every_kernel_is_mixed_by_itself_and_matrices_as_a_whole(rule):
    method = InCo(rule=rule)
    g0, gk = draw(2, 3, 3, 3), draw(2, 3, 3, 3, seed=1)
    whole = method.mixed(g0, gk)
    for i in range(2):
        for j in range(3):
            assert torch.equal(whole[i, j], method.mixed(g0[i : i + 1, j : j + 1], gk[i : i + 1, j : j + 1])[0, 0])
    for shape in ((6, 9), (6, 9, 1, 1)):
        flat = method.mixed(kernel(*g0.flatten()), kernel(*gk.flatten())).flatten()
        torch.testing.assert_close(method.mixed(g0.reshape(shape), gk.reshape(shape)).flatten(), flat)


def partners_of(spec):
    return partners({name: tuple(tensor.shape) for name, tensor in build(spec, (3, 16, 16), 3).state_dict().items()})


def test_who_is_mixed_with_whom():
    found = partners_of("resnet:2-2,w4")
    assert found == {
        f"stages.{stage}.1.layers.{layer}.conv.weight": f"stages.{stage}.0.layers.1.conv.weight"
        for stage in (0, 1)
        for layer in (0, 1)
    }
    assert partners_of("mlp:3x8") == {"layers.1.linear.weight": "layers.0.linear.weight"}
    bottleneck = partners_of(
        "resnet50:w4"
    )  # the first convolution of block 0 has other inputs; shortcuts are no partners
    assert bottleneck["stages.0.1.layers.2.conv.weight"] == "stages.0.0.layers.2.conv.weight"
    assert bottleneck["stages.0.1.layers.1.conv.weight"] == "stages.0.0.layers.1.conv.weight"
    assert "stages.0.1.layers.0.conv.weight" not in bottleneck
    assert partners_of("resnet10:w4") == {}


def test_a_round_is_layer_wise_averaging_with_mixed_updates_of_deep_convolutions():
    ours, plain = (federation(method) for method in (InCo(clip=0.004), FedAvg()))
    initial = ours.ctx.blueprints[STAGES[1]].initial
    pairs = partners({name: tuple(tensor.shape) for name, tensor in plain.server.state.items()})
    assert len(pairs) == 2 * 2 + 2
    for name, tensor in plain.server.state.items():
        if name not in pairs:
            assert torch.equal(ours.server.state[name], tensor), name
            continue
        updates = [plain.server.state[n] - initial[n] for n in (pairs[name], name)]
        mixed = InCo().mixed(*updates)
        assert mixed.abs().max() > 0.004 > mixed.abs().min()
        torch.testing.assert_close(ours.server.state[name], initial[name] + mixed.clamp(-0.004, 0.004))
        assert torch.equal(ours.server.main.state_dict()[name], ours.server.state[name])


def test_updates_are_limited_by_default_and_not_without_a_limit():
    run = prepare(InCo(), synthetic(2), ["mlp:3x8"], Settings(1))
    open_run = prepare(InCo(clip=None), synthetic(2), ["mlp:3x8"], Settings(1))
    for made, by in ((run, 0.1), (open_run, 2.0)):
        before = {name: tensor.clone() for name, tensor in made.server.state.items()}
        state = {name: tensor + 1.0 for name, tensor in before.items()}
        made.method.fuse(made.server, {0: Message({"main": state}, meta={"samples": 3})}, pf.Step(), made.ctx)
        for name, tensor in made.server.state.items():
            expected = before[name] + (by if name == "layers.1.linear.weight" else 1.0)
            torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-4)


def test_one_block_in_every_stage_has_nothing_to_mix_and_is_refused():
    """It would be layer-wise averaging, bit for bit, under another name."""
    for models in ([STAGES[0]], ["cnn:4-8"]):
        with pytest.raises(InputError, match=r"two blocks .* rule=none"):
            federation(InCo(), models)
        ours, plain = (federation(method, models) for method in (InCo(rule="none"), FedAvg()))
        for name, tensor in plain.server.state.items():
            assert torch.equal(ours.server.state[name], tensor)


def test_without_a_rule_nothing_is_mixed_or_limited():
    ours, plain = (federation(m, ["mlp:2x8", "mlp:3x8"]) for m in (InCo(rule="none", clip=1e-6), FedAvg()))
    for name, tensor in plain.server.state.items():
        assert torch.equal(ours.server.state[name], tensor)


def test_layers_of_absent_clients_stay():
    run = prepare(InCo(), synthetic(2), list(STAGES), Settings(1))
    before = {name: tensor.clone() for name, tensor in run.server.state.items()}
    sent = run.method.send(run.server, run.backend.infos[0], pf.Step(), run.ctx).params["main"]
    state = {name: tensor + 1.0 for name, tensor in sent.items()}
    run.method.fuse(run.server, {0: Message({"main": state}, meta={"samples": 3})}, pf.Step(), run.ctx)
    for name, tensor in run.server.state.items():
        assert torch.equal(tensor, before[name]) == (name not in sent), name


def test_with_a_proximal_term_clients_train_as_in_fedprox():
    ours, plain = (federation(m, ["mlp:2x8", "mlp:3x8"]) for m in (InCo(mu=1.0), FedProx(mu=1.0)))
    deep = "layers.1.linear.weight"
    for name, tensor in plain.server.state.items():
        assert torch.equal(ours.server.state[name], tensor) == (name != deep), name


def test_bytes_are_fedavgs():
    run = federation(InCo(), ["mlp:2x8", "mlp:3x8"])
    for client, info in run.backend.infos.items():
        assert run.meter.bytes["down"][client] == 4 * info.parameters
        assert run.meter.bytes["up"][client] == 4 * info.parameters + 8


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"rule": "mean"}, "rule is"),
        ({"theta_max": 0.0}, "theta_max must be above 0"),
        ({"clip": 0.0}, "clip must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(option, words):
    with pytest.raises(InputError, match=words):
        InCo(**option)
