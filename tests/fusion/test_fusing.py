"""`fuse` for people with trained networks: results by hand, files, export, distillation, and clear refusals."""

import copy
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import polyfed as pf
from polyfed.core.errors import InputError
from polyfed.core.nets import Net
from polyfed.core.rng import generator
from polyfed.core.stage import Batch
from polyfed.fusion import METHODS, Matching, fuse, fuse_blockdiag, fuse_files, load_fused
from polyfed.fusion.chain import layers_of, shuffled, write_chain
from polyfed.fusion.distill import Distillation, distillation_loss, make_student
from polyfed.fusion.impressions import impressions_of
from polyfed.models import build

SHAPE, CLASSES = (1, 8, 8), 4
MIXED = ("mlp:1x8", "cnn:3-5,bn", "mlp:3x6")


def networks(*specs, seed=0, scale=4.0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = [build(spec, SHAPE, CLASSES).eval() for spec in specs]
        for module in made:  # untrained heads hardly differ in confidence
            module.head.weight.data *= scale
        return made


@pytest.fixture
def x():
    return torch.randn((25, *SHAPE), generator=torch.Generator().manual_seed(3))


def test_every_method_gives_a_module_that_takes_the_same_inputs(x):
    for method in METHODS:
        fused = pf.fuse(networks("mlp:2x8", "mlp:2x8", seed=1), method)
        assert isinstance(fused, nn.Module) and not fused.training
        assert fused(x).shape == (25, CLASSES)
        assert fused(x[:1]).shape == (1, CLASSES)


def test_ams_and_ensemble_by_hand_on_mixed_architectures(x):
    models = networks(*MIXED)
    with torch.no_grad():
        z = torch.stack([model(x) for model in models])
        rows = torch.arange(25)
        assert torch.equal(fuse(models)(x), z[z.amax(2).argmax(0), rows])
        assert torch.allclose(fuse(models, "ams-full")(x), z.sum(0), atol=1e-6)
        least = z.amax(2).argmin(0)
        assert torch.allclose(fuse(models, "ams-topk", k=2)(x), z.sum(0) - z[least, rows], atol=1e-5)
        assert torch.allclose(fuse(models, "ensemble")(x).exp(), z.softmax(2).mean(0), atol=1e-6)
        assert torch.allclose(fuse(models, "ensemble")(x).exp().sum(1), torch.ones(25), atol=1e-5)
        assert torch.allclose(fuse(models, "ensemble", space="logit")(x), z.mean(0), atol=1e-6)
    assert len(set(z.amax(2).argmax(0).tolist())) == 3


def test_the_given_networks_are_copied_and_used_in_prediction_mode(x):
    models = networks(*MIXED)
    models[1].train()
    state = copy.deepcopy(models[1].state_dict())
    fused = fuse(models)
    before = fused(x)
    assert models[1].training
    assert all(torch.equal(state[name], tensor) for name, tensor in models[1].state_dict().items())
    for parameter in models[0].parameters():
        parameter.data.zero_()
    assert torch.equal(fused(x), before)


def test_average_by_hand_and_of_identical_and_permuted_networks(x):
    one, two = networks("cnn:3-5,bn", "cnn:3-5,bn")
    two.stem.norm.num_batches_tracked += 5
    mean = fuse([one, two], "average", weights=[3, 1])
    for name, tensor in mean.state_dict().items():
        a, b = one.state_dict()[name], two.state_dict()[name]
        if tensor.is_floating_point():
            assert torch.allclose(tensor, 0.75 * a + 0.25 * b, atol=1e-6)
        else:
            assert tensor == (5 if name.startswith("stem") else 0)
    by_counts = fuse([one, two], "average", counts=[[3, 0, 0, 0], [0, 1, 0, 0]])
    assert torch.equal(by_counts(x), mean(x))
    (net,) = networks("mlp:2x8")
    assert torch.allclose(fuse([net, net], "average")(x), net(x), atol=1e-6)
    moved = write_chain(net, shuffled(layers_of(net), torch.Generator().manual_seed(0)))
    assert torch.allclose(moved(x), net(x), atol=1e-5)
    assert not torch.allclose(fuse([net, moved], "average")(x), net(x), atol=1e-2)


def test_pfnm_recovers_permuted_networks_where_the_average_does_not(x):
    (net,) = networks("mlp:2x8")
    moved = [write_chain(net, shuffled(layers_of(net), torch.Generator().manual_seed(j))) for j in range(3)]
    fused = fuse(moved, "pfnm", matching=Matching(sigma0_2=1e8))
    assert torch.allclose(fused(x), net(x), atol=1e-4)
    assert fused.stem.linear.out_features == 8


def test_pfnm_weighs_networks_class_by_class_where_counts_are_given():
    (net,) = networks("mlp:1x8")
    other = copy.deepcopy(net)
    other.head.weight.data += 1.0
    counts = [[9, 9, 0, 0], [0, 0, 9, 9]]
    matching = Matching(gamma=1e-9)  # new units are too dear: all are matched
    head = fuse([net, other], "pfnm", counts=counts, matching=matching).head.weight
    shrunk = 10 / 11  # one network's say against the prior: 1 / (1 + 1/10)
    torch.testing.assert_close(head[:2], shrunk * net.head.weight[:2], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(head[2:], shrunk * other.head.weight[2:], atol=1e-4, rtol=1e-4)
    even = fuse([net, other], "pfnm", matching=matching).head.weight
    torch.testing.assert_close(even, 20 / 21 * (net.head.weight + 0.5), atol=1e-4, rtol=1e-4)


def test_pfnm_searches_on_the_data_it_is_given(x):
    models = networks("mlp:1x8", "mlp:1x6", seed=5)
    labels = fuse(models, "pfnm", matching=Matching(0.1, 1.0, 50.0), counts=[[5, 5, 0, 0], [0, 0, 5, 5]])(x).argmax(1)
    found = fuse(models, "pfnm", search=(x, labels), counts=[[5, 5, 0, 0], [0, 0, 5, 5]])
    assert torch.equal(found(x).argmax(1), labels)
    default = fuse(models, "pfnm", counts=[[5, 5, 0, 0], [0, 0, 5, 5]])
    assert not torch.equal(default(x).argmax(1), labels)


def test_pfnm_and_average_are_not_applicable_to_mixed_depths():
    with pytest.raises(InputError, match="'average' is not applicable: networks 0 and 1 have different architectures"):
        fuse(networks("mlp:1x8", "mlp:2x8"), "average")
    with pytest.raises(InputError, match="'pfnm' is not applicable: network 0 has 2 layers and network 1 has 3"):
        fuse(networks("mlp:1x8", "mlp:2x8"), "pfnm")
    with pytest.raises(InputError, match=r"not applicable to ConvNet: its layer 'stem.norm' is a BatchNorm2d"):
        fuse(networks("cnn:3-5,bn", "cnn:3-5,bn"), "pfnm", input_shape=SHAPE)


def test_pfnm_is_not_applicable_to_networks_that_differ_in_more_than_width():
    def perceptron(activation, first=True, last=True):
        return nn.Sequential(nn.Linear(6, 5, bias=first), activation, nn.Linear(5, 4, bias=last))

    relu = perceptron(nn.ReLU())
    for other in (perceptron(nn.Tanh()), perceptron(nn.ReLU(), last=False), perceptron(nn.ReLU(), first=False)):
        for pair in ([relu, other], [other, relu]):
            with pytest.raises(InputError, match="network 0 and network 1 differ in more than their widths"):
                fuse(pair, "pfnm")
    assert fuse([relu, perceptron(nn.ReLU())], "pfnm")(torch.rand(3, 6)).shape == (3, 4)


# --- the block-diagonal form ---


@pytest.mark.parametrize("depth", [1, 3])
def test_the_block_network_runs_all_networks_apart(x, depth):
    models = networks(f"mlp:{depth}x8", f"mlp:{depth}x5", f"mlp:{depth}x8")
    block = fuse_blockdiag(models, k=None)
    with torch.no_grad():
        z = torch.stack([model(x) for model in models])
        assert torch.allclose(block.logits(x), z, atol=1e-5)
        assert torch.allclose(block(x), fuse(models, "ams-full")(x), atol=1e-5)
        assert torch.allclose(fuse_blockdiag(models)(x), fuse(models)(x), atol=1e-5)
    if depth == 3:
        hidden = block.layers[1].weight
        assert hidden.shape == (21, 21) and torch.count_nonzero(hidden[:8, 8:]) == 0


def test_the_block_network_of_two_neurons_is_the_concatenated_network():
    leaky = nn.functional.leaky_relu
    nets = [nn.Sequential(nn.Linear(2, 1), nn.LeakyReLU(), nn.Linear(1, 2, bias=False)) for _ in range(2)]
    points = torch.randn((30, 2), generator=torch.Generator().manual_seed(0))
    joined = fuse_blockdiag(nets, k=None, activation=leaky)
    first = torch.cat([net[0].weight for net in nets]), torch.cat([net[0].bias for net in nets])
    second = torch.cat([net[2].weight for net in nets], dim=1)
    concatenated = leaky(points @ first[0].T + first[1]) @ second.T
    assert torch.allclose(joined(points), concatenated, atol=1e-6)
    with pytest.raises(InputError, match="something else between their layers"):
        fuse_blockdiag(nets, activation=torch.tanh)


def test_the_block_form_is_refused_where_it_does_not_exist():
    for models in (networks("mlp:1x8", "mlp:2x8"), networks("cnn:3-5", "cnn:3-5")):
        with pytest.raises(InputError, match="not applicable"):
            fuse_blockdiag(models)
    normed = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))
    with pytest.raises(InputError, match=r"block-diagonal form is not applicable.*BatchNorm1d"):
        fuse_blockdiag([normed, normed])


