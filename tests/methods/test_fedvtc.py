"""FedVTC: its losses, who moves in which step, what travels, the synthetic set, and the edges."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.distributions import Independent, Normal, kl_divergence
from torch.func import grad, stack_module_state, vmap
from torch.nn import functional as F

import polyfed as pf
from polyfed.analysis.memory import update_memory
from polyfed.analysis.synthetic import class_samples, sample_grid
from polyfed.core.errors import InputError, TrainingError
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE, Step
from polyfed.core.nets import FunctionalNet, Net
from polyfed.core.party import ClientInfo, Context, Party, PartyData
from polyfed.core.runner import run_stage
from polyfed.core.samples import Samples, Scaling
from polyfed.core.settings import Training
from polyfed.core.stage import Batch
from polyfed.data import Clients
from polyfed.engines.inprocess import drive
from polyfed.methods.fedvtc import TUNE, FedVTC
from polyfed.models import build, with_feature_dim
from polyfed.models.vtc import VTC, recalibrated, synthetic_set

SHAPE, CLASSES, P = (1, 8, 8), 3, 32  # a decoder of 8 channels of 2x2
SCALING = Scaling((0.3,), (0.5,), 255.0)
DECODERS = Step("decoders", who="all", down=False)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=rng(seed))


def make_model(spec="cnn:4-8,bn", seed=0, shape=SHAPE):
    torch.manual_seed(seed)
    return with_feature_dim(build(spec, shape, CLASSES), P)


def make_context(**changes):
    training = Training(epochs=2, batch_size=6, lr=0.05)
    given = {"seed": 0, "round": 1, "rounds": 2, "training": training, "num_classes": CLASSES, "input_shape": SHAPE}
    return Context(clients=2, **{**given, **changes})


def make_client(method, ctx, samples=12, labels=None, spec="cnn:4-8,bn", number=0):
    x = torch.randint(0, 256, (samples, *SHAPE), generator=rng(number), dtype=torch.uint8)
    y = torch.arange(samples) % CLASSES if labels is None else torch.tensor(labels)
    client = Party(number, ClientInfo(number, samples, spec), PartyData(Samples(x, y, scaling=SCALING)))
    client.models["main"] = make_model(spec)
    method.setup_client(client, ctx)
    return client


def greeting(classes=(0, 1, 2), sigma=0.1, seed=5):
    """What a client gets at the start of a round."""
    data = {"sigma": torch.full((P,), sigma)}
    if classes:
        data["prototypes"] = normal(len(classes), P, seed=seed)
        data["classes"] = torch.tensor(classes, dtype=torch.uint8)
    return Message(data=data)


def receive(client, message):
    """Let a client take in a message."""
    client.inbox = message
    FedVTC().receive(client, Step(), make_context())


def snapshot(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def moved(a, b):
    return {name for name in a if not torch.equal(a[name], b[name])}


def small_clients(parts=((10, 3), (12, 3), (14, 3)), test=20):
    """Images in bytes for (samples, classes) of each client, the classes counted from 0."""
    generator = np.random.default_rng(0)
    patterns = generator.integers(40, 200, (CLASSES, *SHAPE))

    def draw(n, classes):
        y = np.arange(n) % classes
        return (patterns[y] + generator.integers(-30, 30, (n, *SHAPE))).clip(0, 255).astype(np.uint8), y

    return Clients.from_parts([draw(*part) for part in parts], test=draw(test, CLASSES), num_classes=CLASSES)


def run(method=None, clients=None, models=("cnn:4-8,bn", "mlp:1x16"), **options):
    method = method or FedVTC(samples_per_class=5)
    settings = {"rounds": 2, "training": Training(epochs=1, batch_size=6, lr=0.02), "feature_dim": P, **options}
    return pf.run(method, clients or small_clients(), list(models), **settings)


# --- losses ---


def losses_of(method, classes=(0, 1, 2), batch_size=6):
    ctx = make_context()
    client = make_client(method, ctx, samples=batch_size)
    receive(client, greeting(classes, sigma=0.4))
    stage = next(method.stages(client, ctx))
    columns = {name: draw.sample(batch_size, rng(9)) for name, draw in stage.draws.items()}
    batch = Batch(client.train.inputs(), client.train.labels(), columns)
    return client, stage, batch


def expected_vtc_loss(method, client, z, batch, decode, extract, classes):
    """L_vtc written out once more, sample by sample, from its definition."""
    vtc, inbox = client.models["vtc"], client.inbox.data
    sigma = vtc.log_sigma.exp()
    prototype = {label: inbox["prototypes"][place] for place, label in enumerate(classes)}
    prior_sd = inbox["sigma"] if method.prior_cov == "global_sd" else torch.ones(P)
    total_kl = 0.0
    for features, label in zip(z, batch.y.tolist(), strict=True):
        centre = prototype.get(label, features)
        posterior, prior = (Independent(Normal(m, s), 1) for m, s in ((features, sigma), (centre, prior_sd)))
        total_kl += kl_divergence(posterior, prior)
    images = decode(z + sigma * batch["noise"])
    pixels = client.train.x / 255
    squared = ((images - pixels) ** 2).sum((1, 2, 3))
    latents, pixels = (P, 64) if method.reduction == "mean" else (1, 1)
    loss = method.kl_weight * total_kl / len(z) / latents
    loss = loss + method.rec_weight * squared.mean() / pixels
    if method.dm_latents == "global":
        centres = [prototype.get(label, features) for features, label in zip(z, batch.y.tolist(), strict=True)]
        images = decode(torch.stack(centres) + inbox["sigma"] * batch["latents"])
    features = extract((images - 0.3) / 0.5)
    held = [label for label in batch.y.unique().tolist() if label in prototype]
    if method.dm_mode == "pointwise":
        rows = [row for row, label in enumerate(batch.y.tolist()) if label in prototype]
        terms = [((features[row] - prototype[int(batch.y[row])]) ** 2).sum() for row in rows]
    else:
        terms = [((features[batch.y == label].mean(0) - prototype[label]) ** 2).sum() for label in held]
    return loss + method.lambda_dm * sum(terms) / len(terms) / latents


VARIANTS = [
    {},
    {"kl_weight": 0.3, "rec_weight": 2.0, "lambda_dm": 0.5},
    {"lambda_dm": 0.0},
    {"kl_weight": 0.0},
    {"reduction": "sum"},
    {"dm_mode": "pointwise"},
    {"dm_latents": "global"},
    {"prior_cov": "global_sd"},
]


@pytest.mark.parametrize("classes", [(0, 1, 2), (0, 2)], ids=["all", "one-unknown"])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_both_losses_are_those_of_the_definition(options, classes):
    method = FedVTC(**options)
    client, stage, batch = losses_of(method, classes)
    main, vtc = client.main, client.models["vtc"]
    nets = {name: Net(module) for name, module in client.models.items()}
    scratch = copy.deepcopy(main), copy.deepcopy(vtc)
    z = scratch[0].features(batch.x)  # training mode, as in step 1
    expected = F.cross_entropy(scratch[0].head(z), batch.y) + expected_vtc_loss(
        method, client, z, batch, scratch[1], scratch[0].features, classes
    )
    torch.testing.assert_close(method.model_loss(nets, batch, stage.aux), expected)
    torch.testing.assert_close(method.joint_loss(nets, batch, stage.aux), expected)
    fixed = copy.deepcopy(main).eval()
    expected = expected_vtc_loss(
        method, client, fixed.features(batch.x), batch, copy.deepcopy(vtc), fixed.features, classes
    )
    torch.testing.assert_close(method.decoder_loss(nets, batch, stage.aux), expected)


def test_statistics_of_the_decoder_are_those_of_reconstructed_images_only():
    moved = []
    for latents in ("batch", "global"):
        method = FedVTC(dm_latents=latents)
        client, stage, batch = losses_of(method)
        method.decoder_loss({name: Net(module) for name, module in client.models.items()}, batch, stage.aux)
        moved.append({name: t.clone() for name, t in client.models["vtc"].named_buffers()})
    assert all(torch.equal(moved[0][name], moved[1][name]) for name in moved[0])


@pytest.mark.parametrize("term", ["kl_weight", "rec_weight", "lambda_dm"])
def test_every_term_reaches_the_extractor_and_what_it_should_of_the_decoder(term):
    method = FedVTC(**{**dict.fromkeys(("kl_weight", "rec_weight", "lambda_dm"), 0.0), term: 1.0})
    client, stage, batch = losses_of(method)
    nets = {name: Net(module) for name, module in client.models.items()}
    z = nets["main"].features(batch.x)
    z.retain_grad()
    method.vtc_loss(nets["main"].still(), nets["vtc"], z, batch, stage.aux).backward()
    assert z.grad.abs().sum() > 0
    assert client.models["vtc"].log_sigma.grad.abs().sum() > 0
    decoder = client.models["vtc"].decoder.layers[0].conv.weight.grad
    assert (decoder is None) == (term == "kl_weight")


def test_before_the_first_prototypes_only_sigma_feels_the_kl():
    method = FedVTC(rec_weight=0.0, lambda_dm=0.0, reduction="sum")
    client, stage, batch = losses_of(method, classes=())
    z = client.main.features(batch.x).detach().requires_grad_()
    method.vtc_loss(Net(client.main), Net(client.models["vtc"]), z, batch, stage.aux).backward()
    assert z.grad.abs().sum() == 0
    sigma = client.models["vtc"].sigma
    torch.testing.assert_close(client.models["vtc"].log_sigma.grad, sigma.pow(2) - 1)  # (σ − 1/σ)·dσ/ds


def test_matching_is_zero_for_an_extractor_that_gives_the_prototypes():
    class Oracle:
        def features(self, images):
            return aux["prototypes"][batch.y]

    for mode in ("class_mean", "pointwise"):
        method = FedVTC(kl_weight=0.0, rec_weight=0.0, dm_mode=mode)
        client, stage, batch = losses_of(method)
        aux = stage.aux
        z = client.main.features(batch.x)
        assert method.vtc_loss(Oracle(), Net(client.models["vtc"]), z, batch, aux).item() == 0.0


@pytest.mark.parametrize("loss", ["model_loss", "decoder_loss"])
def test_many_clients_at_once_give_the_gradients_of_each(loss):
    method, moving = FedVTC(dm_latents="global"), "main" if loss == "model_loss" else "vtc"
    held = [losses_of(method)[0] for _ in range(2)]
    _, stage, batch = losses_of(method)
    models = {name: [copy.deepcopy(client.models[name]).double() for client in held] for name in ("main", "vtc")}
    for module in (models["main"][1], models["vtc"][1]):
        for parameter in module.parameters():
            parameter.data.mul_(1.1)
    aux = {name: tensor.double() for name, tensor in stage.aux.items()}
    x = torch.stack([batch.x, batch.x * 0.9]).double()
    columns = {name: torch.stack([column, -column]).double() for name, column in batch.columns.items()}
    stacked = {name: stack_module_state(group) for name, group in models.items()}
    bases = {name: copy.deepcopy(group[0]) for name, group in models.items()}

    def value(params, rest, buffers, x, columns):
        nets = {
            name: FunctionalNet(bases[name], params if name == moving else rest[name], buffers[name]) for name in bases
        }
        return getattr(method, loss)(nets, Batch(x, batch.y, columns), aux)

    params = {name: {n: p.detach() for n, p in stacked[name][0].items()} for name in stacked}
    buffers = {name: {n: b.clone() for n, b in stacked[name][1].items()} for name in stacked}
    together = vmap(grad(value))(params[moving], params, buffers, x, columns)
    for k in range(2):
        nets = {name: Net(models[name][k]) for name in models}
        own = Batch(x[k], batch.y, {name: column[k] for name, column in columns.items()})
        parameters = dict(models[moving][k].named_parameters())
        alone = torch.autograd.grad(
            getattr(method, loss)(nets, own, aux), list(parameters.values()), materialize_grads=True
        )
        for name, gradient in zip(parameters, alone, strict=True):
            torch.testing.assert_close(together[name][k], gradient, rtol=1e-8, atol=1e-10)


# --- who moves ---


def step_once(method, which, classes=(0, 1, 2)):
    ctx = make_context()
    client = make_client(method, ctx)
    receive(client, greeting(classes))
    stage = next(method.stages(client, ctx))
    before = {name: snapshot(module) for name, module in client.models.items()}
    run_stage(replace(stage, updates=(stage.updates[which],), steps=1), client, ctx, "main/0")
    return client, before


def test_the_first_step_leaves_the_decoder_alone_and_the_second_the_model():
    client, before = step_once(FedVTC(), 0)
    assert same(before["vtc"], snapshot(client.models["vtc"]))
    assert {"head.weight", "projection.weight", "model.stem.conv.weight"} <= moved(
        before["main"], snapshot(client.main)
    )
    client, before = step_once(FedVTC(), 1)
    assert same(before["main"], snapshot(client.main))
    found = moved(before["vtc"], snapshot(client.models["vtc"]))
    assert {"log_sigma", "decoder.layers.0.conv.weight", "decoder.layers.3.norm.running_mean"} <= found


def test_decoded_images_do_not_enter_the_models_running_statistics():
    for options in ({}, {"lambda_dm": 0.0, "rec_weight": 0.0}):
        client, before = step_once(FedVTC(**options), 0)
        fresh = {n: t for n, t in snapshot(client.main).items() if "running" in n}
        plain = make_model()
        plain.load_state_dict(before["main"])
        ctx = make_context()
        order = torch.randperm(12, generator=ctx.rng("batches/main/0", client))[:6]
        plain.train().features(client.train.inputs(order))
        for name, tensor in fresh.items():
            torch.testing.assert_close(tensor, plain.state_dict()[name])


def test_joint_training_moves_both_and_alternating_by_epoch_takes_turns():
    ctx = make_context()
    for options, count in (({"joint_training": True}, 1), ({"alternate": "epoch"}, 4), ({}, 1)):
        method = FedVTC(**options)
        client = make_client(method, ctx)
        receive(client, greeting())
        before = {name: snapshot(module) for name, module in client.models.items()}
        stages = list(method.stages(client, ctx))
        assert len(stages) == count
        run_stage(stages[0], client, ctx, "main/0")
        assert moved(before["main"], snapshot(client.main))
        assert bool(moved(before["vtc"], snapshot(client.models["vtc"]))) == (options != {"alternate": "epoch"})


def test_alternating_by_epoch_follows_the_decay_of_the_learning_rate():
    ctx = make_context(training=Training(epochs=3, lr=0.1, decay=0.5))
    method = FedVTC(alternate="epoch", vtc_lr=0.4, vtc_optimizer="adam")
    client = make_client(method, ctx)
    receive(client, greeting())
    settings = [stage.updates[0].training for stage in method.stages(client, ctx)]
    assert [s.lr for s in settings] == pytest.approx([0.1, 0.4, 0.05, 0.2, 0.025, 0.1])
    assert [s.optimizer for s in settings] == ["sgd", "adam"] * 3
    assert {s.decay for s in settings} == {1.0}


@pytest.mark.parametrize("spec", ["cnn:4-8,bn", "resnet10:w4", "mlp:2x16"])
def test_each_alternating_step_needs_less_memory_than_the_joint_one(spec):
    ctx = make_context()
    method, joint = FedVTC(), FedVTC(joint_training=True)
    client = make_client(method, ctx, spec=spec)
    receive(client, greeting())
    stage, whole = next(method.stages(client, ctx)), next(joint.stages(client, ctx))
    batch = Batch(client.train.inputs(), client.train.labels(), {"noise": normal(12, P)})
    first, second = (update_memory(update, client.models, batch, stage.aux) for update in stage.updates)
    together = update_memory(whole.updates[0], client.models, batch, whole.aux)
    assert first["total"] < together["total"] and second["total"] < together["total"]
    assert first["gradients"] + second["gradients"] == together["gradients"]
    assert second["activations"] < together["activations"]  # the pass of real images leaves nothing behind
    assert first["parameters"] == second["parameters"] == together["parameters"]


@pytest.mark.parametrize(
    "classes, latents, gigabytes", [(10, 980, 0.70), (10, 4096, 2.90), (100, 4096, 26.49), (200, 4096, 52.71)]
)
def test_messages_of_the_rounds_have_the_size_of_the_papers_cost_table(classes, latents, gigabytes):
    """Its Table 2: 8000 messages each way; its figures include the decoders' single trip, at most 0.02 GB."""
    number = torch.uint8 if classes <= 256 else torch.int16
    message = Message(
        data={
            "prototypes": torch.zeros(classes, latents),
            "classes": torch.zeros(classes, dtype=number),
            "sigma": torch.zeros(latents),
        }
    )
    assert 0 <= gigabytes - 2 * 8000 * message.nbytes() / 1e9 < 0.03


