"""Notices that ranks have different models, where each makes its own steps, or the same data."""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from phub import errors
from phub._buffers import worker_beside
from phub._names import plain_name
from phub._options import Key, Option
from phub._views import tensor_over
from phub.worker import Worker

_JOB = "same"
_KEY = "digests"
_BINS = 256  # of names, by their checksum
_VALUES = 4096  # of a digest: float32 has their sum over all ranks exactly
_COLUMNS = 512
_WORD = 8  # bytes
_ALIKE = 3  # looks at equal gradients until it is said: by chance one may be
_GRADIENT, _RANKS = -2, -1  # places behind the bins
_EVERY = 128  # steps, and before at each power of two


class Same:
    """A job in which ranks add up digests of their models. It warns once, and then ends."""

    def __init__(self, module: nn.Module, beside: Worker, options: Mapping[str, Option]) -> None:
        """Joins, and returns when all ranks have. beside: this rank's worker in the training.

        Where the box refuses the job (a token for one name alone, a quota), or has an older one
        of this name, it says so once. In a training that goes on from a checkpoint nothing is
        compared.
        """
        self._module, self._beside = module, beside
        self._backwards = 0
        self._alike = 0  # looks in turn at which all ranks had the same gradient
        self._sent: torch.Tensor | None = None
        self._worker: Worker | None = None
        if beside.first_round > 1:
            return
        try:
            self._worker = worker_beside(
                beside,
                options,
                _JOB,
                {_KEY: Key(_BINS + 2)},
                late="the other ranks compared their models",
                reduction="sum",
            )
        except (errors.UnauthorizedError, errors.FullError, errors.InvalidError) as refused:
            # For all ranks alike.
            warnings.warn(
                f"the ranks of job '{beside.job}' train without comparing their models: {refused}",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Leaves the job."""
        worker, self._worker = self._worker, None
        if worker:
            worker.close()

    def compare_what_is_not_exchanged(self) -> None:
        """All ranks call it before the first forward(): frozen parameters and buffers."""
        frozen = ((n, p) for n, p in self._module.named_parameters() if not p.requires_grad)
        self._push([*frozen, *self._module.named_buffers()])
        self._look(
            "{} is not the same on all ranks, and nobody exchanges it: only parameters that "
            "require a gradient begin as rank 0's. Give all ranks the same (torch.manual_seed "
            "before the model is made; load a checkpoint on every rank)"
        )

    def begin_backward(self, gradient: torch.Tensor | None = None) -> None:
        """Before the gradients of a step are pushed. gradient: this rank's own, or a part of it."""
        self.look()  # on a GPU nobody has waited for it
        self._backwards += 1
        if is_due(self._backwards):
            named = ((n, p) for n, p in self._module.named_parameters() if p.requires_grad)
            self._push(named, gradient)

    def look(self) -> None:
        """At what was pushed, which is there when the step's gradients are."""
        self._look(
            f"{{}} is not the same on all ranks in step {self._backwards}: every rank makes its "
            "own step, and they have made different ones. Give all the same optimizer, state and "
            "rates; load a model or a state on all ranks, or before phub.ddp; have every "
            "backward() after a forward() of the DDP, which exchanges its gradients (one for the "
            "sum of several losses; not torch.autograd.grad); and no layer that came later. Ranks "
            "on processors of different kinds may differ in the last bits"
        )

    def _push(
        self, tensors: Iterable[tuple[str, torch.Tensor]], gradient: torch.Tensor | None = None
    ) -> None:
        if self._worker is None:
            return
        bins = [0] * _BINS
        for name, digest in zip(*_digests(tensors), strict=True):
            bins[_bin_of(name)] += digest
        own = _digests([] if gradient is None else [("", gradient)])[1] or [0]
        self._sent = torch.tensor([*(b % _VALUES for b in bins), *own, 1], dtype=torch.float32)
        with self._unless_it_fails():
            tensor_over(self._worker.gradient(_KEY)).copy_(self._sent)
            self._worker.push(_KEY)

    def _look(self, message: str) -> None:
        sent, self._sent = self._sent, None
        if sent is None or self._worker is None:
            return
        with self._unless_it_fails():
            self._worker.wait(_KEY)
            found = tensor_over(self._worker.parameters(_KEY)).clone()
            differ = found != sent * found[_RANKS]  # a 1 of each
            if differ[:_BINS].any():
                self.close()
                warnings.warn(self._said(differ, message), RuntimeWarning, stacklevel=2)
            has_same = bool(sent[_GRADIENT] and found[_RANKS] > 1 and not differ[_GRADIENT])
            self._alike = self._alike + 1 if has_same else 0
            if self._alike == _ALIKE and self._backwards < _EVERY:
                warnings.warn(self._said_of_data(), RuntimeWarning, stacklevel=2)

    def _said(self, differ: torch.Tensor, message: str) -> str:
        both = (*self._module.named_parameters(), *self._module.named_buffers())
        names = [plain_name(name) for name, _ in both]
        here = next((f"'{name}'" for name in names if differ[_bin_of(name)]), "what others have")
        return f"job '{self._beside.job}', rank {self._beside.rank}: {message.format(here)}"

    def _said_of_data(self) -> str:
        return (
            f"job '{self._beside.job}', rank {self._beside.rank}: all ranks had the same gradients "
            f"in {_ALIKE} steps, so each of them takes the same data. Give every rank its own: "
            "sampler=DistributedSampler(data, num_replicas=world_size, rank=rank), or phub.Sampler"
        )

    @contextlib.contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """The training's own job has the same error, and says it."""
        try:
            yield
        except errors.Error:
            self.close()


def is_due(count: int) -> bool:
    """Whether what costs some time is looked at in this step, counted from 1."""
    return count % _EVERY == 0 or (count < _EVERY and count & (count - 1) == 0)


def _bin_of(name: str) -> int:
    return zlib.crc32(name.encode()) % _BINS


def _digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[str], list[int]]:
    """Names, and for each a number below _VALUES that depends on all bits and their order."""
    names, sums = [], []
    for name, tensor in tensors:
        if _is_plain(tensor):
            sums.append(_sum_of(tensor.detach()))
            names.append(plain_name(name))
    if not sums:
        return [], []
    mixed = [(s * 0x9E3779B97F4A7C15 >> 40) % _VALUES for s in torch.stack(sums).tolist()]
    return names, mixed


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bits can be read: not if it is sparse, quantised, or not initialised yet."""
    return (
        not nn.parameter.is_lazy(tensor)
        and type(tensor.detach()) is torch.Tensor
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
    )


def _sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Of its words of 64 bits, by rows and by columns: an element elsewhere changes it."""
    raw = tensor.contiguous().flatten().view(torch.int8)
    if raw.storage_offset() % _WORD:
        raw = raw.clone()
    last = len(raw) // _WORD * _WORD
    words = raw[:last].view(torch.int64)
    full = len(words) // _COLUMNS
    rows = words[: full * _COLUMNS].view(full, _COLUMNS)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for part in (rows.sum(0), rows.sum(1), words[full * _COLUMNS :], raw[last:]):
        weights = torch.arange(1, len(part) + 1, device=raw.device)
        total += (part.to(torch.int64) * weights).sum()
    return total.cpu()
