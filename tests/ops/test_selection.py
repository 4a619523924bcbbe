"""Choosing among networks: hand-computed scores, limit cases, ties."""

import math

import pytest
import torch

from polyfed.ops.selection import (
    ABSENT,
    class_weights,
    cluster_heads,
    ensemble_scores,
    fit_temperature,
    greedy_cover,
    log_confidence,
    most_confident,
    normalized,
    top_k_scores,
)


@pytest.fixture
def logits():
    return torch.randn((5, 40, 7), generator=torch.Generator().manual_seed(0)) * 3


def test_the_worked_example_of_disturbing():
    both = torch.tensor([[[4.0, -5.0]], [[-2.0, 2.0]]])  # the first network is sure, the second would be right
    assert top_k_scores(both, None).tolist() == [[2.0, -3.0]]
    assert top_k_scores(both, 1).tolist() == [[4.0, -5.0]]
    assert top_k_scores(both.flip(0), 1).tolist() == [[4.0, -5.0]]


def test_top_one_is_the_output_of_the_most_confident_network(logits):
    chosen = logits.amax(2).argmax(0)
    assert torch.equal(top_k_scores(logits, 1), logits[chosen, torch.arange(40)])


def test_top_two_sums_the_two_largest_by_hand():
    three = torch.tensor([[[1.0, 0.0]], [[5.0, 2.0]], [[-9.0, 4.0]]])
    assert top_k_scores(three, 2).tolist() == [[-4.0, 6.0]]


@pytest.mark.parametrize("k", [5, 9, None])
def test_all_networks_are_the_sum_and_have_the_label_of_the_mean(logits, k):
    full = top_k_scores(logits, k)
    assert torch.allclose(full, logits.sum(0), atol=1e-6)
    assert torch.equal(full.argmax(1), ensemble_scores(logits, space="logit").argmax(1))


def test_ties_go_to_the_lowest_index():
    equal = torch.tensor([[[1.0, 3.0]], [[3.0, 0.0]], [[2.0, 3.0]]])
    assert top_k_scores(equal, 1).tolist() == [[1.0, 3.0]]
    assert most_confident(torch.full((4, 1), 7.0), 2).flatten().tolist() == [True, True, False, False]


def test_one_network_is_itself_whatever_the_rule(logits):
    alone = logits[:1]
    for k in (1, 3, None):
        assert torch.equal(top_k_scores(alone, k), alone[0])
    assert torch.allclose(ensemble_scores(alone), alone[0].softmax(1))


def test_a_constant_on_all_logits_of_a_network_moves_the_choice_but_not_the_ensemble(logits):
    shifted = logits.clone()
    shifted[3] += 50.0
    assert torch.allclose(ensemble_scores(shifted), ensemble_scores(logits), atol=1e-6)
    assert most_confident(log_confidence(shifted), 1)[3].all()
    assert not most_confident(log_confidence(logits), 1)[3].all()


def test_a_network_scaled_up_is_chosen_wherever_its_largest_logit_is_positive_and_largest(logits):
    scaled = logits.clone()
    scaled[2] *= 100.0
    confidence = log_confidence(scaled)
    others = confidence[[0, 1, 3, 4]].amax(0)
    wanted = (confidence[2] > 0) & (confidence[2] > others)
    assert torch.equal(most_confident(confidence, 1)[2], wanted)
    assert wanted.sum() > 30


def test_logits_far_beyond_the_range_of_exp_are_compared():
    huge = torch.tensor([[[1000.0, 0.0]], [[0.0, 2000.0]]])
    assert top_k_scores(huge, 1).tolist() == [[0.0, 2000.0]]
    assert torch.isfinite(ensemble_scores(huge)).all()


def test_ensemble_by_hand_and_rows_sum_to_one(logits):
    two = torch.tensor([[[0.0, math.log(3.0)]], [[math.log(4.0), 0.0]]])  # (1/4, 3/4) and (4/5, 1/5)
    assert torch.allclose(ensemble_scores(two), torch.tensor([[0.525, 0.475]]))
    for weights in (None, class_weights(torch.randint(0, 5, (5, 7)))):
        assert torch.allclose(ensemble_scores(logits, weights).sum(1), torch.ones(40))


def test_identical_networks_are_the_network(logits):
    same = logits[:1].expand(4, -1, -1)
    assert torch.allclose(ensemble_scores(same), logits[0].softmax(1), atol=1e-6)
    assert torch.equal(top_k_scores(same, 1), logits[0])


