"""Every experiment file is valid, and every method in it exists and takes its options."""

from pathlib import Path

import pytest

from polyfed import methods
from polyfed.compare import rounds_of
from polyfed.experiment import Experiment, read_experiment

FILES = sorted((Path(__file__).parents[1] / "experiments").rglob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_experiment_file(file):
    import tomllib

    described, used = set(), set()
    for scale in (None, *tomllib.loads(file.read_text()).get("scales", {})):
        experiment = read_experiment(file, scale=scale)
        for label in experiment.compare:
            name, options = experiment.method_options(label)
            methods.make(name, options)
        described |= set(experiment.methods)
        used |= {*experiment.compare, experiment.method}
    assert described <= used  # a variant that no scale compares is a slip of the pen


def test_a_method_with_rounds_of_its_own_takes_those():
    experiment = Experiment(method="fedavg", rounds=7)
    assert (rounds_of(experiment), rounds_of(experiment, "ams")) == (7, 1)
