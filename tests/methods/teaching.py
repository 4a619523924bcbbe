"""Federations in which a server learns from features, for tests that take them apart."""

from __future__ import annotations

import torch
from public_problem import federation, problem
from torch import nn

import polyfed as pf
from polyfed.core.method import Step
from polyfed.models import levels

MAIN = Step()
ADG = levels("cnn:4-10", "a-d-g")  # features 10, 7, 4
NORMED = levels("cnn:4-10,bn", "a-d-g")
UNLIKE = ("cnn:4-8", "resnet10:w2")  # features 8 and 16
QUICK = pf.Training(epochs=1, batch_size=8, lr=0.05)


class OwnNet(nn.Module):
    """A user's own network."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.body(x.flatten(1))))


def own_model():
    return pf.adapt(OwnNet(), head="out", input_shape=(1, 8, 8))


def bare_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def started(method, models=ADG, clients=None, **options):
    run = federation(method, clients or problem((18, 24, 30)), models, training=QUICK, **options)
    run.ctx.round = 1
    return run


def watched(run):
    """Note every stage that the server runs."""
    stages, original = [], run.ctx.run_stage

    def note(stage, party, name):
        stages.append(stage)
        return original(stage, party, name)

    run.ctx.run_stage = note
    return stages


def finished(method, models=ADG, clients=None, rounds=2, **options):
    run = federation(method, clients or problem((18, 24, 30)), models, rounds, QUICK, **options)
    run.run()
    return run


def clones(state):
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def equal(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def projections(run):
    return {name: module for name, module in run.server.models.items() if name.startswith("projection/")}


def matrices(run):
    return {name: module.matrix.detach().clone() for name, module in projections(run).items()}


def off_identity(matrix):
    return float((matrix - torch.eye(len(matrix))).abs().max())