# --- rounds ---


def client_reply(method, ctx, greetings=None, **about):
    client = make_client(method, ctx, **about)
    receive(client, greetings or greeting())
    reply, _ = drive(method, client, Step(), ctx)
    return client, reply


@pytest.mark.parametrize("labels", [[0, 2, 2, 0, 2, 2], [1, 0, 0, 0]], ids=["lacks-class-1", "one-sample-of-1"])
def test_prototypes_are_means_of_features_in_prediction_mode(labels):
    client, reply = client_reply(FedVTC(), make_context(), samples=len(labels), labels=labels)
    with torch.no_grad():
        z = client.main.eval().features(client.train.inputs())
    classes = sorted(set(labels))
    assert reply.data["classes"].tolist() == classes  # nothing at all of a class that it lacks
    for place, label in enumerate(classes):
        expected = z[torch.tensor(labels) == label].mean(0)
        torch.testing.assert_close(reply.data["prototypes"][place], expected)
    assert set(reply.data) == {"prototypes", "classes", "sigma"} and not reply.params and not reply.meta


def test_sigma_starts_from_the_global_one_unless_it_is_kept():
    for keep, expected in ((False, 0.7), (True, 0.1)):
        ctx = make_context(training=Training(lr=1e-9))
        _, reply = client_reply(FedVTC(keep_sigma=keep), ctx, greeting(sigma=0.7))
        torch.testing.assert_close(reply.data["sigma"], torch.full((P,), expected), rtol=1e-4, atol=1e-4)


