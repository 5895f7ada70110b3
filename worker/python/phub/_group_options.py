"""What torch.distributed's arguments say, and what the box does of it."""

# No `from __future__ import annotations`: as in pytorch.py.

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import distributed
from torch.distributed import ReduceOp

from phub._sums import MOVES, Kind

_ADDED = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_VALUES = {torch.float32: "f32", torch.float64: "f64", torch.int32: "i32", torch.int64: "i64"}
_OPERATIONS = (
    (ReduceOp.SUM, "add"),
    (ReduceOp.AVG, "add"),
    (ReduceOp.PRODUCT, "multiply"),
    (ReduceOp.MIN, "min"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.BOR, "or"),
)
_NAMES = [(op, op.name.lower()) for op, _ in _OPERATIONS]


def all_given(tensors: Any, opts: Any) -> tuple[list[torch.Tensor], Any, bool]:
    """Tensors, operation, and whether the caller goes on before it is complete."""
    every = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return every, op_of(opts), is_later(opts)


def op_of(opts: Any) -> Any:
    """The operation that the options name, or are."""
    if opts is None:
        return ReduceOp.SUM
    return opts.reduceOp if hasattr(opts, "reduceOp") else opts


def name_of(op: Any) -> str:
    """Of one that goes to the box."""
    return next(name for kind, name in _NAMES if op == kind)


def is_later(opts: Any) -> bool:
    """Whether the caller goes on before it is complete."""
    return bool(getattr(opts, "asyncOp", True))


def options(opts: Any, op: Any) -> Any:
    """Options with the operation."""
    if hasattr(opts, "reduceOp"):
        return opts
    made = distributed.AllreduceOptions()
    made.reduceOp = op
    return made


def are_here(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the box can reach them."""
    return all(tensor.device.type == "cpu" and tensor.layout == torch.strided for tensor in tensors)


def kind_of(dtype: torch.dtype, op: Any) -> Optional[Kind]:
    """None: the box does not do that."""
    operation = next((name for kind, name in _OPERATIONS if op == kind), None)
    if operation == "add" and dtype in _ADDED:
        return Kind(_ADDED[dtype])
    if operation == "or" and not dtype.is_floating_point:
        return MOVES
    if operation in (None, "or") or dtype not in _VALUES:
        return None
    if op == ReduceOp.AVG and not dtype.is_floating_point:
        return None
    return Kind("f32", operation, _VALUES[dtype])


def goes_here(tensors: Sequence[torch.Tensor], op: Any) -> bool:
    """Else another backend does it, where no order changes the bits."""
    products = op == ReduceOp.PRODUCT
    return are_here(tensors) and all(
        kind_of(t.dtype, op) is not None or (products and t.dtype in _ADDED) for t in tensors
    )
