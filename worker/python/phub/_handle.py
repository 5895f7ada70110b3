"""A worker of the library, and when it is destroyed."""

from __future__ import annotations

import contextlib
import sys
import weakref
from ctypes import byref, c_void_p

from phub import errors
from phub._library import call
from phub._saver import SaverCall
from phub._waiting import waiting_call


class Handle:
    """A phub_worker. Destroyed, and its memory unmapped, when the last view of it is gone."""

    def __init__(self, options: c_void_p, saver: SaverCall | None) -> None:
        self.saver = saver
        self.value = c_void_p()
        waiting_call("worker_create", options, byref(self.value))
        self.destroy = weakref.finalize(self, _destroy, self.value)


def _destroy(handle: c_void_p) -> None:
    # A process that ends with an exception has not left: the box sees at once that it is gone, and
    # the job's policy decides. In a child of fork() the library refuses.
    if getattr(sys, "last_value", None) is None:
        with contextlib.suppress(errors.Error):
            call("worker_destroy", handle)
