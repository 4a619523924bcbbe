"""Fitted learners in files of their own: no samples are needed to use them, and no code runs."""

import shutil

import numpy as np
import pytest
import torch
from sklearn.ensemble import GradientBoostingClassifier, HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

import polyfed as pf
from polyfed.api import execute
from polyfed.core.errors import InputError
from polyfed.core.kept import packed, unpacked
from polyfed.core.learner import Learner, Table, fit
from polyfed.core.task import CLASSIFICATION
from polyfed.data import Clients
from polyfed.experiment import experiment
from polyfed.exporting import export

FOREST = "sklearn:RandomForestClassifier,n_estimators=5,max_depth=3"


def rows(number, seed=0):
    x = np.random.default_rng(seed).normal(size=(number, 4)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(int)


def test_a_learner_in_a_file_of_its_own_needs_no_samples(tmp_path):
    pytest.importorskip("skops")
    made = experiment(limit=120, clients=2, models=[FOREST, "mlp:1x8"], rounds=1, public=20, epochs=1)
    execute(made.config("dsfl"), out=tmp_path / "run")
    trained = pf.load_model(tmp_path / "run", 0)
    file = export(trained, tmp_path / "forest.safetensors")
    shutil.rmtree(tmp_path / "run")
    again = pf.load_model(file)
    x = torch.rand(4, 1, 8, 8)
    assert torch.equal(again.module(x), trained.module(x)) and again.about["model"] == FOREST
    images = 16 * x.numpy()  # in the unit of training
    assert again.predict(images) == trained.predict(images)


@pytest.mark.parametrize(
    "estimator",
    [
        HistGradientBoostingClassifier(max_iter=3, min_samples_leaf=2),
        GradientBoostingClassifier(n_estimators=3),
        LogisticRegression(),
        MLPClassifier((4,), max_iter=300),
        make_pipeline(StandardScaler(), DecisionTreeClassifier()),
    ],
)
def test_what_was_fitted_is_kept_without_a_pickle(estimator):
    pytest.importorskip("skops")
    x, y = rows(40)[0], torch.arange(40) % 2
    learner = Learner(estimator, 2)
    table = Table(CLASSIFICATION, torch.as_tensor(x).double(), y, torch.ones(40, dtype=torch.float64))
    learner.kept = fit(estimator, table, 0, 2)
    again = unpacked(*packed(learner), CLASSIFICATION, 2, "a file")
    given = torch.as_tensor(x).float()
    assert torch.equal(again(given), learner(given))


class Mine(LogisticRegression):
    """An estimator of one's own: reading it would run its code."""


def test_files_with_strange_types_or_broken_trees_are_refused():
    io = pytest.importorskip("skops.io")
    x, y = torch.rand(40, 3).double(), torch.arange(40) % 2
    learner = Learner(Mine(), 2)
    table = Table(CLASSIFICATION, x, y, torch.ones(40, dtype=torch.float64))
    learner.kept = fit(Mine(), table, 0, 2)
    with pytest.raises(InputError, match=r"types that are not trusted \(.*Mine"):
        packed(learner)
    tree = DecisionTreeClassifier(random_state=0).fit(x.numpy(), y.numpy())
    state = tree.tree_.__getstate__()
    state["nodes"]["left_child"][0] = 10**6
    tree.tree_.__setstate__(state)
    for blob in (io.dumps(tree), b"no such file"):
        tensors = {"fitted.0": torch.frombuffer(bytearray(blob), dtype=torch.uint8)}
        with pytest.raises(InputError, match="a file cannot be read as a learner"):
            unpacked(tensors, [[0, 1]], CLASSIFICATION, 2, "a file")


def test_a_learner_of_a_script_is_fitted_again_to_the_clients_that_are_passed(tmp_path):
    clients = Clients.from_parts([rows(60), rows(60)], test=rows(50))
    forest = "sklearn:RandomForestClassifier,n_estimators=3"
    result = pf.run("local", clients, forest, rounds=1, out=tmp_path / "run")
    with pytest.raises(InputError, match=r"came from a script: pass it \(clients=...\)"):
        pf.load_model(tmp_path / "run", 0)
    again = pf.load_model(tmp_path / "run", 0, clients=clients)
    x = clients.test.inputs()
    assert torch.equal(again.module(x), result.models[0](x))
