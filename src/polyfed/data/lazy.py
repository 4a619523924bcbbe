"""Clients whose data is made when they are active: a function from a client's number to its samples.

A million registered clients then cost their numbers; the data of a few of those that were active last is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.samples import Samples, Scaling
from polyfed.data.owntest import read_part

Make = Callable[[int], Any]  # client -> a part, as in `Clients.from_parts`


class Maker:
    """Makes the samples of clients and keeps those of the last few."""

    def __init__(self, make: Make, first: Samples, keep: int, classes: int) -> None:
        self.make, self.keep, self.scaling, self.classes = make, keep, first.scaling, classes
        self.form = _form(first.x, first.y)
        self.made: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()
        self.lock = Lock()

    def __call__(self, client: int, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of a client, once they are what was promised.

        Raises
        ------
        InputError
            When they are not.
        """
        with self.lock:
            found = self.made.get(client)
            if found is not None:
                self.made.move_to_end(client)
                return found
        part = read_part(f"client {client}", self.make(client))
        x, y = part.tensor, torch.from_numpy(np.asarray(part.labels))
        if _form(x, y) != self.form or len(x) != length:
            raise InputError(
                f"Client {client} was made with {len(x)} samples of {_form(x, y)}, but {length} of {self.form} were "
                "promised, by the number of its samples and by client 0."
            )
        low, high = int(y.min()), int(y.max())
        if not 0 <= low <= high < self.classes:
            raise InputError(
                f"Client {client} was made with labels from {low} to {high}, but {self.classes} classes (num_classes) "
                f"are 0 to {self.classes - 1}."
            )
        with self.lock:
            self.made[client] = x, y
            while len(self.made) > self.keep:
                self.made.popitem(last=False)
        return x, y


def _form(x: Tensor, y: Tensor) -> str:
    return f"inputs {tuple(x.shape[1:])} ({x.dtype}) and labels {tuple(y.shape[1:])} ({y.dtype})"


class Made(Samples):
    """Samples of one client that are made when somebody looks at them."""

    __slots__ = ("_client", "_length", "_maker")
    _client: int
    _length: int
    _maker: Maker

    def __init__(self, maker: Maker, client: int, length: int) -> None:
        for name, value in (("_maker", maker), ("_client", client), ("_length", length)):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return self._length

    @property
    def x(self) -> Tensor:  # type: ignore[override]
        """The inputs, as they were made."""
        return self._maker(self._client, self._length)[0]

    @property
    def y(self) -> Tensor:  # type: ignore[override]
        """The labels."""
        return self._maker(self._client, self._length)[1]

    @property
    def index(self) -> None:  # type: ignore[override]
        """All of them."""
        return

    @property
    def scaling(self) -> Scaling:  # type: ignore[override]
        """How values become inputs."""
        return self._maker.scaling

    def select(self, index: Tensor) -> Samples:
        """Return a smaller view of what was made."""
        return Samples(self.x, self.y, index, self.scaling)

    def __repr__(self) -> str:
        return f"Made(client {self._client}, {self._length} samples)"

    def __hash__(self) -> int:
        return hash((id(self._maker), self._client))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made) and (self._maker, self._client) == (other._maker, other._client)


def made(make: Make, first: Samples, lengths: Sequence[int], keep: int, classes: int) -> tuple[Samples, ...]:
    """Return the samples of all clients, none of them made yet.

    Raises
    ------
    InputError
        When a client would have no samples.
    """
    if min(lengths, default=0) < 1:
        raise InputError("Every client needs at least one sample: give clients=... and samples=... from 1.")
    maker = Maker(make, first, keep, classes)
    return tuple(Made(maker, client, length) for client, length in enumerate(lengths))
