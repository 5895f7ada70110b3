"""What exchanges the gradients of a DDP has: the module's parameters, and jobs beside its own."""

# No `from __future__ import annotations`: as in pytorch.py.

from collections.abc import Mapping
from typing import Optional

import torch
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from phub._alone import USED
from phub._buckets import Bucket
from phub._buffers import Buffers, worker_beside
from phub._factors import Factors
from phub._names import plain_name
from phub._options import Key, Option
from phub._same import Same
from phub._watch import Watch
from phub._ways import Ways
from phub.errors import InvalidError
from phub.worker import Worker


class State:
    """The base of what `phub.ddp_hook` takes."""

    worker: Worker  # in a job of all ranks
    watch: Watch
    same: Optional[Same] = None
    factors: Optional[Factors] = None
    ways: Optional[Ways] = None
    _buffers: Optional[Buffers] = None  # from the first sync_buffers() on
    _used: Optional[Worker] = None  # see count_used

    def __init__(self, module: nn.Module, options: Mapping[str, Option]) -> None:
        """options: of the worker, for the jobs beside."""
        named = {plain_name(name): p for name, p in module.named_parameters()}
        self._module, self._options = module, options
        self._parameters = {n: p for n, p in named.items() if p.requires_grad and p.numel()}
        self._frozen = {n: p for n, p in named.items() if not p.requires_grad}
        self._name_of = {id(parameter): name for name, parameter in self._parameters.items()}
        self._strides = {name: p.stride() for name, p in self._parameters.items()}
        self._outstanding: list[Bucket] = []

    @property
    def rank(self) -> int:
        """Which rank this is, from 0."""
        return self.worker.rank

    @property
    def world_size(self) -> int:
        """The ranks of the job when it began."""
        return self.worker.world_size

    def close(self) -> None:
        """Leaves the job."""
        raise NotImplementedError

    def broadcast_parameters(self) -> None:
        """Gives the module rank 0's parameters."""
        raise NotImplementedError

    def exchange(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """The hook."""
        raise NotImplementedError

    def sync_buffers(self) -> None:
        """Makes the module's buffers the same: see DistributedOptimizer.sync_buffers."""
        self._buffers = self._buffers or Buffers(self._module, self.worker, self._options)
        self._buffers.sync()

    def count_used(self) -> Worker:
        """The worker of a job that adds up which parameters the ranks used in a backward()."""
        weights = self.factors.weights if self.factors else ()
        parameters = [
            name
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad and plain_name(name) not in weights
        ]
        self._used = worker_beside(
            self.worker,
            self._options,
            USED,
            {USED: Key(len(parameters))},
            late="the other ranks made phub.ddp with find_unused_parameters",
            reduction="sum",
        )
        return self._used

    def _check_frozen(self) -> None:
        """DDP does not exchange parameters that required no gradient when it was made."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise InvalidError(
                    f"parameter '{name}' requires a gradient now, and did not when the job was "
                    "made: nobody exchanges it, and every rank would train its own. Let it require "
                    "one before DDP and its state are made, and freeze it afterwards by a rate of "
                    "0; or close this job, and make both anew"
                )

    def _key_of(self, parameter: torch.Tensor) -> str:
        key = self._name_of.get(id(parameter))
        if key is None:
            raise InvalidError(
                f"a parameter of shape {tuple(parameter.shape)} is not in the module that DDPState "
                "was made of: make it of the module that DDP has (ddp.module)"
            )
        if parameter.stride() != self._strides[key]:
            raise InvalidError(
                f"parameter '{key}' had strides {self._strides[key]} when the job was made, and "
                f"has {parameter.stride()} now: DDP's gradients may have the old order. Change the "
                "memory format before DDP and its state are made"
            )
        return key

    def _wait(self) -> None:
        step, self._outstanding = self._outstanding, []
        for bucket in step:
            bucket.done.wait()
            if bucket.error is not None:
                raise bucket.error
