"""Against the released programs: what they compute on a tiny problem, and what is computed here.

The numbers were found by writing out the named step of each program by itself, in double precision, with the same
weights and samples. Where a program does something else than its paper says, the test names the options or the factor
that make the two equal.
"""

import pytest
import torch
from tests.core.test_distill import at_server
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.distill import distill, distill_by
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.nets import Net
from polyfed.core.party import Context, Party, PartyData, load_state
from polyfed.core.prototypes import unpacked_moments
from polyfed.core.rng import SERVER
from polyfed.core.samples import Samples, unlabeled
from polyfed.core.stage import Batch
from polyfed.core.task_vectors import merged
from polyfed.methods.dafkd import DaFKD, weighted_teacher
from polyfed.methods.dsfl import DSFL
from polyfed.methods.feddf import FedDF
from polyfed.methods.feddistill import FedDistill
from polyfed.methods.fedgen import FedGen
from polyfed.methods.fedgh import FedGH
from polyfed.methods.fedkd import FedKD
from polyfed.methods.fedl2g import FedL2G
from polyfed.methods.fedmrl import FedMRL
from polyfed.methods.fedproto import FedProto
from polyfed.methods.fedtgp import FedTGP, TrainablePrototypes
from polyfed.methods.fml import FML
from polyfed.methods.pfedafm import Mixing, PFedAFM
from polyfed.methods.takfl import TAKFL
from polyfed.models import build
from polyfed.models.generators import FeatureGenerator
from polyfed.ops.conformal import label_scores, prediction_sets, threshold
from polyfed.ops.distance import diversity
from polyfed.ops.lowrank import compress, expand
from polyfed.ops.moments import class_moments, pooled_moments

X = [[1.0, 0.5], [-0.4, 1.2], [0.3, -0.9], [1.5, 0.7]]
Y = [0, 1, 2, 1]
HEAD = {"weight": [[0.7, -0.5], [-0.4, 0.6], [0.3, 0.2]], "bias": [0.05, -0.1, 0.0]}
LARGE = ([[0.5, -0.3], [0.2, 0.8]], [0.1, -0.2], HEAD["weight"], HEAD["bias"])
SMALL = ([[-0.6, 0.4], [0.9, 0.1]], [0.3, 0.2], [[0.2, 0.5], [0.6, -0.7], [-0.3, 0.4]], [0.0, 0.1, -0.2])


@pytest.fixture(autouse=True)
def doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def filled(module, values):
    load_state(module, {name: torch.tensor(value) for name, value in values.items()})
    return module


def network(layers):
    """A hidden layer with ReLU and a head, of two features (or as many as the weights have)."""
    names = ("stem.linear.weight", "stem.linear.bias", "head.weight", "head.bias")
    return filled(build(f"mlp:1x{len(layers[1])}", (2,), 3), dict(zip(names, layers, strict=True)))


def linear():
    return filled(nn.Linear(2, 3), HEAD)


def samples():
    return Batch(torch.tensor(X), torch.tensor(Y))


def slope(loss, tensor):
    return torch.autograd.grad(loss, tensor, retain_graph=True)[0]


def close(found, numbers):
    torch.testing.assert_close(
        torch.as_tensor(found).detach().flatten(), torch.tensor(numbers).flatten(), rtol=0, atol=2e-7
    )


# --- prototypes and statistics ---


