"""What is known of the mutants of `tools/mutants.py`: which there are, which tests look at them, what they found."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mutate import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[1]
METHODS = ROOT / "src/polyfed/methods"
FOUND = ROOT / "results/mutants/mutants.json"
EQUIVALENT = ROOT / "tools/mutants_equivalent.toml"
PARTS = (  # what losses and weights of the methods are made of, by folder and file
    *(f"ops.{name}" for name in ("adaptive", "aggregate", "choice", "conformal", "distance", "gaussian", "gradients")),
    *(f"ops.{name}" for name in ("moments", "noise", "penalty", "projection", "selection", "steps")),
    *(f"core.{name}" for name in ("depth", "distill", "heads", "looking", "prototypes", "statistics", "task")),
    "core.task_vectors",
)
STATES = ("red", "equivalent", "green", "not run")


def method_files() -> list[str]:
    """Return the files with methods."""
    return sorted(file.stem for file in METHODS.glob("*.py") if file.stem != "__init__")


def names() -> list[str]:
    """Return what is broken: the files with methods, and those of their parts."""
    return [*method_files(), *PARTS]


def file_of(name: str) -> Path:
    """Return the file of a method, or of a part (`ops.distance`)."""
    return METHODS.parent / f"{name.replace('.', '/')}.py" if name in PARTS else METHODS / f"{name}.py"


def name_of(file: Path) -> str | None:
    """Return the method or part that a file holds; None for other files."""
    if file.parent == METHODS:
        return file.stem
    return next((name for name in PARTS if file_of(name) == file), None)


def is_shared(name: str) -> bool:
    """Whether a file holds a part of methods, and none that runs by this name."""
    return f'name: ClassVar[str] = "{name}"' not in file_of(name).read_text()


def users_of(name: str) -> list[str]:
    """Return the methods whose files import this one, directly or not."""
    module = f"polyfed.{name}" if name in PARTS else f"polyfed.methods.{name}"
    found = [other for other in method_files() if f"from {module} import" in file_of(other).read_text()]
    return sorted({*found, *(further for other in found for further in users_of(other))})


def test_files(name: str) -> list[Path]:
    """Return the files with tests of a method: its own, or those that use it. Of a part: those that import it."""
    if name in PARTS:
        wanted = re.compile(rf"from polyfed\.{re.escape(name)} import|from polyfed\.{name.replace('.', ' import ')}\b")
        folders = (ROOT / "tests" / folder for folder in ("ops", "core", "methods", "released"))
        files = sorted(file for folder in folders for file in folder.glob("test_*.py"))
        return [file for file in files if wanted.search(file.read_text())]
    folder = ROOT / "tests/methods"
    own = [folder / f"test_{name}.py"]
    if not own[0].exists():
        wanted = {folder / f"test_{user}.py" for user in users_of(name)} if is_shared(name) else set()
        mention = re.compile(rf"polyfed\.methods\.{name}\b|\"{name}\"|\bpf\.{name.replace('_', '')}\b", re.IGNORECASE)
        wanted |= {file for file in folder.glob("test_*.py") if mention.search(file.read_text())}
        own = sorted(file for file in wanted if file.exists())
    return own


def fingerprint(name: str) -> str:
    """Return a hash of the tests of a method: a mutant that stayed green is tried again when they change."""
    files = test_files(name)
    if name not in PARTS:
        files += [*sorted((ROOT / "tests/released").glob("test_*.py")), ROOT / "tests/golden/golden.json"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


@cache
def mutants(name: str) -> list[Mutant]:
    """Make the mutants of a method."""
    file = file_of(name)
    return list(mutants_of(file.read_text(), str(file)))


# --- what is known ---


def known() -> dict[str, dict[str, Any]]:
    """Return what was found so far: method -> mutant -> outcome."""
    return json.loads(FOUND.read_text())["mutants"] if FOUND.exists() else {}


def reasons() -> dict[str, dict[str, str]]:
    """Return why mutants are equivalent: method -> mutant -> one sentence."""
    return tomllib.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}


def table(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return counts for each method: made, red, equivalent, green, and those not run."""
    why = reasons()
    rows = {}
    for name in names():
        made = mutants(name)
        outcome = Counter(state_of(mutant, found.get(name, {}), why.get(name, {})) for mutant in made)
        rows[name] = {"made": len(made), **{state: outcome[state] for state in STATES}}
    return rows


def total(rows: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return the sums over the methods."""
    return {state: sum(row[state] for row in rows.values()) for state in ("made", *STATES)}


def state_of(mutant: Mutant, found: Mapping[str, Any], why: Mapping[str, str]) -> str:
    """Return what is known of a mutant."""
    entry = found.get(mutant.identity)
    if entry is None or entry["function"] != mutant.function:
        return "not run"
    if entry["outcome"] == "green":
        return "equivalent" if mutant.identity in why else "green"
    return "red"


def store(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Write what is known, in one step: a run that is stopped loses the mutant at hand only."""
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    methods = table(found)
    text = json.dumps({"total": total(methods), "methods": methods, "mutants": found}, indent=1, sort_keys=True)
    FOUND.with_suffix(".part").write_text(text + "\n")
    FOUND.with_suffix(".part").replace(FOUND)
