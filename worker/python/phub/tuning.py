"""Finds hyperparameters while a model trains: branches try values, and the best one goes on.

As described in Cui, Exploiting Characteristics of Machine Learning Applications for Efficient
Parameter Servers, section 5, with the decisions of MLtuner (Cui et al. 2018, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from phub._by_branch import ByBranch
from phub._climb import climb
from phub._decisions import (
    COMPARE,
    SCHEDULE,
    Decisions,
    Discard,
    Event,
    Fork,
    Policy,
    Run,
    Trial,
)
from phub._driver import Driver, Job
from phub._population import Population, decisions_of
from phub._search import Between, Search, Space, Values, grid, sampled, tpe
from phub._trials import Verdict
from phub.worker import Worker

__all__ = [
    "COMPARE",
    "SCHEDULE",
    "Between",
    "ByBranch",
    "Decisions",
    "Discard",
    "Driver",
    "Event",
    "Fork",
    "Job",
    "Policy",
    "Population",
    "Run",
    "Search",
    "Space",
    "Trial",
    "Tuner",
    "Values",
    "Verdict",
    "climb",
    "grid",
    "sampled",
    "tpe",
]

_LAST_ROUND = 1 << 63  # when all is done that was decided


class Tuner:
    """Drives the branches of a job from within one rank's training.

        tuner = Tuner(optimizer.worker, lambda: climb({"lr": Between(1e-5, 1)}))
        for batch in data:
            loss = model(batch)
            tuner.step(loss.item())  # before the first push of the round
            loss.backward()
            optimizer.step()

    The other ranks train as ever: results bring them the branch that runs next. The job's option
    `branches` is at least the policy's, less one, and its on_nonfinite "pass": with "stop" a branch
    that diverges would end it. What ranks keep themselves, such as the statistics of batch
    normalisation, goes on over all branches, unless the steps are counted with
    `DistributedOptimizer.steps`, or `ByBranch` keeps it. Given to `steps`, on the rank that has it,
    the tuner is saved with the job, and goes on where the job does:

        for step in optimizer.steps(n, tuner=tuner):
    """

    of_all_branches = True

    def __init__(
        self,
        worker: Worker,
        search: Callable[[], Search],
        policy: Policy | None = None,
        *,
        report: Callable[[Event], None] | None = None,
    ) -> None:
        """Begins with the branch that runs, and its next round.

        search: makes what proposes values, anew for every search: `climb`, `grid`, `sampled`,
            `tpe`, or whatever has their methods. Or a `Population`, which does not search.
        report: is told everything that is done.
        Raises InvalidError: the policy cannot be.
        """
        self._worker = worker
        self._key = worker.keys[0]
        decisions = decisions_of(policy or Policy(), search)
        there = [each.branch for each in worker.branches()]
        self._driver = Driver(worker, decisions, worker.branch_in(_LAST_ROUND), report, there)

    @property
    def decisions(self) -> Decisions:
        """What was tried in the last search, and the best."""
        return self._driver.decisions

    @property
    def done(self) -> bool:
        """Whether it has ended, and the best goes on: `decisions.why` says why."""
        return self._driver.done

    @property
    def branch(self) -> int:
        """That runs when all is done that was decided."""
        return self._driver.branch

    def step(self, loss: float) -> None:
        """The loss of the round that this rank pushes next, of which it has pushed nothing."""
        at = self._worker.round(self._key) + 1
        if at < 2:  # an optimizer's own values go out with the first round
            return
        self._driver.hear(at, self._driver.branch_in(at), loss)
        self._driver.decide(at + 1)

    def state_dict(self) -> dict[str, Any]:
        """What it knows."""
        return self._driver.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The same, in a job that has gone on from its checkpoint of that round.

        Branches that were forked since are discarded, and what was decided since is decided again.
        """
        there = [each.branch for each in self._worker.branches()]
        self._driver.load_state_dict(state_dict, there, self._worker.branch_runs())
