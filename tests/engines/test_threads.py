"""Whole clients on several threads give the numbers of one client after the other, bit for bit."""

import sys
import threading
from pathlib import Path

import pytest
import torch

import polyfed as pf
from polyfed.core.errors import InputError, TrainingError
from polyfed.engines.clients import ClientStore
from polyfed.engines.pool import WorkerPool

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from table import synthetic


def without_time(lines):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


class WithDropout(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 16), torch.nn.Linear(16, 3)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.last(self.drop(self.first(x.flatten(1)).relu()))


def test_dropout_masks_do_not_depend_on_workers():
    runs = [pf.run("local", synthetic(), WithDropout, rounds=2, engine="threads", workers=n) for n in (1, 2, 4)]
    masks = [[m.state_dict()["first.weight"] for m in run.models.values()] for run in runs]
    for other in masks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(masks[0], other, strict=True))


def test_clients_really_run_on_several_threads(monkeypatch):
    seen = set()
    meeting = threading.Barrier(2, timeout=20)  # broken unless two clients are at work at the same time
    loss = pf.Local.loss

    def watched(self, nets, batch, aux):
        if threading.current_thread() not in seen:
            seen.add(threading.current_thread())
            meeting.wait()
        return loss(self, nets, batch, aux)

    monkeypatch.setattr(pf.Local, "loss", watched)
    pf.run("local", synthetic(2), ["mlp:1x8"], rounds=1, engine="threads", workers=2)
    assert len(seen) == 2


def test_the_first_failing_client_is_named_whatever_the_order():
    diverging = pf.Training(lr=1e30, batch_size=4)
    for workers in (1, 3):
        with pytest.raises(TrainingError, match="client 0"):
            pf.run("local", synthetic(3), ["mlp:2x16"], training=diverging, engine="threads", workers=workers)


def test_crew_returns_results_in_order_and_starts_the_costliest_first():
    started = []
    pool = WorkerPool(1)
    assert pool.run(lambda _, item: item * 2, [1, 2, 3]) == [2, 4, 6]
    pool = WorkerPool(2)
    lock = threading.Lock()

    def work(worker, item):
        with lock:
            started.append(item)
        return item

    assert pool.run(work, list(range(10)), cost=lambda item: item) == list(range(10))
    assert set(started[:2]) <= {9, 8, 7} and started[-1] in (0, 1)


def test_crew_raises_the_error_of_the_first_item_and_leaves_the_thread_count_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)

    def fail(worker, item):
        assert torch.get_num_threads() == 1
        raise ValueError(str(item))

    try:
        for workers in (1, 3):
            with pytest.raises(ValueError, match=r"^0$"):
                WorkerPool(workers).run(fail, list(range(6)), cost=float)
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_unknown_engines_and_workers_are_refused():
    with pytest.raises(InputError, match="'batched' or 'flower', not 'fast'"):
        pf.run("local", synthetic(2), rounds=1, engine="fast")
    with pytest.raises(InputError, match="workers must be at least 1"):
        pf.run("local", synthetic(2), rounds=1, workers=0)
    with pytest.raises(InputError, match="choose cpu, or auto"):
        pf.run("local", synthetic(2), rounds=1, device="nowhere")


def test_states_moved_to_a_device_and_back_are_the_same(monkeypatch):
    """Where active states are apart from those at rest (as on a GPU), results do not change."""
    here = pf.run("fedavg", synthetic(3), ["cnn:4-8,bn"], rounds=2)

    def copied(self, device):
        return self.copy()

    monkeypatch.setattr("polyfed.engines.store.Record.to", copied)
    start = ClientStore.__init__

    def elsewhere(self, *args, **kwargs):
        start(self, *args, **kwargs)
        self.device = torch.device("meta")  # any device that is not the active one

    monkeypatch.setattr(ClientStore, "__init__", elsewhere)
    there = pf.run("fedavg", synthetic(3), ["cnn:4-8,bn"], rounds=2)
    assert without_time(here.history) == without_time(there.history)
    for client in here.models:
        for name, tensor in here.models[client].state_dict().items():
            assert torch.equal(tensor, there.models[client].state_dict()[name]), name
