"""Sufficient factors: of fully connected layers the ranks exchange what gradients are made of.

The gradient of such a layer's weight is the sum, over the samples of a batch, of the outer product
of the error of its output and its input (Xing et al. 2015; Poseidon, section 4.3.1). With K samples
of a rank that is K (M + N) numbers in place of M N. Every rank has a key of the job for each layer,
in which only it sends; the box passes it on, and all ranks add up the products themselves, in the
order of ranks and samples: the same bits on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import c_void_p
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from phub import _device
from phub._buffers import worker_beside
from phub._library import call
from phub._names import plain_name
from phub._options import Key, Option
from phub._views import tensor_over
from phub.errors import InvalidError, NotFoundError
from phub.worker import Worker

_RANKS = "ranks"  # the key that counts who takes part


class Factors:
    """Layers of a model whose weights' gradients are exchanged as factors, in a job of their own.

    Their modules compute as before, but backward() pushes the factors, and at its end their weights
    have the mean of all ranks' gradients.
    """

    def __init__(self, model: nn.Module, samples: Mapping[str, int]) -> None:
        """Raises InvalidError, or NotFoundError for a pattern that matches no weight.

        samples: by patterns of the weights' names, how many samples a rank has in a step at most.
        """
        self._layers = [
            Layer(name, module, samples_of)
            for name, (module, samples_of) in layers_of(model, samples).items()
        ]
        # Whether this backward() is to be without an exchange.
        self.accumulates: Callable[[], bool] = lambda: False
        self._pushed = False  # anything, in this backward()
        self._worker: Worker

    def join(self, beside: Worker, options: Mapping[str, Option]) -> None:
        """Joins; returns when all ranks have."""
        keys = {_RANKS: Key(1)}
        for layer in self._layers:
            keys |= layer.keys(beside.world_size)
        self._worker = worker_beside(
            beside, options, "factors", keys, late="factors: the other ranks began", reduction="sum"
        )
        self._is_there = tensor_over(self._worker.gradient(_RANKS))
        self._ranks = tensor_over(self._worker.parameters(_RANKS))
        for layer in self._layers:
            layer.join(self, self._worker)

    def close(self) -> None:
        """Leaves the job."""
        self._worker.close()

    @property
    def weights(self) -> tuple[str, ...]:
        """The parameters that nothing else may exchange, by name."""
        return tuple(layer.name for layer in self._layers)

    def begin(self) -> None:
        """A layer is about to push. At the end of backward() all are waited for."""
        if self._pushed:
            return
        if self.accumulates():
            raise InvalidError(
                "factors: within no_sync() gradients are added up before they are exchanged, and "
                "factors are of one step"
            )
        self._pushed = True
        self._is_there.fill_(1)
        self._worker.push(_RANKS)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._pushed = False
        for layer in self._layers:
            layer.push_nothing()
        self._worker.wait(_RANKS)
        factor = (1 / self._ranks).item()
        for layer in self._layers:
            layer.take(factor)


class Layer:
    """One of them: an nn.Linear."""

    def __init__(self, name: str, module: nn.Linear, samples: int) -> None:
        self.name, self._module, self._samples = name, module, samples
        self.weight = module.weight
        self._split = samples * self.weight.shape[0]  # behind it the inputs
        self._sent = False
        self._names: tuple[str, ...]
        self._all: Factors | None = None
        self._worker: Worker
        self._own: torch.Tensor  # of this rank, to be sent
        self._factors: list[torch.Tensor]  # of all ranks

    def keys(self, ranks: int) -> dict[str, Key]:
        """Of each rank: its factors, and at last how many samples they are of."""
        size = self._samples * sum(self.weight.shape) + 1
        return {f"{self.name}/factors/{rank}": Key(size) for rank in range(ranks)}

    def join(self, of: Factors, worker: Worker) -> None:
        """From now on the module's backward() pushes."""
        self._names = tuple(self.keys(worker.world_size))
        self._all, self._worker = of, worker
        self._own = tensor_over(worker.gradient(self._names[worker.rank]))
        self._factors = [tensor_over(worker.parameters(name)) for name in self._names]
        self._module.forward = self._forward  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy of the model, whose module computes as ever."""
        return {"_module": self._module, "_all": None}

    def _forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight, bias = self._module.weight, self._module.bias
        is_plain = (
            self._all is None
            or weight is not self.weight  # it is pruned, or that of torch.func.functional_call
            or not torch.is_grad_enabled()
        )
        if is_plain:
            if self._all and torch.is_grad_enabled():
                refuse_made(self.name, self._module)
            return functional.linear(inputs, weight, bias)
        result: torch.Tensor = Linear.apply(inputs, weight, bias, self)  # type: ignore[no-untyped-call]
        return result

    def push(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Sends the factors of these samples; of the other ranks' keys, nothing."""
        samples = len(left)
        if samples > self._samples:
            raise InvalidError(
                f"factors: layer '{self.name}' has {samples} samples, and there is room for "
                f"{self._samples}: give more in factors="
            )
        if self._sent:
            raise InvalidError(
                f"factors: layer '{self.name}' is used twice in a step, and has one set of factors"
            )
        assert self._all is not None
        self._all.begin()
        own = self._own
        own[: left.numel()].view(left.shape).copy_(left)
        own[self._split : self._split + right.numel()].view(right.shape).copy_(right)
        own[-1] = samples
        self._push_all(null=False)

    def push_nothing(self) -> None:
        """Unless it was pushed in this step."""
        if not self._sent:
            self._push_all(null=True)

    def take(self, factor: float) -> None:
        """Waits for all ranks' factors; the gradient is added to the weight's."""
        self._sent = False
        rows, columns = self.weight.shape
        gradient = torch.zeros(rows, columns)
        for name, factors in zip(self._names, self._factors, strict=True):
            self._worker.wait(name)
            samples = factors[-1].item()
            if samples not in range(self._samples + 1):
                raise InvalidError(
                    f"key '{name}' has factors of {samples} samples, and there is room for "
                    f"{self._samples}"
                )
            add_products(factors, factors[self._split :], int(samples), gradient)
        gradient *= factor
        if not self.weight.requires_grad:  # any more
            return
        if self.weight.grad is None:
            self.weight.grad = gradient
        else:
            self.weight.grad += gradient

    def _push_all(self, null: bool) -> None:
        self._sent = True
        for rank, name in enumerate(self._names):
            if null or rank != self._worker.rank:
                self._worker.push_null(name)
            else:
                self._worker.push(name)


