"""What a reply must look like, found out by rehearsal.

A method says what it sends only by sending it. So before strangers' messages are accepted, the server lets the method
run one round by itself, with a single simulated client of each architecture and a handful of random samples: twice,
with data of different sizes. Names, types and sizes that come out the same both times are demanded of every real
reply; a size that differed (the number of classes at hand, the size of the public set) may be anything, but must be
the same wherever it was the same in the rehearsals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from polyfed.core.errors import MessageError, PolyfedError
from polyfed.core.federation import Federation
from polyfed.core.message import Message
from polyfed.core.method import Method, Replies, Step
from polyfed.core.party import Blueprint, ClientInfo, Context, PartyData
from polyfed.core.samples import Samples
from polyfed.core.settings import Settings, Training
from polyfed.core.shape import InputShape
from polyfed.core.task import CLASSIFICATION, Task
from polyfed.engines.inprocess import InProcess
from polyfed.flower.weights import lessened
from polyfed.models import build, with_feature_dim
from polyfed.models.contract import cut_shapes

LARGEST = 1e10  # of any number that is not whole; beyond it, one site could drown all others
LARGE = 2_000_000  # parameters: larger networks are not built just for a rehearsal
PUBLIC = (24, 16)  # public samples in the two rehearsals
TRAINING = (Training(epochs=1, batch_size=8, lr=1e-4), Training(epochs=2, batch_size=2, lr=1e-4))
Sizes = tuple[int, int]  # of one axis in the two rehearsals


STAND_INS = {"image": ("mlp:1x16", "cnn:4-8"), "text": ("cnn1d:1x16", "cnn1d:2x24")}


@dataclass(frozen=True)
class Problem:
    """What all parties work on."""

    num_classes: int
    input_shape: tuple[int, ...]
    outputs: int
    public: bool  # whether there are public samples
    task: Task = CLASSIFICATION


@dataclass
class Spec:
    """What one tensor of a reply must be."""

    dtype: torch.dtype
    axes: tuple[Sizes, ...] | None  # None: any shape
    always: bool = True
    low: int | None = None  # of whole numbers
    classes: bool = False  # it lists class numbers
    counts: bool = False  # it counts the samples


@dataclass
class Template:
    """What the replies of one architecture in one step must be."""

    tensors: dict[str, Spec] = field(default_factory=dict)  # of the data part, and of models other than echoed ones
    echoed: set[str] = field(default_factory=set)  # models that come back with the names that were sent
    meta: dict[str, type] = field(default_factory=dict)
    open: bool = False  # further names are possible: a stand-in was rehearsed, which may lack what the real one has


class Recorder(InProcess):
    """The in-process backend that remembers what was sent and answered in each step."""

    def exchange(self, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Exchange as usual, and remember."""
        if not hasattr(self, "seen"):
            self.seen: dict[str, tuple[Message, Message]] = {}
        replies = super().exchange(step, messages, ctx)
        if step.up:
            self.seen[step.name] = (messages[0], replies.messages[0].detached())
        return replies


def rehearse(method: Method, blueprint: Blueprint, problem: Problem, seed: int) -> dict[str, Template] | None:
    """Return the templates of every step, or None where the method cannot be rehearsed with this architecture."""
    standing_in = needs_stand_in(blueprint)
    try:
        plans = [stand_in(blueprint, problem, variant) if standing_in else blueprint for variant in (0, 1)]
        seen = [_run(method, plan, problem, seed, variant) for variant, plan in enumerate(plans)]
    except (PolyfedError, RuntimeError, ValueError, KeyError, TypeError, IndexError, AttributeError, AssertionError):
        return None
    found = {}
    for name in seen[0].keys() & seen[1].keys():
        template = compare(seen[0][name], seen[1][name], problem)
        template.open = standing_in
        if standing_in:  # weights of the stand-in say nothing about the real ones
            template.tensors = {key: spec for key, spec in template.tensors.items() if key.startswith("data/")}
        found[name] = template
    return found


def needs_stand_in(blueprint: Blueprint) -> bool:
    """Tell whether a network cannot be rehearsed itself: only its site can build it, or it takes too much memory."""
    return blueprint.build is None or blueprint.parameters > LARGE


def stand_in(blueprint: Blueprint, problem: Problem, variant: int) -> Blueprint:
    """Return a small network with features of the same size.

    It is another one in each rehearsal, so that what depends on a network's inside differs and is not demanded.
    """
    kind = InputShape(problem.input_shape).kind
    first, second = STAND_INS.get(kind, ("mlp:1x16", "mlp:2x24"))
    with torch.random.fork_rng(devices=[]):
        module = build(second if variant else first, problem.input_shape, problem.outputs)
        if blueprint.feature_dim is not None:
            module = with_feature_dim(module, blueprint.feature_dim, "linear")
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return replace(
        blueprint,
        shapes=shapes,
        buffers=frozenset(),
        initial=state,
        build=lambda: module,
        frozen=frozenset(),
        cuts=cut_shapes(module, problem.input_shape),
    )


