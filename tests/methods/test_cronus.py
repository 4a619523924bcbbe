"""Cronus: the acceptance properties of its spec."""

import pytest
import torch
from public_problem import exchange, federation, party, problem, same, states

import polyfed as pf
from polyfed.core.passes import logits_of
from polyfed.core.stage import Batch
from polyfed.methods.cronus import Cronus
from polyfed.methods.dsfl import DSFL
from polyfed.methods.fedmd import DIGEST, LOGITS, PRETRAIN
from polyfed.ops.robust import PIECE, filtered_mean, median_mean, trimmed_mean
from polyfed.testing import synthetic

BARE = {"subset": 12, "private_epochs": 0}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- the means ---


def test_an_outlier_among_equal_answers_is_left_out():
    common = draw(1, 3, 5).softmax(2)
    answers = torch.cat([common.expand(6, 3, 5), torch.eye(5)[None, :3].double()])
    torch.testing.assert_close(filtered_mean(answers, 0.2, 9.0), common[0], rtol=0, atol=1e-15)
    assert (answers.mean(0) - common[0]).abs().max() > 0.05


def test_false_answers_move_the_filtered_mean_less_than_the_plain_one():
    honest = (draw(1, 200, 10) + 0.7 * draw(8, 200, 10, seed=1)).softmax(2)
    false = torch.zeros(2, 200, 10, dtype=torch.float64)
    false[:, torch.arange(200), torch.arange(200) % 10] = 1.0
    answers, truth = torch.cat([honest, false]), honest.mean(0)
    robust = (filtered_mean(answers, 0.2, 9.0) - truth).norm(dim=1).mean()
    plain = (answers.mean(0) - truth).norm(dim=1).mean()
    assert robust < 0.4 * plain


def test_answers_that_agree_up_to_noise_are_left_alone():
    answers = 1 + 0.1 * draw(9, 40, 1)
    within = filtered_mean(answers, 0.2, 100.0)
    torch.testing.assert_close(within, answers.mean(0))
    assert not torch.allclose(filtered_mean(answers, 0.2, 0.1), answers.mean(0))


def test_what_sticks_out_is_measured_by_the_robust_deviation():
    """Variance 2.44, median absolute deviation 1: the limit is 1.4826² kappa = 2.198 kappa."""
    answers = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.5], dtype=torch.float64).view(5, 1, 1)
    assert filtered_mean(answers, 0.1, 1.12).item() == pytest.approx(0.1)
    assert filtered_mean(answers, 0.1, 1.1).item() < 0


def test_one_step_of_the_filter_by_hand():
    """Of 1, 1, 1, 1, 6 the mean is 2: squared distances 1, 1, 1, 1, 16, so four keep 15/16 and the last nothing."""
    answers = torch.tensor([1.0, 1.0, 1.0, 1.0, 6.0], dtype=torch.float64).view(5, 1, 1)
    assert filtered_mean(answers, 0.1, 9.0).tolist() == [[1.0]]  # ceil(2 · 0.1 · 5) = 1 step
    unequal = torch.tensor([0.0, 1.0, 1.0, 1.0, 7.0], dtype=torch.float64).view(5, 1, 1)  # mean 2, MAD 0
    weights = [1 - 4 / 25, 1 - 1 / 25, 1 - 1 / 25, 1 - 1 / 25, 0.0]
    expected = 3 * weights[1] / sum(weights)
    torch.testing.assert_close(filtered_mean(unequal, 0.1, 9.0).item(), expected, rtol=1e-12, atol=0)


def test_a_second_step_looks_at_those_that_are_still_in():
    """The first step takes 100 out; the second must take 20 out, which is the most extreme of the rest."""
    answers = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 20.0, 100.0], dtype=torch.float64).view(7, 1, 1)
    assert filtered_mean(answers, 0.14, 9.0).abs().item() < 1e-12  # ceil(2 · 0.14 · 7) = 2 steps
    assert filtered_mean(answers, 0.07, 9.0).item() > 1  # one step


def test_the_order_of_clients_and_the_number_of_samples_at_once_do_not_matter():
    answers = (draw(7, PIECE + 9, 4) * 2).softmax(2)
    expected = filtered_mean(answers, 0.2, 9.0)
    torch.testing.assert_close(filtered_mean(answers[torch.tensor([3, 0, 6, 1, 5, 2, 4])], 0.2, 9.0), expected)
    one_by_one = torch.cat([filtered_mean(answers[:, n : n + 1], 0.2, 9.0) for n in range(answers.shape[1])])
    torch.testing.assert_close(one_by_one, expected)


@pytest.mark.parametrize("clients", [1, 2, 3, 4])
def test_few_clients_give_finite_means(clients):
    answers = torch.eye(4, dtype=torch.float64)[:clients, None]
    for mean in (filtered_mean(answers, 0.49, 1e-6), trimmed_mean(answers, 0.49), median_mean(answers)):
        assert mean.isfinite().all() and mean.shape == (1, 4)


