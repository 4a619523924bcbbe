"""Clients spread over processes of torch's launcher give the results of one process, bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from tests.engines.on_ranks import SPOILT, figures
from torch.distributed import HashStore

from polyfed.core.errors import InputError, PolyfedError
from polyfed.core.message import Message
from polyfed.core.party import ClientInfo
from polyfed.engines.link import Link, common_word, deaf, ending_in_words
from polyfed.engines.packing import packed, unpacked
from polyfed.engines.ranks import owners

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LAUNCHER = [sys.executable, "-m", "torch.distributed.run"]
FEW = ["fedavg-mlp", "fedproto-cnnxmlp"]
RESNETS = "fedavg-resnet10xresnet14"
MANY = [*FEW, "fedmd-cnnxmlp", "heterofl-cnn", "scaffold-mlp", "ams-mlp", "fedrolex-cnn", RESNETS, SPOILT.id]
FAR = ["fedavg-mlp", "fedproto-cnnxmlp", "fedmd-cnnxmlp", "heterofl-cnn", "fedgh-mlp", "fedkd-cnn"]  # of many kinds
DIVIDED = {
    "fedavg-mlp": 2,
    RESNETS: 2,
    "heterofl-cnn": 4,
    "fedrolex-cnn": 4,
    SPOILT.id: 2,
}  # exchanges whose fusing is divided


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def launch(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return finished([*LAUNCHER, *words], variables)


def command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return finished([sys.executable, "-m", "polyfed", *words], variables)


def finished(words: list[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=ROOT, env=environment(variables), capture_output=True, text=True, timeout=280, check=False
    )


def on_ranks(number: int, cases: list[str], folder: Path, **variables: str) -> dict[str, Any]:
    file = folder / f"figures-{number}.json"
    words = ["--standalone", "--nproc-per-node", str(number), str(HERE / "on_ranks.py"), str(file), *cases]
    done = launch(*words, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


alone = cache(figures)  # of one process


@pytest.mark.long  # several processes that load torch
@pytest.mark.parametrize("number", [2, 4])
def test_any_number_of_ranks_gives_the_results_of_one_process(number: int, tmp_path: Path) -> None:
    found = on_ranks(number, MANY, tmp_path)
    assert {name: figures for name, (figures, _) in found.items()} == {name: alone(name) for name in MANY}
    assert {name: shares for name, (_, shares) in found.items() if shares} == DIVIDED
    refused = [line["missing"] for line in alone(SPOILT.id)[0]]  # of another rank, and of rank 0
    assert [list(clients) for clients in refused] == [["2"], ["3"]] and "NaN" in refused[0]["2"]


@pytest.mark.long
def test_ranks_without_a_gpu_each_give_the_results_of_one_process(tmp_path: Path) -> None:
    """On the pretended device of `test_device.py`: tensors travel by gloo, and are fused on the device."""
    found = on_ranks(2, FAR, tmp_path, DEVICE="meta")
    assert {name: figures for name, (figures, _) in found.items()} == {name: alone(name) for name in FAR}


RUN = ["--method", "tests.engines.dying:Dying", "--clients", "5", "--rounds", "5", "--models", "mlp:3x32"]
RUN += ["--limit", "200", "--set", "checkpoint_seconds=0", "--quiet"]


def history(out: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "history.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process, in which nobody dies."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert command("run", *RUN, "--out", str(out)).returncode == 0
    return out


@pytest.mark.long
@pytest.mark.xdist_group("dying")
@pytest.mark.parametrize(("at", "later"), [("work", "3"), ("fuse", "1")])
def test_a_rank_that_dies_ends_the_run_with_a_sentence_and_other_numbers_of_ranks_go_on(
    at: str, later: str, whole: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    died = launch(
        *["--standalone", "--nproc-per-node", "2", "-m", "polyfed", "run", *RUN, "--out", str(broken)],
        ONCE=str(tmp_path / "once"),
        AT=at,
    )
    assert died.returncode != 0 and (tmp_path / "once").exists()
    said = re.sub(r"\s+", " ", died.stderr)
    assert re.search("Error: (Rank 1 of this run is gone|The launcher ended this run).*polyfed resume", said), said
    assert len(history(broken)) == 2
    gone_on = launch("--standalone", "--nproc-per-node", later, "-m", "polyfed", "resume", str(broken), "--quiet")
    assert gone_on.returncode == 0, gone_on.stderr[-3000:]
    assert history(broken) == history(whole)
    assert (broken / "report.html").is_file()


@pytest.mark.long
@pytest.mark.xdist_group("dying")
def test_the_launcher_starts_a_broken_run_again_by_itself(whole: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "polyfed", "run"]
    done = launch(*words, *RUN, "--out", str(again), ONCE=str(tmp_path / "once"))
    assert done.returncode == 0 and (tmp_path / "once").exists(), done.stderr[-3000:]
    assert history(again) == history(whole)


@pytest.mark.long
@pytest.mark.xdist_group("dying")
@pytest.mark.parametrize(("at", "dies"), [("work", "0"), ("fuse", "0"), ("busy", "0"), ("busy", "1")])
def test_one_rank_says_which_one_died(at: str, dies: str, tmp_path: Path) -> None:
    """Rank 0 says it, or one of those above, whether they wait or are at work."""
    words = ["--standalone", "--nproc-per-node", "3", "-m", "polyfed", "run", *RUN, "--out", str(tmp_path / "broken")]
    died = launch(*words, ONCE=str(tmp_path / "once"), AT=at, DIES=dies)
    assert (tmp_path / "once").exists()
    said = re.sub(r"\s+", " ", died.stderr)
    assert re.findall("Error: (Rank .) of this run is gone.*?polyfed resume", said) == [f"Rank {dies}"], said
    assert said.count("Error: ") == said.count("ChildFailedError: ") + 1


@pytest.mark.long
@pytest.mark.xdist_group("dying")
def test_a_fault_at_rank_0_ends_those_that_have_an_answer_for_it(tmp_path: Path) -> None:
    """All workers have done their work, and wait for rank 0 to listen."""
    words = ["--standalone", "--nproc-per-node", "2", "-m", "polyfed", "run", *RUN]
    failed = launch(*words, ONCE=str(tmp_path / "once"), AT="fault", DIES="0")
    said = re.sub(r"\s+", " ", failed.stderr)
    assert said.count("A fault of this method") == 1 and "is gone" not in said, said


@pytest.mark.long
@pytest.mark.xdist_group("dying")
def test_ctrl_c_lets_all_ranks_finish_the_round_and_saves_it(whole: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    words = ["--standalone", "--nproc-per-node", "2", "-m", "polyfed", "run", *RUN, "--set", "checkpoint_seconds=1000"]
    done = launch(*words, "--out", str(stopped), ONCE=str(tmp_path / "once"), AT="ctrl-c")
    said = re.sub(r"\s+", " ", done.stderr)
    assert "Stopped after round 3. Go on with polyfed resume" in said, said
    assert "is gone" not in said and "KeyboardInterrupt" not in said
    assert len(history(stopped)) == 3
    gone_on = launch("--standalone", "--nproc-per-node", "2", "-m", "polyfed", "resume", str(stopped), "--quiet")
    assert gone_on.returncode == 0, gone_on.stderr[-3000:]
    assert history(stopped) == history(whole)


@pytest.mark.long
@pytest.mark.xdist_group("dying")
def test_a_second_ctrl_c_ends_all_ranks_at_once(tmp_path: Path) -> None:
    words = ["--standalone", "--nproc-per-node", "2", "-m", "polyfed", "run", *RUN, "--out", str(tmp_path / "run")]
    done = launch(*words, ONCE=str(tmp_path / "once"), AT="ctrl-c-twice")
    assert "The launcher ended this run" in re.sub(r"\s+", " ", done.stderr)
    assert len(history(tmp_path / "run")) == 2


@pytest.mark.long
@pytest.mark.xdist_group("dying")
def test_started_again_on_a_machine_without_the_run_it_is_refused(tmp_path: Path) -> None:
    """As when the launcher makes a process of another machine rank 0, and they share no file system."""
    out = tmp_path / "run"
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "polyfed", "run", *RUN]
    done = launch(*words, "--out", str(out), ONCE=str(tmp_path / "once"), LOSES=str(out))
    assert done.returncode != 0 and (tmp_path / "once").exists() and not out.exists()
    assert "--out has to be on a file system that all machines share" in re.sub(r"\s+", " ", done.stderr)


@pytest.mark.long
@pytest.mark.parametrize("meeting", ["c10d", "static"])
def test_two_machines(meeting: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = [str(HERE / "on_ranks.py"), str(file), *FEW]
    for done in on_two_machines(meeting, *words):
        assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(file.read_text())
    assert {name: figures for name, (figures, _) in found.items()} == {name: alone(name) for name in FEW}


@pytest.mark.long
@pytest.mark.xdist_group("dying")
def test_two_machines_start_again_when_a_rank_of_one_dies(whole: Path, tmp_path: Path) -> None:
    out, once = tmp_path / "again", tmp_path / "once"
    words = ["-m", "polyfed", "run", *RUN, "--out", str(out)]
    done = on_two_machines("c10d", "--max-restarts", "1", *words, ONCE=str(once), DIES="3")  # on the other machine
    assert [one.returncode for one in done] == [0, 0] and once.exists(), done[0].stderr[-3000:]
    assert history(out) == history(whole)


def on_two_machines(meeting: str, *words: str, **variables: str) -> list[subprocess.CompletedProcess[str]]:
    """Run a command on two machines with two processes each, both of them this one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    together = {
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"127.0.0.1:{port}"],
        "static": ["--master-addr", "127.0.0.1", "--master-port", port],
    }[meeting]
    nodes = []
    for number in range(2):
        own = ["--node-rank", str(number)] if meeting == "static" else ["--local-addr", "127.0.0.1"]
        command = [*LAUNCHER, "--nnodes", "2", "--nproc-per-node", "2", *together, *own, *words]
        nodes.append(subprocess.Popen(command, cwd=ROOT, env=environment(variables), stderr=PIPE, text=True))
    said = [node.communicate(timeout=280)[1] for node in nodes]
    return [
        subprocess.CompletedProcess(words, node.returncode, "", text) for node, text in zip(nodes, said, strict=True)
    ]


