"""AMS, the ensemble and one-shot FedAvg: what travels, who predicts what, limit cases, and the paper's claim."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.api import prepare
from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.nets import Net
from polyfed.core.party import Context, Party, PartyData, cloned, fill, state_of
from polyfed.core.runner import run_stage
from polyfed.core.settings import Settings
from polyfed.core.stage import Batch
from polyfed.engines.known import KnownStages, is_comparable
from polyfed.fusion.distill import Distillation
from polyfed.methods.ams import AMS
from polyfed.methods.ensemble import Ensemble
from polyfed.methods.fens import FENS
from polyfed.methods.oneshot_fedavg import OneShotFedAvg
from polyfed.methods.pfnm import PFNM
from polyfed.models import build
from polyfed.ops.selection import fit_temperature

MIXED = ["mlp:1x8", "mlp:3x8", "cnn:4-6,bn"]
SHORT = pf.Training(epochs=2, batch_size=8, lr=0.05)


def problem(clients=3, classes=4, per_client=20, public=None, seed=0):
    """Clients that lack some classes: client k misses class k."""
    rng = np.random.default_rng(seed)
    patterns = rng.normal(size=(classes, 1, 8, 8)).astype(np.float32)

    def draw(n, missing=None):
        labels = [c for c in range(classes) if c != missing]
        y = rng.choice(labels, n)
        return (patterns[y] + 0.5 * rng.normal(size=(n, 1, 8, 8))).astype(np.float32), y

    parts = [draw(per_client + k, missing=k) for k in range(clients)]
    held = None if public is None else draw(public)[0]
    return pf.Clients.from_parts(parts, test=draw(60), num_classes=classes, public=held, seed=seed)


def trained(method, clients=None, models=MIXED, training=SHORT, seed=0, participation=1.0):
    """Run a method and return its federation: server, context and clients' models can be looked at."""
    clients = clients if clients is not None else problem()
    settings = Settings(3, seed, training, pf.Participation(participation))
    federation = prepare(method, clients, models, settings)
    federation.run()
    return federation


def server_scores(federation, x):
    with torch.no_grad():
        return federation.method.predict(federation.server, x, federation.ctx)


def client_models(federation):
    return [federation.backend.model(c, federation.ctx).eval() for c in sorted(federation.backend.infos)]


def float_numbers(model):
    return sum(t.numel() for t in model.state_dict().values() if t.is_floating_point())


def test_top_one_by_hand_for_every_input():
    federation = trained(AMS())
    x = problem().test.inputs()
    with torch.no_grad():
        logits = [model(x) for model in client_models(federation)]
    scores = server_scores(federation, x)
    winners = set()
    for row in range(len(x)):
        best = max(range(3), key=lambda j: float(logits[j][row].max()))
        winners.add(best)
        assert torch.allclose(scores[row], logits[best][row], atol=1e-6)
    assert len(winners) > 1


@pytest.mark.parametrize("every", [0, "all"])
def test_the_sum_of_all_has_the_labels_of_the_ensemble_of_logits(every):
    federation = trained(AMS(top_k=every))
    x = problem().test.inputs()
    with torch.no_grad():
        logits = torch.stack([model(x) for model in client_models(federation)])
    scores = server_scores(federation, x)
    torch.testing.assert_close(scores, logits.sum(0))
    ensemble = trained(Ensemble(space="logit"))
    assert torch.equal(scores.argmax(1), server_scores(ensemble, x).argmax(1))


def test_a_single_sample_of_a_class_gives_a_say_about_it():
    x, y = problem().train[0].inputs(), torch.arange(20) % 3
    y[7] = 3
    clients = pf.Clients.from_parts([(x, y), (x, torch.arange(20) % 3)], test=(x, y), num_classes=4)
    federation = trained(AMS(mask_absent=True), clients, ["mlp:1x8"])
    counts, found = clients.label_counts(), server_scores(federation, x)
    with torch.no_grad():
        expected, none = (
            pf.fuse(client_models(federation), counts=told, mask_absent=True)(x)
            for told in (counts, [[n if n > 1 else 0 for n in row] for row in counts])
        )
    torch.testing.assert_close(found, expected)
    assert not torch.equal(found, none)


