"""A search that goes to what is faster, step by step."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

from phub._search import Between, Search, Space, Values, check_space

_DECADE = 1.0  # a step along a logarithmic range, but at most
_MOST_STEP = 0.25  # of a range
_STEEP = 0.5  # of a speed: a step below has less than that

Proposals = Generator[Values, None, bool]  # returns whether it has moved
Place = dict[str, int]  # of a range how many half steps from its middle, of a list the index


class _Climb:
    def __init__(self, space: Space) -> None:
        self._space = space
        self._at: Place = dict.fromkeys(space, 0)
        self._speeds: dict[tuple[float, ...], float] = {}
        self._proposals = self._walk()

    def propose(self) -> Values | None:
        return next(self._proposals, None)

    def tell(self, values: Values, speed: float) -> None:
        self._speeds[self._key(values)] = speed

    def _walk(self) -> Generator[Values, None, None]:
        """Along one after another; along each again when others have moved since."""
        yield self._values(self._at)
        names = [*self._space]
        left = [*names]
        while left:
            name = left.pop(0)
            if (yield from self._along(name)):
                after = names.index(name) + 1
                left = names[after:] + names[: after - 1]

    def _along(self, name: str) -> Proposals:
        given, began = self._space[name], self._at
        if not isinstance(given, Between):
            for index in range(len(given)):
                yield from self._moves(self._at | {name: index})
            return self._at != began
        while (yield from self._moves(self._beside(name, 2))) or (
            yield from self._moves(self._beside(name, -2))
        ):
            pass
        above, below = (self._speed_beside(name, half_steps) for half_steps in (2, -2))
        # A speed that still rises steeply here rises on, until the loss falls no more. (Seen along
        # learning rates; of any other range it is a guess, which costs a trial.)
        rises = self._speed(self._at) > 0 and below < _STEEP * self._speed(self._at)
        half = 1 if above >= below or (rises and above > -math.inf) else -1
        yield from self._moves(self._beside(name, half))
        return self._at != began

    def _beside(self, name: str, half_steps: int) -> Place:
        return self._at | {name: self._at[name] + half_steps}

    def _speed_beside(self, name: str, half_steps: int) -> float:
        there = self._beside(name, half_steps)
        is_beyond = self._values(there) == self._values(self._at)
        return -math.inf if is_beyond else self._speed(there)

    def _moves(self, there: Place) -> Proposals:
        """To a place that is faster; where neither place shows any speed, to larger values."""
        values, known = self._values(there), self._values(self._at)
        if self._key(values) not in self._speeds:
            yield values
        mine, other = self._speed(self._at), self._speed(there)
        if other > mine or (other == mine == 0 and self._key(values) > self._key(known)):
            self._at = there
            return True
        return False

    def _values(self, place: Place) -> Values:
        return {name: _value(given, place[name]) for name, given in self._space.items()}

    def _key(self, values: Values) -> tuple[float, ...]:
        return tuple(values[name] for name in self._space)

    def _speed(self, place: Place) -> float:
        return self._speeds.get(self._key(self._values(place)), -math.inf)


def _value(given: Any, at: int) -> float:
    if not isinstance(given, Between):
        value: float = given[at]
        return value
    step = _MOST_STEP
    if given.logarithmic:
        step = min(step, _DECADE / math.log10(given.high / given.low))
    return given.at(min(max(0.5 + at * step / 2, 0.0), 1.0))


def climb(space: Space) -> Search:
    """From the middle of each range, or the first of a list, to what is faster.

    By decades of a logarithmic range (at most by a quarter of a range) as long as that is faster,
    first upward, then half a step toward the faster side, or upward where the speed a step below is
    less than half and the loss a step above does not diverge; one hyperparameter after another, and
    again when others have moved since. Of a list each value is tried. A speed is expected to have
    one peak: it grows with a rate until the loss does not fall any more.
    """
    check_space(space)
    return _Climb(space)
