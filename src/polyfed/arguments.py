"""What `run` accepts: an argument of another kind is refused with its name, before anything happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from polyfed import methods
from polyfed.build import ModelSpec
from polyfed.core.errors import InputError
from polyfed.core.method import Method, Participation
from polyfed.core.party import Training
from polyfed.data import Clients

Kind = Callable[[Any], bool]


def as_method(method: Any) -> Method:
    """Return the method that a name, an object, or a class without required hyper-parameters stands for."""
    if isinstance(method, str):
        return methods.make(method)
    if isinstance(method, type) and issubclass(method, Method):
        try:
            return method()
        except TypeError as error:
            raise InputError(f"method={method.__name__} needs arguments ({error}): pass an object instead.") from error
    if not isinstance(method, Method):
        raise _wrong("method", "a name such as 'fedavg' or an object such as pf.FedAvg()", method)
    return method


def as_models(models: Any) -> list[ModelSpec]:
    """Return the models as a list; what each of them builds is looked at later."""
    several = isinstance(models, Sequence) and not isinstance(models, str)
    listed = list(models) if several else [models]
    if not listed:
        raise InputError("models is empty: name at least one, for instance models=['mlp:2'].")
    for position, model in enumerate(listed):
        if not (isinstance(model, str | nn.Module) or callable(model)):
            kinds = "a model string, a torch module, or a class or function that builds one"
            if several:
                raise _wrong(f"models[{position}]", kinds, model)
            raise _wrong("models", f"a model or a list of models, each {kinds}", model)
    return listed


def as_whole(name: str, value: Any) -> int:
    """Return a whole number."""
    if not _whole(value):
        raise _wrong(name, "a whole number", value)
    return int(value)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of `run` that are of the wrong kind.

    Raises
    ------
    InputError
        With the argument's name, what it should be, and what it is.
    """
    for name, (what, fits) in KINDS.items():
        if name in arguments and not fits(arguments[name]):
            raise _wrong(name, what, arguments[name])
    out = arguments.get("out")
    file = next((path for path in (Path(out), *Path(out).parents) if path.is_file()), None) if out is not None else None
    if file is not None:
        raise InputError(f"Cannot write to out={out}: {file} is a file, name a new directory.")


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _whole_or_none(value: Any) -> bool:
    return value is None or _whole(value)


def _word(value: Any) -> bool:
    return isinstance(value, str)


def _wrong(name: str, what: str, value: Any) -> InputError:
    return InputError(f"{name} is {what}, not {_described(value)}.")


def _described(value: Any) -> str:
    """Return a short value as it is, and the kind of anything else."""
    if value is None or isinstance(value, bool | Real) or (isinstance(value, str) and len(value) < 80):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


KINDS: dict[str, tuple[str, Kind]] = {
    "clients": ("what pf.split(data, clients=...) returns", lambda v: isinstance(v, Clients)),
    "training": ("a pf.Training(...)", lambda v: v is None or isinstance(v, Training)),
    "participation": (
        "a share such as 0.5 or a pf.Participation(...)",
        lambda v: isinstance(v, Real | Participation) and not isinstance(v, bool),
    ),
    "checkpoint_seconds": ("a number", lambda v: isinstance(v, Real)),
    "out": ("the path of a new directory", lambda v: v is None or isinstance(v, str | PathLike)),
    "observers": ("a list of functions", lambda v: isinstance(v, Sequence) and all(map(callable, v))),
    **dict.fromkeys(
        ("feature_dim", "evaluate_clients", "evaluate_samples", "workers"), ("a whole number or None", _whole_or_none)
    ),
    **dict.fromkeys(("engine", "device", "feature_adapter"), ("a word", _word)),
}
