"""The exceptions of phub: one class per code of the library, all of them `phub.Error`."""

from __future__ import annotations

import builtins


class Error(Exception):
    """What the library refused or lost. The message names the object, and what to do.

    `code` is the library's name of it, such as "rank_lost".
    """

    code = "internal"


class InvalidError(Error, ValueError):
    """A wrong argument, option, key or length, or a call in the wrong order."""

    code = "invalid"


class MismatchError(Error):
    """The ranks of the job disagree about it."""

    code = "mismatch"


class TakenError(Error):
    """The rank or name is in use."""

    code = "taken"


class FullError(Error, MemoryError):
    """Memory, ranks or another limit."""

    code = "full"


class NotFoundError(Error, LookupError):
    """There is no such job, rank or key."""

    code = "not_found"


class UnauthorizedError(Error, PermissionError):
    """The server refuses this process."""

    code = "unauthorized"


class FencedError(Error):
    """The worker left, was replaced, or lost its lease: it cannot be used any more."""

    code = "fenced"


class RankLostError(Error):
    """Another rank is gone, and the job's policy is to fail. The message names the rank."""

    code = "rank_lost"


class NonFiniteError(Error, ArithmeticError):
    """A NaN or an infinity in a gradient, and the job's policy is to stop."""

    code = "non_finite"


class TimeoutError(Error, builtins.TimeoutError):  # noqa: A001
    """A result or an answer did not come in time. The result may still come."""

    code = "timeout"


class UnavailableError(Error, ConnectionError):
    """The server does not answer."""

    code = "unavailable"


class InternalError(Error):
    """A fault of the library itself."""

    code = "internal"


class BadHandleError(Error):
    """The worker was closed."""

    code = "bad_handle"


class WrongThreadError(Error):
    """The worker belongs to the process that called fork(), or the call was in a completion."""

    code = "wrong_thread"


class RewoundError(Error):
    """The server of a job that it saves is gone: `Worker.rejoin` waits for the next one."""

    code = "rewound"


class LibraryError(Error, ImportError):
    """The shared library is not there, or has another ABI than this package."""

    code = "library"


# In the order of phub_code, from 1.
BY_CODE: tuple[type[Error], ...] = (
    InvalidError,
    MismatchError,
    TakenError,
    FullError,
    NotFoundError,
    UnauthorizedError,
    FencedError,
    RankLostError,
    NonFiniteError,
    TimeoutError,
    UnavailableError,
    InternalError,
    BadHandleError,
    WrongThreadError,
    RewoundError,
)


def of_code(code: int, message: str) -> Error:
    """The exception for a phub_code that is not PHUB_OK; newer libraries may have more codes."""
    kind = BY_CODE[code - 1] if 1 <= code <= len(BY_CODE) else InternalError
    return kind(message)
