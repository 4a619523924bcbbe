"""`split`: one data set becomes the data of many clients, with the official test set kept apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np

from polyfed.core.errors import InputError
from polyfed.core.rng import numpy_generator
from polyfed.core.task import CLASSIFICATION, Task, as_task, check_score
from polyfed.data.clients import Clients, assemble
from polyfed.data.dataset import Dataset
from polyfed.data.dealing import check_room, check_sizes, whole_number
from polyfed.data.owntest import own_share
from polyfed.data.parse import FlowerPartitioner, as_partitioner
from polyfed.data.partition import IID, Dirichlet, LabelSets, Quantity, Shards, check_column
from polyfed.data.public import make_public
from polyfed.data.sources import load
from polyfed.data.subsets import set_aside
from polyfed.data.targets import groups
from polyfed.data.training_rows import TOGETHER, scaled

DEFAULT_CLIENTS = 10


def split(
    data: Dataset | str,
    clients: int | None = None,
    by: Any = IID(),  # noqa: B008 (frozen)
    seed: int = 0,
    validation: float = 0.0,
    public: Any = None,
    min_size: int = 1,
    test: float | str | None = None,
    task: Task | str | None = None,
    scaling: str = TOGETHER,
) -> Clients:
    """Deal the training rows of a data set to clients.

    Parameters
    ----------
    data
        A data set, or what `load` takes.
    clients
        How many; None: as many as the partitioner's natural groups, else 10.
    by
        A partitioner, its text (`dirichlet:0.5`), or a partitioner of `flwr_datasets`.
    seed
        The same seed gives the same split.
    validation
        Share of each client's rows kept apart for its own validation; at least one row stays for training.
    public
        Data for the server and all clients: a number or fraction of training rows to hold out from the clients,
        a name such as `cifar100:5000`, or data as objects.
    min_size
        Each client has at least so many rows (before validation and own test data), or the split is refused.
    test
        Share of each client's rows kept apart as its own test data, beside the common test set: `"own"` (a fifth) or a
        number. By class where there are classes; a client with a single row has none.
    task
        As in `load`, where `data` is not loaded yet.
    scaling
        Whose training rows scale the inputs: those of all clients `together`, or each client's `own`, as at sites that
        agree on nothing. The common test set is then all clients' own test data.

    Raises
    ------
    InputError
        If the request cannot be met; the sentence names the client and what to do.
    """
    share = own_share(test)
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise InputError(f"seed={seed!r} is not possible: give a whole number.")
    if not isinstance(data, Dataset):
        data = load(data, task=task)
    elif task is not None and as_task(task).name != data.task.name:
        raise InputError(
            f"The data was loaded for {data.task.name}: say task='{as_task(task).name}' where it is loaded."
        )
    check_score(data.task, data.test.labels(), f"the test set of '{data.name}'")
    partitioner = as_partitioner(by)
    if data.task != CLASSIFICATION and isinstance(partitioner, Dirichlet | LabelSets | Shards):
        raise InputError(
            f"The partition '{partitioner}' deals by class, but {data.task.name} has none: take iid, quantity:A or "
            "column:NAME."
        )
    if partitioner.column is not None:
        check_column(partitioner.column, (*data.columns, *data.features))
        data = set_aside(data, partitioner.column)
    shared = make_public(data, public, seed)
    rows = np.setdiff1d(np.arange(len(data.train)), shared.rows)
    columns = {key: values[rows] for key, values in data.columns.items()}
    labels = groups(data.train.labels(), data.task)[rows]
    if clients is None:
        clients = partitioner.natural_clients(labels, columns) or DEFAULT_CLIENTS
    clients = whole_number("clients", clients)
    if not isinstance(partitioner, LabelSets) or not partitioner.share:
        check_room(len(rows), clients, min_size)
    if isinstance(partitioner, Dirichlet | Quantity):
        partitioner = replace(partitioner, min_size=max(min_size, partitioner.min_size))
    parts = partitioner.assign(labels, clients, numpy_generator(seed, "partition"), columns)
    check_sizes(parts, min_size, "ask for fewer clients, a smaller min_size, or another seed or partition")
    recipe = {
        "data": data.recipe,
        "clients": clients,
        "by": None if isinstance(partitioner, FlowerPartitioner) else str(partitioner),
        "seed": seed,
        "validation": validation,
        "public": shared.recipe,
        "min_size": min_size,
        "test": share or None,
    }
    again = data.recipe["source"] is not None and recipe["by"] is not None
    recipe["repeatable"] = again and (public is None or shared.recipe is not None)
    names = () if partitioner.column is None else _names_of(columns[partitioner.column], parts)
    made = assemble(data, [rows[part] for part in parts], seed, validation, shared, recipe, share, names=names)
    return scaled(made, data, scaling)


def _names_of(values: np.ndarray, parts: Sequence[np.ndarray]) -> tuple[str, ...]:
    """Return a name for each client: the groups that it holds."""
    return tuple("+".join(str(value) for value in np.unique(values[part])) for part in parts)


def from_recipe(recipe: Mapping[str, Any]) -> Clients:
    """Build clients again from what `Clients.recipe` says.

    Raises
    ------
    InputError
        If a part of them came as objects, which a recipe cannot hold.
    """
    if not recipe.get("repeatable"):
        raise InputError("These clients were made from objects in memory: make them again in Python and pass them.")
    options = dict(recipe["data"])
    keys = ("clients", "by", "seed", "validation", "public", "min_size")
    return split(
        load(options.pop("source"), **options),
        **{key: recipe[key] for key in keys},
        test=recipe.get("test"),
        scaling=recipe.get("scaling", TOGETHER),
    )
