"""Tests that share something dear run in one process."""

from __future__ import annotations

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="needs several processes: -n 2")
@pytest.mark.xdist_group("together")
def test_a_group_of_tests_is_known_to_who_deals_them_out(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@together")  # the name by which xdist keeps a group together
