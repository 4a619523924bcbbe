"""Every experiment file is valid, and every method in it exists and takes its options."""

from pathlib import Path

import pytest

from polyfed.experiment import experiment, read_experiment

FILES = sorted((Path(__file__).parents[1] / "experiments").rglob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_experiment_file(file):
    import tomllib

    described, used = set(), set()
    for scale in (None, *tomllib.loads(file.read_text()).get("scales", {})):
        told = read_experiment(file, scale=scale)
        for label in told.compare:
            assert told.config(label).label == label
        described |= set(told.methods)
        used |= {*told.compare, told.base.label}
    assert described <= used  # a variant that no scale compares is a slip of the pen


def test_a_method_with_rounds_of_its_own_takes_those():
    told = experiment(method="fedavg", rounds=7)
    assert (told.config().planned_rounds(), told.config("ams").planned_rounds()) == (7, 1)
