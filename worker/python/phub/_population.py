"""A population of branches that learn from each other, in place of a search.

Population based training (Jaderberg et al. 2017, algorithm 1): each member trains with values of
its own for a while, in turn. Then the worst are forked anew from some of the best (exploit), with
values that are a little different (explore), and so on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
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
from phub._trials import judge

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
    What is drawn follows from the seed and the losses.
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

    def afresh(self, diverged: Sequence[Values] = ()) -> Decisions:
        """Others by the same policy and seed, which have decided nothing yet."""
        made = PopulationDecisions(self._policy, self._population)
        made.diverged = [*diverged]
        return made

    def requests(self, root: int = 0) -> Requests:
        """From a branch that exists.

        Beside the members a copy of the best so far stays, from which they begin again if all of
        them diverge; at first it is the root.
        """
        policy, first = self._policy, self._population()
        self.safe, self.searches = root, self.searches + 1
        draw = random.Random(self._population.seed)
        members: list[Trial] = []
        self.trials = members
        while len(members) < policy.branches - 1:
            values = first.propose() or {}
            members.append(Trial((yield Fork(root, values)), values))
        lowest: float | None = None
        worse = 0
        while True:
            for each in members:
                yield from run_until(each, len(each.losses) + policy.window)
                del each.losses[:-_MOST_LOSSES]
            ranked = sorted(filter(lives, members), key=self._lately)
            worse += 1
            if ranked:
                self.best = ranked[0]
                now = self._lately(self.best)
                if lowest is None or now < lowest - policy.improvement * abs(lowest):
                    lowest, worse = now, 0
                    yield Discard(self.safe)
                    self.safe = yield Fork(self.best.branch, {})
            if self.best is None or worse >= policy.plateau * len(members):
                break
            yield from self._replace(members, ranked, draw)
        keep = ranked[0].branch if ranked else self.safe
        for branch in (*(each.branch for each in members), self.safe):
            if branch != keep:
                yield Discard(branch)
        self.safe = keep

    def _replace(self, members: list[Trial], ranked: list[Trial], draw: random.Random) -> Requests:
        """Those that diverged, and the last of the others, by children of some of the first."""
        assert self.best is not None
        cut = max(1, round(_CUT * len(members)))
        safe = Trial(self.safe, self.best.values)
        first, last = ranked[:cut] or [safe], ranked[cut:][-cut:]
        for at, each in enumerate(members):
            if lives(each) and each not in last:
                continue
            parent = draw.choice(first)
            values = self._population.near(parent.values, draw)
            yield Discard(each.branch)
            members[at] = Trial((yield Fork(parent.branch, values)), values)

    def _lately(self, member: Trial) -> float:
        """Its mean loss in the second half of its turn."""
        return judge(member.losses[-self._policy.window :], windows=2).loss


def decisions_of(policy: Policy, search: Callable[[], Search]) -> Decisions:
    """Of a search, or of a population."""
    if isinstance(search, Population):
        return PopulationDecisions(policy, search)
    return Decisions(policy, search)
