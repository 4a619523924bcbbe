"""Each client's own test data, beside the common test set: a share of its rows, or a set of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from polyfed.core.errors import InputError
from polyfed.core.samples import Samples
from polyfed.data.dataset import Dataset, check_part
from polyfed.data.dealing import is_number
from polyfed.data.form import Raw
from polyfed.data.labels import with_names
from polyfed.data.objects import part_of
from polyfed.data.tables import Part, same_features

OWN = "own"  # how people ask for own test data without saying how much
OWN_SHARE = 0.2


def read_part(what: str, source: Any, first: Part | None = None) -> Part:
    """Read one part, so that whatever is wrong with it is said about this one; tables as the first one was read."""
    part = part_of(source, {"inputs": first.features} if first is not None and first.features else None, what)
    if first is not None:
        same_features(part.features, first.features, what)
    if len(part.inputs) == 0:
        raise InputError(f"{what.capitalize()} has no samples: give it some or leave it out.")
    check_part(what, part.inputs, part.labels)
    return part


def is_list_of_parts(test: Any, clients: int) -> bool:
    """Tell a list of own test sets from one test set: a list of two arrays is a pair."""
    kinds = (tuple, Samples, Dataset, type(None))
    return isinstance(test, list) and len(test) == clients and all(isinstance(part, kinds) for part in test)


def read_own(own_test: Sequence[Any], read: Sequence[Part]) -> list[Part | None]:
    """Read own test sets, which must look like the training data."""
    if len(own_test) != len(read):
        raise InputError(
            f"own_test has {len(own_test)} parts for {len(read)} clients: give one for each (None: it has none)."
        )
    found = []
    for client, part in enumerate(own_test):
        what = f"the own test set of client {client}"
        made = None if part is None else read_part(what, part, read[0])
        if made is not None and shape_of(made) != shape_of(read[0]):
            raise InputError(
                f"Samples of {what} have shape {shape_of(made)}, but those of client 0 have {shape_of(read[0])}: bring "
                "them to one form."
            )
        found.append(made)
    return found


def shape_of(part: Part) -> tuple[int, ...] | None:
    """Return the shape of one sample; None: its rows are not numbers yet."""
    return None if isinstance(part.inputs, Raw) else tuple(part.inputs.shape[1:])


def joined(common: list[Part], own: Sequence[Part | None]) -> Part:
    """Put the common test set and own ones one behind the other: they are checked and numbered together."""
    parts = [*common, *(part for part in own if part is not None)]
    if len(parts) == 1:
        return parts[0]
    if any(part.class_names != parts[0].class_names for part in parts):
        parts = [
            replace(part, labels=with_names(part.labels, part.class_names, "a test set")) if part.class_names else part
            for part in parts
        ]
    kinds = {part.labels.dtype.kind == "U" for part in parts}
    raw = [part.inputs for part in parts if isinstance(part.inputs, Raw)]
    numbers = [part.inputs for part in parts if not isinstance(part.inputs, Raw)]
    if len(kinds) > 1 or len({x.dtype for x in numbers}) > 1 or (raw and numbers):
        raise InputError("The test sets of the clients hold different kinds of inputs or labels: give one kind.")
    return replace(
        parts[0],
        inputs=Raw.join(raw) if raw else torch.cat(numbers),
        labels=np.concatenate([part.labels for part in parts]),
        columns={},
    )


def own_apart(data: Dataset, own: Sequence[Part | None], everything: bool) -> tuple[Dataset, list[Samples | None]]:
    """Take own test sets out of what was put together; `everything`: all of them are the common test set."""
    if not own:
        return data, []
    sizes = [0 if part is None else len(part.inputs) for part in own]
    start = first = len(data.test) - sum(sizes)
    found: list[Samples | None] = []
    for size in sizes:
        found.append(data.test.select(torch.arange(start, start + size)) if size else None)
        start += size
    return (data if everything else replace(data, test=data.test.select(torch.arange(first)))), found


def own_share(test: Any) -> float:
    """Return the share of a client's rows that its own test data takes."""
    share = OWN_SHARE if test == OWN else 0.0 if test is None else test
    if not is_number(share) or not 0 <= share < 1:
        raise InputError(f"test={test!r} is not possible: give '{OWN}', or a share of at least 0 and below 1.")
    return float(share)