def test_sigma_is_learned_and_stays_positive():
    _, reply = client_reply(FedVTC(reduction="sum"), make_context(training=Training(epochs=3, lr=0.1)))
    sigma = reply.data["sigma"]
    assert (sigma > 0).all() and sigma.std() > 0 and not torch.allclose(sigma, torch.full((P,), 0.1), rtol=0.01)


def server_of(method, ctx):
    server = Party(-1, None, PartyData())
    blueprint = type("Blueprint", (), {"feature_dim": P})()
    method.setup_server(server, {}, replace(ctx, blueprints={"any": blueprint}))
    return server


def told(classes, values, sigma=0.1, counts=None):
    data = {
        "prototypes": torch.tensor(values).unsqueeze(1).expand(len(classes), P).clone(),
        "classes": torch.tensor(classes, dtype=torch.uint8),
        "sigma": torch.full((P,), sigma),
    }
    return Message(data=data if counts is None else {**data, "counts": torch.tensor(counts, dtype=torch.int32)})


def test_aggregation_by_hand_with_missing_classes():
    method, ctx = FedVTC(), make_context()
    server = server_of(method, ctx)
    replies = {0: told([0, 1], [1.0, 2.0], sigma=0.2), 1: told([1, 2], [4.0, 5.0], sigma=0.4)}
    method.fuse(server, replies, Step(), ctx)
    found = server.memory["prototypes"]
    assert found["classes"].tolist() == [0, 1, 2]
    assert found["prototypes"][:, 0].tolist() == [1.0, 3.0, 5.0]
    torch.testing.assert_close(server.memory["sigma"], torch.full((P,), 0.3))
    assert "classes_without_prototype" not in ctx.records
    method.fuse(server, {1: told([1], [7.0])}, Step(), ctx)  # nobody holds classes 0 and 2 this time
    assert server.memory["prototypes"]["prototypes"][:, 0].tolist() == [1.0, 7.0, 5.0]


