"""Clients whose model is no network."""

import sys
import types

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

import polyfed as pf
from polyfed.analysis.opening import open_run
from polyfed.api import execute
from polyfed.core.errors import InputError
from polyfed.core.learner import BOOK, DOUBT, Learner, Table, fit, to_learn
from polyfed.core.party import ClientInfo, Context, Party, PartyData
from polyfed.core.rng import seed_of
from polyfed.core.runner import run_stage
from polyfed.core.samples import Samples
from polyfed.core.settings import Training
from polyfed.core.stage import Stage
from polyfed.core.task import CLASSIFICATION, Multilabel, Regression
from polyfed.data import Clients
from polyfed.engines.known import KnownStages
from polyfed.experiment import experiment
from polyfed.exporting import export
from polyfed.models import build

FOREST = "sklearn:RandomForestClassifier,n_estimators=5,max_depth=3"
MIXED = [FOREST, "sklearn:LogisticRegression", "mlp:1x8"]
FEDMD = pf.FedMD(subset=20, public_epochs=0, private_epochs=1)
QUICK = {"rounds": 3, "training": pf.Training(epochs=1, batch_size=8, lr=0.05)}


def table(seed=0, clients=3, classes=3, public=30):
    rng = np.random.default_rng(seed)
    middles = rng.normal(size=(classes, 4)) * 2

    def draw(n, labels=classes):
        y = rng.integers(0, labels, n)
        return (middles[y] + rng.normal(size=(n, 4))).astype(np.float32), y

    parts = [draw(16 + 4 * k, classes if k else classes - 1) for k in range(clients)]
    return Clients.from_parts(parts, test=draw(60), num_classes=classes, public=draw(public)[0])


def party_of(data, model, client=0, public=None):
    party = Party(client, ClientInfo(client, len(data), "learner"), PartyData(data, public=public))
    party.models["main"] = model
    return party


def context(classes, task=CLASSIFICATION, seed=0, columns=4):
    sizes = {"num_classes": classes, "input_shape": (columns,), "clients": 1}
    return Context(seed=seed, round=1, rounds=1, training=Training(), task=task, **sizes)


def plain(nets, batch, aux):
    return batch.loss(nets["main"](batch.x))


def distance(nets, batch, aux):
    return nets["main"](batch.x).abs().mean()


# --- what is fitted, and what is answered ---


def test_without_lessons_all_classes_are_equally_likely():
    assert torch.equal(Learner(DecisionTreeClassifier(), 3)(torch.randn(2, 4)), torch.zeros(2, 3))


def test_private_training_is_scikit_learns_own_fit_with_a_seed_of_the_client():
    data = table().train[2]
    party = party_of(data, Learner(RandomForestClassifier(n_estimators=5), 3), client=7)
    run_stage(Stage(plain), party, context(3, seed=4), "main/0")
    seed = seed_of(4, "learner", 0, 7) % (1 << 32)
    by_hand = RandomForestClassifier(n_estimators=5, random_state=seed).fit(data.inputs().double(), data.labels())
    p = by_hand.predict_proba(data.inputs().double())
    np.testing.assert_allclose(party.main(data.inputs()).softmax(1), (1 - DOUBT) * p + DOUBT / 3, atol=1e-6)
    np.testing.assert_allclose(party.main(data.inputs()).sum(1), 0, atol=1e-4)  # as a network's logits


def test_a_class_that_a_client_never_saw_is_almost_impossible():
    data = Samples(torch.randn(10, 4), torch.tensor([0, 2] * 5))
    party = party_of(data, Learner(DecisionTreeClassifier(), 3))
    run_stage(Stage(plain), party, context(3), "main/0")
    np.testing.assert_allclose(party.main(data.inputs()).softmax(1)[:, 1], DOUBT / 3, rtol=1e-5)


def test_one_class_alone_needs_no_fit():
    data = Samples(torch.randn(5, 4), torch.ones(5, dtype=torch.long))
    party = party_of(data, Learner(LogisticRegression(), 2))
    run_stage(Stage(plain), party, context(2), "main/0")
    np.testing.assert_allclose(party.main(data.inputs()).softmax(1)[:, 1], 1 - DOUBT / 2, rtol=1e-6)


