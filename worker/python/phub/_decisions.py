"""What a tuner does next: which branches it forks, runs and discards, by their losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phub._search import Search, Values
from phub._trials import WINDOW_CLOCKS, Course, Verdict, judge
from phub.errors import InvalidError


@dataclass(frozen=True)
class Fork:
    """A new branch with the parent's state and these values beside its own. Answer: its number."""

    parent: int
    values: Values


@dataclass(frozen=True)
class Run:
    """The branch runs so many clocks, or more. Answer: the loss in each, since the last answer."""

    branch: int
    clocks: int


@dataclass(frozen=True)
class Discard:
    """The branch is not needed any more."""

    branch: int


Request = Fork | Run | Discard


@dataclass(frozen=True)
class Event:
    """What a tuner has done."""

    round: int  # from which it holds; of a Run, which is over, the last
    request: Request
    branch: int | None = None  # of a Fork
    rounds: Sequence[int] = ()  # of a Run: in which the branch ran, and was not asked about before
    losses: Sequence[float] = ()  # in these


Requests = Generator[Request, Any, Any]


@dataclass
class Trial:
    """A branch that was forked for values."""

    branch: int
    values: Values
    losses: list[float] = field(default_factory=list)

    start: float | None = None  # the loss of its parent

    @property
    def verdict(self) -> Verdict:
        """On its losses so far."""
        return judge(self.losses, self.start)


# How branches are compared: the larger is better.
Compare = Callable[[Verdict], float]
COMPARE: dict[str, Compare] = {
    "speed": lambda verdict: verdict.speed,
    "loss": lambda verdict: -verdict.loss,
}

# In which turns trials run until each has run so many clocks: (trial, clocks), one after another.
# As long as some are left, it is asked again.
Schedule = Callable[[Sequence[Trial], int, "Policy"], "Sequence[tuple[Trial, int]]"]
SCHEDULE: dict[str, Schedule] = {
    "whole": lambda late, clocks, _: [(trial, clocks - len(trial.losses)) for trial in late],
    "slices": lambda late, clocks, policy: [
        (trial, min(clocks - len(trial.losses), policy.slice_clocks)) for trial in late
    ],
}

LEAST_BRANCHES = 3  # of a tuner
_MOST_LOSSES = 640  # that are kept of the best
_LIKE_THE_BEST = 5  # so many trials, within
_LIKENESS = 0.1  # of the best speed, end a search
_ROUND = 3  # so many trials without one that converges double their time
_RIVALS = 2  # run on when all were tried, if the slower one has
_RIVALRY = 0.5  # of the speed of the faster one
_GLANCE = 3  # clocks of a trial between two looks whether it diverges, unless it rises


@dataclass
class Policy:
    """What a tuner decides by.

    first_clocks: of a trial, doubled after every third trial until one converges, up to
        most_clocks.
    branches: that exist at a time, the parent among them; at least 3. While the time of a trial is
        not found, all that were tried stay, but for the worst, if they are too many; then the two
        best, which run as long again when all were tried, if the second has half the speed.
    schedule: while several run, "whole": each as long as it has to; "slices": in turns of
        slice_clocks. Others may be added to SCHEDULE.
    compare: "speed": by penalised slopes; "loss": the lowest. Others may be added to COMPARE.
    window: clocks of the best branch between two looks for a plateau.
    plateau: so many windows in a row without a loss that is lower by `improvement`, relative, than
        the lowest before, begin a new search.
    """

    first_clocks: int = 9
    most_clocks: int = 640
    branches: int = 4
    schedule: str = "whole"
    slice_clocks: int = 10
    compare: str = "speed"
    window: int = 50
    plateau: int = 3
    improvement: float = 1e-3

    def check(self) -> None:
        """Raises InvalidError."""
        least = {
            "first_clocks": 2,
            "branches": LEAST_BRANCHES,
            "window": 1,
            "plateau": 1,
            "slice_clocks": 1,
        }
        for name, value in least.items():
            if getattr(self, name) < value:
                raise InvalidError(
                    f"{name} of a tuner: at least {value}, not {getattr(self, name)}"
                )
        if self.most_clocks < self.first_clocks:
            raise InvalidError(
                f"most_clocks, {self.most_clocks}, are fewer than first_clocks, {self.first_clocks}"
            )
        if not 0 <= self.improvement < math.inf:
            raise InvalidError(f"improvement of a tuner: not below 0, not {self.improvement}")
        if self.compare not in COMPARE:
            raise InvalidError(f"a tuner cannot compare by '{self.compare}': {', '.join(COMPARE)}")
        if self.schedule not in SCHEDULE:
            raise InvalidError(f"a tuner has no schedule '{self.schedule}': {', '.join(SCHEDULE)}")


