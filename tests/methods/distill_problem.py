"""Uploads and a server that takes them in by hand: for methods that distill uploaded networks."""

import torch
from public_problem import party

import polyfed as pf
from polyfed.core.message import Message
from polyfed.core.method import Step

TWO = ("mlp:1x8", "mlp:2x8")
DIGITS = pf.split(pf.load("digits", limit=(120, 40)), clients=3, seed=0, public=40)  # public data of the same classes


def uploads(run):
    """What all clients would upload as they are now."""
    names = {client: run.method.slots_of(run.ctx.blueprints[i.architecture], run.ctx) for client, i in infos(run)}
    found = {}
    for client, slots in names.items():
        own = party(run, client).main.state_dict()
        found[client] = Message({"main": {n: own[n].clone() for n in slots}}, meta={"samples": 1})
    return found


def infos(run):
    return sorted(run.backend.infos.items())


def moved(run, seed=1):
    """Uploads that differ from each other and from the start."""
    rng = torch.Generator().manual_seed(seed)
    replies = uploads(run)
    for reply in replies.values():
        state = reply.params["main"]
        reply.params["main"] = {n: t + 0.3 * torch.randn(t.shape, generator=rng) for n, t in state.items()}
    return replies


def taught(run, replies):
    """The server's state after one fuse."""
    run.ctx.round = 1
    run.method.fuse(run.server, replies, Step(), run.ctx)
    return {name: tensor.clone() for name, tensor in run.server.state.items()}
