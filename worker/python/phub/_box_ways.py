"""DistributedOptimizer(factors="auto"): which gradients the box gets whole, and which as factors.

The choice, its jobs and its trial are those of phub.ddp (_ways.py). Here the box multiplies, and a
key that may go both ways has all rows of its gradient, or pairs of vectors, in each push: so a rank
sends what fits the step, whatever the others send.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from phub._buffers import LateError
from phub._choice import AtBox, Choice
from phub._exchanged import Exchanged
from phub._options import MAX_ROWS, Key, Option
from phub._tensors import DTYPES, memory_of
from phub._views import tensor_over
from phub._ways import Ways, weights_to_choose
from phub._weight_way import All, Weight
from phub.errors import Error, InvalidError
from phub.worker import Worker

Weights = dict[str, nn.Linear]
_TILES = 8  # chunks of such a key, unless they are too large; each gets all right vectors
_MOST_ELEMENTS = 1 << 24  # of a chunk
_MOST_TOGETHER = 32  # rows: a chunk has a multiple of so many, or fewer
_MOST_COLUMNS = 1 << 19  # of a chunk of 32 rows
# Of an element of a result, about.
_RESULT_BYTES = {"bf16": 2, "f16": 2, "fp8-e4m3": 1, "fp8-e5m2": 1, "int8": 1, "int4": 0.5}


def check_auto(overlap: object, accumulate: int, delay: int, options: Mapping[str, Option]) -> None:
    """Raises InvalidError for a form of DistributedOptimizer in which phub cannot choose."""
    refused = {
        f"overlap={overlap!r}": (
            overlap != "backward",
            "a step is measured from the beginning of backward() to its last result",
        ),
        "delay=1": (delay, "a step is measured from the beginning of backward() to its results"),
        f"accumulate={accumulate}": (
            accumulate > 1,
            "what several backward() accumulate goes whole",
        ),
        "branches": (options.get("branches"), "each branch has steps of its own"),
        "quorum": (options.get("quorum"), "all ranks take part in each measurement"),
        "memory_device": (
            options.get("memory_device") is not None,
            "factors come from the host",
        ),
    }
    for name, (given, reason) in refused.items():
        if given:
            raise InvalidError(
                f"factors='auto' and {name}: {reason}. Leave one of them out, or name the weights: "
                'factors={"classifier.*": 32}'
            )


def choosable(
    model: nn.Module,
    keys: dict[str, int | Key],
    options: Mapping[str, Option],
    formats: Mapping[str, str],
) -> Weights:
    """The weights that may go either way, by name. Their keys are told so.

    What is not float32 on the wire stays as it is.
    """
    if str(options.get("gradient_dtype", "f32")) != "f32":
        return {}
    weights = {}
    for name, module in weights_to_choose(model).items():
        key = keys.get(name)
        if not isinstance(key, Key) or any(fnmatchcase(name, pattern) for pattern in formats):
            continue
        rows, columns = module.weight.shape
        if rows > MAX_ROWS or columns > _MOST_COLUMNS:
            continue
        samples = most_samples(rows, columns)
        if samples < 1:
            continue
        keys[name] = replace(key, rank_limit=samples, rows_limit=rows)
        weights[name] = module
    return weights


def most_samples(rows: int, columns: int) -> int:
    """Of such a weight, as pairs; 0: it goes whole.

    With more, pairs are longer than rows, or do not fit into a chunk.
    """
    tile = min(-(-rows // _TILES), _MOST_ELEMENTS // columns)
    by_length = rows * columns // (rows + -(-rows // tile) * columns)
    return min(max(1, by_length), _MOST_ELEMENTS // (columns + tile + _MOST_TOGETHER))


class BoxWeight(Weight):
    """A weight of which there is a choice, at the box."""

    def __init__(self, name: str, module: nn.Linear, ways: All) -> None:
        super().__init__(name, module, ways)
        self._most = most_samples(*self.shape)
        self._indices = torch.arange(self.shape[0])
        self._own = torch.empty(0)

    def leave(self) -> None:
        super().leave()
        if self._module.__dict__.get("forward") == self._forward:  # and no other's
            del self._module.forward

    def follow(self, samples: int, factors: Worker | None) -> None:
        """As Weight: of so many samples at most; 0: whole."""
        self._limit, self._stored, self._is_whole = samples, 0, False
        self._own = torch.empty(samples * sum(self.shape))

    def end_step(self) -> None:
        super().end_step()
        if self.samples > self._most:  # pairs that the key has no room for
            self.samples = 0

    @torch.no_grad()
    def send(self, worker: Worker, gradient: torch.Tensor | None) -> None:
        """Pushes the step's pairs, if they are all of its gradient, or all rows."""
        left, right = (side[: self._stored] for side in self._sides(self._own))
        stored, is_whole = self._stored, self._is_whole
        self._stored, self._is_whole = 0, False
        if stored and not is_whole:
            worker.push_factors(self.name, memory_of(left), memory_of(right))
        elif gradient is None and not stored:
            worker.push_null(self.name)
        else:
            whole = torch.zeros(self.shape) if gradient is None else gradient
            if stored:
                whole = whole + left.t() @ right
            worker.push_rows(self.name, memory_of(self._indices), memory_of(whole.contiguous()))


