"""Check what a method needs against models and data before anything trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from polyfed.core.errors import InputError
from polyfed.core.method import Method
from polyfed.core.party import Blueprint, ClientInfo
from polyfed.core.samples import Samples
from polyfed.core.task import CLASSIFICATION, Regression, Task

SHOWN = 6  # methods that are named as alternatives; `polyfed methods --for FILE` lists all

EXPLAINED = {
    "same_arch": "the same architecture at every client",
    "family": "architectures of one family (layers with common names)",
    "width": "a width-scalable network",
    "features": "a model with features(x) and head(z)",
    "feature_dim": "features of the same size at every client",
    "split3": "a model that can be cut in three (stem, middle, head)",
    "exits": "a network with several exits",
    "s_in": "s_in of one shape at every client",
    "s_out": "s_out of one shape at every client",
    "public": "public data at all parties",
    "public_labels": "public data with labels",
    "images": "image inputs",
    "batchnorm": "networks with BatchNorm",
    "mlp": "fully connected networks",
    "same_depth": "networks of the same depth",
    "label_counts": "the number of samples of each class at every client",
    "builds": "architectures that the server can build",
    "classes": "classes (one of several for each sample)",
}

REMEDIES = {
    "features": "wrap the model with polyfed.adapt(model, head=...)",
    "feature_dim": "set feature_dim (--feature-dim N) to give all models features of one size",
    "split3": "wrap the model with polyfed.adapt(model, head=..., stem=...)",
    "exits": "use one of the zoo's with the option exits, such as cnn:16-32,exits and cnn:16-32,exits=1",
    "s_in": "give all models the same stem (its width and stride)",
    "s_out": "set feature_dim (--feature-dim N) to give all models features of one size",
    "public": "add public data (--public N or --public NAME:N)",
    "public_labels": "give its labels too, or set the method's public_epochs=0",
    "same_arch": "give all clients one model",
    "family": "use depths of one network, such as resnet18,resnet26",
    "mlp": "use perceptrons, such as mlp:1x64",
    "width": "use width rates of one network, such as cnn:16-32@1,cnn:16-32@0.5",
}


def check_needs(
    method: Method,
    infos: Sequence[ClientInfo],
    blueprints: Mapping[str, Blueprint],
    public: Samples | None,
    input_shape: tuple[int, ...],
    alternatives: Callable[[], Sequence[Method]] = tuple,
    task: Task = CLASSIFICATION,
) -> None:
    """Refuse a run whose models or data lack what the method needs.

    Raises
    ------
    InputError
        One sentence with the client, what is missing, and which methods would work.
    """
    problem = missing(method, infos, blueprints, public, input_shape, task)
    if problem is None:
        return
    working = sorted(
        other.name for other in alternatives() if missing(other, infos, blueprints, public, input_shape, task) is None
    )
    few = ", ".join(working[:SHOWN]) + (f" and {len(working) - SHOWN} more" if len(working) > SHOWN else "")
    hint = f" Methods that would work: {few}." if working else ""
    raise InputError(f"{method.name} needs {problem}.{hint}")


def missing(
    method: Method,
    infos: Sequence[ClientInfo],
    blueprints: Mapping[str, Blueprint],
    public: Samples | None,
    input_shape: tuple[int, ...],
    task: Task = CLASSIFICATION,
) -> str | None:
    """Return the first unmet need in words, or None."""
    needs = method.requirements()
    for info in infos:
        if "learner" in blueprints[info.architecture].properties:
            found = _unfit_learner(method, needs, blueprints[info.architecture].properties, task)
            if found is not None:
                return found.format(f"{info} has {info.architecture}")
    if task != CLASSIFICATION:
        if "classes" in needs:
            return f"{EXPLAINED['classes']}, but the task is {task.name}"
        needs = needs - {"label_counts"}  # there are none to be told
    for need in sorted(needs - {"classes"}):
        found = _lacking(need, infos, blueprints, public, input_shape)
        if found is not None:
            kinds = ("same_arch", "width") if need == "family" else ()  # what kind of family it is to be says more
            told = next((kind for kind in kinds if kind in needs), need)
            remedy = f": {REMEDIES[told]}" if told in REMEDIES else ""
            return f"{EXPLAINED[need]}, but {found}{remedy}"
    return method.misfit(infos, blueprints, input_shape)


def _unfit_learner(method: Method, needs: frozenset[str], offers: frozenset[str], task: Task) -> str | None:
    """Say what a client lacks whose model is no network; the braces stand for the client and its model."""
    if not method.takes_learners():
        return "networks at every client, but {}, which can only be fitted and asked"
    if ("regressor" in offers) != isinstance(task, Regression):
        kinds = "a learner of values", "a learner of classes (with predict_proba)"
        wanted, other = kinds if isinstance(task, Regression) else kinds[::-1]
        return f"{wanted} for the task {task.name}, but {{}}, {other}"
    if "public" in needs and "weighted" not in offers and "regressor" not in offers:
        return "learners of soft labels, but {}, whose fit takes no sample_weight: use one that does"
    return None


def _lacking(
    need: str,
    infos: Sequence[ClientInfo],
    blueprints: Mapping[str, Blueprint],
    public: Samples | None,
    input_shape: tuple[int, ...],
) -> str | None:
    if need == "public":
        return "there is none" if public is None or not len(public) else None
    if need == "public_labels":
        return "those given have none" if public is not None and not public.is_labeled() else None
    if need == "images":
        return f"inputs have shape {list(input_shape)}" if len(input_shape) != 3 else None
    if need == "label_counts":
        return next((f"{i} does not give them" for i in infos if i.label_counts is None), None)
    first = infos[0]
    for info in infos:
        mine, reference = blueprints[info.architecture], blueprints[first.architecture]
        if need in {"features", "split3", "width", "batchnorm", "mlp", "exits"} and need not in mine.properties:
            return f"{info} has {info.architecture}, which does not offer it"
        if need == "builds" and mine.build is None:
            return f"the model of {info} is known to that client only"
        if need == "same_arch" and info.architecture != first.architecture:
            return f"{first} has {first.architecture} and {info} has {info.architecture}"
        if need == "family" and mine.family is None:
            return f"{info} has {info.architecture}, which is of none"
        if need == "family" and mine.family != reference.family:
            return f"{first} has {first.architecture} and {info} has {info.architecture}"
        if need == "feature_dim":
            if mine.feature_dim is None:
                return f"{info} has {info.architecture}, which does not offer features"
            if mine.feature_dim != reference.feature_dim:
                return f"{first} has {reference.feature_dim} features and {info} has {mine.feature_dim}"
        if need in ("s_in", "s_out"):
            a, b = reference.cuts.get(need), mine.cuts.get(need)
            if a is not None and b is not None and a != b:  # who has none is refused for want of split3
                theirs = f"{list(b)} at {info} ({info.architecture})"
                return f"it is {list(a)} at {first} ({first.architecture}) and {theirs}"
        if need == "same_depth" and len(mine.shapes) != len(reference.shapes):
            return f"{first} has {first.architecture} and {info} has {info.architecture}"
    return None
