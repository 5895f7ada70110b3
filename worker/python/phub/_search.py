"""Which hyperparameters are tried next."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phub.errors import InvalidError

_MOST_ROWS = 100_000  # of a grid, and trials of others


@dataclass(frozen=True)
class Between:
    """A range of values, of which equal ratios (or, not logarithmic, differences) count equally."""

    low: float
    high: float
    logarithmic: bool = True

    def __post_init__(self) -> None:
        finite = math.isfinite(self.low) and math.isfinite(self.high)
        if not finite or self.low >= self.high or (self.logarithmic and self.low <= 0):
            raise InvalidError(
                f"a search cannot go from {self.low} to {self.high}: the numbers must ascend"
                + (", and ratios need positive ones" if self.logarithmic else "")
            )

    def at(self, part: float) -> float:
        """The value at a part of the way from low, 0, to high, 1."""
        if not self.logarithmic:
            return self.low + part * (self.high - self.low)
        value: float = self.low * (self.high / self.low) ** part
        return min(max(value, self.low), self.high)


# By the name of the hyperparameter: a range, or the values themselves.
Space = Mapping[str, "Between | Sequence[float]"]
Values = dict[str, float]


class Search(Protocol):
    """Proposes values, and is told what became of them."""

    def propose(self) -> Values | None:
        """The values to try next. None: there are no more."""

    def tell(self, values: Values, speed: float) -> None:
        """How fast the loss fell with values that were proposed, the latest word on them.

        0: not more than noise does; below 0: it rose; minus infinity: it diverged.
        """


class _Listed:
    """Values that do not depend on what became of the others."""

    def __init__(self, values: Iterator[Values]) -> None:
        self._values = values

    def propose(self) -> Values | None:
        return next(self._values, None)

    def tell(self, values: Values, speed: float) -> None:
        pass


def grid(space: Space, points: int = 7, seed: int = 0) -> Search:
    """All combinations, in a random order: of each range so many points, from low to high.

    (In ascending order, the first trials would all be too slow to tell anything.)
    """
    check_space(space)
    if points < 2:
        raise InvalidError(f"a grid of {points} points has no ends: at least 2")
    counts = [points if isinstance(given, Between) else len(given) for given in space.values()]
    if math.prod(counts) > _MOST_ROWS:
        raise InvalidError(f"a grid of more than {_MOST_ROWS} combinations: take fewer points")
    columns = [
        [given.at(i / (points - 1)) for i in range(points)] if isinstance(given, Between) else given
        for given in space.values()
    ]
    rows = [dict(zip(space, row, strict=True)) for row in itertools.product(*columns)]
    random.Random(seed).shuffle(rows)
    return _Listed(iter(rows))


def sampled(space: Space, trials: int, seed: int = 0) -> Search:
    """So many independent random draws."""
    check_space(space)
    _check_trials(trials)
    draw = random.Random(seed)

    def rows() -> Iterator[Values]:
        for _ in range(trials):
            yield {name: drawn(given, draw) for name, given in space.items()}

    return _Listed(rows())


def drawn(given: Between | Sequence[float], draw: random.Random) -> float:
    """One of a range, or of a list."""
    return given.at(draw.random()) if isinstance(given, Between) else draw.choice(given)


class _Modelled:
    def __init__(self, space: Space, trials: int, seed: int) -> None:
        try:
            import optuna  # type: ignore[import-not-found,unused-ignore]
        except ImportError as missing:
            raise InvalidError(
                "a search by TPE needs the package optuna: pip install optuna, or search otherwise"
            ) from missing
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(5, trials))
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._space, self._left = space, trials
        self._open: list[tuple[Values, Any]] = []

    def propose(self) -> Values | None:
        if self._left == 0:
            return None
        self._left -= 1
        trial = self._study.ask()
        values = {
            name: trial.suggest_float(name, given.low, given.high, log=given.logarithmic)
            if isinstance(given, Between)
            else trial.suggest_categorical(name, list(given))
            for name, given in self._space.items()
        }
        self._open.append((values, trial))
        return values

    def tell(self, values: Values, speed: float) -> None:
        for at, (known, trial) in enumerate(self._open):
            if known == values:
                self._study.tell(trial, speed)
                del self._open[at]
                return


def tpe(space: Space, trials: int, seed: int = 0) -> Search:
    """So many draws, by Optuna's tree-structured Parzen estimator from what became of the others.

    Raises InvalidError: Optuna is not installed.
    """
    check_space(space)
    _check_trials(trials)
    return _Modelled(space, trials, seed)


def _check_trials(trials: int) -> None:
    if trials < 1:
        raise InvalidError(f"a search of {trials} trials finds nothing: at least 1")
    if trials > _MOST_ROWS:
        raise InvalidError(f"a search of {trials} trials does not end: at most {_MOST_ROWS}")


def check_space(space: Space) -> None:
    """Raises InvalidError: there is nothing to try."""
    empty = [name for name, given in space.items() if not isinstance(given, Between) and not given]
    if not space or empty:
        raise InvalidError(
            f"nothing can be tried for {empty[0]}" if empty else "a search needs a hyperparameter"
        )
