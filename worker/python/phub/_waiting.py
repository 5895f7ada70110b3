"""Calls of the library that wait, so that Ctrl-C ends them.

Python runs a signal's handler in the main thread, and not before a C function has returned. So the
main thread waits for a lock, which a signal interrupts, while another thread is in the library.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from phub._library import call


class _Helper:
    """A thread that calls one function after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="phub-wait", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._calls.get()()

    def run(self, function: str, arguments: tuple[Any, ...]) -> None:
        done = threading.Event()
        error: list[BaseException] = []

        def body() -> None:
            try:
                call(function, *arguments)
            except BaseException as raised:
                error.append(raised)
            done.set()

        self._calls.put(body)
        done.wait()
        if error:
            raise error.pop()  # no variable has it: its traceback has this frame


_helper: _Helper | None = None  # the main thread's


def _forget() -> None:
    global _helper
    _helper = None


os.register_at_fork(after_in_child=_forget)  # its thread is the parent's


def waiting_call(function: str, *arguments: Any) -> None:
    """As `call`; in the main thread a signal's handler may end it with its exception.

    The call in progress then goes on in a thread of its own, until the worker is closed.
    """
    global _helper
    if threading.current_thread() is not threading.main_thread():
        call(function, *arguments)
        return
    helper, _helper = _helper or _Helper(), None
    helper.run(function, arguments)
    _helper = helper  # not reached if a signal ended the wait: that thread is still in its call
