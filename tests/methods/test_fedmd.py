"""FedMD against its specification: the mean, the subset, the digest, the labels, the bytes."""

import pytest
import torch
from public_problem import PRIVATE, PUBLIC, exchange, federation, party, problem, same, states
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.message import Message
from polyfed.core.party import Party, PartyData
from polyfed.core.passes import logits_of
from polyfed.core.rng import SERVER
from polyfed.core.stage import Batch
from polyfed.methods.fedmd import DIGEST, LOGITS, PRETRAIN, REVISIT, FedMD, label_shift, private_loss

QUICK = {"subset": 12, "public_epochs": 1, "private_epochs": 1}
BARE = {"subset": 12, "public_epochs": 0, "private_epochs": 0}
SMALL = pf.Training(epochs=1, batch_size=8, lr=0.05)


class NoteSubsets(FedMD):
    """Remembers which public rows every party used, by round."""

    name = "notesubsets"
    seen: list = []  # noqa: RUF012 (shared on purpose)

    def public_subset(self, party):
        samples = super().public_subset(party)
        self.seen.append((party.id, samples.index.tolist()))
        return samples


class LosesAnswers:
    """A backend whose clients 1, ... get their mail in step `logits` only if they are not among the deaf."""

    def __init__(self, backend, deaf):
        self.backend, self.deaf = backend, deaf

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def exchange(self, step, messages, ctx):
        gone = self.deaf if step.name == "logits" else ()
        replies = self.backend.exchange(step, {c: m for c, m in messages.items() if c not in gone}, ctx)
        replies.failed.update(dict.fromkeys(gone, "no answer"))
        return replies


def fused(*logits):
    run = federation(FedMD(**BARE))
    run.ctx.round = 1
    run.method.fuse(run.server, {c: Message(data={"logits": z}) for c, z in enumerate(logits)}, LOGITS, run.ctx)
    return run.server.memory["logits"]


# --- the mean ---


def test_the_mean_is_the_plain_mean_over_clients():
    a, b, c = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -2.0]]), torch.tensor([[5.0, 3.0]])
    assert fused(a, b, c).tolist() == [[3.0, 1.0]]


@pytest.mark.parametrize("number", [1, 3, 7, 20])
def test_the_mean_of_equal_logits_is_those_logits_bit_for_bit(number):
    constant = torch.tensor([0.1, -0.7, 1 / 3]).expand(5, 3)
    assert torch.equal(fused(*[constant] * number), constant)


def test_fuse_leaves_the_replies_alone():
    a, b = torch.ones(2, 2), torch.zeros(2, 2)
    fused(a, b)
    assert a.sum() == 4 and b.sum() == 0


def test_a_round_averages_what_the_participants_say_in_prediction_mode():
    run = federation(FedMD(**BARE), models=("cnn:4-8,bn", "mlp:1x12"))
    exchange(run, LOGITS, clients=(0, 2))
    subset = run.method.public_subset(run.server)
    expected = (logits_of(party(run, 0).main, subset) + logits_of(party(run, 2).main, subset)) / 2
    torch.testing.assert_close(run.server.memory["logits"], expected)
    one_by_one = party(run, 0).main.eval()
    by_hand = torch.cat([one_by_one(x) for x, _ in subset.chunks(1)])
    torch.testing.assert_close(logits_of(one_by_one, subset), by_hand)


# --- the subset ---


def test_all_parties_use_the_same_rows_in_a_round_and_others_in_the_next():
    NoteSubsets.seen.clear()
    run = federation(NoteSubsets(subset=12, public_epochs=0, private_epochs=0), rounds=2)
    run.run()
    rows = [index for _, index in NoteSubsets.seen]
    first, second = rows[:6], rows[6:]  # three clients tell logits, then digest
    assert len(rows) == 12
    assert all(index == first[0] for index in first) and all(index == second[0] for index in second)
    assert first[0] != second[0]
    assert len(set(first[0])) == 12 and set(first[0]) <= set(range(40))


def test_a_subset_larger_than_the_public_set_is_all_of_it():
    run = federation(FedMD(subset=5000, public_epochs=0, private_epochs=0))
    exchange(run, LOGITS)
    assert sorted(run.method.public_subset(run.server).index.tolist()) == list(range(40))


