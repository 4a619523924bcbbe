"""Learners that are no networks, by name: `sklearn:RandomForestClassifier`, `xgboost:XGBClassifier` and their like.

Any object with scikit-learn's interface can be a client's model; see `core/learner.py` for how it takes part.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
from typing_extensions import TypeIs  # in Python itself since 3.13

from polyfed.core.errors import InputError, first_line, unknown
from polyfed.core.learner import Estimator, Learner, fit_copy
from polyfed.core.shape import InputShape
from polyfed.models.network import refuse_rate
from polyfed.models.registry import Options, register

PARTS = (  # of scikit-learn, where its classifiers and regressors are
    "ensemble",
    "linear_model",
    "neural_network",
    "naive_bayes",
    "tree",
    "svm",
    "neighbors",
    "discriminant_analysis",
    "gaussian_process",
)
TOLD = {
    "<class>": "a classifier (of a regression: a regressor); must be given",
    "<field>=<value>": "a field of it, for instance max_depth=5; sizes are written 32-16",
    "emphasis=<number>": "what public samples weigh together, in units of the client's own; 1 without it",
}
TABLE = InputShape((16,))


@register(
    "sklearn",
    example="sklearn:RandomForestClassifier",
    summary="forests, boosted trees, linear models and more of scikit-learn",
    options=TOLD,
    inputs=TABLE,
    package="scikit-learn",
)
def build_sklearn(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> Learner:
    """Build `sklearn:<class>[,<field>=<value>]`."""
    found: dict[str, Any] = {}
    for part in PARTS:  # one after the other, until it is there: importing all of them takes seconds
        found |= _offered(f"sklearn.{part}")
        if options.items and options.items[0] in found:
            break
    return _build("sklearn", found, options, input_shape, num_classes, rate)


@register(
    "xgboost",
    example="xgboost:XGBClassifier",
    summary="boosted trees of the package xgboost",
    options=TOLD,
    inputs=TABLE,
    package="xgboost",
)
def build_xgboost(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> Learner:
    """Build `xgboost:<class>[,<field>=<value>]`."""
    return _build("xgboost", _offered("xgboost"), options, input_shape, num_classes, rate)


@register(
    "lightgbm",
    example="lightgbm:LGBMClassifier",
    summary="boosted trees of the package lightgbm",
    options=TOLD,
    inputs=TABLE,
    package="lightgbm",
)
def build_lightgbm(options: Options, input_shape: Sequence[int], num_classes: int, rate: float) -> Learner:
    """Build `lightgbm:<class>[,<field>=<value>]`."""
    return _build("lightgbm", _offered("lightgbm"), options, input_shape, num_classes, rate)


def as_learner(estimator: Any, input_shape: Sequence[int], outputs: int, emphasis: float = 1.0) -> Learner:
    """Return any estimator as a model of a client, once a trial shows that it can be one.

    Raises
    ------
    InputError
        If it cannot be fitted to such inputs, or predicts no probabilities.
    """
    name, shape = type(estimator).__name__, InputShape(input_shape)
    if shape.words:
        raise InputError(f"The learner {name} takes rows of numbers, but the data is texts: use a network, as 'lstm'.")
    if type(estimator).__module__.startswith("lightgbm") and "verbosity" not in estimator.get_params():
        estimator.set_params(verbosity=-1)
    learner = Learner(estimator, outputs, emphasis)
    _try(learner, name, int(np.prod(shape)))
    return learner


def is_estimator(thing: Any) -> TypeIs[Estimator]:
    """Tell whether something is an object with scikit-learn's interface."""
    return not inspect.isclass(thing) and all(hasattr(thing, part) for part in ("fit", "predict", "get_params"))


