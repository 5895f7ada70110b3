"""A model's buffers (BatchNorm's statistics), which each rank has for itself, made the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from phub._options import Key, Option
from phub._views import tensor_over
from phub.errors import InvalidError
from phub.worker import Worker

# What a job that exchanges gradients has, and this one, whose numbers stay exact, has not.
_OTHERS = (
    "memory_device",
    "gradient_dtype",
    "parameter_dtype",
    "rounding",
    "initial",
    "on_nonfinite",
    "optimizer",
    "job",
)


class Buffers:
    """The job in which ranks exchange them: the box has no optimizer in it."""

    def __init__(self, model: nn.Module, beside: Worker, options: Mapping[str, Option]) -> None:
        """Joins, and returns when all ranks have.

        beside: this rank's worker in the job of the training, which `options` are of. What that
            job has for its gradients is not for buffers: they are exchanged in float32.
        """
        self._buffers = dict(model.named_buffers())
        if not self._buffers:
            raise InvalidError("sync_buffers(): the model has no buffers")
        keys = {name: Key(_elements(buffer)) for name, buffer in self._buffers.items()}
        self._worker = worker_beside(
            beside,
            options,
            "buffers",
            keys,
            late="sync_buffers(): the other ranks did so",
            reduction="mean",
        )

    def close(self) -> None:
        """Leaves the job."""
        self._worker.close()

    @torch.no_grad()
    def sync(self) -> None:
        """Numbers with a fraction become the mean of the ranks', others rank 0's."""
        for name, buffer in self._buffers.items():
            slot = tensor_over(self._worker.gradient(name))
            if buffer.is_floating_point():
                slot.copy_(buffer.flatten())
            else:
                slot[:-1] = buffer.flatten().view(torch.uint8)
                slot[-1] = 1
            if buffer.is_floating_point() or self._worker.rank == 0:
                self._worker.push(name)
            else:
                self._worker.push_null(name)
        self._worker.wait_all()
        for name, buffer in self._buffers.items():
            result = tensor_over(self._worker.parameters(name))
            if buffer.is_floating_point():
                buffer.copy_(result.view(buffer.shape))
            elif result[-1] > 0:  # 1 divided by the ranks: rank 0 took part
                whole = (result[:-1] / result[-1]).round().to(torch.uint8)
                buffer.copy_(whole.view(buffer.dtype).view(buffer.shape))


def worker_beside(
    beside: Worker,
    options: Mapping[str, Option],
    name: str,
    keys: Mapping[str, Key],
    *,
    late: str,
    **others: Option,
) -> Worker:
    """The worker of this rank in a job JOB-NAME, all of whose numbers are float32.

    beside: the worker in the job of the training, which `options` are of.
    late: what the other ranks have done if the job has begun without this one.
    others: options that only the new job has.
    Raises InvalidError then.
    """
    given = {option: value for option, value in options.items() if option not in _OTHERS}
    given |= {"rank": beside.rank, "world_size": beside.world_size, **others}
    job = f"{beside.job}-{name}"
    worker = Worker(keys, hyper=None, formats=None, saver=None, job=job, **given)
    if worker.first_round > 1:
        worker.close()
        raise InvalidError(
            f"{late} before this one joined, and it cannot join them: start all ranks again"
        )
    return worker


def _elements(buffer: torch.Tensor) -> int:
    """Of its key: its numbers; or, as float32 has no large whole ones, its bytes, and a 1."""
    if buffer.is_floating_point():
        return buffer.numel()
    return buffer.numel() * buffer.element_size() + 1
