"""Files that survive a crash: written beside their place, flushed to the disk, then renamed over it.

Each carries a checksum of what it holds, and reading it back checks that: a bit that flips on a disk is found and named
instead of changing results.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from polyfed.core.blob import blob_of, memory_of
from polyfed.core.errors import PolyfedError, RunDirectoryError

CHECKSUM = "checksum"
TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")  # what `write_atomic` writes to before it renames
Tree = Any  # tensors, numbers, words, None, and lists or string-keyed dicts of them


def write_atomic(path: Path, content: bytes, private: bool = False, synced: bool = True) -> None:
    """Write a file so that at any moment either the old or the new content is there, never a part.

    A private one is for its owner only. Who writes many into a folder brings the folder to the disk once, behind the
    last (`sync_folder`): `synced=False`.

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
            if not private:  # mkstemp makes files for the owner only; reports and results are to be read
                os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        if synced:
            sync_folder(path.parent)
    except OSError as error:
        raise PolyfedError(
            f"Cannot write {path} ({error.strerror or error}): free some space or choose another --out; "
            "what was saved before is intact."
        ) from error


def added_to(path: Path, mode: int = 0o644) -> IO[str]:
    """Open a file to add lines to it; a link in its place is refused, since it may lead to a file of somebody else."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, mode), "a")


def sweep(folder: Path) -> None:
    """Remove what a process that was killed while it wrote has left; call it only where nobody else writes."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if TEMPORARY.fullmatch(path.name) and path.is_file():
            with suppress(OSError):
                path.unlink()


def sync_folder(folder: Path) -> None:
    """Make a rename in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any, private: bool = False) -> None:
    """Write a JSON file atomically; a table gets a checksum of its content."""
    if isinstance(value, dict):
        value = with_checksum(value)
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode(), private)


def read_json(path: Path, sealed: bool = False) -> Any:
    """Read a JSON file and check its checksum, or say which file is damaged; `sealed`: it must have one."""
    value = parse_json(path)
    if not isinstance(value, dict):
        return value
    found = value.pop(CHECKSUM, None)
    if (found is not None or sealed) and found != _sum_of(value):
        raise RunDirectoryError(f"{path} is damaged or was edited (wrong checksum): restore it or start the run again.")
    return value


def parse_json(path: Path) -> Any:
    """Return what a JSON file holds, as it is."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirectoryError(f"Cannot read {path}: {error}.") from error


def with_checksum(value: dict[str, Any]) -> dict[str, Any]:
    """Return a table with the checksum of its content."""
    return {**value, CHECKSUM: _sum_of(value)}


def checked(value: Any) -> dict[str, Any] | None:
    """Return the table that `with_checksum` was given; None: it is no such table, or not as it was."""
    if not isinstance(value, dict) or CHECKSUM not in value:
        return None
    content = {key: item for key, item in value.items() if key != CHECKSUM}
    return content if value[CHECKSUM] == _sum_of(content) else None


def _sum_of(value: dict[str, Any]) -> str:
    # By way of JSON: a table whose keys are numbers is read back with words.
    return digest(json.dumps(json.loads(json.dumps(value)), sort_keys=True, separators=(",", ":")).encode())


def pack_tree(tree: Tree) -> bytes:
    """Serialise a tree of tensors and plain values to one safetensors blob."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(flattened(tree, tensors), sort_keys=True)
    return blob_of(tensors.items(), {"tree": text, CHECKSUM: _sum_of_tree(text, tensors)})


def unpack_tree(blob: bytes, source: str) -> Tree:
    """Read what `pack_tree` wrote."""
    try:
        tensors = load(blob)
        length = int.from_bytes(blob[:8], "little")
        return _checked_tree(json.loads(blob[8 : 8 + length])["__metadata__"], tensors)
    except Exception as error:  # damage can look like anything
        raise RunDirectoryError(f"{source} is damaged ({error}): restore it or start the run again.") from error


def read_tree(path: Path) -> Tree:
    """Read a file that `pack_tree` wrote, without holding its bytes beside its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            return _checked_tree(file.metadata(), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except Exception as error:  # damage can look like anything
        raise RunDirectoryError(f"{path} is damaged ({error}): restore it or start the run again.") from error


def state_file(state: Mapping[str, Tensor], words: Mapping[str, str] | None = None) -> bytes:
    """Return tensors by name, and words, as one safetensors blob with a checksum of both; `read_state` reads it."""
    words, tensors = dict(words or {}), {name: tensor.detach().contiguous() for name, tensor in state.items()}
    return blob_of(tensors.items(), {**words, CHECKSUM: sum_of_state(words, tensors)})


def sum_of_state(words: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum of a file of tensors by name."""
    own = {key: value for key, value in words.items() if key != CHECKSUM}
    return _sum_of_tree(json.dumps(own, sort_keys=True), tensors)


def _checked_tree(words: dict[str, str], tensors: dict[str, Tensor]) -> Tree:
    if words[CHECKSUM] != _sum_of_tree(words["tree"], tensors):
        raise ValueError("wrong checksum")
    return unflattened(json.loads(words["tree"]), tensors)


def _sum_of_tree(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of what a tree holds: its values, and name, type, shape and bytes of every tensor."""
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        found.update(memory_of(tensor))
    return found.hexdigest()


def digest(blob: bytes) -> str:
    """Return a checksum of a file's content."""
    return hashlib.sha256(blob).hexdigest()


def flattened(tree: Tree, tensors: dict[str, Tensor]) -> Any:
    """Return a tree in a form for JSON; its tensors are put aside, by numbers that stand in their places."""
    if isinstance(tree, Tensor):
        name = str(len(tensors))
        tensors[name] = tree
        return {"tensor": name}
    if isinstance(tree, dict):
        assert all(isinstance(key, str) for key in tree), "keys of a checkpointed dict must be words"
        return {"dict": {key: flattened(value, tensors) for key, value in tree.items()}}
    if isinstance(tree, list | tuple):
        return {"list": [flattened(value, tensors) for value in tree]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"value": tree}
    raise TypeError(f"cannot checkpoint a {type(tree).__name__}: keep tensors, numbers, words, lists and dicts of them")


def unflattened(skeleton: Any, tensors: Mapping[str, Tensor]) -> Tree:
    """Return the tree that `flattened` described."""
    ((kind, content),) = skeleton.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: unflattened(value, tensors) for key, value in content.items()}
    if kind == "list":
        return [unflattened(value, tensors) for value in content]
    return content
