"""The choice of how gradients go (_ways.py): in a job in which the ranks measure, and tell."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from ctypes import c_double, c_size_t, c_ubyte
from dataclasses import dataclass

import torch

from phub._buffers import worker_beside
from phub._factors import add_products
from phub._library import call
from phub._measured import Clock
from phub._options import Key, Option
from phub._views import tensor_over
from phub._weight_way import Weight
from phub.worker import Worker

Shape = tuple[int, int]
_FACTS, _PLAN, _PROBE = "facts", "plan", "probe"
_LISTS, _NUMBERS = 3, 4  # of a rank's facts; of the numbers the first says that it is there
_PROBED = 1 << 20  # elements at most that are exchanged to see how fast the links are
_PROBES = 3
_PRODUCT = 1 << 30  # operations at most that are timed
_PAYS = 0.97  # of the time of whole gradients, and factors are worth it


@dataclass(frozen=True)
class Facts:
    """What the ranks measured, brought together. Lists are by weight."""

    ranks: int
    gbit_s: float  # of a rank, while all exchange
    gflop_s: float
    backward_s: float
    samples: list[int]  # 0: it goes whole
    ready_s: list[float]  # from the beginning of backward()
    others: list[int]  # elements of other parameters that were ready after the weight before


@dataclass(frozen=True)
class AtBox:
    """What the choice depends on where the box multiplies, and makes the steps."""

    cores: int  # of the box, that multiply
    result_bytes: float  # of an element


class Choice:
    """A job of all ranks that ends with the choice."""

    def __init__(
        self,
        beside: Worker,
        options: Mapping[str, Option],
        number: int,
        weights: Sequence[Weight],
        box: AtBox | None = None,
    ) -> None:
        """Joins; returns when all ranks have. box: it multiplies; None: the ranks do."""
        self._weights, self._box = weights, box
        self._size = _NUMBERS + _LISTS * len(weights)
        keys = {
            _FACTS: Key(beside.world_size * self._size),
            _PLAN: Key(1 + len(weights)),
            _PROBE: Key(min(_PROBED, sum(weight.weight.numel() for weight in weights))),
        }
        late = "factors='auto': the other ranks chose"
        self.worker = worker_beside(
            beside, options, f"choice-{number}", keys, late=late, reduction="sum"
        )

    def close(self) -> None:
        """Leaves the job."""
        self.worker.close()

    def make(self, clock: Clock, others: int) -> tuple[Facts, dict[str, int] | None]:
        """The same on all ranks: which weights go as factors, of how many samples at most.

        others: elements of other parameters. None: a rank was lost meanwhile.
        """
        table = self._exchange_facts(clock)
        there = [rank for rank, row in enumerate(table) if row[0] == 1]
        facts = self._together([table[rank] for rank in there])
        plan = [0.0] * (1 + len(self._weights))
        # One of them computes it for all: CPUs may round in other ways.
        if len(there) == len(table) and there[0] == self.worker.rank:
            shapes = [weight.shape for weight in self._weights]
            plan = [1.0, *map(float, chosen(facts, shapes, others, self._box))]
        is_made, *ways = self._sum(_PLAN, plan).tolist()
        self.worker.barrier()  # nobody leaves before all have it
        if is_made != 1:
            return facts, None
        weights = zip(self._weights, facts.samples, ways, strict=True)
        return facts, {weight.name: samples for weight, samples, way in weights if way}

    def _exchange_facts(self, clock: Clock) -> list[list[float]]:
        """By rank."""
        own = [
            *(1.0, *rates(self.worker, self._weights), clock.backward_s),
            *(float(weight.samples) for weight in self._weights),
            *(clock.ready_s.get(weight.name, 0.0) for weight in self._weights),
            *(float(clock.others.get(weight.name, 0)) for weight in self._weights),
        ]
        numbers = torch.zeros(self.worker.world_size, self._size)
        numbers[self.worker.rank] = torch.tensor(own)
        table: list[list[float]] = self._sum(_FACTS, numbers).view(numbers.shape).tolist()
        return table

    def _together(self, rows: Sequence[Sequence[float]]) -> Facts:
        _, gbit_s, gflop_s, backward_s, *lists = zip(*rows, strict=True)
        n = len(self._weights)
        samples, ready_s, others = (lists[at : at + n] for at in range(0, len(lists), n))
        return Facts(
            ranks=len(rows),
            gbit_s=min(gbit_s),
            gflop_s=min(gflop_s),
            backward_s=max(backward_s),
            # Of a layer that some rank cannot send as factors, none does.
            samples=[int(max(each)) if min(each) > 0 else 0 for each in samples],
            ready_s=[max(each) for each in ready_s],
            others=[int(max(each)) for each in others],
        )

    def _sum(self, key: str, numbers: torch.Tensor | Sequence[float]) -> torch.Tensor:
        slot = tensor_over(self.worker.gradient(key))
        slot.copy_(torch.as_tensor(numbers).flatten())
        self.worker.push(key)
        self.worker.wait(key)
        return tensor_over(self.worker.parameters(key))


def rates(worker: Worker, weights: Sequence[Weight]) -> tuple[float, float]:
    """Gbit/s of a rank each way, while all ranks exchange; GFLOP/s of its products."""
    probe = tensor_over(worker.gradient(_PROBE))
    probe.fill_(0)
    seconds = []
    for _ in range(_PROBES):
        began = time.perf_counter()
        worker.push(_PROBE)
        worker.wait(_PROBE)
        seconds.append(time.perf_counter() - began)
    gbit_s = probe.numel() * 32e-9 / min(seconds[1:])  # at first, memory is new
    largest = max(weights, key=lambda weight: weight.samples * weight.weight.numel())
    return gbit_s, products_gflop_s(largest.shape, max(1, largest.samples), worker.world_size)


def chosen(
    facts: Facts, shapes: Sequence[Shape], others: int, box: AtBox | None = None
) -> list[bool]:
    """Which weights go as factors.

    others: elements of the other parameters. box: as of `Choice`; each of its cores is taken to
    multiply as fast as the slowest rank does.
    """
    keys: list[tuple[int, int, int, float]] = []  # rows, columns, samples, computing before
    places = {}
    now = 0.0
    for i in sorted(range(len(shapes)), key=facts.ready_s.__getitem__):
        keys.append((max(1, facts.others[i]), 1, 0, facts.ready_s[i] - now))
        now = facts.ready_s[i]
        places[i] = len(keys)
        keys.append((*shapes[i], facts.samples[i], 0.0))
    rest = max(1, others - sum(facts.others))  # a key has an element at least
    keys.append((rest, 1, 0, max(0.0, facts.backward_s - now)))
    *columns, computing = zip(*keys, strict=True)
    sizes = [(c_size_t * len(keys))(*map(int, column)) for column in columns]
    ways, seconds = (c_ubyte * len(keys))(), (c_double * 2)()
    box_gbit_s = facts.gbit_s * facts.ranks  # what it has for each of them is in theirs
    links = facts.ranks, facts.gbit_s, box_gbit_s
    call(
        "choose_box_factors" if box else "choose_factors",
        *links,
        *((box.cores, facts.gflop_s, box.result_bytes) if box else (facts.gflop_s,)),
        *(len(keys), *sizes, (c_double * len(keys))(*computing), ways, seconds),
    )
    if seconds[1] > _PAYS * seconds[0]:
        return [False] * len(shapes)
    return [bool(ways[places[i]]) for i in range(len(shapes))]


def products_gflop_s(shape: Shape, samples: int, ranks: int) -> float:
    """Of such a weight's products, as `Weight.finish` makes them.

    With many samples it is some rows' alone.
    """
    rows, columns = shape
    rows = max(1, min(rows, _PRODUCT // (2 * ranks * samples * columns)))
    left, right = torch.ones(samples, rows), torch.ones(samples, columns)
    total = torch.zeros(rows, columns)
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        for _ in range(ranks):
            add_products(left, right, samples, total)
        total *= 1 / ranks
        seconds.append(time.perf_counter() - began)
    return 2e-9 * ranks * samples * rows * columns / min(seconds)
