"""Parts that clients bring: one form, one unit, one list of classes, or a sentence that names the odd one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from polyfed.core.errors import InputError
from polyfed.core.task import CLASSIFICATION, Task
from polyfed.data.columns import Part
from polyfed.data.dataset import usual_divisor
from polyfed.data.decode import fit_images
from polyfed.data.form import Form, Raw, learn_form
from polyfed.data.labels import check_single, joined_names, with_names
from polyfed.data.texts import Words


def check_widths(parts: Sequence[Part], test: Part, task: Task) -> None:
    """Refuse several labels for a sample where there are classes, and other numbers of them than client 0 has."""
    for what, part in (*((f"client {client}", part) for client, part in enumerate(parts)), ("the test set", test)):
        if task == CLASSIFICATION:
            check_single(part.labels, what)
        elif part.labels.shape[1:] != parts[0].labels.shape[1:]:
            raise InputError(
                f"The labels of {what} have shape {part.labels.shape}, but those of client 0 have "
                f"{parts[0].labels.shape}: give as many for each sample."
            )


def one_form(
    parts: list[Part], test: Part, tokenizer: Any = None, length: int | None = None
) -> tuple[list[Part], Part, Form | None, tuple[str, ...]]:
    """Make numbers of raw rows in the same way everywhere: categories and words are those of all clients together."""
    raw = [isinstance(part.inputs, Raw) for part in (*parts, test)]
    if not any(raw):
        for client, part in enumerate(parts):
            if part.form is not None and parts[0].form is not None and part.form.columns != parts[0].form.columns:
                raise InputError(
                    f"The categories of client {client} are not those of client 0, so that the same position means "
                    "another value: load it with form=first.form, or give the tables as data frames."
                )
        return parts, test, parts[0].form, ()
    if not all(raw):
        raise InputError("Some clients have tables or texts and others have arrays: give one kind of inputs.")
    together = Raw.join([part.inputs for part in parts if isinstance(part.inputs, Raw)])
    form, notes = learn_form(together, "the clients", None if tokenizer is None else Words.given(tokenizer), length)
    made = []
    for what, part in (*((f"client {client}", part) for client, part in enumerate(parts)), ("the test set", test)):
        assert isinstance(part.inputs, Raw)
        x, more = form.encode(part.inputs, what)
        notes += more
        made.append(replace(part, inputs=x))
    return made[:-1], made[-1], form, notes


def one_color(
    parts: list[Part], common: list[Part], own: list[Part | None]
) -> tuple[list[Part], list[Part], list[Part | None], tuple[str, ...]]:
    """Make grey images color where some have it, with a note: clients' parts, the common test set and own ones."""
    every = [part for part in (*parts, *common, *own) if part is not None]
    if any(isinstance(part.inputs, Raw) or part.inputs.dim() != 4 for part in every):
        return parts, common, own, ()
    if {part.tensor.shape[1] for part in every} != {1, 3}:
        return parts, common, own, ()

    def color(part: Part) -> Part:
        return replace(part, inputs=fit_images(part.tensor, (3, *part.tensor.shape[2:]), "a part"))

    grey = [str(client) for client, part in enumerate(parts) if part.tensor.shape[1] == 1]
    told = f"grey images of client {', '.join(grey)} are beside others in color: all are color"
    colored: list[Part | None] = [None if part is None else color(part) for part in own]
    return list(map(color, parts)), list(map(color, common)), colored, (told,) if grey else ()


def check_divisors(parts: Sequence[Part], test: Part) -> None:
    """Refuse samples that were scaled differently before: one client's 16 must not be another's 255."""
    whose = {**{f"client {client}": part for client, part in enumerate(parts)}, "the test set": test}
    divisors = {of: part.divisor or usual_divisor(part.tensor) for of, part in whose.items()}
    for of, divisor in divisors.items():
        if divisor != divisors["client 0"] and whose[of].tensor.dtype == parts[0].tensor.dtype:
            raise InputError(
                f"The inputs of {of} are divided by {divisor:g}, but those of client 0 by "
                f"{divisors['client 0']:g}: bring them to one unit."
            )


def check_kinds(parts: Sequence[Part], test: Part) -> None:
    """Refuse names beside numbers, which nobody said to be the same classes."""
    kinds = {True: "names", False: "numbers"}
    first = parts[0].labels.dtype.kind == "U"
    for what, part in (*((f"client {client}", part) for client, part in enumerate(parts)), ("the test set", test)):
        if (part.labels.dtype.kind == "U") != first:
            raise InputError(
                f"The labels of {what} are {kinds[not first]}, but those of client 0 are {kinds[first]}: "
                "give one kind everywhere."
            )


def join_names(parts: list[Part], test: Part) -> tuple[list[Part], Part, tuple[str, ...] | None]:
    """Join lists of class names: where they differ, numbers mean other classes and are turned into names."""
    lists = [part.class_names for part in (*parts, test) if part.class_names]
    if not lists or all(names == lists[0] for names in lists):
        return parts, test, lists[0] if lists else None
    named = [
        replace(part, labels=with_names(part.labels, part.class_names, "a part")) if part.class_names else part
        for part in (*parts, test)
    ]
    return named[:-1], named[-1], joined_names([part.class_names for part in parts if part.class_names])
