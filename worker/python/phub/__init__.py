"""phub: trains PyTorch models through a box.

`phub.DistributedOptimizer` leaves the optimizer to the box, `phub.ddp` only sums gradients;
`phub.Worker` is the core of both.

Neither PyTorch nor NumPy is needed to import this; what needs PyTorch loads it at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from phub import _registered
from phub._end import say_losses_in_a_line
from phub._facts import Branch, Stats, Verdict
from phub._memory import Memory
from phub._options import Key
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
from phub.worker import Worker

if TYPE_CHECKING:
    from phub._own_branches import OwnBranches
    from phub._powersgd import PowerSGD
    from phub.amp import GradScaler
    from phub.diloco import DiLoCo
    from phub.fsdp import FSDPState
    from phub.lion import Lion
    from phub.manager import Manager
    from phub.optimizer import DistributedOptimizer
    from phub.pytorch import DDPState, ddp, ddp_hook
    from phub.sampler import Sampler
    from phub.trust import Lamb, Lars
    from phub.whole import Adafactor, Muon

say_losses_in_a_line()
_registered.register()

__version__ = "0.1.0"
_OF_PYTORCH = {
    "Adafactor": "whole",
    "DDPState": "pytorch",
    "DiLoCo": "diloco",
    "DistributedOptimizer": "optimizer",
    "FSDPState": "fsdp",
    "GradScaler": "amp",
    "Lamb": "trust",
    "Lars": "trust",
    "Lion": "lion",
    "Manager": "manager",
    "Muon": "whole",
    "OwnBranches": "_own_branches",
    "PowerSGD": "_powersgd",
    "Sampler": "sampler",
    "ddp": "pytorch",
    "ddp_hook": "pytorch",
}

__all__ = [
    "Adafactor",
    "BadHandleError",
    "Branch",
    "DDPState",
    "DiLoCo",
    "DistributedOptimizer",
    "Error",
    "FSDPState",
    "FencedError",
    "FullError",
    "GradScaler",
    "InternalError",
    "InvalidError",
    "Key",
    "Lamb",
    "Lars",
    "LibraryError",
    "Lion",
    "Manager",
    "Memory",
    "MismatchError",
    "Muon",
    "NonFiniteError",
    "NotFoundError",
    "OwnBranches",
    "PowerSGD",
    "RankLostError",
    "RewoundError",
    "Sampler",
    "Stats",
    "TakenError",
    "TimeoutError",
    "UnauthorizedError",
    "UnavailableError",
    "Verdict",
    "Worker",
    "WrongThreadError",
    "ddp",
    "ddp_hook",
]


def __getattr__(name: str) -> object:
    if name in _OF_PYTORCH:
        return getattr(importlib.import_module(f"phub.{_OF_PYTORCH[name]}"), name)
    raise AttributeError(f"module 'phub' has no attribute '{name}'")
