"""How a site introduces itself, and what the server makes of it: a `ClientInfo` and a `Blueprint`.

A site with a model of the zoo gives the model's string, and the server builds the same network. A site with a network
of its own gives names and shapes only; its initial weights travel once, and only if the method shares weights.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from polyfed.build import make_blueprint, make_module
from polyfed.core.blob import DTYPES
from polyfed.core.errors import MessageError
from polyfed.core.learner import Learner
from polyfed.core.message import MAX_AXES, MAX_TENSORS, Message, State
from polyfed.core.method import Method
from polyfed.core.party import Blueprint, ClientInfo
from polyfed.core.shape import InputShape
from polyfed.core.task import CLASSIFICATION, Regression, Task, from_description
from polyfed.core.task import describe as in_plain_values
from polyfed.flower.codec import Head
from polyfed.flower.sitedata import SiteData, fingerprint
from polyfed.specs import ModelSpec, in_zoo, label_of

MAX_BUILT = 4000  # tensors of a network that the server builds from its name; the largest of the zoo have hundreds
MAX_CLASSES = 100_000
MAX_SAMPLES = 10_000_000  # that a site can say it has, unless the operator allows more
MAX_INPUT = 1 << 26  # numbers of one input, and of what crosses a cut of a network
MAX_REHEARSED = 1 << 28  # numbers of one input for each class: the server rehearses the method with such samples
LARGEST = 1e10  # of any number that is not whole; beyond it, one site could drown all others
MAX_UNIT = 1e30  # of center and spread of a regression: networks compute with them in single precision
MAX_FEATURES = 1 << 26  # numbers of one feature vector for each class
KNOWN = ("features", "split3", "width", "exits", "batchnorm", "mlp", "dropout", "learner", "regressor", "weighted")


# Every field that leaves a site beside what the method sends, in words for the people there. A test holds it complete.
JOINING = {
    "name": "its name",
    "samples": "the number of training samples",
    "label_counts": "the number of samples of each class (only where the method needs it)",
    "task": "what is learned, and of a regression the center and spread that all sites share",
    "validation": "the number of validation samples",
    "num_classes": "the number of classes",
    "class_names": "the names of the classes",
    "input_shape": "the shape of an input",
    "words": "how many words a vocabulary has",
    "groups": "how many values each column of words has",
    "columns": "the names and kinds of a table's columns, checksums of the words of each and of an agreed scaling",
    "public": "a checksum of the public samples",
    "public_classes": "the number of public classes",
    "model": "the name of its network, if it is one of the zoo",
    "architecture": "what it calls its network",
    "shapes": "names and shapes of the network's tensors",
    "dtypes": "their types",
    "buffers": "which of them are buffers",
    "frozen": "which of them are frozen",
    "properties": "what the network offers",
    "feature_dim": "the size of its features",
    "cuts": "shapes at the cuts of the network",
    "family": "the family of the network",
    "parameters": "the number of its parameters",
    "audit": "whether it reads the server's audit",
}
WORKING = {"loss": "the training loss", "seconds": "the seconds that the work took"}
PRIVATE = {  # the same where training is differentially private: a loss is one of samples, without noise
    "loss": "0 in place of the training loss",
    "seconds": WORKING["seconds"],
    "epsilon": "the epsilon that it has spent so far",
}
FAILING = {"error": "one sentence that says what is wrong", "spent": "whether its privacy budget is used up"}
MEASURING = {
    "measures": "accuracy (or the task's score), loss, number of samples and the metrics that the server asks for, on "
    "the test, validation and own test samples (and the share told apart as public); at the end the same of a model "
    "that this site trains by itself"
}


def make_own_blueprint(method: Method, model: ModelSpec, data: SiteData, run: Mapping[str, Any]) -> Blueprint:
    """Build a site's network as the run's settings ask (at the site; at the server for networks of the zoo)."""
    return make_blueprint(
        model,
        label_of(model),
        data.input_shape,
        method.outputs(data.num_classes, data.public_classes),
        run["seed"],
        run["feature_dim"],
        run["feature_adapter"],
    )


def introduce(method: Method, model: ModelSpec, data: SiteData, blueprint: Blueprint) -> tuple[Head, bytes]:
    """Return what a site tells about itself: counts, shapes and properties."""
    tell_counts = "label_counts" in method.requirements() and data.task == CLASSIFICATION
    head = {
        "samples": len(data.train),
        "label_counts": list(data.train.label_counts(data.num_classes)) if tell_counts else None,
        "task": in_plain_values(data.task),
        "validation": len(data.validation) if data.validation is not None else 0,
        "num_classes": data.num_classes,
        "class_names": list(data.classes),
        "input_shape": list(data.input_shape),
        "words": data.input_shape.words,
        "groups": list(data.input_shape.groups),
        "columns": told_columns(data),
        "public": fingerprint(data.public),
        "public_classes": data.public_classes,
        "model": model if in_zoo(model) and "learner" not in blueprint.properties else None,
        "architecture": blueprint.name,
        "shapes": {name: list(shape) for name, shape in blueprint.shapes.items()},
        "dtypes": {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in blueprint.initial.items()},
        "buffers": sorted(blueprint.buffers),
        "frozen": sorted(blueprint.frozen),
        "properties": sorted(blueprint.properties),
        "feature_dim": blueprint.feature_dim,
        "cuts": {cut: list(shape) for cut, shape in blueprint.cuts.items()},
        "family": blueprint.family,
        "parameters": blueprint.parameters,
    }
    share = not in_zoo(model) and method.shares and blueprint.shapes  # a learner has no weights
    return head, Message(params={"main": blueprint.initial}).to_bytes() if share else b""


def told_columns(data: SiteData) -> list[list[str]] | None:
    """Return name, kind, and checksums of words and agreed scaling of each column; None where inputs are no table.

    A site scales by its own rows where nothing was agreed on: the checksum is then empty.
    """
    if data.form is None or data.form.kind != "table":
        return None
    return [
        [
            column.name,
            column.kind,
            _checksum(column.values),
            "" if column.spread is None else _checksum([column.center, column.spread, column.gaps, column.fill]),
        ]
        for column in data.form.columns
    ]


def _checksum(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(list(values)).encode()).hexdigest()[:16] if values else ""


def read_introduction(
    name: str,
    head: Head,
    blob: bytes,
    method: Method,
    run: Mapping[str, Any],
    max_bytes: int,
    max_samples: int = MAX_SAMPLES,
) -> tuple[ClientInfo, Blueprint]:
    """Read an introduction at the server.

    Raises
    ------
    MessageError
        With the site's name, when it is not credible.
    """
    try:
        _check_task(read_task(head), head)
        _count(head["validation"], least=0, most=max_samples)
        _check_columns(head["columns"])
        blueprint = _blueprint(name, head, blob, method, run, max_bytes)
        counts = head["label_counts"]
        info = ClientInfo(
            id=-1,
            samples=_count(head["samples"], most=max_samples),
            architecture=blueprint.name,
            parameters=blueprint.parameters,
            label_counts=None if counts is None else tuple(_count(n, least=0) for n in counts),
            name=name,
        )
        if info.label_counts is not None and (
            len(info.label_counts) != head["num_classes"] or sum(info.label_counts) != info.samples
        ):
            raise ValueError("its label counts do not add up")
    except MessageError:
        raise
    except Exception as error:  # an introduction can refuse its site, and never end the server
        raise MessageError(
            f"Site {name} cannot take part: its introduction is not credible ({error!s:.300})."
        ) from error
    return info, blueprint


def _check_columns(columns: Any) -> None:
    """Refuse what is no list of columns."""
    told = [] if columns is None else columns
    if not all(len(column) == 4 and all(isinstance(item, str) for item in column) for column in told):
        raise ValueError("its columns are none")


def shape_of(head: Head) -> InputShape:
    """Return the shape of a site's inputs, with what it says about words and categories."""
    sizes, groups = ([_count(n) for n in head[key]] for key in ("input_shape", "groups"))
    return InputShape(sizes, _count(head["words"], least=0), groups)


