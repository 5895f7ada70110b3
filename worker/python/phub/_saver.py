"""A rank's own state in the checkpoints of its job, as the library asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import CFUNCTYPE, c_int, c_uint64, c_void_p, cast
from typing import Any

from phub import errors
from phub._library import call, callback

Saver = Callable[[int], Mapping[str, bytes]]
_FUNCTION = CFUNCTYPE(c_int, c_void_p, c_uint64, c_void_p)  # phub_saver
_FAILED = errors.BY_CODE.index(errors.InternalError) + 1


def set_saver(options: c_void_p, saver: Saver) -> object:
    """Returns what must live as long as the worker."""

    def save(_user_data: Any, round_: int, state: int) -> int:
        try:
            for name, entry in saver(round_).items():
                call("save", c_void_p(state), name.encode(), entry, len(entry))
        except BaseException as error:
            callback.error = error
            return _FAILED
        return 0

    function = _FUNCTION(save)
    call("options_set_saver", options, cast(function, c_void_p), None)
    return function
