"""Every method with several labels and with values: it learns them on all engines, or says before training that not."""

import math

import numpy as np
import pytest
from tests.contract.table import everyday

import polyfed as pf
from polyfed.core.errors import InputError
from polyfed.data import Clients

OUTPUTS = {"regression": 2, "multilabel": 3}


def problem(task, public):
    """Images whose brightness at some places is what is to be predicted."""
    rng = np.random.default_rng(0)

    def draw(n):
        x = rng.normal(size=(n, 1, 8, 8)).astype(np.float32)
        y = x[:, 0, 0, : OUTPUTS[task]] + x[:, 0, 1, : OUTPUTS[task]]
        return x, 50 + 10 * y if task == "regression" else (y > 0).astype(int)

    parts = [draw(14 + 3 * k) for k in range(3)]
    return Clients.from_parts(parts, test=draw(30), own_test="own", public=draw(24) if public else None, task=task)


@everyday(few=True)
@pytest.mark.parametrize("task", OUTPUTS)
def test_other_tasks(case, task):
    clients = problem(task, case.public)
    method = case.setting.method

    def run(engine):
        training = pf.Training(batch_size=8, lr=0.02)
        return pf.run(
            method, clients, case.models, 1, training, feature_dim=case.feature_dim, engine=engine, progress=False
        )

    if "classes" in method.requirements():
        with pytest.raises(InputError, match=rf"needs classes .*but the task is {task}\. Methods that would work: "):
            run("sequential")
        return
    one, other = run("sequential").accuracy(), run("batched").accuracy()
    assert len(one["per_client"]) == 3 and all(map(math.isfinite, one["per_client"]))
    assert one["per_client"] == pytest.approx(other["per_client"], abs=0.03)
    personal = one.get("personal") or one["own"]["personal"]
    assert personal["clients"] == [0, 1, 2]
