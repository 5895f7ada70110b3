"""A round of a DistributedOptimizer: backward() pushes gradients, and step() takes the results."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Mapping, Sequence

from torch import nn

from phub._awaited import parameters_in_compiled
from phub._box_state import BoxState
from phub._box_ways import BoxWays
from phub._exchanged import Exchanged
from phub._facts import Verdict
from phub._model import Present
from phub._same import Same, is_due
from phub._values import Values
from phub._watch import Watch


class Round:
    """Pushes each gradient once in a step, and takes its result.

    The optimizer and the model's hooks own it, for all steps. Autograd's threads call on_gradient()
    during backward(), while the thread that trains waits for them; it calls everything else.
    """

    syncs = True  # False within no_sync(): backward() only accumulates
    _synchronized = False  # the means are in `.grad`, before step()
    _parts = 0  # steps one after the other that had fewer backward() than accumulate
    _noted: Verdict | None = None  # of the round before the one that is under way

    def __init__(
        self,
        model: nn.Module,
        mine: Sequence[Exchanged],
        frozen: Mapping[str, nn.Parameter],
        accumulate: int,
        *,
        values: Values,
        at_box: BoxState,
        same: Same | None,
        watch: Watch,
        notes_verdict: bool,
        ways: BoxWays | None = None,
    ) -> None:
        """frozen: the optimizer's parameters that are not exchanged, as they need no gradient.

        notes_verdict: results come late, and rounds have verdicts.
        """
        self._model, self._present = model, Present(model)
        self._mine, self._frozen, self._accumulate = mine, frozen, accumulate
        self._values, self._at_box, self._same, self._watch = values, at_box, same, watch
        self._notes_verdict = notes_verdict
        self._ways = ways
        self._waited_s = 0.0  # for this step's results
        me: Round = weakref.proxy(self)  # no cycle: all is freed with the optimizer
        watch.is_local = lambda: not me.syncs

    def on_gradient(self, mine: Exchanged) -> None:
        """A backward() has the gradient of this parameter."""
        if not self.syncs:
            return
        mine.backwards += 1
        if mine.pushed:
            raise RuntimeError(
                f"the gradient of '{mine.name}' was pushed already: backward() came "
                f"{mine.backwards} times before step(). To accumulate, use "
                f"accumulate={mine.backwards}, or no_sync() around all backward() but the last. A "
                "step is that of the DistributedOptimizer, not of the optimizer that it has. Of "
                "another model's loss that only passes through this model (a GAN's generator), set "
                "requires_grad_(False) on this model during that backward()"
            )
        if mine.is_due(self._accumulate):
            self.begin()
            if self._ways:
                self._ways.note({mine.name: mine.tensor.numel()})
            mine.push()
            if self._ways:
                self._ways.resume()

    def is_empty(self) -> bool:
        """Whether no backward() came since the last step, and all gradients there are are zero."""
        return not any(
            mine.backwards
            or mine.pushed
            or (mine.tensor.grad is not None and bool(mine.tensor.grad.any()))
            for mine in self._mine
        )

    def begin(self) -> None:
        """Before the first push of a round; later calls do nothing."""
        self._watch.end()
        self._at_box.send_loaded()
        is_first = self._values.begin_round()
        if is_first and self._same:
            self._same.begin_backward()
        if is_first and self._ways:
            self._ways.begin_step()

    def finish(self, step: int) -> None:
        """Checks what was pushed, and pushes the rest. step: the job's, counted from 1."""
        if self._synchronized:
            return
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter '{name}' requires a gradient now, and the job has no key for it: "
                    "make a new DistributedOptimizer, with another job's name"
                )
        if is_due(step):
            self._present.check(self._model)
        self._count_parts()
        for mine in self._mine:
            if mine.pushed:
                mine.check_unchanged()
        self._values.check_unchanged()
        # With its result all ranks have begun the round before: none sets values for that one now.
        self._mine[0].take_late()
        if self._notes_verdict:
            self._noted = self._mine[0].worker.verdict
        self.begin()
        for mine in self._mine:
            if not mine.pushed:
                mine.push()

    def synchronize(self) -> None:
        """Takes the results of a round that is finished, before step()."""
        self.take()
        self._synchronized = True

    def take(self) -> None:
        """Waits for the results, unless synchronize() has."""
        if self._synchronized:
            return
        began = time.perf_counter()
        for mine in self._mine:
            mine.take()
        self._waited_s = time.perf_counter() - began

    def take_at_next_step(self) -> None:
        """The results come into the parameters before the next step's gradients are pushed."""
        for mine in self._mine:
            mine.late = True

    def take_later(self) -> None:
        """Whatever reads a parameter waits for its result; but compiled code is not told to."""
        compiled = parameters_in_compiled(self._model)
        for mine in self._mine:  # all of those first that nobody waits for now
            if id(mine.tensor) not in compiled:
                mine.take_later()
        for mine in self._mine:
            if id(mine.tensor) in compiled:
                mine.take()

    def verdict(self) -> Verdict | None:
        """Of the latest round whose results are in the parameters, or come there by themselves.

        Of one whose results come late the worker may have it earlier on one rank than on another.
        """
        if any(mine.late for mine in self._mine):
            return self._noted
        return self._mine[0].worker.verdict

    def end(self) -> None:
        """The step is made."""
        for mine in self._mine:
            mine.end_step()
        self._values.end_round()
        self._synchronized = False
        if self._ways:
            self._ways.end_step(self._waited_s)

    def forget(self) -> None:
        """The job has gone on from a checkpoint, with none of this round."""
        self._at_box.forget_loaded()
        self._synchronized = False
        self._ways = None

    def _count_parts(self) -> None:
        """Warns of steps without as many backward() as `accumulate` says; an epoch's last may."""
        made = max((mine.backwards for mine in self._mine), default=0)
        self._parts = self._parts + 1 if 0 < made < self._accumulate else 0
        if self._parts == 2:
            warnings.warn(
                f"step() came after {made} backward() twice, and accumulate is {self._accumulate}: "
                "each step() makes a step of what there is. Call step() and zero_grad() after "
                f"every {self._accumulate} backward() alone, or leave accumulate out",
                RuntimeWarning,
                stacklevel=4,
            )
