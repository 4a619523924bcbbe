"""Flipped bytes and truncations in what is read back: run directories, keys, images and tables."""

from __future__ import annotations

import io
import json
import random
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mutations import mutate_bytes

import polyfed as pf
from polyfed.core.errors import PolyfedError

CONFIGURATION = {"limit": 60, "clients": 2, "models": ["mlp:1x8"], "rounds": 4, "checkpoint_seconds": 0}


@dataclass
class Damage:
    """What became of damaged files."""

    tried: int = 0
    refused: int = 0  # with a sentence
    same: int = 0
    different: list[str] = field(default_factory=list)  # silently another result
    tracebacks: list[str] = field(default_factory=list)


class Enough(Exception):
    """Stops a run after some rounds."""


def half_done(folder: Path) -> Path:
    """Return the directory of a run that was stopped after two of four rounds."""
    from polyfed.api import execute
    from polyfed.experiment import experiment

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            raise Enough

    config = experiment(method="fedavg", **CONFIGURATION).config()
    try:
        execute(config, out=folder, observers=[stop])
    except Enough:
        return folder
    raise AssertionError("the run was not stopped")


def timeless(value: Any) -> Any:
    """Return a result without what depends on the clock."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in ("seconds", "peak_memory", "checksum", "versions")}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def outcome(path: Path) -> Any:
    """Return everything that a finished run says."""
    lines = [json.loads(line) for line in (path / "history.jsonl").read_text().splitlines()]
    models = {file.name: file.read_bytes() for file in sorted((path / "models").iterdir())}
    return timeless(json.loads((path / "result.json").read_text())), timeless(lines), models


def run_directories(count: int, seed: int, folder: Path) -> Damage:
    """Damage one file of a run directory, go on with it, and compare with the undamaged one."""
    rng, found = random.Random(seed), Damage()
    stopped = half_done(folder / "half")
    shutil.copytree(stopped, folder / "whole")
    pf.resume(folder / "whole")
    reference = outcome(folder / "whole")
    for number in range(count):
        copy = folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(stopped, copy)
        file = rng.choice(sorted(path for path in copy.rglob("*") if path.is_file()))
        content = bytearray(file.read_bytes())
        if content and rng.random() < 0.7:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        else:
            del content[rng.randrange(len(content) or 1) :]
        file.write_bytes(content)
        found.tried += 1
        where = f"{file.relative_to(copy)}, damage {number} of seed {seed}"
        try:
            pf.resume(copy)
            if outcome(copy) == reference:
                found.same += 1
            else:
                found.different.append(where)
        except PolyfedError:
            found.refused += 1
        except Exception:
            found.tracebacks.append(f"{where}\n{traceback.format_exc(limit=-3)}")
    return found


def small_files(count: int, seed: int, folder: Path) -> Damage:
    """Damage keys, images and tables, and read them."""
    rng, found = random.Random(seed), Damage()
    readers = [*_keys(folder), *_data(folder)]
    for number in range(count):
        path, read = rng.choice(readers)
        sound = path.read_bytes()
        path.write_bytes(mutate_bytes(sound, rng))
        found.tried += 1
        try:
            read()
            found.same += 1
        except PolyfedError:
            found.refused += 1
        except Exception:
            found.tracebacks.append(f"{path.name}, damage {number} of seed {seed}\n{traceback.format_exc(limit=-3)}")
        finally:
            path.write_bytes(sound)
    return found


Reader = tuple[Path, Callable[[], Any]]


def _keys(folder: Path) -> list[Reader]:
    from polyfed.flower.enroll import read_request, request_key
    from polyfed.flower.keys import create_keys, read_server_keys, read_site_keys
    from polyfed.flower.signing import Seal, SealCheck

    keys = folder / "keys"
    create_keys(keys, "127.0.0.1", ["north", "south"])
    request = request_key(folder / "east", "east")
    server = [keys / name for name in ("federation.json", "ca.crt", "server.crt", "site-north.pub")]
    site = [keys / "site-north" / name for name in ("site.json", "ca.crt", "site.key")]
    return [
        *((path, lambda: read_server_keys(keys)) for path in server),
        (keys / "server.key", lambda: Seal(read_server_keys(keys))),
        *((path, lambda: SealCheck(read_site_keys(keys / "site-north"))) for path in site),
        (request, lambda: read_request(request)),
    ]


def _data(folder: Path) -> list[Reader]:
    from PIL import Image

    from polyfed.data import load
    from polyfed.data.decode import decode_images

    picture = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(picture, "PNG")
    (folder / "image.png").write_bytes(picture.getvalue())
    pictures = folder / "pictures"
    for kind in ("train", "test"):
        for label in ("a", "b"):
            (pictures / kind / label).mkdir(parents=True)
            for number in range(3):
                (pictures / kind / label / f"{number}.png").write_bytes(picture.getvalue())
    one = pictures / "train" / "a" / "0.png"
    return [
        (folder / "image.png", lambda: decode_images([folder / "image.png"], "an image")),
        (one, lambda: load(str(pictures))),
    ]
