"""torch.distributed's backend "phub": `import phub; init_process_group("phub")`.

What ranks reduce on a CPU goes through a box, and has the same bits whatever its size, the
transport and the number of boxes are: ((g0 + g1) + g2) + …, in the order of the group's ranks.
float32 and float64 are added up as they are; bfloat16 and float16 are added up in float32, and
rounded once. An average is the sum, divided by the number of ranks, each operation rounded.

What a rank sends to all goes through the box as well; what it sends to one, through PyTorch's gloo;
and what lies on a GPU through NCCL, where torch has it.

Where the environment has no PHUB_SERVER, rank 0 starts a box for the ranks of this machine
(_group_box.py).
"""

# No `from __future__ import annotations`: as in pytorch.py.

import atexit
import contextlib
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Optional

import torch
from torch import distributed
from torch.distributed import PrefixStore, ReduceOp, Store  # type: ignore[attr-defined]

from phub import _group_box
from phub._group_work import Course, Work
from phub._sums import MOVES, Kind, Part, Sums

NAME = "phub"
_ADDED = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_VALUES = {torch.float32: "f32", torch.float64: "f64", torch.int32: "i32", torch.int64: "i64"}
_OPERATIONS = (
    (ReduceOp.SUM, "add"),
    (ReduceOp.AVG, "add"),
    (ReduceOp.PRODUCT, "multiply"),
    (ReduceOp.MIN, "min"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.BOR, "or"),
)
_GATHERED_BYTES = 64 * 1024  # of tensors that are reduced together: smaller ones go as one
_MOST_MS = 7 * 24 * 3600 * 1000  # of a job's limits


