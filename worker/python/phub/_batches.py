"""Tensors that ranks average in each step, of which nobody knows before the first step.

A batch is what a program gives before it waits for the first time: a job, whose keys are made then.
Tensors lie one after the other in buckets, each a key, which is pushed as soon as it is full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from phub._options import Key, Option
from phub._tensors import DTYPES, FORMATS
from phub._views import tensor_over
from phub.errors import InvalidError
from phub.worker import Worker

_ELEMENTS = 1 << 20  # of a bucket of several tensors, at most
_MOST_BATCHES = 32  # each is a job


@dataclass
class Given:
    """A tensor of a step: its batch and its place there."""

    tensor: torch.Tensor
    batch: int
    place: int
    of: Batches
    step: int


@dataclass
class _Bucket:
    key: str
    sizes: list[int]
    first: int  # its first tensor's place in the batch
    given: list[torch.Tensor] = field(default_factory=list)  # in this step
    is_pushed: bool = False

    @property
    def elements(self) -> int:
        return sum(self.sizes)


class _Batch:
    """A job, from the first wait on."""

    def __init__(self, tensors: Sequence[torch.Tensor], options: Mapping[str, Option]) -> None:
        self.buckets: list[_Bucket] = []
        self._dtypes = [tensor.dtype for tensor in tensors]
        kinds: list[torch.dtype] = []
        self.bucket_of: list[_Bucket] = []  # of each place
        for place, tensor in enumerate(tensors):
            last = self.buckets[-1] if self.buckets else None
            fits = last and last.elements + tensor.numel() <= _ELEMENTS
            if not last or not fits or kinds[-1] != tensor.dtype:
                last = _Bucket(f"{place}", [], place)
                self.buckets.append(last)
                kinds.append(tensor.dtype)
            last.sizes.append(tensor.numel())
            self.bucket_of.append(last)
        job_format = FORMATS[kinds[0]] if len(set(kinds)) == 1 else "f32"
        given = {"gradient_dtype": job_format, "parameter_dtype": job_format, **options}
        self._results = DTYPES.get(str(given["parameter_dtype"]), torch.float32)
        keys = {bucket.key: Key(bucket.elements) for bucket in self.buckets}
        self.worker = Worker(keys, hyper=None, formats=None, saver=None, reduction="mean", **given)

    @property
    def count(self) -> int:
        return len(self.bucket_of)

    def check(self, place: int, tensor: torch.Tensor) -> None:
        bucket = self.bucket_of[place]
        elements = bucket.sizes[place - bucket.first]
        dtype = self._dtypes[place]
        if tensor.numel() != elements or tensor.dtype != dtype:
            raise InvalidError(
                f"allreduce: tensor {place} has {tensor.numel()} elements of {tensor.dtype}, and "
                f"had {elements} of {dtype} in the first step with these ranks: give the same "
                "tensors in the same order in each step"
            )

    @torch.no_grad()
    def put(self, place: int, tensor: torch.Tensor) -> None:
        bucket = self.bucket_of[place]
        slot = self._slot(bucket)
        at = sum(bucket.sizes[: len(bucket.given)])
        slot[at : at + tensor.numel()].copy_(tensor.detach().reshape(-1))
        bucket.given.append(tensor)
        if len(bucket.given) == len(bucket.sizes):
            self.worker.push(bucket.key)
            bucket.is_pushed = True

    @torch.no_grad()
    def take(self, place: int) -> None:
        """Of all tensors of its bucket."""
        bucket = self.bucket_of[place]
        if not bucket.given:  # they were taken
            return
        if not bucket.is_pushed:
            raise InvalidError(
                f"wait() for tensor {place} of a step: in the first step with these ranks "
                f"{self.count} tensors came before the first wait(), and now {len(bucket.given)} "
                f"of the {len(bucket.sizes)} that are sent together have. Wait at the same places "
                "in each step"
            )
        self.worker.wait(bucket.key)
        result = tensor_over(self.worker.parameters(bucket.key), self._results)
        at = 0
        for tensor in bucket.given:
            tensor.copy_(result[at : at + tensor.numel()].view(tensor.shape))
            at += tensor.numel()
        bucket.given = []

    def _slot(self, bucket: _Bucket) -> torch.Tensor:
        dtype = DTYPES[self.worker.gradient_dtype(bucket.key)]
        return tensor_over(self.worker.gradient(bucket.key), dtype)

    def end_step(self) -> None:
        """What this step did not have counts as zero."""
        for bucket in self.buckets:
            if bucket.given and not bucket.is_pushed:
                self._slot(bucket)[sum(bucket.sizes[: len(bucket.given)]) :].zero_()
                self.worker.push(bucket.key)
                bucket.is_pushed = True
            if bucket.is_pushed:
                self.take(bucket.first)
            else:
                self.worker.push_null(bucket.key)
                self.worker.wait(bucket.key)
            bucket.given, bucket.is_pushed = [], False


class Batches:
    """Of ranks that stay the same, or become fewer."""

    def __init__(self, job: str, options: Mapping[str, Option]) -> None:
        """Sends nothing yet. options: of the jobs, with rank and world_size among these ranks."""
        self._job, self._options = job, options
        self._batches: list[_Batch] = []
        self._new: list[Given] = []  # of a batch that is not there yet
        self._at = (0, 0)
        self._step = 0

    @property
    def has_some(self) -> bool:
        """Of the step that has begun."""
        return self._at != (0, 0)

    def add(self, tensor: torch.Tensor) -> Given:
        """Pushes it as soon as may be; at the latest when one of its batch is waited for."""
        if tensor.dtype not in FORMATS or tensor.layout != torch.strided:
            raise InvalidError(
                f"allreduce of {tensor.dtype}, {tensor.layout}: phub averages dense tensors of "
                "float32, bfloat16 and float16"
            )
        number, place = self._at
        given = Given(tensor, number, place, self, self._step)
        if not tensor.numel():
            return given
        if number < len(self._batches):
            batch = self._batches[number]
            batch.check(place, tensor)
            batch.put(place, tensor)
            self._at = (number, place + 1) if place + 1 < batch.count else (number + 1, 0)
            return given
        if number == _MOST_BATCHES:
            raise InvalidError(
                f"allreduce: a step waits {_MOST_BATCHES} times, and then gives more tensors: give "
                "all of them, and wait then"
            )
        self._new.append(given)
        self._at = (number, place + 1)
        return given

    def take(self, given: Given) -> None:
        """Waits until the tensor has the mean. Raises Error; then this object is of no use."""
        if not given.tensor.numel() or given.step != self._step:  # that step has ended
            return
        if given.batch == len(self._batches) and self._new:
            self._make()
        self._batches[given.batch].take(given.place)

    def end_step(self) -> None:
        """Waits for all of its tensors."""
        if self._new:
            self._make()
        for batch in self._batches:
            batch.end_step()
        self._at = (0, 0)
        self._step += 1

    def _make(self) -> None:
        tensors = [given.tensor for given in self._new]
        number = len(self._batches)
        made = _Batch(tensors, {**self._options, "job": f"{self._job}-{number}"})
        self._batches.append(made)
        self._new, self._at = [], (number + 1, 0)
        for place, tensor in enumerate(tensors):
            made.put(place, tensor)

    def close(self) -> None:
        """Leaves the jobs."""
        for batch in self._batches:
            batch.worker.close()

    def abandon(self) -> None:
        """To the others this rank is lost: they go on with the mean of the rest."""
        for batch in self._batches:
            batch.worker.abandon()
