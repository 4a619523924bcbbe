"""What a federation will carry out of a site, told to the people there before anything does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyfed.core.method import Method
from polyfed.core.party import Blueprint
from polyfed.core.privacy import Privacy
from polyfed.flower.describe import FAILING, JOINING, MEASURING, PRIVATE, WORKING
from polyfed.flower.rehearse import Problem, in_words, rehearse
from polyfed.flower.sitedata import SiteData
from polyfed.specs import ModelSpec, in_zoo


def privacy_of(run: Mapping[str, Any]) -> Privacy:
    """Return how private training is to be, as the server says."""
    return Privacy(**run.get("privacy", {}))


def what_leaves(
    model: ModelSpec, data: SiteData, method: Method, blueprint: Blueprint, run: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the sentences: the method, each of its messages with its bytes, and all that goes with them."""
    options = ", ".join(f"{key}={value}" for key, value in run["options"].items())
    yield f"The server runs {method.name}{f' ({options})' if options else ''} for {run['rounds']} rounds."
    yield f"What leaves this site: {method.sends}."
    shape, outputs = data.input_shape, blueprint.num_classes
    problem = Problem(data.num_classes, shape, outputs, data.public is not None, data.task)
    privacy = privacy_of(run)
    if privacy.on:
        budget = "no budget" if privacy.epsilon is None else f"at most epsilon {privacy.epsilon:g}"
        yield f"What is learned is differentially private for each training sample: {budget}, delta {privacy.delta:g}."
        yield "Without noise: what is told when it joins, and figures measured on test and validation samples."
    if privacy.of_clients:
        yield (
            "The server adds noise to what it combines, for each site as a whole; it sees what leaves this site "
            "without noise."
        )
    templates = rehearse(method, blueprint, problem, run["seed"])
    for line in in_words(templates, data.num_classes):
        yield f"  {line}"
    yield f"  when it joins: {'; '.join(JOINING.values())}"
    if method.shares and not in_zoo(model):
        yield "  when it joins: the initial weights of its network"
    yield f"  with every reply: {'; '.join((PRIVATE if privacy.on else WORKING).values())}"
    yield f"  with every measurement: {'; '.join(MEASURING.values())}"
    yield f"  instead of a reply, if this site cannot give it: {'; '.join(FAILING.values())}"
    if method.shares or any(template.weights for template in (templates or {}).values()):
        yield "Model weights are among it; your samples stay here."
    elif templates is None:  # the method could not be tried here
        yield "Whether weights of your network are among it could not be tried; your samples stay here."
    else:
        yield "No weights are among it; your samples stay here."
