"""The command line: what it answers, how it refuses, and how fast it is there."""

import io
import json
import socket
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import polyfed as pf
from polyfed import models
from polyfed.cli import doctor, main
from polyfed.cli.failure import keep
from polyfed.cli.listing import method_entry, method_text, model_entry, model_text
from polyfed.methods import registry
from polyfed.models import build

SMALL = ["--data", "digits", "--limit", "120", "--clients", "3", "--rounds", "2", "--models", "mlp:1x8"]


def polyfed(*arguments, cwd=None, columns=200):
    """Run a command in this process (a process of its own for each would spend its time on importing torch)."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["polyfed", *map(str, arguments)])
        patch.setenv("COLUMNS", str(columns))
        if cwd is not None:
            patch.chdir(cwd)
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def refused(*arguments, says, cwd=None):
    done = polyfed(*arguments, cwd=cwd)
    sentence = " ".join(done.stderr.split())
    assert done.returncode == 2, (done.returncode, sentence, done.stdout)
    assert says in sentence, sentence
    assert "Traceback" not in sentence


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rnu"], "polyfed has no command 'rnu': did you mean 'run'?"),
        (["keys", "inti"], "polyfed keys has no command 'inti': did you mean 'init'?"),
        (["form", "xyz"], "polyfed form has no command 'xyz': it has agree, tell."),
        (["--verson"], "polyfed has no option '--verson': did you mean '--version'?"),
        (["run", "--mehtod", "fedavg"], "polyfed run has no option '--mehtod': did you mean '--method'?"),
        (["run", "--xyz"], "polyfed run has no option '--xyz': see 'polyfed run --help'."),
        (["run", "--rounds"], "polyfed run: the option '--rounds' needs a value: see 'polyfed run --help'."),
        (["run", "a", "b"], "polyfed run: got unexpected extra argument (b): see 'polyfed run --help'."),
        (["report"], "polyfed report needs RUNS: see 'polyfed report --help'."),
        (["export", "a"], "polyfed export needs --out (the file to write): see 'polyfed export --help'."),
        (["join", "--lr", "1"], "polyfed join has no option '--lr': see 'polyfed join --help'."),
        (["join"], "polyfed join needs --server (HOST:PORT of the server): see 'polyfed join --help'."),
    ],
)
def test_wrong_words_are_one_sentence_that_says_what_was_meant(words, says):
    done = polyfed(*words)
    assert (done.returncode, done.stderr.strip()) == (2, f"Error: {says}")


def test_nothing_said_is_a_question_for_help():
    done = polyfed("keys")
    assert "Usage: polyfed keys" in done.stdout + done.stderr and "Error" not in done.stderr


def test_help_does_not_import_torch():
    code = "import sys; from polyfed.cli import app; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_run_prints_a_line_a_round_a_table_and_its_directory(tmp_path):
    done = polyfed("run", "--method", "fedavg", *SMALL, "--out", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert "round   2/2  accuracy" in done.stdout
    assert "mlp:1x8" in done.stdout
    assert str(tmp_path / "a") in done.stdout
    written = {path.name for path in (tmp_path / "a").iterdir()}
    assert {"config.json", "history.jsonl", "result.json", "checkpoint", "models"} <= written
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["method"] == "fedavg"
    assert len(result["accuracy"]["per_client"]) == 3
    assert result["cost"]["bytes_up"] > 0


def test_json_goes_to_the_output_and_progress_does_not():
    done = polyfed("run", "--method", "local", *SMALL, "--json")
    assert json.loads(done.stdout)["cost"]["bytes_up"] == 0
    assert "round" in done.stderr
    assert polyfed("run", "--method", "local", *SMALL, "--json", "--quiet").stderr == ""


def test_the_same_experiment_as_options_and_as_a_file(tmp_path):
    (tmp_path / "e.toml").write_text(
        'method = "fedprox"\ndata = "digits"\nlimit = 120\nclients = 3\nrounds = 2\nmodels = ["mlp:1x8"]\n'
        "[methods.fedprox]\nmu = 0.5\n[scales.longer]\nrounds = 3\n"
    )
    one = json.loads(polyfed("run", tmp_path / "e.toml", "--json", "--quiet").stdout)
    other = json.loads(
        polyfed("run", "--method", "fedprox", *SMALL, "--set", "method.mu=0.5", "--json", "--quiet").stdout
    )
    assert one["accuracy"] == other["accuracy"]
    longer = json.loads(polyfed("run", tmp_path / "e.toml", "--scale", "longer", "--json", "--quiet").stdout)
    assert longer["rounds"] == 3


def test_compare_pairs_methods_by_seed_and_continues_where_it_was(tmp_path):
    arguments = ["compare", "--methods", "fedavg,fedproto", "--seeds", "2", *SMALL, "--out", tmp_path / "c", "--json"]
    first = polyfed(*arguments)
    rows = {row["method"]: row for row in json.loads(first.stdout)}
    assert list(rows) == ["local", "fedavg", "fedproto"]
    assert rows["fedavg"]["gain"] == pytest.approx(np.subtract(rows["fedavg"]["accuracy"], rows["local"]["accuracy"]))
    again = polyfed(*arguments)
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert "round" not in again.stderr  # nothing was run a second time


@pytest.mark.parametrize("listing", ["methods", "models", "data"])
def test_listings(listing):
    rows = json.loads(polyfed(listing, "--json").stdout)
    assert len(rows) >= 7
    done = polyfed(listing)
    assert done.returncode == 0
    names = [str(row["method" if listing == "methods" else "name"]) for row in rows]
    heading = next(line for line in done.stdout.splitlines() if line.strip())
    start = heading.index("method" if listing == "methods" else "name")
    printed = [line[start:].split()[0] for line in done.stdout.splitlines() if line[start:].strip()]
    assert [word for word in printed if word in names] == names


def test_one_method_or_model_in_full():
    done = polyfed("methods", "fedproto")
    assert "the mean feature vector and the number of samples of each class" in done.stdout
    assert "lam = 1.0   (number, at least 0)" in done.stdout
    assert "0 gives local training exactly" in done.stdout
    entry = json.loads(polyfed("methods", "fedproto", "--json").stdout)
    assert [option["option"] for option in entry["options"]] == ["lam", "weighting", "predict_with", "collect"]
    assert "write it as  cnn:16-32-64" in polyfed("models", "cnn").stdout
    refused("methods", "fedprot", says="Unknown method 'fedprot': did you mean 'fedproto'?")
    refused("models", "cnm", says="Unknown model 'cnm': did you mean 'cnn'?")


def test_the_pages_of_methods_exist():
    for name in registry():
        page = method_entry(name)["page"]
        assert page is None or (Path(__file__).parents[1] / page).is_file(), name


@pytest.mark.parametrize("listing", ["methods", "models", "data"])
def test_tables_fit_a_narrow_terminal(listing):
    lines = polyfed(listing, columns=80).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert listing != "methods" or len(lines) < len(registry()) + 8  # a line for each
    if listing == "models":  # an example can be copied: it is never broken
        assert all(any(f" {entry['example']} " in line for line in lines) for entry in models.describe())


def test_every_entry_in_full_fits_a_narrow_terminal_and_explains_each_option():
    for name in registry():
        entry = method_entry(name)
        text = method_text(entry, 80)
        assert max(map(len, text.splitlines())) <= 80, name
        for option in entry["options"]:
            assert option["meaning"] and f"  {option['option']} = {option['default']}   (" in text, (name, option)
    for name in models.names():
        entry = model_entry(name)
        assert max(map(len, model_text(entry, 80).splitlines())) <= 80, name
        assert all(entry["options"].values()), name


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--method", "fedavgg"], "Unknown method 'fedavgg': did you mean 'fedavg'?"),
        (["--models", "mpl:2"], "Unknown model 'mpl': did you mean 'mlp'?"),
        (["--data", "digitz"], "digitz"),
        (["--set", "method.muu=1"], "Unknown option of method fedavg 'muu'"),
        (["--set", "rouns=3"], "Unknown option 'rouns': did you mean 'rounds'?"),
        (["--set", "rounds=many"], "rounds must be a whole number, got 'many'"),
        (["--set", "rounds"], "--set takes key=value"),
        (["--partition", "dirichlet:0"], "alpha"),
        (["--partition", "dirichlet:-1"], "alpha"),
        (["--partition", "dirrichlet:1"], "did you mean 'dirichlet'?"),
        (["--clients", "5000"], "5000"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--lr", "0"], "lr must be above 0, got 0"),
        (["--optimizer", "sdg"], "optimizer is 'sgd', 'adam' or 'adamw', not 'sdg'"),
        (["--participation", "1.5"], "share must be at most 1, got 1.5"),
        (["--evaluate", "sometimes"], "evaluate is 'every=N' or 'end'"),
        (["--method", "fedmd"], "fedmd needs public data at all parties, but there is none: add public data"),
        (
            ["--method", "fedproto", "--models", "mlp:1x8,mlp:1x16"],
            "client 0 has 8 features and client 1 has 16: set feature_dim",
        ),
        (["--set", "method.view=full", "--models", "mlp:1,mlp:2"], "View 'full' needs one architecture"),
        (
            ["--method", "heterofl", "--models", "mlp:1x8,cnn:4"],
            "heterofl needs architectures of one family (layers with common names), but client 0 has mlp:1x8",
        ),
        (["--method", "no.such.module:Class"], "Cannot import method"),
        (["--method", "json:JSONDecoder"], "is not a polyfed Method"),
        (["nowhere.toml"], "Cannot read the experiment file nowhere.toml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_in_one_sentence(arguments, says, tmp_path):
    refused("run", *SMALL, *arguments, "--out", tmp_path / "run", says=says, cwd=tmp_path)
    assert not (tmp_path / "run").exists()  # refused before anything was written


def test_bad_files_are_refused(tmp_path):
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    refused("run", tmp_path / "bad.toml", says="is not valid TOML")
    (tmp_path / "key.toml").write_text("epoch = 3")
    refused("run", tmp_path / "key.toml", says="'epoch': did you mean 'epochs'?")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and then nothing")
    refused("run", "--data", tmp_path / "cut.parquet", says="cut.parquet")


def test_a_run_directory_is_never_overwritten_and_an_old_one_is_refused(tmp_path):
    out = tmp_path / "a"
    assert polyfed("run", "--method", "local", *SMALL, "--out", out, "--quiet").returncode == 0
    before = (out / "result.json").read_bytes()
    refused("run", "--method", "local", *SMALL, "--out", out, says="already exists and is not empty")
    assert (out / "result.json").read_bytes() == before
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "format": 0}))
    refused("resume", out, says="another version of polyfed")
    refused("resume", tmp_path / "nothing", says="is not a run directory")


def test_an_output_that_cannot_be_written_is_said_clearly(tmp_path):
    (tmp_path / "file").write_text("")
    done = polyfed("run", "--method", "local", *SMALL, "--out", tmp_path / "file" / "run")
    assert done.returncode in (1, 2)
    assert "Cannot write" in done.stderr
    assert "Traceback" not in done.stderr


def test_training_that_breaks_down_names_client_round_and_batch():
    done = polyfed("run", "--method", "local", *SMALL, "--lr", "1e30")
    assert done.returncode == 1
    sentence = " ".join(done.stderr.split())
    assert "The loss of client" in sentence and "in round" in sentence and "smaller lr" in sentence


def test_fuse_writes_a_model_that_can_be_loaded_again(tmp_path):
    from polyfed.fusion import load_fused

    run = ["--method", "local", *SMALL, "--partition", "labels:3-6", "--out", tmp_path / "run", "--quiet"]
    assert polyfed("run", *run).returncode == 0
    states = sorted((tmp_path / "run" / "models").glob("client-*.safetensors"))
    done = polyfed("fuse", *states, "--models", "mlp:1x8", "--out", tmp_path / "fused", "--method", "ams-top1")
    assert done.returncode == 0, done.stderr
    assert "ams-top1 of 3 networks" in done.stdout
    x = torch.randn(20, *pf.load("digits").input_shape)
    networks = [build("mlp:1x8", tuple(x.shape[1:]), 10) for _ in states]
    for network, path in zip(networks, states, strict=True):
        network.load_state_dict(load_file(path))
    with torch.no_grad():
        assert torch.equal(load_fused(tmp_path / "fused")(x), pf.fuse(networks, "ams-top1")(x))
    refused("fuse", *states, "--models", "mlp:1x8", "--out", tmp_path / "b", "--method", "amstop1", says="did you mean")


def test_methods_that_apply_to_an_experiment_and_why_others_do_not(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text('data = "digits"\nlimit = 60\nclients = 3\nmodels = ["mlp:1x8", "mlp:1x8@0.5"]\n')
    rows = {row["method"]: row for row in json.loads(polyfed("methods", "--for", str(file), "--json").stdout)}
    assert rows["heterofl"]["applies"] and rows["local"]["applies"] and not rows["fedmd"]["applies"]
    assert "public data at all parties, but there is none" in rows["fedmd"]["needs"]
    assert "8 features and client 1 has 4" in rows["fedproto"]["needs"]
    text = " ".join(polyfed("methods", "--for", str(file)).stdout.split())
    assert "methods apply to" in text and "The others need:" in text


def test_what_a_run_would_refuse_does_not_apply(tmp_path):
    file = tmp_path / "wrong.toml"
    told = 'data = "digits"\nlimit = 80\nclients = 4\nmodels = ["mlp:1x8", "mlp:2x8"]\npublic = 20\nmomentum = 0.9\n'
    file.write_text(f'{told}[methods.scaffold]\noption = "II"\n[methods.takfl]\nlam = [1.0, 2.0, 3.0]\n')
    rows = {row["method"]: row for row in json.loads(polyfed("methods", "--for", str(file), "--json").stdout)}
    assert rows["scaffold"]["needs"].startswith("option 'II' needs SGD without momentum")
    assert rows["takfl"]["needs"].startswith("lam has 3 numbers, but there are 2 architectures")
    assert rows["fedavg"]["applies"]


def test_a_model_that_nobody_knows_is_said_once_and_not_for_every_method(tmp_path):
    (tmp_path / "own.toml").write_text('data = "digits"\nlimit = 60\nclients = 3\nmodels = ["no:1"]\n')
    refused("methods", "--for", str(tmp_path / "own.toml"), says="Unknown model 'no'")


def test_one_method_is_told_alone_whether_it_applies_to_an_experiment(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text('data = "digits"\nlimit = 60\nclients = 3\nmodels = ["mlp:1x8", "mlp:1x8@0.5"]\n')
    row = json.loads(polyfed("methods", "fedmd", "--for", str(file), "--json").stdout)
    assert row["method"] == "fedmd" and not row["applies"] and "public data" in row["needs"]
    text = " ".join(polyfed("methods", "fedmd", "--for", str(file)).stdout.split())
    assert text.startswith("fedmd does not apply to") and "public data" in text and "heterofl" not in text
    text = " ".join(polyfed("methods", "heterofl", "--for", str(file)).stdout.split())
    assert text.startswith("heterofl applies to") and "fedmd" not in text
    refused("methods", "heterofll", "--for", str(file), says="did you mean 'heterofl'?")


def test_data_that_is_not_there_is_said_once_and_not_for_every_method(tmp_path):
    (tmp_path / "own.toml").write_text(f'data = "{tmp_path / "nowhere.csv"}"\n')
    refused("methods", "--for", str(tmp_path / "own.toml"), says="nowhere.csv")


def test_an_error_that_nobody_foresaw_is_a_sentence_with_a_log_file(tmp_path, monkeypatch):
    def broken(*arguments):
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("polyfed.api.execute", lambda *a, **k: broken())
    done = polyfed("run", "--method", "local", *SMALL)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("Error: ZeroDivisionError: division by zero (test_cli.py, line ")
    (log,) = (tmp_path / "state" / "polyfed").iterdir()
    assert str(log) in done.stderr
    text = log.read_text()
    assert "Traceback" in text and "in broken" in text and "polyfed run --method local" in text and "torch" in text


def test_a_log_goes_elsewhere_where_the_home_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    assert keep(ValueError("x")).parent.parent == tmp_path / "temporary"


def test_doctor_tells_what_is_here_and_what_to_do(tmp_path, monkeypatch):
    rows = {row["subject"]: row for row in json.loads(polyfed("doctor", "--json").stdout)}
    assert f"torch {torch.__version__}" in rows["versions"]["found"] and "digits" in rows["data here"]["found"]
    assert rows["extra plots"]["state"] in ("ok", "note")
    monkeypatch.setenv("POLYFED_DATA", str(tmp_path / "nowhere"))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but nobody listens
        done = polyfed("doctor", "--server", f"127.0.0.1:{closed.getsockname()[1]}")
    assert done.returncode == 1
    assert "nowhere is no folder" in done.stdout and "nothing answers at 127.0.0.1" in done.stdout
    refused("doctor", "--server", "nowhere", says="--server takes HOST:PORT")


def test_doctor_sees_a_server_and_missing_extras(monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        found = {one.subject: one for one in doctor.examine(f"127.0.0.1:{server.getsockname()[1]}")}
    assert found["server"].state == "ok"
    monkeypatch.setattr(doctor, "_installed", lambda name: name != "matplotlib")
    found = {one.subject: one for one in doctor.examine()}
    assert found["extra plots"].advice == "pip install 'polyfed[plots]'"
    assert found["extra mlflow"].state == "ok"
    assert ("python" in found) == (sys.version_info[:2] != doctor.TRIED)
    monkeypatch.setattr(doctor, "TRIED", (2, 7))
    monkeypatch.setattr(doctor, "requires", lambda name: ["numpy>=99", "torch>=1", "none-such>=1"])
    found = {one.subject: one for one in doctor.examine()}
    assert found["dependencies"].found == f"numpy {np.__version__} (wants >=99); none-such is missing (wants >=1)"
    assert "tried with Python 2.7 only" in found["python"].found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_for_shells(shell, monkeypatch):
    monkeypatch.setattr("shellingham.detect_shell", lambda *a, **k: (shell, shell))
    shown = polyfed("--show-completion")
    assert shown.returncode == 0 and "_POLYFED_COMPLETE" in shown.stdout


def test_a_shell_gets_the_commands_and_options_that_begin_so(monkeypatch):
    monkeypatch.setenv("_POLYFED_COMPLETE", "complete_bash")
    for typed, expected in (("polyfed comp", ["compare"]), ("polyfed compare --swe", ["--sweep"])):
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
        assert polyfed().stdout.split() == expected


def test_a_warning_is_a_sentence_without_a_line_of_code(tmp_path):
    """In a process of its own: pytest collects warnings itself."""
    torch.save(build("mlp:1x8", (1, 8, 8), 3).state_dict(), tmp_path / "three.pt")
    words = ["run", "--method", "local", "--data", "digits", "--limit", "60", "--clients", "2", "--rounds", "1"]
    words += ["--models", "mlp:1x8=three.pt", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "polyfed.cli", *words], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    said = " ".join(done.stderr.split())
    assert done.returncode == 0 and "Warning: The last layer of three.pt, read as mlp:1x8, has 3 outputs" in said
    assert "UserWarning" not in said and ".py:" not in said
