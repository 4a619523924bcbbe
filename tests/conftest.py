"""Fixtures shared by all tests. One torch thread: the tests run in parallel processes.

No waiting for the disk either: nobody pulls the plug of a test, and what was written can be read without it. A tenth of
the time of the tests was that. Tests about the order of writing put their own `fsync` in its place.
"""

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
os.fsync = lambda file: None


@pytest.fixture
def real_data(monkeypatch):
    """Where real image sets are; the test is skipped where there are none."""
    shared = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("POLYFED_DATA", shared))
    if not folder.is_dir():
        pytest.skip("needs real image sets: set POLYFED_DATA to a folder with <name>/<split>.parquet")
    monkeypatch.setenv("POLYFED_DATA", str(folder))
    return folder
