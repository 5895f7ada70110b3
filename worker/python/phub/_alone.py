"""DistributedDataParallel over a group of this rank alone, and copies of it."""

# No `from __future__ import annotations`: as in pytorch.py.

import weakref
from typing import Any, NoReturn, Optional

import torch
from torch import distributed, nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from phub._views import tensor_over
from phub._watch import Watch
from phub.errors import InvalidError
from phub.worker import Worker

USED = "used"  # the key that counts, of each parameter, which ranks used it


class Group(distributed.ProcessGroup):
    """A group of this rank alone, which is nobody's default: that is the program's."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # rank and size
        self.used: Optional[Worker] = None  # with find_unused_parameters: of all ranks
        options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        backend = distributed.ProcessGroupGloo(HashStore(), 0, 1, options)
        gloo = distributed.ProcessGroup.BackendType.GLOO
        self._set_default_backend(gloo)
        for kind in ("cpu", "cuda"):  # where parameters may be
            self._register_backend(torch.device(kind), gloo, backend)

    # DDP calls these from C++, and none of them reaches gloo: a rank alone has nothing to send. In
    # PyTorch 2.13 gloo's thread drops the last reference to a tensor under a lock, and needs the
    # GIL for that. The program's thread may wait for that lock with the GIL held: then neither goes
    # on.
    def broadcast(self, tensors: Any, *_: Any) -> Any:
        """What this rank has is what it gets."""
        return done(tensors)

    def allgather(self, outputs: Any, inputs: Any, *_: Any) -> Any:
        """The same, copied."""
        for (output,), given in zip(outputs, inputs, strict=True):
            output.copy_(given)
        return done(inputs)

    def allreduce(self, tensors: Any, *_: Any) -> Any:
        """Of all that DDP adds up, the hook leaves one thing here: who used which parameters."""
        if self.used:
            (used,) = tensors
            tensor_over(self.used.gradient(USED)).copy_(used)
            self.used.push(USED)
            self.used.wait(USED)
            used.copy_(tensor_over(self.used.parameters(USED)))
        return done(tensors)


def done(tensors: Any) -> Any:
    """A collective that is over."""
    future: Any = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future)


class Wrapped(DistributedDataParallel):
    """What phub.ddp returns. Its copies are no DDP, but have the same state_dict()."""

    def join_hook(self, **_: Any) -> NoReturn:
        """Raises InvalidError: torch's Join would see one rank."""
        raise InvalidError(
            "Join is not needed with phub.ddp, and would not see the other ranks: a rank whose "
            "data are over calls model.phub.close(), and the others go on with the mean of those "
            "that are left. Leave Join, or model.join(), out"
        )

    def __copy__(self) -> NoReturn:
        raise InvalidError("the copy would share the job's parameters: use copy.deepcopy()")

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return Copy, (self.module,)


class Copy(nn.Module):
    """A deepcopy of what phub.ddp returned, as AveragedModel makes it, or what torch.load returns.

    It is not in the job: nobody exchanges its gradients, so backward() through it is an error.
    `module` is the plain module, which may be trained.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """As the module's."""
        result = self.module(*inputs, **named)
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.module.parameters()):
            for each in _pytree.tree_leaves(result):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    each.register_hook(_refuse)  # type: ignore[no-untyped-call]
        return result


def _refuse(_: torch.Tensor) -> NoReturn:
    raise InvalidError(
        "backward() through a copy of what phub.ddp returned: nobody exchanges its gradients, and "
        "every rank would train its own. Use the original, or phub.ddp(copy.module) with another "
        "job's name; or, to train it on this rank alone, copy.module"
    )


def let_step_alone(watch: Watch, wrapped: DistributedDataParallel) -> None:
    """Steps within no_sync() are no error. The wrapped module is not kept alive."""
    found = weakref.ref(wrapped)

    def is_local() -> bool:
        ddp = found()
        return ddp is not None and not ddp.require_backward_grad_sync

    watch.is_local = is_local


def refuse_within_another(_module: nn.Module, _inputs: Any) -> None:
    """Two reducers would exchange each gradient, and write to the same memory."""
    if DistributedDataParallel._get_active_ddp_module() is not None:  # type: ignore[no-untyped-call]
        raise InvalidError(
            "the model of phub.ddp is within another DistributedDataParallel, which would exchange "
            "its gradients once more (accelerator.prepare() and Trainer make one): leave one out. "
            "With these use phub.ddp_hook: worker/python/frameworks.md has how"
        )
