"""Finds hyperparameters while a model trains: branches try values, and the best one goes on.

As described in Cui, Exploiting Characteristics of Machine Learning Applications for Efficient
Parameter Servers, section 5, with the decisions of MLtuner (Cui et al. 2018, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from phub._search import Between, Search, Space, Values, grid, sampled, tpe
from phub._trials import Course, Verdict, judge
from phub.errors import InvalidError
from phub.worker import Worker

__all__ = [
    "COMPARE",
    "Between",
    "Decisions",
    "Discard",
    "Event",
    "Fork",
    "Policy",
    "Run",
    "Search",
    "Space",
    "Trial",
    "Tuner",
    "Values",
    "Verdict",
    "grid",
    "sampled",
    "tpe",
]


@dataclass(frozen=True)
class Fork:
    """A new branch with the parent's state and these values beside its own. Answer: its number."""

    parent: int
    values: Values


@dataclass(frozen=True)
class Run:
    """The branch runs so many clocks. Answer: the loss in each."""

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

    round: int  # in which it was decided; it holds from the next one
    request: Request
    branch: int | None = None  # of a Fork
    losses: Sequence[float] = ()  # of a Run that is over


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

_LIKE_THE_BEST = 5  # so many trials, within
_LIKENESS = 0.1  # of the best speed, end a search
_LAST_ROUND = 1 << 63  # when all is done that was decided


