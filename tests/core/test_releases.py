"""Sums over samples that leave a client: shortened, blurred, accounted together with its training."""

import math

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.dpsgd import PrivateTraining
from polyfed.core.party import ClientInfo, Context, Party, PartyData
from polyfed.core.privacy import LEDGER, BudgetSpent, Privacy, Releases, epsilon_of, spent_of
from polyfed.core.prototypes import class_means
from polyfed.core.releases import class_counts, class_means_of, client_moments, released, shortened_rows
from polyfed.core.samples import Samples
from polyfed.core.settings import Training
from polyfed.core.stage import Stage
from polyfed.methods import make
from polyfed.methods.fedproto import FedProto
from polyfed.ops.moments import class_moments
from polyfed.testing.setting import synthetic

dp = pytest.importorskip("dp_accounting")
TINY = 1e-9  # a noise that does not show


class Same(nn.Module):
    """Features are the inputs."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def features(self, x):
        return x

    def forward(self, x):
        return self.head(x)


def client(privacy, x=None, y=None, releases=5, rounds=5):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)) if x is None else x
    y = torch.arange(len(x)) % 3 if y is None else y
    party = Party(0, ClientInfo(0, len(x), "m"), PartyData(Samples(x, y)))
    party.models["main"] = Same()
    training = Training(batch_size=10)
    planned = {"releases": releases, "own_epochs": rounds * training.epochs}
    return party, Context(0, 1, rounds, training, 3, (4,), 1, privacy=privacy, **planned)


def test_without_noise_means_are_those_of_shortened_vectors_by_hand():
    x = torch.tensor([[3.0, 4, 0, 0], [0.3, 0, 0, 0], [0, 0, 0, 2.0]])
    party, ctx = client(Privacy(noise_multiplier=TINY, release_norm=1.0), x, torch.tensor([0, 0, 2]))
    told = class_means(party, ctx)
    assert told["classes"].tolist() == [0, 2] and told["counts"].tolist() == [2, 1]
    expected = torch.tensor([[0.45, 0.4, 0, 0], [0, 0, 0, 1.0]])  # (0.6, 0.8) and (0.3, 0); (0, 0, 0, 1)
    torch.testing.assert_close(told["prototypes"], expected, atol=1e-5, rtol=0)


def test_without_privacy_they_are_the_plain_means_and_nothing_is_spent():
    party, ctx = client(Privacy())
    means, counts = class_means_of(party, ctx, lambda x: x, "any")
    x, y = party.train.inputs(), party.train.labels()
    torch.testing.assert_close(means[1], x[y == 1].mean(0))
    assert counts.tolist() == [20, 20, 20] and LEDGER not in party.memory


def test_one_sample_moves_the_sums_by_no_more_than_the_accountant_assumes():
    """In units of the noise: the root of the number of sums, which is what the noise is scaled by."""
    bound, seen = 0.7, []
    for x in (torch.full((1, 4), 1e6), torch.zeros(1, 4), torch.full((1, 4), float("nan"))):
        row = shortened_rows(x, bound).double()
        count, sums, squares = 1.0, row, row.T @ row
        seen.append(math.sqrt(count**2 + float((sums / bound).norm()) ** 2 + float((squares / bound**2).norm()) ** 2))
    assert max(seen) <= math.sqrt(3) and seen[0] == pytest.approx(math.sqrt(3), abs=1e-5) and seen[1] == seen[2] == 1.0


@pytest.mark.parametrize("secure", [False, True])
def test_the_noise_on_sums_and_counts_has_the_announced_size(secure):
    from scipy import stats

    party, ctx = client(Privacy(noise_multiplier=3.0), releases=10**6)
    ctx.secure = secure
    zeros, counts = torch.zeros(3, 4), torch.zeros(3)
    drawn = []
    for number in range(1500):
        ctx.round = number
        drawn.append(released(party, ctx, "t", {"sums": (zeros, 0.5), "counts": (counts, 1.0)}))
    for name, bound in (("sums", 0.5), ("counts", 1.0)):
        values = torch.stack([item[name] for item in drawn]).flatten() / (3.0 * math.sqrt(2) * bound)
        assert float(values.std()) == pytest.approx(1.0, rel=0.05) and abs(float(values.mean())) < 0.05
        assert stats.kstest(values.numpy(), "norm").pvalue > 1e-4
    assert spent_of(party.memory) == [(1.0, 3.0, 1500)]


def test_training_and_releases_are_accounted_as_dp_accounting_composes_them():
    privacy = Privacy(epsilon=4.0)
    party, ctx = client(privacy)
    guard = PrivateTraining(privacy, Stage(lambda *_: None), party, ctx, "main/0")
    sigma, beside = guard.multiplier, privacy.release_multiplier(5)
    accountant = dp.rdp.RdpAccountant()
    accountant.compose(dp.PoissonSampledDpEvent(guard.rate, dp.GaussianDpEvent(sigma)), 5 * 6)
    accountant.compose(dp.GaussianDpEvent(beside), 5)
    whole = accountant.get_epsilon(1e-5)
    assert f"{epsilon_of([(guard.rate, sigma, 30), (1.0, beside, 5)], 1e-5):.10g}" == f"{whole:.10g}"
    assert 3.98 < whole <= 4.0  # the least noise with which both together keep the budget
    alone = dp.rdp.RdpAccountant()
    alone.compose(dp.GaussianDpEvent(beside), 5)
    assert 1.98 < alone.get_epsilon(1e-5) <= 2.0  # half of it, by default
    assert sigma > privacy.multiplier(guard.rate, 30)  # training gets the rest


def test_a_client_stops_before_a_release_exceeds_its_budget():
    privacy = Privacy(epsilon=4.0, noise_multiplier=2.0)
    party, ctx = client(privacy)
    told = 0
    with pytest.raises(BudgetSpent, match=r"Client 0 stops: its privacy budget is epsilon 4 .* would bring it to"):
        while True:
            class_means(party, ctx)
            told += 1
    assert party.memory[LEDGER]["epsilon"] == epsilon_of([(1.0, 2.0, told)], 1e-5) <= 4.0
    assert told and epsilon_of([(1.0, 2.0, told + 1)], 1e-5) > 4.0


def test_which_classes_are_held_is_told_by_noisy_counts_alone():
    x, y = torch.zeros(60, 4), torch.zeros(60, dtype=torch.long)
    party, ctx = client(Privacy(noise_multiplier=4.0), x, y, releases=10**6)
    seen = torch.zeros(3)
    for number in range(400):
        ctx.round = number
        seen[class_means(party, ctx)["classes"].long()] += 1
    # 60 is far beyond 2 deviations (11.3) of the noise; an empty class is beyond them in 2.3 % of the rounds.
    assert seen[0] == 400 and 0 < int(seen[1]) < 25 and 0 < int(seen[2]) < 25


def test_means_stay_in_the_ball_of_all_means_and_counts_in_the_number_of_samples():
    party, ctx = client(Privacy(noise_multiplier=50.0, release_norm=0.5))
    told = class_means(party, ctx)
    assert len(told["classes"]) >= 1 and (told["prototypes"].norm(dim=1) <= 0.5).all()
    assert (told["counts"] >= 1).all() and int(told["counts"].sum()) <= 60
    counts = class_counts(party, ctx)
    assert counts.dtype == torch.int32 and 0 < int(counts.sum()) <= 60 and (counts >= 0).all()


@pytest.mark.parametrize("kind", ["full", "diag", "shared"])
def test_moments_without_noise_are_those_of_the_samples(kind):
    x = torch.randn(600, 4, generator=torch.Generator().manual_seed(1)) * 0.2
    party, ctx = client(Privacy(noise_multiplier=TINY, release_norm=10.0), x)
    found, plain = (client_moments(party, ctx, lambda z: z, kind), class_moments(x, party.train.labels(), kind))
    assert found.classes.tolist() == plain.classes.tolist() and found.counts.tolist() == plain.counts.tolist()
    torch.testing.assert_close(found.means, plain.means, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.covariance, plain.covariance, atol=2e-3, rtol=2e-2)  # by n, not by n - 1


@pytest.mark.parametrize("kind", ["full", "diag", "shared"])
def test_noisy_moments_are_covariances(kind):
    party, ctx = client(Privacy(noise_multiplier=3.0))
    found = client_moments(party, ctx, lambda z: z, kind)
    values = found.covariance if kind == "diag" else torch.linalg.eigvalsh(found.covariance)
    assert (values >= -1e-5).all() and (values <= 1 + 1e-5).all()
    assert spent_of(party.memory) == [(1.0, 3.0, 1)]


@pytest.mark.parametrize(
    ("method", "options", "each"),
    [
        ("fedproto", {}, 1),
        pytest.param("fedtgp", {"server_epochs": 1}, 1, marks=pytest.mark.long),
        pytest.param("fedgh", {}, 1, marks=pytest.mark.long),
        pytest.param("feddistill", {}, 1, marks=pytest.mark.long),
        pytest.param("feddistill_plus", {}, 1, marks=pytest.mark.long),
        pytest.param("ccvr", {"samples_per_class": 4}, 0, marks=pytest.mark.long),
        pytest.param(
            "ccvr", {"samples_per_class": 4, "when": "every_round", "form": "clients"}, 1, marks=pytest.mark.long
        ),
        pytest.param("fedgen", {"generator_steps": 1}, 1, marks=pytest.mark.long),
        pytest.param("ams", {"mask_absent": True}, 0, marks=pytest.mark.long),
        ("fedavg", {}, 0),
    ],
)
def test_a_method_tells_as_often_as_it_says_and_keeps_its_budget(method, options, each):
    made = make(method, options)
    result = pf.run(
        made,
        synthetic(public=False),
        ["mlp:1x8"],
        rounds=2,
        training=Training(epochs=1, batch_size=8, lr=0.1),
        privacy=Privacy(epsilon=5.0),
        feature_dim=8,
        progress=False,
    )
    assert made.releases().each_round == each
    assert not any("missing" in line for line in result.history)
    spent = [line["privacy"]["epsilon"]["0"] for line in result.history if "privacy" in line][-1]
    assert 4.9 < spent <= 5.0  # all that was planned was spent: neither more nor less


@pytest.mark.long
def test_prototypes_of_a_run_differ_by_seed_and_not_by_engine():
    def run(**more):
        given = {"privacy": Privacy(epsilon=8.0), "progress": False, "feature_dim": 8}
        return pf.run(FedProto(), synthetic(public=False), ["mlp:1x8"], 2, Training(batch_size=8), **given, **more)

    one, two, other = run(workers=1), run(engine="batched"), run(seed=1)
    first = one.server.memory["prototypes"]["prototypes"]
    assert torch.equal(first, two.server.memory["prototypes"]["prototypes"])
    assert not torch.equal(first, other.server.memory["prototypes"]["prototypes"])


def test_planned_releases():
    assert Releases(each_round=2, once=1).planned(5) == 11 and FedProto().releases().planned(7) == 7
