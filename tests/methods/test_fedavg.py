"""Acceptance properties of FedAvg and FedProx (specification A1, A3, B1)."""

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.errors import InputError, TrainingError
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.nets import Net
from polyfed.core.party import Context
from polyfed.core.settings import Settings
from polyfed.core.stage import Batch
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fedprox import FedProx


def parts(*sizes, seed=0):
    rng = np.random.default_rng(seed)
    made = [(rng.normal(size=(n, 4)).astype(np.float32), rng.integers(0, 3, n)) for n in sizes]
    test = (rng.normal(size=(20, 4)).astype(np.float32), rng.integers(0, 3, 20))
    return pf.Clients.from_parts(made, test=test, num_classes=3, normalize=False)


def trained(method, clients, models=("mlp:1x8",), **options):
    settings = {"epochs": 1, "batch_size": 100, "lr": 0.1, **options.pop("training", {})}
    return pf.run(method, clients, models, training=pf.Training(**settings), **{"rounds": 1, **options})


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_one_client_is_plain_local_training():
    clients = parts(30)
    alone = trained("local", clients, rounds=3, training={"batch_size": 8})
    fed = trained("fedavg", clients, rounds=3, training={"batch_size": 8})
    assert torch.equal(flat(fed.server_model), flat(alone.models[0]))


def test_one_full_batch_step_is_a_gradient_step_on_the_pooled_data():
    clients = parts(10, 25, 40)
    fed = trained("fedavg", clients)
    pooled = trained("centralized", clients)
    assert torch.allclose(flat(fed.server_model), flat(pooled.models[0]), atol=1e-6)


@pytest.mark.parametrize(("weighting", "expected"), [("samples", (1 * 10 + 5 * 30) / 40), ("uniform", 3.0)])
def test_hand_set_weights_give_the_weighted_mean(weighting, expected, monkeypatch):
    def constant(self, client, step, ctx):
        value = 1.0 if client.id == 0 else 5.0
        state = {n: torch.full_like(t, value) for n, t in client.inbox.params["main"].items()}
        return Message({"main": state}, meta={"samples": len(client.train)})

    monkeypatch.setattr(FedAvg, "local", constant)
    result = trained(FedAvg(weighting=weighting), parts(10, 30))
    assert torch.allclose(flat(result.server_model), torch.tensor(expected))


@dataclass(frozen=True)
class InOrder(FedAvg):
    """Every client takes its samples in the order that they have."""

    name: ClassVar[str] = "in_order"

    def stage(self, client, ctx):
        return replace(super().stage(client, ctx), shuffle=False)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_clients_with_the_same_samples_in_the_same_order_give_the_network_of_any_of_them(number):
    one = parts(20)
    alone, together = (
        trained(InOrder(), parts_of(one, [0] * copies), rounds=2, training={"batch_size": 8}) for copies in (1, number)
    )
    assert torch.equal(flat(together.server_model), flat(alone.server_model))


def test_only_those_who_took_part_weigh_in_the_mean(monkeypatch):
    sizes, values = (10, 20, 30, 40), (1.0, 2.0, 5.0, 9.0)

    def constant(self, client, step, ctx):
        state = {n: torch.full_like(t, values[client.id]) for n, t in client.inbox.params["main"].items()}
        return Message({"main": state}, meta={"samples": len(client.train)})

    monkeypatch.setattr(FedAvg, "local", constant)
    result = trained("fedavg", parts(*sizes), participation=0.5)
    one, two = result.history[0]["participants"]
    mean = (sizes[one] * values[one] + sizes[two] * values[two]) / (sizes[one] + sizes[two])
    assert torch.allclose(flat(result.server_model), torch.tensor(mean))


def test_a_round_whose_replies_are_all_refused_ends_the_run_and_leaves_the_server_as_it_is(monkeypatch):
    def broken(self, client, step, ctx):
        state = {n: torch.full_like(t, float("nan")) for n, t in client.inbox.params["main"].items()}
        return Message({"main": state}, meta={"samples": len(client.train)})

    monkeypatch.setattr(FedAvg, "local", broken)
    run = prepare(FedAvg(), parts(10, 20), ["mlp:1x8"], Settings(2))
    with pytest.raises(TrainingError, match="Message from client 0 refused"):
        run.run()
    for name, tensor in run.ctx.blueprints["mlp:1x8"].initial.items():
        assert torch.equal(run.server.state[name], tensor), name


