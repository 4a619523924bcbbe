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

import torch
from torch import Tensor

from polyfed.core.errors import PolyfedError
from polyfed.core.federation import Federation
from polyfed.core.message import Message
from polyfed.core.method import Method, Replies, Step
from polyfed.core.party import Blueprint, ClientInfo, Context, PartyData
from polyfed.core.samples import Samples
from polyfed.core.settings import Settings, Training
from polyfed.core.shape import InputShape
from polyfed.core.task import CLASSIFICATION, Task
from polyfed.engines.inprocess import InProcess
from polyfed.models import build, with_feature_dim
from polyfed.models.contract import cut_shapes

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
    weights: set[str] = field(default_factory=set)  # of the data part: what was a weight of the network in a rehearsal
    open: bool = False  # further names are possible: a stand-in was rehearsed, which may lack what the real one has


@dataclass(frozen=True)
class Heard:
    """One exchange of a rehearsal: what was sent, what came back, and which data of it were the weights."""

    sent: Message
    reply: Message
    weights: frozenset[str]


class Recorder(InProcess):
    """The in-process backend that remembers what was sent and answered in each step."""

    def exchange(self, step: Step, messages: Mapping[int, Message], ctx: Context) -> Replies:
        """Exchange as usual, and remember."""
        if not hasattr(self, "seen"):
            self.seen: dict[str, Heard] = {}
        replies = super().exchange(step, messages, ctx)
        if step.up:
            reply = replies.messages[0].detached()
            own = [tensor for state in self.store.states(0).values() for tensor in state.values()]
            weights = {name for name, tensor in reply.tensors() if name.startswith("data/") and _is_one_of(tensor, own)}
            self.seen[step.name] = Heard(messages[0], reply, frozenset(weights))
        return replies


def _is_one_of(tensor: Tensor, weights: list[Tensor]) -> bool:
    """Tell whether a tensor has the numbers of one of the weights; a constant is no evidence."""
    told = tensor.numel() > 1 and tensor.is_floating_point() and bool((tensor != tensor.flatten()[0]).any())
    return told and any(w.numel() == tensor.numel() and torch.equal(w.flatten(), tensor.flatten()) for w in weights)


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


def _run(method: Method, blueprint: Blueprint, problem: Problem, seed: int, variant: int) -> dict[str, Heard]:
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
    data, plans, training = [PartyData(train, None, public)], {blueprint.name: blueprint}, TRAINING[variant]
    backend = Recorder(method, [info], data, plans, train, batch_size=training.batch_size, share=1.0)
    federation = Federation(
        method,
        backend,
        Settings(1, seed, training),
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


def compare(first: Heard, second: Heard, problem: Problem) -> Template:
    """Return what two rehearsals of a step have in common."""
    template = Template(weights={*first.weights, *second.weights})
    for model in first.reply.params:
        same = [
            heard.reply.params.get(model, {}).keys() == heard.sent.params.get(model, {}).keys()
            for heard in (first, second)
        ]
        if all(same):
            template.echoed.add(model)
    a, b = dict(first.reply.tensors()), dict(second.reply.tensors())
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
    template.meta = {key: type(value) for key, value in first.reply.meta.items() if key in second.reply.meta}
    return template


def samples_of(problem: Problem, variant: int) -> int:
    """Return how many training samples the client of a rehearsal has."""
    return (2 + variant) * _present(problem, variant)


def _present(problem: Problem, variant: int) -> int:
    return problem.num_classes if variant == 0 else max(1, problem.num_classes // 2)


def _lists_classes(x: Tensor, count: int) -> bool:
    return x.dim() == 1 and sorted(x.tolist()) == list(range(count))


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