def test_temperatures_are_fitted_by_the_clients_and_used_by_the_server():
    clients = problem()
    federation = trained(AMS(normalize="temperature"), clients)
    models = client_models(federation)
    with torch.no_grad():
        own = [fit_temperature(m(c.inputs()), c.labels()) for m, c in zip(models, clients.train, strict=True)]
    assert federation.method.about(federation.server, "temperature") == pytest.approx(own, rel=1e-4)
    fused = pf.fuse(models, normalize="temperature", temperatures=own)
    x = clients.test.inputs()
    with torch.no_grad():
        assert torch.allclose(server_scores(federation, x), fused(x), rtol=1e-3, atol=1e-3)
        assert not torch.allclose(fused(x), pf.fuse(models)(x), rtol=1e-1)


def test_it_takes_one_round_and_is_judged_by_the_fused_model_while_clients_keep_their_own():
    clients = problem()
    result = pf.run(AMS(l1=0.0), clients, MIXED, rounds=7, training=SHORT)
    alone = pf.run("local", clients, MIXED, rounds=1, training=SHORT)
    assert len(result.history) == 1
    accuracy = result.accuracy()
    assert accuracy["own"]["per_client"] == alone.accuracy()["per_client"]
    assert accuracy["mean"] == accuracy["worst"] == accuracy["global"] and accuracy["std"] == 0.0
    assert accuracy["per_client"] == [accuracy["global"]] * len(clients)
    for client in alone.models:
        for name, tensor in alone.models[client].state_dict().items():
            assert torch.equal(tensor, result.models[client].state_dict()[name])


def test_all_one_shot_methods_see_the_same_trained_networks():
    clients = problem()
    runs = [pf.run(m, clients, ["mlp:1x8"], training=SHORT) for m in (AMS(), Ensemble(), PFNM(), OneShotFedAvg())]
    states = [run.models[1].state_dict() for run in runs]
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in state)


@pytest.mark.parametrize("engine", ["threads", "batched"])
@pytest.mark.parametrize("kind", [AMS, Ensemble, PFNM, OneShotFedAvg, FENS])
def test_the_penalty_is_the_sum_of_absolute_weights(kind, engine):
    """One step by hand: w = w - lr·(g + l1·sign w), beside the same step without the penalty."""
    clients = pf.split("digits", clients=2, by=pf.IID(), seed=0)
    step = pf.Training(epochs=1, batch_size=10_000, lr=0.5)
    plain, with_penalty = (
        pf.run(kind(l1=l1), clients, ["mlp:1x8"], rounds=1, training=step, engine=engine).models[0].state_dict()
        for l1 in (0.0, 0.125)
    )
    before = prepare(kind(), clients, ["mlp:1x8"], Settings(1, 0, step))
    start = before.backend.model(0, before.ctx).state_dict()
    for name in start:
        expected = plain[name] - 0.5 * 0.125 * start[name].sign()
        torch.testing.assert_close(with_penalty[name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "numbers", "further"),
    [
        (AMS(), 0, 8),  # the number of samples
        (AMS(mask_absent=True), 4, 8),
        (AMS(select="greedy"), 4, 8),
        (AMS(normalize="temperature"), 0, 16),
        (Ensemble(), 0, 0),
        (Ensemble(weights="class"), 4, 0),
    ],
)
def test_bytes_are_those_of_the_formula(method, numbers, further):
    federation = trained(method)
    sizes = [float_numbers(model) for model in client_models(federation)]
    assert sizes[2] > sum(p.numel() for p in client_models(federation)[2].parameters())  # statistics travel too
    assert federation.meter.bytes["up"] == {c: 4 * (n + numbers) + further for c, n in enumerate(sizes)}
    assert federation.meter.total("down") == 0


