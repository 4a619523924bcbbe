"""What a reply must look like, and what is wrong with one that does not: the server refuses it in one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from polyfed.core.errors import MessageError
from polyfed.core.message import Message
from polyfed.core.method import Method, Step
from polyfed.core.party import Blueprint, ClientInfo, Context
from polyfed.flower.describe import LARGEST
from polyfed.flower.rehearse import Problem, Sizes, Spec, Template, needs_stand_in, rehearse
from polyfed.flower.weights import lessened

ROUNDING = 1e-6  # by this share a number may differ from what the plan gives


class Expectations:
    """Checks replies at the server."""

    def __init__(self, method: Method, blueprints: Mapping[str, Blueprint], problem: Problem, seed: int) -> None:
        self.method = method
        self.blueprints = blueprints
        self.problem = problem
        self.templates = {name: rehearse(method, plan, problem, seed) for name, plan in blueprints.items()}

    def check(self, reply: Message, sent: Message, step: Step, info: ClientInfo) -> None:
        """Refuse a reply that this method would not give here.

        Raises
        ------
        MessageError
            Naming the site and the first thing that is wrong.
        """
        problem = self._wrong(reply, sent, step, info)
        if problem is not None:
            raise MessageError(f"Message from {info} refused: {problem}.")

    def plan(self, reply: Message, claimed: ClientInfo, ctx: Context) -> None:
        """Refuse numbers that this site's samples and the plan cannot give.

        Raises
        ------
        MessageError
            Naming the site, the number, and what it can be.
        """
        for name, (least, most) in self._numbers(reply, claimed, ctx).items():
            told, slack = float(reply.meta[name]), ROUNDING * most
            if not least - slack <= told <= most + slack:
                possible = f"{least:g}" if math.isclose(least, most) else f"{least:g} to {most:g}"
                raise MessageError(
                    f"Message from {claimed} refused: '{name}' is {told:g}, but its plan gives {possible}."
                )

    def _numbers(self, reply: Message, info: ClientInfo, ctx: Context) -> dict[str, tuple[float, float]]:
        return {name: limits for name, limits in self.method.numbers(info, ctx).items() if name in reply.meta}

    def weigh(self, reply: Message, step: Step, claimed: ClientInfo, weighed: ClientInfo, ctx: Context) -> None:
        """Let a reply that was checked count with fewer samples than the site says it has, where that is the bound."""
        samples = weighed.samples
        if samples >= claimed.samples:
            return
        for name, (least, most) in self._numbers(reply, weighed, ctx).items():
            reply.meta[name] = type(reply.meta[name])(min(max(float(reply.meta[name]), least), most))
        if "samples" in reply.meta:
            reply.meta["samples"] = samples
        template = (self.templates[claimed.architecture] or {}).get(step.name, Template())
        for name in [key.removeprefix("data/") for key, spec in template.tensors.items() if spec.counts]:
            if name in reply.data:
                reply.data[name] = lessened(reply.data[name], samples, claimed.samples)

    def _wrong(self, reply: Message, sent: Message, step: Step, info: ClientInfo) -> str | None:
        for name, tensor in reply.tensors():
            if tensor.is_floating_point() and tensor.numel() and max(map(abs, map(float, tensor.aminmax()))) > LARGEST:
                return f"'{name[:100]}' holds values beyond {LARGEST:g}, which no training gives"
        if "samples" in reply.meta and reply.meta["samples"] != info.samples:
            return f"it counts {str(reply.meta['samples'])[:30]} samples, but joined with {info.samples}"
        templates = self.templates[info.architecture]
        template = (templates or {}).get(step.name)
        own = self.blueprints[info.architecture]
        if template is None:
            return self._wrong_weights(reply, own)
        for model in reply.params:
            if model in template.echoed:
                wrong = _differences(reply.params[model], sent.params.get(model, {}), model)
                if wrong is not None:
                    return wrong
        for model in template.echoed:
            if sent.params.get(model) and model not in reply.params:
                return f"the weights 'params/{model}' are missing"
        stood_in = needs_stand_in(own)
        if stood_in and (wrong := self._wrong_weights(reply, own)) is not None:
            return wrong
        skip = set(reply.params) if stood_in else template.echoed
        have = {n: t for n, t in reply.tensors() if not (n.startswith("params/") and n.split("/")[1] in skip)}
        if template.open:
            have = {name: tensor for name, tensor in have.items() if name in template.tensors}
        wrong = _wrong_tensors(have, template.tensors, self.problem.num_classes, info.samples)
        return wrong or _wrong_meta(reply, template.meta, template.open)

    def _wrong_weights(self, reply: Message, own: Blueprint) -> str | None:
        """Check weights by the site's own description of its network, where nothing better is known."""
        for model, state in reply.params.items():
            if model not in self.method.shares:
                return f"weights of '{model[:60]}' were not asked for"
            if model != "main":
                continue
            for name, tensor in state.items():
                if name not in own.shapes:
                    return f"'params/{model}/{name[:100]}' was not asked for"
                wrong = _difference(tensor, own.initial[name], f"params/{model}/{name}")
                if wrong is not None:
                    return wrong
        return None