def test_fedtgp_trains_its_prototypes_as_the_released_server_does():
    """TsingZ0/FedTGP and HtFLlib, `servertgp.py`: margin and three epochs of SGD on all prototypes."""
    ctx = at_server()
    ctx.num_classes = 3
    server = Party(SERVER, None, PartyData())
    server.models["prototypes"] = filled(
        TrainablePrototypes(3, 2),
        {
            "embedding.weight": [[0.5, -1.0], [1.0, 0.3], [-0.2, 0.8]],
            "layers.0.weight": [[0.6, -0.4], [0.3, 0.7]],
            "layers.0.bias": [0.2, 0.4],
            "layers.2.weight": [[0.9, -0.2], [0.1, 1.1]],
            "layers.2.bias": [-0.1, 0.3],
        },
    )
    told = {
        0: {"prototypes": torch.tensor([[1.0, 0.0], [0.0, 3.0]]), "classes": torch.tensor([0, 2])},
        1: {"prototypes": torch.tensor([[2.0, 0.5], [1.0, 1.0]]), "classes": torch.tensor([0, 1])},
    }
    replies = {k: Message(data={**data, "counts": torch.ones(2)}) for k, data in told.items()}
    FedTGP(server_epochs=3, server_lr=0.1, server_batch=10).fuse(server, replies, Step(), ctx)
    assert ctx.records["margin"] == pytest.approx(2.236068, abs=1e-6)
    found = server.memory["prototypes"]["prototypes"]
    close(found, [1.0769478, 0.2310271, 0.5527055, 1.3310049, -0.3106017, 1.6096508])


def test_fedproto_pulls_features_and_collects_them_as_the_released_client_does():
    """HtFLlib, `clientproto.py`, lamda = 10; a class without a prototype has no pull."""
    main, batch = network(LARGE), samples()
    aux = {"prototypes": torch.tensor([[0.2, 0.9], [1.0, -0.5], [9.0, 9.0]]), "known": torch.tensor([1.0, 1.0, 0.0])}
    loss, sums = FedProto(lam=10.0).collecting_loss({"main": Net(main)}, batch, aux)
    close(loss, [6.2852066])
    close(slope(loss, main.stem.linear.weight), [-0.6019167, -0.2707919, 1.9089205, 4.8080914])
    close(sums["features"] / sums["counts"].unsqueeze(1), [0.45, 0.4, 0.32, 0.67, 0.52, 0.0])


def test_fedgh_trains_its_head_as_the_benchmarks_server_does():
    """HtFLlib, `servergh.py`: three epochs of SGD on the prototypes of two clients."""
    ctx = at_server()
    server = Party(SERVER, None, PartyData())
    server.models["head"] = linear()
    told = [([[1.0, 0.0], [0.0, 3.0]], [0, 2]), ([[2.0, 0.5], [1.0, 1.0]], [0, 1])]
    replies = {
        k: Message(data={"prototypes": torch.tensor(p), "classes": torch.tensor(c)}) for k, (p, c) in enumerate(told)
    }
    FedGH(server_epochs=3, server_lr=0.1, server_batch=10).fuse(server, replies, Step(), ctx)
    head = server.models["head"]
    close(head.weight, [0.7715868, -0.5166073, -0.3696884, 0.4986435, 0.1981016, 0.3179637])
    close(head.bias, [0.0884182, -0.1138618, -0.0245564])


def test_ccvr_pools_moments_as_a_public_program_does():
    """smduan/Fed-CCVR, `cal_global_gd`, with the clients' numpy.cov; also as they travel."""
    parts = [[[1.0, 0.0], [3.0, 1.0], [2.0, 4.0]], [[0.0, 2.0], [5.0, 3.0]]]
    each = [class_moments(torch.tensor(z), torch.zeros(len(z), dtype=torch.long)) for z in parts]
    pooled = pooled_moments(each)
    close(pooled.means, [2.2, 2.0])
    close(pooled.covariance, [3.7, 1.0, 1.0, 2.5])
    again = unpacked_moments({"classes": pooled.classes, "means": pooled.means, "covariance": pooled.covariance})
    assert torch.equal(again.covariance, pooled.covariance)


