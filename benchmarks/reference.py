"""The reference: what a good engineer writes by hand in plain PyTorch for such a federation.

Every client has its own module, a DataLoader over its tensors and a fresh optimizer each round; torch uses its default
number of threads; states are averaged with a sum over dictionaries.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from polyfed.core.federation import Federation
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.nets import Net
from polyfed.core.party import Context, Party, load_state
from polyfed.core.stage import Batch, Stage, Trained, is_trainable


def tensors_of(samples: Any) -> TensorDataset:
    """Return the normalized images and labels of a client."""
    return TensorDataset(samples.inputs(), samples.labels())


class Loop:
    """What all loops have: the seconds that they spent on training and on fusing, and networks to measure."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def counted(self, part: str) -> Iterator[None]:
        """Add the seconds of a block to a part."""
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start

    def round(self) -> None:
        """Train every client and fuse."""
        raise NotImplementedError

    def networks(self) -> Sequence[nn.Module]:
        """Return the networks that a round ends with."""
        raise NotImplementedError


class FedAvgLoop(Loop):
    """FedAvg of one architecture: the loop that every tutorial has."""

    def __init__(self, model: nn.Module, datasets: Sequence[TensorDataset], batch_size: int, lr: float) -> None:
        super().__init__()
        self.model = model
        self.datasets = datasets
        self.batch_size = batch_size
        self.lr = lr
        self.state = copy.deepcopy(model.state_dict())

    def round(self) -> None:
        """Train every client from the global state, then take the weighted mean."""
        states = []
        for dataset in self.datasets:
            with self.counted("training"):
                self.model.load_state_dict(self.state)
                train(self.model, dataset, self.batch_size, self.lr)
                states.append(copy.deepcopy(self.model.state_dict()))
        with self.counted("fusing"):
            self.state = average(states, [len(dataset) for dataset in self.datasets])

    def networks(self) -> Sequence[nn.Module]:
        """Return the one network."""
        return [self.model]


class OwnedLoop(Loop):
    """Layer-wise FedAvg of several architectures: a tensor is averaged over the clients that have it."""

    def __init__(self, models: Sequence[nn.Module], datasets: Sequence[TensorDataset], batch_size: int, lr: float):
        super().__init__()
        self.models = models
        self.datasets = datasets
        self.batch_size = batch_size
        self.lr = lr

    def round(self) -> None:
        """Train every client, then average by name."""
        total: dict[str, Tensor] = {}
        weight: dict[str, float] = {}
        for model, dataset in zip(self.models, self.datasets, strict=True):
            with self.counted("training"):
                train(model, dataset, self.batch_size, self.lr)
            with self.counted("fusing"):
                for name, tensor in model.state_dict().items():
                    if tensor.is_floating_point():
                        total[name] = total.get(name, 0) + tensor * len(dataset)
                        weight[name] = weight.get(name, 0) + len(dataset)
        with self.counted("fusing"):
            mean = {name: tensor / weight[name] for name, tensor in total.items()}
            for model in self.models:
                own = model.state_dict()
                model.load_state_dict({name: mean.get(name, tensor) for name, tensor in own.items()})

    def networks(self) -> Sequence[nn.Module]:
        """Return every client's network."""
        return self.models


def train(model: nn.Module, dataset: TensorDataset, batch_size: int, lr: float) -> None:
    """Train one epoch with cross-entropy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model.train()
    for x, y in DataLoader(dataset, batch_size=batch_size, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def measure(models: Sequence[nn.Module], test: TensorDataset) -> list[float]:
    """Return the accuracy of every network."""
    found = []
    for model in models:
        model.eval()
        right = 0
        for x, y in DataLoader(test, batch_size=32):
            right += int((model(x).argmax(1) == y).sum())
        found.append(right / len(test))
    return found


def average(states: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return the weighted mean of states, name by name."""
    total = sum(weights)
    mean = {}
    for name in states[0]:
        mean[name] = sum(state[name] * (weight / total) for state, weight in zip(states, weights, strict=True))
        mean[name] = mean[name].to(states[0][name].dtype)
    return mean


