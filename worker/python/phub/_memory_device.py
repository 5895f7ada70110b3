"""The memory of a GPU in which a worker's gradients and parameters lie."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from ctypes import byref, c_void_p

from phub import errors
from phub._library import call
from phub._options import Key, Option

DEVICE_KEYS_BYTES = 16 << 20  # PHUB_DEVICE_KEYS_BYTES
_MOST_GPUS = 1 << 31  # as C numbers them
_PAGE = 4096
_BESIDE = 1 << 20  # what lies between the keys


class MemoryDevice:
    """A phub_device with room for the keys of a worker, and of the next after `rejoin`."""

    def __init__(self, ordinal: Option, keys: Mapping[str, int | Key]) -> None:
        """Raises UnavailableError if the library has no such GPU, FullError if it has no room."""
        is_number = isinstance(ordinal, int) and not isinstance(ordinal, bool)
        if not is_number or not 0 <= int(ordinal) < _MOST_GPUS:
            raise errors.InvalidError(f"memory_device is the number of a GPU, not {ordinal!r}")
        elements = (key.elements if isinstance(key, Key) else key for key in keys.values())
        one = sum(_whole_pages(4 * count) for count in elements) + _BESIDE
        self.handle = open_memory(int(ordinal), 4 * one + DEVICE_KEYS_BYTES)
        self.close = weakref.finalize(self, call, "device_close", self.handle)


def open_memory(ordinal: int, budget: int) -> c_void_p:
    """A phub_device."""
    opened = c_void_p()
    call("device_open_cuda", ordinal, budget, byref(opened))
    return opened


def _whole_pages(count: int) -> int:
    return (count + _PAGE - 1) // _PAGE * _PAGE