@pytest.mark.parametrize(
    ("form", "guides", "expected"),
    [
        (
            "logit",
            [[0.5, -0.2, 0.1], [0.3, 0.8, -0.6], [-0.4, 0.2, 0.9]],
            [0.1051003, -0.066074, 0.0080852, 0.0419313, -0.0178412, -0.0221244, 0.0960042, -0.0653062, 0.0065932],
        ),
        (
            "feature",
            [[0.5, -0.2], [0.3, 0.8], [-0.4, 0.2]],
            [0.116516, -0.0013611, 0.0, -0.0032668, 0.0938601, 0.0],
        ),
    ],
)
def test_fedl2g_tells_the_gradient_of_the_released_meta_study(form, guides, expected):
    """HtFLlib, `clientl2g_logit.py` and `_feat.py`: the quiz loss after a differentiable SGD step of 0.5."""
    client = Party(0, None, PartyData())
    client.models["main"] = network(LARGE)
    study = Samples(torch.tensor(X[:3]), torch.tensor(Y[:3]))
    quiz = Samples(torch.tensor([[0.9, -0.2], [-0.5, 0.6]]), torch.tensor([1, 2]))
    ctx = Context(0, 1, 1, pf.Training(lr=0.5), 3, (2,), 1)
    gradient, _ = FedL2G(form=form).gradient(client, study, quiz, torch.tensor(guides), ctx)
    close(gradient, expected)


# --- distillation ---


@pytest.mark.parametrize(
    ("ensemble", "weight", "loss"),
    [
        ("logits", [0.7024995, -0.4975005, -0.4024998, 0.6024997, 0.3025004, 0.1975004], 0.0785865),
        ("probs", [0.7024993, -0.4975006, -0.4024996, 0.6024995, 0.302502, 0.1975006], 0.025218),
    ],
)
def test_feddf_distills_as_the_released_solver_does(ensemble, weight, loss, monkeypatch):
    """epfml/federated-learning-public-code, `NoiseKTSolver`: four steps of Adam 1e-3 along a cosine, clipped at 5.

    Its third scheme, `avg_losses`, ends at the weights of `avg_probs`.
    """
    answers = [3 * network(layers)(torch.tensor(X)).detach() for layers in (LARGE, SMALL)]
    monkeypatch.setattr("polyfed.methods.distillation.uploaded_logits", lambda *_: iter(answers))
    method, student, data = (
        FedDF(ensemble=ensemble, distill_steps=4),
        linear(),
        Samples(torch.tensor(X), torch.zeros(4)),
    )
    ctx = at_server()
    _, targets = method.lesson({0: Message(), 1: Message()}, data, ctx)
    found = distill_by(method, student, data, targets, ctx)
    close(student.weight, weight)
    assert found == pytest.approx(loss, abs=1e-6)


def test_takfl_adds_up_tasks_as_the_released_program_does():
    """hojinchangucsd/TAKFL, `main_fedhd.py`: five epochs of Adam on each task, then the vectors by (0.3, 0.7)."""
    teachers = [3 * network(layers)(torch.tensor(X)).detach() for layers in (LARGE, SMALL)]
    method = TAKFL(distill_lr=0.01)
    ctx = at_server()
    start = {name: tensor.clone() for name, tensor in linear().state_dict().items()}
    own = linear()(torch.tensor(X)).detach()
    ctx.cache["replica", "linear"] = linear()
    ctx.blueprints["linear"] = type("Blueprint", (), {"build": nn.Linear})
    data = unlabeled(torch.tensor(X))
    tasks = [method.task(start, "linear", f"{n}", z, own, data, ctx) for n, z in enumerate(teachers)]
    found = merged(start, tasks, (0.3, 0.7))
    close(found["weight"], [0.7202596, -0.4799046, -0.4201281, 0.5801374, 0.3496212, 0.1792462])
    close(found["bias"], [0.0704772, -0.1498557, -0.0202468])


def test_feddistill_regularizes_by_label_means_as_the_benchmark_does():
    """HtFLlib, `clientfd.py`, lamda = 0.5; there a label without a mean takes the sample's own logits as a target."""
    nets = {"main": Net(network(LARGE))}
    aux = {
        "targets": torch.tensor([[1.0, -0.5, 0.2], [-0.3, 0.9, 0.1], [9.0, 0.0, 0.0]]),
        "known": torch.tensor([1.0, 1.0, 0.0]),
    }
    loss, sums = FedDistill(lam=0.5).distill_loss(nets, samples(), aux)
    close(loss, [1.4642963])
    means = sums["logits"] / sums["counts"].unsqueeze(1)
    close(means, [0.165, -0.04, 0.215, -0.061, 0.174, 0.23, 0.414, -0.308, 0.156])