def test_weighting_by_samples():
    method, ctx = FedVTC(weighting="samples"), make_context()
    server = server_of(method, ctx)
    method.fuse(server, {0: told([1], [2.0], counts=[3]), 1: told([1], [6.0], counts=[1])}, Step(), ctx)
    assert server.memory["prototypes"]["prototypes"][0, 0].item() == pytest.approx(3.0)
    assert ctx.records["classes_without_prototype"] == [0, 2]
    _, reply = client_reply(method, ctx, samples=4, labels=[0, 0, 0, 2])
    assert reply.data["counts"].tolist() == [3, 1]


def test_decoders_start_alike_and_their_mean_is_that_of_weights_and_statistics():
    method, ctx = FedVTC(), make_context()
    clients = [make_client(method, ctx, number=k, spec=spec) for k, spec in enumerate(("cnn:4-8,bn", "mlp:1x16"))]
    first, second = (client.models["vtc"] for client in clients)
    assert same(snapshot(first), snapshot(second))
    server = server_of(method, ctx)
    state = {name: tensor.clone() for name, tensor in first.shared().items()}
    method.fuse(server, {k: Message(params={"vtc": state}) for k in range(2)}, DECODERS, ctx)
    assert same(server.memory["vtc"], state)  # the mean of equal decoders
    other = {name: tensor + 2.0 for name, tensor in state.items()}
    method.fuse(server, {0: Message(params={"vtc": state}), 1: Message(params={"vtc": other})}, DECODERS, ctx)
    assert {"decoder.layers.0.conv.weight", "decoder.layers.3.norm.running_var"} <= set(server.memory["vtc"])
    for name, tensor in server.memory["vtc"].items():
        torch.testing.assert_close(tensor, state[name] + 1.0)
    assert "log_sigma" not in state and all(tensor.is_floating_point() for tensor in state.values())


