"""What an engineer at a site gets wrong: a sentence and an exit code at once, never a traceback, never a silence."""

from __future__ import annotations

import datetime
import http.server
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import faulty
import httpx
import numpy as np
import pandas
import pytest
from processes import FLOWER
from typer.testing import CliRunner

import polyfed as pf
from polyfed.build import make_blueprint
from polyfed.cli import app
from polyfed.core.errors import InputError, MessageError
from polyfed.flower import keys as keys_module
from polyfed.flower import plain, reach
from polyfed.flower.agree import agree
from polyfed.flower.child import LinkError, free_port
from polyfed.flower.describe import introduce
from polyfed.flower.keys import create_keys, read_server_keys, read_site_keys
from polyfed.flower.registration import Registration
from polyfed.flower.site import Site
from polyfed.flower.sitedata import as_site_data
from polyfed.methods import make

EXAMPLE = Path(__file__).parents[2] / "examples" / "hospital"
SITE = ["join", "--insecure", "--name", "north", "--server", "127.0.0.1:9", "--wait", "0"]
SERVER = ["serve", "--method", "fedavg", "--insecure", "--sites", "north", "--out", "run", "--wait", "0"]


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Run a command in an empty folder and return it with its words in one line."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        result = CliRunner().invoke(app, list(words))
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, " ".join(result.output.split())

    return run


@pytest.mark.parametrize(
    "setting", ["limit=50", "data.validation=0.1", "workers=2", "models=mlp:3", "evaluate_samples=5"]
)
def test_the_server_refuses_settings_that_are_the_sites_own(call, setting):
    code, words = call(*SERVER, "--set", setting)
    assert code == 2 and "is not for the server" in words and not Path("run").exists()


# --- the classes ---


def head_of(data):
    data = as_site_data(data)
    method = make("fedavg", {})
    blueprint = make_blueprint("mlp:1x8", "mlp:1x8", data.input_shape, data.num_classes, 0, None, "linear")
    return introduce(method, "mlp:1x8", data, blueprint)[0]


def test_other_class_names_are_refused_with_both_lists():
    with pytest.raises(InputError) as caught:
        agree({"north": head_of(faulty.benign_malign()), "south": head_of(faulty.malign_unclear())}, None, False)
    assert "Site south has the classes [malign, unclear], but site north has [benign, malign]" in str(caught.value)
    agree({"north": head_of(faulty.benign_malign()), "south": head_of(faulty.benign_malign())}, None, False)


def test_the_same_classes_in_another_order_are_refused():
    with pytest.raises(InputError, match="put them in the order of site north"):
        agree({"north": head_of(faulty.benign_malign()), "south": head_of(faulty.swapped())}, None, False)


def test_classes_without_names_are_numbers_and_do_not_mix_with_names():
    agree({"north": head_of(faulty.numbers()), "south": head_of(faulty.table([0, 1]))}, None, False)
    with pytest.raises(InputError, match=r"\[0, 1\], but site north has \[benign, malign\]"):
        agree({"north": head_of(faulty.benign_malign()), "south": head_of(faulty.numbers())}, None, False)


def test_labels_in_words_are_numbered_by_the_class_names_in_every_part():
    data = as_site_data(faulty.table(["b", "a"], class_names=["b", "a"], validation=faulty.table(["a", "b"])["test"]))
    assert data.class_names == ("b", "a")
    assert data.train.labels().tolist() == [0, 1] * 10 and data.validation.labels().tolist() == [1, 0] * 5


def test_a_site_that_comes_back_with_other_classes_does_no_work(tmp_path):
    site = Site("north", "mlp:1x8", as_site_data(faulty.swapped()), tmp_path, say=lambda text: None)
    answer, _ = site.answer({"kind": "work", "run": {"class_names": ["benign", "malign"]}}, b"")
    assert answer["error"] == site.refused
    assert "has the classes [malign, benign], but this federation agreed on [benign, malign]" in site.refused


