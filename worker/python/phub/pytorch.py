"""PyTorch's DistributedDataParallel (DDP) through a box, as a communication hook.

The box sums and averages gradients; optimizer, clipping, GradScaler and `no_sync` are the program's
own, as with DDP. A key of the job is a parameter's name, never a bucket's number: DDP makes its
buckets anew after the first step.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

import inspect
import queue
import time
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Optional, Union

import torch
from torch import nn
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from phub import _alone, _device
from phub._alone import Group, Wrapped, refuse_within_another
from phub._buckets import Bucket, Buckets, answer, complete, gradients_of, start
from phub._buffers import check_statistics, worker_beside
from phub._factors import Factors
from phub._gathered import gathered_of
from phub._names import by_name, plain_name
from phub._options import Key, Option, check_formats, check_results
from phub._powersgd import Matrices, PowerSGD
from phub._same import Same
from phub._state import State
from phub._tensors import DTYPES, FORMATS, format_of_job, key_for, memory_of, pull_into
from phub._watch import Watch
from phub._ways import Ways, is_auto, weights_to_choose
from phub.errors import InvalidError
from phub.worker import Worker

# DDP's argument, which newer versions of PyTorch have renamed.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)
REMEDY = (
    "Register it at the DistributedDataParallel that the program calls, with "
    "register_comm_hook(phub.DDPState(ddp.module), phub.ddp_hook), or use phub.ddp; call these, "
    "never the module in them; and convert the model (bfloat16(), to()) before. Lightning "
    "registers ddp_comm_hook on GPUs alone, and accelerate's comm_hook is for its own: "
    "worker/python/frameworks.md has the way for each"
)


class DDPState(State):
    """What `ddp_hook` needs: a worker whose keys are the module's parameters.

    `ddp.register_comm_hook(phub.DDPState(ddp.module), phub.ddp_hook)`. Every rank makes it, with
    the same module; it returns when all have. Errors of the box are raised by `backward()`, and
    after one the state cannot be used any more.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        formats: Optional[Mapping[str, str]] = None,
        powersgd: Union[None, int, PowerSGD] = None,
        factors: Union[None, str, Mapping[str, int]] = None,
        **options: Option,
    ) -> None:
        """Joins the job.

        module: with dense parameters of float32, bfloat16 or float16 on the CPU, or all on one GPU.
            Those that require no gradient, of any type, and those without elements are not
            exchanged. Raises InvalidError, which names the parameter.
        formats: of gradients on the wire, by patterns of parameters' names: see `Worker`. Others
            have gradient_dtype, by default the parameters' format, or float32 if they have several.
        powersgd: exchanges the gradients of matrices as products of two with so many columns, in
            float32, and all others as ever. Or a `phub.PowerSGD`, which says more. Raises
            InvalidError where that cannot be.
        factors: exchanges the gradients of these weights of nn.Linear, by patterns of their names,
            as the inputs and errors that they are made of, of so many samples of a rank in a step
            at most. Whatever else exchanges gradients must leave these weights alone. Or "auto":
            phub chooses the weights, in the second step and when batches or links have changed.
        options: of `Worker`. Unlike there, the default of reduction is "mean", and of on_nonfinite
            "pass": a GradScaler sees infinities itself, as with DDP. Raises InvalidError for those
            with which results would not be gradients: see `check_results`.
        """
        check_results("DDPState", options)
        super().__init__(module, options)
        job_format = format_of_job(self._parameters)
        given: dict[str, Option] = {
            "reduction": "mean",
            "on_nonfinite": "pass",
            "gradient_dtype": job_format,
            "parameter_dtype": job_format,
            **options,
        }
        for parameter in self._parameters.values():
            _device.check_memory(parameter.device, options.get("memory_device"))
        named = None if is_auto(factors, powersgd) else factors
        self.factors = Factors(module, named) if named else None  # type: ignore[arg-type]
        exchanged = dict(self._parameters)
        for name in self.factors.weights if self.factors else ():
            del exchanged[name]
        keys = {name: key_for(p) for name, p in exchanged.items()}
        self.powersgd = None if powersgd is None else Matrices(exchanged, powersgd)
        small = dict(self._parameters)  # if they are
        if self.powersgd:
            given["parameter_dtype"] = options.get("parameter_dtype", "f32")  # what factors are
            small = {name: p for name, p in small.items() if not self.powersgd.get(name)}
            if not self.powersgd.begins_whole:
                keys = {name: key for name, key in keys.items() if name in small}
        self._check_formats(formats or {}, keys)
        if self.powersgd:
            keys |= self.powersgd.keys
            formats = self.powersgd.formats(formats or {})
        self._gathered = gathered_of(
            {name: p for name, p in small.items() if name in keys}, formats or {}, given
        )
        if self._gathered:
            keys = {name: key for name, key in keys.items() if name not in self._gathered}
            keys |= self._gathered.keys
        # Whether the job's keys are all parameters, and its results have all of their bits.
        whole = not self.powersgd and not self.factors
        self._is_exact = whole and given["parameter_dtype"] in (job_format, "f32")
        if not self._is_exact:
            given.pop("initial", None)  # it is another job's: see broadcast_parameters
        self.worker = Worker(by_name(keys), hyper=None, formats=formats, saver=None, **given)
        self._has_released = False
        self._check_gathered()
        if self.factors:
            self.factors.join(self.worker, options)
        if factors and not named:
            self.ways = self._ways_of(keys, formats or {}, given)
        self._result_dtype = DTYPES.get(str(given["parameter_dtype"]), torch.float32)
        self._registered: dict[str, int] = {}
        self._staged: dict[str, torch.Tensor] = {}
        self._buckets: Buckets = queue.SimpleQueue()
        last = self._buckets
        if self.powersgd:
            self.powersgd.join(self.worker)
        if self.powersgd or self.ways:
            last = queue.SimpleQueue()
            start(answer, self._buckets, last)
        start(complete, self.worker, last)
        self.watch = Watch(self.worker.job, exchanged, "phub's hook", REMEDY)
        self.same = self._compared()

    def _compared(self) -> Optional[Same]:
        return Same(self._module, self.worker, self._options) if self.world_size > 1 else None

    def close(self) -> None:
        """Leaves the job. The others go on without this rank.

        Raises InvalidError if there was a backward(), and never an exchange.
        """
        self._buckets.put(None)
        for other in (self._buffers, self.factors, self.ways, self._used, self.same):
            if other:
                other.close()
        self.worker.close()
        self.watch.close()

    def _ways_of(
        self, keys: Mapping[str, Key], formats: Mapping[str, str], given: Mapping[str, Option]
    ) -> Optional[Ways]:
        """None: of no weight is there a choice. What is not float32 on the wire stays as it is.

        So does what the box looks at (on_nonfinite): of factors it does not know the sum.
        """
        plain = {"gradient_dtype": "f32", "parameter_dtype": "f32", "on_nonfinite": "pass"}
        if self.worker.world_size == 1 or any(given[name] != v for name, v in plain.items()):
            return None
        weights = {
            name: module
            for name, module in weights_to_choose(self._module).items()
            if name in keys and not any(fnmatchcase(name, pattern) for pattern in formats)
        }
        others = sum(p.numel() for n, p in self._parameters.items() if n not in weights)
        if not weights:
            return None
        return Ways(weights, others, self._module, self.worker, self._options)

    def broadcast_parameters(self) -> None:
        """Gives the module rank 0's parameters, before the first step (initial="broadcast")."""
        self._check_it_is_not_late()
        if self._is_exact:
            self._broadcast_in(self.worker, self._result_dtype)
            return
        keys = {name: key_for(p) for name, p in self._alone().items()}
        if self._gathered:
            keys |= self._gathered.keys
        with worker_beside(
            self.worker,
            self._options,
            "initial",
            keys,
            late="the other ranks got their first parameters",
            initial="broadcast",
        ) as worker:
            self._broadcast_in(worker, torch.float32)
            worker.barrier()  # nobody leaves before all have them

    def _check_it_is_not_late(self) -> None:
        if self.worker.first_round > 1:
            raise InvalidError(
                f"the job is in round {self.worker.first_round}: the box sums gradients and has no "
                "model, so a rank cannot join later. Start all ranks again, from the program's own "
                "checkpoint, and under another job's name if the others go on"
            )

    def _check_gathered(self) -> None:
        """That all ranks have the same small parameters: the keys of a job that nobody pushes."""
        if not self._gathered:
            return
        keys = {name: key_for(p) for name, p in self._parameters.items() if name in self._gathered}
        late = "the other ranks compared their parameters"
        try:
            self._check_it_is_not_late()
            with worker_beside(self.worker, self._options, "names", keys, late=late) as worker:
                worker.barrier()  # nobody leaves before all have joined
        except Exception:
            self.worker.close()
            raise

    def _check_formats(self, formats: Mapping[str, str], keys: Mapping[str, Key]) -> None:
        """keys: of the job, those of PowerSGD's factors left out."""
        by_samples = self.factors.weights if self.factors else ()
        others = {
            name: "factors of samples" if name in by_samples else "PowerSGD's factors"
            for name in self._parameters
            if name not in keys
        }
        check_formats(formats, keys, others)

    def _alone(self) -> dict[str, nn.Parameter]:
        """The parameters that are not exchanged together with others."""
        gathered = self._gathered or ()
        return {name: p for name, p in self._parameters.items() if name not in gathered}

    @torch.no_grad()
    def _broadcast_in(self, worker: Worker, dtype: torch.dtype) -> None:
        alone, together = self._alone(), self._gathered.groups if self._gathered else ()
        if self.rank == 0:
            tensors = {name: parameter.detach() for name, parameter in alone.items()}
            for group in together:
                for name, place in group.places.items():
                    place.copy_(self._parameters[name])
                tensors[group.key] = group.memory
            worker.broadcast(
                {k: memory_of(t.float().cpu().contiguous()) for k, t in tensors.items()}
            )
            return
        worker.broadcast()
        for name, parameter in alone.items():
            pull_into(worker, name, parameter, dtype)
        for group in together:
            pull_into(worker, group.key, group.memory, dtype)
            for name, place in group.places.items():
                self._parameters[name].copy_(place)

    def exchange(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Pushes the bucket's gradients. In the future is the bucket's buffer, with the results.

        For the last bucket of a step it returns when all results are here, so that an error of the
        box is raised by `backward()` with its own type, and so is Ctrl-C's KeyboardInterrupt. On a
        GPU it never waits: the next `backward()` raises the error, and until then gradients are
        NaN.
        """
        if bucket.index() == 0:
            self._begin_step(bucket)
        if _device.is_gpu(bucket.buffer().device):
            return self._exchange_on_device(bucket)
        if self.ways:
            self.ways.note({self._key_of(p): p.numel() for p in bucket.parameters() if p.numel()})
        sent = Bucket(bucket.buffer())
        small: list[tuple[str, torch.Tensor]] = []
        for parameter, gradient in gradients_of(bucket):
            key = self._key_of(parameter)
            if self._gathered and key in self._gathered:
                small.append((key, gradient))
                continue
            self._send(sent, key, gradient)
        if self._gathered and small:
            sent.groups = self._gathered.put(small)
        for group in sent.groups:
            self._register(group.key, group.memory)
            self.worker.push(group.key)
        self._outstanding.append(sent)
        self._buckets.put(sent)
        if self.ways:
            self.ways.resume()
        if bucket.is_last():
            self._end_step()
        return sent.future

    def _begin_step(self, bucket: GradBucket) -> None:
        self.watch.end()
        self._check_frozen()
        if self._gathered:
            self._gathered.begin_step()
        if self.same:
            self.same.begin_backward(bucket.buffer())
        if self.ways:
            self.ways.begin_step()

    def _send(self, sent: Bucket, key: str, gradient: torch.Tensor) -> None:
        lent = self._contiguous(key, gradient)
        if lent is not gradient:
            sent.copies.append((gradient, lent))
        matrix = self.powersgd and self.powersgd.get(key)
        if matrix and not matrix.next_is_whole():
            matrix.begin(lent)
            sent.matrices.append(matrix)
            return
        self._register(key, lent)
        if self.ways and (weight := self.ways.sends(key)):
            weight.begin(lent)
            sent.matrices.append(weight)
            return
        self.worker.push(key)
        sent.keys.append(key)

    def _end_step(self) -> None:
        began = time.perf_counter()
        self._wait()
        if self.ways:
            self.ways.end_step(time.perf_counter() - began)
        self._release_first_buckets()
        if self.same:
            self.same.look()

    def _exchange_on_device(self, bucket: GradBucket) -> Future[torch.Tensor]:
        _device.exchange_on(bucket.buffer().device, self.worker)
        on_device: _device.DeviceKeys = self.worker.on_device
        gradients = {self._key_of(of): gradient for of, gradient in gradients_of(bucket)}
        for key, gradient in gradients.items():
            on_device.push(key, self._contiguous(key, gradient))
        return on_device.pull_later(gradients, bucket.buffer())

    def _release_first_buckets(self) -> None:
        """After the first step DDP makes its buckets anew: the first ones must not live on."""
        if self._has_released:
            return
        self._has_released = True
        for key in self._registered:
            self.worker.register_memory(key)
        self._registered.clear()

    def _contiguous(self, key: str, gradient: torch.Tensor) -> torch.Tensor:
        """It, or a copy, which lives as long as this: ranks may have other orders in memory."""
        if gradient.is_contiguous():
            return gradient
        staged = self._staged.get(key)
        if staged is None or staged.dtype != gradient.dtype:
            staged = torch.empty_like(gradient, memory_format=torch.contiguous_format)
            self._staged[key] = staged
        return staged.copy_(gradient)

    def _register(self, key: str, gradient: torch.Tensor) -> None:
        address = gradient.data_ptr()
        if self._registered.get(key) == address:
            return
        if gradient.layout != torch.strided or gradient.device.type != "cpu":
            raise InvalidError(
                f"the gradient of '{key}' is {gradient.layout} on {gradient.device}: phub "
                "exchanges dense gradients on the CPU"
            )
        memory, kind = memory_of(gradient), FORMATS[gradient.dtype]
        self.worker.register_memory(key, memory, memory, gradient_dtype=kind, parameter_dtype=kind)
        self._registered[key] = address


def ddp_hook(state: State, bucket: GradBucket) -> Future[torch.Tensor]:
    """The hook for `DistributedDataParallel.register_comm_hook`; `state` is a `DDPState`."""
    return state.exchange(bucket)


def ddp(
    module: nn.Module,
    *,
    ddp_options: Optional[Mapping[str, Any]] = None,
    formats: Optional[Mapping[str, str]] = None,
    powersgd: Union[None, int, PowerSGD] = None,
    factors: Union[None, str, Mapping[str, int]] = None,
    node: Union[None, str, ProcessGroup] = None,
    **options: Option,
) -> DistributedDataParallel:
    """DDP whose only connection to other ranks is the box.

    Its process group has this rank alone, so no collective of PyTorch hangs or fails when another
    rank dies: the job's policy (on_loss) decides. All ranks begin with rank 0's parameters. Buffers
    (BatchNorm's statistics) are each rank's own.

    module: see `DDPState`.
    ddp_options: arguments of DistributedDataParallel. find_unused_parameters, on all ranks: what
        each of them used is added up in a job of its own, JOB-used.
    formats, powersgd, factors, options: see `DDPState`.
    node: the processes of a host add up gradients among themselves, so that it sends one model to
        the box: see `NodeState`. "reduce": those that the launcher has started there
        (LOCAL_RANK and LOCAL_WORLD_SIZE); or a process group of PyTorch that has them.
    Returns the wrapped module. Its attribute `phub` is the `DDPState`, or NodeState, with `rank`,
    `world_size` and `close()`. A deepcopy of it, or what torch.load returns of it, is not in the
    job.
    """
    for name in options.keys() & inspect.signature(DistributedDataParallel.__init__).parameters:
        raise InvalidError(
            f"phub.ddp: '{name}' is an argument of DistributedDataParallel, and no option of the "
            f"job: ddp_options={{'{name}': {options[name]!r}}}"
        )
    arguments = {"gradient_as_bucket_view": True, **(ddp_options or {})}
    # There is nobody in the group to have the same, and gloo does not know all types.
    arguments.pop("broadcast_buffers", None)
    arguments |= {"init_sync": False, _SYNC_BUFFERS: False}
    everything: dict[str, Option] = {"initial": "broadcast", **options}
    group = Group()
    state: State
    if node is None:
        state = DDPState(module, formats=formats, powersgd=powersgd, factors=factors, **everything)
    else:
        from phub._node import NodeState, group_of

        alone = {"powersgd": powersgd, "factors": factors}  # which it refuses
        state = NodeState(module, node, formats=formats, **alone, **everything)
        group = group_of(state.host)
    check_statistics(module, state.world_size)
    state.broadcast_parameters()
    if state.same:
        state.same.compare_what_is_not_exchanged()
    if state.factors:
        left_out = [
            n for n, _ in module.named_parameters() if plain_name(n) in state.factors.weights
        ]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            module, [name if "." in name else f".{name}" for name in left_out]
        )
    wrapped = Wrapped(module, process_group=group, **arguments)
    if arguments.get("find_unused_parameters"):
        group.used = state.count_used()
    wrapped.register_comm_hook(state, ddp_hook)
    wrapped.phub = state  # type: ignore[assignment]
    wrapped.register_forward_pre_hook(refuse_within_another)
    _alone.let_step_alone(state.watch, wrapped)
    if state.factors:
        state.factors.accumulates = lambda: not wrapped.require_backward_grad_sync
    return wrapped
