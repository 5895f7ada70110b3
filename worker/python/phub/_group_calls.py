"""That the ranks of a group do the same: what each is about to do, which all of them see first.

Otherwise numbers of other lengths or formats would meet, and be a result.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from phub import errors
from phub._sums import Part, Sums

_NAMES = (
    "a call that failed",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "barrier",
)
_OPERATIONS = ("", "sum", "avg", "product", "min", "max", "bor")
_DTYPES = tuple(sorted((v for v in vars(torch).values() if isinstance(v, torch.dtype)), key=str))
_FORMAT = struct.Struct("<BBBxIQ")


class Call(NamedTuple):
    """What a rank is about to do."""

    name: str
    tensors: Sequence[torch.Tensor] = ()  # of one dtype
    operation: str = ""
    root: int = 0

    def packed(self) -> bytes:
        """As the other ranks get it. Raises InvalidError: the dtypes differ."""
        dtype, numel = torch.uint8, 0
        for at, tensor in enumerate(self.tensors):
            if at == 0:
                dtype = tensor.dtype
            elif tensor.dtype != dtype:
                raise errors.InvalidError(
                    f"{self.name}: a tensor is of {tensor.dtype}, another one of {dtype}"
                )
            numel += tensor.numel()
        return _FORMAT.pack(
            _NAMES.index(self.name),
            _OPERATIONS.index(self.operation),
            _DTYPES.index(dtype),
            self.root,
            numel,
        )


_FAILED = Call(_NAMES[0]).packed()


def _described(packed: bytes) -> str:
    name, operation, dtype, root, numel = _FORMAT.unpack(packed)
    text = _NAMES[name]
    if operation:
        text += f"({_OPERATIONS[operation]})"
    if text in ("barrier", _NAMES[0]):
        return text
    text += f" of {numel} {str(_DTYPES[dtype]).removeprefix('torch.')}"
    return f"{text} with root {root}" if _NAMES[name] in ("reduce", "broadcast") else text


class Agreement:
    """Of the ranks of one group. For one thread at a time."""

    def __init__(self, sums: Sums, rank: int, size: int) -> None:
        """sums: where the ranks' moves go."""
        self._sums = sums
        self._rank, self._size = rank, size
        self._every = bytearray(size * _FORMAT.size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._every))
        self._part = Part(address, len(self._every), True, address)

    def reach(self, packed: bytes) -> None:
        """Returns when all ranks are there, with the same call.

        Raises InvalidError, on all of them, where calls differ: nothing was brought together, and
        the group can be used on. Raises RankLostError …: see Sums.
        """
        begin = self._rank * _FORMAT.size
        self._every[:] = bytes(len(self._every))
        self._every[begin : begin + _FORMAT.size] = packed
        self._sums.run(self._part)
        found = bytes(self._every)
        if found == packed * self._size:
            return
        every = [found[at : at + _FORMAT.size] for at in range(0, len(found), _FORMAT.size)]
        other = next(rank for rank, each in enumerate(every) if each != packed)
        pair = sorted((self._rank, other))
        text = ", ".join(f"rank {rank}: {_described(every[rank])}" for rank in pair)
        raise errors.InvalidError(f"the ranks of a group do not make the same call; {text}")

    def fail(self) -> None:
        """In place of reach(): this rank's call has failed, so it fails on the others."""
        self.reach(_FAILED)