def _inputs(number: int, shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    if words := InputShape(shape).words:
        return torch.randint(1, words, (number, *shape), generator=rng)
    return torch.randn((number, *shape), generator=rng)


def _run(
    method: Method, blueprint: Blueprint, problem: Problem, seed: int, variant: int
) -> dict[str, tuple[Message, Message]]:
    """Let the method run one round with one simulated client and return what it sent and answered in each step."""
    rng = torch.Generator().manual_seed(variant)
    labels = torch.arange(_present(problem, variant)).repeat(2 + variant)
    train = Samples(_inputs(len(labels), problem.input_shape, rng), _targets(labels, problem))
    public = None
    if problem.public:
        x = _inputs(PUBLIC[variant], problem.input_shape, rng)
        public = Samples(x, _targets(torch.arange(PUBLIC[variant]) % problem.num_classes, problem))
    counts = train.label_counts(problem.num_classes) if problem.task == CLASSIFICATION else None
    info = ClientInfo(0, len(train), blueprint.name, blueprint.parameters, counts, "rehearsal")
    backend = Recorder(method, [info], [PartyData(train, None, public)], {blueprint.name: blueprint}, train)
    federation = Federation(
        method,
        backend,
        Settings(1, seed, TRAINING[variant]),
        num_classes=problem.num_classes,
        input_shape=problem.input_shape,
        test=train if method.selects_on_test() else None,
        public=public,
        public_classes=problem.outputs - problem.num_classes or None,
        task=problem.task,
    )
    federation.run()
    return getattr(backend, "seen", {})


def _targets(labels: Tensor, problem: Problem) -> Tensor:
    """Return class numbers as what the task learns."""
    if problem.task == CLASSIFICATION:
        return labels
    return torch.nn.functional.one_hot(labels, problem.num_classes).float()


def compare(first: tuple[Message, Message], second: tuple[Message, Message], problem: Problem) -> Template:
    """Return what two rehearsals of a step have in common."""
    template = Template()
    for model in first[1].params:
        same = [
            reply.params.get(model, {}).keys() == sent.params.get(model, {}).keys() for sent, reply in (first, second)
        ]
        if all(same):
            template.echoed.add(model)
    a, b = dict(first[1].tensors()), dict(second[1].tensors())
    for name in a.keys() | b.keys():
        if name.startswith("params/") and name.split("/")[1] in template.echoed:
            continue
        x, y = a.get(name, b.get(name)), b.get(name, a.get(name))
        assert x is not None and y is not None
        axes = tuple(zip(x.shape, y.shape, strict=True)) if x.dim() == y.dim() else None
        spec = Spec(x.dtype, axes, name in a and name in b)
        if not x.is_floating_point() and x.numel() and y.numel():
            spec.low = 0 if int(x.min()) >= 0 and int(y.min()) >= 0 else None
            spec.classes = _lists_classes(x, problem.num_classes) and _lists_classes(y, problem.num_classes // 2 or 1)
        spec.counts = all(
            t.numel() and float(t.double().sum()) == samples_of(problem, variant) for variant, t in enumerate((x, y))
        )
        template.tensors[name] = spec
    template.meta = {key: type(value) for key, value in first[1].meta.items() if key in second[1].meta}
    return template


def samples_of(problem: Problem, variant: int) -> int:
    """Return how many training samples the client of a rehearsal has."""
    return (2 + variant) * _present(problem, variant)


def _present(problem: Problem, variant: int) -> int:
    return problem.num_classes if variant == 0 else max(1, problem.num_classes // 2)


def _lists_classes(x: Tensor, count: int) -> bool:
    return x.dim() == 1 and sorted(x.tolist()) == list(range(count))


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

    def weigh(self, reply: Message, step: Step, claimed: ClientInfo, samples: int) -> None:
        """Let a reply that was checked count with fewer samples than the site says it has, where that is the bound."""
        if samples >= claimed.samples:
            return
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


def in_words(templates: Mapping[str, Template] | None, num_classes: int) -> list[str]:
    """Describe for people what the replies of each step hold."""
    lines = []
    for step, template in (templates or {}).items():
        weights = {name.split("/")[1] for name in template.tensors if name.startswith("params/")}
        parts = [f"weights of '{model}'" for model in sorted(template.echoed | weights)]
        for name, spec in sorted(template.tensors.items()):
            if name.startswith("data/"):
                shape = " x ".join(_size(sizes, num_classes) for sizes in spec.axes or ()) or "some"
                parts.append(f"{name.removeprefix('data/')}: {shape} {str(spec.dtype).removeprefix('torch.')}")
        parts += [f"the number '{key}'" for key in sorted(template.meta)]
        if parts:
            lines.append(f"in step '{step}': {'; '.join(parts)}")
    return lines


def _size(sizes: Sizes, num_classes: int) -> str:
    if sizes[0] == sizes[1]:
        return str(sizes[0])
    return f"(up to {num_classes})" if sizes == (num_classes, max(1, num_classes // 2)) else "(some)"
