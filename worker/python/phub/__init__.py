"""phub: sums gradients through a box. `phub.ddp` trains a PyTorch model; `phub.Worker` is the core.

Neither PyTorch nor NumPy is needed to import this; what needs PyTorch loads it at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phub.errors import (
    BadHandleError,
    Error,
    FencedError,
    FullError,
    InternalError,
    InvalidError,
    LibraryError,
    MismatchError,
    NonFiniteError,
    NotFoundError,
    RankLostError,
    RewoundError,
    TakenError,
    TimeoutError,  # noqa: A004
    UnauthorizedError,
    UnavailableError,
    WrongThreadError,
)
from phub.worker import Key, Memory, Stats, Worker

if TYPE_CHECKING:
    from phub.pytorch import DDPState, ddp, ddp_hook

__version__ = "0.1.0"
_OF_PYTORCH = ("DDPState", "ddp", "ddp_hook")

__all__ = [
    "BadHandleError",
    "DDPState",
    "Error",
    "FencedError",
    "FullError",
    "InternalError",
    "InvalidError",
    "Key",
    "LibraryError",
    "Memory",
    "MismatchError",
    "NonFiniteError",
    "NotFoundError",
    "RankLostError",
    "RewoundError",
    "Stats",
    "TakenError",
    "TimeoutError",
    "UnauthorizedError",
    "UnavailableError",
    "Worker",
    "WrongThreadError",
    "ddp",
    "ddp_hook",
]


def __getattr__(name: str) -> object:
    if name in _OF_PYTORCH:
        from phub import pytorch

        return getattr(pytorch, name)
    raise AttributeError(f"module 'phub' has no attribute '{name}'")