@dataclass
class Policy:
    """What a tuner decides by.

    first_clocks: of a trial, doubled until one converges, up to most_clocks.
    branches: that exist at a time, the parent among them; at least 3. While the time of a trial is
        not found, all that were tried stay, but for the worst, if they are too many.
    slice_clocks: that a branch runs before the next one does, while several run; 0: as long as it
        has to.
    compare: "speed": by penalised slopes; "loss": the lowest.
    window: clocks of the best branch between two looks for a plateau.
    plateau: so many windows in a row without a loss that is lower by `improvement`, relative, than
        the lowest before, begin a new search.
    """

    first_clocks: int = 10
    most_clocks: int = 640
    branches: int = 4
    slice_clocks: int = 0
    compare: str = "speed"
    window: int = 50
    plateau: int = 3
    improvement: float = 1e-3

    def check(self) -> None:
        """Raises InvalidError."""
        least = {"first_clocks": 2, "branches": 3, "window": 1, "plateau": 1, "slice_clocks": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise InvalidError(
                    f"{name} of a tuner: at least {value}, not {getattr(self, name)}"
                )
        if self.most_clocks < self.first_clocks:
            raise InvalidError(
                f"most_clocks, {self.most_clocks}, are fewer than first_clocks, {self.first_clocks}"
            )
        if self.compare not in COMPARE:
            raise InvalidError(f"a tuner cannot compare by '{self.compare}': {', '.join(COMPARE)}")


class Decisions:
    """What a tuner does next, whoever does it.

    `requests` is a generator of `Request`s, which is sent their answers. It ends when a search
    finds no branch that converges: the model has converged, or no values are good.
    """

    def __init__(self, policy: Policy, search: Callable[[], Search]) -> None:
        """search: makes a new one for every search."""
        policy.check()
        self._policy, self._search = policy, search
        self._compare = COMPARE[policy.compare]
        self.trials: list[Trial] = []  # of the search in progress, or of the last one
        self.best: Trial | None = None  # of the last one

    def requests(self, root: int = 0) -> Requests:
        """From a branch that exists, whose values are not tried."""
        parent = root
        while best := (yield from self._search_from(parent)):
            self.best = best
            yield Discard(parent)
            parent = yield from self._until_plateau(best)

    def _search_from(self, parent: int) -> Generator[Request, Any, Trial | None]:
        policy, search = self._policy, self._search()
        self.trials = []
        alive: list[Trial] = []
        clocks, found = policy.first_clocks, False
        while not self._alike() and (values := search.propose()) is not None:
            trial = Trial((yield Fork(parent, values)), values)
            self.trials.append(trial)
            alive.append(trial)
            yield from self._up_to(clocks, alive)
            search.tell(values, trial.verdict.speed)
            found = found or _converges(alive)
            yield from self._keep(1 if found else policy.branches - 2, alive)
            if not found and alive:
                clocks = min(2 * clocks, policy.most_clocks)
        if not found:
            yield from self._up_to(policy.most_clocks, alive)
        best = max(alive, key=self._worth) if _converges(alive) else None
        yield from self._keep(1 if best else 0, alive)
        return best

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
        while late := [each for each in alive if len(each.losses) < clocks and _lives(each)]:
            for trial in late:
                left = clocks - len(trial.losses)
                turn = min(left, self._policy.slice_clocks or left)
                trial.losses += yield Run(trial.branch, turn)
        self._start_alike()

    def _start_alike(self) -> None:
        """The first loss of each is that of their parent, on other data."""
        firsts = [trial.losses[0] for trial in self.trials if math.isfinite(trial.losses[0])]
        for trial in self.trials:
            trial.start = sum(firsts) / len(firsts) if firsts else None

    def _keep(self, number: int, alive: list[Trial]) -> Requests:
        """Of those that did not diverge, the best."""
        ordered = sorted(filter(_lives, alive), key=self._worth, reverse=True)[:number]
        for trial in alive:
            if trial not in ordered:
                yield Discard(trial.branch)
        alive[:] = ordered

    def _until_plateau(self, best: Trial) -> Generator[Request, Any, int]:
        """Returns the branch to go on from: this one, or, if it diverged, as it was at its best."""
        kept: int = yield Fork(best.branch, {})
        lowest, worse = best.verdict.loss, 0
        while worse < self._policy.plateau:
            losses = yield Run(best.branch, self._policy.window)
            best.losses += losses
            if not _lives(best):
                yield Discard(best.branch)
                return kept
            mean = sum(losses) / len(losses)
            worse += 1
            if mean < lowest - self._policy.improvement * abs(lowest):
                lowest, worse = mean, 0
                yield Discard(kept)
                kept = yield Fork(best.branch, {})
        yield Discard(kept)
        return best.branch


def _lives(trial: Trial) -> bool:
    return trial.verdict.course is not Course.DIVERGED


def _converges(trials: list[Trial]) -> bool:
    return any(trial.verdict.course is Course.CONVERGING for trial in trials)


class Tuner:
    """Drives the branches of a job from within one rank's training.

        tuner = Tuner(optimizer.worker, lambda: grid({"lr": Between(1e-5, 1)}))
        for batch in data:
            loss = model(batch)
            tuner.step(loss.item())  # before the first push of the round
            loss.backward()
            optimizer.step()

    The other ranks train as ever: results bring them the branch that runs next. The job's option
    `branches` is at least the policy's, less one, and its on_nonfinite "pass": with "stop" a branch
    that diverges would end it. What ranks keep themselves, such as the statistics of batch
    normalisation, is not of a branch, and goes on over all of them. What the tuner knows is not
    saved: after a restart a new one begins with the branch that runs.
    """

    def __init__(
        self,
        worker: Worker,
        search: Callable[[], Search],
        policy: Policy | None = None,
        *,
        report: Callable[[Event], None] | None = None,
    ) -> None:
        """Begins with the branch that runs, and its next round.

        search: makes what proposes values, anew for every search: `grid`, `sampled`, `tpe`, or
            whatever has their methods.
        report: is told everything that is done.
        Raises InvalidError: the policy cannot be.
        """
        self._worker = worker
        self._key = worker.keys[0]
        self.decisions = Decisions(policy or Policy(), search)
        self._report = report
        self.done = False  # the last search found nothing
        self.branch = worker.branch_in(_LAST_ROUND)
        self._alive = {self.branch}
        self._requests = self.decisions.requests(self.branch)
        self._run = Run(self.branch, 1)  # only then it may fork
        self._from, self._losses = 0, list[float]()
        self._begun = False

    def step(self, loss: float) -> None:
        """The loss of the round that this rank pushes next, of which it has pushed nothing."""
        at = self._worker.round(self._key) + 1
        # An optimizer's own values go out with the first round.
        if self.done or at < max(self._from, 2):
            return None
        self._losses.append(loss)
        if len(self._losses) < self._run.clocks:
            return None
        answer: Any = self._losses if self._begun else None
        self._begun = True
        self._told(at, self._run, losses=self._losses)
        while True:
            try:
                request = self._requests.send(answer)
            except StopIteration:
                self.done = True
                return self._switch(min(self._alive), at + 1)
            answer = self._do(request, at)
            if isinstance(request, Run):
                return None

    def _do(self, request: Request, at: int) -> int | None:
        if isinstance(request, Run):
            self._run, self._losses = request, []
            self._switch(request.branch, at + 1)
            return None
        if isinstance(request, Discard):
            self._alive.remove(request.branch)
            if request.branch == self.branch:
                self._switch(min(self._alive), at + 1)
            self._worker.discard(request.branch, at + 1)
            self._told(at, request)
            return None
        branch, _ = self._worker.fork(request.parent, request.values, at + 1)
        self._alive.add(branch)
        self._told(at, request, branch=branch)
        return branch

    def _switch(self, branch: int, at: int) -> None:
        if branch != self.branch:
            at = self._worker.schedule(branch, round=at)
        self.branch, self._from = branch, at

    def _told(self, at: int, request: Request, **more: Any) -> None:
        if self._report:
            self._report(Event(at, request, **more))
