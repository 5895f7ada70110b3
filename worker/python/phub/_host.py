"""The processes of one host, which exchange tensors among themselves through torch.distributed."""

# No `from __future__ import annotations`: as in pytorch.py.

import contextlib
import os
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch
from torch import distributed
from torch.distributed import PrefixStore, ProcessGroup, TCPStore  # type: ignore[attr-defined]

from phub._options import Key
from phub._views import tensor_over
from phub.errors import Error, InvalidError, RankLostError
from phub.worker import Worker

Node = Union[str, ProcessGroup]
_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
HOSTS = "hosts"  # the key in which each rank says where it is
_SAID = 3  # numbers of a rank: its host's first rank, counted from 1; a port; its model's digest
HOSTS_KEY = Key(_SAID * 1024)  # of so many ranks, which a job has at most


@dataclass
class _Place:
    """Of a process in its host."""

    rank: int
    size: int
    first: int  # the host's first rank in the job of all
    root: int  # which process that is
    backend: str
    store: Any  # None: it is that of the host's first process
    is_local: bool


class Host:
    """The place of this process, and a connection to the others of its host.

    Collectives must come in the same order in all of them. Sums and means are asked for by two
    threads, so they have a group each.
    """

    def __init__(self, node: Node, everyone: Worker, device: torch.device, digest: int) -> None:
        """All ranks call it. Raises InvalidError, in all, if hosts or models are not alike.

        everyone: a worker in a job of all ranks, with the key HOSTS, a sum.
        digest: of what all ranks must have, below 2**24.
        """
        if isinstance(node, str):
            place = _place_by_launcher(everyone, device)
        else:
            place = _place_in(node, everyone)
        serves = place.is_local and place.store is not None
        said = _said_by_all(everyone, [place.first + 1, place.store.port if serves else 0, digest])
        self.index, self.count = _checked(said, place.first, place.size)
        if place.store is None:
            place.store = TCPStore("127.0.0.1", int(said[place.first, 1]), is_master=False)
        self.rank, self.size, self._root = place.rank, place.size, place.root
        self._store = place.store  # which serves the others
        self._sums: Optional[ProcessGroup] = _group(place, "sums")
        self._means: Optional[ProcessGroup] = _group(place, "means")
        self._kept: deque[torch.Tensor] = deque(maxlen=4)
        self._error: Optional[Exception] = None
        self.job, self._lock = everyone.job, threading.Lock()

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """They become those of the host's first rank."""
        options = distributed.BroadcastOptions()
        options.rootRank = self._root
        for tensor in tensors:
            sent = tensor.detach().contiguous().clone()
            self._kept.append(sent)  # gloo's thread must not have the last reference: see Group
            self._connected(self._sums).broadcast([sent], options).wait()
            tensor.detach().copy_(sent)

    def add_up(self, rows: torch.Tensor, mine: torch.Tensor) -> Any:
        """Begins: of all processes' rows, the sum of this process's goes to `mine`."""
        return self._connected(self._sums)._reduce_scatter_base(mine, rows.view(-1))

    def give_all(self, mine: torch.Tensor, rows: torch.Tensor) -> Any:
        """Begins: each process's row is what it has."""
        return self._connected(self._means)._allgather_base(rows.view(-1), mine)

    def leave(self, error: Exception) -> Exception:
        """Ends the connection, or others would wait for this process. Returns the first error.

        error: what later calls raise; of another kind than phub's, it is of the connection itself.
        """
        if not isinstance(error, Error):
            error = RankLostError(
                f"job '{self.job}': the processes of this host cannot exchange gradients any "
                f"more, as after the end of one of them: {error}"
            )
        with self._lock:
            self._error = self._error or error
            groups = [group for group in (self._sums, self._means) if group is not None]
            self._sums = self._means = None
        # Gloo ends when nobody refers to it, and then waits for what has begun, without the GIL.
        threading.Thread(target=_end, args=(groups,), name="phub-host", daemon=True).start()
        return self._error

    def _connected(self, group: Optional[ProcessGroup]) -> Any:
        if group is None and self._error:
            raise self._error
        return group


