"""What a client does with a message: take it in, work through its stages, answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from polyfed.core.message import Message
from polyfed.core.method import Method, Step
from polyfed.core.party import Context, Party
from polyfed.core.runner import run_stage
from polyfed.core.stage import Stage, Trained

Run = Callable[[Stage, Party, Context, str], Trained]

STACK, PLAIN, WHOLE = "stack", "plain", "whole"  # how clients of an architecture work, as `config.json` says it


def receive(method: Method, party: Party, message: Message, step: Step, ctx: Context) -> None:
    """Put a message into the inbox and let the method take it in."""
    party.inbox = message
    with torch.no_grad():
        method.receive(party, step, ctx)


def drive(method: Method, party: Party, step: Step, ctx: Context, run: Run = run_stage) -> tuple[Message, float]:
    """Run a client's work of one step: every stage it yields, in order. Returns its reply and the last mean loss."""
    work = method.local(party, step, ctx)
    if work is None or isinstance(work, Message):  # a step without training need not be a generator
        return work or Message(), 0.0
    trained = Trained()
    number = 0
    try:
        stage = next(work)
        while True:
            trained = run(stage, party, ctx, f"{step.name}/{number}")
            number += 1
            stage = work.send(trained)
    except StopIteration as finished:
        return finished.value or Message(), trained.loss


def in_words(groups: Mapping[str, str]) -> str:
    """Return how clients of each architecture work, for people.

    Examples
    --------
    >>> in_words({"cnn:4-8": "whole", "mlp:1x8": "stack", "mlp:2x8": "stack"})
    'mlp:1x8, mlp:2x8 as stacks; cnn:4-8 as whole clients on threads'
    """
    ways = {STACK: "as stacks", PLAIN: "as stacks in plain training", WHOLE: "as whole clients on threads"}
    named = {way: ", ".join(name for name, found in groups.items() if found == way) for way in ways}
    return "; ".join(f"{named[way]} {words}" for way, words in ways.items() if named[way])