# --- what travels ---


def decoder_bytes():
    """Parameters of the decoder of the spec's table, and its BatchNorm statistics."""
    weights = sum(p.numel() for p in VTC(P, SHAPE).decoder.parameters())
    assert weights == (8 * 32 * 9 + 32) + 64 + (32 * 64 * 16 + 64) + 128 + (64 * 64 * 9 + 64) + 128 + (64 * 16 + 1) + 2
    return 4 * (weights + 2 * (32 + 64 + 64 + 1))


def test_bytes_of_a_run_are_those_of_the_formula():
    clients, up_classes = small_clients(parts=((8, 2), (9, 3), (10, 3))), 2 + 3 + 3
    result = run(FedVTC(samples_per_class=2), clients)
    one, two, after = result.history
    row = 4 * P + 1  # a prototype and its class number
    assert one["bytes_down"] == 3 * 4 * P  # sigma alone: there are no prototypes yet
    assert two["bytes_down"] == 3 * (CLASSES * row + 4 * P)
    assert one["bytes_up"] == two["bytes_up"] == up_classes * row + 3 * 4 * P
    assert after["bytes_up"] == 3 * decoder_bytes()
    assert after["bytes_down"] == 3 * (decoder_bytes() + CLASSES * row + 4 * P)
    assert result.cost.kinds["decoders/up/params/vtc"] == 3 * decoder_bytes()  # exactly once a client
    assert not any(key.startswith("main") and "vtc" in key for key in result.cost.kinds)


def test_bytes_with_an_upload_every_round():
    result = run(FedVTC(vtc_upload="round", samples_per_class=2))
    kinds = result.cost.kinds
    assert kinds["main/up/params/vtc"] == 2 * 3 * decoder_bytes()
    assert kinds["main/down/params/vtc"] == 1 * 3 * decoder_bytes()  # the first round starts from the common seed
    assert kinds["tune/down/params/vtc"] == 3 * decoder_bytes()
    assert "decoders/up/params/vtc" not in kinds
    assert set(result.history[-1]["stages"]) == {"before_finetuning", "after_finetuning"}


def test_a_mean_decoder_comes_down_with_the_next_round():
    method, ctx = FedVTC(vtc_upload="round"), make_context()
    server = server_of(method, ctx)
    info = ClientInfo(0, 12, "any")
    assert not method.send(server, info, Step(), ctx).params
    client, reply = client_reply(method, ctx)
    method.fuse(server, {0: reply}, Step(), ctx)
    assert same(method.send(server, info, Step(), ctx).params["vtc"], client.models["vtc"].shared())
    assert not list(method.send(server, info, EVALUATE, ctx).tensors())


# --- fine-tuning ---


def test_the_synthetic_set_is_balanced_labelled_and_repeatable():
    vtc = VTC(P, SHAPE)
    vtc(normal(20, P))  # running statistics that differ from those of the latents below
    packed = {"prototypes": normal(2, P, seed=1), "classes": torch.tensor([0, 2], dtype=torch.uint8)}
    sigma = torch.full((P,), 0.2)
    images, labels = synthetic_set(vtc, packed, sigma, 7, rng(3))
    assert labels.tolist() == [0] * 7 + [2] * 7 and images.shape == (14, *SHAPE)
    assert images.min() >= 0 and images.max() <= 1
    assert torch.equal(images, synthetic_set(vtc, packed, sigma, 7, rng(3))[0])
    assert not torch.equal(images, synthetic_set(vtc, packed, sigma, 7, rng(4))[0])
    noise = torch.randn(7, P, generator=rng(3))
    with torch.no_grad():
        assert torch.allclose(images[:7], vtc.eval()(packed["prototypes"][0] + 0.2 * noise), atol=1e-6)
    still, _ = synthetic_set(vtc.train(), packed, torch.zeros(P), 2, rng())
    assert torch.equal(still[0], still[1]) and not torch.allclose(still[0], still[2])


