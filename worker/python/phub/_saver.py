"""A rank's own state in the checkpoints of its job, as the library asks for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from ctypes import CFUNCTYPE, c_int, c_uint64, c_void_p, cast
from typing import Any

from phub import errors
from phub._library import call, callback

Saver = Callable[[int], Mapping[str, bytes]]
_FUNCTION = CFUNCTYPE(c_int, c_void_p, c_uint64, c_void_p)  # phub_saver
_FAILED = errors.BY_CODE.index(errors.InternalError) + 1


class SaverCall:
    """What the library calls. Lives as long as the worker."""

    def __init__(self, saver: Saver) -> None:
        self.saver: Saver | None = saver
        self.function: object = None

    def forget(self) -> None:
        """After the worker has left: the saver, and all that it refers to, may be freed."""
        self.saver = None


def set_saver(options: c_void_p, saver: Saver) -> SaverCall:
    """Sets the worker's saver."""
    made = SaverCall(saver)
    weak = weakref.ref(made)  # the function must not keep alive what keeps it

    def save(_user_data: Any, round_: int, state: int) -> int:
        try:
            alive = weak()
            if alive is None or alive.saver is None:
                return _FAILED
            for name, entry in alive.saver(round_).items():
                call("save", c_void_p(state), name.encode(), entry, len(entry))
        except BaseException as error:
            callback.error = error
            return _FAILED
        return 0

    function = made.function = _FUNCTION(save)
    call("options_set_saver", options, cast(function, c_void_p), None)
    return made
