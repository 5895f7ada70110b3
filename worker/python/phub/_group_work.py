"""The collectives of a process group, one after the other, in a thread or in the caller's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed


class Work(distributed._Work):  # type: ignore[misc, name-defined]  # noqa: SLF001
    """Of one collective. A failure is raised by `wait`, and is the future's."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def end(self, error: BaseException | None = None) -> None:
        """It is complete, or has failed."""
        self._error = error
        # First the future: after wait() it is complete, as gloo's is, which torchft relies on.
        if error is None:
            self._future.set_result(self._tensors)
        else:  # a future takes no KeyboardInterrupt
            is_one = isinstance(error, Exception)
            self._future.set_exception(error if is_one else RuntimeError("interrupted"))
        self._ended.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns True once it is complete. Raises its error; RuntimeError: the time is over."""
        seconds = timeout.total_seconds() if timeout else 0
        if not self._ended.wait(seconds if seconds > 0 else None):
            raise RuntimeError(f"the collective is not complete after {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it is complete."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Its error, if it has failed."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Its tensors."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Has its tensors."""
        return self._future


class Course:
    """Runs what it is given in order: in its thread, or at once where nothing is before it."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], None], Work] | None]
        self._waiting = queue.SimpleQueue()
        self._left = 0
        self._lock = threading.Lock()
        self._running = threading.Lock()  # by the thread or a caller, never by two at once
        self._thread: threading.Thread | None = None

    def run(self, body: Callable[[], None], work: Work, *, later: bool) -> Work:
        """later: in the thread. Else it is complete, or raises, when this returns."""
        with self._lock:
            here = not later and self._left == 0
            if not here:
                self._left += 1
        if here:
            with self._running:
                _run(body, work)
        else:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="phub-group", daemon=True)
                self._thread.start()
            self._waiting.put((body, work))
        if not later:
            work.wait()
        return work

    def _run(self) -> None:
        while (given := self._waiting.get()) is not None:
            with self._running:
                _run(*given)
            del given  # its tensors live no longer than the collective
            with self._lock:
                self._left -= 1

    def close(self) -> None:
        """Waits for the rest."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None


def _run(body: Callable[[], None], work: Work) -> None:
    try:
        with torch.inference_mode():  # in whatever mode the tensors were made
            body()
    except BaseException as error:
        work.end(error)
    else:
        work.end()