def generator():
    return filled(
        FeatureGenerator(2, 3, 2, 2),
        {
            "hidden.weight": [[0.5, -0.3, 0.8, -0.6, 0.1], [0.2, 0.9, -0.4, 0.3, 0.7]],
            "hidden.bias": [0.1, -0.2],
            "output.weight": [[1.1, -0.4], [0.3, 0.8]],
            "output.bias": [0.2, 0.1],
        },
    )


NOISE = [[0.1, 0.9], [0.5, 0.4], [0.8, 0.2], [0.3, 0.6]]


def test_fedgen_trains_its_generator_on_the_released_loss():
    """zhuangdizhu/FedGen, `serverpFedGen.py` and `generator.py`.

    There a product of [B] with [B, 1] gives all samples the mean weight of the batch (1.9501902), here each its own.
    """
    made = generator()
    states = {str(k): network(layers).state_dict() for k, layers in enumerate((LARGE, SMALL))}
    counts = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0, 6.0]])  # of each client and label
    aux = {"heads": states, "shares": dict(zip("01", counts / counts.sum(0), strict=True))}
    nets = {"generator": Net(made), "mlp:1x2": Net(network(LARGE))}
    batch = Batch(torch.zeros(4, 1), torch.tensor(Y), {"noise": torch.tensor(NOISE)})
    loss = FedGen().generator_loss(nets, batch, aux, {"0": "mlp:1x2", "1": "mlp:1x2"})
    close(loss, [1.9581456])
    close(slope(loss, made.output.weight), [-0.0330277, 0.1070787, 0.0093248, -0.0470126])
    expected = [0.100348, -0.0985162, -0.1322181, -0.0183181, 0.1505362]
    expected += [-0.0914438, 0.059616, -0.0835728, 0.3182784, -0.2347057]
    close(slope(loss, made.hidden.weight), expected)
    close(diversity(batch["noise"], generator()(batch["noise"], batch.y)), [0.9035958])


def test_fedgen_trains_clients_on_the_released_loss():
    """zhuangdizhu/FedGen, `userpFedGen.py`, in the second round: generated batches of 2 beside batches of 4."""
    client = Party(0, None, PartyData())
    client.models |= {"main": network(LARGE), "generator": generator()}
    client.inbox = Message({"generator": {}}, {"labels": torch.tensor([0, 2])})
    method = FedGen(generator_batch=2)
    stage = method.stage(client, Context(0, 2, 9, pf.Training(batch_size=4), 3, (2,), 1))
    drawn = {"noise": torch.tensor(NOISE), "drawn": torch.tensor([[0.7, 0.1], [0.2, 0.8]])}
    batch = Batch(torch.tensor(X), torch.tensor(Y), {**drawn, "label": torch.tensor([0.9, 0.1])})  # labels 2 and 0
    loss = stage.loss({name: Net(module) for name, module in client.models.items()}, batch, stage.aux)
    torch.testing.assert_close(loss.detach(), torch.tensor(5.9165431), rtol=0, atol=1e-6)
    expected = [-0.6658079, 0.0326224, 0.489628, 0.6070176, 0.1761799, -0.63964]
    torch.testing.assert_close(
        slope(loss, client.main.head.weight).flatten(), torch.tensor(expected), rtol=0, atol=1e-6
    )


def test_dafkd_trains_discriminators_as_the_released_trainer_does():
    """haozhaowang/DaFKD2023, `my_model_trainer_MTL.py`: the penalty is on the slope of D itself, after its sigmoid."""
    discriminator = filled(nn.Linear(2, 1), {"weight": [[0.9, -0.7]], "bias": [0.2]})
    main = network(LARGE)
    fake = torch.tensor([[0.2, -0.1], [0.9, 0.4], [-0.6, 0.8], [0.3, 0.3]])
    made = filled(nn.Linear(2, 2, bias=False), {"weight": [[1.0, 0.0], [0.0, 1.0]]})  # what it makes is the noise
    nets = {"main": Net(main), "discriminator": Net(discriminator), "generator": Net(made)}
    batch = Batch(torch.tensor(X), torch.tensor(Y), {"noise": fake, "place": torch.tensor([0.25, 0.5, 0.75, 0.1])})
    loss = DaFKD().domain_loss(nets, batch, {})
    close(loss, [2.6969788])
    close(slope(loss, main.stem.linear.weight), [-0.005478, 0.1327352, 0.0627842, -0.1102805])
    close(slope(loss, discriminator.weight), [-0.0844891, -0.0642304])
    close(loss - DaFKD(penalty=0.0).domain_loss(nets, batch, {}), [0.2158938])
    close(DaFKD().generator_loss(nets, batch, {}), [0.5758107])


