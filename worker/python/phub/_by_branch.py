"""What a rank has for itself, of each branch of its job."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_void_p, cast
from typing import Any

from phub import errors
from phub._library import call, callback
from phub._numbers import whole_number
from phub.worker import Worker

_SAVER = CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), POINTER(c_size_t))  # phub_state_saver
_LOADER = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t)  # phub_state_loader
_FAILED = errors.BY_CODE.index(errors.InternalError) + 1


class ByBranch:
    """Keeps a rank's own state of each branch: saved when another runs, given back when it does.

    What is the rank's own are the statistics of batch normalisation, random numbers, where its data
    go on, and the like: all that the box does not have. A child has what its parent had when it was
    forked. In memory, of each branch but the one that runs; branches that have the same share it.

        own = ByBranch(save, load)
        for batch in data:
            own.begin(worker)  # before anything of the round

    A rank that comes later begins all branches with what it has then.
    """

    def __init__(self, save: Callable[[], bytes], load: Callable[[bytes], object]) -> None:
        """save: returns the state; load: is given what it returned, and makes it as it was."""
        kept = b""  # the library's until the next call

        def saver(_user_data: Any, into: Any, size: Any) -> int:
            nonlocal kept
            try:
                kept = bytes(save())
                into[0], size[0] = cast(c_char_p(kept), c_void_p), len(kept)
            except BaseException as error:
                callback.error = error
                return _FAILED
            return 0

        def loader(_user_data: Any, state: int | None, size: int) -> int:
            try:
                load(ctypes.string_at(state, size) if state else b"")
            except BaseException as error:
                callback.error = error
                return _FAILED
            return 0

        self._functions = _SAVER(saver), _LOADER(loader)
        self._handle = c_void_p()
        pointers = [cast(function, c_void_p) for function in self._functions]
        call("by_branch_create", *pointers, None, byref(self._handle))
        weakref.finalize(self, _destroy, self._handle)

    def begin(self, worker: Worker, round: int = 0) -> int:  # noqa: A002
        """Before this rank begins a round (0: its next) whose predecessor's results are all here.

        With overlap="forward" synchronize() before. Returns the branch that runs in it. Call it
        before each round, or before none; again for the same round it does nothing. What the two
        functions raise it raises, and can be called again.
        """
        worker._settle()
        at, branch = whole_number("the round", round, 64), c_uint32()
        # In this thread, whose no_grad() and stream are those of the two functions.
        try:
            call("by_branch_begin", self._handle, worker._worker, at, byref(branch))
        except errors.InvalidError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None
        return branch.value

    def saved(self) -> bytes:
        """For a checkpoint: all but the state that is in place."""
        state, size = c_void_p(), c_size_t()
        call("by_branch_saved", self._handle, byref(state), byref(size))
        return ctypes.string_at(state, size.value)

    def restore(self, saved: bytes) -> None:
        """As it was when it was saved; what was in place then is the program's to give back."""
        call("by_branch_restore", self._handle, saved, len(saved))


def _destroy(handle: c_void_p) -> None:
    with contextlib.suppress(errors.Error):
        call("by_branch_destroy", handle)