@dataclass(eq=False)
class EitherWay(Exchanged):
    """Such a weight, on its way to the box and back."""

    weight: BoxWeight | None = field(init=False, default=None)  # None: it goes whole

    def look(self) -> None:
        """As Exchanged: the worker has no memory for its gradient."""
        self.slot = torch.empty(0)
        self.result = tensor_over(
            self.worker.parameters(self.name), DTYPES[self.worker.parameter_dtype]
        ).view(self.tensor.shape)

    @torch.no_grad()
    def _send(self, gradient: torch.Tensor | None) -> None:
        if self.weight:
            self.weight.send(self.worker, gradient)
        elif gradient is None:
            self.worker.push_null(self.name)
        else:
            indices = torch.arange(gradient.shape[0])
            whole = gradient.contiguous()
            self.worker.push_rows(self.name, memory_of(indices), memory_of(whole))


class BoxWays(Ways):
    """The choice for a DistributedOptimizer's weights.

    Of the thread that trains; Round calls it. A rank that is lost leaves the choice as it is, and
    one that takes its place sends its gradients whole.
    """

    def __init__(
        self,
        weights: Weights,
        others: int,
        beside: Worker,
        options: Mapping[str, Option],
        *,
        syncs: Callable[[], bool],
        result_format: str,
    ) -> None:
        """As Ways.

        syncs: whether the next backward() is that of a step. result_format: the parameters', on
        the wire.
        """
        self._syncs = syncs
        self._is_lost = False
        self._box = AtBox(beside.queues, _RESULT_BYTES.get(result_format, 4))
        given = {**options, "on_loss": "shrink"}  # nobody waits for a rank that cannot come back
        super().__init__(weights, others, None, beside, given, make=BoxWeight)

    def weight(self, name: str) -> BoxWeight:
        """One of those of which there is a choice."""
        found = self.layers[name]
        assert isinstance(found, BoxWeight)
        return found

    def is_due(self) -> bool:
        """Whether the next backward() is that of a step."""
        return self._syncs()

    def end(self, parameters: Sequence[Exchanged]) -> None:
        """From now on all gradients go whole."""
        for each in parameters:
            if isinstance(each, EitherWay):
                each.weight = None
        with contextlib.suppress(Error):  # the box is gone
            self.close()

    def begin_step(self) -> None:
        """Before the step's first push."""
        self.clock.start()
        self._unless_lost(super().begin_step)

    def end_step(self, waited_s: float) -> None:
        """All results are here. It may be the time for another choice."""
        for layer in self.layers.values() if self._is_lost else ():
            layer.end_step()
        self._unless_lost(lambda: super(BoxWays, self).end_step(waited_s))
        self.clock.end_step()

    def _unless_lost(self, action: Callable[[], None]) -> None:
        """An error of the choice's jobs ends the choice: the training's job has its own."""
        if self._is_lost:
            return
        try:
            action()
        except Error as error:
            self._is_lost = True
            if self.facts and self.worker.rank == 0:
                self._log(f"; that is the last choice: {error}")
                return
            _tell(self.worker, f"all weights go as they do now: {error}")

    def _join_choice(self) -> Choice:
        layers = list(self.layers.values())
        return Choice(self.worker, self._options, self._choices, layers, self._box)

    def _change_to(self, plan: dict[str, int]) -> bool:
        self._follow(plan, None)
        return True


def _tell(worker: Worker, what: str) -> None:
    print(
        f"phub: job '{worker.job}': rank {worker.rank}: factors='auto': {what}",
        file=sys.stderr,
        flush=True,
    )


def ways_for(
    weights: Weights,
    others: int,
    parameters: Sequence[Exchanged],
    options: Mapping[str, Option],
    *,
    syncs: Callable[[], bool],
    result_format: str,
) -> BoxWays | None:
    """As BoxWays. None: there is no choice, or this rank came when the others had begun.

    Then it sends whole gradients.
    """
    worker = parameters[0].worker
    if not weights or worker.world_size == 1 or worker.first_round > 1:
        return None
    try:
        ways = BoxWays(weights, others, worker, options, syncs=syncs, result_format=result_format)
    except LateError as error:  # it takes the place of a rank that was lost in the first round
        _tell(worker, f"this rank sends whole gradients: {error}")
        return None
    for each in parameters:
        if isinstance(each, EitherWay):
            each.weight = ways.weight(each.name)
    return ways
