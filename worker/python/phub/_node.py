"""`phub.ddp(model, node=…)`: a host sends one model to the box, not one for each of its processes.

A bucket's gradients are added up among the processes of the host, which have a part each; a process
exchanges its part with those of its local rank on the other hosts; and all get all means.
"""

# No `from __future__ import annotations`: as in pytorch.py.

import queue
import weakref
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from phub import _device
from phub._alone import Group, done
from phub._buckets import Bucket, gradients_of, start
from phub._buffers import OTHERS
from phub._host import HOSTS, HOSTS_KEY, Host, Node, check_node
from phub._options import check_results
from phub._packed import Packed, part_of
from phub._same import Same
from phub._state import State
from phub._tensors import format_of_job
from phub._watch import Watch
from phub.errors import BadHandleError, Error, InvalidError
from phub.pytorch import REMEDY, DDPState
from phub.worker import Worker

_LOOK_S = 1.0
_COUNTS_RANKS = "it counts ranks, and the box sees one of each host"
_REFUSED = {
    "powersgd": "its factors are of whole matrices, and a process has a part of each",
    "factors": "they take the place of gradients, which the host adds up",
    **dict.fromkeys(("groups", "min_ranks", "max_ranks"), _COUNTS_RANKS),
}


class NodeState(State):
    """What `ddp_hook` needs there.

    `worker` is in a job of all ranks, which only says who is where; `parts`, a DDPState, has this
    process's part of each parameter, in a job JOB-0, JOB-1 … for each local rank, of all hosts.
    """

    def __init__(
        self,
        module: nn.Module,
        node: Node,
        *,
        formats: Optional[Mapping[str, str]] = None,
        **options: Any,
    ) -> None:
        """Joins the jobs; returns when all ranks have.

        node: see `phub.ddp`. Raises InvalidError, in all ranks, if not all hosts have as many
            processes, or not all ranks the same parameters.
        formats, options: see `DDPState`. Raises InvalidError for those that do not go with it.
        """
        for name, why in _REFUSED.items():
            if options.get(name):
                raise InvalidError(
                    f"phub.ddp with node and {name}={options[name]!r}: {why}. Leave one of them out"
                )
        check_node(node)
        check_results("phub.ddp", options)
        options = {name: value for name, value in options.items() if name not in _REFUSED}
        super().__init__(module, options)
        format_of_job(self._parameters)  # or it says what cannot be exchanged
        device = next(iter(self._parameters.values())).device
        beside = {n: v for n, v in options.items() if n not in OTHERS or n == "job"}
        self.worker = Worker({HOSTS: HOSTS_KEY}, **{**beside, "reduction": "sum"})
        host: Optional[Host] = None
        try:
            host = self.host = Host(node, self.worker, device, _digest(self._parameters))
            # Gradients are divided before they are added, as in DDP: float16 has no room.
            is_sum = options.get("reduction") == "sum"
            self._scale = 1.0 if is_sum else 1 / self.host.size
            self._part_of = {n: part_of(p, self.host.size) for n, p in self._parameters.items()}
            given = {"local_world_size": self.host.size, **options}
            given |= {"rank": self.host.index, "world_size": self.host.count}
            given["job"] = f"{self.worker.job}-{self.host.rank}"
            self.parts = _Parts(_Module(self._part_of), formats=formats, **given)
        except Exception as error:
            if host:
                host.leave(error)  # or its other processes would wait for this one
            self.worker.close()
            raise
        self._packed: dict[int, Packed] = {}  # by the bucket's index
        self._streams = [_stream(device), _stream(device)]
        self._added: _Queue = queue.SimpleQueue()
        pushed: _Queue = queue.SimpleQueue()
        self._ties = _Ties(self.host, self.parts, weakref.ref(self))
        start(_push, self._ties, self._added, pushed)
        start(_give, self._ties, pushed)
        self.watch = Watch(self.worker.job, self._parameters, "phub's hook", REMEDY)
        self.same = Same(module, self.worker, options) if self.world_size > 1 else None

    def close(self) -> None:
        """Leaves the jobs: all processes of the host do. The other hosts go on.

        Raises InvalidError if there was a backward(), and never an exchange.
        """
        self._added.put(None)
        self.host.leave(BadHandleError(f"job '{self.host.job}': close() was called"))
        self.parts.close()
        self.leave_others()
        self.watch.close()

    def leave_others(self) -> None:
        """Leaves the jobs of all ranks."""
        for other in (self._buffers, self._used, self.same, self.worker):
            if other:
                other.close()

    @torch.no_grad()
    def broadcast_parameters(self) -> None:
        """Gives the module rank 0's parameters, before the first step."""
        try:
            self._broadcast_parameters()
        except Exception as error:
            raise self._ties.end(error) from error

    def _broadcast_parameters(self) -> None:
        self.host.broadcast(list(self._parameters.values()))
        for name, part in self._part_of.items():
            one = Packed(0, {name: part}, self.host.size)
            one.begin([self._parameters[name]])
            one.fill(1.0)
            part.copy_(one.rows[self.host.rank])
        self.parts.broadcast_parameters()
        for name, part in self._part_of.items():
            one = Packed(0, {name: part}, self.host.size)
            one.begin([self._parameters[name]])
            self.host.give_all(part.detach(), one.rows).wait()
            one.take()

    def exchange(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Adds up the bucket's gradients. In the future is its buffer, with the means.

        Returns and raises as DDPState.exchange does.
        """
        if bucket.index() == 0:
            self.watch.end()
            self._check_frozen()
            if self.same:
                self.same.begin_backward(bucket.buffer())
        packed = self._packed_for(bucket)
        if _device.is_gpu(bucket.buffer().device):
            return self._exchange_on_device(bucket.buffer(), packed)
        packed.fill(self._scale)
        try:
            work = self.host.add_up(packed.rows, packed.mine)
        except Exception as error:
            raise self._ties.end(error) from error
        sent = _Sent(bucket.buffer(), packed=packed, work=work)
        self._outstanding.append(sent)
        self._added.put(sent)
        if bucket.is_last():
            self._wait()
            if self.same:
                self.same.look()
        return sent.future

    def _wait(self) -> None:
        """Also notices that the box is gone while it waits for the host's processes."""
        for bucket in self._outstanding:
            while not bucket.done.wait(_LOOK_S):
                try:
                    self.parts.worker.poll()
                except Error as error:
                    raise self._ties.end(error) from error
        super()._wait()

    def _exchange_on_device(self, buffer: torch.Tensor, packed: Packed) -> Future[torch.Tensor]:
        """On two streams beside that of backward(): sums do not wait for means."""
        sums, means = self._streams
        try:
            if sums:
                sums.wait_stream(torch.cuda.current_stream(buffer.device))
            with torch.cuda.stream(sums):
                packed.fill(self._scale)
                self.host.add_up(packed.rows, packed.mine).wait()
                pushed = self.parts.exchange(packed)  # type: ignore[arg-type]
            future: Future[torch.Tensor] = Future(devices=[buffer.device] if means else None)
            with torch.cuda.stream(means):
                pushed.wait()
                self.host.give_all(packed.mine, packed.rows).wait()
                packed.take()
                future.set_result(buffer)
        except Exception as error:
            raise self._ties.end(error) from error
        return future

    def _packed_for(self, bucket: GradBucket) -> Packed:
        """Memory for this bucket, which is made anew when DDP has made new buckets."""
        found = [(self._key_of(of), gradient) for of, gradient in gradients_of(bucket)]
        names = [name for name, _ in found]
        packed = self._packed.get(bucket.index())
        if packed is None or packed.names != names:
            parts = {name: self._part_of[name] for name in names}
            packed = Packed(bucket.index(), parts, self.host.size)
            self._packed[bucket.index()] = packed
        packed.begin([gradient for _, gradient in found], is_last=bucket.is_last())
        return packed


def group_of(host: Host) -> Group:
    """For DDP: the host's processes make the buckets that its first one has, in this order."""

    class Told(Group):
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def broadcast(self, tensors: Any, *_: Any) -> Any:
            try:
                host.broadcast(tensors)
            except Exception as error:
                raise host.leave(error) from error
            return done(tensors)

    return Told()


@dataclass
class _Ties:
    """What waits for this process."""

    host: Host
    parts: DDPState
    state: weakref.ref[NodeState]  # threads do not keep it alive

    def end(self, error: Exception) -> Exception:
        """After a failure nobody waits any more, if the process lives on. The first error."""
        first = self.host.leave(error)
        self.parts.worker.abandon()
        if state := self.state():
            state.leave_others()
        return first


@dataclass
class _Sent(Bucket):
    """A bucket of which the host adds up the gradients."""

    packed: Any = None  # a Packed
    work: Any = None  # the sum
    pushed: Any = None  # the future of the means of this process's part


_Queue = queue.SimpleQueue[Optional[_Sent]]


def _push(ties: _Ties, added: _Queue, pushed: _Queue) -> None:
    """The thread that pushes sums, in the order of the buckets."""
    while (sent := added.get()) is not None:
        try:
            sent.work.wait()
            sent.pushed = ties.parts.exchange(sent.packed)
        except Exception as error:
            sent.fail(ties.end(error))
        else:
            pushed.put(sent)
        del sent
    pushed.put(None)


def _give(ties: _Ties, pushed: _Queue) -> None:
    """The thread that gives means to all processes of the host, in the same order."""
    while (sent := pushed.get()) is not None:
        try:
            sent.pushed.wait()
            ties.host.give_all(sent.packed.mine, sent.packed.rows).wait()
            sent.packed.take()
        except Exception as error:
            sent.fail(ties.end(error))
        else:
            sent.future.set_result(sent.buffer)
            sent.done.set()
        del sent


class _Parts(DDPState):
    """Of one process of each host."""

    def _compared(self) -> None:
        """NodeState compares the whole models of all ranks."""


class _Module(nn.Module):
    """Parts of parameters, by the names of these."""

    def __init__(self, parts: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._parts = parts

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """All of them."""
        yield from self._parts.items()


def _stream(device: torch.device) -> Optional[torch.cuda.Stream]:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _digest(parameters: Mapping[str, nn.Parameter]) -> int:
    """Of names, shapes and types."""
    said = [(name, tuple(p.shape), str(p.dtype)) for name, p in sorted(parameters.items())]
    return zlib.crc32(repr(said).encode()) % (1 << 24)
