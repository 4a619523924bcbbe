"""One configuration: what it takes and refuses, that it survives every form, and that no run is taken for another."""

import inspect
import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields, replace

import pytest

import polyfed as pf
from polyfed import methods
from polyfed.api import described, execute
from polyfed.command import command, method_words
from polyfed.compare import compare
from polyfed.config import SECTIONS, Config, option_names, short_names
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.core.fields import in_words, meanings, types_of
from polyfed.core.lock import Lock
from polyfed.experiment import experiment, read_experiment
from polyfed.stored import differences
from test_cli import SMALL, polyfed, refused

# One value for every setting that is not its default.
OTHER = {
    "rounds": 3,
    "seed": 7,
    "data.source": "fashion_mnist",
    "data.test": "test.parquet",
    "data.path": "somewhere",
    "data.name": "mine",
    "data.limit": (30, 20),
    "data.resize": (14, 14),
    "data.inputs": ("age", "weight"),
    "data.label": ("kind", "grade"),
    "data.columns": ("clinic", "ward"),
    "data.drop": ("name",),
    "data.kind": "table",
    "data.tokenizer": "words.json",
    "data.length": 40,
    "data.num_classes": 3,
    "data.class_names": ("a", "b", "c"),
    "data.normalize": False,
    "data.clients": 4,
    "data.partition": "labels:3-6",
    "data.validation": 0.1,
    "data.public": "cifar100:50",
    "data.min_size": 2,
    "data.split_seed": 3,
    "data.limit_seed": 4,
    "data.task": "regression",
    "data.own_test": 0.25,
    "data.scaling": "own",
    "models.names": ("mlp:1x8", "cnn:16-32,bn"),
    "models.feature_dim": 16,
    "models.feature_adapter": "avgpool",
    "training.epochs": 2,
    "training.batch_size": 8,
    "training.optimizer": "adam",
    "training.lr": 0.001,
    "training.momentum": 0.9,
    "training.weight_decay": 1e-4,
    "training.clip": 1.5,
    "training.decay": 0.9,
    "training.decay_every": 2,
    "training.round_decay": 0.99,
    "training.schedule": "cosine",
    "training.milestones": (2, 3),
    "training.milestone_decay": 0.5,
    "training.warm_up": 2,
    "training.augment": "crop:2+flip",
    "participation.share": 0.5,
    "participation.dropout": 0.25,
    "participation.who": "weakest",
    "evaluation.every": 0,
    "evaluation.clients": 2,
    "evaluation.samples": 50,
    "evaluation.metrics": ("auroc", "macro_f1"),
    "evaluation.patience": 3,
    "execution.engine": "batched",
    "execution.workers": 3,
    "execution.device": "auto",
    "execution.checkpoint_seconds": 0.5,
    "trust.robust": "trimmed:0.1",
    "trust.attack": "signflip:0.3",
    "privacy.epsilon": 4.0,
    "privacy.delta": 1e-6,
    "privacy.noise_multiplier": 1.5,
    "privacy.max_norm": 0.5,
    "privacy.clipping": "layer",
    "privacy.unit": "client",
    "privacy.release_norm": 2.0,
    "privacy.release_share": 0.25,
}


def changed(config, full, value):
    section, dot, name = full.partition(".")
    return replace(config, **{section: replace(getattr(config, section), **{name: value}) if dot else value})


def plain():
    return Config(pf.FedAvg(), "fedavg")


def parsed(line):
    """Read a printed command as the command line would."""
    import shlex

    words = shlex.split(line)
    assert words[:2] == ["polyfed", "run"]
    given, settings = {}, []
    for flag, value in zip(words[2::2], words[3::2], strict=True):
        if flag == "--set":
            settings.append(value)
        else:
            given[flag.removeprefix("--").replace("-", "_")] = value
    assert set(given) <= {*option_names(), "method"}
    return read_experiment(None, given, settings).config()


def test_every_setting_has_one_short_name_a_type_a_meaning_and_an_example_here():
    full = list(short_names().values())
    assert len(full) == len(set(full)) == len(short_names())
    assert sorted(full) == sorted(OTHER)
    assert set(option_names()) <= set(short_names())
    for kind in SECTIONS.values():
        for item in fields(kind):
            assert in_words(types_of(kind)[item.name]) and meanings(kind)[item.name], item.name


