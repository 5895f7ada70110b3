"""Sums of memory of any length over the ranks of a group, in rank order.

A job has keys of few sizes, and of each size several, which take turns. What is to be summed is cut
into pieces of these sizes, the largest first; less than the smallest is filled up. So one job
serves every length, and its memory has a bound; of a long one some pieces are on their way, while
others are copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from phub import errors
from phub._library import call
from phub._waiting import waiting_call
from phub.worker import Worker

SIZES = tuple(256 * 4**power for power in range(6, -1, -1))  # elements, 1 Mi to 256
TURNS = 4
_END_S = 10.0  # that a rank waits for the others at the end
_BYTES = {"f32": 4, "bf16": 2, "f16": 2}


def pieces(elements: int) -> Iterator[tuple[int, int]]:
    """(index in SIZES, first element), in their order; the last may go beyond the end."""
    begin = 0
    for index, size in enumerate(SIZES):
        while elements - begin >= size:
            yield index, begin
            begin += size
    if begin < elements:
        yield len(SIZES) - 1, begin


@dataclasses.dataclass
class _Piece:
    key: int
    address: int
    bytes: int
    filled_up_at: int = 0  # the address where it has a whole key's length


class Sums:
    """One rank of such a job, for one format: f32, bf16 or f16. For one thread at a time.

    bf16 and f16 are added up in f32, and rounded once.
    """

    def __init__(self, dtype: str, **options: Any) -> None:
        """options: of the Worker: server, job, rank, world_size … Waits for the other ranks."""
        keys = {f"{size}.{turn}": size for size in SIZES for turn in range(TURNS)}
        self.worker = Worker(
            keys, gradient_dtype=dtype, parameter_dtype=dtype, optimizer="none",
            on_nonfinite="pass", on_loss="stop", saved="no", **options,
        )  # fmt: skip
        self._bytes = _BYTES[dtype]
        self._handle = self.worker._worker  # noqa: SLF001  # what follows is on every small sum's way
        self._has_met = False
        self._turns = [itertools.cycle(range(TURNS)) for _ in SIZES]
        self._small: dict[int, Any] = {}  # by key of the smallest size: where it is filled up
        smallest = len(SIZES) - 1
        for at in range(smallest * TURNS, len(keys)):
            self._small[at] = ctypes.create_string_buffer(SIZES[smallest] * self._bytes)
        for key in keys:  # that all keys work is known before they are needed
            self.worker.push_null(key)
        self.worker.wait_all()

    def add_up(self, address: int, elements: int, kept: range | None = None) -> None:
        """Each rank's elements at `address` become the sum of all ranks'.

        kept: of which elements; None: of all. The others' values are undefined then. Raises
        RankLostError, which names the rank, MismatchError …; this object cannot be used then.
        """
        flying: deque[_Piece] = deque()
        for at, begin in pieces(elements):
            key = at * TURNS + next(self._turns[at])
            while any(key == piece.key for piece in flying):
                self._land(flying.popleft())
            count = min(SIZES[at], elements - begin)
            reads = kept is None or (begin < kept.stop and begin + count > kept.start)
            piece = _Piece(key, address + begin * self._bytes, count * self._bytes)
            self._send(piece, fills=count == SIZES[at], reads=reads)
            flying.append(piece)
        while flying:
            self._land(flying.popleft())

    def _send(self, piece: _Piece, *, fills: bool, reads: bool) -> None:
        memory = piece.address
        if not fills:
            memory = ctypes.addressof(self._small[piece.key])
            ctypes.memmove(memory, piece.address, piece.bytes)
            piece.filled_up_at = memory
        call("use_memory", self._handle, piece.key, memory, memory if reads else None)
        call("push", self._handle, piece.key, 0)

    def _land(self, piece: _Piece) -> None:
        waiting_call("wait", self._handle, piece.key)
        if piece.filled_up_at:
            ctypes.memmove(piece.address, piece.filled_up_at, piece.bytes)

    def barrier(self) -> None:
        """Waits for all ranks, as a sum of nothing."""
        key = (len(SIZES) - 1) * TURNS + next(self._turns[-1])
        call("push_null", self._handle, key)
        waiting_call("wait", self._handle, key)

    def close(self) -> None:
        """Leaves together with the other ranks; where they do not come, it is lost to them.

        A job goes on without a rank that leaves, and its sums are to be those of all ranks.
        """
        meeting = threading.Thread(target=self._meet, name="phub-end", daemon=True)
        meeting.start()
        meeting.join(_END_S)
        if self._has_met:
            self.worker.close()
        else:
            self.worker.abandon()

    def _meet(self) -> None:
        with contextlib.suppress(errors.Error):
            self.worker.barrier()
            self._has_met = True

    def abandon(self) -> None:
        """To the others this rank is lost."""
        self.worker.abandon()