def test_only_participants_are_fused_and_the_others_stay_untouched():
    clients = problem(clients=4)
    federation = trained(AMS(), clients, participation=0.5)
    taken = federation.history[-1]["participants"]
    assert len(taken) == 2
    assert federation.method.held(federation.server) == taken
    x = clients.test.inputs()
    models = client_models(federation)
    with torch.no_grad():
        expected = pf.fuse([models[c] for c in taken])(x)
    assert torch.allclose(server_scores(federation, x), expected, atol=1e-6)
    for client in set(range(4)) - set(taken):
        initial = federation.ctx.blueprints[federation.backend.infos[client].architecture].initial
        assert all(torch.equal(initial[n], t) for n, t in models[client].state_dict().items())


@pytest.mark.parametrize(
    "method",
    [AMS(mask_absent=True), AMS(normalize="temperature"), Ensemble(weights="class"), OneShotFedAvg(), PFNM()],
)
def test_a_client_with_one_sample_takes_part(method):
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(n, 6)).astype(np.float32), np.arange(n) % 3) for n in (1, 7, 2)]
    clients = pf.Clients.from_parts(parts, test=parts[1], num_classes=3)
    result = pf.run(method, clients, ["mlp:1x5"], training=SHORT)
    still = pf.run(method, clients, ["mlp:1x5"], training=pf.Training(lr=1e-12))
    start, end = (run.models[0].state_dict()["head.bias"] for run in (still, result))
    assert not torch.allclose(start, end, atol=1e-4)  # it learns from its sample
    sent = result.cost.bytes["up"]
    assert sent[0] == sent[1] == sent[2] > 0
    assert len(result.accuracy()["per_client"]) == 3


def test_kept_uploads_do_not_change_when_clients_train_on():
    federation = trained(AMS())
    before = server_scores(federation, problem().test.inputs())
    for record in federation.backend.store.records.values():
        for tensor in record.states["main"].values():
            tensor.zero_()
    assert torch.equal(server_scores(federation, problem().test.inputs()), before)


def test_choosing_clients_by_labels_keeps_few_and_says_which():
    federation = trained(AMS(select="greedy"), problem(clients=4))
    kept = federation.history[-1]["kept"]
    assert kept == federation.method.held(federation.server)
    assert len(kept) == 2  # any two clients have all labels together
    assert len(trained(AMS(select="greedy", keep=1), problem(clients=4)).history[-1]["kept"]) == 1


def test_choosing_clients_by_similar_outputs():
    federation = trained(AMS(select="cluster", keep=2), problem(clients=4, public=30))
    assert len(federation.history[-1]["kept"]) == 2


def test_distillation_gives_one_small_model_that_agrees_with_ams():
    clients = problem(public=200)
    method = AMS(distill="unlabeled", student="mlp:1x30", distill_epochs=40, distill_lr=0.01)
    federation = trained(method, clients)
    student = federation.server.models["main"]
    x = clients.public.inputs()
    with torch.no_grad():
        teacher = method.fused(federation.server, federation.ctx)(x)
    agreement = (server_scores(federation, x).argmax(1) == teacher.argmax(1)).float().mean()
    assert torch.equal(server_scores(federation, x), student.eval()(x))
    assert float(agreement) > 0.8
    assert federation.history[-1]["distill_loss"] > 0


