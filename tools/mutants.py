"""Break every loss and every weight of the methods on purpose, one place at a time, and see a test go red.

python tools/mutants.py                 all methods, and their parts; only what is not known yet is run
python tools/mutants.py fedproto moon   these
python tools/mutants.py ops.distance    a part that losses and weights are made of (`PARTS` of `mutants_found.py`)
python tools/mutants.py --list moon     what would be made
python tools/mutants.py --contract      those that stayed green also meet the contract, which takes minutes
python tools/mutants.py --count         the table of what is known

`mutate.py` says what is broken. Tests are collected once; every mutant is a fork of that process in which one function
has other code, and runs the tests of its method until one fails: its own file, the stored figures, the comparison with
released programs, and with `--contract`, if all of these stay green, the contract. A mutant of a part must be seen by
a test that imports the part. What was found goes to
`results/mutants/mutants.json`, by the source of the function: what has not changed is not run again, except mutants
that stayed green, once the tests of their method have changed. `tools/mutants_equivalent.toml` says of the others why
no test can tell them apart.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from mutants_found import (  # noqa: E402
    EQUIVALENT,
    PARTS,
    file_of,
    fingerprint,
    is_shared,
    known,
    mutants,
    name_of,
    names,
    reasons,
    store,
    table,
    test_files,
    total,
    users_of,
)
from mutate import Mutant  # noqa: E402

LIMIT = 300.0  # seconds of a mutant: then it hangs


class Breaker:
    """A plugin of pytest that takes the place of its loop: it has all tests collected, and forks."""

    def __init__(self, wanted: Sequence[str], contract: bool) -> None:
        self.wanted = wanted
        self.contract = contract
        self.tests = {name: fingerprint(name) + ("+contract" if contract else "") for name in wanted}
        self.failed = ""
        self.seconds: dict[str, float] = {}
        self.kills: Counter[str] = Counter()
        self.passing: set[str] = set()
        self.broken: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how long a test took, and whether it failed."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed = report.nodeid

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Break one method after the other."""
        found = known()
        self.functions = functions()
        for name in self.wanted:
            self.method(name, session.items, found)
        return True

    def method(self, name: str, items: Sequence[pytest.Item], found: dict[str, dict[str, Any]]) -> None:
        """Run the mutants of a method that are not known yet."""
        mine, tests = found.setdefault(name, {}), self.tests[name]
        made = mutants(name)
        for stale in set(mine) - {mutant.identity for mutant in made}:
            del mine[stale]
        why = reasons().get(name, {})
        todo = [m for m in made if is_due(m, mine.get(m.identity), tests) and m.identity not in why]
        todo += [m for m in made if m.identity in why and is_due(m, mine.get(m.identity), "")]
        if not todo:
            return
        own, further = own_tests(name, items), contract(name, items) if self.contract else []
        print(f"{name}: {len(todo)} mutants, {len(own)} tests", flush=True)
        for mutant in todo:
            start = time.monotonic()
            function = self.functions[name, mutant.qualname]
            outcome = self.first_red(self.ordered(own), mutant, function)
            if outcome["outcome"] == "green" and further:
                outcome = self.first_red(further, mutant, function)
            entry = {"function": mutant.function, "outcome": outcome["outcome"]}
            mine[mutant.identity] = entry | ({"by": outcome["by"]} if outcome["by"] else {"tests": tests})
            spent = time.monotonic() - start
            print(f"  {outcome['outcome']:5} {spent:5.1f} s  {mutant.identity}  {outcome['by']}", flush=True)
            store(found)

    def ordered(self, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """Put the tests first that have found most for their time."""
        return sorted(items, key=lambda item: -(self.kills[item.nodeid] + 0.2) / (self.expected(item) + 0.02))

    def expected(self, item: pytest.Item) -> float:
        """Return how long a test takes, or a guess."""
        return self.seconds.get(item.nodeid, {"released": 0.1, "golden": 1.5}.get(item.path.parent.name, 0.5))

    def first_red(self, items: Sequence[pytest.Item], mutant: Mutant, function: FunctionType) -> dict[str, Any]:
        """Return the first failure of a mutant, of a test that passes where nothing is broken."""
        items = [item for item in items if item.nodeid not in self.broken]
        while True:
            outcome = self.forked(items, mutant, function)
            guilty = [item for item in items if item.nodeid == outcome["by"]]
            self.kills[outcome["by"]] += 1
            if not guilty or guilty[0].nodeid in self.passing:
                return outcome
            if self.forked(guilty, None, None)["outcome"] == "green":
                self.passing.add(outcome["by"])
                return outcome
            print(f"  {outcome['by']} fails where nothing is broken: it does not count.", flush=True)
            self.broken.add(outcome["by"])
            items = [item for item in items if item is not guilty[0]]

    def forked(
        self, items: Sequence[pytest.Item], mutant: Mutant | None, function: FunctionType | None
    ) -> dict[str, Any]:
        """Run tests in a fork until one fails; with a mutant, its code is that of the function there."""
        code = mutant.code() if mutant is not None else None  # here: what is no Python is a fault of this tool
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()  # its threads and processes end with it
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            outcome = {"outcome": "red", "by": "the process ended"}
            try:
                if function is not None and code is not None:
                    function.__code__ = code
                outcome = self.run(items)
            finally:
                os.write(writing, json.dumps(outcome).encode())
                os._exit(0)
        os.close(writing)
        outcome = received(reading, LIMIT)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self.seconds |= outcome.get("seconds", {})
        if modules := [module for module in outcome.get("modules", ()) if module not in sys.modules]:
            for module in modules:  # what tests import by the way is there for all further forks
                with suppress(ImportError):  # some extensions have other names than their files
                    importlib.import_module(module)
            gc.freeze()
        return outcome

    def run(self, items: Sequence[pytest.Item]) -> dict[str, Any]:
        """Run tests in this process."""
        before = set(sys.modules)
        self.failed, self.seconds = "", {}
        items[0].config.pluginmanager.unregister(name="terminalreporter")
        for place, item in enumerate(items):
            following = items[place + 1] if place + 1 < len(items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                break
        return {
            "outcome": "red" if self.failed else "green",
            "by": self.failed,
            "seconds": self.seconds,
            "modules": importable(set(sys.modules) - before),
        }


def received(reading: int, limit: float) -> dict[str, Any]:
    """Return what a fork tells; one that does not end in time was found out, too."""
    data, end = b"", time.monotonic() + limit
    with open(reading, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return {"outcome": "red", "by": "the time limit"}
            piece = pipe.read(1 << 16)
            if not piece:
                return json.loads(data) if data else {"outcome": "red", "by": "the process ended"}
            data += piece


def importable(modules: Iterable[str]) -> list[str]:
    """Return the modules of libraries that tests have imported by the way."""
    files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in modules}
    return sorted(name for name, file in files.items() if "site-packages" in file and "tests" not in name)


def is_due(mutant: Mutant, entry: Mapping[str, Any] | None, tests: str) -> bool:
    """Whether a mutant is to be run: never seen, its function is another one, or it was green with other tests."""
    if entry is None or entry["function"] != mutant.function:
        return True
    return bool(tests) and entry["outcome"] == "green" and not entry["tests"].startswith(tests)


def functions() -> dict[tuple[str, str], FunctionType]:
    """Return the functions of the methods as they live in this process, by their file and their names in it."""
    for name in names():
        importlib.import_module(".".join(("polyfed", *file_of(name).parts[-2:])).removesuffix(".py"))
    gc.unfreeze()  # what is frozen is not listed, and collecting tests freezes what they import
    alive = [thing for thing in gc.get_objects() if type(thing) is FunctionType]
    code = [(name_of(Path(function.__code__.co_filename)), function) for function in alive]
    return {(name, f.__code__.co_qualname): f for name, f in code if name is not None}


def own_tests(name: str, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of a method: its own file, its stored figures, released programs."""
    files = {str(file) for file in test_files(name)}
    if name in PARTS:
        return [item for item in items if str(item.path) in files]
    called = [name, *(users_of(name) if is_shared(name) else [])]
    return [
        item
        for item in items
        if str(item.path) in files
        or (item.path.parent.name == "golden" and is_case_of(item, called))
        or (item.path.parent.name == "released" and any(word in item.nodeid.lower() for word in called))
    ]


def contract(name: str, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the everyday contract of a method, or of one that uses what is shared."""
    called = users_of(name)[:1] if is_shared(name) else [name]
    found = [item for item in items if item.path.name == "test_contract.py" and is_case_of(item, called)]
    return [item for item in found if "test_contract[" in item.nodeid]


def is_case_of(item: pytest.Item, called: Sequence[str]) -> bool:
    """Whether a test of all methods is about one of these."""
    return any(f"[{name}-" in item.nodeid for name in called)


def main(arguments: Sequence[str]) -> int:
    """Run, list or count."""
    wanted = [argument for argument in arguments if not argument.startswith("-")] or names()
    if unknown := sorted(set(wanted) - set(names())):
        print(f"No such method: {', '.join(unknown)}.")
        return 2
    if "--list" in arguments:
        for name in wanted:
            print(*(f"{name}: {mutant.identity}" for mutant in mutants(name)), sep="\n")
        return 0
    if "--count" not in arguments:
        os.nice(10)
        folders = ["tests/methods", "tests/golden", "tests/released", "tests/contract/test_contract.py"]
        folders += ["tests/ops", "tests/core"] if set(wanted) & set(PARTS) else []
        with tempfile.TemporaryDirectory() as folder:
            options = [
                "-q",
                "-p",
                "no:cacheprovider",
                "-m",
                "not slow and not long",
                f"--basetemp={folder}/tests",
                "--timeout=120",
            ]
            status = pytest.main(
                [*options, *(str(ROOT / f) for f in folders)], plugins=[Breaker(wanted, "--contract" in arguments)]
            )
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return int(status)
    rows = table(known())
    for name, lines in reasons().items():
        for stale in sorted(set(lines) - {mutant.identity for mutant in mutants(name)}):
            print(f"{EQUIVALENT.name} explains a mutant that does not exist: {name}: {stale}")
    for name in wanted:
        print(f"{name:18}", *(f"{count:5} {state}" for state, count in rows[name].items()))
    print(f"{'all':18}", *(f"{count:5} {state}" for state, count in total(rows).items()))
    return int(any(rows[name]["green"] for name in wanted))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
