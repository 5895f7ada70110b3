"""When a DiLoCo exchanges which fragment of its model: steps of the inner optimizer, counted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from phub.errors import InvalidError


class Course:
    """Each fragment is exchanged once in a cycle of `every` steps, and its result merged later.

    Of F fragments, fragment f (from 0) goes after step (f + 1) * every / F of each cycle, rounded
    down, so that exchanges are spread evenly over it (the partial updates of Streaming DiLoCo,
    arXiv 2501.18512). All fragments have made the same number of rounds at the end of a cycle, and
    within it they are one round apart at most.
    """

    def __init__(
        self, every: int, fragments: int, delay: int, tokens: Callable[[], float] | None = None
    ) -> None:
        """tokens: how many the rank has used so far; None: contributions have no weights."""
        self.every, self.fragments, self.delay = every, fragments, delay
        self._tokens = tokens
        self._alone: int | None = 0  # steps before the first exchange, until there is one
        self._ends = [(f + 1) * every // fragments % every for f in range(fragments)]
        self.begin(1)

    def begin(self, first_round: int) -> None:
        """The rank's next round is this one: it is at the end of a cycle."""
        self.steps, self.rounds = (first_round - 1) * self.every, first_round - 1
        self.under_way: dict[int, int] = {}  # fragments, and the step after which each is merged
        self._moved = False  # since the latest exchange
        now = float(self._tokens()) if self._tokens else 0.0
        # Steps and tokens at each one's latest exchange, and what it counted.
        self._counted = [(self.steps, now, 1.0)] * self.fragments

    def weight_of(self, fragment: int) -> float | None:
        """Of what is sent of it now: the tokens since it was sent last. None: there are no weights.

        Raises InvalidError if there are none in steps that were made.
        """
        if self._tokens is None:
            return None
        now = float(self._tokens())
        step, before, latest = self._counted[fragment]
        if step == self.steps:  # what alpha left of what was sent then
            return latest
        if not 0 < now - before < math.inf:
            raise InvalidError(
                f"tokens() was {before} after step {step}, and is {now} after step {self.steps}: "
                "it says how many tokens this rank has used in all, and grows with each step"
            )
        self._counted[fragment] = self.steps, now, now - before
        return now - before

    def advance(self) -> tuple[list[int], list[int]]:
        """After a step. Returns the fragments to be merged first, and those to be sent then."""
        self.steps += 1
        if self._alone is not None:
            self._alone += 1
        self._moved = True
        due = [f for f, step in self.under_way.items() if step == self.steps]
        at = self.steps % self.every
        return due, [f for f, end in enumerate(self._ends) if end == at]

    def sent(self, fragment: int) -> None:
        """After the latest step."""
        self._alone = None
        self.under_way[fragment] = self.steps + self.delay
        if self.fragments == 1 or self.ends_here:
            self.rounds += 1
        if self.fragments == 1:
            self._moved = False

    def merged(self, fragment: int) -> None:
        """The model has its result."""
        del self.under_way[fragment]

    @property
    def ends_here(self) -> bool:
        """Whether a cycle ends with the latest step, or none has begun."""
        return self.steps % self.every == 0

    @property
    def is_even(self) -> bool:
        """Whether all fragments have made as many rounds."""
        return self.ends_here or self.fragments == 1

    def check_even(self, what: str) -> None:
        """Raises RuntimeError if the state of the job is not whole now."""
        if not self.is_even:
            raise RuntimeError(
                f"{what} after step {self.steps}: with fragments={self.fragments} some are a round "
                "ahead of others within a cycle. Call it after a step that is a multiple of "
                f"sync_every={self.every}"
            )

    @property
    def has_moved(self) -> bool:
        """Whether a step came after the latest exchange of some fragment."""
        return self._moved

    def synchronized(self, *, rounds: int) -> None:
        """All fragments have made so many rounds more at once, and are merged."""
        self.rounds += rounds
        if rounds:
            self._alone = None
        self.under_way.clear()
        self._moved = False

    def warn_if_alone(self) -> None:
        """Warns if steps were made, and nothing was ever exchanged."""
        if self._alone:
            warnings.warn(
                f"the DiLoCo ends after {self._alone} steps, and has exchanged nothing, with "
                f"sync_every={self.every}: call synchronize(), or give it a smaller sync_every",
                RuntimeWarning,
                stacklevel=3,
            )

    # ---- To go on with it.

    def state(self) -> dict[str, Any]:
        """At the end of a cycle; with one fragment after any step."""
        return {
            "every": self.every,
            "fragments": self.fragments,
            "steps": self.steps,
            "under_way": dict(self.under_way),
            "moved": self._moved,
            "counted": [list(each) for each in self._counted],
        }

    def check_same(self, state: Mapping[str, Any]) -> None:
        """Raises InvalidError if it is of another cycle."""
        for name, mine in (("every", self.every), ("fragments", self.fragments)):
            if state[name] != mine:
                option = {"every": "sync_every"}.get(name, name)
                raise InvalidError(
                    f"the state is of a DiLoCo with {option}={state[name]}, and this one has "
                    f"{option}={mine}: give it the same"
                )

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises InvalidError as check_same()."""
        self.check_same(state)
        self.steps, self._moved = int(state["steps"]), bool(state["moved"])
        self._counted = [(int(step), float(now), float(w)) for step, now, w in state["counted"]]
        self.under_way = {int(f): int(step) for f, step in state["under_way"].items()}


def check_course(
    sync_every: int, fragments: int, delay: int, alpha: float, proximal: float
) -> None:
    """Raises InvalidError, which says what the numbers may be."""
    for name, count, least in (
        ("sync_every", sync_every, 1),
        ("fragments", fragments, 1),
        ("delay", delay, 0),
    ):
        if not isinstance(count, int) or isinstance(count, bool) or count < least:
            raise InvalidError(f"{name}={count!r}: it is a whole number, at least {least}")
    if fragments > sync_every:
        raise InvalidError(
            f"fragments={fragments} and sync_every={sync_every}: each fragment is exchanged after "
            "a step of its own, so there are at most as many fragments as steps"
        )
    if delay >= sync_every:
        raise InvalidError(
            f"delay={delay} and sync_every={sync_every}: a fragment's result is merged before the "
            "fragment is sent again, so the delay is at most sync_every - 1"
        )
    for name, given, end in (("alpha", alpha, 1.0), ("proximal", proximal, math.inf)):
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not is_number or not 0 <= given < end:
            what = "from 0 to below 1" if end == 1 else "at least 0"
            raise InvalidError(f"{name}={given!r}: it is a finite number, {what}")
    if proximal and delay:
        raise InvalidError(
            f"proximal={proximal} and delay={delay}: while a result is under way there is no base "
            "that the parameters could be held near. Use delay=0"
        )