@pytest.mark.parametrize("engine", ["threads", "batched"])
def test_an_optimizer_remembers_nothing_of_the_round_before(engine):
    """One full batch a round: its step has no momentum yet, in the second round either."""
    clients = parts(30, 20)
    plain, momentum = (
        trained("fedavg", clients, rounds=2, training={"momentum": m}, engine=engine) for m in (0.0, 0.9)
    )
    torch.testing.assert_close(flat(momentum.server_model), flat(plain.server_model), rtol=0, atol=1e-6)
    longer = trained("fedavg", clients, rounds=1, training={"momentum": 0.9, "epochs": 2}, engine=engine)
    assert not torch.allclose(flat(longer.server_model), flat(plain.server_model), atol=1e-3)


def test_bytes_are_four_a_parameter_and_eight_for_the_count():
    result = trained("fedavg", parts(10, 20), rounds=3)
    size = 4 * sum(p.numel() for p in result.server_model.parameters())
    assert result.cost.bytes["down"] == {0: 3 * size, 1: 3 * size}
    assert result.cost.bytes["up"] == {0: 3 * (size + 8), 1: 3 * (size + 8)}


def test_batch_norm_statistics_are_averaged_or_stay_local():
    rng = np.random.default_rng(0)
    made = [((rng.normal(size=(12, 1, 8, 8)) + 3 * k).astype(np.float32), rng.integers(0, 2, 12)) for k in range(2)]
    clients = pf.Clients.from_parts(made, test=made[0], num_classes=2, normalize=False)
    averaged = trained("fedavg", clients, ["cnn:4,bn"])
    local = trained(FedAvg(buffers="local"), clients, ["cnn:4,bn"])
    name = "stem.norm.running_mean"
    means = [local.models[c].state_dict()[name] for c in (0, 1)]
    assert not torch.allclose(*means)
    assert torch.allclose(averaged.server_model.state_dict()[name], (means[0] + means[1]) / 2, atol=1e-6)
    assert local.server_model is None
    floats = sum(t.numel() for n, t in averaged.server_model.state_dict().items() if t.is_floating_point())
    params = sum(p.numel() for p in averaged.server_model.parameters())
    assert averaged.cost.bytes["down"][0] == 4 * floats
    assert local.cost.bytes["down"][0] == 4 * params


def test_architectures_do_not_mix():
    """Each architecture evolves as if the others were not there."""
    clients = parts(10, 20, 15)
    mixed = trained(FedAvg(view="same_arch"), clients, ["mlp:1x8", "mlp:2x8"], rounds=2)
    assert mixed.accuracy()["global"] is None
    alone = trained("fedavg", parts_of(clients, [0, 2]), ["mlp:1x8"], rounds=1)
    first = trained(FedAvg(view="same_arch"), clients, ["mlp:1x8", "mlp:2x8"], rounds=1)
    assert torch.allclose(flat(first.models[0]), flat(alone.models[0]), atol=1e-6)  # batch order follows the id
    assert first.history[0]["accuracy"]["per_client"][0] == alone.history[0]["accuracy"]["per_client"][0]


def test_the_global_model_is_of_the_largest_architecture():
    mixed = trained(FedAvg(view="owned"), parts(10, 20), ["mlp:1x8", "mlp:2x8"])
    assert sum(p.numel() for p in mixed.server_model.parameters()) == (4 * 8 + 8) + (8 * 8 + 8) + (8 * 3 + 3)


def parts_of(clients, keep):
    chosen = [(clients.train[i].inputs().numpy(), clients.train[i].labels().numpy()) for i in keep]
    test = (clients.test.inputs().numpy(), clients.test.labels().numpy())
    return pf.Clients.from_parts(chosen, test=test, num_classes=3, normalize=False)


def test_fedprox_pulls_towards_the_received_model():
    clients = parts(40)
    distances = []
    for mu in (0.0, 1.0, 10.0):
        start = trained(FedProx(mu=mu), clients, training={"lr": 1e-9})
        end = trained(FedProx(mu=mu), clients, training={"epochs": 30, "lr": 0.05})
        distances.append(float((flat(end.server_model) - flat(start.server_model)).norm()))
    assert distances[0] > distances[1] > distances[2]


def test_the_penalty_is_half_mu_times_the_squared_distance():
    layer = nn.Linear(2, 3)
    batch = Batch(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))
    aux = {"anchor": {"weight": layer.weight.detach() - 2.0, "bias": layer.bias.detach() + 1.0}}
    plain, pulled = (FedProx(mu=mu).loss({"main": Net(layer)}, batch, aux) for mu in (0.0, 0.5))
    assert torch.allclose(pulled - plain, torch.tensor(0.5 / 2 * (6 * 4.0 + 3 * 1.0)))


def test_the_first_local_step_is_the_same_for_every_mu():
    clients = parts(40)
    one, other = (trained(FedProx(mu=mu), clients) for mu in (0.0, 5.0))
    assert torch.equal(flat(one.server_model), flat(other.server_model))