def met(store: HashStore) -> list[str]:
    """Return the words that three processes find."""
    with ThreadPoolExecutor(3) as pool:
        return [one.result(20) for one in [pool.submit(common_word, store, rank, 3) for rank in (2, 1, 0)]]


def test_processes_that_start_again_find_each_other_whoever_died_before_it_came() -> None:
    store = HashStore()
    words = set(met(store))
    store.set("here/1", "of one that died while it waited for the others")
    words |= set(met(store))
    store.set("here/0", "of a rank 0 that died at once")
    words |= set(met(store))
    assert len(words) == 3  # one for each start


def test_a_run_that_began_is_gone_on_with_also_where_the_launcher_counts_no_restart(link: Link, tmp_path: Path) -> None:
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "config.json").touch()
    assert not link.begun(tmp_path / "a")
    link.begin(tmp_path / "a")
    assert not link.begun(tmp_path / "a")  # by this start itself: such a directory is refused as in one process
    link.own = HashStore()  # of the next start
    assert link.begun(tmp_path / "a") and not link.begun(tmp_path / "b")


def test_a_start_that_does_not_find_the_run_of_an_earlier_one_does_not_begin_from_scratch(
    link: Link, tmp_path: Path
) -> None:
    link.begin(tmp_path / "run")
    assert not link.begun(tmp_path / "run")  # whoever removes it in the same start may begin anew
    link.own = HashStore()
    with pytest.raises(InputError, match=r"had begun .*file system that all machines share"):
        link.begun(tmp_path / "run")


