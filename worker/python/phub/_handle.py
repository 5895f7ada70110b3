"""A worker of the library, and when it is destroyed."""

from __future__ import annotations

import contextlib
import sys
import weakref
from ctypes import byref, c_char_p, c_void_p

from phub import errors
from phub._library import call
from phub._saver import SaverCall
from phub._waiting import waiting_call

_alive: weakref.WeakSet[Handle] = weakref.WeakSet()


class Handle:
    """A phub_worker. Destroyed, and its memory unmapped, when the last view of it is gone."""

    def __init__(self, options: c_void_p, saver: SaverCall | None) -> None:
        self.saver = saver
        self.value = c_void_p()
        try:
            waiting_call("worker_create", options, byref(self.value))
        except errors.TakenError as error:
            if not (mine := _jobs_of_this_process()):
                raise
            raise errors.TakenError(
                f"{error}. This process is itself in {mine}: another model needs a job of its own "
                "(job='NAME'); to begin anew, as in a notebook, call close() first (of "
                "`model.phub`, a DistributedOptimizer, a state or a worker)"
            ) from None
        self.destroy = weakref.finalize(self, _destroy, self.value)
        _alive.add(self)


def _jobs_of_this_process() -> str:
    """In which it has workers, for people; "": in none."""
    names = set()
    for handle in list(_alive):
        found = c_char_p()
        with contextlib.suppress(errors.Error):
            if handle.destroy.alive:
                call("job_name", handle.value, byref(found))
                names.add(f"job '{(found.value or b'').decode()}'")
    return ", ".join(sorted(names))


def _destroy(handle: c_void_p) -> None:
    # A process that ends with an exception has not left: the box sees at once that it is gone, and
    # the job's policy decides. In a child of fork() the library refuses.
    if getattr(sys, "last_value", None) is None:
        with contextlib.suppress(errors.Error):
            call("worker_destroy", handle)
