"""torch.distributed's backend "phub": `import phub; init_process_group("phub")`.

Sums of floating-point tensors on the CPU go through a box, and have the same bits whatever their
size, the transport and the number of boxes are: ((g0 + g1) + g2) + …, in the order of the group's
ranks. float32 is added up in float32; bfloat16 and float16 are added up in float32, and rounded
once; float64, and products, are gathered and added up at each rank. An average is the sum, divided
by the number of ranks, each operation rounded.

What has the same bits anyhow, as it moves or compares numbers or adds integers, goes through
PyTorch's gloo; and what lies on a GPU through NCCL, where torch has it.

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
from phub._sums import Sums

NAME = "phub"
_FORMATS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_IN_ORDER = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)
_GATHERED_BYTES = 64 * 1024  # of tensors that are reduced together: smaller ones go as one
_MOST_MS = 7 * 24 * 3600 * 1000  # of a job's limits


class ProcessGroup(distributed.ProcessGroup):
    """A group of backend "phub". torch.distributed makes it, and calls its methods."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._timeout = timeout
        self._rank, self._size = rank, size
        self._course = Course()
        self._sums: dict[torch.dtype, Sums] = {}
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
        if not _is_in_order(tensors, op):
            return self._other(tensors[0]).allreduce(tensors, _options(opts, op))
        return self._run(lambda: self._reduce(tensors, op), tensors, later=later)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Of several tensors; small ones travel together."""
        tensors, op, later = _given(tensors, opts)
        if not _is_in_order(tensors, op):
            return self._other(tensors[0]).allreduce_coalesced(tensors, _options(opts, op))
        return self._run(lambda: self._reduce(tensors, op), tensors, later=later)

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        """The root's tensor becomes the reduction; the others' stay."""
        tensors, op, later = _given(tensors, opts)
        if not _is_in_order(tensors, op):
            return self._other(tensors[0]).reduce(tensors, opts)

        def body() -> None:
            if self._rank == opts.rootRank:
                self._reduce(tensors, op)
            else:
                copies = [tensor.clone() for tensor in tensors]
                self._reduce(copies, op, kept=range(0))

        return self._run(body, tensors, later=later)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Any:
        """Rank r's output becomes the reduction of input r of all ranks."""
        op = _op_of(opts)
        is_one = isinstance(outputs, torch.Tensor)
        (output,), (parts,) = ((outputs,), (inputs,)) if is_one else (outputs, inputs)
        if not _is_in_order([output, *parts], op):
            return self._other(output).reduce_scatter(outputs, inputs, opts)

        def body() -> None:
            whole = torch.cat([part.reshape(-1) for part in parts])
            begin = sum(part.numel() for part in parts[: self._rank])
            self._scatter(output, whole, range(begin, begin + output.numel()), op)

        return self._run(body, [output], later=_is_later(opts))

    def _reduce_scatter_base(self, output: Any, given: Any, opts: Any = None) -> Any:
        """As reduce_scatter, of one tensor of all inputs."""
        op = _op_of(opts)
        if not _is_in_order([output, given], op):
            return self._other(output)._reduce_scatter_base(output, given, opts)  # noqa: SLF001

        def body() -> None:
            begin = self._rank * output.numel()
            whole = given.clone(memory_format=torch.contiguous_format).reshape(-1)
            self._scatter(output, whole, range(begin, begin + output.numel()), op)

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

    def barrier(self, opts: Any = None, *_: Any) -> Any:
        """Waits for all ranks."""
        if self._size == 1:
            return self._run(lambda: None, [], later=False)
        return self._run(lambda: self._sums_of(torch.float32).barrier(), [], later=_is_later(opts))

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

    def _sums_of(self, dtype: torch.dtype) -> Sums:
        """All ranks come here for the first time with the same collective."""
        if dtype not in self._sums:
            limit = min(int(self._timeout.total_seconds() * 1000), _MOST_MS)
            server = {} if self._meeting.server is None else {"server": self._meeting.server}
            self._sums[dtype] = Sums(
                _FORMATS[dtype], job=f"{self._meeting.job}-{_FORMATS[dtype]}", rank=self._rank,
                world_size=self._size, progress_limit_ms=limit, join_limit_ms=limit, **server,
            )  # fmt: skip
            if not _open:
                atexit.unregister(_end_all)
                atexit.register(_end_all)  # before the workers are destroyed, which would leave
            _open.add(self)
        return self._sums[dtype]

    def _reduce(
        self, tensors: Sequence[torch.Tensor], op: Any, kept: Optional[range] = None
    ) -> None:
        small = [tensor for tensor in tensors if tensor.nbytes < _GATHERED_BYTES]
        if len(small) == 1:
            small = []
        else:
            tensors = [tensor for tensor in tensors if tensor.nbytes >= _GATHERED_BYTES]
        for tensor in tensors:
            self._reduce_one(tensor, op, kept)
        if not small:
            return
        together = torch.cat([tensor.reshape(-1) for tensor in small])
        self._reduce_one(together, op, kept)
        parts = torch.split(together, [tensor.numel() for tensor in small])
        for tensor, part in zip(small, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    def _reduce_one(self, tensor: torch.Tensor, op: Any, kept: Optional[range] = None) -> None:
        if tensor.numel() == 0:
            return
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        if tensor.dtype in _FORMATS and op != ReduceOp.PRODUCT:
            if self._size > 1:
                self._sums_of(tensor.dtype).add_up(flat.data_ptr(), flat.numel(), kept)
        else:
            self._reduce_gathered(flat, op)
        if op == ReduceOp.AVG:
            flat /= self._size
        if flat is not tensor:
            tensor.copy_(flat)

    def _reduce_gathered(self, flat: torch.Tensor, op: Any) -> None:
        every = [torch.empty_like(flat) for _ in range(self._size)]
        self._other(flat).allgather([every], [flat]).wait()
        flat.copy_(every[0])
        for other in every[1:]:
            if op == ReduceOp.PRODUCT:
                flat *= other
            else:
                flat += other

    def _scatter(self, output: torch.Tensor, whole: torch.Tensor, mine: range, op: Any) -> None:
        self._reduce_one(whole, op, kept=mine)
        output.copy_(whole[mine.start : mine.stop].view(output.shape))


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


def _is_in_order(tensors: Sequence[torch.Tensor], op: Any) -> bool:
    """Whether the order of operations decides about the bits, and is to be that of the ranks."""
    return any(op == kind for kind in _IN_ORDER) and all(
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and (tensor.dtype in _FORMATS or tensor.dtype == torch.float64)
        for tensor in tensors
    )
