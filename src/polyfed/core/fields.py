"""Fields of settings and methods: what a value may be is said by its type, and checked when the object is made.

A frozen dataclass declares `lam: NotNegative = 1.0` or `weighting: Literal["samples", "uniform"] = "samples"` and calls
`check_fields` in its `__post_init__`; Python, TOML files and the command line are then refused in the same words.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from functools import cache
from numbers import Integral
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from polyfed.core.errors import InputError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

Count = Annotated[int, Ge(0)]
AtLeastOne = Annotated[int, Ge(1)]
AtLeastTwo = Annotated[int, Ge(2)]
NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
SomeShare = Annotated[float, Gt(0), Le(1)]
PartShare = Annotated[float, Ge(0), Lt(1)]  # never all
OptimizerName = Literal["sgd", "adam", "adamw"]

T = TypeVar("T")

NONE = "none"  # how a setting is switched off on the command line and in TOML, which has no null


def setting(default: T, short: str | None = None, option: bool = True) -> T:
    """Declare a field of the configuration by more than its default.

    Parameters
    ----------
    default
        Its default.
    short
        Its short name on the command line, in files and with `--set`, where that is not the field's own.
    option
        Whether the command line has an option of its own for it; plain fields have none and are reached with `--set`.
    """
    declared: Any = field(default=default, metadata={"short": short, "option": option})
    value: T = declared
    return value


def split_names(text: str) -> tuple[str, ...]:
    """Split `a,b,c`; a comma too many names nothing."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def check_fields(settings: Any, owner: str) -> None:
    """Check and convert the fields of a frozen dataclass in place.

    Raises
    ------
    InputError
        Naming the owner, the field, what it may be and what it was.
    """
    from pydantic import ValidationError

    kind: Any = type(settings)
    given = {name: _plain(hint, getattr(settings, name)) for name, hint in types_of(kind).items()}
    for name, value in given.items():
        if isinstance(value, bool) and "true" not in in_words(types_of(kind)[name]):  # pydantic takes it for 0 or 1
            raise InputError(f"{owner}: {name} must be a {in_words(types_of(kind)[name])}, got {value}.")
    try:
        checked = _adapter(kind).validate_python(given)
    except ValidationError as error:
        raise InputError(f"{owner}: {_problem(error)}") from error
    for name, value in checked.items():
        object.__setattr__(settings, name, value)


@cache
def types_of(kind: Any) -> dict[str, Any]:
    """Return the declared type of every field of a dataclass, constraints included."""
    unknown: dict[str, Any] = {}  # names for type checkers only, or known only inside of a function: anything goes
    while True:
        try:
            hints = get_type_hints(kind, localns=unknown, include_extras=True)
            return {field.name: hints[field.name] for field in fields(kind)}
        except NameError as error:
            unknown[str(error.name)] = Any
        except TypeError:  # one of these names is used with brackets: nothing is known about this class
            return {field.name: Any for field in fields(kind)}


def in_words(hint: Any) -> str:
    """Return a type for people: `whole number, at least 1`."""
    base, constraints = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
    if get_origin(base) is Literal:
        return " | ".join(str(word) for word in get_args(base))
    if get_origin(base) in (Union, UnionType):
        return " or ".join(NONE if part is NoneType else in_words(part) for part in get_args(base))
    if get_origin(base) in (tuple, list):
        inner = [in_words(part) for part in get_args(base) if part is not Ellipsis]
        if Ellipsis not in get_args(base):
            return f"[{', '.join(inner)}]"
        name, _, bounds = inner[0].partition(", ")
        return f"list of {name}s" + (f", each {bounds}" if bounds else "")
    names = {int: "whole number", float: "number", bool: "true | false", str: "word"}
    limits = [_limit(constraint) for constraint in constraints]
    return ", ".join([names.get(base, getattr(base, "__name__", str(base))), *filter(None, limits)])


def meanings(kind: type) -> dict[str, str]:
    """Return what the docstrings of a dataclass and its bases say about each field, each as one paragraph."""
    found: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        text = inspect.cleandoc(part.__dict__.get("__doc__") or "")
        section = re.split(r"^(?:Parameters|Attributes)\n-+\n", text, maxsplit=1, flags=re.M)
        if len(section) < 2:
            continue
        body = re.split(r"^[A-Z][\w ]*\n-+\n", section[1], maxsplit=1, flags=re.M)[0]
        for names, meaning in re.findall(r"^(\w[\w, ]*)\n((?:[ ]{4}.*\n?|\n)+)", body, flags=re.M):
            for name in names.split(","):
                name, words = name.strip(), " ".join(meaning.split())
                # "As in FedAvg" is for readers of the file, who see FedAvg beside it: here the base's words go first.
                found[name] = f"{found[name]} {words}" if words.startswith("As in ") and name in found else words
    return found


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return what checks the fields of a dataclass as a dictionary."""
    from pydantic import ConfigDict, InstanceOf, TypeAdapter
    from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

    # Parts that are dataclasses have checked themselves.
    instance: Any = InstanceOf
    types = {name: instance[hint] if is_dataclass(hint) else hint for name, hint in types_of(kind).items()}
    shape = TypedDict(kind.__name__, types)  # type: ignore[misc]
    shape.__pydantic_config__ = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)  # type: ignore[attr-defined]
    return TypeAdapter(shape)


def _plain(hint: Any, value: Any) -> Any:
    """Turn NumPy's whole numbers into Python's, and the word `none` into None where that is no word of the field."""
    if isinstance(value, Integral):
        return value if isinstance(value, bool) else int(value)
    if not isinstance(value, str) or value != NONE:
        return value
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    return None if NoneType in parts and NONE not in words else value


def _problem(error: ValidationError) -> str:
    """Say what is wrong with the first bad field; of a field that may be several things, the most telling."""
    errors = error.errors()
    name = str(errors[0]["loc"][0])
    telling = [e for e in errors if str(e["loc"][0]) == name and e["type"] in _WORDS]
    first: Mapping[str, Any] = telling[0] if telling else errors[0]
    words = _WORDS.get(first["type"], first["msg"][:1].lower() + first["msg"][1:]).format(**first.get("ctx", {}))
    if first["type"] == "greater_than_equal" and first["ctx"]["ge"] == 0:
        words = "must not be negative"
    if first["type"] == "literal_error":
        return f"{name} {words}, not '{first['input']}'."
    return f"{name} {words}, got {first['input']!r}."


_WORDS = {
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be above {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "less_than": "must be below {lt:g}",
    "finite_number": "must be a finite number",
    "literal_error": "is {expected}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "is true or false",
    "bool_type": "is true or false",
    "string_type": "must be a word",
    "tuple_type": "is a list in brackets, such as [1, 2]",
    "is_instance_of": "must be a {class}",
}


def _limit(constraint: Any) -> str | None:
    for kind, name, words in ((Ge, "ge", "at least"), (Gt, "gt", "above"), (Le, "le", "at most"), (Lt, "lt", "below")):
        if isinstance(constraint, kind):
            return f"{words} {getattr(constraint, name):g}"
    return None
