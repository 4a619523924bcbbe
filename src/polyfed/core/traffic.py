"""What clients and server tell each other in bytes, as formulas on a method's class.

    traffic = {"main": Traffic(down="4*(P + B)", up="4*(P + B) + 8")}

A formula belongs to a step of the method's plan and stands for the payload that the run counts (`Message.nbytes`), of a
client in one exchange. `polyfed methods NAME` and the method's page print it; the contract works it out beside every
message of a run, so that a wrong one is found. Its names are those of `SYMBOLS` and of the method's own `symbols`, and
the method's options; `[mu > 0]` is 1 where that holds and 0 where not.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from polyfed.core.message import Message, State
from polyfed.ops.lowrank import WHOLE

if TYPE_CHECKING:
    from polyfed.core.method import Method, Step
    from polyfed.core.party import Blueprint, ClientInfo, Context
    from polyfed.core.samples import Samples


@dataclass(frozen=True)
class Traffic:
    """The bytes of one exchange with one client, as formulas."""

    down: str = "0"
    up: str = "0"


@dataclass(frozen=True)
class Told:
    """One message and what is known about its client: the numbers of a formula come from here."""

    method: Any  # symbols of a method look at its own
    ctx: Context
    client: int
    message: Message
    models: Mapping[str, State]  # the client's
    train: Samples
    public: Samples | None

    @property
    def info(self) -> ClientInfo:
        """What the server knows about the client."""
        return self.ctx.infos[self.client]

    @property
    def blueprint(self) -> Blueprint:
        """The client's architecture."""
        return self.ctx.blueprints[self.info.architecture]

    @property
    def level(self) -> Blueprint:
        """What the client holds in this round, in methods that redraw it (`level_of`)."""
        found: Blueprint = self.method.level_of(self.info, self.ctx)
        return found

    @property
    def others(self) -> list[Blueprint]:
        """The architectures of all other clients."""
        infos = self.ctx.infos.values()
        return [self.ctx.blueprints[info.architecture] for info in infos if info.id != self.client]


class Symbol(NamedTuple):
    """A letter of a formula: what it stands for, and its number."""

    meaning: str
    number: Callable[[Told], float]


def floats(state: Mapping[str, Any], prefix: str = "") -> int:
    """Return how many numbers the float tensors of a state have, those whose names begin so."""
    return sum(t.numel() for name, t in state.items() if t.is_floating_point() and name.startswith(prefix))


def model_size(model: str, meaning: str, prefix: str = "") -> Symbol:
    """Return the symbol for the size of a client's side model, or of a part of it; 0 where it has none."""
    return Symbol(meaning, lambda told: floats(told.models.get(model, {}), prefix))


def factor_size(model: str) -> Symbol:
    """Return the symbol for the numbers of a side model's change in low-rank factors (`ops/lowrank.py`), 0 of none."""

    def numbers(told: Told) -> int:
        if not told.message.data:
            return 0
        ranks = iter(told.message.data["ranks"].tolist())
        shapes = [tensor.shape for _, tensor in sorted(told.models[model].items()) if tensor.is_floating_point()]
        each = [(shape, next(ranks) if len(shape) > 1 else WHOLE) for shape in shapes]
        return sum(s.numel() if rank < 0 else rank * (s[0] + s[1:].numel() + 1) for s, rank in each)

    told_whole = "all numbers of vectors and embeddings"
    return Symbol(f"r(m + n + 1) for each matrix of m x n numbers and rank r, and {told_whole}", numbers)


def matrix_count(model: str) -> Symbol:
    """Return the symbol for the matrices of a side model whose change is told in low-rank factors, 0 of none."""

    def matrices(told: Told) -> int:
        return sum(tensor.dim() > 1 for tensor in told.models[model].values()) if told.message.data else 0

    return Symbol(f"matrices of the {model}", matrices)


def trained_size(blueprint: Blueprint) -> int:
    """Return how many parameters of an architecture are trained."""
    still = blueprint.buffers | blueprint.frozen
    return floats({name: tensor for name, tensor in blueprint.initial.items() if name not in still})


def buffer_size(blueprint: Blueprint) -> int:
    """Return how many numbers the float buffers of an architecture have."""
    return floats({name: tensor for name, tensor in blueprint.initial.items() if name in blueprint.buffers})


def _classes_told(told: Told) -> int:
    return len(told.message.data.get("classes", told.message.data.get("labels", ())))


