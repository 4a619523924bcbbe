"""Partitioners: who gets which rows. Each is a frozen dataclass with one call, `assign`.

All of them end, give every row to exactly one client (`LabelSets` with sharing aside), and leave no client empty
or refuse with the reason. `str(partitioner)` is the text that `parse_partition` reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from polyfed.core.errors import InputError
from polyfed.data.dealing import apportion, check_room, check_sizes, draw_shares, is_number, lift

Columns = Mapping[str, np.ndarray]

MAX_DRAWS = 1000  # redraws of a Dirichlet partition, fewer when there are many clients and classes
MOST_LISTED = 30  # so many columns are named in a sentence
MAX_NUMBERS = 2_000_000  # random numbers spent on redraws


def _cut(rows: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    return np.split(rows, np.cumsum(sizes)[:-1])


def _sorted(parts: list[np.ndarray]) -> list[np.ndarray]:
    return [np.sort(part).astype(np.int64) for part in parts]


def _text(value: float) -> str:
    return repr(float(value)).removesuffix(".0")


def _positive(what: str, value: float | None) -> None:
    if value is None or not is_number(value) or value <= 0:
        raise InputError(f"{what}={value!r} is not possible: give a number above 0 (smaller is more uneven).")


def check_column(name: str, present: Collection[str]) -> None:
    """Refuse to group by a column that is not there, with those that are."""
    if name not in present:
        few = ", ".join(sorted(present)[:MOST_LISTED]) + (", ..." if len(present) > MOST_LISTED else "")
        there = f"it has {few}" if present else "it has no columns besides the label"
        raise InputError(f"The data has no column '{name}' to group by: {there}.")


class Partitioner(ABC):
    """Deals rows to clients."""

    @property
    def column(self) -> str | None:
        """The column that divides the rows, which is then no feature and names the clients; None: there is none."""
        return None

    @abstractmethod
    def assign(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, columns: Columns | None = None
    ) -> list[np.ndarray]:
        """Return the rows of each client, sorted.

        Parameters
        ----------
        labels
            The class of each row.
        clients
            How many clients.
        rng
            The only source of randomness: the same generator gives the same parts.
        columns
            Further values per row.

        Raises
        ------
        InputError
            If the request cannot be met, with the reason.
        """

    def natural_clients(self, labels: np.ndarray, columns: Columns) -> int | None:
        """Return the number of clients that the data or the partitioner fixes, if it does."""
        return None


@dataclass(frozen=True)
class IID(Partitioner):
    """Equal random parts."""

    def __str__(self) -> str:
        return "iid"

    def assign(  # noqa: D102
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, columns: Columns | None = None
    ) -> list[np.ndarray]:
        check_room(len(labels), clients)
        return _sorted(np.array_split(rng.permutation(len(labels)), clients))


@dataclass(frozen=True)
class Dirichlet(Partitioner):
    """Per class, the shares of the clients come from a symmetric Dirichlet distribution.

    Drawn again until every client has `min_size` samples. When a bounded number of draws has not given that
    (a tiny `alpha`, or many clients), the last draw is taken and single samples move from the largest clients to
    those below `min_size`: it always ends, and the small clients then mirror the large ones' labels.
    """

    alpha: float
    min_size: int = 1

    def __post_init__(self) -> None:
        _positive("alpha", self.alpha)
        check_room(self.min_size, 1, self.min_size)

    def __str__(self) -> str:
        return f"dirichlet:{_text(self.alpha)}" + (f",min={self.min_size}" if self.min_size != 1 else "")

    def assign(  # noqa: D102
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, columns: Columns | None = None
    ) -> list[np.ndarray]:
        check_room(len(labels), clients, self.min_size)
        classes, totals = np.unique(labels, return_counts=True)
        draws = max(1, min(MAX_DRAWS, MAX_NUMBERS // (clients * len(classes))))
        for _ in range(draws):
            shares = draw_shares(rng, self.alpha, clients, len(classes))
            sizes = apportion(shares, totals)
            if sizes.sum(0).min() >= self.min_size:
                break
        pieces = [
            _cut(rng.permutation(np.flatnonzero(labels == label)), size)
            for label, size in zip(classes, sizes, strict=True)
        ]
        parts = [np.concatenate([piece[client] for piece in pieces]) for client in range(clients)]
        return _sorted(lift(parts, self.min_size, rng))


@dataclass(frozen=True)
class LabelSets(Partitioner):
    """Each client draws between `low` and `high` labels and gets all their samples ("hetero-label").

    Clients that drew the same label hold the same samples: sharing is the definition, and labels that nobody
    drew are not used unless `cover` is set. With `share=False` the samples of a label are divided among its
    holders instead, and every label is held by somebody, so that no sample is lost.
    """

    low: int
    high: int
    share: bool = True
    cover: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.low, Integral) and isinstance(self.high, Integral) and 1 <= self.low <= self.high):
            raise InputError(f"labels:{self.low}-{self.high} is not possible: give 1 <= low <= high labels per client.")

    def __str__(self) -> str:
        options = ("" if self.share else ",share=no") + (",cover=yes" if self.cover else "")
        return f"labels:{self.low}-{self.high}{options}"

    def assign(  # noqa: D102
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, columns: Columns | None = None
    ) -> list[np.ndarray]:
        check_room(len(labels), clients)
        classes = np.unique(labels)
        if self.high > len(classes):
            raise InputError(
                f"A client cannot hold {self.high} labels of the {len(classes)} in the data: "
                f"give labels:{min(self.low, len(classes))}-{len(classes)} or less."
            )
        held = np.zeros((clients, len(classes)), dtype=bool)
        for row in held:
            row[rng.choice(len(classes), rng.integers(self.low, self.high + 1), replace=False)] = True
        if self.cover or not self.share:
            self._cover(held, rng)
        if self.share:
            return [np.flatnonzero(np.isin(labels, classes[row])) for row in held]
        parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for column, label in enumerate(classes):
            holders = rng.permutation(np.flatnonzero(held[:, column]))
            pieces = np.array_split(rng.permutation(np.flatnonzero(labels == label)), len(holders))
            for holder, piece in zip(holders, pieces, strict=True):
                parts[holder].append(piece)
        advice = "its labels have fewer samples than holders; ask for fewer clients or more labels per client"
        return check_sizes(_sorted([np.concatenate(part) for part in parts]), 1, advice)

    def _cover(self, held: np.ndarray, rng: np.random.Generator) -> None:
        """Give each label without a holder to a client, in place of one of its shared labels if it has any."""
        clients, classes = held.shape
        if clients * self.high < classes:
            raise InputError(
                f"{clients} clients with at most {self.high} labels each cannot hold all {classes} labels: "
                "ask for more clients or more labels per client, or do without cover."
            )
        for label in np.flatnonzero(~held.any(0)):
            shared = held & (held.sum(0) > 1)
            if shared.any():
                client, old = rng.permutation(np.argwhere(shared))[0]
                held[client, old] = False
            else:  # every label has one holder at most, so some client is below `high`
                client = rng.permutation(np.flatnonzero(held.sum(1) < self.high))[0]
            held[client, label] = True


@dataclass(frozen=True)
class Shards(Partitioner):
    """Rows sorted by label are cut into equal shards, and each client gets `per_client` of them at random."""

    per_client: int

    def __post_init__(self) -> None:
        if not isinstance(self.per_client, Integral) or self.per_client < 1:
            raise InputError(f"shards:{self.per_client} is not possible: give at least 1 shard per client.")

    def __str__(self) -> str:
        return f"shards:{self.per_client}"

    def assign(  # noqa: D102
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, columns: Columns | None = None
    ) -> list[np.ndarray]:
        check_room(len(labels), clients)
        count = clients * self.per_client
        if count > len(labels):
            raise InputError(
                f"{clients} clients with {self.per_client} shards each need {count} samples, but there are "
                f"{len(labels)}: ask for at most {len(labels) // clients} shards per client."
            )
        rows = rng.permutation(len(labels))
        shards = np.array_split(rows[np.argsort(labels[rows], kind="stable")], count)
        dealt = rng.permutation(count).reshape(clients, self.per_client)
        return _sorted([np.concatenate([shards[shard] for shard in hand]) for hand in dealt])


@dataclass(frozen=True)
class Quantity(Partitioner):
    """Clients differ in how much they have, not in what: random labels, uneven sizes.

    Give `alpha` (the sizes follow a Dirichlet distribution; clients below `min_size` are topped up by the
    largest) or `ratio` (sizes grow geometrically, the largest is about `ratio` times the smallest).
    """

    alpha: float | None = None
    ratio: float | None = None
    min_size: int = 1

    def __post_init__(self) -> None:
        if (self.alpha is None) == (self.ratio is None):
            raise InputError("Quantity needs either alpha or ratio: for instance quantity:0.5 or quantity:ratio=10.")
        if self.alpha is not None:
            _positive("alpha", self.alpha)
        elif self.ratio is None or not is_number(self.ratio) or self.ratio < 1:
            raise InputError(f"ratio={self.ratio!r} is not possible: give a number of at least 1.")
        check_room(self.min_size, 1, self.min_size)

    def __str__(self) -> str:
        if self.alpha is None:
            assert self.ratio is not None  # one of the two is given
            amount = f"ratio={_text(self.ratio)}"
        else:
            amount = _text(self.alpha)
        return f"quantity:{amount}" + (f",min={self.min_size}" if self.min_size != 1 else "")

    def assign(  # noqa: D102
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, columns: Columns | None = None
    ) -> list[np.ndarray]:
        check_room(len(labels), clients, self.min_size)
        if self.alpha is not None:
            shares = draw_shares(rng, self.alpha, clients, 1)[0]
        else:
            assert self.ratio is not None  # one of the two is given
            shares = rng.permutation(np.geomspace(1.0 / self.ratio, 1.0, clients))
            shares = shares / shares.sum()
        parts = _cut(rng.permutation(len(labels)), apportion(shares, len(labels)))
        return _sorted(lift(parts, self.min_size, rng))


@dataclass(frozen=True)
class ByColumn(Partitioner):
    """Natural groups: each value of a column (hospital, writer) is a client.

    With fewer clients than groups, the groups are shuffled and dealt out in turn.
    """

    name: str

    def __str__(self) -> str:
        return f"column:{self.name}"

    @property
    def column(self) -> str | None:  # noqa: D102
        return self.name

    def natural_clients(self, labels: np.ndarray, columns: Columns) -> int:  # noqa: D102
        return len(np.unique(self._values(columns)))

    def assign(  # noqa: D102
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, columns: Columns | None = None
    ) -> list[np.ndarray]:
        values = self._values(columns or {})
        groups, number = np.unique(values, return_inverse=True)
        if clients > len(groups):
            raise InputError(
                f"Column '{self.name}' has {len(groups)} groups, which cannot make {clients} clients: "
                f"ask for at most {len(groups)}."
            )
        check_room(len(labels), clients)
        owner = np.arange(len(groups))
        if clients < len(groups):
            owner[rng.permutation(len(groups))] = np.arange(len(groups)) % clients
        return [np.flatnonzero(owner[number] == client) for client in range(clients)]

    def _values(self, columns: Columns) -> np.ndarray:
        check_column(self.name, columns)
        values = np.asarray(columns[self.name])
        missing = np.isnan(values) if values.dtype.kind == "f" else values == ""
        if np.any(missing):
            row = int(np.argmax(missing))
            raise InputError(f"Row {row} has no value in column '{self.name}': fill it in or remove the row.")
        return values
