"""Fixtures shared by all tests. One torch thread: the tests run in parallel processes.

No waiting for the disk either: nobody pulls the plug of a test, and what was written can be read without it. A tenth of
the time of the tests was that. Tests about the order of writing put their own `fsync` in its place.
"""

import functools
import gc
import os
import random
import re
import sys
import zlib
from pathlib import Path

import pytest

os.fsync = lambda file: None
PLAIN = re.compile(r"(mlp|cnn|resnet\d+)(:[\w,-]+)?(@[\d.]+)?")  # networks of our own whose names say all about them


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Tests and imports stay until the end: nobody need look through their half a million objects again and again."""
    if session.config.pluginmanager.hasplugin("dsession"):  # other processes collect, this one need not know torch
        return (yield)
    import torch

    torch.set_num_threads(1)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000)  # not 700: looking so often finds next to nothing


def draw_from(name):
    """Start the generators that belong to nobody at a place that depends on `name` alone."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    """What a fixture draws depends on its name and on what it is made for: a test, a file, or all of them."""
    draw_from(f"{request.node.nodeid.partition('@')[0]} {fixturedef.argname} {request.param_index}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """What a test draws depends on no test before it: which ran before in its process is chance."""
    draw_from(item.nodeid.partition("@")[0])


@pytest.fixture(autouse=True, scope="session")
def made_once():
    """Make once what thousands of tests ask for, and what is the same each time.

    These are the parser of the command line (75 ms) and the description of a plain network, for which it is built,
    checked and tried (15 ms). Nobody may change a description; if somebody does, tests of equal runs differ.
    """
    import torch
    import typer.main
    import typer.testing

    import polyfed.build
    from polyfed.core.shape import InputShape

    parser, describe = functools.cache(typer.main.get_command), polyfed.build.make_blueprint
    known = {}

    def described(model, label, shape, *settings):
        if not (isinstance(model, str) and PLAIN.fullmatch(model)):
            return describe(model, label, shape, *settings)
        key = model, label, repr(InputShape(shape).dump()), *settings, torch.get_default_dtype()
        if key not in known:
            known[key] = describe(model, label, shape, *settings)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", parser)
        patch.setattr(typer.testing, "_get_command", parser)
        patch.setattr(polyfed.build, "make_blueprint", described)
        yield


@pytest.fixture
def real_data(monkeypatch):
    """Where real image sets are; the test is skipped where there are none."""
    shared = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("POLYFED_DATA", shared))
    if not folder.is_dir():
        pytest.skip("needs real image sets: set POLYFED_DATA to a folder with <name>/<split>.parquet")
    monkeypatch.setenv("POLYFED_DATA", str(folder))
    return folder