@pytest.mark.parametrize("full", OTHER)
def test_a_setting_survives_the_file_the_command_and_is_told_apart(full):
    config = changed(plain(), full, OTHER[full])
    assert config != plain()
    assert Config.load(json.loads(json.dumps(config.dump()))) == config
    assert parsed(command(config)) == config
    told = differences(plain(), config)
    expected = [] if full in ("execution.workers", "execution.checkpoint_seconds") else [full]
    assert [line.split(" was ")[0] for line in told] == expected


def test_all_settings_at_once():
    config = plain()
    for full, value in OTHER.items():
        config = changed(config, full, value)
    assert parsed(command(config)) == Config.load(config.dump()) == config


@pytest.mark.parametrize("name", sorted(methods.registry()))
def test_methods_survive_the_file_and_every_option_is_explained(name):
    kind = methods.registry()[name]
    config = Config(kind(), name)
    assert Config.load(json.loads(json.dumps(config.dump()))) == config
    for item in fields(kind):
        assert in_words(types_of(kind)[item.name]) and item.name in meanings(kind), f"{name}.{item.name} has no meaning"


def test_options_of_a_method_survive_the_command_none_and_words_included():
    method = pf.HeteroFL(clip=None, mask=False, statistics="public", global_rate=0.5)
    words = method_words(Config(method, "heterofl"), "method")
    assert "method.clip=none" in words
    assert parsed(command(Config(method, "heterofl"))).method == method
    fedfd = pf.FedFD(distill="none")  # here "none" is a word and not nothing
    assert parsed(command(Config(fedfd, "fedfd"))).method == fedfd


def test_a_file_may_use_short_names_full_names_and_tables(tmp_path):
    (tmp_path / "a.toml").write_text('data = "digits"\nlr = 0.2\nclients = 3\n')
    (tmp_path / "b.toml").write_text('[data]\nsource = "digits"\nclients = 3\n[training]\nlr = 0.2\n')
    (tmp_path / "c.toml").write_text('"training.lr" = 0.2\n"data.clients" = 3\n')
    configs = [read_experiment(tmp_path / f"{name}.toml").config() for name in "abc"]
    assert configs[0] == configs[1] == configs[2]
    over = read_experiment(tmp_path / "b.toml", {"lr": "0.3"}, ["data.clients=4"]).config()  # options win over tables
    assert (over.training.lr, over.data.clients) == (0.3, 4)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: pf.Training(epochs=1.5), "training: epochs must be a whole number, got 1.5."),
        (lambda: pf.Training(epochs=True), "epochs must be a whole number"),
        (lambda: pf.Training(lr=float("nan")), "training: lr must be a finite number, got nan."),
        (lambda: pf.Training(decay_every=0), "training: decay_every must be at least 1, got 0."),
        (lambda: pf.FedProto(lam=-1), "fedproto: lam must not be negative, got -1."),
        (lambda: pf.FedProto(lam="abc"), "fedproto: lam must be a number, got 'abc'."),
        (lambda: pf.FedProto(lam=float("inf")), "fedproto: lam must be a finite number, got inf."),
        (lambda: pf.FedIN(use_in="perhaps"), "fedin: use_in is true or false, got 'perhaps'."),
        (lambda: pf.FedIN(combine="both"), "fedin: combine is 'simple', 'analytic' or 'none', not 'both'."),
        (lambda: pf.Participation(1.5), "participation: share must be at most 1, got 1.5."),
        (lambda: experiment(lr="fast"), "training: lr must be a number, got 'fast'."),
        (lambda: experiment(epoch=3), "Unknown option 'epoch': did you mean 'epochs'?"),
        (lambda: experiment(training={"epoch": 3}), "Unknown option of training 'epoch': did you mean 'epochs'?"),
        (lambda: experiment(methods={"fedprox": 3}), "'methods' is a table of tables"),
        (lambda: experiment(seeds=0), "experiment: seeds must be at least 1, got 0."),
    ],
)
def test_impossible_values_are_refused_when_the_object_is_made(make, says):
    with pytest.raises(InputError) as refusal:
        make()
    assert says in str(refusal.value)


def test_words_for_truth_are_understood():
    assert pf.FedIN(use_in="no").use_in is False
    assert read_experiment(None, {"method": "fedin"}, ["method.use_in=no"]).config().method.use_in is False


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["fedprot.lam=5"], "Unknown owner of an option 'fedprot': did you mean 'fedproto'?"),
        (["fedprox.mu=5"], "Unknown owner of an option 'fedprox'"),  # it is not among those that run
        (["method.lam=abc"], "lam must be a number"),
        (["decay_every=0"], "decay_every must be at least 1"),
        (["epochs=1.5"], "epochs must be a whole number"),
        (["lr=nan"], "lr must be a finite number"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings, says):
    refused("run", "--method", "fedproto", *SMALL, *(word for s in settings for word in ("--set", s)), says=says)


