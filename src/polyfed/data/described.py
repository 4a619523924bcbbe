"""How raw inputs become those of a network, and what its outputs mean, as the header of a model's file says it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.samples import Scaling
from polyfed.core.shape import InputShape
from polyfed.core.task import CLASSIFICATION, Task
from polyfed.core.task import describe as describe_task
from polyfed.data.dataset import Dataset, plural
from polyfed.data.form import Form

FEW = 8  # names that a sentence has room for
SCALED = ("fill", "center", "spread")  # of a column: what belongs to its scaling


def describe_inputs(
    shape: InputShape, form: Form, scaling: Scaling, class_names: Sequence[str], task: Task
) -> dict[str, Any]:
    """Return how raw inputs become those of a network, and what its outputs mean."""
    return {
        "input_shape": shape.dump(),
        "form": form.dump(),
        "scaling": asdict(scaling),
        "class_names": list(class_names),
        "task": describe_task(task),
    }


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return in words what two descriptions (`describe_inputs`) do not have in common, the worst first."""
    one, other = (json.loads(json.dumps({key: found.get(key) for key in KEYS})) for found in (one, other))
    said = _classes(one, other) + _columns(one["form"]["columns"], other["form"]["columns"])
    kinds = one["form"]["kind"], other["form"]["kind"]
    if kinds[0] != kinds[1]:
        said.append(f"another kind of inputs ({kinds[0]} against {kinds[1]})")
    if one["form"]["words"] != other["form"]["words"]:
        said.append("other words or another tokenizer")
    if not said and one["input_shape"] != other["input_shape"]:
        said.append(f"inputs of shape {one['input_shape']['sizes']} against {other['input_shape']['sizes']}")
    return said or _scaling(one, other)


KEYS = ("input_shape", "form", "scaling", "class_names", "task")


def _classes(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    kinds = [found["task"] or [CLASSIFICATION.name] for found in (one, other)]
    if kinds[0][0] != kinds[1][0]:
        return [f"another task ({kinds[0][0]} against {kinds[1][0]})"]
    names = one["class_names"], other["class_names"]
    if names[0] != names[1]:
        both = f"{few(names[0])} against {few(names[1])}"
        return [f"THE SAME CLASSES IN ANOTHER ORDER ({both})" if sorted(names[0]) == sorted(names[1]) else
                f"other classes ({both})"]  # fmt: skip
    return [] if _near(kinds[0][1:], kinds[1][1:]) else ["another scaling of the targets"]


def _columns(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> list[str]:
    names = [[column["name"] for column in columns] for columns in (one, other)]
    if not all(names):  # not both are tables
        return []
    if names[0] != names[1]:
        return [f"other columns ({few(names[0])} against {few(names[1])})"]
    plain = [[{k: v for k, v in c.items() if k not in SCALED} for c in columns] for columns in (one, other)]
    changed = [a["name"] for a, b in zip(*plain, strict=True) if a != b]
    return [f"other values of the columns {few(changed)}"] if changed else []


def _scaling(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    parts = [[found["scaling"][key] for key in ("mean", "std")] for found in (one, other)]
    numbers = [column["name"] for column in one["form"]["columns"] if column["kind"] == "number"]
    alike = one["scaling"]["divisor"] == other["scaling"]["divisor"]
    if alike and _near(*parts):
        return []
    for place, name in enumerate(numbers):
        found = [(mean[place], std[place]) for mean, std in parts]
        if not _near(*found):
            return [f"another scaling ({name}: mean {found[0][0]:.4g}, deviation {found[0][1]:.4g} against "
                    f"{found[1][0]:.4g}, {found[1][1]:.4g})"]  # fmt: skip
    return ["another scaling"]


def _near(one: Any, other: Any) -> bool:
    first, second = np.array(one, dtype=float), np.array(other, dtype=float)
    return first.shape == second.shape and np.allclose(first, second, rtol=1e-5, atol=1e-8)


def few(names: Sequence[str]) -> str:
    """Return names in a row, of many the first."""
    return ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


def scaling_for(stored: Tensor, scaling: Mapping[str, Any]) -> Scaling:
    """Return a described scaling for stored values: floats of 0..1 are not divided where training had bytes."""
    done = stored.is_floating_point() and scaling["divisor"] == 255.0
    return Scaling(tuple(scaling["mean"]), tuple(scaling["std"]), 1.0 if done else scaling["divisor"])


def scaled_as(dataset: Dataset, header: Mapping[str, Any], source: str) -> Dataset:
    """Return a data set with the scaling of a model's header, once it is sure that all else is as the header says.

    Raises
    ------
    InputError
        With what is not.
    """
    scaling = scaling_for(dataset.train.x, header["scaling"])
    found = describe_inputs(dataset.input_shape, dataset.form, scaling, dataset.class_names, dataset.task)
    told = differences({**found, "scaling": header["scaling"]}, header)
    if told:
        raise InputError(
            f"The data {dataset.name} is not what the networks were trained on, by the header of {source}: "
            f"{'; '.join(told)}. Give data with the columns and {plural(dataset.task)} of the header."
        )
    train, test = (replace(part, scaling=scaling) for part in (dataset.train, dataset.test))
    return replace(dataset, train=train, test=test)