def _differences(have: Mapping[str, Tensor], want: Mapping[str, Tensor], model: str) -> str | None:
    for name in sorted(have.keys() | want.keys()):
        full = f"params/{model}/{name[:100]}"
        if name not in have:
            return f"'{full}' is missing"
        if name not in want:
            return f"'{full}' was not asked for"
        wrong = _difference(have[name], want[name], full)
        if wrong is not None:
            return wrong
    return None


def _difference(have: Tensor, want: Tensor, name: str) -> str | None:
    if have.shape == want.shape and have.dtype == want.dtype:
        return None
    return f"'{name}' is {have.dtype} {list(have.shape)}, expected {want.dtype} {list(want.shape)}"


def _wrong_tensors(have: Mapping[str, Tensor], want: Mapping[str, Spec], num_classes: int, samples: int) -> str | None:
    free: dict[Sizes, int] = {}
    for name in sorted(have.keys() | want.keys()):
        if name not in have:
            if want[name].always:
                return f"'{name}' is missing"
            continue
        if name not in want:
            return f"'{name[:100]}' was not asked for"
        tensor, spec = have[name], want[name]
        axes = spec.axes if spec.axes is not None else tuple((n, n) for n in tensor.shape)
        fits = tensor.dtype == spec.dtype and tensor.dim() == len(axes)
        for size, sizes in zip(tensor.shape, axes, strict=False):
            fits = fits and size == (sizes[0] if sizes[0] == sizes[1] else free.setdefault(sizes, size))
        if not fits:
            wanted = [sizes[0] if sizes[0] == sizes[1] else free.get(sizes, "any") for sizes in axes]
            return f"'{name}' is {tensor.dtype} {list(tensor.shape)}, expected {spec.dtype} {wanted}"
        if spec.low is not None and tensor.numel() and int(tensor.min()) < spec.low:
            return f"'{name}' holds {int(tensor.min())}, which must not be negative"
        if spec.classes and (
            len(set(tensor.tolist())) < len(tensor) or (len(tensor) and int(tensor.max()) >= num_classes)
        ):
            return f"'{name}' lists classes twice or beyond {num_classes - 1}"
        if spec.counts and float(tensor.double().sum()) > samples:
            return f"'{name}' counts {float(tensor.double().sum()):g} samples, but it joined with {samples}"
    return None


def _wrong_meta(reply: Message, want: Mapping[str, type], further: bool) -> str | None:
    for key, kind in want.items():
        if key not in reply.meta:
            return f"the number '{key}' is missing"
        value: Any = reply.meta[key]
        if not isinstance(value, kind) and not (kind is float and isinstance(value, int)):
            return f"'{key}' is a {type(value).__name__}, expected a {kind.__name__}"
        if isinstance(value, int | float) and value < 0:
            return f"'{key}' is {value}, which must not be negative"
    unknown = [] if further else sorted(reply.meta.keys() - want.keys())
    return f"'{unknown[0][:60]}' was not asked for" if unknown else None