def _end(groups: list[ProcessGroup]) -> None:
    for group in groups:
        with contextlib.suppress(RuntimeError):
            group.abort()  # of NCCL
    groups.clear()


def check_node(node: object) -> None:
    """Raises InvalidError if it says nothing of where this process is."""
    if isinstance(node, ProcessGroup):
        if (backend := distributed.get_backend(node)) not in ("gloo", "nccl"):
            raise InvalidError(f"node: the group's backend is {backend}; it must be gloo or nccl")
        return
    if node != "reduce":
        raise InvalidError(
            f"node={node!r}: it is 'reduce', or a process group that has this host's ranks"
        )
    found = [os.environ.get(name, "") for name in _LOCAL]
    if not all(each.isdecimal() for each in found) or int(found[0]) >= int(found[1]):
        raise InvalidError(
            f"node='reduce' with LOCAL_RANK={found[0]!r} and LOCAL_WORLD_SIZE={found[1]!r}: they "
            "say which of the host's processes this one is, as torchrun and `phub run` set them. "
            "Set both, or give the process group of this host's ranks: node=group"
        )


def _place_by_launcher(everyone: Worker, device: torch.device) -> _Place:
    rank, size = (int(os.environ[name]) for name in _LOCAL)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store: Any = None
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return _Place(rank, size, everyone.rank - rank, 0, backend, store, is_local=True)


def _place_in(group: ProcessGroup, everyone: Worker) -> _Place:
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    members: list[Any] = [None] * size
    distributed.all_gather_object(members, everyone.rank, group=group)
    first = min(members)
    # A part of its store that no earlier job of this name has written to.
    shared: Any = group.get_group_store()
    name = f"phub/{everyone.job}"
    store = PrefixStore(f"{name}/{shared.add(f'{name}/{rank}', 1)}", shared)
    backend = distributed.get_backend(group)
    return _Place(rank, size, first, members.index(first), backend, store, is_local=False)


def _said_by_all(everyone: Worker, mine: list[int]) -> torch.Tensor:
    """Of each rank, what it says."""
    slot = tensor_over(everyone.gradient(HOSTS)).view(-1, _SAID)
    slot.zero_()
    slot[everyone.rank] = torch.tensor(mine)
    everyone.push(HOSTS)
    everyone.wait(HOSTS)
    found = tensor_over(everyone.parameters(HOSTS)).view(-1, _SAID)
    return found[: everyone.world_size].to(torch.int64)


def _checked(said: torch.Tensor, first: int, size: int) -> tuple[int, int]:
    """Which host this is, and how many there are."""
    firsts, _, digests = said.t().tolist()
    hosts = dict(sorted(Counter(firsts).items()))
    if len(set(hosts.values())) > 1 or hosts[first + 1] != size or 0 in hosts:
        found = ", ".join(f"{count} with rank {at - 1}" for at, count in list(hosts.items())[:8])
        raise InvalidError(
            f"node: the {len(firsts)} ranks are not on hosts with as many processes each ({found}; "
            f"here there should be {size}): each process exchanges its part with one on every "
            "other host. Start as many on each, with ranks that follow each other, or leave node "
            "out"
        )
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise InvalidError(
                f"node: rank {rank} has other parameters than rank 0 (names, shapes or types): "
                "every rank makes the same model"
            )
    return list(hosts).index(first + 1), len(hosts)


def _group(place: _Place, name: str) -> ProcessGroup:
    """One that is nobody's default: that is the program's."""
    store = PrefixStore(name, place.store)
    backend: Any
    if place.backend == "nccl":
        kind, backend = ProcessGroup.BackendType.NCCL, distributed.ProcessGroupNCCL
        options = backend.Options()
    else:
        kind, backend = ProcessGroup.BackendType.GLOO, distributed.ProcessGroupGloo
        options = backend._Options()
        options._devices = [
            backend.create_device(hostname="127.0.0.1")
            if place.is_local
            else backend.create_default_device()
        ]
    group = ProcessGroup(store, place.rank, place.size)
    group._set_default_backend(kind)
    made = backend(store, place.rank, place.size, options)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, made)
    return group
