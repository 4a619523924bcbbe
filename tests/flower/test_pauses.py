"""How often those who wait look for messages."""

from __future__ import annotations

import pytest

from polyfed.flower import supernode
from polyfed.flower.watch import pause_after


@pytest.mark.parametrize(
    ("silence", "seconds"), [(0.0, 0.25), (2.5, 0.25), (10.0, 1.0), (29.9, 2.99), (30.0, 3.0), (1e6, 3.0)]
)
def test_a_look_comes_a_tenth_of_the_silence_later(silence: float, seconds: float) -> None:
    assert pause_after(silence, 0.25, 3.0) == pytest.approx(seconds)


def test_flower_s_loop_looks_often_again_when_a_message_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 100.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    monkeypatch.setattr(supernode.time, "monotonic", lambda: now)
    monkeypatch.setattr(supernode.time, "sleep", sleep)
    looks = supernode.Looks()
    while now < 140.0:
        looks.sleep(3)  # what Flower does where there is no message
    assert slept[:3] == [0.25] * 3 and slept[-1] == 3.0
    assert slept == sorted(slept) and len(slept) < 45  # 160 with four looks a second
    looks.sleep(0.5)  # what it does while a message is answered
    looks.sleep(3)
    assert slept[-2:] == [0.25, 0.25]
