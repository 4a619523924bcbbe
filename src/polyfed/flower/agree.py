"""What all sites must have in common, and one name for each architecture among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyfed.core.errors import InputError
from polyfed.core.party import Blueprint, ClientInfo
from polyfed.flower.codec import Head


def settle(
    sites: Mapping[str, tuple[ClientInfo, Blueprint]], order: list[str]
) -> tuple[dict[int, ClientInfo], dict[str, Blueprint]]:
    """Return the sites, numbered in the federation's order; give every distinct architecture one name.

    Two sites whose own networks have the same name, tensors, cuts and frozen parameters have the same architecture;
    those that share only the name are told apart by the first site that has them. A name of the zoo means what the
    server built: no site speaks for others that have that network.
    """
    present = [site for site in order if site in sites]
    known: dict[str, list[Blueprint]] = {}  # of each name: networks that differ, the server's own first
    for blueprint in sorted((sites[site][1] for site in present), key=lambda plan: plan.build is None):
        others = known.setdefault(blueprint.name, [])
        if not any(_kind(other) == _kind(blueprint) for other in others):
            others.append(blueprint)
    infos: dict[int, ClientInfo] = {}
    blueprints: dict[str, Blueprint] = {}
    names: dict[tuple[str, int], str] = {}
    for site in present:
        info, own = sites[site]
        place = next(k for k, other in enumerate(known[own.name]) if _kind(other) == _kind(own))
        name = names.setdefault((own.name, place), f"{own.name}@{site}" if place else own.name)
        blueprints.setdefault(name, replace(known[own.name][place], name=name) if place else known[own.name][place])
        infos[order.index(site)] = replace(info, id=order.index(site), architecture=name)
    return infos, blueprints


def _kind(blueprint: Blueprint) -> tuple[Any, ...]:
    return blueprint.shapes, blueprint.buffers, blueprint.properties, blueprint.frozen, blueprint.cuts


def agree(heads: Mapping[str, Head], public: str | None, needs_public: bool) -> None:
    """Check that all sites speak of the same problem.

    Raises
    ------
    InputError
        Naming the site that differs from the first one, and in what.
    """
    first, reference = next(iter(heads.items()))
    for site, head in heads.items():
        if head["task"] != reference["task"]:
            raise InputError(
                f"Site {site} learns {_said(head['task'])}, but site {first} {_said(reference['task'])}: all sites "
                "need the same task, of a regression with the same center and spread (task in what --data returns)."
            )
        ours, theirs = [str(name) for name in reference["class_names"]], [str(name) for name in head["class_names"]]
        if (theirs, head["num_classes"]) != (ours, len(ours)):
            what = "put them in the order" if sorted(ours) == sorted(theirs) else "name the same classes in the order"
            raise InputError(
                f"Site {site} has the classes {_listed(theirs)}, but site {first} has {_listed(ours)}: {what} of site "
                f"{first}, also those without a sample (class_names in what --data returns; without names: 0, 1, ...)."
            )
        if head["columns"] is not None and reference["columns"] is not None:
            _same_columns(site, head["columns"], first, reference["columns"])
        if head["words"] != reference["words"] or head["groups"] != reference["groups"]:
            raise InputError(
                f"The words or categories of site {site} are not those of site {first}, so that the same number means "
                "something else: load the data of all sites with one form (load(..., form=...))."
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


def _same_columns(site: str, columns: list[list[str]], first: str, others: list[list[str]]) -> None:
    """Refuse tables whose numbers would mean something else at another site."""
    together = "agree on one form ('polyfed form agree') and start every site with it (join --form)"
    ours, theirs = [column[0] for column in columns], [column[0] for column in others]
    if ours != theirs:
        what = "in another order than" if sorted(ours) == sorted(theirs) else f"but {_listed(theirs)} are those of"
        raise InputError(f"The columns of site {site} are {_listed(ours)}, {what} site {first}: {together}.")
    for (name, *told), (_, *known) in zip(columns, others, strict=True):
        if told[:2] != known[:2]:
            raise InputError(
                f"Column '{name:.100}' of site {site} has other words or is of another kind than at site {first}, so "
                f"that the same number means something else: {together}."
            )
        if told[2] != known[2]:
            raise InputError(
                f"Column '{name:.100}' of site {site} is scaled otherwise than at site {first}, as with another form "
                f"or with a form at one of them only: {together}."
            )


def _said(task: list[Any]) -> str:
    """Return a task as it was told, for people."""
    name, *units = task
    return f"{name!s:.40}" + (f" with center {units[0]!s:.100} and spread {units[1]!s:.100}" if any(units) else "")


def _listed(names: list[str]) -> str:
    """Return class names for people; a long list is cut."""
    return "[" + ", ".join(names[:50]) + (f", ... ({len(names)} in all)]" if len(names) > 50 else "]")
