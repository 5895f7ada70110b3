"""How fast a branch learns, from its losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

WINDOWS = 10


class Course(Enum):
    """What the losses do."""

    CONVERGING = "converging"
    UNSTABLE = "unstable"  # what they fall is not much more than what they jump
    DIVERGED = "diverged"  # one is not a finite number


@dataclass(frozen=True)
class Verdict:
    """On a sequence of losses."""

    course: Course
    speed: float  # by which the loss falls in a clock, less the noise; at least 0
    loss: float  # lately


def judge(losses: Sequence[float], start: float | None = None, windows: int = WINDOWS) -> Verdict:
    """Slopes penalised by noise (MLtuner, Cui et al. 2018, section 4.1).

    The losses are averaged in at most so many windows of equal size, which count from the end. The
    noise is the largest rise from one to the next. What falls, falls from `start`, the loss before
    the first step, which is the first one (here the first window is no measure: it is low where the
    loss falls fast).
    """
    if not losses:
        return Verdict(Course.UNSTABLE, 0, math.inf)
    if not all(math.isfinite(loss) for loss in losses):
        return Verdict(Course.DIVERGED, 0, math.inf)
    count = min(windows, len(losses))
    size = len(losses) // count
    first = len(losses) - count * size
    means = [sum(losses[at : at + size]) / size for at in range(first, len(losses), size)]
    fall = (losses[0] if start is None else start) - means[-1]
    noise = max((later - earlier for earlier, later in pairwise(means)), default=0.0)
    noise = max(0.0, noise)
    converging = fall > 0 and noise * count < fall
    speed = max(0.0, fall - noise) / len(losses)
    return Verdict(Course.CONVERGING if converging else Course.UNSTABLE, speed, means[-1])
