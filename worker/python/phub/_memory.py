"""Memory of the caller, as the library takes it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from phub import errors

_BYTES = {"f32": 4, "bf16": 2, "f16": 2}  # of an element
_FORMATS = {"float32": ("f",), "int64": ("l", "q")}  # of a buffer
# The same of an element: numbers, or their bits, or bytes.
_FORMATS_OF_ELEMENTS = {"f32": "fBbc", "bf16": "HhBbc", "f16": "eHhBbc"}


@dataclass(frozen=True)
class Memory:
    """Memory of the caller: `bytes` bytes from `address`, which `owner` keeps alive."""

    address: int
    bytes: int
    owner: object = None


def format_in_memory(on_wire: str) -> str:
    """Of results in this format: coded ones are float32 in memory."""
    return on_wire if on_wire in _BYTES else "f32"


def memory_of_key(
    key: str, given: Any, elements: int, dtype: str, *, are_words: bool = False
) -> Memory:
    """Of a contiguous buffer or a Memory; None: no memory.

    are_words: elements are parts of values of any type.
    Raises InvalidError for another size, or numbers that would be taken for others.
    """
    if dtype not in _BYTES:
        raise errors.InvalidError(f"key '{key}': memory is f32, bf16 or f16, not '{dtype}'")
    if given is None:
        return Memory(0, 0)
    memory = memory_of_any(key, given)
    needed = elements * _BYTES[dtype]
    if memory.bytes != needed:
        raise errors.InvalidError(
            f"key '{key}': the memory has {memory.bytes} bytes, and {elements} elements of {dtype} "
            f"are {needed}"
        )
    if memory is not given and isinstance(memory.owner, memoryview) and not are_words:
        found = memory.owner.format.lstrip("@=<")
        if len(found) != 1 or found not in _FORMATS_OF_ELEMENTS[dtype]:
            raise errors.InvalidError(
                f"key '{key}': its elements are {dtype}, and these are of the format '{found}' (of "
                "Python's module struct), whose bits mean other numbers: convert them"
            )
    return memory


def memory_of_any(key: str, given: Any) -> Memory:
    """Of a contiguous buffer or a Memory, whatever its size is."""
    return given if isinstance(given, Memory) else _of_buffer(key, given)


def memory_of_numbers(key: str, what: str, given: Any, dtype: str) -> Memory:
    """The same of numbers of this type, float32 or int64; a Memory is taken as it is."""
    memory = memory_of_any(key, given)
    if memory is not given and isinstance(memory.owner, memoryview):
        found = memory.owner.format
        if found not in _FORMATS[dtype]:
            raise errors.InvalidError(
                f"key '{key}': {what} are {dtype}, and these are of the format '{found}' (of "
                "Python's module struct)"
            )
    return memory


def _of_buffer(key: str, given: Any) -> Memory:
    try:
        view = memoryview(given)
        if view.nbytes == 0:  # ctypes has no address of it
            return Memory(0, 0, view)
        return Memory(ctypes.addressof(ctypes.c_ubyte.from_buffer(view)), view.nbytes, view)
    except (TypeError, ValueError) as error:
        raise errors.InvalidError(
            f"key '{key}': the memory must be a writable contiguous buffer (a NumPy array, a "
            f"memoryview) or a phub.Memory: {error}"
        ) from None
