"""Privacy with the client as unit: shortened changes, noise on their sum, each slice with its own sensitivity."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import polyfed as pf
from polyfed.core.clientnoise import KEPT, noisy_mean, planned
from polyfed.core.dpsgd import Source
from polyfed.core.errors import InputError
from polyfed.core.privacy import Privacy, check_privacy, epsilon_of
from polyfed.core.replies import Common
from polyfed.core.settings import Training
from polyfed.methods import make
from polyfed.methods.fedavg import FedAvg
from polyfed.testing.setting import synthetic

dp = pytest.importorskip("dp_accounting")
SMALL = Training(epochs=1, batch_size=8, lr=0.1)
QUIET = {"progress": False, "workers": 1}


def run(method=None, models=("mlp:1x8",), rounds=2, **more):
    return pf.run(method or FedAvg(), synthetic(public=False), models, rounds, SMALL, **QUIET, **more)


def client(**more):
    return Privacy(unit="client", **more)


def test_a_wide_bound_and_no_noise_is_the_plain_mean():
    """Of equal weights: sample counts are a client's own claim."""
    private = run(FedAvg(), privacy=client(noise_multiplier=1e-12, max_norm=1e6))
    plain = run(FedAvg(weighting="uniform"))
    for name, tensor in plain.server.state.items():
        torch.testing.assert_close(private.server.state[name], tensor, atol=1e-5, rtol=1e-4)


def test_the_mean_over_holders_by_hand():
    held = torch.tensor([[True, True], [True, False]])
    values = torch.tensor([[3.0, 4.0], [6.0, 0.0]])
    bounds, factor = torch.tensor([1.0, 0.5]).double(), torch.tensor([0.2, 0.1]).double()
    none = SimpleNamespace(normal=lambda shape: torch.ones(shape))
    mean, largest = noisy_mean(Common("params/main", values, held, ["a", "a"]), bounds, factor, 2.0, none)
    assert largest.tolist() == [1.0, 1.0]
    # entry 0: (0.6 + 0.6 + 2·1·1) / 2; entry 1, held by one alone: 0.8 + 2·1·1
    torch.testing.assert_close(mean, torch.tensor([1.6, 2.8]).double())


def test_no_client_moves_the_sum_by_more_than_its_bound():
    far = run(privacy=client(noise_multiplier=1e-12, max_norm=0.01), rounds=1)
    start = pf.run(FedAvg(), synthetic(public=False), ["mlp:1x8"], 1, replace(SMALL, lr=1e-12), **QUIET).server.state
    moved = torch.cat([(far.server.state[name] - start[name]).flatten() for name in start]).norm()
    assert 0.001 < float(moved) <= 0.01


def test_the_noise_has_the_announced_size_and_the_epsilon_is_that_of_dp_accounting():
    sigma, bound = 4.0, 0.5
    privacy = client(noise_multiplier=sigma, max_norm=bound)
    noisy = run(privacy=privacy, rounds=1, models=("mlp:2x128",))
    still = run(privacy=replace(privacy, noise_multiplier=1e-12), rounds=1, models=("mlp:2x128",))
    away = torch.cat([(noisy.server.state[n] - t).flatten() for n, t in still.server.state.items()])
    expected = 2 * sigma * bound / 4  # on the mean of four: one of them may be replaced, so twice the bound
    assert float(away.std()) == pytest.approx(expected, rel=0.03) and abs(float(away.mean())) < 0.05 * expected
    accountant = dp.rdp.RdpAccountant()
    accountant.compose(dp.GaussianDpEvent(sigma), 3)
    three = run(privacy=privacy, rounds=3).history[-1]["privacy"]
    assert three["unit"] == "client" and f"{three['epsilon']['0']:.10g}" == f"{accountant.get_epsilon(1e-5):.10g}"


def test_each_slice_has_a_sensitivity_of_its_own():
    widths = ("mlp:1x16@1", "mlp:1x16@0.5")
    result = run(make("heterofl", {"mask": False}), widths, rounds=1, privacy=client(noise_multiplier=5.0))
    told = result.history[-1]["privacy"]["epsilon"]
    sizes = [sum(p.numel() for p in model.parameters()) for model in (result.models[0], result.models[1])]
    assert told["0"] == epsilon_of([(1.0, 5.0, 1)], 1e-5)
    # The half network holds a share of the entries: its bound is the root of that, under the noise of the whole.
    own = 5.0 / math.sqrt(sizes[1] / sizes[0])
    assert told["1"] == pytest.approx(epsilon_of([(1.0, own, 1)], 1e-5), rel=1e-6) and told["1"] < told["0"]


