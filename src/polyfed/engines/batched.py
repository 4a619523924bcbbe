"""Clients of one architecture as one stack: the pending stages of all clients are collected, grouped, and run at once.

Every client's `local` is a generator that waits at its stage. Stages with the same losses, settings and shapes form a
group, whose clients train as one tensor program (see `stack.py`); the rest run one by one, and the log says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from polyfed.core.errors import TrainingError, first_line
from polyfed.core.message import Message
from polyfed.core.method import Replies, Step
from polyfed.core.nets import norms_of
from polyfed.core.party import Blueprint, Context, Party
from polyfed.core.runner import check_finite, run_stage
from polyfed.core.stage import Stage, Trained
from polyfed.core.threads import one_thread
from polyfed.engines.convolutions import folded
from polyfed.engines.cut import CutProgram
from polyfed.engines.dense import is_perceptron, suits
from polyfed.engines.stack import Program, Tensors
from polyfed.engines.stackdata import Member
from polyfed.engines.threads import Threads
from polyfed.engines.work import receive

if TYPE_CHECKING:
    from polyfed.engines.clients import ActiveClient
    from polyfed.engines.inprocess import InProcess

log = logging.getLogger("polyfed.engine")

STACK_BYTES = 8 << 20  # parameters of one stack: beyond the caches nothing is gained
LARGEST_STACK = 64  # clients
LIGHT = 1e-3  # seconds of a client outside its stages: below, threads would only wait for Python's lock


@dataclass
class Job:
    """A client at work: its generator, the stage it waits at, and its tensors."""

    client: int
    worker: int  # whose modules its generator holds
    party: ActiveClient | None = None
    work: Any = None
    stage: Stage | None = None
    number: int = 0  # of the stage
    reply: Message = field(default_factory=Message)
    trained: Trained = field(default_factory=Trained)
    seconds: float = 0.0
    error: TrainingError | None = None  # its training broke down: it goes no further

    def name(self, step: Step) -> str:
        """Return the name of the stage in the tree of seeds."""
        return f"{step.name}/{self.number}"

    def break_off(self, error: TrainingError) -> None:
        """Leave this client out; the others of its stack go on."""
        self.error, self.stage = error, None


class Batched:
    """Runs stages of equal clients as stacks."""

    exact = False  # whether numbers may not depend on who shares a stack

    def __init__(self) -> None:
        self.threads = Threads()
        self.told: set[str] = set()  # architectures whose clients never run in stacks, as the log says
        self.refused: dict[Any, str] = {}  # kind of stage -> why it cannot be stacked
        self.between: dict[str, float] = {}  # step -> seconds that a client spent outside its stages, last time

    def exchange(self, backend: InProcess, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Let clients that cannot gain from stacks work whole, the others from stage to stage."""
        plans = {client: backend.blueprints[backend.infos[client].architecture] for client in messages}
        whole = {client: m for client, m in messages.items() if ctx.privacy.on or self.works_whole(step, plans[client])}
        rest = {c: m for c, m in messages.items() if c not in whole}
        replies = self.by_stages(backend, step, rest, ctx) if rest else Replies()
        if whole:
            replies.add(self.threads.exchange(backend, step, whole, ctx))
        return replies

    def works_whole(self, step: Step, blueprint: Blueprint) -> bool:
        """Tell whether clients of an architecture do all of a step one by one."""
        if blueprint.random and blueprint.name not in self.told:
            self.told.add(blueprint.name)
            log.info("Clients of %s run one by one: their network draws random numbers by itself.", blueprint.name)
        return blueprint.random or "learner" in blueprint.properties

    def by_stages(self, backend: InProcess, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Let all clients work from stage to stage and collect their replies."""
        workers = backend.pool.workers
        jobs = [Job(client, place % workers) for place, client in enumerate(sorted(messages))]
        shares = [share for share in (jobs[worker::workers] for worker in range(workers)) if share]

        def resume(_: int, share: list[Job]) -> None:
            for job in share:
                start = time.perf_counter()
                advance(backend, job, step, messages[job.client], ctx)
                job.seconds += time.perf_counter() - start

        waiting = jobs
        spent = 0.0
        while waiting:
            before = sum(job.seconds for job in jobs)
            if self.between.get(step.name, LIGHT) < LIGHT:
                with one_thread():
                    for share in shares:
                        resume(0, share)
            else:
                backend.pool.run(resume, shares)
            spent += sum(job.seconds for job in jobs) - before
            waiting = [job for job in jobs if job.stage is not None]
            if waiting:
                self.run_stages(backend, step, waiting, ctx)
            shares = [[job for job in share if job.stage is not None] for share in shares]
            shares = [share for share in shares if share]
        self.between[step.name] = spent / max(1, len(jobs))
        for job in jobs:
            if job.error is not None:
                assert job.party is not None
                backend.store.close(job.party, ctx)
                backend.store.start_over(job.client, ctx)
        return collected(jobs)

    def run_stages(self, backend: InProcess, step: Step, jobs: Sequence[Job], ctx: Context) -> None:
        """Run the pending stage of every job, stacked where possible."""
        groups: dict[Any, list[Job]] = {}
        for job in jobs:
            groups.setdefault(kind_of(job, ctx), []).append(job)
        pieces: list[tuple[list[Job], bool]] = []
        for kind, group in groups.items():
            if self.stackable(backend, kind, group, step, ctx):
                pieces.extend((piece, True) for piece in divided(group, backend.pool.workers))
            else:
                pieces.extend(([job], False) for job in group)

        def work(worker: int, piece: tuple[list[Job], bool]) -> None:
            members, stacked = piece
            start = time.perf_counter()
            if stacked:
                run_stack(backend, members, step, ctx, worker)
            else:
                run_alone(backend, members[0], step, ctx, worker)
            for job in members:
                job.seconds += (time.perf_counter() - start) / len(members)

        backend.pool.run(work, pieces, lambda piece: sum(backend.expected_work(step, job.client) for job in piece[0]))

    def stackable(self, backend: InProcess, kind: Any, group: list[Job], step: Step, ctx: Context) -> bool:
        """Tell whether a group can be stacked; a trial of one step on copies shows it, once for each kind of stage."""
        return len(group) > 1 and self.possible(backend, kind, group, step, ctx)

    def possible(self, backend: InProcess, kind: Any, group: list[Job], step: Step, ctx: Context) -> bool:
        """Tell whether stages of a kind can be stacked at all."""
        key = (*kind[:4], kind[7])  # `sum_gradients` is no plain training
        if key not in self.refused:
            with one_thread():
                self.refused[key] = obstacle(backend, group, step, ctx, self.exact, self.only_plain(group[0]))
            if self.refused[key]:
                log.info("Stages of %s run one by one: %s.", kind[0], self.refused[key])
        return not self.refused[key]

    def only_plain(self, job: Job) -> bool:
        """Tell whether clients like this one are stacked in plain training only: never, where stacks were asked for."""
        return False


def advance(backend: InProcess, job: Job, step: Step, message: Message, ctx: Context) -> None:
    """Let a client's generator run to its next stage, or to its end."""
    try:
        if job.party is None:
            job.party = backend.store.open(job.client, ctx, worker=job.worker)
            receive(backend.method, job.party, message, step, ctx)
            job.work = backend.method.local(job.party, step, ctx)
            if job.work is None or isinstance(job.work, Message):  # a step without training need not be a generator
                raise StopIteration(job.work)
            job.stage = next(job.work)
        else:
            backend.store.attach(job.party, job.party.states, job.worker)
            job.number += 1
            job.stage = job.work.send(job.trained)
        backend.store.check_own(job.party, job.worker)
    except StopIteration as finished:
        job.reply = finished.value or Message()
        job.stage = None
        assert job.party is not None
        backend.store.check_own(job.party, job.worker)
        backend.store.close(job.party, ctx)
    except TrainingError as error:  # in a stage that the method ran by itself
        job.break_off(error)


def collected(jobs: Sequence[Job]) -> Replies:
    """Return the replies of finished jobs."""
    done = [job for job in jobs if job.error is None]
    replies = Replies(
        {job.client: job.reply for job in done},
        {job.client: job.trained.loss for job in done},
        {job.client: job.seconds for job in done},
    )
    for job in jobs:
        if job.error is not None:
            replies.leave_out(job.client, job.error)
    return replies


def kind_of(job: Job, ctx: Context) -> tuple[Any, ...]:
    """Return what clients of one stack must have in common: architecture, losses, models and training first."""
    stage, party = job.stage, job.party
    assert stage is not None and party is not None and party.info is not None
    updates = tuple(
        (u.losses, tuple(sorted(u.trainable.items())), u.gradients, u.project, u.training, u.l1)
        for u in stage.all_updates()
    )
    data = stage.data if stage.data is not None else party.train
    leaves, spec = tree_flatten(dict(stage.aux)) if stage.aux else ([], None)
    return (
        party.info.architecture,
        updates,
        tuple(party.models),
        stage.training,
        stage.epochs,
        stage.steps,
        stage.shuffle,
        stage.sum_gradients,
        (tuple(data.x.shape[1:]), data.x.dtype, tuple(data.y.shape[1:]), data.y.dtype, data.scaling),
        tuple((name, tuple(c.shape[1:]), c.dtype) for name, c in stage.columns.items()),
        str(spec),
        tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves),
        tuple(stage.draws.items()),
    )