@pytest.mark.parametrize("head", [{"name": "north"}, {"name": "north", "class_names": 3, "num_classes": 2}])
def test_an_introduction_of_another_form_is_refused_by_name(head):
    registration = Registration(None, {}, ["north"], print, lambda heads: agree(heads, None, False))
    with pytest.raises(MessageError, match="Site north cannot take part: its introduction is not credible"):
        registration._check({}, "north", head)


def test_a_site_with_the_keys_of_another_is_refused():
    with pytest.raises(MessageError, match="Site north calls itself 'south': it has the wrong keys"):
        Registration(None, {}, ["north"], print)._check({}, "north", {"name": "south"})


# --- what a site is started with ---


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("mlp:1x8", "faulty:no_file", "--data faulty:no_file failed with FileNotFoundError"),
        ("mlp:1x8", "faulty:needs_more", "missing 1 required positional argument: 'folder'"),
        ("mlp:1x8", "faulty:nothing", "The --data function returned a NoneType"),
        ("mlp:1x8", "faulty:absent", "module 'faulty' has no attribute 'absent'"),
        ("mlp:1x8", "absent:load", "No module named 'absent'"),
        ("mlp:1x8", "faulty:labels_from_one", "training labels from 0 to 1, but num_classes is 1"),
        ("mlp:1x8", "faulty:too_few_names", "1 class names (benign), but num_classes is 2"),
        ("mlp:1x8", "scans/missing.parquet", "There is no file or folder scans/missing.parquet"),
        ("faulty:net_without_weights", "faulty:numbers", "failed with RuntimeError: weights.pt is damaged"),
        ("faulty:net_for_other_inputs", "faulty:numbers", "cannot take inputs of shape [1, 8, 8]"),
        ("faulty:EXAMPLE", "faulty:numbers", "has no attribute 'EXAMPLE'"),
        ("faulty:__name__", "faulty:numbers", "name a function or class"),
        ("mpl:1x8", "faulty:numbers", "Unknown model 'mpl': did you mean 'mlp'?"),
        ("mlp:1x", "faulty:numbers", "Unknown option for the model 'mlp' '1x'"),
    ],
)
def test_a_model_or_data_that_cannot_be_used_is_named_before_anybody_is_asked(call, model, data, words):
    code, said = call(*SITE, "--model", model, "--data", data)
    assert code == 2 and words in said and "Connecting" not in said


def test_a_start_that_was_trained_for_something_else_is_said_or_refused(call):
    rows = pandas.DataFrame({"age": range(60), "sex": list("fm") * 30, "outcome": list("abc") * 20})
    rows.to_csv("old.csv", index=False)
    rows.assign(age=rows.age * 2).to_csv("twice.csv", index=False)
    rows.assign(weight=rows.age % 7).to_csv("more.csv", index=False)
    clients = pf.split(pf.load("old.csv", label="outcome"), clients=1)
    pf.run("local", clients, "tabular:1x8", rounds=1, out="run")
    start = ["--model", "tabular:1x8=run/models/client-0.safetensors", "--label", "outcome", "--data"]
    _, same = call(*SITE, *start, "old.csv")
    assert "trained for something else" not in same and "Connecting" in same
    _, said = call(*SITE, *start, "twice.csv")
    told = "Warning: The network of run/models/client-0.safetensors was trained for something else"
    assert said.index(told) < said.index("another scaling (age: mean") < said.index("Connecting")
    code, said = call(*SITE, *start, "more.csv")
    assert code == 2 and "size mismatch" not in said and "Connecting" not in said
    assert "can begin from run/models/client-0.safetensors" in said and "(age, sex against age, sex, weight)" in said


@pytest.mark.parametrize(
    ("option", "place"),
    [
        (["--model", "mlp:1x8", "--data", "faulty:no_file"], 'return open("scans/missing.csv")'),
        (["--model", "faulty:net_without_weights", "--data", "faulty:numbers"], 'raise RuntimeError("weights.pt'),
    ],
)
def test_an_exception_in_a_sites_own_code_names_the_line_and_keeps_the_traceback(call, tmp_path, option, place):
    lines = Path(faulty.__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if place in text)
    code, said = call(*SITE, *option)
    assert code == 2 and f"faulty.py:{line})" in said and "The whole traceback is in polyfed-error.log" in said
    assert "Traceback" not in said and "Traceback" in (tmp_path / "polyfed-error.log").read_text()


