"""A population of branches that learn from each other, in place of a search.

Population based training (Jaderberg et al. 2017, algorithm 1): each member trains with values of
its own for a while, in turn. Then the worst are forked anew from some of the best (exploit), with
values that are a little different (explore), and so on.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phub._decisions import (
    Decisions,
    Discard,
    Fork,
    Policy,
    Requests,
    Trial,
    lives,
    run_until,
)
from phub._search import Between, Search, Space, Values, check_space, drawn, sampled

_MOST_LOSSES = 640  # that are kept of a member
_CUT = 0.2  # of the members are replaced, and so many are copied; at least one
_FACTORS = (0.8, 1.2)  # by which values change
_ANEW = 0.25  # of the values are drawn anew
_PART = 0.1  # of a range that is not by ratios


@dataclass(frozen=True)
class Population:
    """As many members as the policy has branches, less one; each first with random values.

    A member runs `policy.window` clocks in each turn. When `policy.plateau` times as many turns as
    there are members bring no loss that is lower by `policy.improvement`, the best goes on alone.
    Of the policy no more is used. What is drawn follows from the seed and the losses.
    """

    space: Space
    seed: int = 0

    def __post_init__(self) -> None:
        check_space(self.space)

    def __call__(self) -> Search:
        """What the members begin with."""
        return sampled(self.space, 1_000, self.seed)

    def near(self, values: Values, draw: random.Random) -> Values:
        """A little away from these values: ratios by a factor, of a list the next one.

        But some are drawn from the whole range.
        """
        return {name: self._near(given, values[name], draw) for name, given in self.space.items()}

    @staticmethod
    def _near(given: Any, value: float, draw: random.Random) -> float:
        anew, up = draw.random() < _ANEW, draw.random() < 0.5
        if anew:
            return drawn(given, draw)
        if not isinstance(given, Between):
            at = [*given].index(value) + (1 if up else -1)
            found: float = given[min(max(at, 0), len(given) - 1)]
            return found
        if given.logarithmic:
            value *= _FACTORS[up]
        else:
            value += (given.high - given.low) * (_PART if up else -_PART)
        return min(max(value, given.low), given.high)


class PopulationDecisions(Decisions):
    """What is done next, by a population; as `Decisions` in all else."""

    def __init__(self, policy: Policy, population: Population) -> None:
        super().__init__(policy, population)
        self._population = population
        self._draw = random.Random(population.seed)
        self._copy: Trial | None = None  # `safe`, with what it was copied from; None: the root
        self._lowest: float | None = None
        self._worse = 0  # turns since then
        self._goes_on = False  # in a turn that is given

    def afresh(
        self, diverged: Sequence[Values] = (), turn: Mapping[str, Any] | None = None
    ) -> Decisions:
        """Others by the same policy and seed, which have decided nothing yet, or begin a turn."""
        made = PopulationDecisions(self._policy, self._population)
        made.diverged = [*diverged]
        if turn and turn["of"] == self._of():
            made._begin_turn(turn)
        return made

    def turn(self) -> dict[str, Any] | None:
        """As `Decisions.turn`: all that it knows."""
        if not self.searches and not self._goes_on:  # there are no members yet
            return None
        return {
            "of": self._of(),
            "members": [_plain(each) for each in self.trials],
            "best": _plain(self.best),
            "copy": _plain(self._copy),
            "lowest": self._lowest,
            "worse": self._worse,
            "draw": self._draw.getstate(),
        }

    def _begin_turn(self, turn: Mapping[str, Any]) -> None:
        self._goes_on = True
        self.trials = [Trial(*each) for each in copy.deepcopy(turn["members"])]
        best, of_copy = (copy.deepcopy(turn[name]) for name in ("best", "copy"))
        self._copy = Trial(*of_copy) if of_copy else None
        if best:
            members = (each for each in self.trials if each.branch == best[0])
            self.best = next(members, Trial(*best))
        self._lowest, self._worse = turn["lowest"], turn["worse"]
        self._draw.setstate(turn["draw"])

    def _of(self) -> str:
        return repr((self._population, self._policy.branches))

    def requests(self, root: int = 0) -> Requests:
        """From a branch that exists.

        Beside the members a copy of the best so far stays, from which they begin again if all of
        them diverge; at first it is the root.
        """
        self.safe = root
        if not self._goes_on:
            yield from self._first_members(root)
        members, policy = self.trials, self._policy
        while True:
            self.searches += 1  # what comes now follows from `turn`
            for each in members:
                yield from run_until(each, len(each.losses) + policy.window)
                del each.losses[:-_MOST_LOSSES]
            ranked = sorted(filter(lives, members), key=self._lately)
            self._worse += 1
            if ranked:
                yield from self._keep_copy(ranked[0])
            if self.best is None or self._worse >= policy.plateau * len(members):
                break
            yield from self._replace(members, ranked)
        keep = ranked[0].branch if ranked else self.safe
        for branch in (*(each.branch for each in members), self.safe):
            if branch != keep:
                yield Discard(branch)
        self.safe = keep
        found = "finds no lower loss any more" if self.best else "has diverged, all of it"
        self.why = f"the population {found}"

    def _first_members(self, root: int) -> Requests:
        """Their first losses are those of the root, on other data."""
        first = self._population()
        self.trials = []
        while len(self.trials) < self._policy.branches - 1:
            values = first.propose() or {}
            self.trials.append(Trial((yield Fork(root, values)), values))
        for each in self.trials:
            yield from run_until(each, 1)
        self._start_alike()

    def _keep_copy(self, best: Trial) -> Requests:
        """Of the best, if it is better than ever."""
        self.best, now = best, self._lately(best)
        lowest = self._lowest
        if lowest is None or now < lowest - self._policy.improvement * abs(lowest):
            self._lowest, self._worse = now, 0
            yield Discard(self.safe)
            self.safe = yield Fork(best.branch, {})
            self._copy = Trial(self.safe, best.values, [*best.losses], best.start)

    def _replace(self, members: list[Trial], ranked: list[Trial]) -> Requests:
        """Those that diverged, and the last of the others, by children of some of the first."""
        assert self._copy is not None
        cut = max(1, round(_CUT * len(members)))
        first, last = ranked[:cut] or [self._copy], ranked[cut:][-cut:]
        for at, each in enumerate(members):
            if lives(each) and each not in last:
                continue
            parent = self._draw.choice(first)
            values = self._population.near(parent.values, self._draw)
            yield Discard(each.branch)
            child = yield Fork(parent.branch, values)
            members[at] = Trial(child, values, start=self._lately(parent))

    def _lately(self, member: Trial) -> float:
        """Its mean loss in the second half of its turn."""
        turn = member.losses[-self._policy.window :]
        half = turn[-max(1, len(turn) // 2) :]
        return sum(half) / len(half)


def _plain(trial: Trial | None) -> list[Any] | None:
    """As it is saved."""
    if trial is None:
        return None
    values = {name: float(value) for name, value in trial.values.items()}
    return [trial.branch, values, [*trial.losses], trial.start]


def decisions_of(policy: Policy, search: Callable[[], Search]) -> Decisions:
    """Of a search, or of a population."""
    if isinstance(search, Population):
        return PopulationDecisions(policy, search)
    return Decisions(policy, search)