class ProcessGroup(distributed.ProcessGroup):
    """A group of backend "phub". torch.distributed makes it, and calls its methods."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._timeout = timeout
        self._rank, self._size = rank, size
        self._course = Course()
        self._sums: dict[Kind, Sums] = {}
        self._meeting = _group_box.meet(PrefixStore("phub", store), rank, size)
        self._gloo = distributed.ProcessGroupGloo(
            PrefixStore("gloo", store), rank, size, timeout=timeout
        )
        kinds = distributed.ProcessGroup.BackendType
        self._register_backend(torch.device("cpu"), kinds.GLOO, self._gloo)
        self._set_default_backend(kinds.GLOO)
        if torch.cuda.is_available() and distributed.is_nccl_available():
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout  # noqa: SLF001
            nccl = distributed.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
            self._register_backend(torch.device("cuda"), kinds.NCCL, nccl)

    # What torch calls it.
    def getBackendName(self) -> str:  # noqa: N802
        """Its name."""
        return NAME

    def name(self) -> str:
        """Its name."""
        return NAME

    # ---- Reductions.

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        """Each tensor becomes the reduction of all ranks'."""
        tensors, op, later = _given(tensors, opts)
        if not _goes_here(tensors, op):
            return self._other(tensors[0]).allreduce(tensors, _options(opts, op))
        return self._run(lambda: self._reduce(tensors, op), tensors, later=later)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Of several tensors; small ones travel together."""
        tensors, op, later = _given(tensors, opts)
        if not _goes_here(tensors, op):
            return self._other(tensors[0]).allreduce_coalesced(tensors, _options(opts, op))
        return self._run(lambda: self._reduce(tensors, op), tensors, later=later)

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        """The root's tensor becomes the reduction; the others' stay."""
        tensors, op, later = _given(tensors, opts)
        if not _goes_here(tensors, op):
            return self._other(tensors[0]).reduce(tensors, opts)

        def body() -> None:
            if self._rank == opts.rootRank:
                self._reduce(tensors, op)
            else:
                self._reduce(tensors, op, takes=False)

        return self._run(body, tensors, later=later)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Any:
        """Rank r's output becomes the reduction of input r of all ranks."""
        op = _op_of(opts)
        is_one = isinstance(outputs, torch.Tensor)
        (output,), (parts,) = ((outputs,), (inputs,)) if is_one else (outputs, inputs)
        if not _goes_here([output, *parts], op):
            return self._other(output).reduce_scatter(outputs, inputs, opts)

        def body() -> None:
            self._scatter(output, [part.contiguous() for part in parts], op)

        return self._run(body, [output], later=_is_later(opts))

    def _reduce_scatter_base(self, output: Any, given: Any, opts: Any = None) -> Any:
        """As reduce_scatter, of one tensor of all inputs."""
        op = _op_of(opts)
        if not _goes_here([output, given], op) or given.numel() != self._size * output.numel():
            return self._other(output)._reduce_scatter_base(output, given, opts)  # noqa: SLF001

        def body() -> None:
            self._scatter(output, given.contiguous().view(-1).tensor_split(self._size), op)

        return self._run(body, [output], later=_is_later(opts))

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> Any:
        """The same by its name since PyTorch 2.13."""
        return self._reduce_scatter_base(output, given, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Of several pairs."""
        works = [
            self._reduce_scatter_base(output, given, opts)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return works[-1]

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """The same by its name since PyTorch 2.13."""
        return self.reduce_scatter_tensor_coalesced(outputs, inputs, opts)

    # ---- What one rank has, for all.

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        """The root's tensors, at every rank."""
        every = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not _are_here(every):
            return self._other(every[0]).broadcast(tensors, opts)
        root = opts if isinstance(opts, int) else opts.rootRank
        return self._run(
            lambda: self._move([(t, root) for t in every]), every, later=_is_later(opts)
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Any:
        """Of each rank's input a copy at every rank."""
        is_one = isinstance(inputs, torch.Tensor)
        (every,), (given,) = ((outputs,), (inputs,)) if is_one else (outputs, inputs)
        if not _are_here([given, *every]):
            return self._other(given).allgather(outputs, inputs, opts)

        def body() -> None:
            every[self._rank].copy_(given)
            self._move([(tensor, rank) for rank, tensor in enumerate(every)])

        return self._run(body, every, later=_is_later(opts))

    def _allgather_base(self, output: Any, given: Any, opts: Any = None) -> Any:
        """As allgather, into one tensor."""
        is_here = _are_here([output, given]) and output.is_contiguous()
        if not is_here or output.numel() != self._size * given.numel() or output.numel() == 0:
            return self._other(given)._allgather_base(output, given, opts)  # noqa: SLF001

        def body() -> None:
            every = output.view(-1).chunk(self._size)
            every[self._rank].copy_(given.reshape(-1))
            self._move([(row, rank) for rank, row in enumerate(every)])

        return self._run(body, [output], later=_is_later(opts))

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> Any:
        """The same by its name since PyTorch 2.13."""
        return self._allgather_base(output, given, opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Of several pairs."""
        works = [
            self._allgather_base(output, given, opts)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return works[-1]

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """The same by its name since PyTorch 2.13."""
        return self.allgather_into_tensor_coalesced(outputs, inputs, opts)

    def barrier(self, opts: Any = None, *_: Any) -> Any:
        """Waits for all ranks."""
        if self._size == 1:
            return self._run(lambda: None, [], later=False)
        return self._run(lambda: self._sums_of(MOVES).barrier(), [], later=_is_later(opts))

    # ---- The end.

    def shutdown(self) -> None:
        """Waits for what was begun, and ends together with the other ranks."""
        self._course.close()
        _open.discard(self)
        while self._sums:
            self._sums.popitem()[1].close()

    def abort(self) -> None:
        """Ends at once: the others' collectives fail."""
        _open.discard(self)
        while self._sums:
            self._sums.popitem()[1].abandon()
        with contextlib.suppress(RuntimeError):  # not every version of gloo can
            self._gloo.abort()

    # ---- Inside.

    def _other(self, tensor: torch.Tensor) -> Any:
        """The backend for what is not summed here."""
        return self._get_backend(tensor.device)

    def _run(
        self, body: Callable[[], None], tensors: Sequence[torch.Tensor], *, later: bool
    ) -> Work:
        return self._course.run(body, Work(tensors), later=later)

    def _sums_of(self, kind: Kind) -> Sums:
        """All ranks come here for the first time with the same collective."""
        if kind not in self._sums:
            limit = min(int(self._timeout.total_seconds() * 1000), _MOST_MS)
            server = {} if self._meeting.server is None else {"server": self._meeting.server}
            name = "-".join(word for word in (self._meeting.job, *kind) if word)
            self._sums[kind] = Sums(
                kind, job=name, rank=self._rank,
                world_size=self._size, progress_limit_ms=limit, join_limit_ms=limit, **server,
            )  # fmt: skip
            if not _open:
                atexit.unregister(_end_all)
                atexit.register(_end_all)  # before the workers are destroyed, which would leave
            _open.add(self)
        return self._sums[kind]

    def _reduce(self, tensors: Sequence[torch.Tensor], op: Any, *, takes: bool = True) -> None:
        """takes: the reductions are wanted here; else the tensors stay."""
        small: list[torch.Tensor] = []
        rest: list[torch.Tensor] = []
        for tensor in tensors:
            is_small = tensor.nbytes < _GATHERED_BYTES and tensor.dtype == tensors[0].dtype
            (small if is_small and len(tensors) > 1 else rest).append(tensor)
        for tensor in rest:
            self._reduce_one(tensor, op, takes=takes)
        if not small:
            return
        together = torch.cat([tensor.reshape(-1) for tensor in small])
        self._reduce_one(together, op, takes=takes)
        parts = torch.split(together, [tensor.numel() for tensor in small])
        for tensor, part in zip(small, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    def _reduce_one(self, tensor: torch.Tensor, op: Any, *, takes: bool) -> None:
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        kind = _kind_of(tensor.dtype, op)
        if kind is None:
            flat = flat if takes else flat.clone()
            self._multiply_gathered(flat)
        elif self._size > 1:
            address = flat.data_ptr()
            self._sums_of(kind).run(Part(address, flat.nbytes, True, address if takes else None))
        if takes and op == ReduceOp.AVG:
            flat /= self._size
        if takes and flat is not tensor:
            tensor.copy_(flat)

    def _multiply_gathered(self, flat: torch.Tensor) -> None:
        """A product of 16 bits: each is rounded."""
        every = [flat.clone() for _ in range(self._size)]
        self._move([(tensor, rank) for rank, tensor in enumerate(every)])
        flat.copy_(every[0])
        for other in every[1:]:
            flat *= other

    def _scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: Any) -> None:
        """parts: of each rank, contiguous."""
        kind = _kind_of(output.dtype, op)
        flat = output if output.is_contiguous() else torch.empty_like(output.contiguous())
        if kind is None:
            reduced = [part.clone() for part in parts]
            for part in reduced:
                self._multiply_gathered(part)
            flat.copy_(reduced[self._rank].view(flat.shape))
        elif self._size == 1:
            flat.copy_(parts[0].view(flat.shape))
        else:
            into = [flat.data_ptr() if rank == self._rank else None for rank in range(self._size)]
            self._sums_of(kind).run(*(
                Part(part.data_ptr(), part.nbytes, True, to)
                for part, to in zip(parts, into, strict=True)
            ))  # fmt: skip
        if op == ReduceOp.AVG:
            flat /= self._size
        if flat is not output:
            output.copy_(flat)

    def _move(self, tensors: Sequence[tuple[torch.Tensor, int]]) -> None:
        """tensors: each with the rank that has it."""
        if self._size == 1:
            return
        flat = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor, _ in tensors]
        parts = []
        for each, (_, rank) in zip(flat, tensors, strict=True):
            is_mine, address = rank == self._rank, each.data_ptr()
            parts.append(Part(address, each.nbytes, is_mine, None if is_mine else address))
        self._sums_of(MOVES).run(*parts)
        for each, (tensor, _) in zip(flat, tensors, strict=True):
            if each is not tensor:
                tensor.copy_(each)


_open: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()  # those that take part in sums


def _end_all() -> None:
    """For programs that end without destroy_process_group."""
    failed = getattr(sys, "last_value", None) is not None
    for group in list(_open):
        with contextlib.suppress(Exception):
            group.abort() if failed else group.shutdown()


def _given(tensors: Any, opts: Any) -> tuple[list[torch.Tensor], Any, bool]:
    """Tensors, operation, and whether the caller goes on before it is complete."""
    every = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return every, _op_of(opts), _is_later(opts)


def _op_of(opts: Any) -> Any:
    if opts is None:
        return ReduceOp.SUM
    return opts.reduceOp if hasattr(opts, "reduceOp") else opts


def _is_later(opts: Any) -> bool:
    return bool(getattr(opts, "asyncOp", True))


def _options(opts: Any, op: Any) -> Any:
    if hasattr(opts, "reduceOp"):
        return opts
    made = distributed.AllreduceOptions()
    made.reduceOp = op
    return made


def _are_here(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.device.type == "cpu" and tensor.layout == torch.strided for tensor in tensors)


def _kind_of(dtype: torch.dtype, op: Any) -> Optional[Kind]:
    """None: the box does not do that."""
    operation = next((name for kind, name in _OPERATIONS if op == kind), None)
    if operation == "add" and dtype in _ADDED:
        return Kind(_ADDED[dtype])
    if operation == "or" and not dtype.is_floating_point:
        return MOVES
    if operation in (None, "or") or dtype not in _VALUES:
        return None
    if op == ReduceOp.AVG and not dtype.is_floating_point:
        return None
    return Kind("f32", operation, _VALUES[dtype])


def _goes_here(tensors: Sequence[torch.Tensor], op: Any) -> bool:
    """Else another backend does it, where no order changes the bits."""
    products = op == ReduceOp.PRODUCT
    return _are_here(tensors) and all(
        _kind_of(t.dtype, op) is not None or (products and t.dtype in _ADDED) for t in tensors
    )