@pytest.fixture
def link() -> Iterator[Link]:
    """A link to nobody; what it does about the launcher's signal is put back."""
    made = Link.__new__(Link)
    made.talking = made.ended = False
    made.store, made.own = HashStore(), HashStore()
    made.number, made.out = 0, "runs/a"
    earlier = signal.getsignal(signal.SIGTERM)
    yield made
    signal.signal(signal.SIGTERM, earlier)


def test_a_rank_that_the_launcher_ends_says_so_first(link: Link) -> None:
    with pytest.raises(PolyfedError, match=r"The launcher ended this run.*polyfed resume"), ending_in_words(link):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)  # cuts nothing short that is still to be said


def test_a_rank_that_waits_for_a_dead_one_names_it(link: Link) -> None:
    with pytest.raises(PolyfedError, match="Rank 3 of this run is gone"), ending_in_words(link), link.talk(3):
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("Connection closed by peer")


def test_without_out_nobody_is_told_to_go_on(link: Link) -> None:
    link.out = None
    with pytest.raises(PolyfedError, match=r"Rank 3.*[Nn]othing is kept: use --out DIR") as gone, link.talk(3):
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(PolyfedError, match=r"launcher.*[Nn]othing is kept: use --out DIR") as ended:
        link.end()
    assert "resume" not in f"{gone.value} {ended.value}"


