"""What a rank notices of its steps: when gradients are ready, and how long it waits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

OFTEN = 3  # steps until a change is one
_SLOWER, _SLACK_S = 2.0, 0.02  # an exchange so many times longer, and by so much, is another link's
_LINK_STEPS = 100  # between two choices because of a link


class Clock:
    """What backward() computes until gradients are ready: without the time of the hook itself."""

    def __init__(self) -> None:
        self.ready_s: dict[str, float] = {}  # by weight
        self.others: dict[str, int] = {}  # elements of others since the weight before
        self.backward_s = 0.0
        self._began: float | None = None
        self._paused = 0.0
        self._elements = 0

    def start(self) -> None:
        """backward() has begun, if it had not."""
        if self._began is None:
            self.__init__()  # type: ignore[misc]
            self._began = time.perf_counter()

    def note(self, names: Sequence[str], elements: int) -> None:
        """A bucket is ready: these weights, and so many elements of others."""
        assert self._began is not None
        self._paused = time.perf_counter()
        self.backward_s = self._paused - self._began
        self._elements += elements
        for name in names:
            self.ready_s[name] = self.backward_s
            self.others[name], self._elements = self._elements, 0

    def resume(self) -> None:
        """backward() goes on."""
        assert self._began is not None
        self._began += time.perf_counter() - self._paused

    def end_step(self) -> None:
        self._began = None


class Waits:
    """How long a step waits for results when backward() is done."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._steps = self._off = 0

    def add(self, seconds: float) -> None:
        self._steps += 1
        if len(self._first) < 2 * OFTEN:
            self._first.append(seconds)
            return
        usual = statistics.median(self._first)
        one, other = sorted((usual, seconds))
        self._off = max(0, self._off + (1 if other > _SLOWER * one + _SLACK_S else -1))

    def have_changed(self) -> bool:
        """The links are not what they were, or other computing is in the way."""
        return self._steps >= _LINK_STEPS and self._off >= 2 * OFTEN
