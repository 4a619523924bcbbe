"""Centralised training: all data in one place, one model for each architecture. The ceiling, not a federation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.method import Method


@dataclass(frozen=True)
class Centralized(Method):
    """Every architecture trains on the union of all clients' data.

    Its rounds see each sample once an epoch, as the clients' rounds together do.
    """

    name: ClassVar[str] = "centralized"
    paper: ClassVar[str] = "control: all data in one place"
    family: ClassVar[str] = "control"
    sends: ClassVar[str] = "all data (not a federation: the ceiling)"
    pools_data: ClassVar[bool] = True

    def takes_learners(self) -> bool:
        """Whatever a client has is trained on labels."""
        return True