def test_who_has_no_budget_left_is_not_asked():
    result = run(privacy=client(epsilon=3.0, noise_multiplier=2.0), rounds=4)
    spent = [line["privacy"]["epsilon"]["0"] for line in result.history if "privacy" in line]
    stopped = [line["missing"]["0"] for line in result.history if "missing" in line]
    assert len(spent) + len(stopped) == len(result.history) <= 4 and all(value <= 3.0 for value in spent)
    assert len(stopped) == 1 and result.history[-1]["spent"] == [0, 1, 2, 3]  # nobody is left, and the run has ended
    assert stopped and "Client 0 stops: its privacy budget is epsilon 3" in stopped[0]


def test_the_least_noise_for_the_planned_rounds_and_a_resumed_run(tmp_path):
    whole = run(privacy=client(epsilon=6.0), rounds=3)
    assert 5.9 < whole.history[-1]["privacy"]["epsilon"]["0"] <= 6.0

    def stop(line):
        if line["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(privacy=client(epsilon=6.0), rounds=3, out=tmp_path / "a", observers=[stop])
    again = run(privacy=client(epsilon=6.0), rounds=3, out=tmp_path / "a", resume=True)
    assert again.history[-1]["privacy"] == whole.history[-1]["privacy"]
    assert all(torch.equal(again.server.state[n], t) for n, t in whole.server.state.items())
    assert again.server.memory[KEPT]["0"] == whole.server.memory[KEPT]["0"]


def test_a_server_that_goes_back_to_a_checkpoint_cannot_have_a_round_twice(tmp_path):
    """Its noise is new then, so the round is spent again: what is spent lies beside the checkpoints."""
    from polyfed.core.method import Method, Step
    from polyfed.core.party import Party, PartyData
    from polyfed.flower.backend import LiveFederation

    federation = LiveFederation.__new__(LiveFederation)
    federation.method, federation.ctx, federation.server = Method(), None, Party(-1, None, PartyData())
    federation.directory = SimpleNamespace(path=tmp_path, load=lambda: None, history=list)
    federation.backend = SimpleNamespace()
    federation.server.memory[KEPT] = {"0": [[1.0, 5.0, 3]]}
    federation._fuse(Step(), {}, {})
    federation.server.memory[KEPT] = {"0": [[1.0, 5.0, 2]]}  # as in an older checkpoint
    federation.restore()
    assert federation.server.memory[KEPT] == {"0": [[1.0, 5.0, 3]]}


def test_a_real_server_takes_its_noise_from_the_operating_system():
    one, other = (Source(None).normal(torch.Size((5,))) for _ in range(2))
    assert not torch.equal(one, other)
    assert planned(FedAvg(), 7) == 7 and planned(FedAvg(pretrain_epochs=1), 7) == 8


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("fedproto", "which classes"),
        ("heterofl", "which classes"),
        ("fedin", "by itself"),
        ("ams", "by itself"),
        ("fedkd", "does not average"),
    ],
)
def test_methods_that_use_more_than_means_are_refused(method, words):
    with pytest.raises(InputError, match=rf"unit=client noise goes into means over clients, but {method} .*{words}"):
        check_privacy(client(epsilon=8.0), make(method, {}))
    for fine in (FedAvg(), make("heterofl", {"mask": False}), make("fedmd", {}), make("scaffold", {})):
        check_privacy(client(epsilon=8.0), fine)


@pytest.mark.parametrize(
    "rule", ["median", "trimmed:0.2", "geometric", "krum", "multikrum", "norm", "distance", "cosine"]
)
def test_a_rule_that_lets_one_reply_change_others_is_refused(rule):
    """With the median of three, one client moves all three replies: three times what the noise is made for."""
    with pytest.raises(InputError, match=rf"unit=client noise hides .* robust={rule.partition(':')[0]} .*norm:5"):
        run(privacy=client(epsilon=8.0), robust=rule)


@pytest.mark.parametrize("rule", ["norm:5", "trimmed:0"])
def test_a_rule_that_looks_at_one_reply_at_a_time_is_fine(rule):
    assert run(privacy=client(epsilon=8.0), robust=rule).privacy()["unit"] == "client"


def test_batch_norm_is_refused_with_the_remedy():
    with pytest.raises(InputError, match=r"BatchNorm.*use GroupNorm"):
        run(models=("cnn:4-8,bn",), privacy=client(epsilon=8.0))
