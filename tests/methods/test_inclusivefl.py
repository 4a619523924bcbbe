"""InclusiveFL: the acceptance properties of its spec."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from tests.contract.table import synthetic

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.depth import top_names
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.settings import Settings
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.inclusivefl import InclusiveFL, donors_of
from polyfed.models import build

SIZES = ["mlp:2x8", "mlp:3x8", "mlp:4x8"]  # one, two and three blocks in the stack `layers`
SAMPLES = {0: 10, 1: 10, 2: 30, 3: 30}
MOVES = {  # how far each client moves its layers; all others move by the client's number and 1
    0: {"layers.0": 1.0},
    1: {"layers.0": 2.0, "layers.1": 4.0},
    2: {"layers.0": 6.0, "layers.1": 8.0, "layers.2": 12.0},
    3: {"layers.0": 4.0, "layers.1": 6.0},
}


def made(method, models=SIZES, clients=3, rounds=1):
    settings = Settings(rounds, training=pf.Training(epochs=1, batch_size=8, lr=0.05))
    return prepare(method, synthetic(clients), list(models), settings)


def move(client, name):
    return next((by for prefix, by in MOVES[client].items() if name.startswith(prefix)), client + 1.0)


def fuse(run, clients=(0, 1, 2), moves=move):
    """Let the server fuse replies that lie so far from what it sent; return how far every tensor of a client moved."""
    step = pf.Step()
    before = {c: run.method.send(run.server, info, step, run.ctx).detached() for c, info in run.backend.infos.items()}
    replies = {}
    for client in clients:
        state = {name: tensor + moves(client, name) for name, tensor in before[client].params["main"].items()}
        replies[client] = Message({"main": state}, meta={"samples": SAMPLES[client]})
    run.method.fuse(run.server, replies, step, run.ctx)
    moved = {}
    for client, info in run.backend.infos.items():
        after = run.method.send(run.server, info, step, run.ctx).params["main"]
        changes = {name: tensor - before[client].params["main"][name] for name, tensor in after.items()}
        for change in changes.values():
            torch.testing.assert_close(change, change.flatten()[0].expand_as(change), rtol=1e-4, atol=1e-5)
        moved[client] = {name: float(change.double().mean()) for name, change in changes.items()}
    return moved


def assert_moved(moved, expected):
    for client, layers in expected.items():
        for prefix, by in layers.items():
            for name in (n for n in moved[client] if n.startswith(prefix)):
                assert moved[client][name] == pytest.approx(by, abs=1e-4), (client, name)


ALL = (10 * 1 + 10 * 2 + 30 * 3) / 50  # the mean of what moves by the client's number and 1
BOTH = (10 * 2 + 30 * 6) / 40  # the mean of layers.0 over the sizes of which it is not the top


def test_tops_learn_from_the_blocks_of_the_next_size_and_the_rest_is_shared():
    moved = fuse(made(InclusiveFL(beta=0.25)))
    assert_moved(
        moved,
        {
            0: {"stem": ALL, "layers.0": 0.75 * 1 + 0.25 * (2 + 4) / 2, "head": ALL},
            1: {"stem": ALL, "layers.0": BOTH, "layers.1": 0.75 * 4 + 0.25 * (8 + 12) / 2, "head": ALL},
            2: {"stem": ALL, "layers.0": BOTH, "layers.1": 8.0, "layers.2": 12.0, "head": ALL},
        },
    )


def test_the_sizes_own_update_is_that_of_its_clients_only():
    """Two clients have the middle size: the donor is their mean, by samples."""
    run = made(InclusiveFL(beta=0.5), [*SIZES, "mlp:3x8"], clients=4)
    moved = fuse(run, (0, 1, 2, 3))
    donor = ((10 * 2 + 30 * 4) / 40 + (10 * 4 + 30 * 6) / 40) / 2
    own = (10 * 4 + 30 * 6) / 40
    assert_moved(moved, {0: {"layers.0": 0.5 * 1 + 0.5 * donor}, 1: {"layers.1": 0.5 * own + 0.5 * 10}})
    run = made(InclusiveFL(beta=0.5, weighting="uniform"), [*SIZES, "mlp:3x8"], clients=4)
    assert_moved(fuse(run, (0, 1, 2, 3)), {0: {"layers.0": 0.5 * 1 + 0.5 * (3 + 5) / 2}})


def test_without_beta_tops_are_their_sizes_own():
    assert_moved(fuse(made(InclusiveFL(beta=0.0))), {0: {"layers.0": 1.0}, 1: {"layers.1": 4.0, "layers.0": BOTH}})


def test_a_shared_top_is_averaged_over_all_that_hold_its_name():
    moved = fuse(made(InclusiveFL(beta=0.0, share_top=True)))
    mean = (10 * 1 + 10 * 2 + 30 * 6) / 50
    assert_moved(moved, {0: {"layers.0": mean}, 1: {"layers.0": mean, "layers.1": (10 * 4 + 30 * 8) / 40}})


def test_donors_that_move_alike_change_nothing():
    moved = fuse(made(InclusiveFL(beta=0.7)), moves=lambda client, name: 3.0)
    assert all(by == pytest.approx(3.0, abs=1e-4) for layers in moved.values() for by in layers.values())


def test_a_size_without_clients_gets_what_is_shared_and_what_is_donated():
    moved = fuse(made(InclusiveFL(beta=0.25)), clients=(1, 2))
    common = (10 * 2 + 30 * 3) / 40
    assert_moved(moved, {0: {"stem": common, "head": common, "layers.0": 0.25 * (2 + 4) / 2}})


def test_without_donors_nothing_is_blended():
    moved = fuse(made(InclusiveFL(beta=0.25)), clients=(0, 2))
    assert_moved(moved, {0: {"layers.0": 1.0}, 1: {"layers.1": 0.25 * 10, "layers.0": 6.0}, 2: {"layers.1": 8.0}})


def test_with_a_delay_the_update_of_the_round_before_is_used():
    run = made(InclusiveFL(beta=0.25, delay=1))
    assert_moved(fuse(run), {0: {"layers.0": 1.0}, 1: {"layers.1": 4.0}})
    assert_moved(fuse(run, moves=lambda client, name: 1.0), {0: {"layers.0": 0.75 + 0.25 * 3}, 1: {"layers.1": 3.25}})
    assert_moved(fuse(run), {0: {"layers.0": 1.0}, 1: {"layers.1": 3.25}})


def test_classifiers_of_sizes_stay_apart_unless_shared():
    one, other = made(InclusiveFL(share_head=False)), made(InclusiveFL(share_head=False))
    moved = fuse(one)
    assert_moved(moved, {client: {"head": client + 1.0} for client in range(3)})
    fuse(other, moves=lambda client, name: 9.0 if (client, name) == (2, "head.bias") else move(client, name))
    for key, tensor in one.server.state.items():
        assert torch.equal(other.server.state[key], tensor) == (key != "mlp:4x8::head.bias"), key


def test_all_sizes_start_from_the_same_values_and_the_server_has_the_largest():
    run = made(InclusiveFL(share_head=False))
    sent = [run.method.send(run.server, info, pf.Step(), run.ctx).params["main"] for info in run.backend.infos.values()]
    largest = run.ctx.blueprints["mlp:4x8"].initial
    for state in sent:
        assert all(torch.equal(tensor, largest[name]) for name, tensor in state.items())
    fuse(run)
    for name, tensor in run.server.main.state_dict().items():
        assert torch.equal(
            tensor, run.method.send(run.server, run.backend.infos[2], pf.Step(), run.ctx).params["main"][name]
        )


def tops_of(*depths):
    blueprints = made(InclusiveFL(beta=0.0), [f"resnet{depth}:w4" for depth in depths]).ctx.blueprints
    return [{".".join(top.split(".")[:3]) for top in top_names(b, blueprints)} for b in blueprints.values()]


def test_the_tops_of_residual_stages():
    assert tops_of(10, 14, 18) == [  # in the first stage, block 0 is like all others
        {"stages.0.0"},
        {"stages.0.0", "stages.2.1", "stages.3.1"},
        {"stages.0.1", "stages.1.1", "stages.2.1", "stages.3.1"},
    ]
    assert tops_of(10, 14) == [set(), {"stages.2.1", "stages.3.1"}]  # one block at all sizes: nothing is left out


def test_donors_have_the_shape_of_what_they_give_to():
    shapes = {"layers.0.w": (2, 2), "layers.1.w": (3, 2), "layers.2.w": (2, 3), "layers.3.w": (2, 2)}
    large = SimpleNamespace(shapes=shapes, buffers=frozenset())
    small = SimpleNamespace(shapes={"layers.0.w": (2, 2)}, buffers=frozenset())
    assert donors_of(small, large, {"small": small, "large": large}) == {"layers.0.w": ["layers.0.w", "layers.3.w"]}


def test_statistics_of_a_top_are_not_blended():
    run = made(InclusiveFL(beta=0.5), ["resnet:1-1,w4,stem=pool", "resnet:2-2,w4,stem=pool"], clients=2)
    moved = fuse(run, (0, 1), moves=lambda client, name: 2.0 * client + 1.0)
    for name, by in moved[0].items():
        if name.startswith("stages.0"):
            assert by == pytest.approx(1.0 if "running" in name else 0.5 * 1 + 0.5 * 3, abs=1e-4), name


@dataclass(frozen=True)
class Frozen:
    """Builds a network of the zoo with one frozen layer."""

    spec: str
    layer: str

    @property
    def __name__(self):
        return self.spec

    def __call__(self, input_shape, num_classes):
        module = build(self.spec, input_shape, num_classes)
        module.get_submodule(self.layer).requires_grad_(False)
        return module


def test_frozen_blocks_neither_give_nor_take():
    run = made(InclusiveFL(beta=0.25), ["mlp:2x8", Frozen("mlp:3x8", "layers.1"), "mlp:4x8"])
    moved = fuse(run)
    assert_moved(moved, {0: {"layers.0": 0.75 * 1 + 0.25 * 2}, 1: {"layers.0": BOTH}})
    assert not any(name.startswith("layers.1") for name in moved[1])


def test_one_size_is_fedavg():
    runs = [made(method, ["mlp:2x8"], rounds=2) for method in (InclusiveFL(share_head=False), FedAvg())]
    ours, plain = (run.run() and run.server.main.state_dict() for run in runs)
    assert all(torch.equal(ours[name], tensor) for name, tensor in plain.items())


def test_every_client_exchanges_its_own_network():
    run = made(InclusiveFL(share_head=False))
    run.run()
    for client, info in run.backend.infos.items():
        size = 4 * info.parameters
        assert run.meter.bytes["down"][client] == size
        assert run.meter.bytes["up"][client] == size + 8


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match="share_top needs beta=0"):
        InclusiveFL(share_top=True)
    with pytest.raises(InputError, match="view must stay 'auto'"):
        InclusiveFL(view="full")
    with pytest.raises(InputError, match="beta must be at most 1"):
        InclusiveFL(beta=1.5)
    with pytest.raises(InputError, match="one shape for each name"):
        made(InclusiveFL(beta=0.0), ["mlp:2x8@1", "mlp:2x8@0.5"])
    with pytest.raises(InputError, match=r"architectures of one family .*: use depths of one network"):
        made(InclusiveFL(), ["mlp:2x8", "cnn:4"])


@pytest.mark.parametrize(("buffers", "held"), [("average", True), ("local", False)])
def test_running_statistics_are_shared_where_they_are_averaged(buffers, held):
    run = made(InclusiveFL(buffers=buffers, beta=0.0), ["resnet10:w4", "resnet14:w4"])
    slots = run.method.slots_of(run.ctx.blueprints["resnet10:w4"], run.ctx)
    assert any("running_mean" in name for name in slots) == held


def test_sizes_of_which_none_can_learn_from_a_larger_one_are_refused():
    """The one block of each of resnet10's stages changes the width: nothing would be left but FedAvg."""
    clients = pf.split(pf.load("digits", limit=(60, 30)), 2, seed=0)
    with pytest.raises(InputError, match="resnet18 and resnet26"):
        pf.run("inclusivefl", clients, ["resnet10:w4", "resnet14:w4"], rounds=1)
    result = pf.run(pf.InclusiveFL(beta=0.0), clients, ["resnet10:w4", "resnet14:w4"], rounds=1)
    assert len(result.history) == 1
