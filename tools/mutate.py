"""Small wrong versions of a source file: each changes one place of a formula, as somebody could have mistyped it.

Only what is arithmetic is touched: signs, terms, factors, exponents, arguments of losses, means and sums, gradients
that are stopped, weights of averages, conditions. Errors, logged figures, annotations and functions that say what a
method is (its plan, its needs) stay as they are.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

NO_FORMULA = {
    *("plan", "check", "requirements", "releases", "beyond_training", "takes_learners", "tells_counts"),
    *("selects_on_test", "serves", "misfit", "settings", "own_settings", "server_blueprint", "check_pairs"),
    *("setup_server", "setup_client", "__init__", "check_complete", "about", "layout", "global_architecture"),
}
WHICH_EXCHANGE = ("step.name", "ctx.phase")  # conditions on these are the protocol
NUMBERS = ("NotNegative", "Positive", "PartShare", "SomeShare", "Share", "float")  # types of coefficients
NOT_COEFFICIENTS = ("lr", "momentum", "weight_decay")  # how long steps are, not what is minimized
OPPOSITE = {
    **{ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add},
}
OTHER_CALL = {"mean": "sum", "sum": "mean", "max": "min", "min": "max", "amax": "amin", "amin": "amax"}
OTHER_CALL |= {"add": "sub", "sub": "add", "add_": "sub_", "sub_": "add_", "argmax": "argmin", "fmean": "sum"}
OTHER_NAME = {"max": "min", "min": "max", "plain_mean": "sum", "fmean": "sum"}
OTHER_REDUCTION = {"mean": "sum", "sum": "mean", "batchmean": "mean"}
LEFT_OUT = {  # methods of a tensor that a formula could lack
    *("detach", "pow", "square", "sqrt", "abs", "exp", "log", "neg", "softmax", "log_softmax", "sigmoid", "tanh"),
    *("clamp", "clamp_min", "clamp_max", "clamp_", "mul", "mul_", "div", "div_", "add", "add_", "sub", "sub_"),
    *("masked_fill", "fill_diagonal_", "still", "lerp", "lerp_"),
}
OF_TORCH = {"softmax", "log_softmax", "sigmoid", "softplus", "relu", "normalize", "sqrt", "exp", "log", "clamp"}
ASYMMETRIC = {  # the two arguments are not alike
    *("kl_divergence", "soft_cross_entropy", "cross_entropy", "kl_div", "feature_distance", "gaussian_kl"),
    *("ranking_loss", "quiz_loss", "distribution_matching", "reparameterized", "mutual", "contrast", "agreement"),
}
WEIGHTED = {"mean_state": 1, "weighted_mean": 1, "averaged_state": 1}  # which argument has the weights
COUNTS = {"samples", "counts", "steps", "weight", "size"}


@dataclass(frozen=True)
class Mutant:
    """One change: `identity` stays when other lines of the file change, `function` is a hash of what it is in."""

    identity: str
    qualname: str
    function: str
    code: Callable[[], CodeType]


def mutants_of(source: str, filename: str) -> Iterator[Mutant]:
    """Make every mutant of a file."""
    tree = ast.parse(source)
    for qualname, function, coefficients in functions_of(tree):
        digest = hashlib.sha256(ast.unparse(function).encode()).hexdigest()[:12]
        seen: Counter[str] = Counter()
        keep_closure(function)
        for parent, field, node in list(places(function)):
            for kind, other in alternatives(node, parent, coefficients):
                before, after = ast.unparse(node), ast.unparse(other)
                text = f"{qualname}: {kind}: {before} -> {after}"
                seen[text] += 1
                identity = text if seen[text] == 1 else f"{text} #{seen[text]}"
                code = partial(changed_code, tree, filename, qualname, (parent, field, node, other))
                yield Mutant(identity, qualname, digest, code)


def changed_code(
    tree: ast.Module, filename: str, qualname: str, change: tuple[ast.AST, str, ast.AST, ast.AST]
) -> CodeType:
    """Return the code of a function with one change; the tree stays as it was."""
    parent, field, old, new = change
    put(parent, field, old, new)
    whole = compile(ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True)
    put(parent, field, new, old)
    return code_of(whole, qualname)


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef, dict[str, str]]]:
    """Return functions and methods with formulas, and the coefficients that they see as fields."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name not in NO_FORMULA:
            yield node.name, node, {}
        if isinstance(node, ast.ClassDef):
            fields = {
                line.target.id: ast.unparse(line.annotation)
                for line in node.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            }
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name not in NO_FORMULA:
                    yield f"{node.name}.{inner.name}", inner, fields


