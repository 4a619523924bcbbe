"""`Clients`: the data of all parties, from one data set that was divided or from parts that were always separate."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch

from polyfed.core.errors import InputError
from polyfed.core.rng import numpy_generator
from polyfed.core.samples import Samples
from polyfed.core.shape import InputShape
from polyfed.core.task import CLASSIFICATION, Task, as_task
from polyfed.data.dataset import Dataset, plural
from polyfed.data.dealing import is_number
from polyfed.data.decode import size_of
from polyfed.data.form import Form
from polyfed.data.lazy import Made, Make
from polyfed.data.lazy import made as make_later
from polyfed.data.parts import read_together
from polyfed.data.public import Public, make_public
from polyfed.data.targets import evenly, groups
from polyfed.data.training_rows import TOGETHER, scaled


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
        inputs: str | Sequence[str] | None = None,
        label: str | Sequence[str] | None = None,
        columns: Sequence[str] = (),
        drop: Sequence[str] = (),
        kind: str | None = None,
        resize: int | tuple[int, int] | None = None,
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
            One entry per client, by its name or in a list: a CSV or parquet file, a folder with images in class
            folders, a data frame, a pair of arrays `(inputs, labels)`, a torch Dataset, `Samples` or a `Dataset`.
        test
            The common test set, of the same kind. A list of parts, one for each client (or None), or such parts by the
            clients' names, is own test data, and so is a share of each client's rows (`"own"`: a fifth); the common
            test set is then all of it.
        inputs, label, columns, drop, kind, resize, tokenizer, length
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
        if isinstance(public, int | float) or (isinstance(public, str) and public.replace(".", "", 1).isdigit()):
            raise InputError("Separate parts have no common rows to hold out: give public as a name or as data.")
        how: dict[str, Any] = {
            "inputs": inputs,
            "label": label,
            "columns": list(columns),
            "drop": list(drop),
            "kind": kind,
        }
        how["resize"] = size_of(resize)
        read = read_together(
            parts,
            test,
            own_test,
            how=how,
            tokenizer=tokenizer,
            length=length,
            name=name,
            seed=seed,
            task=as_task(task),
            num_classes=num_classes,
            class_names=class_names,
            normalize=normalize,
        )
        recipe = {"data": {"source": None}, "clients": len(read.rows), "seed": seed, "repeatable": False}
        shared = make_public(read.data, public, seed)
        made = assemble(read.data, read.rows, seed, validation, shared, recipe, read.share, read.own, read.names)
        return scaled(made, read.data, scaling)

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
        if not isinstance(clients, Integral):
            raise InputError(f"clients={clients!r} is not possible: give a whole number.")
        if not isinstance(samples, Integral) and not callable(samples):
            kind = type(samples).__name__
            raise InputError(f"samples is a whole number, or a function of the client's number, and no {kind}.")
        first = cls.from_parts([make(0)], test=test, num_classes=num_classes, name=name, normalize=False)
        lengths = [samples(client) for client in range(clients)] if callable(samples) else [samples] * clients
        digest = hashlib.sha256(f"{first.fingerprint}|{clients}".encode())
        digest.update(np.asarray(lengths, dtype=np.int64).tobytes())
        return replace(
            first,
            train=make_later(make, first.train[0], lengths, keep, num_classes),
            validation=(None,) * clients,
            fingerprint=digest.hexdigest(),
            recipe={**first.recipe, "clients": clients},
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
