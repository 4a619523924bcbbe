"""How the contract tests run a method: one `Case` a line, in `table.py` and in the `cases_*.py` of the families."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from polyfed.methods import make
from polyfed.testing import Limit, Setting

MIXED = ("mlp:1x16", "mlp:2x16", "cnn:4-8")
WIDTHS = ("cnn:8-16,bn@1", "cnn:8-16,bn@0.5")
DEPTHS = ("resnet10:w4", "resnet14:w4")


@dataclass(frozen=True)
class Case:
    """How the contract tests run a method."""

    method: str
    models: tuple[str, ...] = MIXED
    options: dict[str, Any] = field(default_factory=dict)
    public: bool = False
    feature_dim: int | None = None
    off: dict[str, Any] | None = None  # these options switch the method's own idea off ...
    base: str | None = None  # ... and it is then exactly this method
    base_options: dict[str, Any] = field(default_factory=dict)
    where: dict[str, Any] = field(default_factory=dict)  # ... in these circumstances, if not in all: see `Limit`

    stacked: bool = True  # whether its stages can be run as stacks

    @cached_property
    def setting(self) -> Setting:
        """How it is checked; made once, so that its plain run is, too."""
        limit = None
        if self.off is not None and self.base is not None:
            off, base = make(self.method, {**self.options, **self.off}), make(self.base, self.base_options)
            limit = Limit(off, base, **self.where)
        method = make(self.method, self.options)
        return Setting(method, self.models, self.public, self.feature_dim, limit, self.stacked)

    @property
    def id(self) -> str:
        return f"{self.method}-{'x'.join(sorted({m.split(':')[0] for m in self.models}))}"