OWN_METHOD = """
from dataclasses import dataclass
from typing import ClassVar
import polyfed as pf

@dataclass(frozen=True)
class Mine(pf.FedProto):
    name: ClassVar[str] = "mine"
"""


def test_a_method_of_a_module_takes_options_and_is_resumed_from_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "my_module_of_methods.py").write_text(OWN_METHOD)
    monkeypatch.syspath_prepend(tmp_path)
    name = "my_module_of_methods:Mine"
    done = polyfed("run", "--method", name, *SMALL, "--set", f"{name}.lam=2", "--out", tmp_path / "a", "--quiet")
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["method"] == {
        "name": name,
        "lam": 2.0,
        "weighting": "samples",
        "predict_with": "head",
        "collect": "after",
    }
    before = json.loads((tmp_path / "a" / "result.json").read_text())
    (tmp_path / "a" / "result.json").unlink()
    assert polyfed("resume", tmp_path / "a", "--quiet").returncode == 0
    assert json.loads((tmp_path / "a" / "result.json").read_text())["accuracy"] == before["accuracy"]


def test_seeds_and_version():
    refused("compare", *SMALL, "--methods", "local", "--seeds", "0", says="seeds must be at least 1, got 0")
    done = polyfed("--version")
    assert (done.returncode, done.stdout.split()) == (0, ["polyfed", pf.__version__])


def test_the_arguments_of_run_have_the_defaults_of_the_configuration():
    names = short_names()
    base = plain()
    for name, parameter in inspect.signature(pf.run).parameters.items():
        if name in names and name not in ("clients", "models", "training"):
            section, dot, leaf = names[name].partition(".")
            usual = getattr(getattr(base, section), leaf) if dot else getattr(base, section)
            assert parameter.default == usual, name


# --- no run is mistaken for another ---


COMPARISON = ["compare", "--methods", "fedavg", "--seeds", "1", *SMALL, "--json", "--quiet"]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "cmp"
    assert polyfed(*COMPARISON, "--out", out).returncode == 0
    return out


@pytest.fixture
def finished(comparison, tmp_path):
    out = tmp_path / "cmp"
    shutil.copytree(comparison, out)
    return out, [*COMPARISON, "--out", out]


@pytest.mark.xdist_group("finished comparison")
@pytest.mark.parametrize(
    ("other", "named"),
    [
        (["--lr", "0.2"], "training.lr was 0.05, now 0.2"),
        (["--epochs", "2"], "training.epochs was 1, now 2"),
        (["--models", "mlp:2x8"], "models.names was ['mlp:1x8'], now ['mlp:2x8']"),
        (["--rounds", "3"], "rounds was 2, now 3"),
        (["--set", "fedavg.weighting=uniform"], "method.weighting was 'samples', now 'uniform'"),
        (["--feature-dim", "4"], "models.feature_dim was None, now 4"),
        (["--engine", "sequential"], "execution.engine was 'auto', now 'sequential'"),
        (["--partition", "iid"], "data.partition was 'dirichlet:0.5', now 'iid'"),
    ],
)
def test_a_comparison_with_other_settings_is_refused_and_changes_nothing(finished, other, named):
    out, arguments = finished
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    refused(*arguments, *other, says=named)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.xdist_group("finished comparison")
def test_a_comparison_with_other_workers_is_the_same_one(finished):
    out, arguments = finished
    before = (out / "fedavg" / "seed-0" / "result.json").read_bytes()
    assert polyfed(*arguments, "--workers", "1").returncode == 0
    assert (out / "fedavg" / "seed-0" / "result.json").read_bytes() == before


def test_a_resume_with_another_feature_size_is_a_sentence(tmp_path):
    clients = pf.split("digits", clients=2, by="iid", seed=0)
    pf.run("fedavg", clients, ["mlp:1x8"], rounds=1, out=tmp_path / "a")
    with pytest.raises(RunDirectoryError, match=r"models\.feature_dim was None, now 4"):
        pf.run("fedavg", clients, ["mlp:1x8"], rounds=1, out=tmp_path / "a", resume=True, feature_dim=4)
    with pytest.raises(RunDirectoryError, match=r"data\.clients was 2, now 3"):
        pf.run("fedavg", pf.split("digits", clients=3, by="iid"), ["mlp:1x8"], 1, out=tmp_path / "a", resume=True)