def _blueprint(name: str, head: Head, blob: bytes, method: Method, run: Mapping[str, Any], max_bytes: int) -> Blueprint:
    classes, shape = _count(head["num_classes"], most=MAX_CLASSES), shape_of(head)
    apart = None if head["public_classes"] is None else _count(head["public_classes"], most=MAX_CLASSES)
    outputs = method.outputs(classes, apart)
    if len(shape) > MAX_AXES or math.prod(shape) > min(MAX_INPUT, MAX_REHEARSED // classes):
        raise ValueError(f"inputs of shape {list(shape)[:MAX_AXES]} are too large")
    shapes = {str(key): tuple(_count(n, least=0) for n in value) for key, value in head["shapes"].items()}
    if not ("learner" in head["properties"] or 1 <= len(shapes) <= MAX_TENSORS):
        raise ValueError(f"a network has between 1 and {MAX_TENSORS:,} tensors")
    if "learner" in head["properties"] and (shapes or head["model"] is not None or head["feature_dim"] is not None):
        raise ValueError("a model that is no network has neither tensors nor features, and only its site can make it")
    if head["model"] is not None:
        if not in_zoo(str(head["model"])):  # it would name a file or code on this machine
            raise ValueError(f"its network '{head['model']!s:.100}' is not one of the zoo")
        check_size(str(head["model"]), shape, outputs, run, max_bytes // 4)
        made = make_blueprint(
            str(head["model"]),
            str(head["model"]),
            shape,
            outputs,
            run["seed"],
            run["feature_dim"],
            run["feature_adapter"],
        )
        if made.shapes != shapes:
            raise ValueError(f"its {head['model']} has other tensors than ours: use the same version of polyfed")
        return made
    dtypes = {key: getattr(torch, str(head["dtypes"][key])) for key in shapes}
    if not set(dtypes.values()) <= DTYPES.keys():
        raise ValueError("unknown types of numbers")
    most = MAX_FEATURES // (outputs + 1)
    feature_dim = None if head["feature_dim"] is None else _count(head["feature_dim"], most=most)
    properties = frozenset(head["properties"]) & frozenset(KNOWN)
    names = ("s_in", "s_out") if "split3" in properties else ()
    cuts = {cut: tuple(_count(n) for n in head["cuts"][cut]) for cut in names}
    if any(math.prod(cut) > MAX_INPUT for cut in cuts.values()):
        raise ValueError("what crosses the cuts of its network is too large")
    return Blueprint(
        name=str(head["architecture"])[:200],
        shapes=shapes,
        buffers=frozenset(head["buffers"]) & frozenset(shapes),
        properties=properties,
        feature_dim=feature_dim,
        num_classes=outputs,
        family=None if head["family"] is None else str(head["family"])[:200],
        parameters=_count(head["parameters"], least=0),
        initial=_initial(name, blob, shapes, dtypes, bool(method.shares and shapes), max_bytes),
        build=None,  # its code is at the site only
        frozen=frozenset(head["frozen"]) & (frozenset(shapes) - frozenset(head["buffers"])),
        cuts=cuts,
    )


def check_size(model: str, input_shape: tuple[int, ...], outputs: int, run: Mapping[str, Any], most: int) -> None:
    """Refuse a network of the zoo that is too large, before it is built: first it is laid out without memory.

    Raises
    ------
    ValueError
        As soon as one more parameter would be too many.
    """
    count = numbers = 0

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count, numbers
        count += 1
        numbers += 0 if parameter is None else parameter.numel()
        if count > MAX_BUILT or numbers > most:
            raise ValueError(
                f"its network '{model[:100]}' has more than {MAX_BUILT:,} tensors or {most:,} parameters, the limits "
                "here: --max-mb of the server sets the second"
            )

    if len(model) > 500:
        raise ValueError("the name of its network is too long")
    hook = register_module_parameter_registration_hook(register)
    try:
        with torch.device("meta"):
            known = (run["seed"], run["feature_dim"], run["feature_adapter"])
            made = make_module(model, model, input_shape, outputs, *known)
        if isinstance(made, Learner):
            raise ValueError(f"'{model[:100]}' is no network: the server does not make it")
    finally:
        hook.remove()


def _initial(
    name: str,
    blob: bytes,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    shared: bool,
    most: int,
) -> State:
    """Return a site's initial weights, or tensors of the right shapes that take no memory where they do not travel."""
    if not shared:
        return {key: torch.zeros((), dtype=dtypes[key]).expand(shape) for key, shape in shapes.items()}
    state = Message.from_bytes(blob, most, f"site {name}").params.get("main", {})
    if {key: (tuple(t.shape), t.dtype) for key, t in state.items()} != {k: (shapes[k], dtypes[k]) for k in shapes}:
        raise ValueError("its initial weights are not those it described")
    floats = [tensor for tensor in state.values() if tensor.is_floating_point() and tensor.numel()]
    if any(max(map(abs, map(float, tensor.aminmax()))) > LARGEST for tensor in floats):
        raise ValueError(f"its initial weights hold values beyond {LARGEST:g}, which no network has")
    return state


def read_task(head: Head) -> Task:
    """Return the task that a site speaks of.

    Raises
    ------
    ValueError
        Where there is no such task.
    """
    try:
        return from_description(head["task"])
    except Exception as error:  # a number that does not exist, a list that is none
        raise ValueError(f"it names no task: {error!s:.200}") from error


def _check_task(task: Task, head: Head) -> None:
    """Refuse units of a regression with which nobody could compute, and words that belong to no task."""
    if in_plain_values(task) != head["task"]:
        raise ValueError("its task has more words than it needs")
    if isinstance(task, Regression):
        if len(task.center) not in (0, head["num_classes"]):
            raise ValueError(f"its regression has units for {len(task.center)} of {head['num_classes']!s:.20} targets")
        if not all(abs(value) < MAX_UNIT for value in (*task.center, *task.spread, *(1 / s for s in task.spread))):
            raise ValueError(f"center, spread and its inverse of its regression must be below {MAX_UNIT:g}")


def _count(value: Any, least: int = 1, most: int = 1 << 40) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is not a number from {least} to {most}")
    return value
