"""How fast a branch learns, from its losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

WINDOWS = 10  # at most
WINDOW_CLOCKS = 3  # of a window at least
_SURE = 2.0  # standard errors


class Course(Enum):
    """What the losses do."""

    CONVERGING = "converging"
    UNSTABLE = "unstable"  # what they fall is not much more than what they jump
    DIVERGED = "diverged"  # one is not a finite number, or they are twice what they were


@dataclass(frozen=True)
class Verdict:
    """On a sequence of losses."""

    course: Course
    speed: float  # by which the loss falls in a clock, less the noise; below 0: rises
    loss: float  # lately


_DIVERGED = Verdict(Course.DIVERGED, -math.inf, math.inf)


def judge(losses: Sequence[float], start: float | None = None, windows: int = WINDOWS) -> Verdict:
    """Slopes penalised by noise (MLtuner, Cui et al. 2018, section 4.1).

    The losses are averaged in at most so many windows of equal size, which count from the end: in
    fewer where a window would have fewer than WINDOW_CLOCKS. The noise is the largest rise from one
    to the next. What falls, falls from `start`, the loss before the first step, which is the first
    one (here the first window is no measure: it is low where the loss falls fast). With few windows
    some fall by chance, so the standard error of a fall, by how much a loss differs from the next,
    comes off it, too, and what converges has fallen by more than twice as much. Of what diverges
    the last window is twice `start`, and each of the latest losses: one batch may be that bad.
    """
    if not losses:
        return Verdict(Course.UNSTABLE, 0, math.inf)
    if not all(math.isfinite(loss) for loss in losses):
        return _DIVERGED
    count = max(1, min(windows, len(losses) // WINDOW_CLOCKS))
    size = len(losses) // count
    first = len(losses) - count * size
    means = [sum(losses[at : at + size]) / size for at in range(first, len(losses), size)]
    before = losses[0] if start is None else start
    fall = before - means[-1]
    if min(means[-1], *losses[-WINDOW_CLOCKS:]) > before + abs(before):
        return _DIVERGED
    noise = max(0.0, max((later - earlier for earlier, later in pairwise(means)), default=0.0))
    error = _error(losses, size)
    converging = fall > _SURE * error and noise * count < fall
    gain = max(0.0, fall - noise - error) if fall > 0 else min(0.0, fall + error)
    course = Course.CONVERGING if converging else Course.UNSTABLE
    return Verdict(course, gain / len(losses), means[-1])


def _error(losses: Sequence[float], size: int) -> float:
    """The standard error of the difference of two means of so many losses."""
    squares = [(later - earlier) ** 2 / 2 for earlier, later in pairwise(losses)]
    return math.sqrt(2 * sum(squares) / len(squares) / size) if squares else 0.0