def divided(group: list[Job], workers: int) -> list[list[Job]]:
    """Cut a group into stacks: at least one for each worker, none too large; clients with equal work stay together."""
    assert group[0].party is not None
    size = sum(t.numel() * t.element_size() for state in group[0].party.states.values() for t in state.values())
    largest = min(LARGEST_STACK, max(2, STACK_BYTES // max(1, size)))
    count = max(min(workers, len(group) // 2), -(-len(group) // largest))
    ordered = sorted(group, key=lambda job: -samples_of(job))  # a stable sort: equal clients stay in order
    return [ordered[place * len(group) // count : (place + 1) * len(group) // count] for place in range(count)]


def samples_of(job: Job) -> int:
    """Return the number of samples of a job's stage."""
    assert job.stage is not None and job.party is not None
    return len(job.stage.data if job.stage.data is not None else job.party.train)


def run_alone(backend: InProcess, job: Job, step: Step, ctx: Context, worker: int) -> None:
    """Run one client's stage on this worker's modules."""
    assert job.party is not None and job.stage is not None
    alone = Party(job.client, job.party.info, job.party.data)
    alone.models = dict(job.party.models)  # models without a record belong to this client alone
    backend.store.attach(alone, job.party.states, worker)
    alone.memory, alone.inbox = job.party.memory, job.party.inbox
    try:
        job.trained = run_stage(job.stage, alone, ctx, job.name(step))
    except TrainingError as error:
        job.break_off(error)


def run_stack(backend: InProcess, jobs: Sequence[Job], step: Step, ctx: Context, worker: int) -> None:
    """Run the stages of several clients as one program and write their tensors back."""
    tensors, write_back = stacked_states(backend, jobs)
    program = make_program(backend, jobs, tensors, step, ctx, worker)
    program.run()
    write_back()
    for job, member in zip(jobs, program.members, strict=True):
        try:
            job.trained = check_finite(member.totals, member.party, ctx, program.name, len(program.updates))
        except TrainingError as error:  # numbers of one client never reach another's
            job.break_off(error)


def make_program(
    backend: InProcess, jobs: Sequence[Job], tensors: Tensors, step: Step, ctx: Context, worker: int
) -> Program:
    """Return the program of some jobs over given tensors."""
    members = []
    for job in jobs:
        assert job.party is not None and job.stage is not None
        members.append(Member(job.party, job.stage, job.party.states))
    first = members[0].party
    modules = {model: backend.store.module(worker, first.architecture, model) for model in first.models}
    program = Program(members, modules, tensors, ctx, jobs[0].name(step))
    return suits(program) or folded(program) or program


def stacked_states(backend: InProcess, jobs: Sequence[Job]) -> tuple[Tensors, Callable[[], None]]:
    """Return the clients' states as stacks, and what writes them back: nothing, where their rows are neighbours."""
    tensors: Tensors = {}
    copies: list[tuple[str, str]] = []
    party = jobs[0].party
    assert party is not None and party.info is not None
    for model, state in _states(jobs[0]).items():
        in_place = all(job.party is not None and job.party.in_place for job in jobs)
        views = backend.store.rows([job.client for job in jobs], model) if in_place else {}
        # `vmap` loses what BatchNorm writes into statistics that are not contiguous, so buffers are always copied.
        buffers = {name for name, _ in party.models[model].named_buffers()}
        tensors[model] = {}
        for name in state:
            if name in views and name not in buffers:
                tensors[model][name] = views[name]
            else:
                tensors[model][name] = torch.stack([_states(job)[model][name] for job in jobs])
                copies.append((model, name))

    def write_back() -> None:
        for model, name in copies:
            for job, row in zip(jobs, tensors[model][name], strict=True):
                _states(job)[model][name].copy_(row)

    return tensors, write_back


def obstacle(
    backend: InProcess, group: list[Job], step: Step, ctx: Context, exact: bool = False, plain: bool = False
) -> str:
    """Return why a group cannot be stacked (empty: it can), from one step of two clients on copies."""
    jobs = group[:2]
    states = _states(jobs[0])
    party = jobs[0].party
    assert party is not None
    assert jobs[0].stage is not None
    if jobs[0].stage.until is not None or jobs[0].stage.rate_factor is not None:
        return "each decides for itself how long and how fast it trains"
    apart = [model for model in party.models if model not in states]
    if apart:
        return f"the model '{apart[0]}' exists for this stage only"
    for module in party.models.values():
        if any(norm.momentum is None for norm in norms_of(module)):
            return "a BatchNorm layer averages over all batches (momentum None)"
        if any(isinstance(layer, nn.RNNBase) for layer in module.modules()):
            return "recurrent layers cannot be stacked"
    try:
        tensors = {m: {n: torch.stack([_states(j)[m][n] for j in jobs]) for n in states[m]} for m in states}
        program = make_program(backend, jobs, tensors, step, ctx, 0)
        if exact and not isinstance(program, CutProgram) and not all(map(is_perceptron, program.modules.values())):
            return "numbers of convolutions would depend on who shares the stack"
        if plain and not (isinstance(program, CutProgram) and program.is_plain()):
            return "too few share a step for a loss other than cross-entropy"
        if not all(any(parts.values()) for parts in program.moved):
            return "it names parts of networks that they do not have, or that are frozen"  # alone it is told which
        if any(program.frozen.values()) and not all(program.used):
            return "all that it could move is frozen"
        program.run(limit=1)
    except (RuntimeError, ValueError) as error:  # what `vmap` raises at operations that it cannot stack
        return first_line(error)
    return ""


def _states(job: Job) -> Mapping[str, dict[str, Tensor]]:
    assert job.party is not None
    return job.party.states
