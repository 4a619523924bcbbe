"""What `run` accepts beside numbers and words: an object of another kind is refused, before anything happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from polyfed import methods
from polyfed.core.errors import InputError
from polyfed.core.fields import split_names
from polyfed.core.method import Method
from polyfed.core.settings import Participation
from polyfed.data import Clients
from polyfed.models.estimators import is_estimator
from polyfed.specs import ModelSpec


def as_method(method: Any) -> Method:
    """Return the method that a name, an object, or a class without required hyper-parameters stands for."""
    if isinstance(method, str):
        return methods.make(method)
    if isinstance(method, type) and issubclass(method, Method):
        methods.check_name(method)
        try:
            return method()
        except TypeError as error:
            raise InputError(f"method={method.__name__} needs arguments ({error}): pass an object instead.") from error
    if not isinstance(method, Method):
        raise _wrong("method", "a name such as 'fedavg' or an object such as pf.FedAvg()", method)
    methods.check_name(type(method))
    return method


def as_models(models: Any, clients: Callable[[], Clients] | None = None) -> list[ModelSpec]:
    """Return the models as a list, of a table one for each client; what each of them builds is looked at later."""
    if isinstance(models, Mapping) and clients is not None:
        models = _by_client(models, clients())
    several = isinstance(models, Sequence) and not isinstance(models, str)
    listed = list(models) if several else [models]
    if not listed:
        raise InputError("models is empty: name at least one, for instance models=['mlp:2'].")
    for position, model in enumerate(listed):
        if not (isinstance(model, str | nn.Module) or callable(model) or is_estimator(model)):
            kinds = "a model string, a torch module, an estimator, or a class or function that builds one"
            if several:
                raise _wrong(f"models[{position}]", kinds, model)
            raise _wrong("models", f"a model or a list of models, each {kinds}", model)
    return listed


def _by_client(models: Mapping[Any, Any], clients: Clients) -> list[Any]:
    """Return the models that a table gives to clients, by their names or numbers, in the order of the clients."""
    keys = [[number, *clients.names[number : number + 1]] for number in range(len(clients))]
    known = [key for both in keys for key in both]
    called = f"they are {', '.join(clients.names)}" if clients.names else f"they are 0 to {len(clients) - 1}"
    for key in models:
        if key not in known:
            raise InputError(f"models has a model for {key!r}, which is no client: {called}.")
    found = [next((models[key] for key in both if key in models), None) for both in keys]
    for both, model in zip(keys, found, strict=True):
        if model is None:
            raise InputError(f"models has no model for client {both[-1]}: give each client one, or a list to deal.")
    return found


def as_metrics(metrics: Any) -> list[Any]:
    """Return names and functions as a list; which names there are depends on the task."""
    listed = split_names(metrics) if isinstance(metrics, str) else metrics
    if callable(listed):
        listed = [listed]
    if not isinstance(listed, Sequence) or not all(isinstance(item, str) or callable(item) for item in listed):
        raise _wrong("metrics", "a list of names and functions", metrics)
    return list(listed)


def check_arguments(clients: Any, participation: Any, out: Any, observers: Any) -> None:
    """Refuse objects of `run` that are of the wrong kind; numbers and words are checked by the configuration.

    Raises
    ------
    InputError
        With the argument's name, what it should be, and what it is.
    """
    if not isinstance(clients, Clients):
        raise _wrong("clients", "what pf.split(data, clients=...) returns", clients)
    if not isinstance(participation, Real | Participation) or isinstance(participation, bool):
        raise _wrong("participation", "a share such as 0.5 or a pf.Participation(...)", participation)
    if not isinstance(observers, Sequence) or not all(map(callable, observers)):
        raise _wrong("observers", "a list of functions", observers)
    if out is None:
        return
    if not isinstance(out, str | PathLike):
        raise _wrong("out", "the path of a new directory", out)
    file = next((path for path in (Path(out), *Path(out).parents) if path.is_file()), None)
    if file is not None:
        raise InputError(f"Cannot write to out={out}: {file} is a file, name a new directory.")


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
