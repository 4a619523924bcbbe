"""A folder of decoded data sets: one safetensors file each, with its checksum inside, written atomically."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.samples import Samples, Scaling
from polyfed.core.task import CLASSIFICATION, describe, from_description
from polyfed.data.dataset import MEASURED, Dataset, content_hash, white_of
from polyfed.data.form import Form

FORMAT = 4  # part of every key: a change of the layout or of what labels become makes old files unused
STALE = 3600.0  # seconds after which a temporary file must be of a writer that died


def files_key(files: list[Path], options: dict[str, Any]) -> str:
    """Return a key that changes when a file (path, size, time of change) or an option changes."""
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return _key(["files", stats, options])


def name_key(name: str, options: dict[str, Any]) -> str:
    """Return the key of a set that is known by its name only: embedded, or from the Hub."""
    return _key(["name", name, options])


def _key(parts: list[Any]) -> str:
    text = json.dumps([FORMAT, *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _pack_columns(columns: dict[str, np.ndarray]) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Turn columns into tensors; strings become numbers and a vocabulary."""
    tensors, words = {}, {}
    for key, values in columns.items():
        if values.dtype.kind in "biuf":
            tensors[f"column.{key}"] = torch.from_numpy(np.ascontiguousarray(values))
        else:
            vocabulary, codes = np.unique(values.astype(str), return_inverse=True)
            words[key] = vocabulary.tolist()
            tensors[f"column.{key}"] = torch.from_numpy(codes.astype(np.int64))
    return tensors, words


@dataclass(frozen=True)
class Store:
    """The cache folder, or none (`folder=None`: nothing is kept)."""

    folder: Path | None

    @classmethod
    def at(cls, cache: str | os.PathLike[str] | bool | None = None) -> Store:
        """Return the store in a folder; None: `POLYFED_CACHE` or `~/.cache/polyfed`; False: no store."""
        if cache is False:
            return cls(None)
        if cache is None or cache is True:
            cache = os.environ.get("POLYFED_CACHE") or "~/.cache/polyfed"
        if not isinstance(cache, str | os.PathLike):
            raise InputError(f"cache={cache!r} is not a folder: give a path, or False to keep nothing.")
        return cls(Path(cache).expanduser())

    def path(self, name: str, key: str) -> Path:
        """Return the file of one data set."""
        assert self.folder is not None
        return self.folder / f"{self._safe(name)}-{key}.safetensors"

    def has_name(self, name: str) -> bool:
        """Say whether a set from the Hub, as `load(name)` asks for it, is here."""
        return self.folder is not None and self.path(name, name_key(name, {})).is_file()

    def read(self, name: str, key: str) -> Dataset | None:
        """Return the data set, memory-mapped, or None if it is not here or fails its checksum."""
        if self.folder is None or not (file := self.path(name, key)).is_file():
            return None
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as content:
                metadata = json.loads(content.metadata()["polyfed"])
                tensors = {tensor: content.get_tensor(tensor) for tensor in content.keys()}  # noqa: SIM118
            dataset = self._unpack(metadata, tensors)
            if content_hash(dataset) == dataset.fingerprint:
                return dataset
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            pass  # damaged: it is built again and replaced
        return None

    def kept(self, name: str, key: str, make: Callable[[], Dataset]) -> Dataset:
        """Return the data set that is here, or make it and keep it."""
        dataset = self.read(name, key)
        if dataset is None:
            dataset = make()
            self.write(dataset, name, key)
        return dataset

    def write(self, dataset: Dataset, name: str, key: str) -> None:
        """Keep a data set. The file appears complete or not at all; a failure is a warning, not an error."""
        if self.folder is None:
            return
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        columns, words = _pack_columns(dataset.columns)
        tensors = {
            "train.x": dataset.train.x,
            "train.y": dataset.train.y,
            "test.x": dataset.test.x,
            "test.y": dataset.test.y,
            **columns,
        }
        scaling = dataset.train.scaling
        metadata = {
            "name": dataset.name,
            "class_names": dataset.class_names,
            "scaling": [scaling.mean, scaling.std, scaling.divisor],
            "words": words,
            "notes": dataset.notes,
            "features": dataset.features,
            "form": dataset.form.dump(),
            "fingerprint": dataset.fingerprint,
            "task": describe(dataset.task),
            "measured": dataset.measured,
        }
        file = self.path(name, key)
        temporary = file.with_name(f"{file.name}.{uuid.uuid4().hex}.tmp")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._remove_stale(file)
            save_file(
                {tensor: value.contiguous() for tensor, value in tensors.items()},
                temporary,
                metadata={"polyfed": json.dumps(metadata)},
            )
            with open(temporary, "rb+") as handle:
                os.fsync(handle.fileno())
            os.replace(temporary, file)
        except (OSError, SafetensorError) as error:
            warnings.warn(
                f"The decoded data set '{name}' could not be kept in {self.folder} ({error}); "
                "it will be decoded again next time.",
                RuntimeWarning,
                stacklevel=3,
            )
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    @staticmethod
    def _safe(name: str) -> str:
        return re.sub(r"[^\w.-]+", "_", name)[:80]

    @staticmethod
    def _remove_stale(file: Path) -> None:
        """Remove what a killed writer of this file left behind (a live one is younger)."""
        for old in file.parent.glob(f"{file.name}.*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - old.stat().st_mtime > STALE:
                    old.unlink()

    @staticmethod
    def _unpack(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> Dataset:
        mean, std, divisor = metadata["scaling"]
        scaling = Scaling(tuple(mean), tuple(std), divisor)
        columns = {}
        for key, tensor in tensors.items():
            if key.startswith("column."):
                column = key.removeprefix("column.")
                values = tensor.numpy()
                words = metadata["words"].get(column)
                columns[column] = values if words is None else np.array(words)[values]
        names = tuple(metadata["class_names"])
        form = Form.load({"white": white_of(tensors["train.x"]), **metadata["form"]})  # older files do not say it
        task = from_description(metadata.get("task", ["classification"]))
        needed = form.kind in MEASURED or task != CLASSIFICATION  # an older file does not say it: it is built again
        return Dataset(
            name=metadata["name"],
            train=Samples(tensors["train.x"], tensors["train.y"], scaling=scaling),
            test=Samples(tensors["test.x"], tensors["test.y"], scaling=scaling),
            num_classes=len(names),
            class_names=names,
            input_shape=form.shape(tensors["train.x"]),
            columns=columns,
            fingerprint=metadata["fingerprint"],
            notes=tuple(metadata["notes"]),
            features=tuple(metadata["features"]),
            task=task,
            form=form,
            measured=tuple(metadata["measured"] if needed else metadata.get("measured", ())),
        )