def test_on_a_quadratic_loss_fedprox_finds_the_known_optimum():
    """For 0.5·||w - a||^2 the optimum is (a + mu·w0) / (1 + mu)."""
    a, mu = 3.0, 0.5

    class Quadratic(FedProx):
        name = "quadratic"

        def loss(self, nets, batch, aux):
            w = nets["main"].parameters()["weight"]
            from polyfed.ops.distance import squared_distance

            return 0.5 * (w - a).pow(2).sum() + self.mu / 2 * squared_distance(nets["main"].parameters(), aux["anchor"])

    def model(input_shape, num_classes):
        layer = nn.Linear(4, num_classes, bias=False)
        nn.init.constant_(layer.weight, 1.0)
        return layer

    result = trained(Quadratic(mu=mu), parts(10), [model], training={"epochs": 200, "lr": 0.2})
    assert torch.allclose(result.server_model.weight, torch.tensor((a + mu * 1.0) / (1 + mu)), atol=1e-5)


def test_pretraining_is_so_many_epochs_before_the_rounds():
    clients = parts(30)
    fed = trained(FedAvg(pretrain_epochs=2), clients, rounds=1)
    assert [line["phase"] for line in fed.history] == ["before", "round"]
    alone = trained("local", clients, training={"epochs": 3})  # full batches: three steps, whatever their names
    assert torch.allclose(flat(fed.server_model), flat(alone.models[0]), atol=1e-6)


def test_stragglers_are_so_many_and_do_one_to_all_epochs():
    ctx = Context(0, 1, 1, pf.Training(epochs=4), 3, (4,), 1)
    work = [FedProx(straggler_share=0.25).epochs(client, ctx) for client in range(400)]
    assert set(work) == {None, 1, 2, 3, 4}
    assert 0.15 < sum(epochs is not None for epochs in work) / 400 < 0.35
    assert FedProx().epochs(0, ctx) is None
    assert None not in [FedProx(straggler_share=1.0).epochs(client, ctx) for client in range(50)]


def test_stragglers_do_less_work_and_still_count():
    clients = parts(40, 40, 40, 40)
    fast = trained(FedProx(mu=0.1), clients, training={"epochs": 5})
    slow = trained(FedProx(mu=0.1, straggler_share=1.0), clients, training={"epochs": 5})
    assert not torch.equal(flat(fast.server_model), flat(slow.server_model))
    assert slow.cost.total("up") == fast.cost.total("up")


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (FedAvg, {"weighting": "size"}, "weighting is 'samples' or 'uniform', not 'size'"),
        (FedAvg, {"buffers": "no"}, "buffers is"),
        (FedAvg, {"view": "prefx"}, "Unknown view 'prefx'"),
        (FedAvg, {"pretrain_epochs": -1}, "pretrain_epochs must not be negative"),
        (FedProx, {"mu": -1.0}, "mu must not be negative, got -1.0"),
        (FedProx, {"straggler_share": 1.5}, "straggler_share must be at most 1"),
    ],
)
def test_senseless_options_are_refused(kind, options, says):
    with pytest.raises(InputError, match=says):
        kind(**options)


def test_the_senders_tensors_are_not_changed_by_the_mean():
    method = FedAvg()
    clients = parts(10, 10)
    from polyfed.api import prepare
    from polyfed.core.settings import Settings

    federation = prepare(method, clients, ["mlp:1x8"], Settings(1))
    replies = {
        c: Message(
            {"main": {n: torch.full_like(t, float(c)) for n, t in federation.server.state.items()}}, {}, {"samples": 1}
        )
        for c in (0, 1)
    }
    kept = copy.deepcopy(replies)
    method.fuse(federation.server, replies, Step(), federation.ctx)
    for c in replies:
        for name, tensor in replies[c].params["main"].items():
            assert torch.equal(tensor, kept[c].params["main"][name])


def test_processes_divide_the_mean_unless_a_method_does_more_than_it():
    class More(FedAvg):
        name = "more"

        def refine(self, server, replies, ctx):
            """Look at all of it."""

    for method, divided in ((FedAvg(), True), (More(), False)):
        run = prepare(method, parts(4, 4), ["mlp:1x8"], Settings(1))
        places = run.method.fused_into(run.server, run.backend.infos[1], Step(), run.ctx)
        assert (places is not None) == divided
        assert places is None or places["params/main/head.weight"] == "head.weight"


def test_noise_is_planned_for_all_epochs_on_own_samples():
    assert FedAvg(pretrain_epochs=2).own_epochs(3, 5) == 17 and FedAvg().own_epochs(3, 5) == 15