def test_a_digest_is_a_fit_to_own_samples_and_weighted_copies_of_public_ones():
    x, public = torch.tensor([[0.0], [1.0]]), Samples(torch.tensor([[2.0], [3.0], [4.0]]), torch.full((3,), -1))
    party = party_of(Samples(x, torch.tensor([0, 1])), Learner(LogisticRegression(), 2, emphasis=3.0), public=public)
    run_stage(Stage(plain), party, context(2, columns=1), "main/0")
    rows, soft = torch.tensor([2, 0]), torch.tensor([[0.7, 0.3], [0.1, 0.9]])
    asked = public.select(rows)
    run_stage(Stage(distance, data=asked, targets=soft.log()), party, context(2, columns=1), "digest/0")
    # Two own samples and emphasis 3: the two public ones weigh 3 each.
    copies = [[0.0], [1.0], [4.0], [4.0], [2.0], [2.0]], [0, 1, 0, 1, 0, 1], [1, 1, 2.1, 0.9, 0.3, 2.7]
    by_hand = LogisticRegression().fit(*copies)
    points = torch.tensor([[-1.0], [0.5], [5.0]])
    p = by_hand.predict_proba(points.numpy())
    np.testing.assert_allclose(party.main(points).softmax(1), (1 - DOUBT) * p + DOUBT / 2, atol=1e-5)


def test_a_new_lesson_replaces_the_old_one_of_its_kind():
    public = Samples(torch.randn(6, 4), torch.full((6,), -1))
    data = table().train[1]
    party = party_of(data, Learner(DecisionTreeClassifier(), 3), public=public)
    for _ in range(2):
        stage = Stage(distance, data=public.select(torch.arange(3)), targets=torch.randn(3, 3))
        run_stage(stage, party, context(3), "digest/0")
        run_stage(Stage(plain), party, context(3), "main/0")
    lessons = party.memory[BOOK]["lessons"]
    assert lessons.keys() == {"own", "public"} and lessons["own"] == {}
    assert torch.equal(lessons["public"]["targets"], stage.targets)


def test_values_are_learned_in_units_of_the_task():
    task = Regression((10.0,), (2.0,))
    data = Samples(torch.arange(4.0).unsqueeze(1), torch.tensor([[8.0], [10.0], [12.0], [14.0]]))
    party = party_of(data, Learner(DecisionTreeRegressor(), 1))
    run_stage(Stage(plain), party, context(1, task, columns=1), "main/0")
    assert party.main(data.inputs()).flatten().tolist() == [-1.0, 0.0, 1.0, 2.0]
    assert task.predictions(party.main(data.inputs())).flatten().tolist() == [8.0, 10.0, 12.0, 14.0]


def test_each_label_has_an_estimator_of_its_own():
    x, y = torch.randn(30, 3), (torch.randn(30, 2) > 0).float()
    table = Table(Multilabel(), x.double(), y.double(), torch.ones(30))
    made = fit(DecisionTreeClassifier(max_depth=2), table, 1, 2)
    for label in (0, 1):
        by_hand = DecisionTreeClassifier(max_depth=2, random_state=1).fit(x.double(), y[:, label])
        p = (1 - DOUBT) * by_hand.predict_proba(x.double())[:, 1] + DOUBT / 2
        np.testing.assert_allclose(1 / (1 + np.exp(-made(x.double().numpy())[:, label])), p)


def test_soft_labels_are_what_outputs_say():
    found = to_learn(CLASSIFICATION, torch.tensor([[0.7, 0.3]]).log(), torch.zeros(1))
    np.testing.assert_allclose(found, [[0.7, 0.3]], rtol=1e-6)


# --- in a federation ---


GLOBAL = pf.FedMDGlobal(public_epochs=0, private_epochs=1)