def test_recalibrated_statistics_are_those_of_latents_of_all_classes():
    vtc, sigma = VTC(P, SHAPE), torch.full((P,), 0.2)
    vtc(5 * normal(20, P))
    packed = {"prototypes": 3 * normal(2, P, seed=1), "classes": torch.tensor([0, 2], dtype=torch.uint8)}
    before = snapshot(vtc)
    fresh = recalibrated(vtc, packed, sigma, rng(3))
    assert same(before, snapshot(vtc))
    assert {name for name in moved(before, snapshot(fresh)) if "running" not in name and "tracked" not in name} == set()
    noise = torch.randn(256, P, generator=(stream := rng(3))), torch.randn(256, P, generator=stream)
    first = fresh.decoder.layers[0]
    with torch.no_grad():
        latents = torch.cat([c + 0.2 * e for c, e in zip(packed["prototypes"], noise, strict=True)])
        maps = first.conv(latents.unflatten(1, fresh.decoder.start))
        torch.testing.assert_close(first.norm.running_mean, maps.mean((0, 2, 3)), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(first.norm.running_var, maps.var((0, 2, 3)), rtol=1e-4, atol=1e-4)
        # So the prediction mode gives what the batch statistics of these latents give, in every layer.
        torch.testing.assert_close(fresh.eval()(latents), vtc.train()(latents), rtol=1e-2, atol=1e-2)


def test_images_come_from_the_recalibrated_decoder_where_asked_for():
    ctx = make_context()
    made = {}
    for norm in ("averaged", "recalibrated"):
        method = FedVTC(samples_per_class=4, norm_statistics=norm)
        client = make_client(method, ctx)
        receive(client, greeting())
        vtc, data = client.models["vtc"], client.inbox.data
        made[norm] = method.tuning(client, ctx).data.x
        if norm == "recalibrated":
            vtc = recalibrated(vtc, data, data["sigma"], ctx.rng("statistics", client))
        assert torch.equal(made[norm], synthetic_set(vtc, data, data["sigma"], 4, ctx.rng("synthetic", client))[0])
    assert not torch.allclose(made["averaged"], made["recalibrated"], atol=0.01)
    shown = {norm: class_samples(run(FedVTC(samples_per_class=4, norm_statistics=norm)), 3) for norm in made}
    assert not torch.allclose(shown["averaged"][0], shown["recalibrated"][0], atol=0.01)


def tuned(method, ctx, classes=(0, 1, 2), spec="cnn:4-8,bn", model=None):
    client = make_client(method, ctx, spec=spec)
    client.models["main"] = model or client.main
    receive(client, greeting(classes))
    before = snapshot(client.main)
    vtc = snapshot(client.models["vtc"])
    reply, _ = drive(method, client, TUNE, ctx)
    assert not list(reply.tensors()) and same(vtc, snapshot(client.models["vtc"]))
    return moved(before, snapshot(client.main)), before


def test_fine_tuning_moves_everything_or_only_the_head():
    ctx = make_context()
    found, before = tuned(FedVTC(samples_per_class=4), ctx)
    assert found == set(before)
    found, _ = tuned(FedVTC(samples_per_class=4, finetune_scope="head"), ctx)
    assert found == {"head.weight", "head.bias"}
    own = pf.adapt(nn.Sequential(nn.Flatten(), nn.Linear(64, P), nn.ReLU(), nn.Linear(P, 3)), head="3")
    found, _ = tuned(FedVTC(samples_per_class=4, finetune_scope="head"), ctx, model=own)
    assert found == {"model.3.weight", "model.3.bias"}


def test_every_client_draws_images_of_its_own():
    method, ctx = FedVTC(samples_per_class=4), make_context()
    clients = [make_client(method, ctx, number=number) for number in (0, 1)]
    for client in clients:
        receive(client, greeting())
    one, other = (method.tuning(client, ctx).data.x for client in clients)
    assert torch.equal(one, method.tuning(clients[0], ctx).data.x) and not torch.allclose(one, other)


def test_length_and_size_of_fine_tuning():
    client_classes = (0, 2)
    for options, rounds, epochs, count in (
        ({}, 60, 6, 500),  # R = 60/20 rounds of two epochs
        ({}, 3, 2, 500),
        ({"finetune_epochs": 7, "samples_per_class": 4, "finetune_lr": 0.5}, 60, 7, 4),
    ):
        ctx = make_context(rounds=rounds)
        method = FedVTC(**options)
        client = make_client(method, ctx)
        receive(client, greeting(client_classes))
        stage = method.tuning(client, ctx)
        assert stage.epochs == epochs
        assert stage.data.label_counts(CLASSES) == (count, 0, count)
        assert stage.training.lr == options.get("finetune_lr", ctx.training.lr)
        inputs = stage.data.inputs()  # scaled as the client's own images are, without its division by 255
        torch.testing.assert_close(inputs * 0.5 + 0.3, stage.data.x)
    many = make_context(num_classes=11)
    method = FedVTC()
    client = make_client(method, many)
    receive(client, greeting((0,)))
    assert len(method.tuning(client, many).data) == 1000


def test_accuracy_is_recorded_before_and_after():
    result = run()
    line = result.history[-1]
    assert line["phase"] == "after"
    assert line["stages"]["before_finetuning"]["mean"] == result.history[-2]["accuracy"]["mean"]
    assert line["stages"]["after_finetuning"]["mean"] == line["accuracy"]["mean"]


def test_without_fine_tuning_no_decoder_travels():
    result = run(FedVTC(finetune=False))
    assert [line["phase"] for line in result.history] == ["round", "round"]
    assert not any("vtc" in key for key in result.cost.kinds)


# --- limit cases and edges ---


def test_defaults_are_those_of_the_specification():
    method = FedVTC()
    assert (method.lambda_dm, method.kl_weight, method.rec_weight, method.sigma_init) == (1.0, 1.0, 1.0, 0.1)
    assert (method.reduction, method.dm_mode, method.dm_latents) == ("mean", "class_mean", "batch")
    assert (method.prior_cov, method.alternate, method.joint_training) == ("identity", "batch", False)
    assert (method.weighting, method.vtc_upload, method.average_over) == ("uniform", "final", "trained")
    assert (method.keep_sigma, method.norm_statistics, method.finetune_scope) == (False, "averaged", "all")
    assert (method.vtc_lr, method.vtc_optimizer, method.finetune_lr) == (None, None, None)  # the run's own
    decoder = VTC(P, SHAPE).decoder
    assert {layer.activation.negative_slope for layer in decoder.layers[:3]} == {0.01}


def test_at_the_papers_size_means_train_with_its_learning_rate_and_sums_do_not():
    """4096 latents, CIFAR's images, SGD with 0.01 and batches of 16: nine steps, the prototypes act from the fourth."""
    generator = np.random.default_rng(0)
    y = np.arange(48) % CLASSES
    x = generator.integers(40, 200, (CLASSES, 3, 32, 32))[y] + generator.integers(-30, 30, (48, 3, 32, 32))
    clients = Clients.from_parts([(x.astype(np.uint8), y)], test=(x.astype(np.uint8), y), num_classes=CLASSES)
    options = {"models": ["resnet10:w4"], "rounds": 3, "feature_dim": 4096}
    training = Training(epochs=1, batch_size=16, lr=0.01)
    means = run(FedVTC(finetune=False), clients, training=training, **options)
    losses = [line["loss"] for line in means.history]
    assert losses[2] < losses[1] < losses[0] < 5
    try:
        sums = run(FedVTC(finetune=False, reduction="sum"), clients, training=training, **options)
    except TrainingError:
        return
    assert sums.history[-1]["loss"] > 1000


def test_switched_off_it_is_local_training():
    off = FedVTC(rec_weight=0.0, kl_weight=0.0, lambda_dm=0.0, finetune=False)
    models = ("cnn:4-8,bn", "resnet10:w4")
    mine, base = run(off, models=models), run(pf.Local(), models=models)
    for client in base.models:
        assert same(base.models[client].state_dict(), mine.models[client].state_dict())


def test_without_matching_the_extractor_never_sees_decoded_images(monkeypatch):
    seen = []
    features = type(make_model()).features

    def count(self, x):
        seen.append(len(x))
        return features(self, x)

    ctx = make_context(training=Training(batch_size=12))
    monkeypatch.setattr(type(make_model()), "features", count)
    for weight, passes in ((0.0, 2), (1.0, 4)):
        method = FedVTC(lambda_dm=weight)
        client = make_client(method, ctx)
        receive(client, greeting())
        seen.clear()
        run_stage(next(method.stages(client, ctx)), client, ctx, "main/0")
        assert seen.count(12) == passes


def test_clients_that_never_took_part_send_no_decoder_but_fine_tune():
    clients = small_clients(parts=((10, 3), (12, 3), (14, 3), (16, 3)))
    method = FedVTC(samples_per_class=4)
    result = run(method, clients, rounds=1, participation=0.25)
    assert len(result.history[0]["participants"]) == 1
    assert result.cost.kinds["decoders/up/params/vtc"] == decoder_bytes()
    everybody = run(replace(method, average_over="all"), clients, rounds=1, participation=0.25)
    assert everybody.cost.kinds["decoders/up/params/vtc"] == 4 * decoder_bytes()
    trained, diluted = (r.server.memory["vtc"]["decoder.layers.0.conv.weight"] for r in (result, everybody))
    start = pf.run(replace(method, finetune=False), clients, ["mlp:1x16"], rounds=1, feature_dim=P)
    assert not torch.allclose(trained, diluted) and "vtc" not in start.server.memory
    absent = next(c for c in range(4) if c not in result.history[0]["participants"])
    before, after = (stage["per_client"] for stage in result.history[-1]["stages"].values())
    untouched = run(replace(method, finetune=False), clients, rounds=1, participation=0.25)
    assert moved(untouched.models[absent].state_dict(), result.models[absent].state_dict())
    assert len(before) == len(after) == 4


def test_a_class_that_nobody_holds_is_logged_and_never_decoded():
    result = run(clients=small_clients(parts=((8, 2), (10, 2))))
    assert result.history[0]["classes_without_prototype"] == [2]
    assert sorted(class_samples(result, 3)) == [0, 1]
    with pytest.raises(InputError, match="class 2 has no prototype"):
        class_samples(result, 3, classes=[2])


def test_a_client_with_one_sample_and_a_last_batch_of_one_train():
    result = run(clients=small_clients(parts=((1, 1), (7, 2), (13, 3))), models=("cnn:4-8,bn",))
    assert all(np.isfinite(line["loss"]) for line in result.history)
    ctx = make_context()
    method = FedVTC()
    client, reply = client_reply(method, ctx, samples=1, labels=[1])
    assert reply.data["classes"].tolist() == [1]
    fresh = make_client(method, ctx, samples=1, labels=[1])
    assert moved(snapshot(fresh.main), snapshot(client.main)) and moved(
        snapshot(fresh.models["vtc"]), snapshot(client.models["vtc"])
    )


def test_a_module_of_ones_own():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
            self.classifier = nn.Linear(4 * 36, CLASSES)

        def forward(self, x):
            return self.classifier(self.body(x))

    def own_net(input_shape):
        return pf.adapt(Own(), head="classifier", input_shape=input_shape)

    result = run(models=(own_net, "cnn:4-8"), participation=0.7)
    assert len(result.accuracy()["per_client"]) == 3


def test_sizes_and_data_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"2x2 pixels .* have 30 numbers: set feature_dim \(--feature-dim\) to 28 or 32"
    ):
        run(feature_dim=30, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match=r"set feature_dim \(--feature-dim\) to 4"):
        run(feature_dim=3)
    with pytest.raises(InputError, match=r"set feature_dim \(--feature-dim N\) to give all models"):
        run(feature_dim=None, models=("cnn:4-8", "mlp:1x16"))
    with pytest.raises(InputError, match="image inputs"):
        table = (np.zeros((6, 4), dtype=np.float32), np.arange(6) % 3)
        run(clients=Clients.from_parts([table, table], test=table), models=("mlp:1x16",))


