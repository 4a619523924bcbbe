"""Local training: no exchange at all. The control that every method must beat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from polyfed.core.method import Method
from polyfed.core.traffic import Traffic


@dataclass(frozen=True)
class Local(Method):
    """Each client trains on its own data and sends nothing."""

    name: ClassVar[str] = "local"
    paper: ClassVar[str] = "control: every client alone"
    family: ClassVar[str] = "control"
    traffic: ClassVar[Mapping[str, Traffic]] = {}

    def takes_learners(self) -> bool:
        """Whatever a client has is trained on labels."""
        return True