def keep_closure(function: ast.FunctionDef) -> None:
    """Name `super` where it is used, so that a mutant without it still has the same closure and fits the function."""
    if any(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(function)):
        function.body.insert(1, ast.parse("if False: super").body[0])


def code_of(whole: CodeType, qualname: str) -> CodeType:
    """Return the code of a function of a module."""
    for constant in whole.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_qualname == qualname:
                return constant
            if qualname.startswith(constant.co_qualname + "."):
                return code_of(constant, qualname)
    raise LookupError(qualname)


# --- where ---


def places(node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Return every place in a function where something could be put, from the outside in."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "args") and isinstance(
            node, ast.FunctionDef | ast.AnnAssign
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not is_told(child):
                yield node, field, child
                yield from places(child)


def is_told(node: ast.AST) -> bool:
    """Whether this is for people: an error, a figure in the history, a text."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func) in ("ctx.log", "warnings.warn")
    return isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr)


def put(parent: ast.AST, field: str, old: ast.AST, new: ast.AST) -> None:
    """Replace a child of a node."""
    value = getattr(parent, field)
    if isinstance(value, list):
        value[next(place for place, item in enumerate(value) if item is old)] = new
    else:
        setattr(parent, field, new)


# --- what ---


def alternatives(node: ast.AST, parent: ast.AST, fields: dict[str, str]) -> Iterator[tuple[str, ast.AST]]:
    """Return what could stand in place of an expression, with the kind of mistake."""
    if isinstance(node, ast.BinOp):
        yield from of_operation(node, fields)
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        if isinstance(node.op, ast.USub):
            yield "sign", node.operand
        elif isinstance(node.op, ast.Not):
            yield "condition", node.operand
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPPOSITE:
        which = ast.unparse(node.left) in WHICH_EXCHANGE
        if not which and (not isinstance(parent, ast.IfExp) or node is not parent.test):
            yield "condition", ast.Compare(node.left, [OPPOSITE[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.IfExp) and not ast.unparse(node.test).startswith(WHICH_EXCHANGE):
        yield "choice", node.body
        yield "choice", node.orelse
    elif isinstance(node, ast.AugAssign):
        if type(node.op) in OPPOSITE:
            yield "sign", ast.AugAssign(node.target, OPPOSITE[type(node.op)](), node.value)
        yield "left out", ast.Pass()
    elif isinstance(node, ast.Call):
        yield from of_call(node, fields)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and is_told_count(node):
        yield "uniform", ast.Constant(1)


def is_told_count(node: ast.Subscript) -> bool:
    """Whether this is a number of samples, steps, ... that a client tells."""
    return ast.unparse(node).endswith(tuple(f".meta['{name}']" for name in COUNTS))


def of_operation(node: ast.BinOp, fields: dict[str, str]) -> Iterator[tuple[str, ast.AST]]:
    """Return other signs, and the operation without one of its sides."""
    left, right = node.left, node.right
    if any(is_text_or_list(side) for side in (left, right)):
        return
    if isinstance(node.op, ast.Add):
        yield "sign", ast.BinOp(left, ast.Sub(), right)
        yield "term", left
        yield "term", right
    elif isinstance(node.op, ast.Sub):
        yield "sign", ast.BinOp(left, ast.Add(), right)
        yield "term", left
        if isinstance(left, ast.Constant):
            yield "complement", right
        else:
            yield "term", ast.UnaryOp(ast.USub(), right)
    elif isinstance(node.op, ast.Mult):
        yield "factor", left
        yield "factor", right
        for side, other in ((left, right), (right, left)):
            if "Share" in fields.get(field_name(side), ""):
                yield "complement", ast.BinOp(ast.BinOp(ast.Constant(1), ast.Sub(), side), ast.Mult(), other)
    elif isinstance(node.op, ast.Div | ast.Pow):
        yield "factor", left


def of_call(node: ast.Call, fields: dict[str, str]) -> Iterator[tuple[str, ast.AST]]:
    """Return other calls: another name, without the call, with other arguments."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    of_torch = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in ("torch", "F", "math")
    if isinstance(node.func, ast.Attribute):
        if name in OTHER_CALL:
            yield f"{name}", called(node, ast.Attribute(node.func.value, OTHER_CALL[name], ast.Load()))
        if name in LEFT_OUT and not of_torch:
            yield "left out", node.func.value
    elif name in OTHER_NAME and (len(node.args) > 1 or name not in ("max", "min")):
        yield f"{name}", called(node, ast.Name(OTHER_NAME[name], ast.Load()))
    if of_torch and name in OF_TORCH:
        yield "left out", node.args[0]
    if name in ASYMMETRIC and len(node.args) > 1:
        yield "swapped", ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
    if of_torch and name == "where" and len(node.args) == 3:
        yield "swapped", ast.Call(node.func, [node.args[0], node.args[2], node.args[1]], node.keywords)
    if name in ("lerp", "lerp_") and len(node.args) == 2:
        yield "complement", with_argument(node, 1, ast.BinOp(ast.Constant(1), ast.Sub(), node.args[1]))
    weights = node.args[WEIGHTED[name]] if len(node.args) > WEIGHTED.get(name, len(node.args)) else None
    if weights is not None and not ast.unparse(weights).startswith("[1.0] *"):
        loop = ast.comprehension(ast.Name("_", ast.Store()), weights, [], 0)
        yield "uniform", with_argument(node, WEIGHTED[name], ast.ListComp(ast.Constant(1.0), [loop]))
    if name == "Part" and len(node.args) == 3 and not isinstance(node.args[2], ast.Constant):
        yield "uniform", with_argument(node, 2, ast.Constant(1.0))
    if name == "len" and ast.unparse(node.args[0]).endswith(".train"):
        yield "uniform", ast.Constant(1)
    yield from of_arguments(node, fields)


def of_arguments(node: ast.Call, fields: dict[str, str]) -> Iterator[tuple[str, ast.AST]]:
    """Return the call without one of its coefficients, and with another reduction."""
    for place, value in enumerate([*node.args, *(keyword.value for keyword in node.keywords)]):
        name = field_name(value)
        kind = fields.get(name, "")
        if kind.removesuffix(" | None") in NUMBERS and not name.endswith(NOT_COEFFICIENTS):
            yield "coefficient", with_argument(node, place, ast.Constant(1.0))
        if name == "weighting":
            yield "uniform", with_argument(node, place, ast.Constant("uniform"))
        keyword = node.keywords[place - len(node.args)].arg if place >= len(node.args) else ""
        if keyword == "reduction" and isinstance(value, ast.Constant) and value.value in OTHER_REDUCTION:
            yield "reduction", with_argument(node, place, ast.Constant(OTHER_REDUCTION[value.value]))


def field_name(node: ast.AST) -> str:
    """Return NAME of `self.NAME`, or nothing."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if own else ""  # type: ignore[attr-defined]


def is_text_or_list(node: ast.AST) -> bool:
    """Whether `+` and `*` would join or repeat here."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    texts = ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp | ast.Set
    return isinstance(node, texts) or (isinstance(node, ast.Name) and node.id.isupper() and len(node.id) > 1)


def called(node: ast.Call, function: ast.expr) -> ast.Call:
    """Return the same call of another function."""
    return ast.Call(function, node.args, node.keywords)


def with_argument(node: ast.Call, place: int, value: Any) -> ast.Call:
    """Return the call with another argument, counted over positions and then keywords."""
    arguments, keywords = list(node.args), list(node.keywords)
    if place < len(arguments):
        arguments[place] = value
    else:
        keywords[place - len(arguments)] = ast.keyword(keywords[place - len(arguments)].arg, value)
    return ast.Call(node.func, arguments, keywords)