def test_trimmed_mean_and_median_by_hand():
    answers = torch.tensor([9.0, 1.0, 2.0, -50.0, 6.0], dtype=torch.float64).view(5, 1, 1)
    assert trimmed_mean(answers, 0.2).tolist() == [[3.0]]
    assert trimmed_mean(answers, 0.3).tolist() == [[2.0]]  # two at either end
    assert trimmed_mean(answers, 0.0).tolist() == [[-6.4]]
    ends = torch.tensor([93.0] * 8 + [0.0] * 92, dtype=torch.float64).view(100, 1, 1)
    assert trimmed_mean(ends, 0.07).item() == pytest.approx(93 / 86)  # seven at either end, not 7.000000000000001
    assert median_mean(answers).tolist() == [[2.0]] and median_mean(answers[:4]).tolist() == [[1.5]]


# --- the method ---


def consensus(answers, **options):
    run = federation(Cronus(**options))
    return run.method.consensus(answers, run.ctx)


def test_targets_are_those_of_the_chosen_mean():
    answers = [z.softmax(1).float() for z in draw(5, 6, 3)]
    stacked = torch.stack(answers).double()
    for kind, mean in (
        ("filter", filtered_mean(stacked, 0.2, 9.0)),
        ("trimmed", trimmed_mean(stacked, 0.2)),
        ("median", median_mean(stacked)),
        ("mean", stacked.mean(0)),
    ):
        found = consensus(answers, aggregate=kind)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.softmax(1).double(), mean / mean.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)
    assert torch.equal(consensus(answers, eps=0.0), consensus(answers, aggregate="mean"))
    assert not torch.equal(consensus(answers, aggregate="median", eps=0.0), consensus(answers, aggregate="mean"))
    plain = federation(DSFL(aggregation="mean"))
    assert torch.equal(plain.method.consensus(answers, plain.ctx), consensus(answers, aggregate="mean"))
    assert not torch.equal(consensus(answers, kappa=0.01), consensus(answers, kappa=100.0))


def test_a_probability_of_zero_gives_a_finite_target():
    assert consensus([torch.tensor([[1.0, 0.0, 0.0]])] * 2).isfinite().all()


def test_clients_tell_probabilities_and_train_towards_the_target():
    run = federation(Cronus(**BARE, digest_epochs=10, aggregate="median"))
    exchange(run, LOGITS)
    subset = run.method.public_subset(run.server)
    each = torch.stack([logits_of(party(run, c).main, subset).softmax(1) for c in (0, 1, 2)])
    torch.testing.assert_close(run.server.memory["logits"].exp(), each.median(0).values)
    run.server.memory["logits"] = 5 * torch.eye(3).repeat(4, 1)
    t = run.server.memory["logits"].softmax(1)

    def distances():
        return [float(-(t * logits_of(party(run, c).main, subset).log_softmax(1)).sum(1).mean()) for c in (0, 1, 2)]

    before = distances()
    exchange(run, DIGEST)
    assert all(after < 0.95 * old for after, old in zip(distances(), before, strict=True))


def test_the_loss_of_the_digest_by_hand():
    """Cross-entropy to the mean itself: 0.6·0.4076 + 0.3·1.4076 + 0.1·2.4076."""
    z, told = torch.tensor([[1.0, 0.0, -1.0]]), consensus([torch.tensor([[0.6, 0.3, 0.1]])] * 3)
    loss = Cronus().distance({"main": lambda x: x}, Batch(z, torch.zeros(1), {"target": told}), {})
    assert float(loss) == pytest.approx(0.90761, abs=1e-4)


def test_clients_first_train_on_their_own_data_and_need_no_public_labels():
    run = federation(Cronus(subset=12))
    (private,) = run.method.pretrain(party(run, 0), run.ctx)
    assert private.epochs == 5 and private.data is None and run.plan.before == (PRETRAIN,)
    assert [step.name for step in run.plan.round] == ["logits", "digest", "main"]  # public data first, then own


def test_without_digest_it_is_local_training():
    off, local = federation(Cronus(**BARE, digest_epochs=0), rounds=2), federation(pf.Local(), rounds=2)
    off.run(), local.run()
    assert same(states(off), states(local))


def test_bytes_are_those_of_the_predictions():
    for line in federation(Cronus(**BARE), rounds=2).run()[1:]:
        assert (line["bytes_up"], line["bytes_down"]) == (3 * 4 * 12 * 3, 3 * (4 * 12 * 3 + 8))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eps": 0.5}, "eps must be below 0.5"),
        ({"eps": -0.1}, "eps must not be negative"),
        ({"kappa": 0.0}, "kappa must be above 0"),
        ({"digest_loss": "l2"}, "digest_loss is 'ce' or 'kl'"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, words):
    with pytest.raises(pf.InputError, match=words):
        Cronus(**options)


def test_public_data_is_needed_but_no_labels_of_it():
    with pytest.raises(pf.InputError, match="cronus needs public data at all parties"):
        federation(Cronus(), synthetic(3, public=False))
    federation(Cronus(**BARE), problem(labelled=False)).run()
