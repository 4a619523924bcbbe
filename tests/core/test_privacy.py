"""DP-SGD: gradients of single samples, real noise, real sampling, and an accountant that is dp-accounting."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.dpsgd import PrivateTraining, Source, clipped, is_private, part_of
from polyfed.core.errors import InputError
from polyfed.core.party import ClientInfo, Context, Party, PartyData
from polyfed.core.privacy import LEDGER, BudgetSpent, Privacy, added, calibrated, check_privacy, epsilon_of, spent_of
from polyfed.core.runner import run_stage
from polyfed.core.samples import Samples
from polyfed.core.settings import Training
from polyfed.core.stage import Batch, Stage, Update
from polyfed.methods import make
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fedin import FedIN
from polyfed.methods.fedproto import FedProto
from polyfed.methods.heterofl import HeteroFL
from polyfed.models import build
from polyfed.testing.setting import synthetic, unequal
from polyfed.testing.watch import same_lines, same_states, states

dp = pytest.importorskip("dp_accounting")
SMALL = Training(epochs=1, batch_size=8, lr=0.1)


def loss(nets, batch, aux):
    return F.cross_entropy(nets["main"](batch.x), batch.y)


def client(privacy, samples=40, model="mlp:1x8", batch_size=8, rounds=2):
    rng = torch.Generator().manual_seed(0)
    data = Samples(torch.randn(samples, 5, generator=rng), torch.randint(3, (samples,), generator=rng))
    party = Party(0, ClientInfo(0, samples, "m"), PartyData(data))
    party.models["main"] = build(model, (5,), 3) if isinstance(model, str) else model
    training = Training(batch_size=batch_size, lr=0.1)
    ctx = Context(0, 1, rounds, training, 3, (5,), 1, privacy=privacy, own_epochs=rounds * training.epochs)
    return party, ctx


# --- the accountant ---


def test_epsilon_is_that_of_dp_accounting():
    """Also where its series of orders between whole numbers are too large or do not converge (0.45), and at an edge."""
    for rate, multiplier, steps, delta in (
        (0.01, 4.0, 10_000, 1e-5),
        (0.2, 1.3, 77, 1e-6),
        (1.0, 5.0, 9, 1e-5),
        (0.45, 11.0, 10_000, 1e-5),
        (0.3, 3.0, 5, 1e-8),
        (0.001, 50.0, 1, 1e-6),
    ):
        accountant = dp.rdp.RdpAccountant()
        accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier)), steps)
        expected = accountant.get_epsilon(delta)
        assert f"{epsilon_of([(rate, multiplier, steps)], delta):.10g}" == f"{expected:.10g}"
    both = dp.rdp.RdpAccountant()
    both.compose(dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(4.0)), 100)
    both.compose(dp.PoissonSampledDpEvent(0.5, dp.GaussianDpEvent(9.0)), 10)
    spent = added(added(added([], 0.01, 4.0, 60), 0.5, 9.0, 10), 0.01, 4.0, 40)
    assert len(spent) == 2
    assert epsilon_of(spent, 1e-5) == pytest.approx(both.get_epsilon(1e-5), rel=1e-12)


def test_published_values():
    """Abadi et al. 2016, q = 0.01, sigma = 4, T = 10000, delta = 1e-5: the moments accountant gives 1.26.

    Its conversion is log(1/delta)/(alpha-1); the accountant's newer one (Canonne et al. 2020) may only be smaller.
    """
    from polyfed.core.privacy import _one_step, _orders

    assert _orders() == tuple(dp.rdp.RdpAccountant().orders)
    older = min(10_000 * _one_step(0.01, 4.0, a) + math.log(1e5) / (a - 1) for a in _orders())
    assert older == pytest.approx(1.26, abs=0.01)
    assert epsilon_of([(0.01, 4.0, 10_000)], 1e-5) < older
    # Without sampling a step of the Gaussian mechanism has the divergence alpha / (2 sigma²) (Mironov 2017).
    assert all(_one_step(1.0, 3.0, a) == pytest.approx(a / 18) for a in _orders())


def test_the_least_noise_that_keeps_a_budget():
    sigma = calibrated(0.1, 200, 4.0, 1e-5)
    assert epsilon_of([(0.1, sigma, 200)], 1e-5) <= 4.0 < epsilon_of([(0.1, sigma - 2e-3, 200)], 1e-5)
    assert epsilon_of([], 1e-5) == 0.0


# --- gradients, sampling, noise ---


@pytest.mark.parametrize("clipping", ["global", "layer", "group"])
def test_the_sum_is_that_of_a_loop_over_samples(clipping):
    party, ctx = client(Privacy(noise_multiplier=1e-9, max_norm=0.5, clipping=clipping))
    stage = Stage(loss)
    guard = PrivateTraining(ctx.privacy, stage, party, ctx, "main/0")
    rows = torch.arange(13)
    batch = Batch(party.train.inputs(rows), party.train.labels(rows))
    named = dict(party.main.named_parameters())
    _, found = guard.gradient(stage.all_updates()[0], {"main": named}, batch, {})
    expected = {name: torch.zeros_like(p) for name, p in named.items()}
    shortened = 0
    for row in rows:
        value = F.cross_entropy(party.main(batch.x[row : row + 1]), batch.y[row : row + 1])
        grads = dict(zip(named, torch.autograd.grad(value, list(named.values())), strict=True))
        total = torch.stack([g.norm() for g in grads.values()]).norm()
        for name, grad in grads.items():
            norm, bound = total, 0.5
            if clipping != "global":
                parts = {part_of("main", other, clipping) for other in named}
                mine = [
                    g.norm()
                    for n, g in grads.items()
                    if part_of("main", n, clipping) == part_of("main", name, clipping)
                ]
                norm, bound = torch.stack(mine).norm(), 0.5 / len(parts) ** 0.5
            shortened += bool(norm > bound)
            expected[name] += grad * (bound / float(norm) if norm > bound else 1.0)  # all units of a layer may be off
    assert shortened
    for name, grad in expected.items():
        assert torch.allclose(found["main"][name], grad / 8, atol=1e-5), name  # 8: the expected size, not 13


def test_no_sample_counts_for_more_than_the_bound():
    grads = {"main": {"a": torch.randn(20, 3, 4) * 100, "b": torch.randn(20, 2)}}
    grads["main"]["b"][7, 0] = float("nan")
    for clipping in ("global", "layer", "group"):
        found = clipped(grads, 1.5, clipping)["main"]
        norms = torch.cat([found["a"].flatten(1), found["b"]], 1).norm(dim=1)
        assert (norms <= 1.5).all() and torch.isfinite(norms).all()
    assert (clipped(grads, 1.5, "global")["main"]["a"][7] == 0).all()
    assert (clipped(grads, 1e9, "global")["main"]["a"][:7] == grads["main"]["a"][:7]).all()


def test_batches_are_poisson_samples():
    party, ctx = client(Privacy(noise_multiplier=1.0), samples=200, batch_size=10)
    guard = PrivateTraining(ctx.privacy, Stage(loss, steps=4000), party, ctx, "main/0")
    assert guard.rate == 0.05
    hits = torch.zeros(200)
    sizes = []
    for _, order, counts in guard.plan():
        sizes += counts
        hits += torch.bincount(order, minlength=200)
    assert len(sizes) == 4000 and min(sizes) < 4 < 18 < max(sizes)
    # Binomial(200, 0.05): mean 10, variance 9.5; each sample's count is Binomial(4000, 0.05).
    assert np.mean(sizes) == pytest.approx(10, abs=0.25) and np.var(sizes) == pytest.approx(9.5, rel=0.1)
    assert hits.mean() == pytest.approx(200, abs=5) and hits.var() == pytest.approx(190, rel=0.3)


@pytest.mark.parametrize("rng", [None, torch.Generator().manual_seed(3)], ids=["system", "seed"])
def test_the_noise_is_normal(rng):
    from scipy import stats

    drawn = Source(rng).normal(torch.Size((200, 500))).double().flatten().numpy()
    assert abs(drawn.mean()) < 0.015 and abs(drawn.std() - 1) < 0.01
    assert stats.kstest(drawn, "norm").pvalue > 1e-4
    uniform = Source(rng).uniform(50_000).numpy()
    assert uniform.min() >= 0 and uniform.max() < 1 and stats.kstest(uniform, "uniform").pvalue > 1e-4


def test_the_noise_of_a_step_has_the_announced_size():
    party, ctx = client(Privacy(noise_multiplier=2.5, max_norm=0.7))
    stage = Stage(loss)
    guard = PrivateTraining(ctx.privacy, stage, party, ctx, "main/0")
    empty = Batch(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))
    named = {"main": dict(party.main.named_parameters())}
    drawn = []
    for _ in range(300):  # of an empty batch only noise is left
        _, found = guard.gradient(stage.all_updates()[0], named, empty, {})
        drawn.append(torch.cat([g.flatten() for g in found["main"].values()]))
    values = torch.stack(drawn)
    assert float(values.std()) == pytest.approx(2.5 * 0.7 / 8, rel=0.03)
    assert float(values.mean()) == pytest.approx(0, abs=0.01)


def test_several_gradients_of_a_batch_share_one_noise_budget():
    """Together they are one vector of sqrt(2) times the bound: twice the variance on each, and one event."""
    party, ctx = client(Privacy(noise_multiplier=2.5, max_norm=0.7))
    stage = Stage((loss, loss), gradients=lambda grads, aux: grads[0])
    guard = PrivateTraining(ctx.privacy, stage, party, ctx, "main/0")
    empty = Batch(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))
    named = {"main": dict(party.main.named_parameters())}
    drawn = []
    for turn in range(300):
        _, found = guard.gradient(stage.all_updates()[0], named, empty, {}, turn % 2)
        drawn.append(torch.cat([g.flatten() for g in found["main"].values()]))
    assert float(torch.stack(drawn).std()) == pytest.approx(2.5 * 0.7 * 2**0.5 / 8, rel=0.03)
    run_stage(stage, party, ctx, "main/0")
    assert spent_of(party.memory) == [(0.2, 2.5, 5)]
    two = Stage(updates=(Update((loss,), {"main": None}), Update((loss,), {"main": None})))
    assert PrivateTraining(ctx.privacy, two, party, ctx, "main/0").gradients == 2


def test_noise_of_a_real_federation_cannot_be_repeated():
    privacy = Privacy(noise_multiplier=1.0)
    found = []
    for secure in (False, False, True, True):
        party, ctx = client(privacy)
        ctx.secure = secure
        torch.manual_seed(0)
        party.models["main"] = build("mlp:1x8", (5,), 3)
        run_stage(Stage(loss), party, ctx, "main/0")
        found.append(torch.cat([p.detach().flatten() for p in party.main.parameters()]))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[2], found[3])


# --- budgets, refusals, runs ---


def test_a_client_stops_before_its_budget_is_exceeded():
    party, ctx = client(Privacy(epsilon=6.0, noise_multiplier=1.0))
    rounds = 0
    with pytest.raises(BudgetSpent, match=r"Client 0 stops: its privacy budget is epsilon 6 .* would bring it to"):
        while True:
            kept = [p.detach().clone() for p in party.main.parameters()]
            run_stage(Stage(loss), party, ctx, "main/0")
            rounds += 1
    assert all(torch.equal(a, b) for a, b in zip(kept, party.main.parameters(), strict=True))
    steps = 5 * rounds
    assert spent_of(party.memory) == [(0.2, 1.0, steps)]
    assert party.memory[LEDGER]["epsilon"] == epsilon_of([(0.2, 1.0, steps)], 1e-5) <= 6.0
    assert epsilon_of([(0.2, 1.0, steps + 5)], 1e-5) > 6.0 and rounds > 0


def test_epsilon_is_in_the_history_and_who_stopped_is_named():
    data = synthetic(3, 20, public=False)
    result = pf.run(FedAvg(), data, rounds=4, training=SMALL, privacy=Privacy(epsilon=6.0, noise_multiplier=1.0))
    told = [line["privacy"]["epsilon"] for line in result.history if "privacy" in line]
    assert told and all(0 < value <= 6.0 for line in told for value in line.values())
    assert told[0]["0"] < told[-1]["0"] or len(told) == 1
    stopped = [line["missing"] for line in result.history if "missing" in line]
    assert stopped and "stops: its privacy budget" in stopped[-1]["0"]


@pytest.mark.parametrize("every", [1, 0])
def test_a_run_ends_when_all_budgets_are_used_up_and_its_last_models_are_measured(every, tmp_path):
    data, given = synthetic(3, 20, public=False), {"rounds": 9, "training": SMALL, "evaluate": every or "end"}
    privacy = Privacy(epsilon=6.0, noise_multiplier=1.0)
    result = pf.run(FedAvg(), data, privacy=privacy, out=tmp_path / "run", **given)
    *_, before, last = result.history
    assert last["round"] < 9 and last["spent"] == [0, 1, 2] == [*map(int, last["missing"])] and "spent" not in before
    assert result.summary()["spent"] == [0, 1, 2] and result.rounds == last["round"]
    assert last["accuracy"]["mean"] is not None and "samples" not in last["accuracy"]  # in full
    assert max(last.get("privacy", before["privacy"])["epsilon"].values()) <= 6.0
    again = pf.run(FedAvg(), data, privacy=privacy, out=tmp_path / "run", resume=True, **given)
    assert again.history == result.history


def test_who_has_no_budget_left_ends_nobody_elses_run():
    """The larger client takes more steps in an epoch, each at a smaller rate: it can go on for longer."""
    parts = [(torch.randn(n, 5).numpy(), (torch.arange(n) % 3).numpy()) for n in (8, 400)]
    data = pf.Clients.from_parts(parts, test=parts[0], num_classes=3)
    privacy = Privacy(epsilon=8.0, noise_multiplier=1.0)
    result = pf.run(FedAvg(), data, ["mlp:1x4"], rounds=6, training=SMALL, privacy=privacy)
    assert result.history[-1]["spent"] == [0] and len(result.history) == 6
    assert [*result.history[-1]["privacy"]["epsilon"]] == ["1"]


def test_public_data_and_the_server_need_no_noise():
    shared = Samples(torch.randn(30, 5), torch.zeros(30, dtype=torch.long))
    own, public = shared.select(torch.arange(20)), shared.select(torch.arange(20, 30))
    party = Party(0, ClientInfo(0, 20, "m"), PartyData(own, None, public))
    assert is_private(Stage(loss), party)
    assert is_private(Stage(loss, data=own.select(torch.arange(3))), party)
    assert is_private(Stage(loss, data=Samples(shared.x.clone(), shared.y)), party)  # unknown rows are private
    assert not is_private(Stage(loss, data=public), party)
    assert not is_private(Stage(loss, data=public.select(torch.arange(4))), party)
    assert not is_private(Stage(loss), Party(-1, None, PartyData(own)))


def test_layers_that_mix_samples_are_refused_with_the_remedy():
    normed = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    party, ctx = client(Privacy(noise_multiplier=1.0), model=normed)
    with pytest.raises(InputError, match=r"'main' of client 0 has BatchNorm1d.* use GroupNorm"):
        run_stage(Stage(loss), party, ctx, "main/0")
    party, ctx = client(
        Privacy(noise_multiplier=1.0), model=nn.Sequential(nn.Linear(5, 4), nn.GroupNorm(2, 4), nn.Linear(4, 3))
    )
    run_stage(Stage(loss), party, ctx, "main/0")


class SeenMean(nn.Module):
    """Somebody's own norm: it changes its buffer in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x):
        if self.training:
            self.seen.mul_(0.9).add_(0.1 * x.mean(0).detach())
        return x - self.seen


