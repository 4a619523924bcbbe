"""What people give as a model: a string, somebody's own code, a class, a function, a module or an estimator."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from polyfed.core.errors import InputError, unknown
from polyfed.core.fields import split_names
from polyfed.core.learner import Estimator
from polyfed.core.own_code import imported, is_reference, own_code
from polyfed.core.weights import begin, read_state
from polyfed.models import build, names
from polyfed.models.estimators import as_learner, is_estimator

WITH_WEIGHTS = re.compile(r"(.+?)=([^=,]+\.(?:safetensors|pt|pth|bin|ckpt))")
EMPTY = inspect.Parameter.empty
MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

ModelSpec = str | nn.Module | Estimator | Callable[..., nn.Module | Estimator]


def split_models(text: str) -> list[str]:
    """Split `a,b,c` into model strings; a piece that is no model's name is an option of the one before it.

    Raises
    ------
    InputError
        When there is none.
    """
    known = set(names())
    models: list[str] = []
    for piece in split_names(text):
        name = re.split("[:@=]", piece)[0].strip()
        starts = name in known or name.split("-")[0] in known
        if starts or not models or not _is_option(piece):
            models.append(piece)
        else:
            models[-1] += "," + piece
    if not models:
        raise InputError("models is empty: name at least one, for instance mlp:2.")
    return models


def weights_of(model: str) -> tuple[str, Path | None]:
    """Split `resnet10:w16=weights.safetensors` into the model string and the file that its weights begin from."""
    found = WITH_WEIGHTS.fullmatch(model.strip())
    return (found[1], Path(found[2]).expanduser()) if found else (model, None)


def in_zoo(model: ModelSpec) -> bool:
    """Tell whether a model is a name that means the same on every machine: no file's weights, nobody's own code."""
    return isinstance(model, str) and weights_of(model)[1] is None and not is_own(model) and not fetches(model)


def fetches(model: str) -> bool:
    """Tell whether a model string takes a network from a folder or the Hub: what is there, each machine decides."""
    family, _, name = model.strip().partition(":")
    name, *options = name.split(",")
    return (family == "timm" and (":" in name or "/" in name or "pretrained" in options)) or (
        family == "hf" and ("/" in name or Path(name).is_dir())
    )


def is_own(model: str) -> bool:
    """Tell whether a model string names somebody's own code, `package.module:function`: no name of the zoo does."""
    name = model.split(":")[0]
    return is_reference(model) and name not in names() and name.split("-")[0] not in names()


def own_model(name: str, option: str = "--models") -> Estimator | Callable[..., nn.Module | Estimator]:
    """Return what `package.module:function` names: a function or class that makes a network, or an estimator.

    Raises
    ------
    InputError
        If there is none.
    """
    start, near = name.split(":")[0], unknown("model", name.split(":")[0], names())
    try:
        found: Estimator | Callable[..., nn.Module | Estimator] = imported(name, option)
    except InputError as error:
        if "." not in start and f"No module named '{start}'" in str(error):
            raise InputError(f"{near} (Nor is there a module '{start}' to import.)") from error
        raise
    if not (callable(found) or is_estimator(found)):
        raise InputError(
            f"{option} {name} is a {type(found).__name__}: name a function or class that makes a network, or an "
            "estimator."
        )
    return found


def _is_option(piece: str) -> bool:
    return ":" not in piece


def label_of(model: ModelSpec) -> str:
    """Return the name of an architecture: the model string, or the name of the class or function."""
    if isinstance(model, str):
        return weights_of(model)[0]
    if isinstance(model, nn.Module):
        return type(model).__name__
    return getattr(model, "__name__", type(model).__name__)


def construct(model: ModelSpec, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Make a network from what people pass: a model string, `package.module:function`, a class, function or module."""
    if isinstance(model, str):
        spec, weights = weights_of(model)
        if is_own(spec):
            function = own_model(spec)
            with own_code(f"--models {spec}"):
                module = construct(function, input_shape, num_classes)
        else:
            module = build(spec, input_shape, num_classes)
        if weights is not None:
            begin(module, read_state(weights), f"{weights}, read as {spec},")
        return module
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    if is_estimator(model):
        return as_learner(model, input_shape, num_classes)
    offered: dict[str, Any] = {"input_shape": input_shape, "num_classes": num_classes}
    wanted = inspect.signature(model).parameters
    named = {name: parameter for name, parameter in wanted.items() if parameter.kind not in MANY}
    lacking = [name for name, parameter in named.items() if parameter.default is EMPTY and name not in offered]
    if lacking:
        raise InputError(
            f"The model {label_of(model)} needs {', '.join(lacking)}, which polyfed cannot give: pass a function, for "
            f"instance lambda: {label_of(model)}({lacking[0]}=...), or a module."
        )
    made = model(**{name: value for name, value in offered.items() if name in wanted})
    if is_estimator(made):
        return as_learner(made, input_shape, num_classes)
    if not isinstance(made, nn.Module):
        raise InputError(
            f"The model function {label_of(model)} returned a {type(made).__name__}, neither a torch module nor an "
            "estimator with fit and predict_proba."
        )
    return made
