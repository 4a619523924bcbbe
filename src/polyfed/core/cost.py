"""What a run costs, counted and not estimated: bytes by client, direction, step and kind; seconds; peak memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from polyfed.core.errors import MethodError
from polyfed.core.message import Message

UP, DOWN = "up", "down"


@dataclass
class CostMeter:
    """Adds up every message. Payload bytes follow the formulas of the papers; wire bytes include the framing."""

    bytes: dict[str, dict[int, int]] = field(default_factory=lambda: {UP: {}, DOWN: {}})
    wire: dict[str, int] = field(default_factory=lambda: {UP: 0, DOWN: 0})
    kinds: dict[str, int] = field(default_factory=dict)  # "step/direction/kind" -> payload bytes
    seconds: dict[str, float] = field(default_factory=dict)
    round_bytes: dict[str, int] = field(default_factory=lambda: {UP: 0, DOWN: 0})
    peak_memory: int = 0
    _sizes: dict[Any, tuple[int, int, dict[str, int]]] = field(default_factory=dict, repr=False)

    def count(self, direction: str, client: int, step: str, message: Message) -> None:
        """Count one message."""
        try:
            payload, wire, kinds = self._measure(message)
        except (AttributeError, TypeError) as error:
            if told := _odd(message):
                whose = f"reply of client {client}" if direction == UP else f"message to client {client}"
                raise MethodError(f"The {whose} in step '{step}' cannot be sent: {told}.") from error
            raise
        self.bytes[direction][client] = self.bytes[direction].get(client, 0) + payload
        self.wire[direction] += wire
        self.round_bytes[direction] += payload
        for kind, size in kinds.items():
            key = f"{step}/{direction}/{kind}"
            self.kinds[key] = self.kinds.get(key, 0) + size

    def _measure(self, message: Message) -> tuple[int, int, dict[str, int]]:
        # The size depends on names, shapes and types only, so equal messages are measured once.
        states = tuple([(model, n, t.shape, t.dtype) for model, s in message.params.items() for n, t in s.items()])
        data = tuple([(name, t.shape, t.dtype) for name, t in message.data.items()])
        key = (states, data, tuple(sorted(message.meta.items())))
        if key not in self._sizes:
            if len(self._sizes) > 512:
                self._sizes.clear()
            self._sizes[key] = (message.nbytes(), message.wire_bytes(), message.kinds())
        return self._sizes[key]

    def total(self, direction: str) -> int:
        """Return all payload bytes of a direction."""
        return sum(self.bytes[direction].values())

    def new_round(self) -> None:
        """Start counting the bytes of a round."""
        self.round_bytes = {UP: 0, DOWN: 0}

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def dump(self) -> dict[str, Any]:
        """Return all counters in a form for JSON."""
        return {
            "bytes": {d: {str(c): n for c, n in sorted(t.items())} for d, t in self.bytes.items()},
            "wire": dict(self.wire),
            "kinds": dict(sorted(self.kinds.items())),
            "seconds": dict(self.seconds),
            "peak_memory": self.peak_memory,
        }

    @staticmethod
    def load(dumped: dict[str, Any]) -> CostMeter:
        """Return the meter that `dump` described."""
        return CostMeter(
            bytes={d: {int(c): n for c, n in t.items()} for d, t in dumped["bytes"].items()},
            wire=dict(dumped["wire"]),
            kinds=dict(dumped["kinds"]),
            seconds=dict(dumped["seconds"]),
            peak_memory=int(dumped["peak_memory"]),
        )


def _odd(message: Message) -> str:
    """Return what of a message is none of the things that travel."""
    for name, value in message.tensors():
        if not isinstance(value, Tensor):
            return f"'{name}' is a {type(value).__name__} and no tensor"
    for name, number in message.meta.items():
        if not isinstance(number, int | float | str):
            return f"'{name}' of its meta part is a {type(number).__name__} and no number or word"
    return ""


def reset_peak_memory() -> None:
    """Forget earlier peaks of this process where the system allows it (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes (since `reset_peak_memory` on Linux)."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