def test_dafkd_weighs_and_distills_its_teachers_as_the_released_trainer_does():
    """haozhaowang/DaFKD2023, `get_pd_log` and `weighted_ensemble_distillation`; its KL is a mean over classes, too."""
    answers = torch.stack([network(layers)(torch.tensor(X)).detach() for layers in (LARGE, SMALL)])
    scores = torch.tensor([[0.9, 0.2, 0.5, 0.4], [0.3, 0.6, 0.5, 0.1]])
    teacher = weighted_teacher(answers, scores)
    expected = [0.2675, -0.20625, 0.22625, 0.0805, 0.611, -0.3455, 0.302, -0.237, 0.054, 0.2964, -0.1748, 0.3488]
    close(teacher, expected)
    student, ctx = linear(), at_server()
    still = distill(
        student, Samples(torch.tensor(X), torch.zeros(4)), teacher, ctx, pf.Training(lr=1e-12), temperature=10.0
    )
    assert still.loss / 3 == pytest.approx(0.0228764, abs=1e-7)


def test_dsfl_sharpens_as_public_programs_do():
    """Several public programs agree: softmax of the mean probabilities over T."""
    a, b = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.1, 0.3, 0.6]])
    close(DSFL(temperature=0.1).consensus([a, b], at_server()).softmax(1), [0.5465494, 0.1219517, 0.331499])


# --- proxies ---


def test_fml_has_the_benchmarks_terms():
    """HtFLlib, `clientfml.py`: cross-entropy 1.0600816 and 1.2372368; its divergences are means over classes, too."""
    nets = {"main": Net(network(LARGE)), "proxy": Net(network(SMALL))}
    method = FML(alpha=0.4, beta=0.7)
    close(method.private_loss(nets, samples(), {}), [0.4 * 1.0600816 + 0.6 * 3 * 0.0283172])
    close(method.meme_loss(nets, samples(), {}), [0.7 * 1.2372368 + 0.3 * 3 * 0.0339886])


def test_fedkd_has_the_released_losses():
    """wuch15/FedKD and HtFLlib, `clientkd.py`: the divergence is a mean over classes, too, and c is differentiated."""
    main = network(LARGE)
    bridge = filled(nn.Linear(2, 2, bias=False), {"weight": [[0.4, -0.6], [1.2, 0.3]]})
    nets = {"main": Net(main), "proxy": Net(network(SMALL)), "map": Net(bridge)}
    method = FedKD(distill_weight=1 / 3, detach_scale=False)
    mentor, mentee = (loss(nets, samples(), {}) for loss in (method.mentor_loss, method.mentee_loss))
    close(torch.stack([mentor, mentee]), [1.3426329, 1.5222568])
    close(slope(mentor, main.stem.linear.weight), [0.5020333, 0.141785, 0.0664692, -0.1653317])