def test_the_distillation_loss_by_hand():
    student, teacher = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    module = nn.Linear(1, 2, bias=False)
    module.weight.data = student.T
    batch = Batch(torch.ones(1, 1), torch.zeros(1), {"target": teacher})
    quick = {"student": "mlp:1x5", "impressions": 1, "impression_steps": 1, "distill_epochs": 1}
    for method, t in (
        (AMS(distill="unlabeled", **quick), 2.0),
        (AMS(distill="zero_shot", **quick), 20.0),
        (AMS(distill="unlabeled", distill_temperature=4.0, **quick), 4.0),
    ):
        federation = trained(method, problem(public=12), ["mlp:1x8"])
        stage = method.distillation(federation.server, federation.ctx)
        p, q = (teacher / t).softmax(1), (student / t).softmax(1)
        expected = t**2 * float((p * (p / q).log()).sum())
        found = stage.loss({"main": Net(module)}, batch, stage.aux)
        assert float(found.detach()) == pytest.approx(expected, rel=1e-4)


def test_distillation_without_data_makes_inputs_for_the_classes_that_a_client_has():
    clients = problem()
    method = AMS(distill="zero_shot", student="mlp:1x20", impressions=3, impression_steps=5, distill_epochs=2)
    federation = trained(method, clients, ["mlp:1x8", "mlp:2x8"])
    made = method.distillation(federation.server, federation.ctx).data
    assert made.x.shape == (3 * 3 * 3, 1, 8, 8)  # 3 clients with 3 of 4 classes, 3 inputs for each
    again = method.distillation(federation.server, federation.ctx).data
    assert torch.equal(made.x, again.x)
    assert torch.isfinite(made.x).all()
    assert Distillation().impressions == AMS().impressions


def test_the_student_has_an_optimiser_of_its_own():
    method = AMS(distill="unlabeled", student="mlp:1x5", distill_epochs=3, distill_lr=0.02)
    training = pf.Training(epochs=2, batch_size=8, lr=0.05, decay=0.5, weight_decay=0.1, clip=1e-3)
    settings = Settings(1, 0, training, pf.Participation())
    federation = prepare(method, problem(public=12), MIXED, settings)
    stages, original = [], federation.ctx.run_stage

    def note(stage, party, name):
        stages.append(stage)
        return original(stage, party, name)

    federation.ctx.run_stage = note
    federation.run()
    (stage,) = stages
    training = stage.training
    assert (training.optimizer, training.lr, training.decay, training.weight_decay) == ("adam", 0.02, 1.0, 0.0)
    assert training.clip is None and training.batch_size == 8  # the run's batches
    x = federation.server.public.inputs()
    expected = method.fused(federation.server, federation.ctx)(x)
    assert torch.equal(stage.columns["target"], expected) and stage.epochs == 3


def test_defaults_are_those_of_the_specification():
    method = AMS()
    assert (method.top_k, method.l1, method.normalize, method.mask_absent) == (1, 1e-7, "none", False)
    assert (method.confidence, method.select, method.distill) == ("logit", "all", "none")
    assert (method.distill_epochs, method.distill_lr, method.impression_steps) == (20, 1e-3, 1000)
    matched = PFNM()
    assert (matched.sigma2, matched.sigma0_2, matched.gamma, matched.mu0) == (1.0, 10.0, 1.0, 0.0)
    assert (matched.iterations, matched.pop_factor, matched.cap, matched.max_global) == (3, 2.0, None, None)
    assert (matched.class_weighting, matched.l1) == (True, 1e-7)
    assert (OneShotFedAvg().weighting, OneShotFedAvg().l1, Ensemble().l1) == ("samples", 1e-7, 1e-7)
    assert (Ensemble().space, Ensemble().weights) == ("prob", "uniform")


