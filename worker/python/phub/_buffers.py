"""A model's buffers (BatchNorm's statistics), which each rank has for itself, made the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from phub._names import by_name, plain_name
from phub._options import Key, Option
from phub._views import tensor_over
from phub.errors import InvalidError
from phub.worker import Worker

# What a job that exchanges gradients has, and this one, whose numbers stay exact, has not.
OTHERS = (
    "memory_device",
    "gradient_dtype",
    "parameter_dtype",
    "rounding",
    "state_dtype",
    "initial",
    "on_nonfinite",
    "unused",
    "optimizer",
    "quorum",
    "grace_ms",
    "grace",
    "late_decay",
    "weights",
    "job",
)


class LateError(InvalidError):
    """The other ranks have begun the job without this one."""


class Buffers:
    """The job in which ranks exchange them: the box has no optimizer in it."""

    def __init__(self, model: nn.Module, beside: Worker, options: Mapping[str, Option]) -> None:
        """Joins, and returns when all ranks have.

        beside: this rank's worker in the job of the training, which `options` are of. What that
            job has for its gradients is not for buffers: they are exchanged in float32.
        """
        self._buffers = {name: b for name, b in model.named_buffers() if b.numel()}
        if not self._buffers:
            raise InvalidError("sync_buffers(): the model has no buffers with elements")
        keys = {
            part.key: Key(part.elements)
            for name, buffer in self._buffers.items()
            for part in _parts_of(name, buffer)
        }
        self._elements = {name: key.elements for name, key in keys.items()}
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
        """Dense numbers with a fraction become the mean of the ranks', all others rank 0's."""
        parts = {name: _parts_of(name, buffer) for name, buffer in self._buffers.items()}
        for part in itertools.chain.from_iterable(parts.values()):
            if part.elements != self._elements.get(part.key):
                raise InvalidError(
                    f"sync_buffers(): '{part.key}' has another size than at the first call: a "
                    "sparse buffer keeps the number of its entries, and a buffer its type"
                )
            self._push(part)
        self._worker.wait_all()
        for name, buffer in self._buffers.items():
            found = [self._result(part) for part in parts[name]]
            if None not in found:
                buffer.copy_(_joined(buffer, [each for each in found if each is not None]))

    def _push(self, part: _Part) -> None:
        slot = tensor_over(self._worker.gradient(part.key))
        if part.is_mean:
            slot.copy_(part.tensor.flatten())
        elif self._worker.rank == 0:
            slot[:-1] = part.tensor.flatten().view(torch.uint8)
            slot[-1] = 1
        else:
            self._worker.push_null(part.key)
            return
        self._worker.push(part.key)

    def _result(self, part: _Part) -> torch.Tensor | None:
        """None: rank 0 did not take part."""
        result = tensor_over(self._worker.parameters(part.key))
        if part.is_mean:
            return result.view(part.tensor.shape)
        if result[-1] == 0:  # 1 divided by the ranks
            return None
        whole = (result[:-1] / result[-1]).round().to(torch.uint8)
        return whole.view(part.tensor.dtype).view(part.tensor.shape)


def check_statistics(model: nn.Module, world_size: int) -> None:
    """Raises InvalidError for a SyncBatchNorm whose process group is not all ranks of the job."""
    for name, module in model.named_modules():
        if world_size == 1 or not isinstance(module, nn.SyncBatchNorm):
            continue
        has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        ranks = torch.distributed.get_world_size(module.process_group) if has_group else 1
        if ranks != world_size:
            raise InvalidError(
                f"'{name}' is a SyncBatchNorm, which asks a process group of PyTorch for the other "
                f"ranks: its has {ranks}, the job {world_size}, so its statistics would not be of "
                "all. Call torch.distributed.init_process_group() in all ranks before, or keep "
                "BatchNorm and call sync_buffers() before an evaluation"
            )


# ---- What a buffer is exchanged as.

_MEANS = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
)
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32)
_INDICES = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


@dataclass(frozen=True)
class _Part:
    key: str
    tensor: torch.Tensor  # dense
    is_mean: bool

    @property
    def elements(self) -> int:
        """Of its key: its numbers; or, as float32 has no large whole ones, its bytes, and a 1."""
        if self.is_mean:
            return self.tensor.numel()
        return self.tensor.numel() * self.tensor.element_size() + 1


def _parts_of(name: str, buffer: torch.Tensor) -> list[_Part]:
    """A dense one is its own only part."""
    if buffer.is_quantized and buffer.dtype in _QUANTIZED:
        parts = {"numbers": buffer.int_repr(), **_scales_of(buffer)}
    elif buffer.layout == torch.sparse_coo:
        buffer = buffer.coalesce()
        parts = {"indices": buffer.indices(), "values": buffer.values()}
    elif buffer.layout in _INDICES:
        parts = {what: getattr(buffer, what)() for what in (*_INDICES[buffer.layout], "values")}
    elif buffer.layout == torch.strided and not buffer.is_quantized:
        return [_Part(plain_name(name), buffer, buffer.dtype in _MEANS)]
    else:
        raise InvalidError(
            f"sync_buffers(): buffer '{name}' is {buffer.dtype} with layout {buffer.layout}, which "
            "phub cannot make the same on all ranks: let the model have it as another type"
        )
    return [_Part(f"{plain_name(name)}/{what}", part, False) for what, part in parts.items()]


def _scales_of(buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    if _has_one_scale(buffer):
        one = torch.tensor([buffer.q_scale()], dtype=torch.float64)
        return {"scales": one, "zeros": torch.tensor([buffer.q_zero_point()])}
    return {
        "scales": buffer.q_per_channel_scales(),
        "zeros": buffer.q_per_channel_zero_points(),
    }


def _has_one_scale(buffer: torch.Tensor) -> bool:
    return buffer.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)


def _joined(like: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of the parts of a buffer like this."""
    if like.is_quantized and _has_one_scale(like):
        numbers, scale, zero = parts
        return torch._make_per_tensor_quantized_tensor(numbers, scale.item(), int(zero.item()))
    if like.is_quantized:
        numbers, scales, zeros = parts
        axis = like.q_per_channel_axis()
        return torch._make_per_channel_quantized_tensor(numbers, scales, zeros, axis)
    if like.layout == torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, like.shape)
    if like.layout in _INDICES:
        first, second, values = parts
        return torch.sparse_compressed_tensor(first, second, values, like.shape, layout=like.layout)
    (whole,) = parts
    return whole


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
    Raises LateError then.
    """
    given = {option: value for option, value in options.items() if option not in OTHERS}
    given |= {"rank": beside.rank, "world_size": beside.world_size, **others}
    job = f"{beside.job}-{name}"
    worker = Worker(by_name(keys), hyper=None, formats=None, saver=None, job=job, **given)
    if worker.first_round > 1:
        worker.close()
        raise LateError(
            f"{late} before this one joined, and it cannot join them: start all ranks again"
        )
    return worker
