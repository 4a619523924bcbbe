"""Files that survive a crash: written beside their place, flushed to the disk, then renamed over it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from polyfed.core.blob import blob_of
from polyfed.core.errors import PolyfedError, RunDirectoryError

Tree = Any  # tensors, numbers, words, None, and lists or string-keyed dicts of them


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that at any moment either the old or the new content is there, never a part.

    Raises
    ------
    PolyfedError
        When the disk is full or read-only; the earlier content is intact.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # mkstemp makes files for the owner only; reports and results are to be read
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise PolyfedError(
            f"Cannot write {path} ({error.strerror or error}): free some space or choose another --out; "
            "what was saved before is intact."
        ) from error


def sync_folder(folder: Path) -> None:
    """Make a rename in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file, or say which file is damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"Cannot read {path}: {error}.") from error


def pack_tree(tree: Tree) -> bytes:
    """Serialise a tree of tensors and plain values to one safetensors blob."""
    tensors: dict[str, Tensor] = {}
    skeleton = _flatten(tree, tensors)
    return blob_of(tensors.items(), {"tree": json.dumps(skeleton, sort_keys=True)})


def unpack_tree(blob: bytes, source: str) -> Tree:
    """Read what `pack_tree` wrote."""
    try:
        tensors = load(blob)
        length = int.from_bytes(blob[:8], "little")
        skeleton = json.loads(json.loads(blob[8 : 8 + length])["__metadata__"]["tree"])
        return _unflatten(skeleton, tensors)
    except (SafetensorError, ValueError, KeyError) as error:
        raise RunDirectoryError(f"{source} is damaged ({error}): restore it or start the run again.") from error


def read_tree(path: Path) -> Tree:
    """Read a file that `pack_tree` wrote, without holding its bytes beside its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            skeleton = json.loads(file.metadata()["tree"])
            return _unflatten(skeleton, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{path} is damaged ({error}): restore it or start the run again.") from error


def digest(blob: bytes) -> str:
    """Return a checksum of a file's content."""
    return hashlib.sha256(blob).hexdigest()


def _flatten(tree: Tree, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        name = str(len(tensors))
        tensors[name] = tree
        return {"tensor": name}
    if isinstance(tree, dict):
        assert all(isinstance(key, str) for key in tree), "keys of a checkpointed dict must be words"
        return {"dict": {key: _flatten(value, tensors) for key, value in tree.items()}}
    if isinstance(tree, list | tuple):
        return {"list": [_flatten(value, tensors) for value in tree]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"value": tree}
    raise TypeError(f"cannot checkpoint a {type(tree).__name__}: keep tensors, numbers, words, lists and dicts of them")


def _unflatten(skeleton: Any, tensors: dict[str, Tensor]) -> Tree:
    ((kind, content),) = skeleton.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unflatten(value, tensors) for key, value in content.items()}
    if kind == "list":
        return [_unflatten(value, tensors) for value in content]
    return content