SYMBOLS = {
    "P": Symbol("trained parameters of the client's network", lambda told: trained_size(told.blueprint)),
    "B": Symbol("its float buffers, which are BatchNorm's statistics", lambda told: buffer_size(told.blueprint)),
    "H": model_size("main", "parameters of its last layer", "head."),
    "F": Symbol("features", lambda told: told.blueprint.feature_dim or 0),
    "C": Symbol("outputs of a network, one for each class", lambda told: told.blueprint.num_classes),
    "C_k": Symbol("classes of the client's samples", lambda told: len(told.train.labels().unique())),
    "C_m": Symbol("classes that the message tells of (none before the server knows any)", _classes_told),
    "c": Symbol("bytes of a class number (1, past 256 classes 2)", lambda told: 1 + (told.ctx.num_classes > 256)),
    "N": Symbol("public samples", lambda told: len(told.public or ())),
    "n": Symbol("the client's samples", lambda told: len(told.train)),
    "t": Symbol("the round", lambda told: told.ctx.round),
}
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.Lt: operator.lt, ast.Not: operator.not_,
    ast.And: lambda *values: all(values), ast.Or: lambda *values: any(values),
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "ceil": math.ceil}


def expected_bytes(formula: str, told: Told) -> int:
    """Work a formula out."""
    known = SYMBOLS | dict(told.method.symbols)
    value = _value(ast.parse(formula, mode="eval").body, lambda name: _number(name, known, told))
    if value != int(value):
        raise ValueError(f"the formula {shown(formula)} gives {value}, which is no number of bytes")
    return int(value)


def _number(name: str, known: Mapping[str, Symbol], told: Told) -> Any:
    return known[name].number(told) if name in known else getattr(told.method, name)


def _value(node: ast.AST, number: Callable[[str], Any]) -> Any:
    """Work out one part of a formula: numbers, names, sums, products, conditions, and a few functions."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return number(node.id)
        case ast.BinOp():
            return _OPERATORS[type(node.op)](_value(node.left, number), _value(node.right, number))
        case ast.UnaryOp():
            return _OPERATORS[type(node.op)](_value(node.operand, number))
        case ast.BoolOp():
            return _OPERATORS[type(node.op)](*(_value(value, number) for value in node.values))
        case ast.Compare(ops=[only], comparators=[right]):
            return _OPERATORS[type(only)](_value(node.left, number), _value(right, number))
        case ast.List(elts=[condition]):
            return int(bool(_value(condition, number)))
        case ast.Call(func=ast.Name(id=name)):
            return _FUNCTIONS[name](*(_value(argument, number) for argument in node.args))
    raise ValueError(f"a formula cannot hold {ast.unparse(node)}")


def shown(formula: str) -> str:
    """Return a formula as people write it."""
    return formula.replace("*", "·").replace("==", "=").replace("'", "")


def letters(method: Method) -> dict[str, str]:
    """Return what the letters in a method's formulas stand for; options explain themselves."""
    formulas = [formula for one in (method.traffic or {}).values() for formula in (one.down, one.up)]
    nodes = [node for formula in formulas for node in ast.walk(ast.parse(formula))]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    conditions = any(isinstance(node, ast.List) for node in nodes)
    known = SYMBOLS | dict(method.symbols)
    unknown = used - known.keys() - {field.name for field in fields(method)} - _FUNCTIONS.keys()
    if unknown:
        raise ValueError(f"{method.name}: a formula uses {', '.join(sorted(unknown))}, which nothing explains")
    found = {name: symbol.meaning for name, symbol in known.items() if name in used}
    return found | ({"[x]": "1 where x holds, else 0"} if conditions else {})


def described(method: Method) -> list[dict[str, str]] | None:
    """Return a method's exchanges with their moment and formulas, as people read them; None where it has none."""
    if method.traffic is None:
        return None
    return [
        {"step": step, "when": _moment(method, step), "down": shown(exchange.down), "up": shown(exchange.up)}
        for step, exchange in method.traffic.items()
    ]


def _moment(method: Method, name: str) -> str:
    """Return when a step is run, as the plan of a method says."""
    plan = method.plan()

    def among(steps: tuple[Step, ...]) -> Step | None:
        return next((step for step in steps if step.name == name), None)

    if step := among(plan.round):
        often = "once" if plan.rounds == 1 else "each round"
        return f"{often}, when models are measured" if step.when == "evaluation" else often
    if among(plan.before):
        return "before the rounds"
    return "after the rounds" if among(plan.after) else "where options ask for it"