def test_a_buffer_that_training_changes_in_place_is_refused_with_a_sentence():
    party, ctx = client(Privacy(noise_multiplier=1.0), model=nn.Sequential(SeenMean(), nn.Linear(5, 3)))
    with pytest.raises(InputError, match=r"a network of client 0 .* one sample at a time .* changes in place; leave"):
        run_stage(Stage(loss), party, ctx, "main/0")


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (FedProto(collect="training"), "collected in training"),
        (FedIN(), "features of their samples"),
        (HeteroFL(), "which classes"),
    ],
)
def test_methods_that_tell_more_than_training_are_refused(method, told):
    with pytest.raises(InputError, match=f"{method.name} also send .*{told}"):
        check_privacy(Privacy(epsilon=8), method)
    check_privacy(Privacy(), method)
    check_privacy(Privacy(epsilon=8), HeteroFL(mask=False))
    check_privacy(Privacy(epsilon=8), FedProto())


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_private_training_learns_the_task_at_hand(task):
    """With bounds and noise that change nothing, values and several labels are learned as without privacy."""
    x = np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32)
    y = x[:, :2] @ np.float32([[1, 2], [3, -1]]) if task == "regression" else (x[:, :2] > 0).astype(np.float32)
    data = pf.Clients.from_parts([(x[:30], y[:30]), (x[30:60], y[30:60])], test=(x[60:], y[60:]), task=task)
    training = Training(epochs=5, batch_size=30, lr=0.1)  # all samples in a batch: Poisson samples are the batches
    free = Privacy(noise_multiplier=1e-9, max_norm=1e6)
    plain, private = (
        pf.run("fedavg", data, ["mlp:1x8"], rounds=2, training=training, privacy=privacy, progress=False)
        for privacy in (None, free)
    )
    assert private.history[-1]["loss"] == pytest.approx(plain.history[-1]["loss"], rel=1e-2)
    assert private.accuracy()["mean"] == pytest.approx(plain.accuracy()["mean"], abs=1e-2)