@pytest.mark.parametrize(
    "method",
    [FEDMD, pf.FedDF(distill_steps=20), *(pytest.param(m, marks=pytest.mark.long) for m in ("dsfl", "cronus", GLOBAL))],
)
def test_a_learner_hears_from_the_others_of_a_class_that_it_never_saw(method):
    clients = table()
    assert clients.label_counts()[0].tolist() == [9, 7, 0]
    alone, together = (pf.run(one, clients, MIXED, **QUICK) for one in ("local", method))
    x = clients.test.inputs()
    assert 2 not in alone.models[0](x).argmax(1)
    assert 2 in together.models[0](x).argmax(1)
    assert together.accuracy()["per_client"][0] > alone.accuracy()["per_client"][0]
    assert together.architectures[:2] == MIXED[:2] and together.parameters[:2] == [0, 0]


def test_an_ensemble_asks_those_who_cannot_upload():
    clients = table()
    result = pf.run("ensemble", clients, MIXED, **QUICK)
    x, y = clients.test.inputs(), clients.test.labels()
    mean = sum(result.models[client](x).softmax(1) for client in range(3)) / 3
    assert result.accuracy()["mean"] == pytest.approx(float((mean.argmax(1) == y).float().mean()))
    weights = sum(tensor.numel() for tensor in result.models[2].state_dict().values())
    assert result.history[-1]["bytes_up"] == 4 * weights  # of the one network


@pytest.mark.parametrize("options", [{}, {"normalize": "temperature"}, {"select": "cluster", "keep": 2}])
def test_the_most_confident_may_be_a_learner(options):
    clients = table()
    result = pf.run(pf.AMS(**options), clients, MIXED, **QUICK)
    if not options:
        x, y = clients.test.inputs(), clients.test.labels()
        logits = torch.stack([result.models[client](x).detach() for client in range(3)])
        chosen = logits.amax(2).argmax(0)
        answers = logits[chosen, torch.arange(len(x))].argmax(1)
        assert result.accuracy()["mean"] == pytest.approx(float((answers == y).float().mean()))
        assert len(set(chosen.tolist())) > 1
    assert 0 < result.accuracy()["mean"] <= 1


def test_an_ensemble_is_distilled_from_learners_into_learners():
    """FedDF's targets are the mean of everybody's logits, those of learners as they were sent."""
    clients = table()
    result = pf.run(pf.FedDF(distill_steps=0), clients, MIXED, **QUICK)
    assert "ensemble" not in result.server.memory  # nobody distills: everybody as alone
    assert result.accuracy()["per_client"] == pf.run("local", clients, MIXED, **QUICK).accuracy()["per_client"]
    told = pf.run(pf.FedDF(distill_steps=1), clients, MIXED[:2], **{**QUICK, "rounds": 1})
    alone = pf.run("local", clients, MIXED[:2], **{**QUICK, "rounds": 1})
    mean = sum(alone.models[client](clients.public.inputs()) for client in range(3)) / 3
    torch.testing.assert_close(told.server.memory["ensemble"], mean)
    rows, outputs = len(clients.public), 3
    assert told.history[-1]["bytes_up"] == 3 * (4 * rows * outputs + 8)  # logits, and the number of samples


@pytest.mark.parametrize(
    "settings", [{"workers": 1}, pytest.param({"engine": "sequential"}, marks=pytest.mark.long), {"workers": 3}]
)
def test_neither_workers_nor_order_change_a_bit(settings):
    def told(**settings):
        history = pf.run(FEDMD, table(), MIXED, **QUICK, **settings).history
        return [{key: line[key] for key in ("accuracy", "loss", "bytes_up") if key in line} for line in history]

    assert told(**{"engine": "threads", **settings}) == told(engine="threads", workers=2)


@pytest.mark.parametrize("engine", ["auto", "batched"])
def test_engines_that_stack_networks_let_learners_work_whole(engine):
    stacked = pf.run(FEDMD, table(clients=4), [FOREST, "mlp:1x8"], engine=engine, **QUICK)
    whole = pf.run(FEDMD, table(clients=4), [FOREST, "mlp:1x8"], engine="threads", **QUICK)
    assert stacked.accuracy()["per_client"] == pytest.approx(whole.accuracy()["per_client"], abs=0.02)