def test_rows_of_the_mean_match_their_samples_whatever_the_batches():
    """A model's own logits as the target are a fixed point only if every row meets its own sample."""
    run = federation(FedMD(**{**BARE, "digest_loss": "l2", "digest_epochs": 3, "digest_batch": 5}))
    before = states(run)
    for client in (0, 1, 2):
        exchange(run, LOGITS, clients=(client,))
        exchange(run, DIGEST, clients=(client,))
    after = states(run)
    for a, b in zip(before, after, strict=True):
        for name in a:
            torch.testing.assert_close(a[name], b[name], atol=1e-6, rtol=0)
    exchange(run, LOGITS, clients=(0,))
    run.server.memory["logits"] = run.server.memory["logits"].roll(1, 0)
    exchange(run, DIGEST, clients=(0,))
    assert (states(run)[0]["head.weight"] - before[0]["head.weight"]).abs().max() > 1e-4


def test_a_client_whose_answer_was_lost_gets_the_seed_with_the_mean():
    clients = problem()
    heard = federation(FedMD(**{**BARE, "digest_loss": "l2"}), clients)
    deaf = federation(FedMD(**{**BARE, "digest_loss": "l2"}), clients)
    for run in (heard, deaf):
        exchange(run, LOGITS, round=1)  # everybody knows the subset of round 1
    exchange(heard, LOGITS, round=2)
    deaf.backend = LosesAnswers(deaf.backend, {1})
    exchange(deaf, LOGITS, round=2)
    infos = deaf.backend.infos
    seeds = [deaf.method.send(deaf.server, infos[c], DIGEST, deaf.ctx).meta for c in infos]
    assert seeds == [{}, {"subset_seed": heard.server.memory["subset_seed"]}, {}]
    deaf.server.memory["logits"] = heard.server.memory["logits"]  # the means differ: not the point here
    exchange(heard, DIGEST, round=2)
    exchange(deaf, DIGEST, round=2)
    assert same(states(heard), states(deaf))


def test_a_round_in_which_nobody_answers_goes_on_without_digest():
    run = federation(FedMD(**BARE), rounds=2)
    run.backend = LosesAnswers(run.backend, {0, 1, 2})
    run.run()
    alone = federation(FedMD(**{**BARE, "digest_epochs": 0}), rounds=2)
    alone.run()
    assert same(states(run), states(alone))
    assert run.history[-1]["missing"] == {"0": "no answer", "1": "no answer", "2": "no answer"}


def test_the_mean_of_an_earlier_round_is_not_digested():
    run = federation(FedMD(**BARE))
    exchange(run, LOGITS, round=1)
    info = run.backend.infos[0]
    assert "logits" in run.method.send(run.server, info, DIGEST, run.ctx).data
    run.ctx.round = 2  # in which nobody answered: its subset is another one
    assert run.method.send(run.server, info, DIGEST, run.ctx) == Message()


# --- the digest ---


def test_with_one_client_the_digest_loss_and_its_gradient_are_zero():
    run = federation(FedMD(**BARE), problem(sizes=(20,)))
    exchange(run, LOGITS)
    client = party(run, 0)
    subset = run.method.public_subset(client)
    stage = run.method.distillation(subset, run.server.memory["logits"], run.ctx)
    batch = Batch(subset.inputs(), subset.labels(), {"target": stage.columns["target"]})
    loss = stage.loss({"main": client.main}, batch, {})
    loss.backward()
    assert loss.item() == 0
    assert all(not parameter.grad.any() for parameter in client.main.parameters())


@pytest.mark.parametrize("loss", ["l1", "l2", "ce", "kl"])
def test_the_digest_moves_every_client_towards_the_mean(loss):
    # L1 has no small gradients: with a large rate it would only hop around the mean.
    options = {"private_epochs": 20, "digest_loss": loss, "digest_epochs": 10, "digest_lr": 0.01}
    run = federation(FedMD(**{**BARE, **options}))
    exchange(run, PRETRAIN, round=0)
    exchange(run, LOGITS)
    subset, mean = run.method.public_subset(run.server), run.server.memory["logits"]

    def distances():
        shifted = mean - mean.mean(1, keepdim=True)  # soft labels leave the level open
        each = [logits_of(party(run, c).main, subset) for c in (0, 1, 2)]
        return [float((z - z.mean(1, keepdim=True) - shifted).abs().mean()) for z in each]

    before = distances()
    exchange(run, DIGEST)
    assert all(after < 0.95 * old for after, old in zip(distances(), before, strict=True))