def test_an_adapted_module_can_also_be_chosen_by_its_first_layer():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.entry = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
            self.body = nn.Linear(8, 6)
            self.out = nn.Linear(6, 4)

        def forward(self, x):
            return self.out(self.body(self.entry(x)).relu())

    def cut():
        return pf.adapt(Own(), head="out", stem="entry", input_shape=(1, 8, 8))

    def uncut():
        return pf.adapt(Own(), head="out", input_shape=(1, 8, 8))

    clients = problem()
    for options in ({}, {"confidence": "first_norm"}, {"mask_absent": True, "top_k": 2}):
        federation = trained(AMS(**options), clients, [cut, "mlp:2x8"])
        k = {"method": "ams-topk", "mask_absent": True} if "top_k" in options else options
        fused = pf.fuse(client_models(federation), counts=clients.label_counts(), **k)
        x = clients.test.inputs()
        assert torch.allclose(server_scores(federation, x), fused(x).detach(), atol=1e-5)
    with pytest.raises(InputError, match=r"ams needs a model that can be cut in three.*client 0.*adapt"):
        trained(AMS(confidence="first_max"), clients, [uncut, "mlp:2x8"])


def test_temperatures_are_fitted_on_validation_data_where_there_is_some():
    x, y = problem().train[0].inputs().numpy(), problem().train[0].labels().numpy()
    clients = pf.Clients.from_parts([(x, y)], test=(x, y), num_classes=4, validation=0.3)
    federation = trained(AMS(normalize="temperature"), clients, ["mlp:1x8"])
    (model,), (held,) = client_models(federation), clients.validation
    with torch.no_grad():
        expected = fit_temperature(model(held.inputs()), held.labels())
        other = fit_temperature(model(clients.train[0].inputs()), clients.train[0].labels())
    assert abs(expected - other) > 1e-3
    assert federation.method.about(federation.server, "temperature") == pytest.approx([expected], rel=1e-4)


def test_of_similar_networks_the_one_with_most_samples_stays():
    (x, y), other = ((own.inputs().numpy(), own.labels().numpy()) for own in problem().train[:2])
    parts = [*((x[:n], y[:n]) for n in (4, 8, 20)), other]
    clients = pf.Clients.from_parts(parts, test=other, num_classes=4, public=other[0])
    still = pf.Training(epochs=1, batch_size=20, lr=1e-9)  # networks of one architecture stay alike
    federation = trained(AMS(select="cluster", keep=2), clients, ["mlp:1x8", "mlp:1x8", "mlp:1x8", "mlp:2x8"], still)
    assert federation.history[-1]["kept"] == [2, 3]


def test_networks_are_asked_in_the_order_of_their_clients_whatever_a_checkpoint_does():
    server = Party(-1, None, PartyData())
    server.memory["uploads"] = {word: {"samples": int(word)} for word in sorted(str(n) for n in range(12))}
    assert AMS().held(server) == list(range(12)) == AMS().about(server, "samples")


def test_a_users_own_module_takes_part():
    def own(input_shape, num_classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, num_classes))

    result = pf.run(AMS(), problem(), [own, "mlp:2x8"], training=SHORT)
    assert result.architectures == ["own", "mlp:2x8", "own"]
    assert result.accuracy()["global"] > 0.25


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AMS(top_k=-1), "top_k"),
        (lambda: AMS(top_k="most"), "top_k"),
        (lambda: AMS(normalize="softmax"), "normalize is 'none', 'temperature' or 'zscore', not 'softmax'"),
        (lambda: AMS(confidence="first_norm", top_k=2), "top_k must be 1"),
        (lambda: AMS(confidence="first_max", normalize="zscore"), "normalize must be 'none'"),
        (lambda: AMS(select="cluster"), "keep"),
        (lambda: AMS(l1=-1.0), "l1"),
        (lambda: AMS(distill="unlabeled"), "public data"),
        (lambda: AMS(distill_epochs=0), "distill_epochs"),
        (lambda: AMS(distill_lr=0.0), "distill_lr must be above 0"),
        (lambda: OneShotFedAvg(pretrain_epochs=2), "pretrain_epochs"),
        (lambda: OneShotFedAvg(view="shared:head"), "view"),
        (lambda: Ensemble(space="log"), "space is 'prob' or 'logit'"),
        (lambda: Ensemble(weights="samples"), "weights is 'uniform' or 'class'"),
    ],
)
def test_requests_that_make_no_sense_are_refused_with_the_field(make, words):
    with pytest.raises(InputError, match=words):
        pf.run(make(), problem(), ["mlp:1x8"], training=SHORT)


