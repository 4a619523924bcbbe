"""Limit cases of methods are equalities to the bit: they hold where both methods run the same program for each client.

With stacks (`auto`, the default) a method with another loss or a further term takes another way to the same numbers, up
to rounding; `tests/engines` and the contract compare the engines.
"""

import pytest

import polyfed as pf
from polyfed.core.settings import Execution


@pytest.fixture(autouse=True)
def whole_clients(monkeypatch):
    """Let runs use the engine `threads` where a test names none."""
    monkeypatch.setitem(pf.run.__kwdefaults__, "engine", "threads")
    engine, *others = Execution.__init__.__defaults__
    assert engine == "auto"
    monkeypatch.setattr(Execution.__init__, "__defaults__", ("threads", *others))