# --- saved, reloaded, exported ---

VARIANTS = {
    "ams-top1": {},
    "ams-topk": {"k": 2, "mask_absent": True, "counts": [[1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 0, 1]]},
    "ams-full": {"normalize": "temperature", "temperatures": [0.5, 1.0, 2.0]},
    "ensemble": {"weights": "class", "counts": [[1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 0, 1]]},
}


@pytest.mark.parametrize("method", VARIANTS)
def test_a_state_dict_can_be_loaded_into_the_same_fusion_of_other_networks(x, method, tmp_path):
    fused = fuse(networks(*MIXED), method, **VARIANTS[method])
    save_file({n: t.contiguous() for n, t in fused.state_dict().items()}, tmp_path / "fused.safetensors")
    again = fuse(networks(*MIXED, seed=9), method, **VARIANTS[method])
    assert not torch.equal(again(x), fused(x))
    again.load_state_dict(load_file(tmp_path / "fused.safetensors"))
    assert torch.equal(again(x), fused(x))


@pytest.mark.parametrize("method", ["ams-topk", "ensemble"])
def test_it_can_be_exported_for_any_batch_size(x, method):
    fused = fuse(networks(*MIXED), method, **VARIANTS[method])
    program = torch.export.export(fused, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    with torch.no_grad():
        for rows in (25, 7):
            assert torch.allclose(program.module()(x[:rows]), fused(x[:rows]), atol=1e-5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own: TorchScript is going away
            traced = torch.jit.trace(fused, x)
        assert torch.allclose(traced(x[:9]), fused(x[:9]), atol=1e-5)


@pytest.mark.parametrize("confidence", ["first_norm", "first_max"])
def test_choice_by_the_first_layer_runs_one_network_further_and_exports(x, confidence):
    models = networks("mlp:1x8", "mlp:3x8", "mlp:2x8")
    fused = fuse(models, confidence=confidence)
    with torch.no_grad():
        stems = [model.stem(x).flatten(1) for model in models]
        strength = torch.stack([s.norm(dim=1) if confidence == "first_norm" else s.amax(1) for s in stems])
        winner = strength.argmax(0)
        assert len(set(winner.tolist())) > 1
        z = torch.stack([model(x) for model in models])
        assert torch.allclose(fused(x), z[winner, torch.arange(25)], atol=1e-5)
        seen = []
        for network in fused.networks:
            network.head.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
        fused(x)
        assert sum(seen) == 25
        masked = {"mask_absent": True, "counts": [[1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 0, 1]]}
        for options in ({}, masked):
            whole = fuse(models, confidence=confidence, **options)
            program = torch.export.export(whole, (x,))
            assert torch.allclose(program.module()(x), whole(x), atol=1e-5)
        known = torch.tensor(masked["counts"]) > 0
        assert torch.equal(whole(x) > -1e8, known[winner])  # the winner abstains from classes it does not know


@pytest.mark.parametrize(
    ("method", "specs", "options"),
    [
        ("ams-top1", MIXED, {}),
        ("ams-topk", MIXED, VARIANTS["ams-topk"]),
        ("ams-full", MIXED, VARIANTS["ams-full"]),
        ("ams-top1", MIXED, {"select": "greedy", "counts": [[1, 0, 0, 0], [0, 1, 1, 1], [1, 0, 0, 0]]}),
        ("ensemble", MIXED, VARIANTS["ensemble"]),
        ("average", ["cnn:3-5,bn"], {"weights": [1, 2, 3]}),
        ("pfnm", ["mlp:2x8", "mlp:2x5"], {"matching": Matching(gamma=50.0)}),
        ("ams-top1", MIXED, {"distill_into": "mlp:1x5", "public": torch.rand(12, *SHAPE),
                             "distillation": Distillation(epochs=1)}),
    ],
)  # fmt: skip
def test_files_are_fused_written_and_read_again(tmp_path, x, method, specs, options):
    models = networks(*[specs[n % len(specs)] for n in range(3)])
    paths = [tmp_path / f"client-{n}.safetensors" for n in range(3)]
    for path, model in zip(paths, models, strict=True):
        save_file({n: t.contiguous() for n, t in model.state_dict().items()}, path)
    out = tmp_path / "fused.v1"
    written = fuse_files(paths, specs, method, input_shape=SHAPE, num_classes=CLASSES, out=out, **options)
    with torch.no_grad():
        expected = fuse(models, method, input_shape=SHAPE, **options)(x)
        assert torch.equal(written(x), expected)
        for name in ("fused.v1", "fused.v1.json", "fused.v1.safetensors"):
            assert torch.equal(load_fused(tmp_path / name)(x), expected)
    about = json.loads((tmp_path / "fused.v1.json").read_text())
    assert about["method"] == method and about["sources"] == [path.name for path in paths]


def test_files_that_do_not_fit_are_named(tmp_path):
    (model,) = networks("mlp:1x8")
    save_file(dict(model.state_dict()), tmp_path / "a.safetensors")
    common = {"input_shape": SHAPE, "num_classes": CLASSES, "out": tmp_path / "fused"}
    with pytest.raises(InputError, match=r"a.safetensors, read as mlp:2x8, does not fit: it has no tensor"):
        fuse_files([tmp_path / "a.safetensors"], "mlp:2x8", **common)
    with pytest.raises(InputError, match=r"Cannot read .*b.safetensors"):
        fuse_files([tmp_path / "b.safetensors"], "mlp:1x8", **common)
    (tmp_path / "c.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"Cannot read .*c.safetensors"):
        fuse_files([tmp_path / "c.safetensors"], "mlp:1x8", **common)
    assert not (tmp_path / "fused.json").exists()


# --- fewer networks, or one small one ---


def test_greedy_and_clustered_choices(x):
    models = networks("mlp:1x8", "mlp:1x8", "mlp:2x8")
    counts = [[5, 5, 0, 0], [1, 0, 0, 0], [0, 0, 1, 1]]
    chosen = fuse(models, select="greedy", counts=counts)
    assert chosen.places == [0, 2]
    assert torch.equal(chosen(x), fuse([models[0], models[2]])(x))
    twins = [models[0], copy.deepcopy(models[0]), models[2]]
    assert fuse(twins, select="cluster", keep=2, public=x, weights=[1, 2, 1]).places == [1, 2]


def test_tables_of_the_chosen_networks_are_chosen_with_them(x):
    models = networks("mlp:1x8", "mlp:1x8", "mlp:1x8")
    counts = [[1, 0, 0, 0], [5, 5, 0, 0], [0, 0, 1, 3]]  # the last two cover all labels
    chosen, given = models[1:], counts[1:]
    pick = {"select": "greedy", "counts": counts}
    for method, all_options, own in (
        ("ams-top1", {"normalize": "temperature", "temperatures": [9.0, 0.3, 2.0]},
         {"normalize": "temperature", "temperatures": [0.3, 2.0]}),
        ("ams-top1", {"mask_absent": True}, {"mask_absent": True, "counts": given}),
        ("ensemble", {"weights": "class"}, {"weights": "class", "counts": given}),
        ("average", {"weights": [1.0, 2.0, 5.0]}, {"weights": [2.0, 5.0]}),
        ("average", {}, {"counts": given}),
    ):  # fmt: skip
        assert torch.equal(fuse(models, method, **pick, **all_options)(x), fuse(chosen, method, **own)(x)), method


def test_sizes_of_clustered_networks_may_be_shares_and_leave_the_fusion_alone(x):
    one, other = networks("mlp:1x8", "mlp:2x8")
    twins = [one, copy.deepcopy(one), other]
    pick = {"select": "cluster", "keep": 2, "public": x}
    assert fuse(twins, **pick, weights=[0.2, 0.5, 0.3]).places == [1, 2]
    shares = fuse(twins, "ensemble", **pick, weights=[0.2, 0.5, 0.3])
    assert shares.places == [1, 2] and torch.equal(shares(x), fuse(twins[1:], "ensemble")(x))
    counts = [[1, 1, 0, 0], [2, 1, 0, 0], [0, 0, 1, 3]]
    by_class = fuse(twins, "ensemble", **pick, weights="class", counts=counts)
    assert by_class.places == [1, 2]
    assert torch.equal(by_class(x), fuse(twins[1:], "ensemble", weights="class", counts=counts[1:])(x))


def test_distillation_with_unlabelled_data_agrees_with_its_teacher(x):
    models = networks(*MIXED)
    public = torch.randn((400, *SHAPE), generator=torch.Generator().manual_seed(8))
    options = {"distill_into": "mlp:1x60", "public": public, "distillation": Distillation(epochs=60, lr=3e-3)}
    student = pf.fuse(models, "ams-top1", **options)
    teacher = fuse(models)
    assert isinstance(student, type(models[0])) and not student.training
    with torch.no_grad():
        agreement = (student(public).argmax(1) == teacher(public).argmax(1)).float().mean()
    untrained = build("mlp:1x60", SHAPE, CLASSES)
    assert float(agreement) > 0.8 > float((untrained(public).argmax(1) == teacher(public).argmax(1)).float().mean())
    again = pf.fuse(models, "ams-top1", **options)
    assert torch.equal(again(x), student(x))
    other = pf.fuse(models, "ams-top1", **options, seed=1)
    assert not torch.equal(other(x), student(x))


def test_the_distillation_loss_is_the_divergence_of_the_student_from_its_teacher():
    teacher, student = torch.tensor([[0.0, 3.0]]), nn.Linear(1, 2, bias=False)
    student.weight.data = torch.tensor([[1.0], [0.0]])
    batch = Batch(torch.ones(1, 1), torch.zeros(1), {"target": teacher})
    found = distillation_loss({"main": Net(student)}, batch, {"temperature": torch.tensor(2.0)})
    p, q = (teacher / 2).softmax(1), (student.weight.T / 2).softmax(1)
    assert float(found.detach()) == pytest.approx(4 * float((p * (p / q).log()).sum().detach()))


def test_temperature_is_two_with_data_and_twenty_without_unless_given(x, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "polyfed.fusion.distill.train_alone", lambda student, stage, *_: seen.append(stage.aux["temperature"])
    )
    quick = {"impressions": 1, "impression_steps": 1}
    for public, temperature in ((x, None), (None, None), (x, 5.0), (None, 5.0)):
        options = Distillation(temperature=temperature, **quick)
        fuse(networks("mlp:1x8"), distill_into="mlp:1x5", public=public, input_shape=SHAPE, distillation=options)
    assert [float(t) for t in seen] == [2.0, 20.0, 5.0, 5.0]


def test_inputs_are_made_for_the_classes_that_a_network_knows_and_it_takes_them_for_these():
    models = networks("mlp:1x20", "mlp:2x20", scale=20.0)
    counts = torch.tensor([[3, 0, 3, 0], [0, 1, 0, 0]])
    rngs = [generator(0, "impressions", 0, place) for place in range(2)]
    made = impressions_of(models, counts, SHAPE, 30, 150, rngs)
    assert made.x.shape == ((2 + 1) * 30, *SHAPE)
    assert impressions_of(models, None, SHAPE, 2, 1, rngs).x.shape[0] == 2 * 4 * 2
    with torch.no_grad():
        for network, rows, label in ((0, slice(0, 30), 0), (0, slice(30, 60), 2), (1, slice(60, 90), 1)):
            taken = (models[network](made.x[rows]).argmax(1) == label).float().mean()
            assert float(taken) > 0.45, (network, label)  # a target may prefer a similar class; chance is 0.25


def test_distillation_without_data_gives_a_student_that_is_better_than_any_network():
    # Two networks that know two classes each; the student never sees data, only inputs made from them.
    rng = torch.Generator().manual_seed(0)
    centres = torch.eye(4, 10) * 4
    points = centres.repeat(50, 1) + torch.randn((200, 10), generator=rng)
    labels = torch.arange(4).repeat(50)
    models = []
    for own in ((0, 1), (2, 3)):
        with torch.random.fork_rng():
            torch.manual_seed(len(models))
            net = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 4))
        rows = torch.isin(labels, torch.tensor(own))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(points[rows]), labels[rows]).backward()
            optimizer.step()
        models.append(net)
    options = Distillation(epochs=60, impressions=40, impression_steps=150, lr=0.01)
    student = fuse(models, distill_into="mlp:1x40", counts=[[9, 9, 0, 0], [0, 0, 9, 9]], distillation=options)
    with torch.no_grad():
        teacher = (fuse(models)(points).argmax(1) == labels).float().mean()
        found = (student(points).argmax(1) == labels).float().mean()
    assert float(teacher) > 0.8
    assert float(found) > 0.6  # chance is 0.25, one network alone 0.5


