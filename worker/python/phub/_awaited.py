"""Parameters whose new values are still on their way: whatever reads one waits for it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

# What a program may ask of a parameter, or set, before its new value is there: none of its numbers.
_PROPERTIES = (
    "_backward_hooks _base _grad _post_accumulate_grad_hooks _version device dtype grad grad_fn "
    "is_cpu is_cuda is_leaf is_meta is_mkldnn is_nested is_quantized is_sparse is_sparse_csr "
    "itemsize layout nbytes ndim output_nr requires_grad retains_grad shape"
)
_METHODS = (
    "__len__ _is_view dim element_size get_device is_complex is_contiguous is_floating_point "
    "is_inference is_signed nelement numel register_hook register_post_accumulate_grad_hook "
    "requires_grad_ retain_grad size storage_offset stride"
)


def _without_numbers() -> frozenset[Any]:
    """The functions of PyTorch that are called for these."""
    found = {torch.is_floating_point, torch.is_complex, torch.numel}
    found |= {getattr(torch.Tensor, name) for name in _METHODS.split()}
    for name in _PROPERTIES.split():
        accessor = getattr(torch.Tensor, name)
        for way in ("__get__", "__set__", "__delete__"):
            if hasattr(accessor, way):
                found.add(getattr(accessor, way))
    return frozenset(found)


_WITHOUT_NUMBERS = _without_numbers()


class Settling(torch.Tensor):
    """The base of classes that parameters have until their values are there.

    The parameter stays the same object.
    """

    plain: ClassVar[type[torch.Tensor]]  # which it is before and afterwards
    _phub_take: Callable[[], None]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._settle()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._settle()
        return self.__reduce_ex__(protocol)

    def _settle(self) -> None:
        take = self.__dict__.get("_phub_take")
        if take is not None:  # else another thread was quicker
            take()


class Awaited(Settling, nn.Parameter):
    """Of a parameter whose memory is its own.

    PyTorch asks the class of each tensor that it is given in Python before it does anything with
    it. In C++ nobody asks: see silent.md.
    """

    plain: ClassVar[type[torch.Tensor]] = nn.Parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


# torch.compile would reason about a class that changes meanwhile.
@torch._disable_dynamo  # type: ignore[attr-defined]
def _call(func: Any, args: Any, kwargs: Any) -> Any:
    if func in _WITHOUT_NUMBERS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    for each in _awaited_in((args, kwargs)):
        each._settle()
    return func(*args, **kwargs)


def _awaited_in(given: Any) -> Iterator[Awaited]:
    if isinstance(given, Awaited):
        yield given
    elif isinstance(given, dict):
        yield from _awaited_in(list(given.values()))
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from _awaited_in(each)


def await_value(parameter: nn.Parameter, take: Callable[[], None], awaited: type[Settling]) -> None:
    """Whatever reads it calls `take` first. REQUIRES: its class is awaited.plain."""
    parameter._phub_take = take  # type: ignore[attr-defined]
    parameter.__class__ = awaited  # type: ignore[assignment]


def value_is_there(parameter: nn.Parameter) -> None:
    """It is read as ever again."""
    if isinstance(parameter, Settling):
        parameter.__class__ = type(parameter).plain  # type: ignore[assignment]
        del parameter._phub_take


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Within it the parameter's value is set, whatever transform the program reads it in."""
    with torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch(), torch.no_grad():
        yield


# ---- Who else may read a parameter's memory.


def holders_of(tensor: torch.Tensor) -> int:
    """How many tensors and others have its memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


HOLDERS_OF_ONE = holders_of(torch.empty(1))  # of memory that a single tensor has


def parameters_in_compiled(model: nn.Module) -> set[int]:
    """The ids of those that modules use which torch.compile or TorchScript have compiled."""
    found: set[int] = set()
    for module in model.modules():
        is_compiled = (
            module.__dict__.get("_compiled_call_impl") is not None
            or "_orig_mod" in module._modules
            or isinstance(module, torch.jit.ScriptModule)
        )
        if is_compiled:
            found.update(id(p) for p in module.parameters())
    return found
