"""Parts that clients bring: one form, one unit, one list of classes, or a sentence that names the odd one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyfed.core.errors import InputError
from polyfed.core.task import CLASSIFICATION, Task
from polyfed.data.columns import Part
from polyfed.data.dataset import how_to_resize, usual_divisor
from polyfed.data.decode import fit_images
from polyfed.data.form import Form, Raw, learn_form
from polyfed.data.labels import ALIKE, CLASSES, check_single, joined_names, spelled_alike, with_names
from polyfed.data.texts import Words

TEST = "the test set"  # what messages call it, beside the clients' parts


def check_widths(parts: Mapping[str, Part], test: Part, task: Task) -> None:
    """Refuse several labels for a sample where there are classes, and other numbers of them than the first client."""
    first, reference = next(iter(parts.items()))
    for what, part in {**parts, TEST: test}.items():
        if task == CLASSIFICATION:
            check_single(part.labels, what)
        elif part.labels.shape[1:] != reference.labels.shape[1:]:
            raise InputError(
                f"The labels of {what} have shape {part.labels.shape}, but those of {first} have "
                f"{reference.labels.shape}: give as many for each sample."
            )


def check_shapes(parts: Mapping[str, Part]) -> None:
    """Refuse samples of other shapes or kinds of numbers than the first client has."""
    first, reference = next(iter(parts.items()))
    expected = tuple(reference.tensor.shape[1:])
    for what, part in parts.items():
        if part.tensor.shape[1:] != reference.tensor.shape[1:] or part.tensor.dtype != reference.tensor.dtype:
            raise InputError(
                f"{what[0].upper()}{what[1:]} has samples of shape {tuple(part.tensor.shape[1:])} "
                f"({part.tensor.dtype}), but {first} has {expected} ({reference.tensor.dtype}): bring them to one "
                f"form{how_to_resize(expected)}."
            )


def one_form(
    parts: Mapping[str, Part], test: Part, tokenizer: Any = None, length: int | None = None
) -> tuple[dict[str, Part], Part, Form | None, tuple[str, ...]]:
    """Make numbers of raw rows in the same way everywhere: categories and words are those of all clients together."""
    raw = [isinstance(part.inputs, Raw) for part in (*parts.values(), test)]
    first, reference = next(iter(parts.items()))
    if not any(raw):
        for what, part in parts.items():
            if part.form is not None and reference.form is not None and part.form.columns != reference.form.columns:
                raise InputError(
                    f"The categories of {what} are not those of {first}, so that the same position means another "
                    "value: load it with form=first.form, or give the tables as data frames."
                )
        return dict(parts), test, reference.form, ()
    if not all(raw):
        raise InputError("Some clients have tables or texts and others have arrays: give one kind of inputs.")
    together = Raw.join([part.inputs for part in parts.values() if isinstance(part.inputs, Raw)])
    form, notes = learn_form(together, "the clients", None if tokenizer is None else Words.given(tokenizer), length)
    made = {}
    for what, part in {**parts, TEST: test}.items():
        assert isinstance(part.inputs, Raw)
        x, more = form.encode(part.inputs, what)
        notes += more
        made[what] = replace(part, inputs=x)
    test = made.pop(TEST)
    return made, test, form, notes


def one_color(
    parts: Mapping[str, Part], common: list[Part], own: list[Part | None]
) -> tuple[dict[str, Part], list[Part], list[Part | None], tuple[str, ...]]:
    """Make grey images color where some have it, with a note: clients' parts, the common test set and own ones."""
    every = [part for part in (*parts.values(), *common, *own) if part is not None]
    if any(isinstance(part.inputs, Raw) or part.inputs.dim() != 4 for part in every):
        return dict(parts), common, own, ()
    if {part.tensor.shape[1] for part in every} != {1, 3}:
        return dict(parts), common, own, ()

    def color(part: Part) -> Part:
        return replace(part, inputs=fit_images(part.tensor, (3, *part.tensor.shape[2:]), "a part"))

    grey = [what for what, part in parts.items() if part.tensor.shape[1] == 1]
    told = f"grey images of {', '.join(grey)} are beside others in color: all are color"
    colored: list[Part | None] = [None if part is None else color(part) for part in own]
    of_clients = {what: color(part) for what, part in parts.items()}
    return of_clients, list(map(color, common)), colored, (told,) if grey else ()


def check_divisors(parts: Mapping[str, Part], test: Part) -> None:
    """Refuse samples that were scaled differently before: one client's 16 must not be another's 255."""
    whose, first = {**parts, TEST: test}, next(iter(parts))
    divisors = {of: part.divisor or usual_divisor(part.tensor) for of, part in whose.items()}
    for of, divisor in divisors.items():
        if divisor != divisors[first] and whose[of].tensor.dtype == parts[first].tensor.dtype:
            raise InputError(
                f"The inputs of {of} are divided by {divisor:g}, but those of {first} by "
                f"{divisors[first]:g}: bring them to one unit."
            )


def check_kinds(parts: Mapping[str, Part], test: Part) -> None:
    """Refuse names beside numbers, which nobody said to be the same classes."""
    kinds = {True: "names", False: "numbers"}
    first, reference = next(iter(parts.items()))
    words = reference.labels.dtype.kind == "U"
    for what, part in {**parts, TEST: test}.items():
        if (part.labels.dtype.kind == "U") != words:
            raise InputError(
                f"The labels of {what} are {kinds[not words]}, but those of {first} are {kinds[words]}: "
                "give one kind everywhere."
            )


def join_names(parts: Mapping[str, Part], test: Part) -> tuple[dict[str, Part], Part, tuple[str, ...] | None]:
    """Join lists of class names: where they differ, numbers mean other classes and are turned into names."""
    every = {**parts, TEST: test}
    lists = [part.class_names for part in every.values() if part.class_names]
    if not lists or all(names == lists[0] for names in lists):
        return dict(parts), test, lists[0] if lists else None
    named = {
        what: replace(part, labels=with_names(part.labels, part.class_names, what)) if part.class_names else part
        for what, part in every.items()
    }
    test = named.pop(TEST)
    return named, test, joined_names([part.class_names for part in parts.values() if part.class_names])


def note_spellings(parts: Mapping[str, Part], notes: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return notes with one on classes that are probably the same, with who writes them in which way."""
    whose = {
        what: set(part.labels.tolist()) if part.labels.dtype.kind == "U" else part.class_names or ()
        for what, part in parts.items()
    }
    told = spelled_alike(names, whose)
    others = tuple(note for note in notes if not note.startswith(f"{CLASSES} {ALIKE}"))
    return others if told is None else (*others, told)