class Decisions:
    """What a tuner does next, whoever does it.

    `requests` is a generator of `Request`s, which is sent their answers. It ends when a search
    finds no branch that converges: the model has converged, or no values are good. Then `why` says
    it.
    """

    why = "a search found nothing that converges"

    def __init__(self, policy: Policy, search: Callable[[], Search]) -> None:
        """search: makes a new one for every search."""
        policy.check()
        self._policy, self._new_search = policy, search
        self._compare, self._schedule = COMPARE[policy.compare], SCHEDULE[policy.schedule]
        self.trials: list[Trial] = []  # of the search in progress, or of the last one
        self.best: Trial | None = None  # of the last one
        self.diverged: list[Values] = []  # that were the best, until then
        self.searches = 0
        self.safe = 0  # the branch to go back to if all others were gone

    def afresh(
        self,
        diverged: Sequence[Values] = (),
        turn: Mapping[str, Any] | None = None,  # noqa: ARG002
    ) -> Decisions:
        """Others by the same policy, which have decided nothing yet, or no more than `turn`."""
        made = Decisions(self._policy, self._new_search)
        made.diverged = [*diverged]
        return made

    def turn(self) -> dict[str, Any] | None:
        """When `searches` has grown: what all that follows depends on. None: on `safe` alone.

        Beside what diverged.
        """
        return None

    def requests(self, root: int = 0) -> Requests:
        """From a branch that exists, whose values are not tried."""
        self.safe = root
        while best := (yield from self._search_from(self.safe)):
            self.best = best
            self.safe = yield from self._until_plateau(best, self.safe)

    def _search_from(self, parent: int) -> Generator[Request, Any, Trial | None]:
        policy, search = self._policy, self._new_search()
        self.searches += 1
        self.trials = []
        alive: list[Trial] = []
        clocks = policy.first_clocks
        while not self._alike() and (values := self._proposed(search)) is not None:
            trial = Trial((yield Fork(parent, values)), values)
            self.trials.append(trial)
            alive.append(trial)
            yield from self._tell_of(clocks, alive, search)
            if not _converges(alive) and len(self.trials) % _ROUND == 0:
                clocks = min(2 * clocks, policy.most_clocks)
                yield from self._tell_of(clocks, alive, search)
            room = policy.branches - 2
            yield from self._keep(min(_RIVALS, room) if _converges(alive) else room, alive)
        while not _converges(alive) and clocks < policy.most_clocks:
            clocks = min(2 * clocks, policy.most_clocks)
            yield from self._up_to(clocks, alive)
        return (yield from self._winner(clocks, alive))

    def _tell_of(self, clocks: int, alive: list[Trial], search: Search) -> Requests:
        yield from self._up_to(clocks, alive)
        for trial in alive:
            search.tell(trial.values, trial.verdict.speed)

    def _winner(self, clocks: int, alive: list[Trial]) -> Generator[Request, Any, Trial | None]:
        """The best, if one converges: of those that come near it, after as long a time again."""
        best = max(alive, key=self._worth) if _converges(alive) else None
        least = _RIVALRY * best.verdict.speed if best else math.inf
        near = sum(trial is best or trial.verdict.speed >= least for trial in alive)
        yield from self._keep(min(near, _RIVALS), alive)
        if len(alive) > 1:
            yield from self._run_on(min(2 * clocks, self._policy.most_clocks), *alive)
            yield from self._keep(1, alive)
        return alive[0] if alive else None

    def _run_on(self, clocks: int, first: Trial, second: Trial) -> Requests:
        """Both run so long; by speed, the slower one as long as it may still overtake the other."""
        if self._policy.compare != "speed":  # anything else may grow with the clocks
            yield from self._up_to(clocks, [first, second])
            return
        yield from self._up_to(clocks, [first])
        while lives(second) and len(second.losses) < clocks and may_overtake(second, first):
            yield from run_until(second, min(clocks, len(second.losses) + _GLANCE))

    def _proposed(self, search: Search) -> Values | None:
        while (values := search.propose()) is not None and values in self.diverged:
            search.tell(values, -math.inf)
        return values

    def _alike(self) -> bool:
        """The best speeds differ little: more trials would not find much better ones."""
        speeds = sorted((trial.verdict.speed for trial in self.trials), reverse=True)
        if len(speeds) < _LIKE_THE_BEST:
            return False
        return speeds[_LIKE_THE_BEST - 1] > (1 - _LIKENESS) * speeds[0]

    def _worth(self, trial: Trial) -> tuple[bool, float]:
        verdict = trial.verdict
        return verdict.course is Course.CONVERGING, self._compare(verdict)

    def _up_to(self, clocks: int, alive: list[Trial]) -> Requests:
        """All have run so long, but for those that diverged."""
        while late := [each for each in alive if len(each.losses) < clocks and lives(each)]:
            for trial, turn in self._schedule(late, clocks, self._policy):
                yield from run_until(trial, len(trial.losses) + turn)
        self._start_alike()

    def _start_alike(self) -> None:
        """The first loss of each is that of their parent, on other data."""
        firsts = [trial.losses[0] for trial in self.trials if math.isfinite(trial.losses[0])]
        for trial in self.trials:
            trial.start = sum(firsts) / len(firsts) if firsts else None

    def _keep(self, number: int, alive: list[Trial]) -> Requests:
        """Of those that did not diverge, the best."""
        ordered = sorted(filter(lives, alive), key=self._worth, reverse=True)[:number]
        for trial in alive:
            if trial not in ordered:
                yield Discard(trial.branch)
        alive[:] = ordered

    def _until_plateau(self, best: Trial, before: int) -> Generator[Request, Any, int]:
        """Returns the branch to go on from: this one, or, if it diverges, one of earlier.

        before: what the best was forked from. A copy is gone back to only when the best has run a
        window after it: what was copied may have been about to diverge.
        """
        safe, copy = before, (yield Fork(best.branch, {}))
        lowest, worse = best.verdict.loss, 0
        while worse < self._policy.plateau:
            losses = yield Run(best.branch, self._policy.window)
            best.losses = [*best.losses, *losses][-_MOST_LOSSES:]
            if not lives(best):
                self.diverged.append(best.values)
                yield from self._drop(copy, best.branch)
                return safe
            if copy is not None:
                before, safe, copy = safe, copy, None
                self.safe = safe
                yield Discard(before)
            mean = sum(losses) / len(losses)
            worse += 1
            if mean < lowest - self._policy.improvement * abs(lowest):
                lowest, worse = mean, 0
                copy = yield Fork(best.branch, {})
        self.safe = best.branch
        yield from self._drop(copy, safe)
        return best.branch

    def _drop(self, *branches: int | None) -> Requests:
        for branch in branches:
            if branch is not None:
                yield Discard(branch)


