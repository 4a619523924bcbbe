"""DS-FL: the acceptance properties of its spec."""

import pytest
import torch
from public_problem import exchange, federation, party, problem, same, states

import polyfed as pf
from polyfed.core.passes import logits_of
from polyfed.core.stage import Batch
from polyfed.methods.dsfl import DSFL
from polyfed.methods.fedmd import DIGEST, LOGITS, REVISIT
from polyfed.ops.distance import entropy
from polyfed.testing import synthetic

P = torch.tensor([[0.6, 0.3, 0.1]])
MIXED = ("mlp:1x8", "cnn:4-8", "mlp:2x8")


def target(p=P, **options):
    """The clients' target for one answer (of all), and what is told of it."""
    run = federation(DSFL(**options))
    return run.method.consensus([p, p], run.ctx).softmax(1), run.ctx.records["entropy"]


def test_sharpening_by_hand():
    t, told = target()
    torch.testing.assert_close(t, torch.tensor([[0.9465, 0.0471, 0.0064]]), atol=1e-4, rtol=0)
    assert told["target"] == pytest.approx(0.2282, abs=1e-4) and told["mean"] == pytest.approx(0.8979, abs=1e-4)
    t, told = target(temperature=1.0)  # which is not the mean
    torch.testing.assert_close(t, torch.tensor([[0.4260, 0.3156, 0.2584]]), atol=1e-4, rtol=0)
    assert told["target"] == pytest.approx(1.0772, abs=1e-4)


def test_the_mean_is_that_of_probabilities_and_log_space_at_one_is_the_mean():
    a, b = torch.tensor([[0.9, 0.05, 0.05]]), torch.tensor([[0.1, 0.7, 0.2]])
    for options in ({"aggregation": "mean"}, {"space": "log", "temperature": 1.0}):
        run = federation(DSFL(**options))
        t = run.method.consensus([a, b], run.ctx).softmax(1)
        torch.testing.assert_close(t, torch.tensor([[0.5, 0.375, 0.125]]))
    run = federation(DSFL(space="log", temperature=0.5))
    squared = torch.tensor([[0.5, 0.375, 0.125]]) ** 2
    torch.testing.assert_close(run.method.consensus([a, b], run.ctx).softmax(1), squared / squared.sum())
    run = federation(DSFL(space="logit", temperature=0.5))
    torch.testing.assert_close(run.method.consensus([a, b], run.ctx).softmax(1), (a + b).softmax(1))  # mean over 0.5
    run = federation(DSFL(space="logit", aggregation="mean"))
    torch.testing.assert_close(run.method.consensus([a, b], run.ctx), (a + b) / 2)


@pytest.mark.parametrize("space", ["prob", "log", "logit"])
def test_entropy_falls_with_the_temperature_and_stays_for_the_uniform_vector(space):
    p = torch.randn(20, 10, generator=torch.Generator().manual_seed(0)).softmax(1)
    found = [target(p, space=space, temperature=t)[1]["target"] for t in (0.05, 0.1, 0.5, 1.0, 2.0)]
    assert found == sorted(found) and len(set(found)) == 5
    uniform = torch.full((1, 4), 0.25)
    for t in (0.1, 1.0):
        assert target(uniform, space=space, temperature=t)[1]["target"] == pytest.approx(1.386294)


def test_log_space_never_raises_entropy_but_probabilities_of_many_classes_do():
    p = torch.randn(50, 100, generator=torch.Generator().manual_seed(0)).softmax(1)
    log, prob = target(p, space="log")[1], target(p)[1]
    assert log["target"] < log["mean"] < prob["target"]
    assert entropy(p.log()) == pytest.approx(log["mean"], rel=1e-5)


def test_what_sharpening_does_to_each_of_many_samples():
    """Of 100 classes: a power of p sharpens every sample, the exponential of p / T flattens every one (T > 1/100)."""
    p = torch.randn(50, 100, generator=torch.Generator().manual_seed(0)).softmax(1)

    def entropies(t):
        return torch.special.entr(t).sum(1)

    for temperature in (0.1, 0.5, 0.9):
        assert (entropies(target(p, space="log", temperature=temperature)[0]) < entropies(p)).all()
    assert (entropies(target(p)[0]) > entropies(p)).all()