def test_digest_losses_by_hand():
    student, teacher = torch.tensor([[0.0, 3.0], [1.0, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 3.0]])
    batch = Batch(student, torch.zeros(2), {"target": teacher})
    p, q = teacher.softmax(1), student.softmax(1)
    expected = {
        "l1": (1 + 2 + 0 + 2) / 4,
        "l2": (1 + 4 + 0 + 4) / 4,
        "ce": float(-(p * q.log()).sum()) / 2,
        "kl": float((p * (p / q).log()).sum()) / 2,
    }
    for loss, value in expected.items():
        found = FedMD(digest_loss=loss).distance({"main": lambda x: x}, batch, {})
        assert float(found) == pytest.approx(value, rel=1e-5), loss


def test_digest_has_its_own_batch_size_learning_rate_and_length():
    own = {"digest_lr": 0.2, "digest_batch": 5, "digest_epochs": 3}
    stage = FedMD(**{**BARE, **own}).distillation(None, None, federation(FedMD()).ctx)
    assert (stage.training.lr, stage.training.batch_size, stage.epochs) == (0.2, 5, 3)
    plain = FedMD(**BARE).distillation(None, None, federation(FedMD()).ctx)
    assert (plain.training.lr, plain.training.batch_size) == (0.05, 8)


def test_without_digest_and_pretraining_it_is_local_training_bit_for_bit():
    off = federation(FedMD(**{**BARE, "digest_epochs": 0}), rounds=2, models=("cnn:4-8,bn", "mlp:1x12"))
    local = federation(pf.Local(), rounds=2, models=("cnn:4-8,bn", "mlp:1x12"))
    off.run(), local.run()
    assert same(states(off), states(local))


def test_absent_clients_skip_the_round_and_later_distil_from_the_mean_of_then():
    run = federation(FedMD(**BARE))
    start = states(run)
    for step in (LOGITS, DIGEST, REVISIT):
        exchange(run, step, round=1, clients=(0, 1))
    assert same(states(run)[2:], start[2:])
    exchange(run, LOGITS, round=2, clients=(1, 2))
    mean = run.server.memory["logits"]
    subset = run.method.public_subset(run.server)
    own = [logits_of(party(run, c).main, subset) for c in (1, 2)]
    torch.testing.assert_close(mean, (own[0] + own[1]) / 2)
    message = run.method.send(run.server, run.backend.infos[2], DIGEST, run.ctx)
    assert torch.equal(message.data["logits"], mean)


def test_a_round_is_logits_then_digest_then_private_data():
    assert [step.name for step in FedMD().plan().round] == [LOGITS.name, DIGEST.name, REVISIT.name]


# --- labels and outputs ---


def test_public_classes_come_first_among_the_outputs():
    assert FedMD().outputs(10, 20) == 30
    assert FedMD().outputs(10, None) == 10
    assert FedMD(public_epochs=0).outputs(10, 20) == 10
    run = federation(FedMD(**QUICK))
    assert (run.ctx.public_classes, party(run, 0).main.num_classes) == (PUBLIC, PUBLIC + PRIVATE)


def test_private_label_y_is_output_public_plus_y():
    run = federation(FedMD(**QUICK))
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    batch = Batch(logits, torch.tensor([0, 1, 2, 0]))
    loss = private_loss({"main": lambda x: x}, batch, label_shift(run.ctx))
    rows = -logits.log_softmax(1)[torch.arange(4), torch.tensor([2, 3, 4, 2])]
    torch.testing.assert_close(loss, rows.mean())
    client = party(run, 0)  # learners that are no networks are told these places
    stage = run.method.private_stage(client, run.ctx)
    assert stage.targets.tolist() == [PUBLIC + label for label in client.train.labels().tolist()]


def test_a_prediction_of_a_public_class_is_wrong():
    run = federation(FedMD(**QUICK))
    someone = Party(SERVER, None, PartyData())
    someone.models["main"] = torch.nn.Identity()
    logits = torch.tensor([[0.0, 0.0, 5.0, 1.0, 1.0], [9.0, 0.0, 5.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 3.0]])
    scores = run.method.predict(someone, logits, run.ctx)
    assert scores.argmax(1).tolist() == [0, PRIVATE, 2]
    y = torch.tensor([0, 0, 2])
    torch.testing.assert_close(F.cross_entropy(scores, y), F.cross_entropy(logits, y + PUBLIC))


def test_both_accuracies_are_reported_where_there_are_public_outputs():
    run = federation(FedMD(**QUICK))
    line = run.run()[-1]
    assert line["accuracy"]["private"] >= line["accuracy"]["mean"]
    plain = federation(FedMD(**BARE)).run()[-1]
    assert "private" not in plain["accuracy"]


