"""Carries out what a tuner decides, on a job whose losses it hears."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from phub._decisions import Decisions, Discard, Event, Fork, Request, Run
from phub._trials import Course, judge
from phub.errors import NotFoundError


class Job(Protocol):
    """What a driver does with a job: of a `Worker`, or of the box by HTTP."""

    def fork(
        self,
        parent: int,
        hyper: Mapping[str, float] | None,
        round: int,  # noqa: A002
    ) -> tuple[int, int]:
        """As `Worker.fork`."""

    def schedule(self, *turns: int | tuple[int, int], round: int) -> int:  # noqa: A002
        """As `Worker.schedule`."""

    def discard(self, branch: int, round: int) -> int:  # noqa: A002
        """As `Worker.discard`."""


class Driver:
    """Hears the losses of a job's rounds, and has its branches do what follows from them.

    Some branch runs in every round. Where a decision comes rounds after the loss that it follows
    from, the rounds in between count as what they were: their losses are those of the branch that
    ran. When that one is to be discarded, the latest of the others runs until the next one is
    there.
    """

    def __init__(
        self,
        job: Job,
        decisions: Decisions,
        branch: int,
        report: Callable[[Event], None] | None = None,
        there: Collection[int] = (),
    ) -> None:
        """branch: that runs when all is done that was decided. there: those that there are."""
        self._job, self._report = job, report
        self._had: set[int] = set()  # branches, also some that it has discarded
        self._begin(decisions, branch, [(0, branch)], max([branch, *there]))

    def _begin(
        self, decisions: Decisions, branch: int, runs: Sequence[tuple[int, int]], newest: int
    ) -> None:
        self.decisions = decisions
        self.done = False  # decisions.why says why
        self.branch = branch  # that runs when all is done that was decided
        self._newest = newest  # branches up to it are not forked by this driver, but for _alive
        self._alive = {branch}
        self._had.add(branch)
        self._runs = [*runs]  # (from this round on, this branch)
        self._heard: dict[int, list[tuple[int, float]]] = {}  # by branch, and not told yet
        self._run = Run(branch, 1)  # only then it may fork
        self._since = runs[-1][0]  # the round from which all holds that was decided
        decisions.safe = branch
        self._begin_search(branch)
        self._requests = decisions.requests(branch)

    def _begin_search(self, root: int) -> None:
        self._root, self._searches = root, self.decisions.searches
        self._diverged, self._turn = [*self.decisions.diverged], self.decisions.turn()
        self._course: list[tuple[Any, list[Any]]] = []  # answers, and the next request

    def branch_in(self, round: int) -> int:  # noqa: A002
        """Which branch runs in a round that has begun, as far as this driver knows."""
        while len(self._runs) > 1 and self._runs[1][0] <= round:
            self._runs.pop(0)
        return self._runs[0][1]

    def hear(self, round: int, branch: int, loss: float) -> None:  # noqa: A002
        """The loss of a round, in which this branch ran. Rounds ascend."""
        if branch in self._alive and not self.done:
            self._heard.setdefault(branch, []).append((round, float(loss)))

    def decide(self, soonest: int = 0) -> None:
        """What follows from what was heard holds from round `soonest` on, or later; 0: soon."""
        while not self.done:
            heard = self._heard.get(self._run.branch, [])
            # The last loss is of a round before which every copy was made: it tells of them, too.
            if len(heard) < self._run.clocks or heard[-1][0] < self._since:
                return
            del self._heard[self._run.branch]
            rounds, losses = [at for at, _ in heard], [loss for _, loss in heard]
            self._told(rounds[-1], self._run, rounds=rounds, losses=losses)
            self._until_run(losses if self._course else None, soonest)

    def stop(self) -> None:
        """No more is tried: the best branch runs on, and others that it made are discarded."""
        self.done = True
        keep = self._best_alive()
        self._switch(keep, 0)
        for branch in sorted(self._alive - {keep}):
            with contextlib.suppress(NotFoundError):  # somebody else has discarded it
                self._do(Discard(branch), 0)

    def is_driven_by_others(self, round: int, branch: int) -> bool:  # noqa: A002
        """Whether this branch ran in a round for which this driver had scheduled another."""
        return 0 < self._since <= round and branch != self.branch

    def state_dict(self) -> dict[str, Any]:
        """What it knows after the latest round that it heard of.

        Since its search began, or the turn of its population.
        """
        return {
            "root": self._root,
            "turn": self._turn,
            "diverged": self._diverged,
            "course": self._course,
            "safe": self.decisions.safe,
            "newest": self._newest,
            "branch": self.branch,
            "alive": sorted(self._alive),
            "runs": self._runs,
            "heard": self._heard,
            "since": self._since,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], there: Collection[int], runs: Sequence[tuple[int, int]]
    ) -> None:
        """Goes on from a state, with a job that has gone on from its checkpoint of that round.

        there, runs: the job's branches, and from which round on which runs. The checkpoint may have
        what was decided a little later: that is undone, and will be decided again. Where it lacks
        a branch because of that, or what is tried or by what is decided is not what it was, a new
        search begins.
        """
        self._alive, self._newest = {*state["alive"]}, state["newest"]
        self._had |= self._alive
        self.decisions = self.decisions.afresh(state["diverged"])
        self.decisions.safe = state["safe"]
        if not self._alive <= {*there} or not self._replays(state):
            self._alive, self.decisions.safe = {*state["alive"]}, state["safe"]
            self.begin_anew(self._job, there, runs)
            return
        if self.branch != runs[-1][1]:
            self._runs = _with(runs, self._job.schedule(self.branch, round=0), self.branch)
            self._since = self._runs[-1][0]
        for branch in there:
            if branch > self._newest:
                self._job.discard(branch, round=0)

    def begin_anew(self, job: Job, there: Collection[int], runs: Sequence[tuple[int, int]]) -> None:
        """With a new search, from what is safe; others that it made are discarded.

        That is where the search began, or a copy of the best that has run a while. If it is gone,
        it is the branch that runs.
        """
        running = runs[-1][1]
        root = self.decisions.safe if self.decisions.safe in there else running
        if root != running:
            runs = _with(runs, job.schedule(root, round=0), root)
        for branch in there:
            # What it had discarded may be there again.
            if branch != root and (branch in self._had or branch > self._newest):
                job.discard(branch, round=0)
        self._had &= {*there}  # others may get the numbers of those that are gone
        self._job = job
        diverged = self.decisions.diverged
        self._begin(self.decisions.afresh(diverged), root, runs, max(there))

    def _best_alive(self) -> int:
        """The best of the last search, unless it diverges; else what is safe."""
        best, safe = self.decisions.best, self.decisions.safe
        if best is None or best.branch not in self._alive:
            return safe
        heard = [loss for _, loss in self._heard.get(best.branch, [])]
        diverges = judge([*best.losses, *heard], best.start).course is Course.DIVERGED
        return safe if diverges else best.branch

    def _replays(self, state: Mapping[str, Any]) -> bool:
        """Whether it decides the same again."""
        decisions = self.decisions.afresh(state["diverged"], state.get("turn"))
        self._begin(decisions, state["root"], state["runs"], state["newest"])
        for answer, request in state["course"]:
            made = self._sent(answer)
            if _plain(made) != request:
                return False
            self._run = made if isinstance(made, Run) else self._run
        self.branch, self._alive = state["branch"], {*state["alive"]}
        self._since = state["since"]
        self._runs = [(at, branch) for at, branch in state["runs"]]
        self._heard = {of: [(at, loss) for at, loss in each] for of, each in state["heard"].items()}
        return True

    def _sent(self, answer: Any) -> Request | None:
        """The next request; None: it is done."""
        try:
            request = self._requests.send(answer)
        except StopIteration:
            request, self.done = None, True
        if self._searches != self.decisions.searches:  # replayed, it begins here
            self._begin_search(self.decisions.safe)
            answer = None
        self._course.append((answer, _plain(request)))
        return request

    def _until_run(self, answer: Any, soonest: int) -> None:
        while True:
            request = self._sent(answer)
            if request is None:
                return self._switch(max(self._alive), soonest)
            if isinstance(request, Run):
                self._run = request
                return self._switch(request.branch, soonest)
            answer = self._do(request, soonest)

    def _do(self, request: Fork | Discard, soonest: int) -> int | None:
        if isinstance(request, Fork):
            branch, at = self._job.fork(request.parent, request.values, round=soonest)
            self._alive.add(branch)
            self._had.add(branch)
            self._newest = max(self._newest, branch)
            self._since = at
            self._told(at, request, branch=branch)
            return branch
        self._alive.remove(request.branch)
        self._heard.pop(request.branch, None)
        if request.branch == self.branch:
            self._switch(max(self._alive), soonest)
        at = self._job.discard(request.branch, round=soonest)
        self._told(at, request)
        return None

    def _switch(self, branch: int, soonest: int) -> None:
        if branch == self.branch:
            return
        at = self._job.schedule(branch, round=soonest)
        self.branch, self._since = branch, at
        self._runs = _with(self._runs, at, branch)

    def _told(self, at: int, request: Request, **more: Any) -> None:
        if self._report:
            self._report(Event(at, request, **more))


def _with(runs: Sequence[tuple[int, int]], at: int, branch: int) -> list[tuple[int, int]]:
    """From round `at` on this branch runs."""
    return [run for run in runs if run[0] < at] + [(at, branch)]


def _plain(request: Request | None) -> list[Any]:
    """As it is saved."""
    if isinstance(request, Fork):
        values = {name: float(value) for name, value in request.values.items()}
        return ["fork", request.parent, values]
    if isinstance(request, Run):
        return ["run", request.branch, request.clocks]
    return ["discard", request.branch] if request else ["done"]
