"""What a rank notices of its steps: when gradients are ready, and how long it waits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

OFTEN = 3  # steps until a change is one
_SLOWER, _SLACK_S = 2.0, 0.02  # an exchange so many times longer, and by so much, is another link's
_LINK_STEPS = 100  # between two choices because of a link
TRIED = 5  # steps that are compared with as many others
_CLEARLY = 3.0  # times as fast: no steps are needed to see it


class Clock:
    """What backward() computes until gradients are ready: without the time of the hook itself."""

    def __init__(self) -> None:
        self.ready_s: dict[str, float] = {}  # by weight
        self.others: dict[str, int] = {}  # elements of others since the weight before
        self.backward_s = 0.0
        self._began: float | None = None
        self._started = 0.0
        self._paused = 0.0
        self._elements = 0

    def start(self) -> None:
        """backward() has begun, if it had not."""
        if self._began is None:
            self.__init__()  # type: ignore[misc]
            self._began = self._started = time.perf_counter()

    @property
    def span_s(self) -> float:
        """Since backward() began: with the time of the hook."""
        return time.perf_counter() - self._started

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


class Trial:
    """Whether steps with factors are as fast as they were to be: against whole gradients.

    If they are not clearly faster than the step before them, whose memory was new, some steps with
    whole gradients follow, and the faster ones are for good. All ranks are told the same times, so
    they come to the same verdict.
    """

    def __init__(self) -> None:
        self.is_whole = False  # these steps are to have whole gradients
        self.is_over = False
        self._told = 0
        self._whole: list[float] = []
        self._factors: list[float] = []

    def add(self, seconds: float) -> None:
        """Of a step; the first is the last one with whole gradients. May begin or end a part."""
        self._told += 1
        if self._told == 1:
            self._whole = [seconds]
        elif self._told == 2:
            pass  # its memory and connections are new
        elif len(self._factors) < TRIED + self.is_whole:  # one is under way when a part ends
            self._factors.append(seconds)
            if len(self._factors) == TRIED and not self.is_whole:
                self.is_over = _CLEARLY * self.factors_s < self.whole_s
                self.is_whole = not self.is_over
                self._whole = self._whole if self.is_over else []
        else:
            self._whole.append(seconds)
            if len(self._whole) == TRIED:
                self.is_over = True
                self.is_whole = self.whole_s <= self.factors_s

    @property
    def factors_s(self) -> float:
        return statistics.median(self._factors)

    @property
    def whole_s(self) -> float:
        return statistics.median(self._whole)
