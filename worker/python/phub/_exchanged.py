"""A parameter of a DistributedOptimizer, on its way to the box and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.autograd.graph import increment_version

from phub import _rules
from phub._awaited import (
    HOLDERS_OF_ONE,
    Awaited,
    Settling,
    await_value,
    holders_of,
    value_is_there,
    writing,
)
from phub._device import DeviceKeys
from phub._tensors import DTYPES, filled, memory_of, pull_into, push_from, take_into
from phub._views import tensor_over
from phub.errors import InvalidError, TakenError
from phub.worker import Worker

_STATE_LIMIT_S = 60.0  # for which other ranks may read the state
_BEGIN_LIMIT_S = 10.0  # after which the box must have noticed that the job has begun
_RESULT_LIMIT_S = 1.0  # the same, once this rank has a result
_T = TypeVar("_T")


@dataclass(eq=False)
class Exchanged:
    """A parameter that is exchanged, and where it is in its step."""

    awaited: ClassVar[type[Settling]] = Awaited

    worker: Worker
    name: str
    tensor: nn.Parameter
    is_mean: bool  # what comes back is the mean of the gradients
    zero_copy: bool = False  # the parameter is a view of what comes back
    delay: bool = False  # it comes late: the next backward() may write where its gradient was
    backwards: int = 0  # of this step
    pushed: bool = False
    gradient: torch.Tensor | None = None  # that was pushed; None: there was none
    version: int = 0  # of the gradient when it was pushed
    waits: bool = False  # its result is not copied yet; whoever reads the parameter waits for it
    late: bool = False  # its result is not copied before the next push, and nobody waits until then
    written: int = 0  # the parameter's version after its result was copied
    lent: torch.Tensor | None = None  # on a GPU: what it may still read
    holders: int = HOLDERS_OF_ONE  # of the parameter's memory, if the program has no view of it

    slot: torch.Tensor = field(init=False)  # the gradient that the box reads
    result: torch.Tensor = field(init=False)  # the new parameters, or the mean of the gradients

    def __post_init__(self) -> None:
        self.look()

    def look(self) -> None:
        """Makes views of the worker's memory, which is another after it has joined again."""
        if self.worker.memory_device:  # which only the device's keys use
            self.slot = self.result = torch.empty(0)
            return
        self.slot, self.result = (
            tensor_over(view, DTYPES[dtype])[: self.value.numel()].view(self.value.shape)
            for view, dtype in (
                (self.worker.gradient(self.name), self.worker.gradient_dtype(self.name)),
                (self.worker.parameters(self.name), self.worker.parameter_dtype),
            )
        )

    @property
    def value(self) -> torch.Tensor:
        """What of the parameter is exchanged: all of it."""
        return self.tensor

    def gradient_now(self) -> torch.Tensor | None:
        """That of the value."""
        return self.tensor.grad

    def is_due(self, accumulate: int) -> bool:
        """Whether the gradient is complete, as far as one knows within a backward()."""
        return self.backwards == accumulate

    def note_written(self) -> None:
        """The box has the value, or takes it."""
        self.written = self.value._version

    def push(self) -> None:
        """Copies the gradient to the slot, in its format, and pushes it."""
        self.take_late()
        if self.waits and not self.backwards:
            self.take()  # its module is not used
        if self.waits:
            raise RuntimeError(
                f"parameter '{self.name}' was used before its new value was there: by a forward() "
                "before step(), or where phub does not see it (TorchScript, an extension in C++). "
                'Call synchronize() before such a use, or use overlap="backward"'
            )
        if not self.is_mean and self.value._version != self.written:
            raise RuntimeError(
                f"parameter '{self.name}' was changed by the program, and the box has the old "
                "value: change it before DistributedOptimizer is made; after loading a model call "
                "load_state_dict() of the DistributedOptimizer (its own state_dict() will do), on "
                "all ranks; or use server=False"
            )
        if not self.tensor.requires_grad:
            raise RuntimeError(
                f"parameter '{self.name}' was frozen, and its steps would go on: freeze it before "
                "DistributedOptimizer is made, or give its group lr=0"
            )
        gradient = self.gradient_now()
        if gradient is None:
            self._send(None)
        else:
            self._check_layout(gradient)
            if self.zero_copy and gradient.requires_grad:
                raise RuntimeError(
                    f"the gradient of '{self.name}' has a graph (create_graph=True), which needs "
                    "the parameter's present value: with zero_copy the next one takes its place"
                )
            self.version = gradient._version
            self._send(gradient)
        if self.zero_copy:
            increment_version(self.tensor)  # what still needs the present value is an error
        self.gradient = gradient
        self.pushed = True

    def _check_layout(self, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of '{self.name}' is {gradient.layout}: rows are sent of the weights "
                "of nn.Embedding(sparse=True), for steps of the box (server=True); phub exchanges "
                "dense gradients of others (sparse=False)"
            )

    @torch.no_grad()
    def _send(self, gradient: torch.Tensor | None) -> None:
        if self.worker.on_device:
            self.lent = None if gradient is None else self._to_lend(filled(gradient))
            self.worker.on_device.push(self.name, self.lent)
        elif gradient is None:
            self.worker.push_null(self.name)
        else:
            push_from(self.worker, self.name, gradient, self.slot)

    def _to_lend(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.delay:
            return tensor.clone(memory_format=torch.contiguous_format)
        return tensor.contiguous()

    def check_unchanged(self) -> None:
        """Raises RuntimeError if the gradient is not the one that was pushed."""
        found = self.gradient_now()
        if found is None and self.gradient is not None:
            raise RuntimeError(
                f"the gradient of '{self.name}' is gone, and was pushed already: zero_grad() came "
                "between backward() and step(). Call it after step(), or use overlap=False"
            )
        is_touched = found is not self.gradient or (
            found is not None and found._version != self.version
        )
        if is_touched and not self._is_as_pushed(found):
            raise RuntimeError(
                f"the gradient of '{self.name}' was changed after it was pushed (zero_grad, "
                "clip_grad_norm_): use overlap=False to change this rank's gradients "
                "before step(), or server=False and synchronize() to change the mean. Leave out a "
                "DistributedDataParallel around the model, as accelerator.prepare() makes it: the "
                "box adds the gradients"
            )

    @torch.no_grad()
    def _is_as_pushed(self, found: torch.Tensor | None) -> bool:
        """Whether its bits are those in the slot, as after clip_grad_norm_ with a large norm."""
        if found is None or self.gradient is None or self.slot.shape != found.shape:
            return False
        if found.device != self.slot.device:  # where it may not have come yet
            return False
        words = {4: torch.int32, 2: torch.int16}[self.slot.element_size()]
        again = found.to(self.slot.dtype).contiguous()
        return torch.equal(again.view(words), self.slot.view(words))

    def take_later(self) -> None:
        """Once somebody reads the parameter; now, if that may happen where nobody is told."""
        if type(self.tensor) is not self.awaited.plain or self.holders_now() > self.holders:
            self.take()  # the program has a view of its memory, or a class of its own
            return
        self.waits = True
        await_value(self.tensor, self.take, self.awaited)

    def holders_now(self) -> int:
        """Of the value's memory."""
        return holders_of(self.value)

    def take_late(self) -> None:
        """Waits for a result that comes late, and copies it to the parameter.

        Not over what the program has written there meanwhile, which the next push refuses.
        """
        if not self.late:
            return
        if self.value._version == self.written:
            self._take()
        elif self.worker.on_device:
            self.worker.on_device.pull(self.name, torch.empty_like(filled(self.value)))
            self.lent = None
        else:
            self.worker.wait(self.name)
        self.late = False

    def take(self) -> None:
        """Waits for the result, and copies it to the parameter, or a mean to its gradient.

        On a GPU its stream waits.
        """
        if not self.waits:
            self._take()
            return
        with writing():
            self._take()
        self._settled()

    def _take(self) -> None:
        if self.worker.on_device:
            self._take_on_device(self.worker.on_device)
            return
        self.worker.wait(self.name)
        if self.is_mean:
            self._take_mean()
        else:
            self.show()

    def _settled(self) -> None:
        self.waits = False
        value_is_there(self.tensor)

    @torch.no_grad()
    def _take_on_device(self, keys: DeviceKeys) -> None:
        into = self.value
        if self.is_mean:
            if self.tensor.grad is None:
                self.tensor.grad = torch.empty_like(self.tensor)
            into = self.tensor.grad
        keys.pull(self.name, filled(into.detach()))
        increment_version(into)
        self.note_written()
        self.lent = None

    @torch.no_grad()
    def _take_mean(self) -> None:
        if self.tensor.grad is None:
            self.tensor.grad = self.result.to(self.tensor.dtype, copy=True)
        else:
            take_into(self.worker, self.name, self.tensor.grad, self.result)

    @torch.no_grad()
    def show(self) -> None:
        """Sets the parameter to the result."""
        if self.worker.memory_device:
            pull_into(self.worker, self.name, self.tensor, DTYPES[self.worker.parameter_dtype])
        elif not self.zero_copy:
            take_into(self.worker, self.name, self.value, self.result)
        else:
            if self.tensor.data_ptr() != self.result.data_ptr():
                self.tensor.data = self.result
                self.holders = holders_of(self.tensor)
            increment_version(self.tensor)
        self.note_written()

    def hold(self) -> None:
        """Gives the parameter memory of its own, as it has without zero_copy."""
        if self.zero_copy and self.tensor.data_ptr() == self.result.data_ptr():
            self.tensor.data = self.result.clone()
            self.holders = HOLDERS_OF_ONE

    def look_away(self) -> None:
        """Before that memory becomes invalid. What is under way counts no more."""
        self._settled()
        self.late = False
        self.hold()
        self.slot = self.result = torch.empty(0)
        self.end_step()

    def end_step(self) -> None:
        """The next backward() is of the next step."""
        self.backwards, self.pushed, self.gradient = 0, False, None
        self.note_written()

    def state_of(self, array: torch.Tensor) -> torch.Tensor:
        """A part of the optimizer's state, as PyTorch's optimizer has it."""
        return array.to(self.tensor.device)

    def parts_of(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the value has of the state that PyTorch's optimizer has of the parameter."""
        return state


def take_waiting(parameters: Sequence[Exchanged]) -> None:
    """Waits for results that are not copied yet."""
    for each in parameters:
        each.take_late()
        if each.waits:
            each.take()


# ---- The optimizer's state at the box, as PyTorch has it: by parameter.


def fetch_state(
    worker: Worker,
    parameters: Sequence[Exchanged],
    rule: str,
    groups: Sequence[Mapping[str, Any]],
) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Of those of which the optimizer has made a step."""
    names = worker.state_names
    arrays = {
        each.name: [torch.empty(each.value.shape) for _ in range(1 + len(names))]
        for each in parameters
    }
    steps = when_free(worker, lambda: worker.get_state(_memories_of(arrays)))
    group_of = {tensor: group for group in groups for tensor in group["params"]}
    states = {
        each.tensor: _rules.torch_state(
            rule,
            steps[each.name],
            {
                name: each.state_of(array)
                for name, array in zip(names, arrays[each.name][1:], strict=True)
            },
            group_of[each.tensor],
        )
        for each in parameters
    }
    return {tensor: state for tensor, state in states.items() if state}


def send_state(
    worker: Worker, parameters: Sequence[Exchanged], state: Mapping[Any, Mapping[str, Any]]
) -> None:
    """With the parameters as they are now."""
    arrays, steps = {}, {}
    for each in parameters:
        steps[each.name], kept = _rules.box_state(
            worker.state_names, each.value, each.parts_of(state.get(each.tensor, {}))
        )
        mine = each.value.detach().float()
        arrays[each.name] = [array.cpu().contiguous() for array in (mine, *kept)]
    when_free(worker, lambda: worker.set_state(_memories_of(arrays), steps))


def has_steps(parameters: Sequence[Exchanged], state: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Whether the optimizer has made any."""
    of_them = (state.get(each.tensor, {}) for each in parameters)
    return any(
        int(each["step"]) > 0 if "step" in each else any(a is not None for a in each.values())
        for each in of_them
    )


def _memories_of(arrays: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, list[Any]]:
    return {
        key: [memory_of(filled(tensor)) for tensor in tensors] for key, tensors in arrays.items()
    }


def when_free(worker: Worker, action: Callable[[], _T]) -> _T:
    """Tries again while another rank reads or sets the state.

    The box refuses it as invalid until it has noticed that the job has begun, a little after the
    ranks have their first parameters, and where steps are short after some results.
    """
    start = time.monotonic()
    while True:
        try:
            return action()
        except TakenError:
            if time.monotonic() > start + _STATE_LIMIT_S:
                raise
        except InvalidError:
            has_result = worker.round(worker.keys[0]) > 0
            limit_s = _RESULT_LIMIT_S if has_result else _BEGIN_LIMIT_S
            if time.monotonic() > start + limit_s:
                raise
        time.sleep(0.02)
