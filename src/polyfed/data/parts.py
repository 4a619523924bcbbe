"""Data that is separate already becomes one data set, of which it is known whose each row is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from polyfed.core.errors import InputError
from polyfed.core.samples import Samples
from polyfed.core.task import CLASSIFICATION, Task, check_score
from polyfed.data.columns import Part
from polyfed.data.dataset import Dataset, build, form_of
from polyfed.data.dealing import is_number
from polyfed.data.form import Raw
from polyfed.data.owntest import (
    OWN,
    by_name,
    held_out,
    is_list_of_parts,
    joined,
    own_apart,
    own_share,
    read_own,
    read_part,
)
from polyfed.data.together import (
    check_divisors,
    check_kinds,
    check_shapes,
    check_widths,
    join_names,
    note_spellings,
    one_color,
    one_form,
)


@dataclass(frozen=True)
class Together:
    """Parts in one data set: the rows of each client, its name and own test data, or the share that it keeps for that.

    `own` is empty where nobody brought a test set of its own.
    """

    data: Dataset
    rows: list[np.ndarray]
    names: tuple[str, ...]
    own: list[Samples | None]
    share: float


def read_together(
    parts: Sequence[Any] | Mapping[str, Any],
    test: Any,
    own_test: Any,
    *,
    how: Mapping[str, Any],
    tokenizer: Any,
    length: int | None,
    name: str,
    seed: int,
    task: Task,
    num_classes: int | None,
    class_names: Sequence[str] | None,
    normalize: bool,
) -> Together:
    """Read what `Clients.from_parts` got: `how` says how to read each part.

    Raises
    ------
    InputError
        If there are no parts, a client has no data, or samples of different shapes.
    """
    names = tuple(map(str, parts)) if isinstance(parts, Mapping) else ()
    if len(set(names)) < len(names):
        raise InputError(f"Two clients have the same name among {', '.join(names)}: give each one of its own.")
    parts = list(parts.values()) if isinstance(parts, Mapping) else parts
    if parts is not None and (not isinstance(parts, Sequence) or isinstance(parts, str | bytes)):
        raise InputError(f"Clients cannot be made of parts of type {type(parts).__name__}: give a list, a part each.")
    if not parts:
        raise InputError("There are no clients: give at least one part.")
    called = [f"client {one}" for one in (names or range(len(parts)))]
    read = [read_part(called[0], parts[0], None, how)]
    read += [read_part(what, part, read[0], how) for what, part in zip(called[1:], parts[1:], strict=True)]
    test, own_test = by_name(test, names), by_name(own_test, names)
    own: list[Part | None] = []
    if is_number(test) or (isinstance(test, str) and test == OWN):
        read, own = held_out(read, own_share(test), seed)
        test = None
    elif is_list_of_parts(test, len(parts)):
        test, own_test = None, test
    if isinstance(own_test, Sequence) and not isinstance(own_test, str):
        own = read_own(own_test, dict(zip(called, read, strict=True)), how)
    if test is None and not any(own):
        raise InputError("There is no test set: give test=... for all clients together, or a list, one for each.")
    common = [read_part("the test set", test, read[0], how)] if test is not None else []
    whose, common, own, notes = one_color(dict(zip(called, read, strict=True)), common, own)
    held = joined(common, own)
    raw = isinstance(held.inputs, Raw)
    whose, held, form, more = one_form(whose, held, tokenizer, length)
    notes += more
    if how.get("resize"):
        form = replace(form or form_of(held.tensor), resize=True)
    check_shapes(whose)
    check_widths(whose, held, task)
    check_divisors(whose, held)
    whose, held, known = join_names(whose, held)
    read = list(whose.values())
    if known is None:
        check_kinds(whose, held)
    elif any(part.labels.dtype.kind == "U" for part in (*read, held)):  # one kind, before they are put together
        read = [replace(part, labels=part.labels.astype(str)) for part in read]
    ends = np.cumsum([len(part.inputs) for part in read])
    data = build(
        name,
        (torch.cat([part.tensor for part in read]), np.concatenate([part.labels for part in read])),
        (held.tensor, held.labels),
        num_classes=num_classes,
        class_names=class_names or known or read[0].outputs(task),
        divisor=read[0].divisor,
        normalize=normalize,
        notes=(*read[0].notes, *notes),
        features=read[0].features,
        task=task,
        form=form,
        learned=raw,
    )
    if data.task == CLASSIFICATION and not class_names:
        data = replace(data, notes=note_spellings(whose, data.notes, data.class_names))
    data, apart = own_apart(data, own, test is None)
    check_score(data.task, data.test.labels(), "the test set")
    rows = np.split(np.arange(ends[-1]), ends[:-1])
    return Together(data, rows, names, apart, 0.0 if own else own_share(own_test))
