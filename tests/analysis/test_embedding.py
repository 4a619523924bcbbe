"""t-SNE: what is apart stays apart, the same seed gives the same picture, and the silhouette is right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from torch.nn.functional import normalize

import polyfed as pf
from polyfed.analysis.embedding import embed, embed_clients, embed_ensemble, separation
from polyfed.analysis.opening import OpenedRun, stage_outputs
from polyfed.core.errors import InputError
from polyfed.models import build


def clouds():
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1], 20)
    return rng.normal(size=(40, 5)) * 0.1 + 50 * groups[:, None], groups


def test_far_clouds_stay_apart():
    features, groups = clouds()
    points = embed(features)
    assert points.shape == (40, 2)
    distances = np.linalg.norm(points[:, None] - points[None], axis=2) + 1e9 * np.eye(40)
    assert (groups[distances.argmin(1)] == groups).all()


def test_the_same_seed_gives_the_same_picture():
    features, _ = clouds()
    assert np.array_equal(embed(features, seed=3), embed(features, seed=3))


def test_silhouette_by_hand():
    # group 0 at 0 and 1, group 1 at 10 and 11: for the point 0, a = 1, b = 10.5, s = 9.5 / 10.5; for 1: 8.5 / 9.5
    values = np.array([[0.0], [1.0], [10.0], [11.0]])
    assert separation(values, np.array([0, 0, 1, 1])) == pytest.approx((9.5 / 10.5 + 8.5 / 9.5) / 2)
    assert separation(values, np.array([0, 1, 0, 1])) < 0
    assert math.isnan(separation(values, np.array([0, 0, 0, 0])))


def test_too_few_rows_are_refused():
    with pytest.raises(InputError, match="at least 4"):
        embed(np.zeros((3, 2)))


@pytest.fixture(scope="module")
def widths():
    """Three clients, two of them with half of the features."""
    clients = pf.split(pf.load("digits", limit=(60, 40)), clients=3, by="iid")
    networks = {0: "mlp:1x8", 1: "mlp:1x4", 2: "mlp:1x4"}
    models = {client: build(name, (1, 8, 8), 10) for client, name in networks.items()}
    return OpenedRun(None, "test", 0, None, clients, models, networks)


def test_features_of_different_sizes_are_filled_up(widths):
    found = embed_clients(widths, samples=12)
    assert len(found["points"]) == 36 and set(found["client"]) == {0, 1, 2}


def test_an_ensemble_is_the_mean_of_logits_and_of_features_of_each_size(widths):
    found = embed_ensemble(widths, samples=20)
    x, y = widths.clients.test.inputs()[:20], widths.clients.test.labels()[:20]
    outputs = [stage_outputs(model, x) for model in widths.models.values()]
    logits = sum(part["logits"] for part in outputs) / 3
    unit = [normalize(part["features"]) for part in outputs]
    features = np.concatenate([((unit[1] + unit[2]) / 2).numpy(), unit[0].numpy()], axis=1)
    assert found["kinds"]["logits"]["silhouette"] == pytest.approx(separation(logits, y), abs=1e-5)
    assert found["kinds"]["features"]["silhouette"] == pytest.approx(separation(features, y), abs=1e-5)
    assert found["label"] == y.tolist()