def test_pretraining_learns_the_public_labels_and_then_the_private_ones():
    training = pf.Training(epochs=1, batch_size=8, lr=0.1)
    run = federation(FedMD(subset=12, public_epochs=8, private_epochs=0), training=training)
    exchange(run, PRETRAIN, round=0)
    public = run.server.public
    right = logits_of(party(run, 0).main, public).argmax(1) == public.labels()
    assert right.float().mean() > 0.95
    run = federation(FedMD(subset=12, public_epochs=8, private_epochs=8), training=training)
    exchange(run, PRETRAIN, round=0)
    client = party(run, 2)
    right = logits_of(client.main, client.train).argmax(1) == client.train.labels() + PUBLIC
    assert right.float().mean() > 0.95


def test_everybody_pretrains_whoever_is_selected_later():
    run = federation(FedMD(**QUICK), participation=0.34)
    start = states(run)
    run._phase("before", 0, run.plan.before, evaluate=False)
    for before, after in zip(start, states(run), strict=True):
        assert not same([before], [after])
    assert len(run.history[0]["participants"]) == 1


def test_pretraining_has_its_own_lengths():
    run = federation(FedMD(subset=12, public_epochs=7, private_epochs=4))
    public, private = run.method.pretrain(party(run, 0), run.ctx)
    assert (public.epochs, private.epochs) == (7, 4)
    assert public.data is run.server.public and private.data is None  # None: the client's own


def test_rows_held_out_of_the_clients_data_share_its_classes():
    digits = pf.split(pf.load("digits", limit=(120, 40)), clients=3, seed=0, public=30)
    run = federation(FedMD(**QUICK), digits)
    assert (run.ctx.public_classes, party(run, 0).main.num_classes) == (None, 10)
    assert run.method.private_stage(party(run, 0), run.ctx).targets is None


def test_public_data_without_labels_is_refused_where_labels_are_learned():
    unlabeled = problem(labelled=False)
    with pytest.raises(pf.InputError, match=r"needs public data with labels.*public_epochs=0"):
        federation(FedMD(**QUICK), unlabeled)
    history = federation(FedMD(**BARE), unlabeled).run()
    assert history[-1]["accuracy"]["mean"] > 0


def test_public_data_is_needed():
    clients = pf.Clients.from_parts(
        [(torch.randn(9, 1, 8, 8).numpy(), [0, 1, 2] * 3)], test=(torch.randn(3, 1, 8, 8).numpy(), [0, 1, 2])
    )
    with pytest.raises(pf.InputError, match=r"fedmd needs public data at all parties, but there is none"):
        federation(FedMD(**BARE), clients)


# --- cost and history ---


@pytest.mark.parametrize("model", ["mlp:1x4", "mlp:3x40", "cnn:4-8,bn"])
def test_bytes_do_not_depend_on_the_model(model):
    run = federation(FedMD(**QUICK), models=(model,), rounds=2)
    before, *rounds = run.run()
    outputs = PUBLIC + PRIVATE
    assert (before["bytes_up"], before["bytes_down"]) == (0, 0)
    for line in rounds:
        assert line["bytes_up"] == 3 * 4 * 12 * outputs
        assert line["bytes_down"] == 3 * (4 * 12 * outputs + 8)


def test_the_reported_loss_is_that_of_the_private_data():
    """Telling logits trains nothing: it must not pull the round's loss towards zero."""
    training = pf.Training(epochs=1, batch_size=100, lr=1e-12)
    run = federation(FedMD(**BARE), training=training)
    everyone = [party(run, c) for c in (0, 1, 2)]
    expected = sum(
        float(F.cross_entropy(logits_of(party(run, p.id).main, p.train), p.train.labels())) for p in everyone
    )
    assert run.run()[-1]["loss"] == pytest.approx(expected / 3, rel=1e-4)


def test_the_accuracy_after_pretraining_is_the_initial_stage():
    before = federation(FedMD(**QUICK)).run()[0]
    assert before["stages"]["initial"]["per_client"] == before["accuracy"]["per_client"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subset": 0}, "subset must be at least 1, got 0"),
        ({"digest_loss": "l3"}, "digest_loss is 'l1', 'l2', 'ce' or 'kl', not 'l3'"),
        ({"digest_epochs": -1}, "digest_epochs must not be negative"),
        ({"public_epochs": -1}, "public_epochs must not be negative"),
        ({"digest_lr": 0.0}, "digest_lr must be above 0"),
        ({"digest_batch": 0}, "digest_batch must be at least 1"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, words):
    with pytest.raises(pf.InputError, match=words):
        FedMD(**options).check()


def test_noise_is_planned_for_all_epochs_on_own_samples():
    assert FedMD(private_epochs=4).own_epochs(3, 5) == 19
