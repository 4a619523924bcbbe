"""What a shell completes: the names that there are, without the seconds that torch takes."""

import subprocess
import sys

import pytest
from tests.test_cli import polyfed

from polyfed import methods, models
from polyfed.analysis.command import ANALYSES
from polyfed.cli import complete
from polyfed.data.catalog import KNOWN
from polyfed.reproduce.entries import home, read_entries


def test_the_names_are_those_that_the_package_has():
    assert complete.methods() == sorted(methods.registry())
    assert complete.models() == sorted(models.names())
    assert complete.data() == sorted(KNOWN)
    assert complete.analyses() == sorted(ANALYSES)
    assert {entry.path for entry in read_entries(home())} < set(complete.entries())


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("polyfed run --method fedpro", ["fedproto", "fedprox"]),
        ("polyfed compare --methods fedavg,fedpro", ["fedavg,fedproto", "fedavg,fedprox"]),
        ("polyfed methods scaf", ["scaffold"]),
        ("polyfed models lst", ["lstm"]),
        ("polyfed run --data digits", ["digits"]),
        ("polyfed run --models mlp:2,lst", ["mlp:2,lstm"]),
        ("polyfed run --engine seq", ["sequential"]),
        ("polyfed run --optimizer adam", ["adam", "adamw"]),
        ("polyfed analyze ck", ["cka"]),
        ("polyfed reproduce fedin/table1", ["fedin/table1"]),
    ],
)
def test_a_shell_gets_the_values_that_begin_so(typed, expected, monkeypatch):
    monkeypatch.setenv("_POLYFED_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert polyfed().stdout.split() == expected


def test_completion_does_not_import_torch():
    code = "import sys; from polyfed.cli import commands, complete as c; c.methods(), c.models(), c.data(); "
    code += "c.analyses(), c.entries(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