def test_an_answer_that_came_just_before_the_end_does_not_let_the_run_go_on(link: Link) -> None:
    with pytest.raises(PolyfedError, match="The launcher ended this run"), ending_in_words(link), link.talk(3):
        signal.raise_signal(signal.SIGTERM)


def test_a_run_that_ends_well_leaves_signals_as_they_were(link: Link) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ending_in_words(link):
        assert signal.getsignal(signal.SIGTERM) == link.end
    assert signal.getsignal(signal.SIGTERM) == before


def test_ctrl_c_passes_by_a_rank_that_another_one_leads() -> None:
    before = signal.getsignal(signal.SIGINT)
    with deaf():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_only_one_run_is_divided() -> None:
    variables = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0"}
    refused = command("compare", "--methods", "fedavg", **variables)
    assert refused.returncode == 2 and "torchrun divides the clients of one run" in re.sub(r"\s+", " ", refused.stderr)
    assert command("compare", "--methods", "fedavg", **{**variables, "RANK": "1"}).stderr == ""  # said once


def test_clients_go_to_the_rank_with_the_least_work() -> None:
    infos = {i: ClientInfo(i, samples, "a", 10) for i, samples in enumerate([50, 10, 30, 20])}
    assert owners(infos, 2) == {0: 0, 1: 0, 2: 1, 3: 1}  # 500 and 300 + 200 are even: the next goes to the first
    assert set(owners({i: ClientInfo(i, 1, "a") for i in range(6)}, 3).values()) == {0, 1, 2}  # without parameters too


def test_messages_come_out_as_they_went_in_and_shared_tensors_stay_shared() -> None:
    shared = torch.arange(3.0)
    empty, other = torch.empty(0), torch.empty(0, 2)
    messages = {
        2: Message({"main": {"w": shared}}, {"n": empty, "m": other}, {"samples": 3}),
        10: Message({"main": {"w": shared, "t": shared.view(3, 1)}}),
    }
    tree = packed(messages)
    assert len(tree["tensors"]) == 4  # the shared one, its other shape, and two empty ones
    found = unpacked(tree)
    assert list(found) == [2, 10] and found[2].meta == {"samples": 3}
    assert found[2].params["main"]["w"].data_ptr() == found[10].params["main"]["w"].data_ptr()
    for client, message in messages.items():
        for (name, one), (again, two) in zip(message.tensors(), found[client].tensors(), strict=True):
            assert name == again and torch.equal(one, two) and one.shape == two.shape
