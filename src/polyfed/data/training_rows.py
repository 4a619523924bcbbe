"""Statistics of a divided data set: from the rows that train, not from those kept apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyfed.core.errors import InputError, unknown
from polyfed.core.samples import Samples
from polyfed.core.task import Regression, describe
from polyfed.data.dataset import Dataset, measure
from polyfed.data.form import Form
from polyfed.data.targets import with_units

if TYPE_CHECKING:
    from polyfed.data.clients import Clients

TOGETHER = "together"
SCALINGS = (TOGETHER, "own")  # whose training rows scale the inputs


def scaled(clients: Clients, data: Dataset, scaling: str) -> Clients:
    """Scale all clients together, or each by its own training rows, as sites do that agree on nothing.

    The common test set is then everybody's own test data, each part in the scale of its client.

    Raises
    ------
    InputError
        Where a common set would be in nobody's scale.
    """
    if scaling not in SCALINGS:
        raise unknown("scaling", str(scaling), SCALINGS)
    clients = by_training_rows(clients, data, scale=scaling == TOGETHER)
    if scaling == TOGETHER:
        return clients
    if not clients.own_test or clients.public is not None:
        raise InputError(
            "scaling='own' needs test='own' (or a test set for each client) and no public data: what all clients have "
            "in common would be in the scale of none of them."
        )
    each = [measure(part.x[part.rows()], part.scaling.divisor, clients.form) for part in clients.train]

    def in_own(parts: Sequence[Samples | None]) -> tuple[Samples | None, ...]:
        return tuple(None if part is None else replace(part, scaling=each[n]) for n, part in enumerate(parts))

    own = in_own(clients.own_test)
    tested = [part for part in own if part is not None]
    digest = hashlib.sha256(f"{clients.fingerprint}|own scaling".encode()).hexdigest()
    return replace(
        clients,
        train=tuple(replace(part, scaling=each[client]) for client, part in enumerate(clients.train)),
        validation=in_own(clients.validation),
        own_test=own,
        test=Samples(torch.cat([part.inputs() for part in tested]), torch.cat([part.labels() for part in tested])),
        fingerprint=digest,
        recipe={**clients.recipe, "scaling": scaling},
        notes=(*clients.notes, "each client scales by its own training rows"),
    )


def by_training_rows(clients: Clients, data: Dataset, scale: bool = True) -> Clients:
    """Measure again what the data set measured before rows were kept apart: scale, fill of empty cells, targets.

    Where every row trains, nothing changes, the fingerprint neither. `scale` False: each client has its own scale.
    """
    rows = torch.cat([part.index for part in clients.train if part.index is not None])
    wanted = {what for what in data.measured if scale or what != "scale"}
    if len(rows) == len(data.train) or not wanted:
        return clients
    form, task, scaling = clients.form, clients.task, data.train.scaling
    if "fill" in wanted:
        form = _filled(form, data.train.x[rows])
    stored = _Stored(form if form != clients.form else Form())
    if "scale" in wanted:
        scaling = measure(stored.x(data.train.x)[rows], scaling.divisor, form)
    if "targets" in wanted and isinstance(task, Regression):
        task = with_units(Regression(), data.train.y[rows].double().numpy())
    if (form, task, scaling) == (clients.form, clients.task, data.train.scaling):
        return clients

    def again(part: Samples) -> Samples:
        units = replace(scaling, divisor=part.scaling.divisor)
        return replace(part, x=stored.x(part.x), scaling=units)

    def each(parts: Sequence[Samples | None]) -> tuple[Samples | None, ...]:
        return tuple(None if part is None else again(part) for part in parts)

    found = repr((scaling, [column.fill for column in form.columns], describe(task)))
    return replace(
        clients,
        train=tuple(map(again, clients.train)),
        validation=each(clients.validation),
        own_test=each(clients.own_test),
        test=again(clients.test),
        public=None if clients.public is None else again(clients.public),
        form=form,
        task=task,
        fingerprint=hashlib.sha256(f"{clients.fingerprint}|{found}".encode()).hexdigest(),
    )


def _filled(form: Form, x: Tensor) -> Form:
    """Return the form with what stands in for empty cells taken from these rows, where a mark says which are empty."""
    columns = []
    for column in form.columns:
        if column.kind == "number" and column.gaps and column.spread is None:
            value, mark = (x[:, place] for place in form.places(column.name).tolist())
            if bool((mark == 0).any()):
                column = replace(column, fill=float(value[mark == 0].double().mean()))
        columns.append(column)
    return replace(form, columns=tuple(columns))


class _Stored:
    """Inputs with the fill of a form in their empty cells; storage that views share is copied once."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.made: dict[int, Tensor] = {}

    def x(self, old: Tensor) -> Tensor:
        gaps = [column for column in self.form.columns if column.kind == "number" and column.gaps]
        if not gaps:
            return old
        if id(old) not in self.made:
            new = old.clone()
            for column in gaps:
                value, mark = self.form.places(column.name).tolist()
                new[new[:, mark] > 0, value] = column.fill
            self.made[id(old)] = new
        return self.made[id(old)]