class MethodLoop(Loop):
    """Any method, one client after the other, with DataLoaders and plain optimizers on every client's own modules."""

    def __init__(self, federation: Federation) -> None:
        super().__init__()
        self.federation = federation
        ctx = federation.ctx
        self.parties: dict[int, Party] = {}
        home: Any = federation.backend
        for client, info in federation.backend.infos.items():
            party = Party(client, info, home.store.data[client])
            party.models["main"] = ctx.blueprints[info.architecture].build()  # type: ignore[misc]
            federation.method.setup_client(party, ctx)
            self.parties[client] = party
        ctx.run_stage = lambda stage, party, name: plain_stage(stage, party, ctx)

    def round(self) -> None:
        """Do the exchanges of one round."""
        federation = self.federation
        federation.ctx.round += 1
        for step in federation.plan.round:
            if step.when == "always":
                self.exchange(step)

    def exchange(self, step: Step) -> None:
        """Send, let every client work, fuse."""
        federation, ctx = self.federation, self.federation.ctx
        replies = {}
        with self.counted("training"):
            for client, party in self.parties.items():
                info = federation.backend.infos[client]
                party.inbox = federation.method.send(federation.server, info, step, ctx) if step.down else Message()
                for name, state in party.inbox.params.items():
                    load_state(party.models[name], state)
                replies[client] = follow(federation.method.local(party, step, ctx), party, ctx)
        if step.up:
            with self.counted("fusing"):
                federation.method.fuse(federation.server, replies, step, ctx)

    def networks(self) -> Sequence[nn.Module]:
        """Return every client's network."""
        return [party.main for party in self.parties.values()]


def follow(work: Any, party: Party, ctx: Context) -> Message:
    """Run every stage that a client yields."""
    if work is None or isinstance(work, Message):
        return work or Message()
    try:
        stage = next(work)
        while True:
            stage = work.send(plain_stage(stage, party, ctx))
    except StopIteration as finished:
        return finished.value or Message()


def plain_stage(stage: Stage, party: Party, ctx: Context) -> Trained:
    """Run a stage as people write it: DataLoader, zero_grad, backward, step."""
    training = stage.training or ctx.training
    data = stage.data if stage.data is not None else party.train
    columns = list(stage.columns)
    dataset = TensorDataset(data.inputs(), data.labels(), *stage.columns.values())
    nets = {name: Net(module) for name, module in party.models.items()}
    updates = []
    for update in stage.all_updates():
        chosen = {
            key: {n: p for n, p in party.models[key].named_parameters() if is_trainable(n, prefixes)}
            for key, prefixes in update.trainable.items()
        }
        own = update.training or training
        flat = [p for group in chosen.values() for p in group.values()]
        updates.append((update, chosen, flat, make(own.optimizer)(flat, lr=own.lr)))
    epochs = stage.epochs if stage.epochs is not None or stage.steps is not None else training.epochs
    last, done = 0.0, 0
    lone = len(dataset) % training.batch_size == 1  # BatchNorm cannot learn from a last batch of one
    for _ in range(epochs or 10**9):
        for x, y, *rest in DataLoader(dataset, training.batch_size, shuffle=stage.shuffle, drop_last=lone):
            extra = dict(zip(columns, rest, strict=True))
            for name, draw in stage.draws.items():
                extra[name] = draw.sample(len(x), torch.default_generator)
            batch = Batch(x, y, extra)
            for update, chosen, flat, optimizer in updates:
                for module in party.models.values():
                    module.requires_grad_(False)
                for parameter in flat:
                    parameter.requires_grad_(True)
                optimizer.zero_grad()
                if update.gradients is None:
                    loss = update.losses[0](nets, batch, stage.aux)
                    loss.backward()
                else:
                    found = []
                    for function in update.losses:
                        loss = function(nets, batch, stage.aux)
                        grads = iter(torch.autograd.grad(loss, flat, materialize_grads=True))
                        found.append({k: {n: next(grads) for n in g} for k, g in chosen.items()})
                    combined = update.gradients(tuple(found), stage.aux)
                    for key, group in chosen.items():
                        for name, parameter in group.items():
                            parameter.grad = combined[key][name]
                optimizer.step()
                last = loss.item()
            done += 1
            if stage.steps is not None and done >= stage.steps:
                return Trained(last, done)
    for module in party.models.values():
        module.requires_grad_(True)
    return Trained(last, done)


def make(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return a plain optimizer class."""
    return {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