def test_without_a_digest_it_is_training_alone():
    alone = pf.run("local", table(), MIXED[:2], **QUICK)
    result = pf.run(pf.FedMD(digest_epochs=0, public_epochs=0, private_epochs=0), table(), MIXED[:2], **QUICK)
    assert result.accuracy()["per_client"] == alone.accuracy()["per_client"]


def test_public_classes_of_their_own_come_first():
    clients = table()
    public = pf.data.Clients.from_parts(
        [(np.zeros((2, 4), np.float32), np.array([0, 1]))], test=(np.zeros((2, 4), np.float32), np.array([0, 1]))
    )
    assert public.num_classes == 2
    data = clients.train[1]
    party = party_of(data, Learner(DecisionTreeClassifier(), 5))
    ctx = context(3)
    ctx.public_classes = 2
    (stage,) = pf.FedMD().revisit(party, ctx)
    run_stage(stage, party, ctx, "main/0")
    answers = pf.FedMD().predict(party, data.inputs(), ctx)
    assert answers.shape == (len(data), 5)
    assert torch.equal(answers.argmax(1), data.labels())


def test_estimators_can_be_objects_functions_and_classes():
    def boosted():
        return make_pipeline(StandardScaler(), LogisticRegression())

    models = [RandomForestClassifier(n_estimators=3), boosted, DecisionTreeClassifier, RandomForestClassifier(3)]
    result = pf.run("dsfl", table(clients=4), models, **QUICK)
    assert result.architectures == [getattr(m, "__name__", type(m).__name__) for m in models]


def test_a_comparison_fits_anew_for_every_method():
    made = experiment(limit=150, clients=2, models=[FOREST, "mlp:1x8"], rounds=2, public=20, epochs=1)
    remembered, clients = KnownStages(), made.base.data.load(0)
    for label in ("local", "dsfl", "local"):
        config = made.config(label)
        known, anew = execute(config, clients, known=remembered), execute(config, clients)
        assert known.accuracy()["per_client"] == anew.accuracy()["per_client"], label


