"""Parameters of FSDP2, of which each process of a replica has a shard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from phub import _device
from phub._awaited import Settling
from phub._device import DeviceKeys
from phub._exchanged import Exchanged
from phub._tensors import DTYPES
from phub._views import tensor_over
from phub.errors import InvalidError
from phub.worker import Worker

_HOLDERS = 4  # of a shard's memory, at most: all are FSDP's
_LOCAL: Any = vars(DTensor)["_local_tensor"]  # what every read of a shard's numbers begins with


def by_module(model: nn.Module) -> dict[str, list[DTensor]]:
    """The parameters that each call of fully_shard() has, without those of calls for its parts."""
    found: dict[str, list[DTensor]] = {}
    taken: set[int] = set()
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    for name, module in reversed(modules):  # parts come after what they are in
        parameters = [p for p in module.parameters() if p.requires_grad and id(p) not in taken]
        taken.update(id(p) for p in parameters)
        if any(p.numel() for p in parameters):
            found[name or "model"] = [_checked(name, p) for p in parameters]
    if not found:
        raise InvalidError("no parameter of the model is sharded: call fully_shard() before")
    return dict(reversed(found.items()))


def _checked(name: str, parameter: nn.Parameter) -> DTensor:
    if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim != 1:
        raise InvalidError(
            f"a parameter of '{name}' of shape {tuple(parameter.shape)} is not sharded over a mesh "
            "of one dimension: the box takes the place of the other one"
        )
    if parameter.device.type != "cpu" and not _device.is_gpu(parameter.device):
        raise InvalidError(
            f"a parameter of '{name}' is on {parameter.device}: phub needs the CPU or a GPU"
        )
    return parameter


def check_jobs(parameter: torch.Tensor, worker: Worker) -> None:
    """Compares what the processes of a replica have joined, which all call this.

    parameter: one of the replica's. Raises InvalidError in all of them if two shards have one job,
    in which they would be added up, or if they are not of one replica, or not in one round.
    """
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    if mesh.size() == 1:
        return
    joined = worker.job, worker.rank, worker.world_size, worker.first_round
    if worker.first_round == 1:
        worker.barrier()  # nobody leaves a job that others still join: all are told what is wrong
    of_all: list[Any] = [None] * mesh.size()
    distributed.all_gather_object(of_all, joined, mesh.get_group())
    jobs, *others = (list(of_each) for of_each in zip(*of_all, strict=True))
    if len(set(jobs)) < len(jobs):
        raise InvalidError(
            f"the processes of this replica, one for each shard, are in the jobs {jobs}: each "
            "shard needs one of its own, with its peers in the other replicas. Give "
            "job='NAME-SHARD', and rank and world_size of the replica"
        )
    for what, found in zip(("rank", "world_size", "first round"), others, strict=True):
        if len(set(found)) > 1:
            raise InvalidError(
                f"the processes of this replica have, in their jobs {jobs}, the {what} {found}, "
                "which must be the same: rank and world_size are those of the replica, and a "
                "replica of several processes cannot join later. Start all replicas again; where "
                "checkpoints of the box are of different rounds, with other names of the jobs"
            )


# ---- What a DistributedOptimizer has of them.


class AwaitedShard(Settling, DTensor):
    """The class of such a parameter until its value is there, as `Awaited` is of others."""

    plain: ClassVar[type[torch.Tensor]] = DTensor

    @property
    def _local_tensor(self) -> torch.Tensor:
        self._settle()
        return local_of(self)

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:
        _LOCAL.__set__(self, local)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a parameter or gradient that this process has. It waits for nothing."""
    local: torch.Tensor = _LOCAL.__get__(tensor)
    return local


def shape_of_key(parameter: torch.Tensor) -> tuple[int, ...]:
    """That of the shard. One of no elements has a key of one, which is always zero."""
    shape = tuple(local_of(parameter).shape)
    return shape if math.prod(shape) else (1,)


@dataclass(eq=False)
class Unit:
    """A module that fully_shard() was called for.

    Its parameters get a gradient each time that backward() has left it.
    """

    module: nn.Module
    visits: int = 0  # of forward(), since the latest step

    def count_visits(self) -> RemovableHandle:
        """From now on, until the handle is removed."""
        return self.module.register_forward_pre_hook(self._visit)

    def _visit(self, *_: object) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.visits += 1  # and no checkpointed one computes again