# --- one-shot FedAvg ---


def test_one_shot_fedavg_is_the_first_round_of_fedavg():
    clients = problem()
    once = pf.run(OneShotFedAvg(l1=0.0), clients, ["mlp:2x8"], rounds=5, training=SHORT)
    first = pf.run("fedavg", clients, ["mlp:2x8"], rounds=1, training=SHORT)
    assert once.accuracy()["global"] == first.accuracy()["global"]
    for name, tensor in first.server_model.state_dict().items():
        assert torch.equal(tensor, once.server_model.state_dict()[name])


def test_one_shot_fedavg_of_one_client_is_its_network_and_without_training_the_initial_state():
    clients = problem(clients=1)
    federation = trained(OneShotFedAvg(), clients, ["mlp:2x8"])
    (own,) = client_models(federation)
    assert all(torch.equal(t, federation.server.main.state_dict()[n]) for n, t in own.state_dict().items())
    still = trained(OneShotFedAvg(), problem(), ["mlp:2x8"], pf.Training(lr=1e-30))
    initial = still.ctx.blueprints["mlp:2x8"].initial
    assert all(torch.allclose(t, still.server.main.state_dict()[n], atol=1e-7) for n, t in initial.items())


def test_one_shot_fedavg_is_the_mean_by_samples_of_weights_and_statistics():
    federation = trained(OneShotFedAvg(), models=["cnn:4-6,bn"])
    states, sizes = [model.state_dict() for model in client_models(federation)], (20, 21, 22)
    for name, tensor in federation.server.main.state_dict().items():
        if tensor.is_floating_point():
            expected = sum(n * state[name] for n, state in zip(sizes, states, strict=True)) / 63
            torch.testing.assert_close(tensor, expected)
    assert not torch.allclose(states[0]["stem.norm.running_mean"], states[1]["stem.norm.running_mean"])


def test_one_shot_fedavg_sends_a_number_down_and_weights_up():
    federation = trained(OneShotFedAvg(), models=["cnn:4-6,bn"])
    numbers = float_numbers(federation.server.main)
    assert federation.meter.bytes["down"] == dict.fromkeys(range(3), 8)
    assert federation.meter.bytes["up"] == dict.fromkeys(range(3), 4 * numbers + 8)


def test_a_client_that_started_from_other_weights_is_named():
    federation = trained(OneShotFedAvg(), models=["mlp:1x8"])
    method, ctx, step = federation.method, federation.ctx, Step()
    client = federation.backend.store.open(1, ctx)
    assert isinstance(client, Party) and isinstance(client.data, PartyData)
    client.inbox = method.send(federation.server, ctx.infos[1], step, ctx)
    work = method.local(client, step, ctx)  # its network is the trained one: not the common initial state
    next(work)
    with pytest.raises(StopIteration) as finished:
        work.send(0.0)
    reply = finished.value.value
    assert reply.meta["other_initial"] == 1
    good = Message({"main": dict(reply.params["main"])}, meta={"samples": 3})
    with pytest.warns(UserWarning, match="client 1 started from other weights"):
        method.fuse(federation.server, {0: good, 1: reply}, step, ctx)
    assert ctx.records["other_initial"] == [1]


def test_mixed_depths_are_refused_where_weights_are_averaged():
    with pytest.raises(InputError, match=r"oneshot_fedavg needs the same architecture .* client 1 has mlp:3x8.*ams"):
        pf.run(OneShotFedAvg(), problem(), ["mlp:1x8", "mlp:3x8"], training=SHORT)