def offers(learner: Learner) -> frozenset[str]:
    """Return what a learner is and can do: `learner`, `regressor`, `weighted` (its fit takes weights)."""
    from sklearn.pipeline import Pipeline  # type: ignore[import-untyped]
    from sklearn.utils.validation import has_fit_parameter  # type: ignore[import-untyped]

    estimator = learner.estimator
    last = estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator
    held = {"regressor": _is_regressor(estimator), "weighted": has_fit_parameter(last, "sample_weight")}
    return frozenset({"learner", *(name for name, holds in held.items() if holds)})


def _build(
    package: str, known: dict[str, Any], options: Options, shape: Sequence[int], outputs: int, rate: float
) -> Learner:
    refuse_rate(rate, package)
    name = options.take(r"[A-Za-z]\w*")
    if name is None:
        raise InputError(f"The model '{package}' needs a class: write for instance '{package}:{next(iter(known))}'.")
    if name[0] not in known:
        raise unknown(f"learner of {package}", name[0], known)
    fields: dict[str, Any] = {}
    while found := options.take(r"(\w+)=(.+)"):
        fields[found[1]] = _value(found[2])
    emphasis = fields.pop("emphasis", 1.0)
    if isinstance(emphasis, bool) or not isinstance(emphasis, int | float) or emphasis <= 0:
        raise InputError(f"emphasis of the model '{options.spec}' must be a number above 0, not {emphasis!r}.")
    made = known[name[0]]()
    own = [*made.get_params(), "emphasis"]
    for field in fields:
        if field in own:
            continue
        # The others also take any field of their libraries, and say nothing where there is none: a slip shows here.
        slip = get_close_matches(field, own, 1, 0.85) and field not in _synonyms(package)
        if package == "sklearn" or slip:
            raise unknown(f"field of {name[0]}", field, own)
    return as_learner(made.set_params(**fields), shape, outputs, float(emphasis))


def _synonyms(package: str) -> set[str]:
    """Return the many names that LightGBM has for its fields, some of which look like slips."""
    basic = importlib.import_module("lightgbm.basic") if package == "lightgbm" else None
    known: dict[str, list[str]] = getattr(getattr(basic, "_ConfigAliases", None), "_get_all_param_aliases", dict)()
    return {alias for aliases in known.values() for alias in aliases}


def _value(text: str) -> Any:
    """Read a value: a number, true, false, none, sizes (`32-16`), or a word."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    sizes = text.split("-")
    return tuple(map(int, sizes)) if len(sizes) > 1 and all(size.isdigit() for size in sizes) else text


def _offered(package: str) -> dict[str, Any]:
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise InputError(
            f"Learners of {package} need that package ({error}): pip install 'polyfed[{package}]'."
        ) from error
    return {name: getattr(module, name) for name in module.__all__ if _predicts(getattr(module, name))}


def _predicts(thing: Any) -> bool:
    """Tell whether something is a class of estimators that can be made without arguments."""
    if not inspect.isclass(thing) or not all(hasattr(thing, part) for part in ("fit", "predict", "get_params")):
        return False
    wanted = inspect.signature(thing).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in wanted)


def _is_regressor(estimator: Any) -> bool:
    from sklearn.base import is_regressor  # type: ignore[import-untyped]

    return bool(is_regressor(estimator))


def _try(learner: Learner, name: str, columns: int) -> None:
    """Fit a copy to a few random rows of two classes: what a learner cannot do is said before anything is trained."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(20, columns)), np.tile([0, 1], 10)
    try:
        trial = fit_copy(learner.estimator, x, y, np.ones(len(x)), 0)
        answers = trial.predict(x) if _is_regressor(trial) else trial.predict_proba(x)
    except AttributeError as error:
        raise InputError(
            f"The learner {name} predicts no probabilities ({error}): use one with predict_proba."
        ) from error
    except Exception as error:  # another package may raise anything
        reason = first_line(error)
        raise InputError(f"The learner {name} cannot be fitted to rows of {columns} numbers ({reason}).") from error
    if not np.isfinite(answers).all():
        raise InputError(f"The learner {name} predicts values that are not finite.")
