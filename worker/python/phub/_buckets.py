"""DDP's buckets on their way through a worker, and the threads that end their futures."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Optional, Protocol

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from phub._gathered import Together
from phub._tensors import with_order_of
from phub.errors import InvalidError
from phub.worker import Worker


class Matrix(Protocol):
    """A gradient that goes in another form, in two turns. Both wait for the box."""

    def answer(self) -> None:
        """Pushes the second turn, when the first one is there."""

    def finish(self) -> None:
        """The result is in the gradient."""


@dataclass
class Bucket:
    """Gradients whose results DDP waits for."""

    buffer: torch.Tensor
    keys: list[str] = field(default_factory=list)
    matrices: list[Matrix] = field(default_factory=list)
    groups: list[Together] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # to, from
    future: Future[torch.Tensor] = field(default_factory=Future)
    done: threading.Event = field(default_factory=threading.Event)
    error: Optional[Exception] = None

    def fail(self, error: Exception) -> None:
        self.error = error
        self.future.set_exception(error)  # type: ignore[arg-type]  # what it takes
        self.done.set()


Buckets = queue.SimpleQueue[Optional[Bucket]]


def complete(worker: Worker, buckets: Buckets) -> None:
    """The thread that ends the futures, in the order of the buckets."""
    while (bucket := buckets.get()) is not None:
        try:
            _finish(worker, bucket)
        except Exception as error:
            bucket.fail(error)
        del bucket  # or its memory would live until the next one comes


def _finish(worker: Worker, bucket: Bucket) -> None:
    for key in bucket.keys:
        worker.wait(key)
    for matrix in bucket.matrices:
        matrix.finish()
    for group in bucket.groups:
        worker.wait(group.key)
        group.finish()
    for gradient, result in bucket.copies:
        gradient.copy_(result)
    bucket.future.set_result(bucket.buffer)
    bucket.done.set()


def answer(buckets: Buckets, answered: Buckets) -> None:
    """The thread that pushes the second factors of PowerSGD, which waits only for the first ones.

    The same with whole gradients, where some rank has no factors of them. If it waited for second
    ones, too, ranks whose buckets have another order would wait for each other.
    """
    while (bucket := buckets.get()) is not None:
        try:
            for matrix in bucket.matrices:
                matrix.answer()
        except Exception as error:
            bucket.fail(error)
        else:
            answered.put(bucket)
        del bucket
    answered.put(None)


def start(thread: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=thread, args=arguments, name="phub-ddp", daemon=True).start()


def gradients_of(bucket: GradBucket) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each parameter: a view of the bucket, of the parameter's shape.

    DDP's buckets of sparse ones have none: a buffer alone.
    """
    if bucket.buffer().layout != torch.strided:
        raise InvalidError(
            f"a gradient of shape {tuple(bucket.buffer().shape)} is {bucket.buffer().layout}: DDP "
            "exchanges dense ones. Use sparse=False, or phub.DistributedOptimizer, which sends rows"
        )
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if parameter.numel():
            yield parameter, with_order_of(parameter, gradient)
