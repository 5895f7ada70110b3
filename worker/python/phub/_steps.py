"""Counts the steps of a job, and saves what a rank has for itself between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from phub._by_branch import ByBranch
from phub._own_state import OwnState, Stateful
from phub.worker import Worker

_ENTRY = "steps"
_OF_BRANCHES = "branches"
_SENT = "values"


class Steps:
    """The steps of a job that goes on from its checkpoints."""

    def __init__(
        self,
        own: OwnState,
        synchronize: Callable[[], object],
        sent: Callable[[], Mapping[str, float]],
        *,
        has_branches: bool,
    ) -> None:
        """synchronize: takes the results of the step before. sent: the groups' values."""
        self.done = 0  # by the job
        self.restored: bytes | None = None  # not loaded yet
        self.restored_values: dict[str, float] | None = None  # of the groups, that were sent
        self._own, self._synchronize, self._sent = own, synchronize, sent
        self._has_branches = has_branches
        self._by_branch: ByBranch | None = None
        self._counts = False
        self._made = True  # the present one
        self._saved = False  # what this rank has before it

    def save(self, _round: int) -> dict[str, bytes]:
        """The worker's saver."""
        if not self._counts:
            return {}
        self._saved = True
        saved = {_ENTRY: self._own.saved()}
        if self._by_branch:
            saved[_OF_BRANCHES] = self._by_branch.saved()
            saved[_SENT] = json.dumps(self._sent()).encode()
        return saved

    def begin(self, worker: Worker) -> None:
        """It has joined."""
        self._worker = worker
        self.done = self._first = worker.first_round - 1
        self.restored = worker.restored(_ENTRY)
        if self._has_branches:
            self._by_branch = ByBranch(self._own.saved_of_branch, self._own.load)
            if (saved := worker.restored(_OF_BRANCHES)) is not None:
                self._by_branch.restore(saved)
            sent = worker.restored(_SENT)
            self.restored_values = None if sent is None else json.loads(sent)
        self._made = True

    def end_step(self) -> None:
        """It was made."""
        self.done += 1
        self._made = True

    def count(self, until: int, kept: Mapping[str, Stateful]) -> Iterator[int]:
        """See DistributedOptimizer.steps."""
        if not self._counts and self.done > self._first:
            raise RuntimeError(
                "step() was called before steps(): count all steps of the job with steps(), or none"
            )
        self._counts = True
        self._own.keep(kept)
        self._take_restored()
        while self.done < until:
            self._between_steps()
            self._made = False
            yield self.done
            if not self._made:
                raise RuntimeError(
                    f"step {self.done} of steps() was not made: call step() once in each"
                )
        self._between_steps()
        self._synchronize()
        self._worker.barrier()

    def _rounds(self) -> int | None:
        """How many rounds of the job are done with these steps; None: some keys are in the next."""
        return self.done

    def _take_restored(self) -> None:
        saved, self.restored = self.restored, None
        if saved is not None:
            self._own.load(saved)

    def _between_steps(self) -> None:
        rounds = self._rounds()
        if rounds is not None:
            self._worker.save_point(rounds)
        if self._saved:  # who goes on from there begins with all results, and so does this rank
            self._saved = False
            self._synchronize()
        if self._by_branch:
            self._synchronize()
            self._by_branch.begin(self._worker, self.done + 1)