def test_resume_fits_again_and_goes_on_as_if_nothing_had_happened(tmp_path):
    def stop(line):
        if line["round"] == 2:
            raise KeyboardInterrupt

    whole = pf.run(FEDMD, table(), MIXED, **QUICK)
    out = {"out": tmp_path / "run", "checkpoint_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        pf.run(FEDMD, table(), MIXED, **QUICK, **out, observers=[stop])
    resumed = pf.run(FEDMD, table(), MIXED, **QUICK, **out, resume=True)
    assert [line.get("accuracy") for line in resumed.history] == [line.get("accuracy") for line in whole.history]
    x = torch.randn(5, 4)
    assert torch.equal(resumed.models[0](x), whole.models[0](x))


def test_regression_with_trees_and_a_network():
    rng = np.random.default_rng(0)

    def draw(n):
        x = rng.normal(size=(n, 3)).astype(np.float32)
        return x, (50 + 10 * x[:, :1]).astype(np.float32)

    clients = Clients.from_parts([draw(60) for _ in range(2)], test=draw(50), public=draw(30)[0], task="regression")
    models = ["sklearn:RandomForestRegressor,n_estimators=10", "mlp:1x16"]
    result = pf.run(pf.FedMD(public_epochs=0), clients, models, **QUICK)
    assert result.accuracy()["per_client"][0] > 0.7  # R²


def digits(tmp_path, **more):
    made = experiment(limit=120, clients=2, models=[FOREST, "mlp:1x8"], rounds=1, public=20, epochs=1, **more)
    execute(made.config("dsfl"), out=tmp_path / "run")
    return tmp_path / "run"


def test_a_finished_learner_is_fitted_again_from_what_it_was_taught(tmp_path):
    run = digits(tmp_path)
    trained, opened = pf.load_model(run, 0), open_run(run)
    x = torch.rand(4, 1, 8, 8)
    assert torch.equal(trained.module(x), opened.models[0](x)) and not torch.equal(
        trained.module(x), torch.zeros(4, 10)
    )
    (forest,) = trained.module.estimators()
    assert len(forest.estimators_) == 5
    with pytest.raises(InputError, match="is no network, so it cannot be written as onnx"):
        export(trained, tmp_path / "forest.onnx", "onnx")
    with pytest.raises(InputError, match="holds what a learner was taught"):
        pf.load_model(run / "models" / "client-0.safetensors")


def test_a_learner_of_other_samples_is_refused(tmp_path):
    run = digits(tmp_path)
    opened = open_run(run)
    lessons = opened.models[0].lessons()
    other = PartyData(opened.clients.client(1)[0], public=opened.clients.public)
    with pytest.raises(InputError, match="its samples are not those that it was fitted on"):
        Learner(opened.models[0].estimator, 10).recall(lessons, other, 0)


# --- what is refused, before anything is trained ---


@pytest.mark.parametrize(
    ("method", "model", "words"),
    [
        ("fedavg", FOREST, r"fedavg needs networks at every client, but client 0 has sklearn:RandomForestClassifier"),
        ("fedproto", FOREST, "Methods that would work: ams, cronus, dsfl, "),
        ("dsfl", KNeighborsClassifier(), "client 0 has KNeighborsClassifier, whose fit takes no sample_weight"),
        ("local", "sklearn:RandomForestRegressor", "a learner of classes .* for the task classification, but client 0"),
        ("local", "sklearn:RandomForestClasifier", "did you mean 'RandomForestClassifier'"),
        ("local", "sklearn:LogisticRegression,Z=1", "Z"),
        ("local", "sklearn:LogisticRegression,C=-1", "LogisticRegression cannot be fitted"),
        ("local", "sklearn:LogisticRegression,emphasis=0", "emphasis of the model"),
        ("local", "sklearn:LinearSVC", "LinearSVC predicts no probabilities"),
        ("local", "sklearn", "needs a class"),
        ("local", "sklearn:LogisticRegression@0.5", "has no width rates"),
        (pf.FedMDGlobal(public_epochs=0), FOREST, "name one of its own"),
        (pf.AMS(distill="zero_shot"), FOREST, "ams needs networks at every client"),
        (pf.AMS(confidence="first_norm"), FOREST, "ams needs networks at every client"),
        (pf.FedDF(select_on="test"), FOREST, "feddf needs networks at every client"),
    ],
)
def test_what_cannot_be_is_said_before_training(method, model, words):
    with pytest.raises(InputError, match=words):
        pf.run(method, table(), [model], **QUICK)


def test_noise_needs_gradients():
    pytest.importorskip("dp_accounting")
    with pytest.raises(InputError, match="learns without gradients"):
        pf.run(FEDMD, table(), MIXED, **QUICK, privacy=pf.Privacy(epsilon=8))


def test_boosted_trees_of_other_packages():
    pytest.importorskip("lightgbm")
    pytest.importorskip("xgboost")
    models = ["xgboost:XGBClassifier,n_estimators=5", "lightgbm:LGBMClassifier,n_estimators=5,min_child_samples=2"]
    once, again = (pf.run("dsfl", table(), models, **QUICK, workers=n) for n in (1, 2))
    assert once.accuracy()["per_client"] == again.accuracy()["per_client"]
    assert min(once.accuracy()["per_client"]) > 0.4


def test_a_slip_in_a_field_of_a_library_that_takes_any_is_said(monkeypatch):
    """XGBoost and LightGBM take every field and say nothing where they have none of that name."""

    class XGBClassifier(LogisticRegression):
        def __init__(self, max_depth=None, C=1.0, **more):
            super().__init__(C=C)
            self.max_depth, self.more = max_depth, more

        def get_params(self, deep=True):
            return {"max_depth": self.max_depth, "C": self.C, **self.more}

        def set_params(self, **fields):
            self.more |= {name: value for name, value in fields.items() if name not in ("max_depth", "C")}
            return self

    monkeypatch.setitem(
        sys.modules, "xgboost", types.SimpleNamespace(__all__=["XGBClassifier"], XGBClassifier=XGBClassifier)
    )
    with pytest.raises(InputError, match="Unknown field of XGBClassifier 'max_dept': did you mean 'max_depth'"):
        build("xgboost:XGBClassifier,max_dept=3", (4,), 2)
    assert build("xgboost:XGBClassifier,eta=0.1", (4,), 2).estimator.more == {"eta": 0.1}
