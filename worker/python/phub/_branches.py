"""Hyperparameters and branches of a job, as a rank decides about them."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import byref, c_char_p, c_double, c_size_t, c_uint32, c_uint64
from typing import Any

from phub import _library
from phub._calls import Calls, round_number
from phub._facts import Branch
from phub._library import call
from phub._numbers import real_number, whole_number
from phub.errors import InvalidError

_MOST_RUNS = 1025  # PHUB_MOST_BRANCH_RUNS
_MOST_VALUES = 64  # there are fewer hyperparameters
_MOST_BRANCHES = 511  # of a job: 255 that are killed, and one more than the option may be


def named_values(values: Mapping[str, float]) -> tuple[Any, Any, int]:
    """Names, numbers, and how many there are, as C has them."""
    names = (c_char_p * len(values))(*(name.encode() for name in values))
    numbers = (c_double * len(values))(*(hyper_value(name, values[name]) for name in values))
    return names, numbers, len(values)


def hyper_value(name: str, value: float) -> float:
    return real_number(f"hyperparameter '{name}'", value)


def _branch(given: int) -> int:
    return whole_number("the branch", given, 32)


class BranchCalls(Calls):
    """Branches are of a job with the option `branches`. One rank decides, or a program beside."""

    def set_hyper(self, values: Mapping[str, float], round: int = 0) -> int:  # noqa: A002
        """Changes hyperparameters of the job from `round` on (0: the next). Returns the round.

        That may be a later one; with a `batch` among them it is after the one in progress.
        Any rank may call it, one or all of them: what several set for one round must be the same.
        """
        self._settle()
        at = c_uint64(round_number(round))
        call("set_hyper", self._worker, *named_values(values), byref(at))
        return at.value

    def fork(
        self,
        parent: int = 0,
        hyper: Mapping[str, float] | None = None,
        round: int = 0,  # noqa: A002
    ) -> tuple[int, int]:
        """A branch that is as `parent` is before `round` (0: as soon as possible), but for `hyper`.

        Returns its number, and the round. It has the parent's parameters, and the optimizer's
        state. Nothing changes it until it is scheduled. Raises FullError: the job has as many as
        its option `branches` allows.
        """
        self._settle()
        at, child = c_uint64(round_number(round)), c_uint32()
        call(
            "fork",
            self._worker,
            _branch(parent),
            *named_values(hyper or {}),
            byref(at),
            byref(child),
        )
        return child.value, at.value

    def schedule(self, *turns: int | tuple[int, int], round: int = 0) -> int:  # noqa: A002
        """From `round` on (0: as soon as possible) these branches run, one after the other.

        Each turn is (branch, rounds), the last a branch alone, which goes on until something else
        is scheduled. Returns the round; the result of the round before it is what the first of
        them has.
        """
        self._settle()
        pairs = [turn if isinstance(turn, tuple) else (turn, 0) for turn in turns]
        branches = (c_uint32 * len(pairs))(*(_branch(branch) for branch, _ in pairs))
        rounds = (c_uint64 * len(pairs))(
            *(whole_number("the number of rounds", rounds, 64) for _, rounds in pairs)
        )
        at = c_uint64(round_number(round))
        call("schedule", self._worker, branches, rounds, len(pairs), byref(at))
        return at.value

    def discard(self, branch: int, round: int = 0) -> int:  # noqa: A002
        """The branch is gone from `round` on, and there is room for another. Returns the round."""
        self._settle()
        at = c_uint64(round_number(round))
        call("discard", self._worker, _branch(branch), byref(at))
        return at.value

    def kill(self, branch: int, round: int = 0) -> int:  # noqa: A002
        """The branch goes to files at the box, and there is room for another when it is there.

        The box takes a checkpoint for it once the rounds before the returned one are complete, and
        then branches() has it `on_disk`. It can be revived, or discarded. Raises InvalidError: the
        box keeps no checkpoints, or the branch is the last one that is scheduled.
        """
        self._settle()
        at = c_uint64(round_number(round))
        call("kill", self._worker, _branch(branch), byref(at))
        return at.value

    def revive(self, branch: int, round: int = 0) -> int:  # noqa: A002
        """From `round` on the branch is there as if it had never been killed. Returns the round.

        The box reads its files meanwhile. Raises FullError: there is no room; InvalidError or
        NotFoundError: it is not killed, or its files are damaged or gone.
        """
        self._settle()
        at = c_uint64(round_number(round))
        call("revive", self._worker, _branch(branch), byref(at))
        return at.value

    def branch_in(self, round: int) -> int:  # noqa: A002
        """The branch that runs in `round`: final for the one behind the latest result here."""
        self._settle()
        found = c_uint32()
        call("branch_in", self._worker, round_number(round), byref(found))
        return found.value

    def batch_in(self, round: int) -> int:  # noqa: A002
        """The hyperparameter `batch` of the branch that runs then, in samples; 0: none is set."""
        self._settle()
        found = c_uint64()
        call("batch_in", self._worker, round_number(round), byref(found))
        return found.value

    def branch_runs(self) -> tuple[tuple[int, int], ...]:
        """(round, branch): from this round on it runs, as far as it is decided. Rounds ascend."""
        self._settle()
        rounds, branches = (c_uint64 * _MOST_RUNS)(), (c_uint32 * _MOST_RUNS)()
        count = c_size_t()
        call("branch_runs", self._worker, rounds, branches, _MOST_RUNS, byref(count))
        return tuple(zip(rounds[: count.value], branches[: count.value], strict=True))

    def branches(self) -> tuple[Branch, ...]:
        """All that there are, when everything is done that was decided."""
        self._settle()
        found = (_library.BranchInfo * _MOST_BRANCHES)()
        count = c_size_t()
        call("branches", self._worker, found, _MOST_BRANCHES, byref(count))
        return tuple(
            Branch(
                of.branch,
                of.parent,
                of.round,
                of.rounds,
                bool(of.runs),
                killed=of.killed > 0,
                on_disk=of.killed > 1,
                batch=of.batch,
            )
            for of in found[: count.value]
        )

    def branch_values(self, branch: int) -> dict[str, float]:
        """Of a job without an optimizer: the hyperparameters that the branch was forked with.

        Those of its parents included. The ranks apply them: see `phub.OwnBranches`.
        """
        self._settle()
        names, numbers = (c_char_p * _MOST_VALUES)(), (c_double * _MOST_VALUES)()
        count = c_size_t()
        arguments = names, numbers, _MOST_VALUES, byref(count)
        call("branch_values", self._worker, _branch(branch), *arguments)
        found = zip(names[: count.value], numbers[: count.value], strict=True)
        return {(name or b"").decode(): value for name, value in found}

    def report_loss(
        self,
        loss: float,
        round: int = 0,  # noqa: A002
        *,
        name: str = "loss",
    ) -> None:
        """Tells the box this rank's loss in `round` (0: the one that it pushes next).

        Before it pushes that round, and in ascending rounds; also a loss that is not finite. The
        box keeps the means of the latest rounds, of all ranks that report, for `phub tune`, and
        shows the latest. A job may have several, each by a name, such as "train" and "validation".
        Raises InvalidError: the name is not of 1 to 32 letters, digits and "_-./"; FullError: the
        job has eight other names.
        """
        self._settle()
        if not isinstance(name, str) or "\0" in name:
            raise InvalidError(f"the name of a loss is {name!r}: it must be text, such as 'train'")
        number, at = real_number("the loss", loss), round_number(round)
        call("report_named_loss", self._worker, name.encode(), number, at)