def factory(input_shape, num_classes):
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


def test_models_of_a_script_are_told_apart_in_any_process():
    from torch import nn

    assert described(factory) == f"{__name__}:factory"  # no address in memory: another process has another one
    assert described(nn.Linear(2, 3)) == described(nn.Linear(2, 3)) != described(nn.Linear(2, 4))


@pytest.mark.parametrize(("activation", "width"), [("Tanh", 16), ("ReLU", 32)])
def test_a_resume_with_another_network_of_the_same_name_is_refused(tmp_path, activation, width):
    from torch import nn

    clients = pf.split("digits", clients=2, by="iid", seed=0)

    def maker(activation, width):
        def build():
            inner = getattr(nn, activation)()
            return nn.Sequential(nn.Flatten(), nn.Linear(64, width), inner, nn.Linear(width, 10))

        return build

    pf.run("fedavg", clients, maker("ReLU", 16), rounds=1, out=tmp_path / "a")
    pf.run("fedavg", clients, maker("ReLU", 16), rounds=1, out=tmp_path / "a", resume=True)
    with pytest.raises(RunDirectoryError, match="networks was"):
        pf.run("fedavg", clients, maker(activation, width), rounds=1, out=tmp_path / "a", resume=True)


def test_a_run_from_python_and_from_the_command_line_are_one_configuration(tmp_path):
    assert polyfed("run", "--method", "local", *SMALL, "--out", tmp_path / "a", "--quiet").returncode == 0
    clients = pf.split(pf.load("digits", limit=120), clients=3, by="dirichlet:0.5")
    result = pf.run("local", clients, ["mlp:1x8"], rounds=2)
    written = json.loads((tmp_path / "a" / "config.json").read_text())
    del written["format"], written["checksum"]
    assert written.pop("groups") == {"mlp:1x8": "plain"}  # what the engine chose, not what was asked for
    assert written == result.config


# --- one process at a time ---


def test_a_directory_in_use_is_refused_with_the_process_that_holds_it(finished, tmp_path):
    out, arguments = finished
    holder = (
        "import sys; from pathlib import Path; from polyfed.core.lock import Lock; "
        f"Lock(Path({str(out)!r})).acquire(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline().strip() == "held"
        refused(*arguments, says=f"{out} is in use by process {process.pid}")
        process.kill()  # however it ends, the lock ends with it
    assert polyfed(*arguments).returncode == 0
    assert not (out / ".lock").exists()


def test_a_run_that_is_going_on_is_neither_run_nor_resumed_by_another(tmp_path):
    clients = pf.split("digits", clients=2, by="iid", seed=0)
    found = []

    def meanwhile(line):
        for resume in (False, True):
            with pytest.raises(RunDirectoryError) as refusal:
                pf.run("local", clients, ["mlp:1x8"], rounds=2, out=tmp_path / "a", resume=resume)
            found.append(str(refusal.value))

    pf.run("local", clients, ["mlp:1x8"], rounds=2, out=tmp_path / "a", observers=[meanwhile])
    assert "already exists" in found[0]
    assert f"is in use by process {os.getpid()}" in found[1]
    pf.run("local", clients, ["mlp:1x8"], rounds=2, out=tmp_path / "a", resume=True)  # free again


def test_a_failed_run_gives_its_directory_back(tmp_path):
    config = experiment(method="local", limit=60, clients=2, models=["mlp:1x8"], rounds=2).config()

    def fail(line):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError):
        execute(config, out=tmp_path / "a", observers=[fail])
    Lock(tmp_path / "a").acquire().release()


def test_what_a_killed_start_leaves_behind_is_no_run(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".lock").write_text("4711\n")
    (tmp_path / "a" / ".config.json.x1y2").write_text("{")
    config = experiment(method="local", limit=60, clients=2, models=["mlp:1x8"], rounds=1).config()
    execute(config, out=tmp_path / "a")
    assert (tmp_path / "a" / "result.json").is_file()


def test_compare_refuses_before_anything_trains(tmp_path):
    told = experiment(limit=60, clients=2, models=["mlp:1x8"], rounds=1)
    compare(told, ["local"], 1, tmp_path / "c")
    started = []
    other = experiment(limit=60, clients=2, models=["mlp:1x8"], rounds=1, lr=0.3)
    with pytest.raises(RunDirectoryError, match=r"training\.lr was 0\.05, now 0\.3"):
        compare(other, ["fedavg", "local"], 1, tmp_path / "c", started=lambda config, _: started.append(config) or ())
    assert not started