def test_one_shot_fedavg_refuses_statistics_that_stay_with_the_clients():
    with pytest.raises(InputError, match=r"oneshot_fedavg needs .*statistics.*buffers to 'average'"):
        pf.run(OneShotFedAvg(buffers="local"), problem(), ["cnn:4-6,bn"], training=SHORT)
    assert pf.run(OneShotFedAvg(buffers="local"), problem(), ["mlp:1x8"], training=SHORT).accuracy()["global"] > 0


# --- the claim of the paper ---


def test_under_hetero_label_the_most_confident_network_beats_sum_average_and_any_client():
    data = pf.load("digits")
    clients = pf.split(data, 5, by="labels:3-6", seed=2)
    training = pf.Training(epochs=15, batch_size=64, optimizer="adam", lr=3e-3, decay=0.8, decay_every=3)
    result = pf.run(AMS(), clients, ["mlp:1"], training=training, seed=2)
    models = [result.models[client] for client in result.models]
    x, y = data.test.inputs(), data.test.labels()

    def accuracy(fused):
        with torch.no_grad():
            return float((fused(x).argmax(1) == y).float().mean())

    top1 = result.accuracy()["global"]
    sizes = [len(samples) for samples in clients.train]
    assert top1 == pytest.approx(accuracy(pf.fuse(models)))
    assert top1 > accuracy(pf.fuse(models, "ams-full")) + 0.1
    assert top1 > accuracy(pf.fuse(models, "average", weights=sizes)) + 0.1
    assert top1 > max(result.accuracy()["own"]["per_client"]) + 0.1


@pytest.mark.parametrize(("weights", "mean"), [("uniform", [0.6, 0.4]), ("class", [0.7 / 1.2, 0.5 / 1.2])])
def test_networks_of_an_ensemble_weigh_by_their_share_of_a_class(monkeypatch, weights, mean):
    """Shares of 3/4 and 1/4, and of 1/4 and 3/4: 0.75·0.8 + 0.25·0.4 = 0.7, and 0.25·0.2 + 0.75·0.6 = 0.5."""

    class Says(nn.Module):
        def __init__(self, *p):
            super().__init__()
            self.logits = torch.tensor([p]).log()

        def forward(self, x):
            return self.logits

    monkeypatch.setattr(Ensemble, "networks", lambda *given: [Says(0.8, 0.2), Says(0.4, 0.6)])
    monkeypatch.setattr(Ensemble, "about", lambda *given: [torch.tensor([3, 1]), torch.tensor([1, 3])])
    ctx = Context(0, 1, 1, pf.Training(), 2, (1,), 2)
    fused = Ensemble(weights=weights).make_fused(None, ctx)
    torch.testing.assert_close(fused(torch.zeros(1, 1)).softmax(1), torch.tensor([mean]))


def test_only_networks_with_the_same_loss_are_trained_once_for_several_methods():
    class Other(Ensemble):
        def loss(self, nets, batch, aux):
            return 2 * super().loss(nets, batch, aux)

    class OtherAverage(OneShotFedAvg):
        loss = Other.loss

    stages = [method.alone() for method in (Ensemble(), AMS(), OneShotFedAvg(), Other(), OtherAverage())]
    assert [is_comparable(stage, 1) for stage in stages] == [True, True, True, False, False]


@pytest.mark.parametrize(("other", "runs"), [(0.5, 1), (0.25, 2)])
def test_networks_with_another_penalty_are_trained_again(other, runs, monkeypatch):
    known, seen = KnownStages(), []
    monkeypatch.setattr("polyfed.engines.known.run_stage", lambda *given: seen.append(1) or run_stage(*given))
    party = Party(0, None, PartyData(pf.split("digits", clients=1).train[0]))
    party.models["main"] = build("mlp:1x8", (1, 8, 8), 10)
    start = cloned(state_of(party.main))
    ctx = Context(0, 1, 1, pf.Training(), 10, (1, 8, 8), 1)
    for l1 in (0.5, other):
        fill(party.tensors("main"), start)
        known.run(AMS(l1=l1).alone(), party, ctx, "main/0")
    assert len(seen) == runs
