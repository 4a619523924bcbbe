"""The formulas of cost: what each term says is looked at beside messages that have it and messages that do not."""

import ast
import copy
from dataclasses import dataclass, replace
from typing import ClassVar
from unittest.mock import patch

import pytest
from tests.contract.case import DEPTHS
from tests.contract.table import CASES

import polyfed as pf
from polyfed import methods
from polyfed.core.message import Message
from polyfed.core.traffic import Told, Traffic, described, expected_bytes, letters, shown
from polyfed.methods import msfkd
from polyfed.testing import Setting
from polyfed.testing.checks import bytes_are_those_of_the_formulas

BN = ("cnn:4-8,bn",)
KEPT = {"buffers": "local", "pretrain_epochs": 1}


def more(method, *options, **changes):
    """Return cases as the first one of a method, with other options, for terms that no other case has."""
    first = next(case for case in CASES if case.method == method)
    return [replace(first, **{**changes, "options": {**first.options, **each}}) for each in options]


PLAIN = ("cnn:8-16@1", "cnn:8-16@0.5")
OFF = {"distill_epochs": 0, "discriminator_rounds": 0, "generator_rounds": 0}
MORE = [
    *(
        case
        for name in ("fedavg", "scaffold", "fednova", "feddistill_plus", "feddf", "ccvr", "dafkd", "fedgen")
        for case in more(name, {"pretrain_epochs": 1}, KEPT, models=BN)
    ),
    *more("oneshot_fedavg", {}, models=BN),
    *more(
        "fedin", {"buffers": "average", "pretrain_epochs": 1}, {"use_in": False, "pretrain_epochs": 1}, models=DEPTHS
    ),
    *more("lg_fedavg", {"pretrain_epochs": 1}),
    *more("fiarse", {"pretrain_epochs": 1, "sizes": (0.5, 0.02), "scope": "layer"}, models=BN),
    *(
        case
        for name in ("heterofl", "heterofl_dynamic", "msfkd", "dafkd_hetero", "fedgen_hetero")
        for case in more(name, {"static_bn": False, "pretrain_epochs": 1}, {"static_bn": False, **KEPT})
    ),
    *more("heterofl_dynamic", {}, models=("cnn:8-16",)),
    *more("dafkd", OFF),
    *more("dafkd_hetero", OFF, models=PLAIN),
    *more("msfkd", {"rho": 0.1}, models=PLAIN),
    *more("fedgen", {"alpha": 0.0, "beta": 0.0, "pretrain_epochs": 1}),
    *more("fedgen_hetero", {"alpha": 0.0, "beta": 0.0, "pretrain_epochs": 1}, models=PLAIN),
    *more("fedgen", {"share": "head", "pretrain_epochs": 1}, feature_dim=8),
    *more("ccvr", {"form": "clients"}, {"form": "clients", "covariance": "diag"}, feature_dim=8),
    *more("fedvtc", {"vtc_upload": "round", "weighting": "samples"}),
    *more("fedfd_student", {"distill": "logit"}, {"logit_aux": 0.0}, {"digest_epochs": 0}),
    *more("fedtype", {"weighting": "samples"}),
    *more("ensemble", {"weights": "class"}, models=BN),
    *more("feddf", {}, models=("mlp:1x16", "sklearn:LogisticRegression")),
]
SAID = sorted(name for name, kind in methods.registry().items() if "traffic" in vars(kind) and kind.traffic)


def mutants(formula):
    """Yield a formula with one number changed, one addend left out, or one condition always or never true."""
    tree = ast.parse(formula, mode="eval")
    for place, node in enumerate(ast.walk(tree)):
        changes = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            changes += [lambda n: n.right, lambda n: n.left]
        if isinstance(node, ast.BinOp):
            for side in ("left", "right"):
                if isinstance(getattr(node, side), ast.Constant):
                    changes.append(lambda n, side=side: _with(n, side, ast.Constant(getattr(n, side).value + 1)))
        if isinstance(node, ast.List):
            changes += [lambda n: ast.Constant(0), lambda n: ast.Constant(1)]
        for change in changes:
            other = copy.deepcopy(tree)
            found = list(ast.walk(other))[place]
            yield ast.unparse(_Replaced(found, change(found)).visit(other))


def _with(node, side, value):
    setattr(node, side, value)
    return node


class _Replaced(ast.NodeTransformer):
    def __init__(self, old, new):
        self.old, self.new = old, new

    def visit(self, node):
        return self.new if node is self.old else super().generic_visit(node)


def heard(method):
    """Yield step, direction, what is known and the bytes of all messages in the cases of a method."""
    for case in [case for case in CASES if case.method == method]:
        yield from messages_of(case)
    with patch.object(msfkd, "PATIENCE", 1):  # rounds until epochs are lowered: a run here has two
        for case in [case for case in MORE if case.method == method]:
            yield from messages_of(case)


def messages_of(case):
    """Yield those of one case."""
    for said in case.setting.observed.said:
        for direction, group in (("down", said.down), ("up", said.up)):
            for client, blob in group.items():
                message = Message.from_bytes(blob)
                who = client, message, said.models[client], said.train[client], said.public
                size = message.nbytes() if getattr(said.step, direction) else 0
                yield said.step.name, direction, Told(case.setting.method, said.ctx, *who), size


@pytest.mark.long
@pytest.mark.parametrize("method", SAID)
def test_every_term_of_a_formula_is_seen(method):
    messages = list(heard(method))
    survivors = []
    for step, exchange in methods.find(method).traffic.items():
        for direction in ("down", "up"):
            right = getattr(exchange, direction)
            beside = [(told, size) for name, way, told, size in messages if (name, way) == (step, direction)]
            assert [expected_bytes(right, told) for told, _ in beside] == [size for _, size in beside], (step, right)
            for wrong in mutants(right):
                if all(expected_bytes(wrong, told) == size for told, size in beside):
                    survivors.append(f"{step} {direction}: {shown(wrong)}")
    assert not survivors, "\n".join(survivors)


@dataclass(frozen=True)
class More(pf.FedAvg):
    """Sends eight bytes more than FedAvg, whose formulas it has."""

    name: ClassVar[str] = "more"

    def local(self, client, step, ctx):
        reply = yield from super().local(client, step, ctx)
        reply.meta["more"] = 1
        return reply


def test_a_wrong_formula_is_told():
    with pytest.raises(AssertionError, match=r"client 0, round 1, step 'main': 1116 bytes go up, and .* = 1108$"):
        bytes_are_those_of_the_formulas(Setting(More(), ("mlp:1x4",)))


def test_a_formula_with_a_letter_that_nothing_explains_is_refused():
    @dataclass(frozen=True)
    class Unknown(pf.FedAvg):
        traffic: ClassVar = {"main": Traffic("4*X")}

    with pytest.raises(ValueError, match="a formula uses X, which nothing explains"):
        letters(Unknown())


def test_formulas_read_as_people_write_them():
    row = described(methods.make("fedproto", {}))[0]
    assert row == {"step": "main", "when": "each round", "down": "C_m·(4·F + c)", "up": "C_k·(4·F + 4 + c)"}
    assert set(letters(methods.make("fedproto", {}))) == {"F", "C_m", "C_k", "c"}
    moments = {row["step"]: row["when"] for row in described(methods.make("fens", {}))}
    assert moments == {"upload": "before the rounds", "models": "before the rounds", "combiner": "each round"}
    assert described(methods.make("ams", {}))[0]["when"] == "once"
