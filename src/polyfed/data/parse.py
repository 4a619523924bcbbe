"""Partitioners from text (`dirichlet:0.5`) and from other libraries (`flwr_datasets`)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyfed.core.errors import InputError, unknown
from polyfed.data.partition import IID, ByColumn, Columns, Dirichlet, LabelSets, Partitioner, Quantity, Shards

FORMS = {
    "iid": "iid",
    "dirichlet": "dirichlet:ALPHA[,min=N]",
    "labels": "labels:LOW-HIGH[,share=no][,cover=yes]",
    "shards": "shards:N",
    "quantity": "quantity:ALPHA or quantity:ratio=R, each with [,min=N]",
    "column": "column:NAME",
}
OPTIONS = {"dirichlet": ("min",), "labels": ("share", "cover"), "quantity": ("ratio", "min")}
ROW = "polyfed_row"
LABEL_NAMES = ("label", "labels", "fine_label", "target", "y")


def parse_partition(text: str) -> Partitioner:
    """Read a partitioner from text such as `dirichlet:0.5,min=10` (`FORMS` lists all forms).

    Raises
    ------
    InputError
        If the name is unknown (with the nearest one), or a number is missing or impossible.
    """
    kind, _, rest = text.strip().partition(":")
    kind = kind.strip().lower()
    if kind not in FORMS:
        raise unknown("partition", kind, FORMS)
    if kind == "column":
        if not rest.strip():
            raise _malformed(kind, text)
        return ByColumn(rest.strip())
    value, options = _options(kind, text, rest)
    if kind == "iid":
        if value:
            raise _malformed(kind, text)
        return IID()
    if kind == "dirichlet":
        return Dirichlet(_number(kind, text, value), int(_number(kind, text, options.get("min", "1"), whole=True)))
    if kind == "shards":
        return Shards(int(_number(kind, text, value, whole=True)))
    if kind == "labels":
        low, dash, high = value.partition("-")
        bounds = [int(_number(kind, text, bound, whole=True)) for bound in (low, high if dash else low)]
        return LabelSets(
            bounds[0], bounds[1], _yes(kind, text, options, "share", True), _yes(kind, text, options, "cover")
        )
    alpha = _number(kind, text, value) if value else None
    ratio = _number(kind, text, options["ratio"]) if "ratio" in options else None
    return Quantity(alpha, ratio, int(_number(kind, text, options.get("min", "1"), whole=True)))


def as_partitioner(by: Any) -> Partitioner:
    """Return a partitioner for text, one of ours, or any object of `flwr_datasets`.

    Raises
    ------
    InputError
        If it is none of these.
    """
    if isinstance(by, Partitioner):
        return by
    if isinstance(by, str):
        return parse_partition(by)
    if isinstance(by, type) and issubclass(by, Partitioner):
        raise InputError(f"by={by.__name__} is a class: give an object, for instance {by.__name__}(...).")
    if callable(getattr(by, "load_partition", None)):  # its other attributes raise until it has data
        return FlowerPartitioner(by)
    raise InputError(
        f"by={by!r} is not a partitioner: give text such as 'dirichlet:0.5', one of IID, Dirichlet, LabelSets, Shards, "
        "Quantity, ByColumn, or a partitioner of flwr_datasets."
    )


def _options(kind: str, text: str, rest: str) -> tuple[str, dict[str, str]]:
    value, options = "", {}
    for position, item in enumerate(part.strip() for part in rest.split(",")):
        key, equals, setting = item.partition("=")
        if not equals and position == 0:
            value = item
        elif equals and key in OPTIONS.get(kind, ()):
            options[key] = setting
        else:
            raise _malformed(kind, text)
    return value, options


def _number(kind: str, text: str, value: str, whole: bool = False) -> float:
    try:
        return int(value) if whole else float(value)
    except ValueError:
        raise _malformed(kind, text) from None


def _yes(kind: str, text: str, options: dict[str, str], key: str, default: bool = False) -> bool:
    value = options.get(key, "yes" if default else "no").lower()
    if value not in ("yes", "no", "true", "false"):
        raise _malformed(kind, text)
    return value in ("yes", "true")


def _malformed(kind: str, text: str) -> InputError:
    return InputError(f"The partition '{text}' cannot be read: write {FORMS[kind]}.")


@dataclass(frozen=True)
class FlowerPartitioner(Partitioner):
    """Any partitioner of `flwr_datasets`; it sees the labels as column `label`, and the further columns.

    A copy is used, so the object that was given stays free for another data set, and the same object gives the
    same parts again. Its own seed counts, not that of the split.
    """

    partitioner: Any

    def __str__(self) -> str:
        return f"flwr:{type(self.partitioner).__name__}"

    def natural_clients(self, labels: np.ndarray, columns: Columns) -> int:  # noqa: D102
        return len(self._parts(labels, columns))

    def assign(  # noqa: D102
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, columns: Columns | None = None
    ) -> list[np.ndarray]:
        parts = self._parts(labels, columns or {})
        if len(parts) != clients:
            raise InputError(f"{self} makes {len(parts)} parts, not {clients}: ask for {len(parts)} clients.")
        return parts

    def _parts(self, labels: np.ndarray, columns: Columns) -> list[np.ndarray]:
        import datasets  # type: ignore[import-untyped]

        partitioner = copy.deepcopy(self.partitioner)
        wanted = getattr(partitioner, "_partition_by", None)
        content = {ROW: np.arange(len(labels)), "label": labels, **columns}
        if wanted in LABEL_NAMES and wanted not in content:
            content[wanted] = labels
        try:
            partitioner.dataset = datasets.Dataset.from_dict(content)
            count = partitioner.num_partitions
            return [np.sort(np.asarray(partitioner.load_partition(part)[ROW], dtype=np.int64)) for part in range(count)]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            reason = (str(error).splitlines() or [""])[0].rstrip(".")
            raise InputError(f"{self} could not divide the data: {reason}.") from error