@pytest.mark.parametrize(
    "options",
    [
        {"lambda_dm": -1.0},
        {"sigma_init": 0.0},
        {"dm_mode": "mean"},
        {"vtc_optimizer": "sdg"},
        {"samples_per_class": 0},
        {"joint_training": True, "vtc_lr": 0.1},
        {"joint_training": True, "alternate": "epoch"},
        {"vtc_upload": "round", "average_over": "all"},
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(options):
    with pytest.raises(InputError, match=list(options)[-1]):
        FedVTC(**options).check()


# --- pictures ---


@pytest.mark.parametrize("upload", ["final", "round"])
def test_a_grid_of_synthetic_images(upload, tmp_path):
    result = run(FedVTC(samples_per_class=2, vtc_upload=upload), out=tmp_path / "run")
    path = sample_grid(tmp_path / "pictures" / "grid.png", result, count=5, zoom=2)
    with Image.open(path) as image:
        assert image.size == (2 * 5 * 10, 2 * CLASSES * 10) and image.mode == "L" and image.format == "PNG"
        corner = np.asarray(image)[2, 2]
    images = class_samples(result, 5)
    assert corner == int((images[0][0, 0, 0, 0] * 255).round())
    again = class_samples(tmp_path / "run", 5)  # from the files of the run
    assert images.keys() == again.keys() and all(torch.equal(images[label], again[label]) for label in images)
    assert torch.equal(class_samples(result.server, 5, classes=[1])[1], images[1])
    assert not torch.equal(class_samples(result, 5, seed=1)[0], images[0])


def test_a_grid_in_colour_of_a_client_at_work(tmp_path):
    vtc = VTC(P, (3, 8, 8))
    client = Party(0, None, PartyData())
    client.models["vtc"] = vtc
    client.inbox = greeting((0, 2))
    path = sample_grid(tmp_path / "grid.png", client, count=2, zoom=1)
    with Image.open(path) as image:
        assert image.mode == "RGB" and image.size == (20, 20)
        found = torch.tensor(np.asarray(image))[11:19, 1:9]  # second row, first column
    expected = (class_samples(client, 2)[2][0] * 255).round().to(torch.uint8)
    assert torch.equal(found.permute(2, 0, 1), expected)


def test_without_a_mean_decoder_there_is_nothing_to_show():
    with pytest.raises(InputError, match="no mean decoder"):
        class_samples(run(FedVTC(finetune=False), rounds=1))
    method, ctx = FedVTC(), make_context()
    client = make_client(method, ctx)
    receive(client, greeting(()))
    with pytest.raises(InputError, match="no class has a prototype"):
        method.tuning(client, ctx)
