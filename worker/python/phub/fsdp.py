"""PyTorch's FSDP2 within replicas, and a box between them: an all-reduce hook."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from phub import _device
from phub._memory import Memory
from phub._names import by_name
from phub._options import Option, check_results
from phub._sharded import by_module, check_jobs
from phub._tensors import DTYPES, FORMATS, device_of, memory_of, push_from, take_into
from phub._views import tensor_over
from phub._watch import Watch
from phub.errors import InvalidError
from phub.worker import Worker

_REMEDY = (
    "FSDPState has set an all-reduce hook at each module of fully_shard(): make it of the model "
    "that is trained, once, after the last fully_shard(), and set no other one"
)


class FSDPState:
    """What the replicas of a sharded model exchange: a key for each call of fully_shard()."""

    def __init__(
        self, model: nn.Module, *, formats: Mapping[str, str] | None = None, **options: Option
    ) -> None:
        """Joins the job, and returns when all replicas have, with the parameters of the first.

        model: fully_shard() was called for it, over a mesh of one dimension: the processes of one
            replica. Its parameters are float32 or bfloat16 on the CPU, or all on one GPU.
        formats: of gradients on the wire, by patterns of keys' names, which are those of the
            modules that fully_shard() was called for, and "model": see `Worker`.
        options: of `Worker`, of which rank and world_size are the replica's. With several processes
            in a replica, each has a job of its own with its peers in the others: job="NAME-SHARD",
            and none has `branches`.
        """
        check_results(
            "FSDPState", options, reduction="mean", initial="broadcast", parameter_dtype="f32"
        )
        if options.get("memory_device") is not None:
            raise InvalidError(
                "memory_device: keys of FSDP's shards lie in memory of the host, also if the "
                "shards are on a GPU; leave it out"
            )
        self._parameters = by_module(model)
        found = ((key, p) for key, of_key in self._parameters.items() for p in of_key)
        named = {f"{key}[{number}]": p for number, (key, p) in enumerate(found)}
        device = device_of(named)
        if options.get("branches") and next(iter(named.values())).device_mesh.size() > 1:
            raise InvalidError(
                "branches: with several processes in a replica each has a job of its own, and "
                "branches are those of one job; leave them out, or have one process in a replica"
            )
        self._elements = by_name(
            {
                key: sum(_shard_of(p) for p in parameters)
                for key, parameters in self._parameters.items()
            }
        )
        self._places = {key: _places(of_key) for key, of_key in self._parameters.items()}
        given: dict[str, Option] = {"on_nonfinite": "pass", **options}
        given |= {"reduction": "mean", "initial": "broadcast"}
        self.worker = Worker(self._elements, hyper=None, formats=formats, saver=None, **given)
        check_jobs(next(iter(self._parameters.values()))[0], self.worker)
        self._broadcast()
        _device.exchange_on(device, self.worker)
        for name, module in model.named_modules():
            if (name or "model") in self._parameters and isinstance(module, FSDPModule):
                hook = functools.partial(self._exchange, name or "model", module)
                module.set_all_reduce_hook(hook)
        # By key: the backward() that does not wait for the mean, and the gradients to be replaced.
        self._late: dict[str, tuple[int, torch.Tensor]] = {}
        self._watch = Watch(self.worker.job, named, "phub's hook", _REMEDY)

    def close(self) -> None:
        """Leaves the job. The others go on without this replica.

        Raises InvalidError if there was a backward(), and never an exchange.
        """
        self.worker.close()
        self._watch.close()

    @torch.no_grad()
    def _broadcast(self) -> None:
        if self.worker.first_round > 1:
            raise InvalidError(
                f"the job is in round {self.worker.first_round}: the box has no model, so a "
                "replica cannot join later. Start all ranks again"
            )
        initial: dict[str, Memory] = {}
        for key, parameters in self._parameters.items():
            flat = torch.zeros(self._elements[key])
            for at, p in zip(self._places[key], parameters, strict=True):
                flat[at : at + p.to_local().numel()] = p.to_local().flatten()
            initial[key] = memory_of(flat)
        self.worker.broadcast(initial)
        for key, parameters in self._parameters.items():
            result = self._result(key)
            for at, p in zip(self._places[key], parameters, strict=True):
                mine = p.to_local()
                mine.copy_(result[at : at + mine.numel()].view(mine.shape))

    @torch.no_grad()
    def _exchange(self, key: str, module: FSDPModule, gradients: torch.Tensor) -> None:
        """The hook: the shards' gradients, one after another, become the mean of the replicas'.

        It waits for the mean only if somebody reads it before the end of backward(). On a GPU
        FSDP's stream waits, on which it goes on with them.
        """
        self._watch.end()
        if gradients.numel() != self._elements[key]:
            raise RuntimeError(
                f"'{key}' has gradients of {gradients.numel()} elements, and its parameters are "
                f"{self._elements[key]}: every parameter must have a gradient in every step"
            )
        if self.worker.on_device:
            after = _scatters(module) if gradients.is_cuda else None
            _exchange_on(self.worker.on_device, key, gradients, after)
            return
        if key in self._late:  # its module came twice, or its backward() failed
            self._finish_one(key)
        slot = tensor_over(self.worker.gradient(key), DTYPES[self.worker.gradient_dtype(key)])
        push_from(self.worker, key, gradients, slot)
        if _is_read_late(module, self._parameters[key], gradients.dtype):
            backward = torch._C._current_graph_task_id()
            self._late[key] = backward, gradients
            Variable._execution_engine.queue_callback(lambda: self._finish(backward))
        else:
            self.worker.wait(key)
            take_into(self.worker, key, gradients, self._result(key))

    def _finish(self, backward: int) -> None:
        """At the end of a backward(): parameters get the means that it has not waited for."""
        for key in [key for key, (started, _) in self._late.items() if started == backward]:
            self._finish_one(key)

    @torch.no_grad()
    def _finish_one(self, key: str) -> None:
        self.worker.wait(key)
        _, gradients = self._late.pop(key)
        take_into(self.worker, key, gradients, self._result(key))
        parameters = self._parameters[key]
        for at, p in zip(self._places[key], parameters, strict=True):
            if p.grad is None:  # the backward() failed before
                continue
            assert isinstance(p.grad, DTensor)
            mine = p.grad.to_local()
            mean = gradients[at : at + mine.numel()].view(mine.shape)
            if mine.data_ptr() != mean.data_ptr():  # it has another type
                mine.copy_(mean)

    def _result(self, key: str) -> torch.Tensor:
        return tensor_over(self.worker.parameters(key))


def _exchange_on(
    keys: _device.DeviceKeys, key: str, gradients: torch.Tensor, after: torch.cuda.Stream | None
) -> None:
    """Exchanges them in their place. after: see DeviceKeys.push."""
    lent = gradients
    if gradients.dtype not in FORMATS:
        lent, after = gradients.float(), None
    keys.push(key, lent, after)
    keys.pull(key, lent)
    if lent is not gradients:
        gradients.copy_(lent)
    stream = _device.current_stream(gradients.device)
    if stream:  # FSDP may free them at once, for the stream that made them
        gradients.record_stream(stream)


def _scatters(module: FSDPModule) -> torch.cuda.Stream | None:
    """FSDP's stream that made the gradients, and waits for no key.

    That of its hooks first waits for the means of the keys before this one. None: FSDP has another
    form.
    """
    state: Any = module._get_fsdp_state()
    return getattr(getattr(state, "_comm_ctx", None), "reduce_scatter_stream", None)


def _is_read_late(module: FSDPModule, parameters: list[DTensor], dtype: torch.dtype) -> bool:
    """Whether nobody reads what the hook leaves in the gradients before backward() ends.

    FSDP divides float16 afterwards, and sums that set_force_sum_reduction_for_comms() asks for. It
    adds the mean to gradients that are there, and calls hooks of its parameters. Pipelines call
    FSDP when backward() is over.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [
        getattr(state, "_fsdp_param_group", None)
    ]
    if len(groups) != 1 or getattr(groups[0], "force_sum_reduction_for_comms", True):
        return False
    theirs = [each.sharded_param for each in groups[0].fsdp_params]
    return (
        dtype in (torch.float32, torch.bfloat16)
        and [id(p) for p in theirs if p.requires_grad] == [id(p) for p in parameters]
        and all(p.grad is None for p in parameters)
        and not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)
    )


def _shard_of(parameter: DTensor) -> int:
    """The elements of a process's part, with FSDP's padding."""
    (placement,) = parameter.placements
    dimension = placement.dim if isinstance(placement, Shard) else 0
    rows = parameter.shape[dimension]
    return math.ceil(rows / parameter.device_mesh.size()) * (parameter.numel() // max(rows, 1))


def _places(parameters: list[DTensor]) -> list[int]:
    """Where each begins."""
    places, at = [], 0
    for p in parameters:
        places.append(at)
        at += _shard_of(p)
    return places
