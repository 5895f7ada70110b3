"""Keys whose gradients and results are in the memory of a GPU."""

from __future__ import annotations

import contextlib
from ctypes import byref, c_uint64, c_void_p
from typing import TYPE_CHECKING

import torch
from torch.futures import Future

from phub import errors
from phub._library import call
from phub._memory_device import DEVICE_KEYS_BYTES
from phub._waiting import waiting_call

if TYPE_CHECKING:
    from phub._options import Option
    from phub.worker import Worker

_FORMATS = {torch.float32: b"f32", torch.bfloat16: b"bf16", torch.float16: b"f16"}


def is_gpu(device: torch.device) -> bool:
    """Whether keys there are exchanged by DeviceKeys."""
    return device.type == "cuda"


def open_device(device: torch.device, budget: int) -> c_void_p:
    """A phub_device. Raises UnavailableError if the library has none for it."""
    opened = c_void_p()
    call("device_open_cuda", device.index or 0, budget, byref(opened))
    return opened


def stream_of(device: torch.device) -> int | None:
    """The stream that PyTorch's calls of this thread go to."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The same, as PyTorch has it; None: memory there has no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def check_memory(tensor_device: torch.device, ordinal: Option | None) -> None:
    """Raises InvalidError if the option memory_device does not fit tensors that are there."""
    if ordinal is None or (is_gpu(tensor_device) and (tensor_device.index or 0) == ordinal):
        return
    raise errors.InvalidError(
        f"memory_device is {ordinal!r}, and the parameters are on {tensor_device}: move them to "
        "that GPU, or leave memory_device out"
    )


def exchange_on(device: torch.device, worker: Worker) -> None:
    """After the worker's broadcast(): its keys are exchanged from there, if that is a GPU."""
    if is_gpu(device) and worker.on_device is None:
        worker.on_device = DeviceKeys(worker, device)


def _contiguous_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


class DeviceKeys:
    """The keys of a worker, on one device. Calls are enqueued on PyTorch's current stream.

    After a failure every call raises its error, and what was pulled is NaN.
    """

    def __init__(self, worker: Worker, device: torch.device) -> None:
        """After the worker's broadcast(). From now on only this pushes its keys."""
        self._index = {name: index for index, name in enumerate(worker.keys)}
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._handle = c_void_p()
        if worker.memory_device:  # the one in whose memory the keys lie
            opened = worker.memory_device.handle
            waiting_call("device_keys_create", worker._worker, opened, byref(self._handle))
            return
        bytes_of_all = c_uint64()  # with residuals of coded gradients
        call("device_keys_bytes", worker._worker, byref(bytes_of_all))
        try:
            opened = open_device(device, bytes_of_all.value)
        except errors.FullError:  # the CPU encodes, then
            opened = open_device(device, DEVICE_KEYS_BYTES)
        try:
            waiting_call("device_keys_create", worker._worker, opened, byref(self._handle))
        finally:
            call("device_close", opened)

    def push(
        self, key: str, gradient: torch.Tensor | None, after: torch.cuda.Stream | None = None
    ) -> None:
        """Lends the gradient, contiguous, until the next pull of the key. None: zero.

        after: the stream that has the gradient; None: the current one.
        """
        address, kind = 0, b"f32"
        if gradient is not None:
            address, kind = gradient.data_ptr(), _FORMATS[gradient.dtype]
        stream = stream_of(self._device) if after is None else after.cuda_stream
        call("push_device", self._handle, self._index[key], address or None, kind, 1.0, 0, stream)

    def push_factors(self, key: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """Of a key with a rank_limit: lends the pairs, (count, rows) and (count, columns).

        They are contiguous float32. None at all is a gradient of zero.
        """
        sides = (left.data_ptr() or None, right.data_ptr() or None)
        stream = stream_of(self._device)
        call("push_factors_device", self._handle, self._index[key], *sides, len(left), 0, stream)

    def pull(self, key: str, into: torch.Tensor) -> None:
        """What the current stream does next has the key's latest result in this tensor."""
        place = into if into.is_contiguous() else _contiguous_like(into)
        waiting_call(
            "pull_device",
            self._handle,
            self._index[key],
            place.data_ptr(),
            _FORMATS[into.dtype],
            stream_of(self._device),
        )
        if place is not into:
            into.copy_(place)

    def pull_later(
        self, results: dict[str, torch.Tensor], value: torch.Tensor
    ) -> Future[torch.Tensor]:
        """Pulls on a stream of its own: who waits for the future makes its stream wait for that."""
        if self._side is None:
            future: Future[torch.Tensor] = Future()
            for key, into in results.items():
                self.pull(key, into)
            future.set_result(value)
            return future
        future = Future(devices=[self._device])
        with torch.cuda.stream(self._side):
            for key, into in results.items():
                self.pull(key, into)
            future.set_result(value)
        return future

    def wait(self) -> None:
        """Returns when all that was pushed and pulled is in its place."""
        waiting_call("wait_device", self._handle)

    def close(self) -> None:
        """The worker pushes its keys itself again."""
        with contextlib.suppress(errors.BadHandleError):
            waiting_call("device_keys_destroy", self._handle)
