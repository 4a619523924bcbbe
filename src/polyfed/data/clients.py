"""`Clients`: the data of all parties, from one data set that was divided or from parts that were always separate."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from polyfed.core.errors import InputError, unknown
from polyfed.core.rng import numpy_generator
from polyfed.core.samples import Samples
from polyfed.core.shape import InputShape
from polyfed.core.task import CLASSIFICATION, Task, as_task, check_score
from polyfed.data.columns import Part
from polyfed.data.dataset import Dataset, build, measure, plural
from polyfed.data.dealing import is_number
from polyfed.data.form import Form, Raw
from polyfed.data.lazy import Made, Make
from polyfed.data.lazy import made as make_later
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
from polyfed.data.public import Public, make_public
from polyfed.data.targets import evenly, groups
from polyfed.data.together import check_divisors, check_kinds, check_widths, join_names, one_form
from polyfed.data.trained import by_training_rows

TOGETHER = "together"
SCALINGS = (TOGETHER, "own")  # whose training rows scale the inputs


@dataclass(frozen=True)
class Clients:
    """The data of all parties: what each client holds, what everybody may see, and the common test set.

    `validation` has None for a client too small to spare a row. `public` keeps its labels (of `public_classes`
    classes, which need not be the clients'), but a method treats it as unlabeled unless it says otherwise.
    `recipe` can be written as JSON and, when `recipe["repeatable"]`, given to `from_recipe`. `notes` says what was
    done to labels and columns, `names` are the clients' (from the column that divides them), and `form` is how raw rows
    become inputs. `own_test` is each client's own test data (empty: there is none; None: this client has none), `task`
    what is learned: `num_classes` and `class_names` then speak of labels or targets.
    """

    name: str
    train: tuple[Samples, ...]
    validation: tuple[Samples | None, ...]
    test: Samples
    public: Samples | None
    num_classes: int
    class_names: tuple[str, ...]
    input_shape: InputShape
    fingerprint: str
    recipe: dict[str, Any] = field(default_factory=dict)
    public_classes: int | None = None
    notes: tuple[str, ...] = ()
    task: Task = CLASSIFICATION
    own_test: tuple[Samples | None, ...] = ()
    names: tuple[str, ...] = ()
    form: Form = field(default_factory=Form, repr=False)

    def __len__(self) -> int:
        return len(self.train)

    def __repr__(self) -> str:
        sizes = [len(samples) for samples in self.train]
        return f"Clients({self.name}: {len(self)} clients with {min(sizes)} to {max(sizes)} samples)"

    def client(self, number: int) -> tuple[Samples, Samples | None]:
        """Return the training and validation samples of one client.

        Raises
        ------
        InputError
            If there is no client with this number.
        """
        if not 0 <= number < len(self):
            raise InputError(f"There is no client {number}: they are numbered 0 to {len(self) - 1}.")
        return self.train[number], self.validation[number]

    def own_tests(self, number: int) -> dict[int, Samples]:
        """Return the own test data of one client by its number, empty where it has none."""
        found = self.own_test[number] if self.own_test else None
        return {} if found is None else {number: found}

    def own_public_classes(self) -> int | None:
        """Return the number of public classes when public labels are not the clients' own."""
        if self.task != CLASSIFICATION:
            return None
        held_out = isinstance(self.recipe.get("public"), int | float)
        return None if held_out else self.public_classes

    def label_counts(self) -> np.ndarray:
        """Return how many training samples of each class (or label) each client has, [clients, classes]."""
        if self.task.name == "regression" or isinstance(self.train[0], Made):  # looking would make all of them
            return np.zeros((len(self), 0), dtype=np.int64)
        return np.array([samples.label_counts(self.num_classes) for samples in self.train])

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per client: its samples of each kind, and where there are classes, how many and how even."""
        rows = []
        for number, (counts, held) in enumerate(zip(self.label_counts(), self.validation, strict=True)):
            row: dict[str, Any] = {"client": number}
            if self.names:
                row["name"] = self.names[number]
            row["samples"] = len(self.train[number])
            row["validation"] = len(held) if held is not None else 0
            if self.own_test:
                row["own test"] = sum(map(len, self.own_tests(number).values()))
            if len(counts):
                plain = self.task == CLASSIFICATION
                row["classes" if plain else "labels"] = int((counts > 0).sum())
                row["largest class" if plain else "largest label"] = round(float(counts.max() / row["samples"]), 3)
            rows.append(row)
        return rows

    def describe(self, most: int = 20) -> str:
        """Return a small table as text: a line for each of the first clients, and what is common to all."""
        rows = self.rows()
        lines = ["  ".join(rows[0])]
        for row in rows[:most]:
            cells = {name: f"{value:.0%}" if isinstance(value, float) else str(value) for name, value in row.items()}
            lines.append("  ".join(cell.rjust(len(name)) for name, cell in cells.items()))
        if len(rows) > most:
            lines.append(f"   ...  and {len(rows) - most} more")
        total = sum(row["samples"] for row in rows)
        public = f", {len(self.public)} public" if self.public is not None else ""
        lines.append(f"{self.name}: {len(self)} clients, {total} training samples{public}, {len(self.test)} for test")
        if self.task != CLASSIFICATION:
            lines.append(f"{self.name}: {self.task.name}, {self.num_classes} {plural(self.task)}")
        lines += [f"{self.name}: {note}" for note in self.notes]
        return "\n".join(lines)

    @classmethod
    def from_parts(
        cls,
        parts: Sequence[Any] | Mapping[str, Any],
        *,
        test: Any,
        label: str | Sequence[str] | None = None,
        columns: Sequence[str] = (),
        drop: Sequence[str] = (),
        kind: str | None = None,
        tokenizer: Any = None,
        length: int | None = None,
        num_classes: int | None = None,
        name: str = "own data",
        class_names: Sequence[str] | None = None,
        validation: float = 0.0,
        public: Any = None,
        seed: int = 0,
        normalize: bool = True,
        own_test: float | str | Sequence[Any] | None = None,
        task: Task | str | None = None,
        scaling: str = TOGETHER,
    ) -> Clients:
        """Make clients of data that is separate already.

        Parameters
        ----------
        parts
            One entry per client, by its name or in a list: a CSV or parquet file, a data frame, a pair of arrays
            `(inputs, labels)`, a torch Dataset, `Samples` or a `Dataset`.
        test
            The common test set, of the same kind. A list of parts, one for each client (or None), or such parts by the
            clients' names, is own test data, and so is a share of each client's rows (`"own"`: a fifth); the common
            test set is then all of it.
        label, columns, drop, kind, tokenizer, length
            As in `load`, for all parts.
        num_classes, class_names
            The classes, where they are not just the labels that occur at the clients. Parts with names of their own
            (a `Dataset`) are joined by name.
        validation, public, seed
            As in `split`; a `public` number is not possible here, because no common rows are held.
        normalize
            False leaves out mean and standard deviation (otherwise taken over all clients together).
        own_test
            Each client's own test data beside the common one: a list of parts, one for each client (or None), or a
            share of its rows (`"own"`: a fifth).
        task
            What is to be learned, as in `load`.
        scaling
            As in `split`.

        Raises
        ------
        InputError
            If there are no parts, a client has no data, or samples of different shapes.
        """
        names = tuple(map(str, parts)) if isinstance(parts, Mapping) else ()
        parts = list(parts.values()) if isinstance(parts, Mapping) else parts
        if parts is not None and (not isinstance(parts, Sequence) or isinstance(parts, str | bytes)):
            raise InputError(
                f"Clients cannot be made of parts of type {type(parts).__name__}: give a list, a part each."
            )
        if not parts:
            raise InputError("There are no clients: give at least one part.")
        if isinstance(public, int | float) or (isinstance(public, str) and public.replace(".", "", 1).isdigit()):
            raise InputError("Separate parts have no common rows to hold out: give public as a name or as data.")
        how = {"label": label, "columns": list(columns), "drop": list(drop), "kind": kind}
        read = [read_part("client 0", parts[0], None, how)]
        read += [read_part(f"client {client}", part, read[0], how) for client, part in enumerate(parts) if client]
        test, own_test = by_name(test, names), by_name(own_test, names)
        own: list[Part | None] = []
        if is_number(test) or (isinstance(test, str) and test == OWN):
            read, own = held_out(read, own_share(test), seed)
            test = None
        elif is_list_of_parts(test, len(parts)):
            test, own_test = None, test
        if isinstance(own_test, Sequence) and not isinstance(own_test, str):
            own = read_own(own_test, read, how)
        if test is None and not any(own):
            raise InputError("There is no test set: give test=... for all clients together, or a list, one for each.")
        held = joined([read_part("the test set", test, read[0], how)] if test is not None else [], own)
        raw = isinstance(held.inputs, Raw)
        read, held, form, notes = one_form(read, held, tokenizer, length)
        for client, part in enumerate(read):
            if part.tensor.shape[1:] != read[0].tensor.shape[1:] or part.tensor.dtype != read[0].tensor.dtype:
                raise InputError(
                    f"Client {client} has samples of shape {tuple(part.tensor.shape[1:])} ({part.tensor.dtype}), but "
                    f"client 0 has {tuple(read[0].tensor.shape[1:])} ({read[0].tensor.dtype}): bring them to one form."
                )
        check_widths(read, held, as_task(task))
        check_divisors(read, held)
        read, held, known = join_names(read, held)
        if known is None:
            check_kinds(read, held)
        elif any(part.labels.dtype.kind == "U" for part in (*read, held)):  # one kind, before they are put together
            read = [replace(part, labels=part.labels.astype(str)) for part in read]
        ends = np.cumsum([len(part.inputs) for part in read])
        data = build(
            name,
            (torch.cat([part.tensor for part in read]), np.concatenate([part.labels for part in read])),
            (held.tensor, held.labels),
            num_classes=num_classes,
            class_names=class_names or known or read[0].outputs(as_task(task)),
            divisor=read[0].divisor,
            normalize=normalize,
            notes=(*read[0].notes, *notes),
            features=read[0].features,
            task=as_task(task),
            form=form,
            learned=raw,
        )
        data, apart = own_apart(data, own, test is None)
        check_score(data.task, data.test.labels(), "the test set")
        indices = np.split(np.arange(ends[-1]), ends[:-1])
        recipe = {"data": {"source": None}, "clients": len(read), "seed": seed, "repeatable": False}
        share = 0.0 if own else own_share(own_test)
        shared = make_public(data, public, seed)
        made = assemble(data, indices, seed, validation, shared, recipe, share, apart, names)
        return scaled(made, data, scaling)

    @classmethod
    def from_function(
        cls,
        make: Make,
        clients: int,
        samples: int | Callable[[int], int],
        *,
        test: Any,
        num_classes: int,
        name: str = "own data",
        keep: int = 1024,
    ) -> Clients:
        """Register any number of clients whose data is made when they are active.

        Parameters
        ----------
        make
            Called with a client's number; returns its part as in `from_parts`, always the same for the same number.
            Labels are class numbers. Values are not brought to mean 0 and deviation 1: nobody has seen all of them.
        clients, samples
            How many clients, and how many samples each has: a number, or a function of the client's number.
        test, num_classes, name
            As in `from_parts`.
        keep
            So many clients' data is kept after they were active; more of it is made again.

        Raises
        ------
        InputError
            If a client has no samples; and during a run, if one is made in another form than client 0.
        """
        first = cls.from_parts([make(0)], test=test, num_classes=num_classes, name=name, normalize=False)
        lengths = [samples] * clients if isinstance(samples, int) else [samples(client) for client in range(clients)]
        digest = hashlib.sha256(f"{first.fingerprint}|{clients}".encode())
        digest.update(np.asarray(lengths, dtype=np.int64).tobytes())
        return replace(
            first,
            train=make_later(make, first.train[0], lengths, keep),
            validation=(None,) * clients,
            fingerprint=digest.hexdigest(),
            recipe={**first.recipe, "clients": clients},
        )


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


def assemble(
    data: Dataset,
    parts: Sequence[np.ndarray],
    seed: int,
    validation: float,
    public: Public,
    recipe: dict[str, Any],
    share: float = 0.0,
    own_test: Sequence[Samples | None] = (),
    names: tuple[str, ...] = (),
) -> Clients:
    """Deal rows to clients: own test data and validation rows are taken from each part first."""
    if not is_number(validation) or not 0 <= validation < 1:
        raise InputError(f"validation={validation!r} is not possible: give a share of at least 0 and below 1.")
    digest = hashlib.sha256(f"{data.fingerprint}|{public.fingerprint}".encode())
    digest.update(public.rows.astype(np.int64).tobytes())
    train: list[Samples] = []
    held: list[Samples | None] = []
    kinds = groups(data.train.labels(), data.task)
    own: list[Samples | None] = list(own_test)
    for client, part in enumerate(parts):
        if share and len(part) > 1:
            tested = evenly(kinds[part], share, numpy_generator(seed, "own-test", client=client))
            own.append(data.train.select(torch.from_numpy(part[tested].astype(np.int64))))
            part = np.delete(part, tested)
        elif share:
            own.append(None)
        number = min(round(validation * len(part)), len(part) - 1)
        order = numpy_generator(seed, "validation", client=client).permutation(len(part)) if number else None
        spared = np.empty(0, dtype=np.int64) if order is None else np.sort(part[order[:number]])
        kept = part if order is None else np.sort(part[order[number:]])  # number < len(part): never empty
        for rows in (spared, kept):
            digest.update(f"{client}:{len(rows)}".encode())
            digest.update(np.ascontiguousarray(rows, dtype=np.int64).tobytes())
        held.append(data.train.select(torch.from_numpy(spared.astype(np.int64))) if len(spared) else None)
        train.append(data.train.select(torch.from_numpy(kept.astype(np.int64))))
    for client, tests in enumerate(own):
        if tests is not None and tests.index is not None:
            digest.update(f"own test {client}".encode())
            digest.update(tests.index.numpy().tobytes())
    return Clients(
        name=data.name,
        train=tuple(train),
        validation=tuple(held),
        test=data.test,
        public=public.samples,
        num_classes=data.num_classes,
        class_names=data.class_names,
        input_shape=data.input_shape,
        fingerprint=digest.hexdigest(),
        recipe=recipe,
        public_classes=public.classes,
        notes=data.notes,
        task=data.task,
        own_test=tuple(own) if any(tests is not None for tests in own) else (),
        names=names,
        form=data.form,
    )
