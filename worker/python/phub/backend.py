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
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Optional

import torch
from torch import distributed
from torch.distributed import PrefixStore, ReduceOp, Store  # type: ignore[attr-defined]

from phub import _group_box, errors
from phub._group_calls import Agreement, Call
from phub._group_options import (
    all_given,
    are_here,
    goes_here,
    is_later,
    kind_of,
    name_of,
    op_of,
    options,
)
from phub._group_work import Course, Work
from phub._sums import MOVES, Kind, Part, Sums

NAME = "phub"
_GATHERED_BYTES = 64 * 1024  # of tensors that are reduced together: smaller ones go as one
_MOST_MS = 7 * 24 * 3600 * 1000  # of a job's limits
_END_S = 10.0  # that a rank waits for the others at the end


class ProcessGroup(distributed.ProcessGroup):
    """A group of backend "phub". torch.distributed makes it, and calls its methods."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._timeout = timeout
        self._rank, self._size = rank, size
        self._course = Course()
        self._sums: dict[Kind, Sums] = {}
        self._agreement: Optional[Agreement] = None
        # A store may have served a group before this one.
        store = PrefixStore(f"phub{store.add(f'phub{rank}', 1)}", store)
        self._meeting = _group_box.meet(PrefixStore("box", store), rank, size)
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
        tensors, op, later = all_given(tensors, opts)
        if not goes_here(tensors, op):
            return self._other(tensors[0]).allreduce(tensors, options(opts, op))
        call = Call("all_reduce", tensors, name_of(op))
        return self._run(call.packed, lambda: self._reduce(tensors, op), tensors, later=later)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Of several tensors; small ones travel together."""
        tensors, op, later = all_given(tensors, opts)
        if not goes_here(tensors, op):
            return self._other(tensors[0]).allreduce_coalesced(tensors, options(opts, op))
        call = Call("all_reduce", tensors, name_of(op))
        return self._run(call.packed, lambda: self._reduce(tensors, op), tensors, later=later)

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        """The root's tensor becomes the reduction; the others' stay."""
        tensors, op, later = all_given(tensors, opts)
        if not goes_here(tensors, op):
            return self._other(tensors[0]).reduce(tensors, opts)

        def body() -> None:
            if self._rank == opts.rootRank:
                self._reduce(tensors, op)
            else:
                self._reduce(tensors, op, takes=False)

        call = Call("reduce", tensors, name_of(op), opts.rootRank)
        return self._run(call.packed, body, tensors, later=later)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Any:
        """Rank r's output becomes the reduction of input r of all ranks."""
        op = op_of(opts)
        is_one = isinstance(outputs, torch.Tensor)
        (output,), (parts,) = ((outputs,), (inputs,)) if is_one else (outputs, inputs)
        if not goes_here([output, *parts], op):
            return self._other(output).reduce_scatter(outputs, inputs, opts)

        def body() -> None:
            self._scatter(output, [part.contiguous() for part in parts], op)

        def call() -> bytes:
            self._check_parts("reduce_scatter", parts, output)
            return Call("reduce_scatter", parts, name_of(op)).packed()

        return self._run(call, body, [output], later=is_later(opts))

    def _reduce_scatter_base(self, output: Any, given: Any, opts: Any = None) -> Any:
        """As reduce_scatter, of one tensor of all inputs."""
        op = op_of(opts)
        if not goes_here([output, given], op):
            return self._other(output)._reduce_scatter_base(output, given, opts)  # noqa: SLF001

        def body() -> None:
            self._scatter(output, given.contiguous().view(-1).tensor_split(self._size), op)

        def call() -> bytes:
            self._check_whole("reduce_scatter", given, output)
            return Call("reduce_scatter", [given], name_of(op)).packed()

        return self._run(call, body, [output], later=is_later(opts))

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
        if not are_here(every):
            return self._other(every[0]).broadcast(tensors, opts)
        root = opts if isinstance(opts, int) else opts.rootRank
        call = Call("broadcast", every, root=root)
        return self._run(
            call.packed,
            lambda: self._move([(t, root) for t in every]),
            every,
            later=is_later(opts),
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Any:
        """Of each rank's input a copy at every rank."""
        is_one = isinstance(inputs, torch.Tensor)
        (every,), (given,) = ((outputs,), (inputs,)) if is_one else (outputs, inputs)
        if not are_here([given, *every]):
            return self._other(given).allgather(outputs, inputs, opts)

        def body() -> None:
            every[self._rank].copy_(given)
            self._move([(tensor, rank) for rank, tensor in enumerate(every)])

        def call() -> bytes:
            self._check_parts("all_gather", every, given)
            return Call("all_gather", every).packed()

        return self._run(call, body, every, later=is_later(opts))

    def _allgather_base(self, output: Any, given: Any, opts: Any = None) -> Any:
        """As allgather, into one tensor."""
        if not are_here([output, given]):
            return self._other(given)._allgather_base(output, given, opts)  # noqa: SLF001

        def body() -> None:
            flat = output if output.is_contiguous() else torch.empty_like(output.contiguous())
            every = flat.view(-1).tensor_split(self._size)
            every[self._rank].copy_(given.reshape(-1))
            self._move([(row, rank) for rank, row in enumerate(every)])
            if flat is not output:
                output.copy_(flat)

        def call() -> bytes:
            self._check_whole("all_gather", output, given)
            return Call("all_gather", [output]).packed()

        return self._run(call, body, [output], later=is_later(opts))

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
        return self._run(Call("barrier").packed, lambda: None, [], later=is_later(opts))

    # ---- The end.

    def shutdown(self) -> None:
        """Waits for what was begun, and ends together with the other ranks."""
        self._course.close()
        _open.discard(self)
        end = time.monotonic() + _END_S
        for leaving in [sums.leave() for sums in self._sums.values()]:
            leaving.join(max(0.0, end - time.monotonic()))
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
        self,
        call: Callable[[], bytes],
        body: Callable[[], None],
        tensors: Sequence[torch.Tensor],
        *,
        later: bool,
    ) -> Work:
        """call: what it is; raises InvalidError before anything is sent."""

        def whole() -> None:
            try:
                self._agreed(call, body)
            except errors.UnavailableError as failed:
                if self._meeting.server is None:
                    raise
                own = f"the box that rank 0 started has ended ({self._meeting.server})"
                raise errors.UnavailableError(own) from failed

        return self._course.run(whole, Work(tensors), later=later)

    def _agreed(self, call: Callable[[], bytes], body: Callable[[], None]) -> None:
        if self._agreement is None and self._size > 1:
            self._agreement = Agreement(self._sums_of(MOVES), self._rank, self._size)
        try:
            packed = call()
        except errors.InvalidError:
            if self._agreement is not None:
                with contextlib.suppress(errors.Error):
                    self._agreement.fail()
            raise
        if self._agreement is not None:
            self._agreement.reach(packed)
        body()

    def _check_parts(self, name: str, parts: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        """Of each rank one, this rank's as its own."""
        if len(parts) != self._size:
            raise errors.InvalidError(f"{name}: {len(parts)} tensors for {self._size} ranks")
        part = parts[self._rank]
        _check_same(name, part, part.numel(), own)

    def _check_whole(self, name: str, whole: torch.Tensor, own: torch.Tensor) -> None:
        """All ranks' in one, each as long as this rank's own."""
        if whole.numel() % self._size != 0:
            raise errors.InvalidError(f"{name}: {whole.numel()} elements for {self._size} ranks")
        _check_same(name, whole, whole.numel() // self._size, own)

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
        kind = kind_of(tensor.dtype, op)
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
        kind = kind_of(output.dtype, op)
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


def _check_same(name: str, whole: torch.Tensor, numel: int, own: torch.Tensor) -> None:
    if numel != own.numel() or whole.dtype != own.dtype:
        raise errors.InvalidError(
            f"{name}: {own.numel()} {own.dtype} of this rank, where {numel} {whole.dtype} are due"
        )


_open: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()  # those that take part in sums


def _end_all() -> None:
    """For programs that end without destroy_process_group."""
    failed = getattr(sys, "last_value", None) is not None
    for group in list(_open):
        with contextlib.suppress(Exception):
            group.abort() if failed else group.shutdown()
