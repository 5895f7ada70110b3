"""Counts the steps of a job, and saves what a rank has for itself between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from phub._by_branch import ByBranch
from phub._own_state import OwnState, Stateful
from phub.worker import Worker

_ENTRY = "steps"
_OF_BRANCHES = "branches"


class Steps:
    """The steps of a job that goes on from its checkpoints."""

    def __init__(
        self, own: OwnState, synchronize: Callable[[], object], *, has_branches: bool
    ) -> None:
        """synchronize: waits for the results of the step before."""
        self.done = 0  # by the job
        self.restored: bytes | None = None  # not loaded yet
        self._own, self._synchronize = own, synchronize
        self._by_branch = ByBranch(own.saved_of_branch, own.load) if has_branches else None
        self._counts = False
        self._made = True  # the present one

    def save(self, _round: int) -> dict[str, bytes]:
        """The worker's saver."""
        if not self._counts:
            return {}
        saved = {_ENTRY: self._own.saved()}
        if self._by_branch:
            saved[_OF_BRANCHES] = self._by_branch.saved()
        return saved

    def begin(self, worker: Worker) -> None:
        """It has joined."""
        self._worker = worker
        self.done = worker.first_round - 1
        self.restored = worker.restored(_ENTRY)
        if self._by_branch and (saved := worker.restored(_OF_BRANCHES)) is not None:
            self._by_branch.restore(saved)
        self._made = True

    def end_step(self) -> None:
        """It was made."""
        self.done += 1
        self._made = True

    def count(self, until: int, kept: Mapping[str, Stateful]) -> Iterator[int]:
        """See DistributedOptimizer.steps."""
        if not self._counts and self.done >= self._worker.first_round:
            raise RuntimeError(
                "step() was called before steps(): count all steps of the job with steps(), or none"
            )
        self._counts = True
        self._own.keep(kept)
        while self.done < until:
            self._save_point()
            if self._by_branch:
                self._synchronize()
                self._by_branch.begin(self._worker, self.done + 1)
            self._made = False
            yield self.done
            if not self._made:
                raise RuntimeError(
                    f"step {self.done} of steps() was not made: call step() once in each"
                )
        self._save_point()
        self._worker.barrier()

    def _save_point(self) -> None:
        saved, self.restored = self.restored, None
        if saved is not None:
            self._own.load(saved)
        self._worker.save_point(self.done)
