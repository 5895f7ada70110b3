"""What the calls of a worker have in common."""

from __future__ import annotations

from ctypes import c_void_p
from typing import Any

from phub import errors
from phub._handle import Handle
from phub._memory import Memory, memory_of_key
from phub._numbers import whole_number


def round_number(given: int) -> int:
    return whole_number("the round", given, 64)


class Calls:
    """The parts of a worker derive from this, and Worker from all of them."""

    on_device: Any  # a DeviceKeys, which then exchanges the keys; None: there is none
    _index: dict[str, int]
    _elements: list[int]
    _is_words: list[bool]

    def _settle(self) -> None:
        """Before a call for the time between rounds: what streams have not pushed yet, is."""
        if self.on_device:
            self.on_device.wait()

    @property
    def _worker(self) -> c_void_p:
        handle: Handle | None = self.__dict__.get("_handle")
        if handle is None:
            raise errors.BadHandleError("the worker was closed")
        return handle.value

    def _at(self, key: str) -> int:
        try:
            return self._index[key]
        except KeyError:
            raise errors.NotFoundError(f"the job has no key '{key}'") from None

    def _memory(self, key: str, given: Any, dtype: str) -> Memory:
        index = self._at(key)
        words = self._is_words[index]
        return memory_of_key(key, given, self._elements[index], dtype, are_words=words)
