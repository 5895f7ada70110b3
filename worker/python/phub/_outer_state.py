"""What a rank of a DiLoCo has for itself, in the job's checkpoints and in the program's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from phub._exchanged import when_free
from phub._outer_course import Course
from phub._outer_keys import OuterKey
from phub._own_state import OwnState, Stateful
from phub._steps import Steps
from phub._tensors import memory_of
from phub.errors import InvalidError
from phub.worker import Worker

_SAVED_BYTES = 64 << 20  # of a rank, as worker/phub.h has it


class OuterOwn(OwnState):
    """Beside what every rank has: its parameters, its inner optimizers, and where its cycle is."""

    def __init__(
        self,
        model: nn.Module,
        inner: Sequence[Optimizer],
        named: Mapping[str, nn.Parameter],
        course: Course,
    ) -> None:
        super().__init__(model, inner[0])
        self._inner, self._named, self._course = inner, named, course

    def saved(self) -> bytes:
        """As it is now. Raises InvalidError if the box does not take as much."""
        found = super().saved()
        if len(found) > _SAVED_BYTES:
            raise InvalidError(
                f"this rank's parameters, inner state and what steps() keeps are {len(found)} "
                f"bytes, and a box saves at most {_SAVED_BYTES} of a rank: leave out steps(), and "
                "save state_dict() of the DiLoCo and of the model to files of your own"
            )
        return found

    def _more(self) -> dict[str, Any]:
        return {
            "groups": [],  # they are in the optimizers' states
            "inner": [each.state_dict() for each in self._inner],
            "parameters": {name: p.detach() for name, p in self._named.items()},
            "course": self._course.state(),
        }

    def _take_more(self, state: Mapping[str, Any]) -> None:
        self._course.load(state["course"])
        load_inner(self._inner, state["inner"])
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(state["parameters"][name])


class OuterSteps(Steps):
    """Steps of the inner optimizer. The rounds of the job are saved where a cycle ends."""

    def __init__(self, own: OuterOwn, course: Course) -> None:
        super().__init__(own, lambda: None, dict, has_branches=False)
        self._course = course
        self.counts_now = False  # a loop over steps() is running

    def begin(self, worker: Worker) -> None:
        """It has joined."""
        super().begin(worker)
        self.done = self._first = self._course.steps
        self._given: int | None = None  # the latest round that the worker may have saved

    def end_step(self) -> None:
        """The course has counted it."""
        self.done, self._made = self._course.steps, True

    def count(self, until: int, kept: Mapping[str, Stateful]) -> Iterator[int]:
        """See DiLoCo.steps."""
        self.counts_now = True
        try:
            yield from super().count(until, kept)
        finally:
            self.counts_now = False

    def check_outside(self, what: str) -> None:
        """Raises RuntimeError within a loop over steps()."""
        if self.counts_now:
            raise RuntimeError(
                f"{what} in a loop over steps(): the box could not save the round that it makes. "
                "Call it after the loop; to evaluate within it, use base()"
            )

    def _rounds(self) -> int | None:
        if not self._course.is_even or self._course.rounds == self._given:
            return None
        self._given = self._course.rounds  # at first the one before: so the worker waits for more
        return self._given

    def _take_restored(self) -> None:
        super()._take_restored()
        self.done = self._first = self._course.steps


def check_inner(inner: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidError if there are more of the one than of the other."""
    if len(states) != len(inner):
        raise InvalidError(
            f"the state is of {len(states)} inner optimizers, and this DiLoCo has {len(inner)}"
        )


def load_inner(inner: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidError as check_inner()."""
    check_inner(inner, states)
    for each, state in zip(inner, states, strict=True):
        each.load_state_dict(dict(state))


# ---- The outer state, for files of the program: by parameters, as PyTorch's optimizers have it.


def fetch_outer(worker: Worker, keys: Sequence[OuterKey]) -> dict[str, Any]:
    """The base of all ranks, and on rank 0 the outer optimizer's state, which the box has.

    REQUIRES: all results are taken, and all keys have made as many rounds.
    """
    if worker.rank:
        found = [part for key in keys for part in key.parts_of(key.base).items()]
        return {"base": {name: part.detach().cpu().clone() for name, part in found}}
    names = ("base", *worker.state_names)
    arrays = {key.name: [torch.empty(key.elements) for _ in names] for key in keys}
    memories = {name: [memory_of(each) for each in of_key] for name, of_key in arrays.items()}
    steps = when_free(worker, lambda: worker.get_state(memories))
    outer: dict[str, Any] = {
        what: {
            name: part.clone()
            for key in keys
            for name, part in key.parts_of(arrays[key.name][at]).items()
        }
        for at, what in enumerate(names)
    }
    outer["steps"] = {name: steps[key.name] for key in keys for name in key.members}
    return outer


class LoadedOuter:
    """The same, for the next round, which rank 0 gives to the box."""

    def __init__(
        self, worker: Worker, keys: Sequence[OuterKey], outer: Mapping[str, Any] | None
    ) -> None:
        """Sends nothing yet. Raises InvalidError if it is not of these keys."""
        if outer is None:
            raise InvalidError(
                "the state has no base: the first process of an island loads what it saved"
            )
        names = ("base", *worker.state_names)
        missing = [what for what in (*names, "steps") if what not in outer]
        if missing and (worker.rank == 0 or "base" in missing):
            raise InvalidError(
                f"the state lacks '{missing[0]}' of the outer optimizer: rank 0 loads what rank 0 "
                "saved, of a DiLoCo with the same outer optimizer"
            )
        self._worker, self._keys = worker, keys
        self._bases = {key.name: key.joined(outer["base"]) for key in keys}
        if worker.rank:
            return
        self._arrays = {
            key.name: [self._bases[key.name], *(key.joined(outer[what]) for what in names[1:])]
            for key in keys
        }
        steps = outer["steps"]
        if uncounted := [name for key in keys for name in key.members if name not in steps]:
            raise InvalidError(
                f"the state has no steps of parameter '{uncounted[0]}': load a state of the same "
                "model"
            )
        self._steps = {key.name: max(int(steps[name]) for name in key.members) for key in keys}

    def send(self) -> None:
        """REQUIRES: all results are taken."""
        if self._worker.rank == 0:
            memories = {
                name: [memory_of(each) for each in of_key] for name, of_key in self._arrays.items()
            }
            when_free(self._worker, lambda: self._worker.set_state(memories, self._steps))
        for key in self._keys:
            key.use_base(self._bases[key.name])