def test_fedkd_keeps_the_energy_that_the_released_program_keeps():
    """wuch15/FedKD, `run.py` (with the diagonal that HtFLlib puts in): ranks, what comes back, and e_t of 4 rounds."""
    matrix = torch.tensor([[1.0, 0.2, -0.3], [0.4, -0.9, 0.6], [0.1, 0.5, 0.8], [-0.7, 0.3, 0.2]])
    one = [[0.743873, -0.362681, -0.055384], [0.63875, -0.311428, -0.047557]]
    one += [[-0.163556, 0.079743, 0.012177], [-0.692663, 0.337714, 0.051571]]
    two = [[0.86785, -0.039366, -0.50744], [0.442751, -0.822564, 0.667108]]
    two += [[-0.235279, -0.107301, 0.2737], [-0.723328, 0.257746, 0.163382]]
    all_three = matrix.tolist()  # which the released search never tries: it keeps none then
    for rank, (energy, rows) in enumerate(((0.4, one), (0.7, two), (0.9, all_three)), 1):
        factors = compress(matrix, energy)
        assert len(factors[1]) == rank
        torch.testing.assert_close(expand(factors), torch.tensor(rows), rtol=0, atol=1e-6)
    rounds = [Context(0, number, 4, pf.Training(), 3, (2,), 1) for number in (1, 2, 3, 4)]
    assert [FedKD().energy(ctx) for ctx in rounds] == pytest.approx([0.9575, 0.965, 0.9725, 0.98])


def test_fedmrl_has_the_benchmarks_loss():
    """HtFLlib, `clientmrl.py`: one feature of the small model before two of the private one."""
    small = network(([[-0.6, 0.4]], [0.3], [[0.2], [0.6], [-0.3]], [0.0, 0.1, -0.2]))
    large, projector = network(LARGE), nn.Linear(3, 2)
    filled(projector, {"weight": [[0.3, -0.2, 0.8], [0.5, 0.4, -0.1]], "bias": [0.05, -0.15]})
    nets = {"main": Net(large), "proxy": Net(small), "projector": Net(projector)}
    loss = FedMRL().loss(nets, samples(), {})
    close(loss, [2.2226862])
    close(slope(loss, projector.weight), [0.1174165, 0.0718143, 0.1032902, -0.1612084, -0.0517713, -0.1552115])
    close(slope(loss, small.stem.linear.weight), [0.0177958, -0.0533874])
    close(slope(loss, large.stem.linear.weight), [-0.0576541, 0.007565, 0.0052943, 0.1491993])


def test_pfedafm_mixes_as_the_released_program_does():
    """LipingYi/pFedAFM, `pFedAFM_mh.py`: both phases on one batch."""
    large, small, mixing = network(LARGE), network(SMALL), Mixing(2, 1.0)
    small.head = nn.Identity()
    filled(mixing, {"a": [0.6, 0.3]})
    nets = {"main": Net(large), "proxy": Net(small), "mixing": Net(mixing)}
    loss = PFedAFM().mixed_loss(nets, samples(), {})
    close(loss, [1.1656459])
    close(slope(loss, large.stem.linear.weight), [0.0127509, 0.0125224, 0.0301431, -0.0426477])
    close(slope(loss, mixing.a), [-0.1709383, -0.1306838])
    close(PFedAFM().common_loss(nets, samples(), {}), [1.3412464])


def test_fedtype_calibrates_and_predicts_sets_as_the_released_program_does():
    """JackqqWang/FedType, `conformal.py` (`giq`, `gcq`): T = 1.5, lamda 0.2 from the second rank on, alpha 0.4."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.05, 0.6, 0.1]]).log()
    scores = label_scores(logits, torch.tensor([1, 1, 2]), 1.5, 0.2, 1, torch.tensor([0.5, 0.25, 0.9]))
    close(scores, [0.7708255, 1.0952204, 0.4387034])
    q = threshold(scores, 0.4)
    close(q, [1.0952204])
    for u, sets in (
        ([0.05, 0.5, 0.95], [[0, 1], [2, 3], [0, 2]]),
        ([0.6, 0.05, 0.3], [[0, 1], [1, 2, 3], [0, 2]]),
        (None, [[0, 1, 2], [1, 2, 3], [0, 2, 3]]),
    ):
        found = prediction_sets(logits, 1.5, q, 0.2, 1, None if u is None else torch.tensor(u))
        assert [row.nonzero().flatten().tolist() for row in found] == sets


def test_cross_entropy_of_the_tiny_problem():
    """What the numbers above have in common."""
    close(F.cross_entropy(network(LARGE)(torch.tensor(X)), torch.tensor(Y)), [1.0600816])