def test_a_students_first_weights_follow_the_seed():
    first, again, other = (make_student("mlp:1x5", SHAPE, CLASSES, seed) for seed in (0, 0, 1))
    assert torch.equal(first.head.weight, again.head.weight) and not torch.equal(first.head.weight, other.head.weight)


def test_a_students_own_module_is_trained_in_place(x):
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))
    before = student[1].weight.detach().clone()
    assert fuse(networks(*MIXED), distill_into=student, public=x) is student
    assert not torch.equal(student[1].weight, before)


# --- refusals ---


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ((), {}, "at least one network"),
        (("mlp:1x8",), {"confidence": "first_norm", "normalize": "zscore"}, "normalize must be 'none'"),
        (("mlp:1x8",), {"method": "ams-top2"}, "did you mean 'ams-topk'|did you mean 'ams-top1'"),
        (("mlp:1x8",), {"mask_absent": True}, "counts"),
        (("mlp:1x8",), {"counts": [[1, 2], [3, 4]]}, "a row for each of 1 networks"),
        (("mlp:1x8",), {"normalize": "temperature"}, "temperatures"),
        (("mlp:1x8",), {"normalize": "rank"}, "normalize is one of"),
        (("mlp:1x8",), {"method": "ams-topk", "k": 0}, "at least 1"),
        (("mlp:1x8",), {"select": "greedy"}, "counts"),
        (("mlp:1x8",), {"select": "cluster"}, "public inputs and keep"),
        (("mlp:1x8",), {"select": "best"}, "select is one of"),
        (("mlp:1x8",), {"method": "ensemble", "weights": "class"}, "counts"),
        (("mlp:1x8", "mlp:1x8"), {"method": "average", "weights": [1.0]}, "one number for each of 2"),
        (("mlp:1x8", "mlp:1x8"), {"method": "average", "weights": "samples"}, "weights='samples' needs counts"),
        (("mlp:1x8", "mlp:1x8"), {"method": "average", "weights": "class"}, "'samples' or 'uniform'"),
        (("cnn:3-5",), {"distill_into": "mlp:1"}, "input_shape"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(given, options, words):
    with pytest.raises(InputError, match=words):
        fuse(networks(*given), **options)


def test_outputs_of_different_sizes_and_things_that_are_no_networks_are_refused():
    with pytest.raises(InputError, match="network 1 has 3"):
        fuse([build("mlp:1x8", SHAPE, 4), nn.Sequential(nn.Flatten(), nn.Linear(64, 3))])
    with pytest.raises(InputError, match="Network 0 is a str"):
        fuse(["mlp:1x8"])
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    with pytest.raises(InputError, match=r"network 0 has none: wrap it with polyfed.adapt"):
        fuse([plain], confidence="first_norm")