def test_a_syntax_error_in_a_sites_module_is_a_sentence(call, tmp_path, monkeypatch):
    (tmp_path / "half_written.py").write_text("def load(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, said = call(*SITE, "--model", "mlp:1x8", "--data", "half_written:load")
    assert (
        code == 2 and "--data half_written:load failed with SyntaxError" in said and "half_written.py, line 1" in said
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--server", "127.0.0.1"], "--server is HOST:PORT, not '127.0.0.1'"),
        (["--server", "127.0.0.1:99999"], "--server is HOST:PORT, not '127.0.0.1:99999'"),
        (["--server", "127.0.0.1:port"], "--server is HOST:PORT"),
        (["--name", "[/red]"], "'[/red]' cannot name a site"),
        (["--name", ""], "Without keys a site needs a name"),
        (["--allow", "fedavgg"], "did you mean 'fedavg'?"),
        (["--max-mb", "0"], "--max-mb must be positive"),
    ],
)
def test_options_of_join_are_checked_before_the_data_is_read(call, options, words):
    code, said = call(*SITE, "--model", "mlp:1x8", "--data", "faulty:no_file", *options)
    assert code == 2 and words in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sites", "north,north"], "named twice"),
        (["--sites", "north,[/red]"], "'[/red]' cannot name a site"),
        (["--sites", ""], "There are no sites"),
        (["--port", "99999"], "--port is a number from 1 to 65535"),
        (["--max-mb", "0"], "--max-mb must be positive"),
        (["--method", "fedmd"], "fedmd needs public data"),
        (["--public", "faulty:no_file"], "--public faulty:no_file failed with FileNotFoundError"),
    ],
)
def test_options_of_serve_are_checked_before_a_run_is_started(call, tmp_path, options, words):
    code, said = call(*SERVER, *options)
    assert code == 2 and words in said
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_leaves_no_run_behind(call, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = call(*SERVER, "--port", str(taken.getsockname()[1]))
    assert code == 1 and "is in use: choose another one with --port" in said
    assert not (tmp_path / "run").exists()


def test_a_host_that_is_not_this_machine_is_not_called_a_port_in_use(call, tmp_path):
    create_keys(tmp_path / "keys", "localhost", ["north"])
    code, said = call(
        "serve",
        "--method",
        "fedavg",
        "--keys",
        "keys",
        "--out",
        "run",
        "--host",
        "192.0.2.1",
        "--port",
        str(free_port()),
    )
    assert code == 1 and "Cannot listen on 192.0.2.1" in said and "in use" not in said


# --- keys ---


@pytest.mark.parametrize("server", ["", "fed.example.org:9092", "not a host", "-x"])
def test_keys_for_a_server_that_cannot_be_reached_by_that_name_are_refused(call, tmp_path, server):
    code, said = call("keys", "init", "keys", f"--server={server}", "--sites", "north")
    assert code == 2 and f"'{server}' is no host name or address" in said
    assert not (tmp_path / "keys").exists()


def test_expired_and_damaged_keys_are_refused_with_their_file(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(keys_module, "LIFETIME", datetime.timedelta(minutes=-30))
        create_keys(tmp_path / "old", "localhost", ["north"])
    with pytest.raises(InputError, match=r"ca\.crt expired on 20"):
        read_server_keys(tmp_path / "old")
    with pytest.raises(InputError, match=r"ca\.crt expired on 20"):
        read_site_keys(tmp_path / "old" / "site-north")
    (folder,) = create_keys(tmp_path / "new", "localhost", ["north"])
    (folder / "site.key").write_text("nonsense")
    with pytest.raises(InputError, match=r"site\.key is no private key"):
        read_site_keys(folder)
    (folder / "ca.crt").write_text("nonsense")
    with pytest.raises(InputError, match=r"ca\.crt is no certificate"):
        read_site_keys(folder)


def test_a_folder_that_cannot_be_written_is_a_sentence(call, tmp_path):
    (tmp_path / "file").write_text("")
    code, said = call("keys", "init", "file/keys", "--server", "localhost", "--sites", "north")
    assert code == 1 and said.startswith("Error: ") and "file/keys" in said


# --- a server that is not there ---


def answer_with(handler):
    server = http.server.HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_join_to_a_port_where_nothing_listens_says_so_and_gives_up(call):
    address = f"127.0.0.1:{free_port()}"
    site = [*SITE, "--model", "mlp:1x8", "--data", "faulty:numbers", "--server", address, "--wait", "1"]
    code, said = call(*site)
    assert code == 1
    first = f"No polyfed server at {address} yet (nothing listens on this port); trying for"
    last = f"Error: No polyfed server at {address} in 1 s (nothing listens on this port): check host and port"
    assert said.index(first) < said.index(last)


def test_join_to_something_else_says_what_is_there(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(reach, "PATIENCE", 0.2)
    other = answer_with(http.server.SimpleHTTPRequestHandler)
    silent = socket.create_server(("127.0.0.1", 0))
    create_keys(tmp_path / "keys", "localhost", ["north"])
    own = read_site_keys(tmp_path / "keys" / "site-north")
    try:
        for port, words in (
            (other.server_address[1], "something else answers there, with HTTP status 200"),
            (silent.getsockname()[1], "no answer in 0 s"),
        ):
            with pytest.raises(LinkError, match=words):
                reach.wait_for_server(f"127.0.0.1:{port}", None, 0.0, said.append)
        with pytest.raises(LinkError, match="does not speak TLS"):
            reach.look(f"127.0.0.1:{other.server_address[1]}", own)
    finally:
        other.shutdown()
        silent.close()


def test_join_to_an_unknown_host_says_so(monkeypatch):
    def fail(*given, **options):
        raise httpx.ConnectError("Name or service not known") from socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(httpx, "get", fail)
    assert reach.look("fed.example.org:9092", None) == "this host name is not known here"


def test_join_finds_a_server_of_ours_and_only_with_its_keys(local_federation, tmp_path):
    server = f"127.0.0.1:{local_federation.port}"
    assert reach.look(server, read_site_keys(local_federation.folder / "keys" / "site-north")) is None
    assert "needs --keys" in reach.look(server, None)
    (other,) = create_keys(tmp_path / "keys", "127.0.0.1", ["north"])
    with pytest.raises(LinkError, match="does not have the certificate"):
        reach.look(server, read_site_keys(other))


# --- printing ---


def test_words_of_others_cannot_move_a_terminals_cursor_and_keep_their_brackets():
    assert plain("\x1b[2J[bold]north[/]\r\x07\nnext") == "?[2J[bold]north[/]?? next"


# --- the example ---


@pytest.mark.timeout(600)
def test_the_hospital_example_says_why_a_site_died(tmp_path, monkeypatch):
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    shutil.copytree(EXAMPLE, tmp_path / "hospital", ignore=shutil.ignore_patterns("__pycache__"))
    own = tmp_path / "hospital" / "hospital.py"
    own.write_text(own.read_text().replace("return _hospital(1)", "return open('/mnt/ward/scans.csv')"))
    command = [sys.executable, str(tmp_path / "hospital" / "run.py"), "--rounds", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1
    assert "south ended with exit code 2. It said:" in done.stderr and "/mnt/ward/scans.csv" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_commands_by_themselves_print_brackets(tmp_path):
    done = subprocess.run(
        [*FLOWER, "join", "--insecure", "--name", "[/x]", "--server", "127.0.0.1:9", "--model", "m", "--data", "d"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2 and "'[/x]' cannot name a site" in done.stderr


def test_parts_of_site_data_that_are_no_samples_are_refused():
    from polyfed.flower.sitedata import SiteData, check_data

    pair = (np.zeros((4, 2), dtype=np.float32), np.array([0, 1, 0, 1]))
    with pytest.raises(InputError, match="SiteData whose train is a tuple, not Samples: return a table"):
        check_data(SiteData(train=pair, test=pair, num_classes=2))