class Linear(torch.autograd.Function):
    """functional.linear, whose backward() sends the factors of the weight's gradient.

    `layer.push` gets them, if the weight is to have a gradient. It returns the gradient if it is to
    be made here after all, or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: Layer,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layer, ctx.has_bias = layer, bias is not None
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, error: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        errors = error.reshape(-1, weight.shape[0])
        # Before the push: with zero_copy its result takes the weight's place.
        before = error @ weight if ctx.needs_input_grad[0] else None
        gradient = None
        if ctx.needs_input_grad[1]:
            right = inputs.reshape(-1, weight.shape[1])
            pushes = is_summed(ctx.next_functions[1][0])
            gradient = ctx.layer.push(errors, right) if pushes else errors.t() @ right
        return before, gradient, errors.sum(0) if ctx.has_bias else None, None


def is_summed(accumulate: Any) -> bool:
    """Whether the weight, whose node of the graph this is, gets a gradient in this backward().

    Not in torch.autograd.grad(), which refuses the question if it returns the weight's; nor in
    backward(inputs=...) of others.
    """
    try:
        return bool(torch._C._will_engine_execute_node(accumulate))
    except RuntimeError:
        return False


def add_products(
    left: torch.Tensor, right: torch.Tensor, samples: int, total: torch.Tensor
) -> None:
    """Adds the outer products of so many pairs of vectors to a matrix, in an order of its own."""
    addresses = (c_void_p(tensor.data_ptr()) for tensor in (left, right, total))
    left_at, right_at, total_at = addresses
    call("add_products", left_at, right_at, samples, *total.shape, total_at)


def linear_weights(model: nn.Module) -> dict[str, nn.Linear]:
    """By the weight's name: the modules that are nn.Linear, and nothing that is derived from it."""
    return {
        plain_name(f"{name}.weight" if name else "weight"): module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and isinstance(module.weight, nn.Parameter)
        and module.weight.requires_grad
        and module.weight.numel()
    }


def refuse_made(name: str, module: nn.Linear) -> None:
    """Raises InvalidError if the module makes its weight of other parameters in each forward()."""
    if "weight" in module._parameters:
        return
    raise InvalidError(
        f"factors: '{name}' is pruned, or parametrized: it is made of other parameters in each "
        "forward(), and factors are of a weight itself, so these would keep this rank's gradient. "
        "Leave it out of factors, or make it a parameter again (torch.nn.utils.prune.remove, "
        "parametrize.remove_parametrizations), before the job begins"
    )


def layers_of(
    model: nn.Module, samples: Mapping[str, int], *, may_be_on_gpu: bool = False
) -> dict[str, tuple[nn.Linear, int]]:
    """By the weight's name: the module, and the samples of the last pattern that matches it."""
    linear = linear_weights(model)
    if not isinstance(samples, Mapping) or not all(isinstance(each, str) for each in samples):
        raise InvalidError(
            f"factors={samples!r}: it is a number of samples by patterns of names, such as "
            '{"classifier.*.weight": 32}, or "auto"'
        )
    for path, module in model.named_modules():
        name = plain_name(f"{path}.weight" if path else "weight")
        if isinstance(module, nn.Linear) and any(fnmatchcase(name, each) for each in samples):
            refuse_made(name, module)
    for pattern, count in samples.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidError(f"factors: {pattern!r} has {count!r} samples; at least 1")
        if not any(fnmatchcase(name, pattern) for name in linear):
            raise NotFoundError(
                f"factors: none of the model's {len(linear)} weights of nn.Linear matches "
                f"'{pattern}'"
            )
    layers = {}
    for name, module in linear.items():
        matching = [count for pattern, count in samples.items() if fnmatchcase(name, pattern)]
        if not matching:
            continue
        on_gpu = _device.is_gpu(module.weight.device) and not may_be_on_gpu
        if module.weight.dtype != torch.float32 or on_gpu:
            where = "" if may_be_on_gpu else " on the CPU"
            raise InvalidError(
                f"factors are float32{where}, and '{name}' is {module.weight.dtype} on "
                f"{module.weight.device}"
            )
        layers[name] = (module, matching[-1])
    return layers
