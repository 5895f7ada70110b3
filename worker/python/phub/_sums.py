"""What the ranks of a group have in memory of any length, brought together in rank order.

A job has keys of few sizes, and of each size several, which take turns. What is to be brought
together is cut into pieces of these sizes, the largest first; less than the smallest is filled up.
So one job serves every length, and its memory has a bound; of a long one some pieces are on their
way, while others are copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from phub import errors
from phub._library import call
from phub._options import Key
from phub._waiting import waiting_call
from phub.worker import Worker

SIZES = tuple(256 * 4**power for power in range(6, -1, -1))  # elements, 1 Mi to 256
TURNS = 4
_BYTES = {"f32": 4, "bf16": 2, "f16": 2}


class Kind(NamedTuple):
    """What a job does with numbers."""

    dtype: str  # f32, bf16 or f16: they are added up, those of 16 bits in f32, and rounded once
    operation: str = ""  # with it `dtype` is f32, of words of 4 bytes: those of `Key`
    value_type: str = ""


MOVES = Kind("f32", "or", "i32")  # what one rank has, and the others have not


class Part(NamedTuple):
    """Some of the memory, on each rank of the same length."""

    address: int
    bytes: int
    gives: bool  # this rank's is brought in
    into: int | None  # the address for what comes out of it; None: it is not wanted here


@dataclasses.dataclass
class _Piece:
    key: int
    bytes: int
    into: int | None
    filled_up_at: int | None = None  # where it has a whole key's length


def cut(length: int, unit: int) -> Iterator[tuple[int, int]]:
    """(index in SIZES, first byte) of the pieces; the last may go beyond the end."""
    begin = 0
    for index, elements in enumerate(SIZES):
        size = elements * unit
        while length - begin >= size:
            yield index, begin
            begin += size
    if begin < length:
        yield len(SIZES) - 1, begin


class Sums:
    """One rank of such a job. For one thread at a time."""

    def __init__(self, kind: Kind, **options: Any) -> None:
        """options: of the Worker: server, job, rank, world_size … Waits for the other ranks."""
        keys: dict[str, int | Key] = {
            f"{size}.{turn}": Key(size, operation=kind.operation, value_type=kind.value_type)
            for size in SIZES
            for turn in range(TURNS)
        }
        self.worker = Worker(
            keys, gradient_dtype=kind.dtype, parameter_dtype=kind.dtype, optimizer="none",
            on_nonfinite="pass", on_loss="stop", saved="no", **options,
        )  # fmt: skip
        self._unit = _BYTES[kind.dtype]
        self._handle = self.worker._worker  # noqa: SLF001  # what follows is on every small sum's way
        self._has_met = False
        self._failure: errors.Error | None = None
        self._turns = [itertools.cycle(range(TURNS)) for _ in SIZES]
        self._small: dict[int, Any] = {}  # by key of the smallest size: where it is filled up
        smallest = len(SIZES) - 1
        for at in range(smallest * TURNS, len(keys)):
            self._small[at] = ctypes.create_string_buffer(SIZES[smallest] * self._unit)
        for key in keys:  # that all keys work is known before they are needed
            self.worker.push_null(key)
        self.worker.wait_all()

    def run(self, *parts: Part) -> None:
        """Brings together all ranks' parts.

        Raises RankLostError, which names the rank, InvalidError …; and so does every later call.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._run(parts)
        except BaseException as failure:
            if isinstance(failure, errors.Error):
                self._failure = failure
            else:
                self._failure = errors.InvalidError("a call was interrupted")
            self.worker.abandon()  # nothing reads or writes the parts' memory any more
            raise

    def _run(self, parts: Sequence[Part]) -> None:
        flying: deque[_Piece] = deque()
        for part in parts:
            for at, begin in cut(part.bytes, self._unit):
                key = at * TURNS + next(self._turns[at])
                while any(key == piece.key for piece in flying):
                    self._land(flying.popleft())
                size = SIZES[at] * self._unit
                into = None if part.into is None else part.into + begin
                piece = _Piece(key, min(size, part.bytes - begin), into)
                self._send(piece, part.address + begin, part.gives, fills=piece.bytes == size)
                flying.append(piece)
        while flying:
            self._land(flying.popleft())

    def _send(self, piece: _Piece, address: int, gives: bool, *, fills: bool) -> None:
        into = piece.into
        if not fills:
            whole = ctypes.addressof(self._small[piece.key])
            if gives:
                ctypes.memmove(whole, address, piece.bytes)
            piece.filled_up_at = address = whole
            into = None if into is None else whole
        call("use_memory", self._handle, piece.key, address, into)
        if gives:
            call("push", self._handle, piece.key, 0)
        else:
            call("push_null", self._handle, piece.key)

    def _land(self, piece: _Piece) -> None:
        waiting_call("wait", self._handle, piece.key)
        if piece.filled_up_at is not None and piece.into is not None:
            ctypes.memmove(piece.into, piece.filled_up_at, piece.bytes)

    def leave(self) -> threading.Thread:
        """Begins to meet the other ranks, to leave together: the thread that does so."""
        meeting = threading.Thread(target=self._meet, name="phub-end", daemon=True)
        meeting.start()
        return meeting

    def close(self) -> None:
        """Ends; where the others have not met it, it is lost to them.

        A job goes on without a rank that leaves, and its sums are to be those of all ranks.
        """
        if self._has_met:
            self.worker.close()
        else:
            self.abandon()

    def _meet(self) -> None:
        if self._failure is not None:
            return
        with contextlib.suppress(errors.Error):
            self.worker.barrier()
            self._has_met = True

    def abandon(self) -> None:
        """To the others this rank is lost."""
        if self._failure is None:
            self.worker.abandon()
