"""`polyfed doctor`: what is installed, what this machine offers, which data is here, and what to do about the rest."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyfed.core.errors import InputError

GOOD, ADVICE, PROBLEM = "ok", "note", "problem"
EXTRAS = {  # what each is for, in the order in which people meet them
    "flower": "real federations",
    "simulation": "--engine flower",
    "privacy": "--epsilon",
    "transformers": "networks hf:NAME",
    "timm": "networks timm:NAME",
    "torchvision": "networks torchvision:NAME",
    "xgboost": "boosted trees as clients, xgboost:CLASS",
    "lightgbm": "boosted trees as clients, lightgbm:CLASS",
    "learners": "polyfed export of a client that is no network",
    "onnx": "polyfed export --format onnx",
    "plots": "figures for papers",
    "tensorboard": "--log tensorboard",
    "mlflow": "--log mlflow",
}
TRIED = (3, 11)  # as in the classifiers of pyproject.toml
PORT = 9092  # where `polyfed serve` listens unless it is told otherwise


@dataclass(frozen=True)
class Finding:
    """One line: about what, what was found, whether that is well, and what to do."""

    subject: str
    found: str
    state: str = GOOD
    advice: str = ""


def examine(server: str | None = None) -> list[Finding]:
    """Return everything that `polyfed doctor` prints, in its order."""
    return [*_versions(), *_machine(), *_data(), *_extras(), *_flower(server)]


def as_rows(findings: list[Finding]) -> list[dict[str, Any]]:
    """Return the findings for machines."""
    return [asdict(finding) for finding in findings]


def _versions() -> Iterator[Finding]:
    from polyfed.core.versions import versions

    yield Finding("versions", ", ".join(f"{name} {number}" for name, number in versions().items()))
    if sys.version_info[:2] != TRIED:
        found = f"polyfed was tried with Python {'.'.join(map(str, TRIED))} only"
        yield Finding("python", found, ADVICE, "Take that one if something fails.")
    outdated = [f"{name} {found} (wants {wanted})" for name, found, wanted in _unfit()]
    if outdated:
        yield Finding(
            "dependencies", "; ".join(outdated), PROBLEM, "Install polyfed anew: pip install --upgrade polyfed"
        )


def _unfit() -> Iterator[tuple[str, str, str]]:
    """Yield dependencies that are missing or of a version that this package does not accept."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires("polyfed") or []]
    except PackageNotFoundError:  # a source tree on the path, not installed
        return
    for need in wanted:
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(need.name)
        except PackageNotFoundError:
            yield need.name, "is missing", str(need.specifier)
            continue
        if not need.specifier.contains(found, prereleases=True):
            yield need.name, found, str(need.specifier)


def _machine() -> Iterator[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fast = torch.backends.cpu.get_cpu_capability()
    yield Finding("processor", f"{platform.machine()}, {fast}, {cores} core{'s' if cores > 1 else ''} to use")
    threads = torch.get_num_threads()
    advice = f"torch uses {threads} of {cores} cores: unset OMP_NUM_THREADS, or set --workers {cores}."
    yield Finding("threads", f"{threads}", *((ADVICE, advice) if threads < cores else ()))
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
        yield Finding("GPU", f"{names} (CUDA {torch.version.cuda})", GOOD, "Use it with --device auto.")
    elif torch.version.cuda:
        advice = "This torch is built for CUDA but sees no GPU: check the driver (nvidia-smi)."
        yield Finding("GPU", "none is visible", ADVICE, advice)
    else:
        yield Finding("GPU", "none: this torch is the build for processors")


def _data() -> Iterator[Finding]:
    from polyfed.data import describe_sources

    root = os.environ.get("POLYFED_DATA")
    if root and not Path(root).is_dir():
        yield Finding("POLYFED_DATA", f"{root} is no folder", PROBLEM, "Set it to a folder with NAME/SPLIT.parquet.")
    rows = describe_sources()
    here = [str(row["name"]) for row in rows if row["found"] != "not here"]
    away = [str(row["name"]) for row in rows if row["found"] == "not here"]
    yield Finding("data here", ", ".join(here))
    if away:
        advice = "Downloaded from the Hugging Face Hub on first use, or set POLYFED_DATA to a folder that has them."
        yield Finding("data elsewhere", ", ".join(away), ADVICE, advice)


def _extras() -> Iterator[Finding]:
    for extra, purpose in EXTRAS.items():
        missing = _missing(extra)
        if missing:
            advice = f"pip install 'polyfed[{extra}]'"
            yield Finding(f"extra {extra}", f"not installed ({', '.join(missing)}): {purpose}", ADVICE, advice)
        else:
            yield Finding(f"extra {extra}", f"installed: {purpose}")


def _missing(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed; of `flwr[simulation]`, those of that extra too."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires("polyfed") or []]
    except PackageNotFoundError:
        return ["polyfed itself"]
    mine = [need for need in wanted if need.marker is not None and need.marker.evaluate({"extra": extra})]
    mine = [need for need in mine if not need.marker.evaluate({"extra": ""})]  # type: ignore[union-attr]
    return [name for need in mine for name in (need.name, *_named_by(need)) if not _installed(name)]


def _named_by(need: Any) -> list[str]:
    """Return the packages that the extras of a requirement name, as far as it is installed."""
    from packaging.requirements import Requirement

    if not need.extras or not _installed(need.name):
        return []
    inner = [Requirement(text) for text in metadata(need.name).get_all("Requires-Dist") or []]
    return [
        one.name
        for one in inner
        if one.marker is not None
        and not one.marker.evaluate({"extra": ""})
        and any(one.marker.evaluate({"extra": extra}) for extra in need.extras)
    ]


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _flower(server: str | None) -> Iterator[Finding]:
    from polyfed.flower import require_flower

    try:
        require_flower()
    except InputError as error:
        if find_spec("flwr") is not None:
            yield Finding("Flower", str(error), PROBLEM, "pip install 'polyfed[flower]'")
    else:
        yield Finding("Flower", f"{version('flwr')}, the version that polyfed was tested with")
        busy = _answers("127.0.0.1", PORT)
        advice = f"Something listens on port {PORT}: 'polyfed serve' needs another --port, unless that is your server."
        yield Finding(
            f"port {PORT}", "in use" if busy else "free for polyfed serve", *((ADVICE, advice) if busy else ())
        )
    if server is not None:
        host, colon, port = server.rpartition(":")
        if not colon or not port.isdigit():
            raise InputError(f"--server takes HOST:PORT, such as 127.0.0.1:{PORT}, not '{server}'.")
        if _answers(host.strip("[]"), int(port)):
            yield Finding("server", f"{server} answers")
        else:
            advice = "Check the address, that 'polyfed serve' runs there, and that no firewall closes the port."
            yield Finding("server", f"nothing answers at {server}", PROBLEM, advice)


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=3):
            return True
    except OSError:
        return False
