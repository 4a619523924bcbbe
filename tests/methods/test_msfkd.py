"""MSFKD (reconstruction): the acceptance properties of its spec."""

import math

import pytest
import torch
from distill_problem import DIGITS, moved, taught
from public_problem import exchange, federation, party, problem
from tests.contract.table import synthetic

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.method import Step
from polyfed.core.passes import logits_of
from polyfed.core.settings import Settings
from polyfed.methods.feddf_hetero import FedDFHetero
from polyfed.methods.msfkd import MSFKD

WIDTHS = ("mlp:1x16@1", "mlp:1x16@0.5")
MAIN = Step()
NO_LABELS = torch.zeros(3, dtype=torch.long)
# Three clients, three samples, of which the first knows the first well, the second the second, and nobody the last.
LOGITS = torch.tensor(
    [
        [[9.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        [[0.0, 1.0, 0.0], [0.0, 9.0, 0.0], [0.1, 0.0, 0.0]],
        [[0.0, 3.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.2, 0.0]],
    ]
)


def test_the_most_certain_networks_teach_each_sample():
    chosen, keep = MSFKD(rho=0.3).selection(LOGITS, NO_LABELS)
    assert chosen.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    assert keep.tolist() == [True, True, False]
    chosen, _ = MSFKD(rho=0.5).selection(LOGITS, NO_LABELS)  # ceil(1.5) of three
    assert chosen.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    chosen, keep = MSFKD(rho=1.0, kappa=1.0).selection(LOGITS, NO_LABELS)
    assert chosen.min() == 1 and keep.all()
    many, _ = MSFKD(rho=0.55).selection(torch.zeros(100, 1, 3), NO_LABELS[:1])
    assert many.sum() == 55  # 0.55 · 100 is 55.00000000000001
    for classes in (7, 12, 19):  # a uniform answer has entropy 1, not a rounding more
        assert MSFKD(kappa=1.0).selection(torch.zeros(2, 1, classes), NO_LABELS[:1])[1].all()


def test_the_limit_of_a_sample_is_its_least_normalized_entropy():
    p = torch.tensor([0.8, 0.1, 0.1])
    entropy = float(-(p * p.log()).sum()) / math.log(3)
    logits = torch.stack([p.log(), torch.zeros(3)]).unsqueeze(1)  # [2 clients, 1 sample, 3]
    for kappa, kept in ((entropy + 1e-3, True), (entropy - 1e-3, False)):
        for selector in ("entropy", "margin"):
            assert MSFKD(kappa=kappa, selector=selector).selection(logits, NO_LABELS[:1])[1].tolist() == [kept]


def test_a_margin_may_choose_otherwise_than_entropy():
    p = torch.tensor([[0.50, 0.49, 0.01], [0.50, 0.25, 0.25]]).log().unsqueeze(1)
    assert MSFKD(selector="entropy").selection(p, NO_LABELS[:1])[0].flatten().tolist() == [1.0, 0.0]
    assert MSFKD(selector="margin").selection(p, NO_LABELS[:1])[0].flatten().tolist() == [0.0, 1.0]
    # Margins of 0.30 and 0.25: of probabilities, not of their logarithms (ratios of 2 and 2.67).
    p = torch.tensor([[0.6, 0.3, 0.04, 0.03, 0.03], [0.4, 0.15, 0.15, 0.15, 0.15]]).log().unsqueeze(1)
    assert MSFKD(selector="margin").selection(p, NO_LABELS[:1])[0].flatten().tolist() == [1.0, 0.0]


def test_with_labels_those_who_are_right_teach_and_perfect_clients_all_do():
    method = MSFKD(selector="label")
    chosen, keep = method.selection(LOGITS, torch.tensor([1, 0, 2]))
    assert chosen.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert keep.tolist() == [True, True, False]
    perfect = torch.eye(3).expand(4, 3, 3)
    chosen, keep = method.selection(perfect, torch.arange(3))
    assert chosen.min() == 1 and keep.all()


def test_adding_a_constant_to_a_clients_logits_changes_nothing():
    logits = torch.randn(5, 20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved_up = logits + torch.tensor([0.0, 3.0, -2.0, 7.0, 1.0], dtype=torch.float64).view(5, 1, 1)
    labels = torch.arange(20) % 4
    for selector in ("entropy", "margin", "label"):
        one, other = (MSFKD(selector=selector).selection(z, labels) for z in (logits, moved_up))
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.parametrize(("kappa", "most"), [(0.3, 35), (0.1, 20)])  # with few samples, shares still add up to 1
def test_the_teacher_is_the_mean_of_the_chosen_and_other_samples_are_left_out(kappa, most):
    run = federation(MSFKD(kappa=kappa), models=WIDTHS)
    replies = moved(run)
    each = []
    for client, reply in replies.items():
        model = party(run, client).main
        model.load_state_dict({**model.state_dict(), **reply.params["main"]})
        each.append(logits_of(model, run.server.public))
    each = torch.stack(each)
    chosen, keep = run.method.selection(each, run.server.public.labels())
    data, targets = run.method.lesson(replies, run.server.public, run.ctx)
    positions = [n for n in range(40) if keep[n]]
    assert 5 < len(data) == len(positions) < most
    assert torch.equal(data.inputs(), run.server.public.inputs(torch.tensor(positions)))
    for row, n in zip(targets, positions, strict=True):
        teachers = [client for client in range(3) if chosen[client, n]]
        assert len(teachers) == 2
        torch.testing.assert_close(row, sum(each[client, n] for client in teachers) / 2)
    shares = run.ctx.records["selected"]
    assert sum(shares.values()) == pytest.approx(1.0)
    for client in range(3):
        assert shares[str(client)] == pytest.approx(float((chosen[client] * keep).sum()) / (2 * len(positions)))


def test_all_knowledge_is_fedfusion_bit_for_bit_and_one_client_is_itself():
    run, plain = federation(MSFKD(rho=1.0, kappa=1.0), models=WIDTHS), federation(FedDFHetero(), models=WIDTHS)
    replies = moved(run)
    ours, theirs = taught(run, replies), taught(plain, replies)
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())
    assert any(
        not torch.equal(tensor, theirs[name])
        for name, tensor in taught(federation(MSFKD(), models=WIDTHS), replies).items()
    )
    one = federation(MSFKD(kappa=1.0), problem(sizes=(20,)), models=WIDTHS[:1])
    replies = moved(one)
    for name, tensor in taught(one, replies).items():
        torch.testing.assert_close(tensor, replies[0].params["main"][name], rtol=0, atol=1e-5)


def test_nothing_is_distilled_where_nobody_knows_anything():
    run, off = federation(MSFKD(kappa=1e-9), models=WIDTHS), federation(MSFKD(distill_epochs=0), models=WIDTHS)
    replies = moved(run)
    found, average = taught(run, replies), taught(off, replies)
    assert all(torch.equal(tensor, average[name]) for name, tensor in found.items())
    assert run.ctx.records["selected"] == {"0": 0.0, "1": 0.0, "2": 0.0}


# --- local work ---


def work(run, *rounds):
    """The epochs that clients were given after rounds with these shares."""
    for shares in rounds:
        run.method.choose_work(run.server, {str(client): share for client, share in enumerate(shares)}, run.ctx)
    return run.server.memory["epochs"]


def test_a_client_that_is_rarely_chosen_for_three_rounds_does_one_epoch_less():
    low = (0.1, 0.45, 0.45)  # below 1 / (2 · 3)
    run = federation(MSFKD(), models=WIDTHS, training=pf.Training(epochs=3, batch_size=8))
    assert work(run, low, low) == {} and work(run, low) == {"0": 2}
    assert work(run, low, low) == {"0": 2} and work(run, low) == {"0": 1}
    assert work(run, low, low, low) == {"0": 1}  # never none at all
    again = federation(MSFKD(), models=WIDTHS)
    assert work(again, low, low, (0.2, 0.4, 0.4), low, low) == {}  # 0.2 is enough, and the count starts anew


def test_nobody_does_less_because_nobody_was_chosen():
    run = federation(MSFKD(), models=WIDTHS, training=pf.Training(epochs=3, batch_size=8))
    nobody, low = (0.0, 0.0, 0.0), (0.1, 0.45, 0.45)
    assert work(run, nobody, nobody, nobody, nobody) == {}
    assert work(run, low, low, nobody) == {} and work(run, low) == {"0": 2}  # such a round does not count either way


def test_the_client_trains_for_as_many_epochs_as_it_is_told():
    training = pf.Training(epochs=3, batch_size=8)
    run = federation(MSFKD(adapt=False), models=WIDTHS, training=training)
    run.server.memory["epochs"] = {"1": 2}
    sent = [run.method.send(run.server, info, MAIN, run.ctx) for info in run.backend.infos.values()]
    assert [message.meta for message in sent] == [{}, {"epochs": 2}, {}]
    client = party(run, 1)
    client.inbox = sent[1]
    assert run.method.stage(client, run.ctx).epochs == 2
    client.inbox = sent[0]
    assert run.method.stage(client, run.ctx).epochs is None
    exchange(run, MAIN)
    assert run.meter.bytes["down"][1] == sent[1].nbytes() == 4 * (64 * 8 + 8 + 8 * 3 + 3) + 8


def test_work_is_chosen_in_rounds_only_where_it_is_asked_for():
    for adapt in (True, False):
        run = federation(MSFKD(adapt=adapt, kappa=1.0), models=WIDTHS)  # no sample is left out
        run.server.memory["few"] = dict.fromkeys("012", 2)
        exchange(run, MAIN)
        assert (run.server.memory["few"] == dict.fromkeys("012", 2)) == (not adapt)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rho": 0.0}, "rho must be above 0"),
        ({"kappa": 1.1}, "kappa must be at most 1"),
        ({"ensemble": "probs"}, "ensemble is 'logits'"),
        ({"selector": "votes"}, "selector is 'entropy', 'margin' or 'label', not 'votes'"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, words):
    with pytest.raises(pf.InputError, match=words):
        MSFKD(**options)


def test_labels_that_are_not_there_are_refused_before_training():
    with pytest.raises(pf.InputError, match="needs public data with the clients' own classes"):
        federation(MSFKD(selector="label"), models=WIDTHS)
    with pytest.raises(pf.InputError, match="needs labels of the public data"):
        prepare(MSFKD(selector="label"), synthetic(2), list(WIDTHS), Settings(1))
    assert federation(MSFKD(selector="label"), DIGITS, WIDTHS).server.public is not None


def test_results_are_marked_as_a_reconstruction():
    assert "reconstruction" in MSFKD.paper