def run_until(trial: Trial, clocks: int) -> Requests:
    """It has run so many; no longer than until it is seen to diverge."""
    while len(trial.losses) < clocks and lives(trial):
        left = clocks - len(trial.losses)
        trial.losses += yield Run(trial.branch, min(_glance(trial.losses), left))


def _glance(losses: Sequence[float]) -> int:
    """Clocks until it is looked whether it diverges."""
    if not losses:
        return _GLANCE + 1  # the first loss is its parent's
    return _GLANCE if losses[-1] <= losses[0] else 1


def may_overtake(late: Trial, ahead: Trial) -> bool:
    """Whether it would be the faster one after as long a time.

    If it fell on as fast as lately, or as it has all in all, without noise.
    """
    losses, size = late.losses, WINDOW_CLOCKS
    start = losses[0] if late.start is None else late.start
    fall = start - late.verdict.loss
    by_clock = fall / len(losses)
    if len(losses) >= 2 * size:
        lately = (sum(losses[-2 * size : -size]) - sum(losses[-size:])) / size**2
        by_clock = max(by_clock, lately)
    left = len(ahead.losses) - len(losses)
    return fall + by_clock * left > ahead.verdict.speed * len(ahead.losses)


def lives(trial: Trial) -> bool:
    """Whether it did not diverge."""
    return trial.verdict.course is not Course.DIVERGED


def _converges(trials: list[Trial]) -> bool:
    return any(trial.verdict.course is Course.CONVERGING for trial in trials)
