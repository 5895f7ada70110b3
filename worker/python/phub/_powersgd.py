"""PowerSGD (Vogels, Karimireddy and Jaggi 2019): gradients of matrices as products of thin ones.

Of a gradient G of M x N the ranks exchange P = G Q (M x r), and then Q = G^T P (N x r), where P is
the mean of theirs with orthonormal columns: two keys of the job, whose means the box makes. The
gradient of all ranks is P Q^T. What that lacks of a rank's own gradient is the rank's residual,
which is added to its next gradient (Algorithm 2 with 1's error feedback). The mean of the Qs is
what the next step begins with. Factors lie transposed in memory.

P and P Q^T are the same bits on all ranks, on any CPU: only products of elements, and sums in an
order of their own, make them of what the box sent. Q needs no such care: it decides how well P fits
the gradients, and the next P is the same for all again. So nothing but the box's results keeps
ranks together.

In the first steps a gradient may go whole, by a key of its own, before its matrix does.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from phub import _device
from phub._memory import Memory
from phub._options import Key
from phub.errors import InvalidError
from phub.worker import Worker

_FACTORS = ("P", "Q")
_SMALL = 1e-8  # of its length: a column that others leave no more of is none
_FEW = 64  # numbers that Python adds as fast
_BLOCK = 1 << 16  # elements that stay in a core's cache


@dataclass(frozen=True)
class PowerSGD:
    """How gradients are exchanged as factors.

    rank: the columns of the factors.
    start: in so many steps, the first ones, gradients are exchanged whole.
    least_ratio: a parameter of two dimensions or more is exchanged as factors if it has more than
        so many times their elements; at least 1.
    """

    rank: int
    start: int = 0
    least_ratio: float = 2.0

    def check(self) -> None:
        """Raises InvalidError."""
        for field, least in (("rank", 1), ("start", 0)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidError(f"{field} is a whole number, at least {least}")
        ratio = self.least_ratio
        is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
        if not is_number or not 1 <= ratio < math.inf:
            raise InvalidError("least_ratio is a number, at least 1")

    def is_worth_it(self, rows: int, columns: int) -> bool:
        return self.least_ratio * self.rank * (rows + columns) < rows * columns


class Matrices:
    """Which parameters of a model are exchanged as factors; the others are none of its business."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], how: int | PowerSGD) -> None:
        """`how`: a number is a rank. Raises InvalidError.

        Parameters with two dimensions or more are matrices, of as many rows as the first one has.
        """
        given, how = how, how if isinstance(how, PowerSGD) else PowerSGD(how)
        try:
            how.check()
        except InvalidError as error:
            raise InvalidError(f"powersgd={given!r}: {error}") from None
        self._how = how
        for name, parameter in parameters.items():
            if _device.is_gpu(parameter.device):
                raise InvalidError(
                    f"powersgd: parameter '{name}' is on {parameter.device}, and PowerSGD's "
                    "matrices are on the CPU"
                )
        self._matrices = {
            name: Matrix(name, rows, parameter.numel() // rows, how)
            for name, parameter in parameters.items()
            if (rows := _rows(parameter)) and how.is_worth_it(rows, parameter.numel() // rows)
        }
        if not self._matrices:
            raise InvalidError(
                f"powersgd={given!r}: no parameter is a matrix with more than "
                f"{how.least_ratio:g} times the elements of two factors of {how.rank} columns. "
                "Take a smaller rank, or leave powersgd out"
            )

    def get(self, name: str) -> Matrix | None:
        """None: the parameter is a key of its own."""
        return self._matrices.get(name)

    @property
    def begins_whole(self) -> bool:
        """Whether gradients of matrices go by keys of their own, too, in the first steps."""
        return self._how.start > 0

    @property
    def keys(self) -> dict[str, Key]:
        """The factors, by name."""
        return {
            key: Key(size * matrix.rank, shape=(matrix.rank, size))
            for matrix in self._matrices.values()
            for key, size in zip(matrix.keys, (matrix.rows, matrix.columns), strict=True)
        }

    def formats(self, given: Mapping[str, str]) -> dict[str, str]:
        """Those of the other keys, and of the factors, which are float32 in any case."""
        return {**given, **{f"*{ending}": "f32" for ending in _endings(self._how.start)}}

    def join(self, worker: Worker) -> None:
        """Before the first step."""
        worker.of_branches["phub.powersgd"] = self
        for matrix in self._matrices.values():
            matrix.join(worker)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """What this rank has between steps, by parameter: copies."""
        return {
            name: {
                "residual": matrix.residual.clone(),
                "q": matrix.q.clone(),
                "steps": torch.tensor(matrix.steps),
            }
            for name, matrix in self._matrices.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """What `state_dict` gave, for the same parameters and rank. Raises InvalidError."""
        if state.keys() != self._matrices.keys():
            raise InvalidError(
                f"load_state_dict: the state is of {', '.join(map(str, state)) or 'nothing'}, and "
                f"PowerSGD's matrices are {', '.join(self._matrices)}"
            )
        all_whole = torch.tensor(self._how.start)  # where a state does not say it
        steps = {name: parts.get("steps", all_whole) for name, parts in state.items()}
        for name, matrix in self._matrices.items():
            for part, mine in (("residual", matrix.residual), ("q", matrix.q)):
                given = state[name].get(part)
                if given is None or given.shape != mine.shape:
                    raise InvalidError(
                        f"load_state_dict: the state has no {part} of {tuple(mine.shape)} for "
                        f"'{name}'. It is of another model, or another rank of powersgd"
                    )
            made = steps[name]
            if made.numel() != 1 or made.is_floating_point() or made < 0:
                raise InvalidError(
                    f"load_state_dict: the steps of '{name}' are {made}, not a number of steps"
                )
        for name, matrix in self._matrices.items():
            matrix.residual.copy_(state[name]["residual"])
            matrix.q.copy_(state[name]["q"])
            matrix.steps = int(steps[name])


class Matrix:
    """The gradient of a parameter.

    A step is begin(), answer() and finish(), in this order, each of one thread. `answer` and
    `finish` wait for the box.
    """

    def __init__(self, name: str, rows: int, columns: int, how: PowerSGD) -> None:
        self.rows, self.columns, self.rank = rows, columns, how.rank
        self.keys = tuple(f"{name}{ending}" for ending in _endings(how.start))
        self.steps = 0  # of this training, whole ones included
        self._start = how.start
        self.residual = torch.zeros(rows, columns)
        self.q = torch.empty(self.rank, columns)  # of the next step
        self._name = name
        self._p, self._own_q, self._mean_q = (
            torch.zeros(self.rank, n) for n in (rows, columns, columns)
        )
        self._new_columns(range(self.rank), 0)
        self._worker: Worker
        self._gradient: torch.Tensor  # where the result goes
        self._sum: torch.Tensor  # of it and the residual
        self._finite = True  # is it?
        self._basis: torch.Tensor | None = None  # the mean P, orthonormal; None: not finite

    def join(self, worker: Worker) -> None:
        self._worker = worker
        pairs = (self._p, self._p), (self._own_q, self._mean_q)
        for key, (sent, received) in zip(self.keys, pairs, strict=True):
            worker.register_memory(
                key, _memory(sent), _memory(received), gradient_dtype="f32", parameter_dtype="f32"
            )

    def next_is_whole(self) -> bool:
        """Counts a step. True: its gradient is to be exchanged as it is, not with begin()."""
        self.steps += 1
        return self.steps <= self._start

    @torch.no_grad()
    def begin(self, gradient: torch.Tensor) -> None:
        """Pushes P. The gradient, contiguous, is lent until `finish`: the result is there then."""
        self._gradient = gradient.view(self.rows, self.columns)
        self._sum = self._gradient.float()  # itself, if it is float32
        self._sum += self.residual
        self._finite = math.isfinite(self._sum.sum())
        if self._finite:
            torch.mm(self.q, self._sum.T, out=self._p)
        else:
            self._p.fill_(math.nan)
        self._worker.push(self.keys[0])

    @torch.no_grad()
    def answer(self) -> None:
        """Waits for P, and pushes Q."""
        self._worker.wait(self.keys[0])
        self._basis = orthonormal(self._p)
        if self._basis is None:
            self._worker.push_null(self.keys[1])
            return
        if self._finite:
            torch.mm(self._basis, self._sum, out=self._own_q)
        else:
            self._own_q.fill_(math.nan)
        self._worker.push(self.keys[1])

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for Q. If a rank's gradient was not finite, the result is NaN, and nothing else is.

        The residual then stays as it was: the step is lost for all, as with DDP.
        """
        self._worker.wait(self.keys[1])
        if self._basis is None or not math.isfinite(self._mean_q.double().sum()):
            self._gradient.fill_(math.nan)
            return
        if self._finite:  # or the box has excluded this rank
            torch.addmm(self._sum, self._basis.T, self._own_q, alpha=-1, out=self.residual)
        product(self._basis, self._mean_q, self._gradient)
        self._warm_start()

    def _warm_start(self) -> None:
        """The mean Q, whose columns may have any length: those of P get length 1."""
        largest = self._mean_q.abs().amax(1, keepdim=True)
        torch.div(self._mean_q, largest, out=self.q)
        gone = [k for k, value in enumerate(largest.flatten().tolist()) if value == 0]
        self._new_columns(gone, self._worker.round(self.keys[1]))

    def _new_columns(self, columns: Iterable[int], round_: int) -> None:
        """Of normal numbers, which follow from the name and the round."""
        for k in columns:
            seed = zlib.crc32(f"{self._name} {round_} {k}".encode())
            random = torch.Generator().manual_seed(seed)
            self.q[k] = torch.randn(self.columns, generator=random)


def orthonormal(given: torch.Tensor) -> torch.Tensor | None:
    """These rows by Gram and Schmidt; zeros for one that is a combination of those before it.

    None: an element is not finite.
    """
    vectors = given.double()
    squares = _totals(vectors * vectors)
    if not all(map(math.isfinite, squares)):
        return None
    for k, square in enumerate(squares):
        vector, others = vectors[k], vectors[k + 1 :]
        left = math.sqrt(_totals((vector * vector)[None])[0])
        if left <= _SMALL * math.sqrt(square):
            vector.zero_()
            continue
        vector /= left
        parts = torch.tensor(_totals(others * vector), dtype=torch.float64)
        others -= parts[:, None] * vector
    return vectors.float()


def product(left: torch.Tensor, right: torch.Tensor, into: torch.Tensor) -> None:
    """Left^T right, whose terms are added in the order of the rows.

    torch.mm has an order of additions for each kind of CPU.
    """
    size = max(1, _BLOCK // into.shape[1])
    term, place = torch.empty(2, size, into.shape[1])
    for at in range(0, into.shape[0], size):
        block, parts = into[at : at + size], left[:, at : at + size, None]
        total = block if into.dtype == torch.float32 else place[: len(block)]
        torch.mul(parts[0], right[0], out=total)
        for part, row in zip(parts[1:], right[1:], strict=True):
            total += torch.mul(part, row, out=term[: len(block)])
        if total is not block:
            block.copy_(total)


def _totals(rows: torch.Tensor) -> list[float]:
    """The sum of each row, of halves of halves: torch.sum has an order for each kind of CPU."""
    while (size := rows.shape[-1]) > _FEW:
        half = (size + 1) // 2
        rest = rows[:, half:]
        rows = rows[:, :half].clone()
        rows[:, : size - half] += rest
    return [math.fsum(row) for row in rows.tolist()]


def _rows(parameter: nn.Parameter) -> int:
    """0: it is no matrix."""
    return int(parameter.shape[0]) if parameter.dim() > 1 else 0


def _endings(start: int) -> tuple[str, ...]:
    """Of the keys' names: ranks that begin at other steps would wait for each other."""
    return tuple(f":{factor}@{start}" if start else f":{factor}" for factor in _FACTORS)


def _memory(tensor: torch.Tensor) -> Memory:
    return Memory(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)
