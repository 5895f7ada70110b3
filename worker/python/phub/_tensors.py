"""Tensors as a worker takes them: their memory, formats, keys and order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.autograd.graph import increment_version

from phub import _device
from phub._memory import Memory
from phub._options import MAX_DIMENSIONS, Key
from phub.errors import InvalidError
from phub.worker import Worker

FORMATS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
DTYPES = {name: dtype for dtype, name in FORMATS.items()}
_LARGE_BYTES = 1 << 16
_PLAIN = (torch.Tensor, nn.Parameter)  # subclasses may have their numbers elsewhere


def key_for(parameter: nn.Parameter) -> Key:
    """With the parameter's shape, where the box has as many dimensions."""
    shape = tuple(parameter.shape) if parameter.dim() <= MAX_DIMENSIONS else ()
    return Key(parameter.numel(), shape=shape)


def memory_of(tensor: torch.Tensor) -> Memory:
    """For the worker."""
    return Memory(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)


def filled(tensor: torch.Tensor) -> torch.Tensor:
    """For the memory of a key, which has at least one element; itself if it has any."""
    return tensor if tensor.numel() else tensor.new_zeros(1)


def push_from(
    worker: Worker, key: str, gradient: torch.Tensor, slot: torch.Tensor, priority: int = 0
) -> None:
    """Pushes a gradient, which is copied to the slot: the worker's memory for it."""
    if _is_copied_by_worker(gradient) and gradient.dtype == slot.dtype:
        worker.push_copy(key, memory_of(gradient.detach()), priority)
    else:
        slot.copy_(gradient)
        worker.push(key, priority)


def take_into(worker: Worker, key: str, tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Copies the key's result, the worker's memory that has it, to the tensor."""
    if _is_copied_by_worker(tensor) and tensor.dtype == result.dtype:
        pull_into(worker, key, tensor, result.dtype)
    else:
        tensor.copy_(result)


def _is_copied_by_worker(tensor: torch.Tensor) -> bool:
    """If it is large: the worker copies past the caches."""
    return (
        tensor.nbytes >= _LARGE_BYTES
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and type(tensor) in _PLAIN
    )


def pull_into(worker: Worker, key: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """The key's parameters, of this format; without a copy beside it where that can be."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype == dtype:
        worker.pull(key, memory_of(tensor.detach()))
        increment_version(tensor)
        return
    received = torch.empty(tensor.shape, dtype=dtype)
    worker.pull(key, memory_of(received))
    tensor.copy_(received)


def with_order_of(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """What DDP gives as contiguous lies in the parameter's order, if that has no gaps."""
    stride = parameter.stride()
    if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != stride:
        return gradient
    return gradient.as_strided(parameter.shape, stride, gradient.storage_offset())


def format_of_job(parameters: Mapping[str, nn.Parameter]) -> str:
    """The parameters' format if all have the same, else f32: the library converts."""
    if not parameters:
        raise InvalidError("no parameter of the module requires a gradient")
    for name, parameter in parameters.items():
        known = parameter.device.type == "cpu" or _device.is_gpu(parameter.device)
        if parameter.dtype not in FORMATS or not known:
            raise InvalidError(
                f"parameter '{name}' is {parameter.dtype} on {parameter.device}: phub exchanges "
                "float32, bfloat16 and float16 on the CPU or a GPU"
            )
    device_of(parameters)
    kinds = {FORMATS[parameter.dtype] for parameter in parameters.values()}
    return kinds.pop() if len(kinds) == 1 else "f32"


def device_of(parameters: Mapping[str, torch.Tensor]) -> torch.device:
    """Where all of them are. Raises InvalidError if they are on several devices."""
    places = {str(parameter.device): name for name, parameter in parameters.items()}
    if len(places) > 1:
        found = ", ".join(f"'{name}' on {place}" for place, name in places.items())
        raise InvalidError(
            f"parameters are on several devices ({found}): a rank exchanges those of one; use a "
            "rank per GPU"
        )
    return next(iter(parameters.values())).device