@pytest.mark.parametrize(
    "method",
    [
        pf.FedMD(public_epochs=0, private_epochs=3),
        pf.FedMDGlobal(public_epochs=0, private_epochs=3),
        FedAvg(pretrain_epochs=3),
        make("pfedafm", {"common_epochs": 2, "proxy": "mlp:1x8"}),
        make("scaffold", {"option": "I"}),
        make("fedtype", {"set_weight": 0.0, "proxy": "mlp:1x8"}),
    ],
    ids=lambda method: method.name,
)
def test_noise_is_planned_for_all_that_a_method_learns_from_own_samples(method):
    """Nobody stops before the last round, and next to nothing of the budget is left."""
    training = Training(epochs=2, batch_size=8, lr=0.1)
    private, data = Privacy(epsilon=8.0), unequal((18, 23), None, public=True)
    result = pf.run(method, data, ["mlp:1x8"], 2, training, privacy=private, feature_dim=8, progress=False)
    assert not [line["missing"] for line in result.history if "missing" in line]
    assert 7.9 < min(result.privacy()["epsilon"].values()) <= max(result.privacy()["epsilon"].values()) <= 8.0


def test_layers_and_groups_of_a_gradient():
    names = [f"{part}.{layer}.{tensor}" for part in ("stem", "head") for layer in "01" for tensor in ("weight", "bias")]
    parts = {clipping: {part_of("main", name, clipping) for name in names} for clipping in ("global", "group", "layer")}
    assert [len(found) for found in parts.values()] == [1, 2, 4]
    ones = {"main": {name: torch.full((1, 1), 100.0) for name in names}}
    assert float(clipped(ones, 1.0, "group")["main"]["stem.0.weight"]) == pytest.approx(1 / 8**0.5, abs=1e-5)
    ones["main"]["head.0.weight"].zero_()  # the other group keeps its bound, and does not get what this one leaves
    assert float(clipped(ones, 1.0, "group")["main"]["stem.0.weight"]) == pytest.approx(1 / 8**0.5, abs=1e-5)
    assert float(clipped(ones, 1.0, "group")["main"]["head.1.bias"]) == pytest.approx(1 / 6**0.5, abs=1e-5)


def test_a_private_run_is_the_same_with_any_workers_and_engine():
    def trained(**more):
        data = synthetic(4, 20, public=False)
        return pf.run(FedAvg(), data, rounds=2, training=SMALL, privacy=Privacy(noise_multiplier=1.0), **more)

    first = trained(workers=1)
    for other in (trained(workers=3), trained(engine="batched")):
        same_lines(first, other)
        same_states(states(first), states(other))


@pytest.mark.long
def test_what_is_spent_survives_a_resume(tmp_path):
    data, privacy = synthetic(3, 20, public=False), Privacy(epsilon=8.0)
    whole = pf.run(FedAvg(), data, rounds=3, training=SMALL, privacy=privacy)

    def stop(line):
        if line["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pf.run(FedAvg(), data, rounds=3, training=SMALL, privacy=privacy, out=tmp_path / "a", observers=[stop])
    again = pf.run(FedAvg(), data, rounds=3, training=SMALL, privacy=privacy, out=tmp_path / "a", resume=True)
    same_lines(whole, again)
    assert again.history[-1]["privacy"]["epsilon"]["0"] == pytest.approx(8.0, abs=0.05)
