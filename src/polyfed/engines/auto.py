"""Try both ways on copies, once for each kind of stage, and keep the faster: stacks, or whole clients on threads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyfed.core.message import Message
from polyfed.core.method import Replies, Step
from polyfed.core.party import Blueprint, Context, Party
from polyfed.core.runner import run_stage
from polyfed.core.threads import one_thread
from polyfed.engines.batched import Batched, Job, make_program, samples_of

if TYPE_CHECKING:
    from polyfed.engines.inprocess import InProcess

GAIN = 1.2  # a stack must be so much faster: its numbers differ in the last digits, and its gain varies with the load
STEPS = 3  # that are timed
CLIENTS = 20  # in the stack that is timed


class Auto(Batched):
    """Runs stages as stacks where that is faster; where it is not, whole clients on threads."""

    def __init__(self) -> None:
        super().__init__()
        self.gains: dict[Any, float] = {}  # kind of stage -> how many times faster a stack is; 0: it cannot be one
        self.met: dict[tuple[str, str], set[Any]] = {}  # (step, architecture) -> the kinds of stages seen in it
        self.settled: set[tuple[str, str]] = set()  # (step, architecture) whose clients run whole

    def exchange(self, home: InProcess, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Let the clients work, and note whose stages gained nothing from stacking."""
        replies = super().exchange(home, step, messages, ctx)
        self.settle(step)
        return replies

    def works_whole(self, step: Step, blueprint: Blueprint) -> bool:
        """Let also those work whole whose stages gain nothing from stacking."""
        return (step.name, blueprint.name) in self.settled or super().works_whole(step, blueprint)

    def settle(self, step: Step) -> None:
        """Note the architectures none of whose stages in this step are stacked."""
        for (name, architecture), kinds in self.met.items():
            if name == step.name and all(self.gains[kind] < GAIN for kind in kinds):
                self.settled.add((name, architecture))

    def stackable(self, home: InProcess, kind: Any, group: list[Job], step: Step, ctx: Context) -> bool:
        """Tell whether a group is to be stacked, from a trial on copies at the first meeting."""
        if len(group) < 2:  # too few to tell: a later round may bring more of them
            return False
        architecture = kind[0]
        key = (*kind[:3], kind[7], (kind[3] or ctx.training).batch_size)
        if key not in self.gains:
            possible = super().stackable(home, kind, group, step, ctx)
            self.gains[key] = gain(home, group, step, ctx) if possible else 0.0
            chosen = "batched" if self.gains[key] >= GAIN else "threads"
            ctx.records.setdefault("engine", {})[architecture] = {"is": chosen, "gain": round(self.gains[key], 2)}
        self.met.setdefault((step.name, architecture), set()).add(key)
        return self.gains[key] >= GAIN


def gain(home: InProcess, group: list[Job], step: Step, ctx: Context) -> float:
    """Return how many times less a step costs a client in a stack than alone; nothing of the clients changes.

    Processor time of this thread is compared, so a busy machine does not disturb the choice.
    """
    largest = sorted(group, key=lambda job: -samples_of(job))[:CLIENTS]
    with one_thread():
        together = min(_stacked(home, largest, step, ctx) for _ in range(2))
        alone = min(_alone(home, largest[0], step, ctx) for _ in range(2))
    return alone / max(together, 1e-9)


def _stacked(home: InProcess, jobs: list[Job], step: Step, ctx: Context) -> float:
    assert jobs[0].party is not None
    first = jobs[0].party.states
    tensors = {m: {n: torch.stack([_state(j)[m][n] for j in jobs]) for n in first[m]} for m in first}
    program = make_program(home, jobs, tensors, step, ctx, 0)
    start = time.thread_time()
    program.run(limit=STEPS)
    return (time.thread_time() - start) * len(program.updates) / sum(m.losses.number for m in program.members)


def _alone(home: InProcess, job: Job, step: Step, ctx: Context) -> float:
    assert job.party is not None and job.stage is not None
    party = Party(job.client, job.party.info, job.party.data)
    party.models = dict(job.party.models)
    copies = {m: {n: t.clone() for n, t in state.items()} for m, state in _state(job).items()}
    home.attach(party, copies, 0)
    stage = replace(job.stage, steps=STEPS, epochs=None)
    start = time.thread_time()
    run_stage(stage, party, ctx, job.name(step))
    return (time.thread_time() - start) / STEPS


def _state(job: Job) -> Mapping[str, Mapping[str, Tensor]]:
    assert job.party is not None
    return job.party.states