def units_of(model: nn.Module, named: Mapping[str, nn.Parameter]) -> dict[str, Unit]:
    """By the parameters' names. Raises InvalidError if one has none, or there are two meshes."""
    units: dict[int, Unit] = {}
    meshes: dict[DeviceMesh, str] = {}
    modules = {n or "model": m for n, m in model.named_modules()}
    for name, parameters in by_module(model).items():
        unit = Unit(modules[name])
        units |= {id(p): unit for p in parameters}
        meshes |= {p.device_mesh: name for p in parameters}
    if len(meshes) > 1:
        raise InvalidError(
            f"fully_shard() was called for {sorted(meshes.values())} with several meshes: the "
            "processes of a replica are those of one"
        )
    for name, p in named.items():
        if id(p) not in units:
            raise InvalidError(
                f"parameter '{name}' is not sharded, and others are: each process would train its "
                "own. Call fully_shard() for the whole model, too, and leave out ignored_params"
            )
    return {name: units[id(p)] for name, p in named.items()}


def visit_hooks(parameters: Sequence[Exchanged]) -> Iterator[RemovableHandle]:
    """Hooks that count visits of units."""
    units = {id(m.unit): m.unit for m in parameters if isinstance(m, Sharded)}
    return (unit.count_visits() for unit in units.values())


def _has_any(sharded: DTensor) -> int:
    """1 if there is anything but zeros in any shard, else 0. All processes of a replica call it."""
    found = local_of(sharded).any().int().reshape(1)
    distributed.all_reduce(found, group=sharded.device_mesh.get_group())
    return int(found > 0)


@dataclass(eq=False)
class Sharded(Exchanged):
    """A process's shard, on its way to the box and back."""

    awaited: ClassVar[type[Settling]] = AwaitedShard
    unit: Unit = None  # type: ignore[assignment]  # always given: fields before it have defaults
    of_step: torch.cuda.Stream | None = None  # the stream of a step() whose result comes later

    def look(self) -> None:
        """As Exchanged. FSDP itself has views of the shard's memory."""
        super().look()
        self.holders = min(self.holders_now(), _HOLDERS)
        if not self.value.numel():
            kind = DTYPES[self.worker.gradient_dtype(self.name)]
            tensor_over(self.worker.gradient(self.name), kind).zero_()

    @property
    def value(self) -> torch.Tensor:
        """The shard."""
        return local_of(self.tensor)

    def gradient_now(self) -> torch.Tensor | None:
        """That of the shard."""
        gradient = self.tensor.grad
        return None if gradient is None else local_of(gradient)

    def is_due(self, accumulate: int) -> bool:
        """As Exchanged. The gradient of a module that is visited again is not complete."""
        return super().is_due(accumulate) and self.unit.visits == accumulate

    def take_later(self) -> None:
        """As Exchanged. What reads the shard may be FSDP, on a stream of its own."""
        self.of_step = _device.current_stream(self.value.device)
        super().take_later()

    def _take_on_device(self, keys: DeviceKeys) -> None:
        super()._take_on_device(keys)
        reads = _device.current_stream(self.value.device)
        # The program goes on reading it on its step's stream, which nothing else tells to wait.
        if self.of_step and reads and reads != self.of_step:
            self.of_step.wait_stream(reads)

    def end_step(self) -> None:
        """The next backward() is of the next step."""
        super().end_step()
        self.unit.visits = 0

    def state_of(self, array: torch.Tensor) -> torch.Tensor:
        """As PyTorch's optimizer has it, sharded as the parameter."""
        of = self.tensor
        assert isinstance(of, DTensor)
        there = array.to(self.value.device)
        return DTensor.from_local(
            there, of.device_mesh, of.placements, shape=of.shape, stride=of.stride()
        )

    def parts_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What the shard has of a parameter's state."""
        assert isinstance(self.tensor, DTensor)
        parts = dict(state)
        for name, each in state.items():
            if isinstance(each, DTensor) and each.placements == self.tensor.placements:
                parts[name] = local_of(each)
                # What shards of zeros do not tell: SGD and Lion count no steps.
                if "step" not in state:
                    parts["step"] = max(_has_any(each), parts.get("step", 0))
            elif isinstance(each, torch.Tensor) and each.dim():
                raise InvalidError(
                    f"the state of parameter '{self.name}' has a '{name}' that is not sharded as "
                    "the parameter: load it with set_optimizer_state_dict of torch.distributed."
                    "checkpoint.state_dict, which shards it (full_state_dict=True)"
                )
        return parts
