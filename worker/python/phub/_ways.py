"""Which gradients of fully connected layers go whole, and which as factors: phub chooses.

Poseidon's algorithm 3 and SACP: a weight's gradient goes whole, or as the errors and inputs that it
is made of (_factors.py), whichever is back earlier. In the second step the ranks measure: how fast
they exchange all together, how fast they multiply, what backward() computes and of how many
samples. They tell each other, and the one of the lowest rank chooses for all (phub_choose_factors).
In each step they add up who wants another choice: of a rank whose samples have changed, or whose
exchange takes another time. Steps with factors are measured, too (_measured.Trial): if they are
not faster than with whole gradients, these come back.

A weight has a key of the job for its gradient in any case. A rank that cannot send factors in a
step (too many samples, or a gradient that comes from elsewhere, too) says so in their place. All
ranks see that, and exchange in that key what is not in factors. So the sum is always that of all.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phub import _device
from phub._buffers import worker_beside
from phub._choice import Choice, Facts
from phub._factors import linear_weights
from phub._measured import OFTEN, Clock, Trial, Waits
from phub._options import Key, Option
from phub._views import tensor_over
from phub._weight_way import Weight
from phub.errors import Error, InvalidError
from phub.worker import Worker

Made = TypeVar("Made")
AUTO = "auto"
_WISH, _MADE, _RANKS = "wish", "made", "ranks"
_MEASURED_STEP = 2  # in the first one DDP makes its buckets, and memory is new
_SHOWN = 20  # names of weights
_LATE = "factors='auto': the other ranks began"


class Ways:
    """The choice for a model's weights, and the jobs that it needs."""

    def __init__(
        self,
        weights: Mapping[str, nn.Linear],
        others: int,
        model: nn.Module | None,
        beside: Worker,
        options: Mapping[str, Option],
        *,
        make: Callable[[str, nn.Linear, Ways], Weight] = Weight,
    ) -> None:
        """Joins a job; returns when all ranks have.

        weights: by name, the modules of which there is a choice. others: elements of the other
        parameters. model: that DDP calls, or None. beside: the worker whose keys have the
        gradients.
        """
        self.worker, self._options, self._others = beside, options, others
        self.layers = {name: make(name, module, self) for name, module in weights.items()}
        self.plan: dict[str, int] = {}  # those that go as factors, and of how many samples at most
        self.facts: Facts | None = None
        self._factors: Worker | None = None
        self._choices = 0
        self._is_over = False  # nothing is chosen any more
        self._step = 0
        self._share: float | None = None
        self.clock = Clock()
        self.is_called = False  # DDP exchanges in the next backward()
        self._off = 0  # steps that were not as planned, more than were
        self._waits = Waits()
        self._span_s = 0.0  # of the step before
        self._trial: Trial | None = None  # of `_tried`
        self._tried: dict[str, int] = {}
        self._wishes = worker_beside(
            beside, options, "ways", {_WISH: Key(3), _MADE: Key(1)}, late=_LATE, reduction="sum"
        )
        self._wish = tensor_over(self._wishes.gradient(_WISH))
        for layer in self.layers.values():
            layer.join()
        self._call = model.register_forward_pre_hook(_Call(self)) if model else None

    def close(self) -> None:
        """Leaves the jobs."""
        if self._call:
            self._call.remove()
        for layer in self.layers.values():
            layer.leave()
        with contextlib.ExitStack() as closing:  # the second one also if the first one fails
            for worker in (self._wishes, self._factors):
                if worker:
                    closing.callback(worker.close)

    # ---- A step. Of the thread of backward().

    def is_due(self) -> bool:
        """Whether the next backward() is that of an exchange."""
        return self.is_called

    def sends(self, name: str) -> Weight | None:
        """The weight, if it goes as factors."""
        return self.layers[name] if name in self.plan else None

    def begin_step(self) -> None:
        """At the step's first bucket."""
        self._step += 1
        self._share = None
        self.clock.start()
        self._wish[:] = torch.tensor([1.0, float(self._has_wish()), self._span_s])
        self._wishes.push(_WISH)
        if self._factors and self.plan:
            tensor_over(self._factors.gradient(_RANKS)).fill_(1)
            self._factors.push(_RANKS)

    def note(self, elements: Mapping[str, int]) -> None:
        """A bucket is ready, with these parameters."""
        others = sum(n for name, n in elements.items() if name not in self.layers)
        self.clock.note([name for name in elements if name in self.layers], others)

    def resume(self) -> None:
        """The bucket is on its way: backward() goes on."""
        self.clock.resume()

    def end_step(self, waited_s: float) -> None:
        """All results are here. It may be the time for another choice."""
        self.is_called = False
        self._waits.add(waited_s)
        self._span_s = self.clock.span_s
        self.clock.end_step()
        for layer in self.layers.values():
            layer.end_step()
        self._wishes.wait(_WISH)
        ranks, wishes, spans_s = tensor_over(self._wishes.parameters(_WISH)).tolist()
        if ranks < self.worker.world_size:
            self._end_trial()  # those that are left cannot make another job: its ranks are all
        elif self._trial:
            self._try(self._trial, spans_s / ranks)
        elif wishes > 0:
            self._choose()

    def _has_wish(self) -> bool:
        if self._step <= _MEASURED_STEP or self._is_over:
            return self._step == _MEASURED_STEP
        if self._trial:
            return False
        off = any(layer.is_off(self.plan.get(name)) for name, layer in self.layers.items())
        self._off = max(0, self._off + (1 if off else -1))
        return self._off >= OFTEN or self._waits.have_changed()

    # ---- The choice, between steps.

    def _choose(self) -> None:
        self._choices += 1
        self._off = 0
        self._waits = Waits()
        for layer in self.layers.values():
            layer.planned = layer.samples
        made = self._by_all(self._made_choice)
        if made is None:
            return
        self.facts, plan = made
        was_whole = not self.plan
        if plan != self.plan:
            if not self._change_to(plan):
                return
            if was_whole:
                self._trial, self._tried = Trial(), plan
        self._log()

    def _change_to(self, plan: dict[str, int]) -> bool:
        """Whether all ranks follow this plan from the next step on."""
        factors = self._by_all(lambda: self._join_factors(plan)) if plan else None
        if plan and not factors:
            return False
        self._follow(plan, factors)
        return True

    def _by_all(self, make: Callable[[], Made | None]) -> Made | None:
        """What this rank has made, if all others have, too.

        Else None, and all stays as it is: on all ranks, as each tells the others whether it could.
        Then nothing is chosen any more, because the next attempt might take as long.
        """
        made = None
        try:
            made = make()
        except Error as error:
            print(
                f"phub: job '{self.worker.job}': rank {self.worker.rank} cannot make another "
                f"choice of factors, so all ranks keep what they have: {error}",
                file=sys.stderr,
                flush=True,
            )
        tensor_over(self._wishes.gradient(_MADE))[:] = float(made is not None)
        self._wishes.push(_MADE)
        self._wishes.wait(_MADE)
        if tensor_over(self._wishes.parameters(_MADE)).item() == self.worker.world_size:
            return made
        self._is_over = True
        if isinstance(made, Worker):
            made.close()
        return None

    def _made_choice(self) -> tuple[Facts, dict[str, int]] | None:
        choice = self._join_choice()
        try:
            facts, plan = choice.make(self.clock, self._others)
        finally:
            choice.close()
        return None if plan is None else (facts, plan)

    def _join_choice(self) -> Choice:
        return Choice(self.worker, self._options, self._choices, list(self.layers.values()))

    def _join_factors(self, plan: Mapping[str, int]) -> Worker:
        keys = {_RANKS: Key(1)}
        for name, samples in plan.items():
            keys |= self.layers[name].keys(samples, self.worker.world_size)
        return worker_beside(
            self.worker,
            self._options,
            f"factors-{self._choices}",
            keys,
            late=_LATE,
            reduction="sum",
        )

    def _follow(self, plan: dict[str, int], factors: Worker | None) -> None:
        """From the next step on. All ranks are here, and have this one's results."""
        before, self._factors, self.plan = self._factors, factors, plan
        self._waits = Waits()
        for name, layer in self.layers.items():
            layer.follow(plan.get(name, 0), factors)
        if before and before is not factors:
            before.close()

    def _try(self, trial: Trial, seconds: float) -> None:
        """The step before took so long, in the mean over the ranks."""
        trial.add(seconds)
        if trial.is_whole and self.plan:
            self._follow({}, self._factors)  # whose job is kept until they are given up
        if not trial.is_over:
            return
        self._trial = None
        if not trial.is_whole:
            self._follow(self._tried, self._factors)
            return
        self._follow({}, None)
        self._log(
            f"; with {len(self._tried)} as factors a step took {1e3 * trial.factors_s:.3g} ms from "
            "the beginning of backward() to the last result, and with whole gradients "
            f"{1e3 * trial.whole_s:.3g}"
        )

    def _end_trial(self) -> None:
        """A rank is lost: all stays as it is in this step."""
        trial, self._trial = self._trial, None
        if trial and trial.is_whole:
            self._follow({}, None)
            self._log("; a rank was lost before it was known what is faster")

    def share(self) -> float:
        """What a product counts in the mean, once this step's ranks are known; or in the sum."""
        if self._share is None:
            assert self._factors
            self._factors.wait(_RANKS)
            of_mean = (1 / tensor_over(self._factors.parameters(_RANKS))).item()
            self._share = 1.0 if self._options.get("reduction") == "sum" else of_mean
        return self._share

    def _log(self, why: str = "") -> None:
        if self.worker.rank:
            return
        assert self.facts
        shown = [f"{name} ({samples} samples)" for name, samples in self.plan.items()]
        if len(shown) > _SHOWN:
            shown[_SHOWN:] = [f"and {len(shown) - _SHOWN} more"]
        as_factors = ", ".join(shown)
        text = (
            f"{len(self.plan)} of {len(self.layers)} weights go as factors, with "
            f"{self.facts.gbit_s:.3g} Gbit/s of a rank and {self.facts.gflop_s:.3g} GFLOP/s"
            f"{': ' if as_factors else ''}{as_factors}{why}"
        )
        print(f"phub: job '{self.worker.job}': {text}", file=sys.stderr, flush=True)
        with contextlib.suppress(Error):  # the training does not depend on it
            self.worker.remark("factors", text)


class _Call:
    """Sees the calls of the model by DDP: with one of them DDP decides about the next backward().

    Without no_sync(), that is with an exchange.
    """

    def __init__(self, ways: Ways) -> None:
        self._ways: Ways | None = ways

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy of the model."""
        return {"_ways": None}

    def __call__(self, *_: object) -> None:
        ddp = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if self._ways and ddp and ddp.require_backward_grad_sync and torch.is_grad_enabled():
            self._ways.is_called = True


def is_auto(factors: object, powersgd: object) -> bool:
    """Whether phub chooses. Raises InvalidError where it cannot."""
    if not isinstance(factors, str) or factors != AUTO:
        return False
    if powersgd is not None:
        raise InvalidError(
            "factors='auto' and powersgd: both choose matrices. Name the weights of factors, or "
            "leave one of them out"
        )
    return True


def weights_to_choose(model: nn.Module) -> dict[str, nn.Linear]:
    """By name: the modules whose weights may go as factors, and are no other module's, too.

    Float32 on the CPU.
    """
    uses = collections.Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    return {
        name: module
        for name, module in linear_weights(model).items()
        if uses[id(module.weight)] == 1
        and module.weight.dtype == torch.float32
        and not _device.is_gpu(module.weight.device)
    }
