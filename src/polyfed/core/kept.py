"""A fitted learner as tensors of bytes, for a file that needs no samples and runs no code: skops, never a pickle.

skops builds objects only of types that it knows to be harmless and of those in `TRUSTED`; a file with any other is
refused. Trees are numbers that compiled code follows without looking, so their branches are checked before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import InputError, first_line
from polyfed.core.learner import Fitted, Learner
from polyfed.core.task import Task

TRUSTED = (  # beside what skops trusts by itself: estimators of scikit-learn and their arrays
    "collections.OrderedDict",
    "lightgbm.basic.Booster",
    "lightgbm.sklearn.LGBMClassifier",
    "lightgbm.sklearn.LGBMRegressor",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
    "sklearn.neural_network._stochastic_optimizers.SGDOptimizer",
    "sklearn.tree._tree.Tree",
    "xgboost.core.Booster",
    "xgboost.sklearn.XGBClassifier",
    "xgboost.sklearn.XGBRegressor",
    "xgboost.sklearn.XGBRFClassifier",
    "xgboost.sklearn.XGBRFRegressor",
)


def packed(learner: Learner) -> tuple[dict[str, Tensor], list[Any]]:
    """Return what was fitted as tensors of bytes, and the classes that each of its parts has seen.

    Raises
    ------
    InputError
        If it holds objects that could not be read again without running somebody's code, or was never fitted.
    """
    io = _skops()
    fitted = learner.fitted()
    if fitted is None:
        raise InputError("This learner was never fitted, so that there is nothing to write.")
    tensors: dict[str, Tensor] = {}
    seen: list[Any] = []
    for number, (classes, estimator) in enumerate(fitted.parts):
        seen.append(None if classes is None else [int(one) for one in classes])
        if estimator is None:
            continue
        blob = io.dumps(estimator)
        _refuse_strange(io, blob, type(estimator).__name__)
        tensors[f"fitted.{number}"] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    return tensors, seen


def unpacked(tensors: Mapping[str, Tensor], seen: list[Any], task: Task, outputs: int, what: str) -> Learner:
    """Return the learner that `packed` gave; it predicts, and cannot learn.

    Raises
    ------
    InputError
        If the file holds anything but such a learner.
    """
    io = _skops()
    parts = []
    for number, classes in enumerate(seen):
        blob = tensors.get(f"fitted.{number}")
        estimator = None
        if blob is not None:
            content = blob.numpy().tobytes()
            _refuse_strange(io, content, what)
            try:
                estimator = io.loads(content, trusted=list(TRUSTED))
                _check_trees(estimator)
            except Exception as error:  # whatever a damaged or hostile file leads to
                reason = first_line(error)
                raise InputError(f"{what} cannot be read as a learner ({reason}).") from error
        parts.append((None if classes is None else np.array(classes), estimator))
    learner = Learner(next((one for _, one in parts if one is not None), None), outputs)
    learner.kept = Fitted(task, tuple(parts), outputs)
    return learner


def _skops() -> Any:
    try:
        import skops.io as io  # type: ignore[import-untyped]
    except ImportError as error:
        raise InputError(
            f"A learner in a file of its own needs the package skops ({error}): pip install 'polyfed[learners]'."
        ) from error
    return io


def _refuse_strange(io: Any, blob: bytes, what: str) -> None:
    try:
        strange = sorted(set(io.get_untrusted_types(data=blob)) - set(TRUSTED))
    except Exception as error:
        raise InputError(f"{what} cannot be read as a learner ({type(error).__name__}).") from error
    if strange:
        raise InputError(
            f"{what} holds objects of types that are not trusted ({', '.join(strange[:3])}), so it is neither written "
            "nor read as a file: keep such an estimator in a way of your own (load_model(...).module.estimators())."
        )


def _check_trees(thing: Any, features: int = 0, known: set[int] | None = None) -> None:
    """Refuse trees whose branches lead anywhere but to later nodes, or ask for features that no row has."""
    known = set() if known is None else known
    if id(thing) in known or isinstance(thing, str | bytes | int | float | None):
        return
    known.add(id(thing))
    if type(thing).__name__ == "Tree":
        left, right = thing.children_left, thing.children_right
        _check_branches(left, right, thing.feature, (left == -1) & (right == -1), thing.n_features)
    elif type(thing).__name__ == "TreePredictor":
        nodes = thing.nodes
        left, right = nodes["left"].astype(np.int64), nodes["right"].astype(np.int64)
        _check_branches(left, right, nodes["feature_idx"], nodes["is_leaf"].astype(bool), features)
    features = int(getattr(thing, "n_features_in_", features))
    if isinstance(thing, dict):
        inside = list(thing.values())
    elif isinstance(thing, list | tuple):
        inside = list(thing)
    elif isinstance(thing, np.ndarray):
        inside = thing.ravel().tolist() if thing.dtype == object else []
    else:
        inside = list(getattr(thing, "__dict__", {}).values())
    for part in inside:
        _check_trees(part, features, known)


def _check_branches(left: Any, right: Any, feature: Any, leaf: Any, features: int) -> None:
    inner = np.flatnonzero(~leaf)
    for child in (left[inner], right[inner]):
        if (child <= inner).any() or (child >= len(left)).any():
            raise ValueError("a tree whose branches lead nowhere")
    if (feature[inner] < 0).any() or (feature[inner] >= features).any():
        raise ValueError("a tree that asks for a feature that no row has")