def test_class_weights_by_hand():
    weights = class_weights(torch.tensor([[3, 0, 0], [1, 5, 0]]))
    assert torch.allclose(weights, torch.tensor([[0.75, 0.0, 0.0], [0.25, 1.0, 0.0]], dtype=torch.float64))
    two = torch.log(torch.tensor([[[0.2, 0.5, 0.3]], [[0.6, 0.3, 0.1]]]))
    raw = torch.tensor([0.75 * 0.2 + 0.25 * 0.6, 0.3, 0.0])
    assert torch.allclose(ensemble_scores(two, weights), (raw / raw.sum()).unsqueeze(0), atol=1e-6)


def test_a_class_that_nobody_has_is_never_the_answer_of_class_weights():
    weights = class_weights(torch.tensor([[3, 0, 0], [1, 4, 0]]))
    both = torch.tensor([[[-8.0, 9.0, 9.0]], [[-4.0, -2.0, 9.0]]])
    assert ensemble_scores(both, weights, "logit").tolist() == [[-7.0, -2.0, ABSENT]]
    assert ensemble_scores(both, weights)[0, 2].item() == 0.0


def test_a_network_abstains_from_classes_it_does_not_know():
    present = torch.tensor([[True, False, False], [False, True, False]])
    both = torch.tensor([[[1.0, 9.0, 9.0]], [[8.0, 2.0, 8.0]]])
    assert log_confidence(both, present).flatten().tolist() == [1.0, 2.0]
    assert top_k_scores(both, 1, present=present).tolist() == [[ABSENT, 2.0, ABSENT]]
    assert top_k_scores(both, None, present=present).tolist() == [[1.0, 2.0, ABSENT]]


def test_normalisations_by_hand():
    one = torch.tensor([[[1.0, 3.0]], [[10.0, 30.0]]])
    assert normalized(one) is one
    assert torch.allclose(
        normalized(one, "temperature", torch.tensor([0.5, 10.0])), torch.tensor([[[2.0, 6.0]], [[1.0, 3.0]]])
    )
    assert torch.allclose(normalized(one, "zscore"), torch.tensor([[[-1.0, 1.0]], [[-1.0, 1.0]]]))


def test_a_temperature_is_found_again():
    rng = torch.Generator().manual_seed(0)
    calibrated = torch.randn((20000, 3), generator=rng) * 2
    labels = torch.multinomial(calibrated.softmax(1), 1, generator=rng).flatten()
    assert fit_temperature(calibrated * 4.0, labels) == pytest.approx(4.0, rel=0.05)
    assert fit_temperature(calibrated, labels) == pytest.approx(1.0, rel=0.05)


def test_temperatures_have_limits_where_answers_are_all_right_or_all_wrong():
    logits = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    assert fit_temperature(logits, torch.tensor([1, 1])) == pytest.approx(20.0)
    assert fit_temperature(logits, torch.tensor([0, 0])) == pytest.approx(0.05)


def test_greedy_choice_covers_labels_then_prefers_more_samples():
    counts = torch.tensor([[5, 5, 0, 0], [9, 9, 0, 0], [0, 0, 1, 0], [1, 0, 1, 1], [0, 0, 0, 9]])
    assert greedy_cover(counts) == [1, 3]  # first 3 (three labels), then label 1: client 1 has more samples than 0
    assert greedy_cover(counts, keep=1) == [3]
    assert greedy_cover(torch.tensor([[4, 0], [4, 0], [0, 1]])) == [0, 2]  # a tie in everything: the lower index
    assert greedy_cover(torch.eye(3).long(), keep=2) == [0, 1]


def test_clusters_of_similar_networks_keep_their_largest():
    rng = torch.Generator().manual_seed(0)
    base = torch.randn((2, 30, 4), generator=rng)
    outputs = torch.stack([base[0], base[1], base[0] * 3, base[1] * 0.5, base[1]])  # scale does not count in cosine
    assert cluster_heads(outputs, [1, 2, 9, 9, 2], keep=2) == [2, 3]
    assert cluster_heads(outputs, [1, 2, 1, 2, 2], keep=2) == [0, 1]
    assert cluster_heads(outputs.requires_grad_(), [1, 2, 1, 2, 2], keep=2) == [0, 1]
    assert cluster_heads(outputs, [1] * 5, keep=7) == [0, 1, 2, 3, 4]


def test_scores_of_nobody_and_logits_without_a_spread_stay_finite():
    logits = torch.tensor([[[1.0, 3.0]], [[2.0, 0.0]]])
    assert ensemble_scores(logits, torch.zeros(2, 2)).tolist() == [[0.0, 0.0]]  # no class has any weight
    assert normalized(torch.full((1, 1, 3), 5.0), "zscore").tolist() == [[[0.0, 0.0, 0.0]]]