@pytest.mark.parametrize(("temperature", "factor"), [(0.1, 2.5), (0.25, 1.0), (1.0, 0.25)])
def test_near_the_uniform_vector_deviations_are_multiplied(temperature, factor):
    """By 1 / (C·T): of four classes, only a temperature below 1/4 sharpens."""
    away = torch.tensor([[1e-3, -1e-3, 0.0, 0.0]])
    t, _ = target(0.25 + away, temperature=temperature)
    torch.testing.assert_close(t - 0.25, factor * away, rtol=0, atol=2e-5)


def test_the_loss_of_the_digest_by_hand():
    """Softmax (0.9465, 0.0471, 0.0064) of p / T is the target itself: 0.9465·0.4076 + 0.0471·1.4076 + 0.0064·2.4076."""
    run = federation(DSFL())
    z, told = torch.tensor([[1.0, 0.0, -1.0]]), run.method.consensus([P, P], run.ctx)
    loss = run.method.distance({"main": lambda x: x}, Batch(z, torch.zeros(1), {"target": told}), {})
    assert float(loss) == pytest.approx(0.46748, abs=1e-4)


def test_clients_train_first_then_tell_probabilities_then_distill():
    run = federation(DSFL(subset=12), models=MIXED)
    assert [step.name for step in run.plan.round] == [REVISIT.name, LOGITS.name, DIGEST.name] and not run.plan.before
    for space in ("prob", "logit"):
        run = federation(DSFL(subset=12, space=space, aggregation="mean"), models=MIXED)
        exchange(run, REVISIT)
        exchange(run, LOGITS)
        subset = run.method.public_subset(run.server)
        each = [logits_of(party(run, client).main, subset) for client in (0, 1, 2)]
        mean = sum(z if space == "logit" else z.softmax(1) for z in each) / 3
        expected = mean if space == "logit" else mean.log()
        torch.testing.assert_close(run.server.memory["logits"], expected)


def test_the_digest_moves_every_client_towards_the_target():
    run = federation(DSFL(subset=12, digest_epochs=10, digest_lr=0.2), models=MIXED)
    exchange(run, REVISIT)
    exchange(run, LOGITS)
    subset, t = run.method.public_subset(run.server), run.server.memory["logits"].softmax(1)

    def distances():
        each = [logits_of(party(run, c).main, subset).log_softmax(1) for c in (0, 1, 2)]
        return [float((t * (t.log() - log_q)).sum(1).mean()) for log_q in each]

    before = distances()
    exchange(run, DIGEST)
    assert all(after < 0.9 * old for after, old in zip(distances(), before, strict=True))


def test_without_digest_it_is_local_training():
    off, local = federation(DSFL(digest_epochs=0), rounds=2), federation(pf.Local(), rounds=2)
    off.run(), local.run()
    assert same(states(off), states(local))


@pytest.mark.parametrize("model", ["mlp:1x4", "cnn:4-8,bn"])
def test_bytes_do_not_depend_on_the_model(model):
    for line in federation(DSFL(subset=12), models=(model,), rounds=2).run():
        assert (line["bytes_up"], line["bytes_down"]) == (3 * 4 * 12 * 3, 3 * (4 * 12 * 3 + 8))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"digest_loss": "l1"}, "digest_loss is 'ce' or 'kl'"),
        ({"space": "odds"}, "space is 'prob', 'logit' or 'log', not 'odds'"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, words):
    with pytest.raises(pf.InputError, match=words):
        DSFL(**options)


def test_public_data_is_needed_but_no_labels_of_it():
    with pytest.raises(pf.InputError, match="dsfl needs public data at all parties"):
        federation(DSFL(), synthetic(3, public=False))
    federation(DSFL(subset=12), problem(labelled=False)).run()
