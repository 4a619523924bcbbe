"""How a site introduces itself, and what the server makes of it: a `ClientInfo` and a `Blueprint`.

A site with a model of the zoo gives the model's string, and the server builds the same network. A site with a network
of its own gives names and shapes only; its initial weights travel once, and only if the method shares weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from polyfed.build import ModelSpec, label_of, make_blueprint
from polyfed.core.errors import InputError, MessageError
from polyfed.core.message import Message, State
from polyfed.core.method import Method
from polyfed.core.party import Blueprint, ClientInfo
from polyfed.flower.codec import Head
from polyfed.flower.sitedata import SiteData, fingerprint

MAX_TENSORS = 100_000
KNOWN = ("features", "split3", "width", "exits", "batchnorm", "mlp", "dropout")


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
    tell_counts = "label_counts" in method.requirements()
    head = {
        "samples": len(data.train),
        "label_counts": list(data.train.label_counts(data.num_classes)) if tell_counts else None,
        "num_classes": data.num_classes,
        "class_names": list(data.classes),
        "input_shape": list(data.input_shape),
        "public": fingerprint(data.public),
        "public_classes": data.public_classes,
        "model": model if isinstance(model, str) else None,
        "architecture": blueprint.name,
        "shapes": {name: list(shape) for name, shape in blueprint.shapes.items()},
        "dtypes": {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in blueprint.initial.items()},
        "buffers": sorted(blueprint.buffers),
        "frozen": sorted(blueprint.frozen),
        "properties": sorted(blueprint.properties),
        "feature_dim": blueprint.feature_dim,
        "family": blueprint.family,
        "parameters": blueprint.parameters,
    }
    share = not isinstance(model, str) and method.shares
    return head, Message(params={"main": blueprint.initial}).to_bytes() if share else b""


def meet(
    name: str, head: Head, blob: bytes, method: Method, run: Mapping[str, Any], max_bytes: int
) -> tuple[ClientInfo, Blueprint]:
    """Read an introduction at the server.

    Raises
    ------
    MessageError
        With the site's name, when it is not credible.
    """
    try:
        blueprint = _blueprint(name, head, blob, method, run, max_bytes)
        counts = head["label_counts"]
        info = ClientInfo(
            id=-1,
            samples=_count(head["samples"]),
            architecture=blueprint.name,
            parameters=blueprint.parameters,
            label_counts=None if counts is None else tuple(_count(n, least=0) for n in counts),
            name=name,
        )
        if info.label_counts is not None and (
            len(info.label_counts) != head["num_classes"] or sum(info.label_counts) != info.samples
        ):
            raise ValueError("its label counts do not add up")
    except (KeyError, ValueError, TypeError, AttributeError, InputError) as error:
        raise MessageError(f"Site {name} cannot take part: its introduction is not credible ({error}).") from error
    return info, blueprint


def _blueprint(name: str, head: Head, blob: bytes, method: Method, run: Mapping[str, Any], max_bytes: int) -> Blueprint:
    classes, shape = _count(head["num_classes"]), tuple(_count(n) for n in head["input_shape"])
    apart = None if head["public_classes"] is None else _count(head["public_classes"])
    outputs = method.outputs(classes, apart)
    shapes = {str(key): tuple(_count(n, least=0) for n in value) for key, value in head["shapes"].items()}
    if not shapes or len(shapes) > MAX_TENSORS:
        raise ValueError("a network has between 1 and 100,000 tensors")
    if head["model"] is not None:
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
    if not all(isinstance(dtype, torch.dtype) for dtype in dtypes.values()):
        raise ValueError("unknown types of numbers")
    feature_dim = None if head["feature_dim"] is None else _count(head["feature_dim"])
    return Blueprint(
        name=str(head["architecture"])[:200],
        shapes=shapes,
        buffers=frozenset(head["buffers"]) & frozenset(shapes),
        properties=frozenset(head["properties"]) & frozenset(KNOWN),
        feature_dim=feature_dim,
        num_classes=outputs,
        family=None if head["family"] is None else str(head["family"])[:200],
        parameters=_count(head["parameters"], least=0),
        initial=_initial(name, blob, shapes, dtypes, bool(method.shares), max_bytes),
        build=None,  # its code is at the site only
        frozen=frozenset(head["frozen"]) & (frozenset(shapes) - frozenset(head["buffers"])),
    )


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
    return state


def settle(
    met: Mapping[str, tuple[ClientInfo, Blueprint]], order: list[str]
) -> tuple[dict[int, ClientInfo], dict[str, Blueprint]]:
    """Return the sites, numbered in the federation's order; give every distinct architecture one name.

    Two sites whose own networks have the same name, tensors and frozen parameters have the same architecture; those
    that share only the name are told apart by the site.
    """
    infos: dict[int, ClientInfo] = {}
    blueprints: dict[str, Blueprint] = {}
    for site in [name for name in order if name in met]:
        info, blueprint = met[site]
        known = blueprints.get(blueprint.name)
        if known is not None and _kind(known) != _kind(blueprint):
            blueprint = replace(blueprint, name=f"{blueprint.name}@{site}")
        blueprints.setdefault(blueprint.name, blueprint)
        infos[order.index(site)] = replace(info, id=order.index(site), architecture=blueprint.name)
    return infos, blueprints


def _kind(blueprint: Blueprint) -> tuple[Any, ...]:
    return blueprint.shapes, blueprint.properties, blueprint.frozen


def agree(heads: Mapping[str, Head], public: str | None, needs_public: bool) -> None:
    """Check that all sites speak of the same problem.

    Raises
    ------
    InputError
        Naming the site that differs from the first one, and in what.
    """
    first, reference = next(iter(heads.items()))
    for site, head in heads.items():
        ours, theirs = [str(name) for name in reference["class_names"]], [str(name) for name in head["class_names"]]
        if (theirs, head["num_classes"]) != (ours, len(ours)):
            what = "put them in the order" if sorted(ours) == sorted(theirs) else "name the same classes in the order"
            raise InputError(
                f"Site {site} has the classes {_listed(theirs)}, but site {first} has {_listed(ours)}: {what} of site "
                f"{first}, also those without a sample (class_names in what --data returns; without names: 0, 1, ...)."
            )
        if head["input_shape"] != reference["input_shape"]:
            raise InputError(
                f"Site {site} has inputs of shape {head['input_shape']}, but site {first} has "
                f"{reference['input_shape']}: all sites must bring their inputs to one shape."
            )
        if needs_public and head["public"] != public:
            raise InputError(
                f"Site {site} holds other public samples than the server: give --public the same data everywhere."
            )


def _listed(names: list[str]) -> str:
    """Return class names for people; a long list is cut."""
    return "[" + ", ".join(names[:50]) + (f", ... ({len(names)} in all)]" if len(names) > 50 else "]")


def _count(value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 40:
        raise ValueError(f"{value!r} is not a sensible number")
    return value
