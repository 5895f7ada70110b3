"""Where a DistributedOptimizer takes part in what the program does with the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from phub._box_factors import BoxFactors, Layer, Layers
from phub._exchanged import Exchanged, take_waiting

# mypy: disable-error-code="no-untyped-call"


class Hooks:
    """All of them, from the optimizer's making until remove(). They do not refer to it."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Exchanged],
        layers: Layers,
        on_gradient: Callable[[Exchanged], None] | None,
        *,
        has_views: bool,
        is_late: bool,
    ) -> None:
        """on_gradient: called when backward() has a gradient, or factors; None: nothing is.

        has_views: the parameters are views of the worker's memory.
        is_late: their values come a step late.
        """
        self._hooks: list[RemovableHandle] = []
        if on_gradient:  # where factors are sent, there is no gradient
            others = [each for each in parameters if not isinstance(each, BoxFactors)]
            self._hooks += _gradient_hooks(others, on_gradient)
            if any(hasattr(each, "unit") for each in parameters):
                from phub._sharded import visit_hooks

                self._hooks += visit_hooks(parameters)
        if has_views:
            self._hooks += _view_hooks(model, parameters)
        if is_late:
            self._hooks += _late_hooks(model, parameters)
        self._layers = [
            Layer(layers[each.name][0], each, on_gradient)
            for each in parameters
            if isinstance(each, BoxFactors)
        ]

    def remove(self) -> None:
        """The model is as it was."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            layer.remove()
        self._hooks, self._layers = [], []


def _gradient_hooks(
    parameters: Sequence[Exchanged], on_gradient: Callable[[Exchanged], None]
) -> Iterator[RemovableHandle]:
    for each in parameters:
        yield each.tensor.register_post_accumulate_grad_hook(lambda _, each=each: on_gradient(each))


def _view_hooks(model: nn.Module, parameters: Sequence[Exchanged]) -> Iterator[RemovableHandle]:
    """Parameters that are views cannot be written to, as those of a model that is loaded are."""
    for module, own in _by_module(model, parameters):
        yield module.register_load_state_dict_pre_hook(_Hold(own))
        yield module.register_state_dict_post_hook(_copy_views)


def _late_hooks(model: nn.Module, parameters: Sequence[Exchanged]) -> Iterator[RemovableHandle]:
    """A state_dict() has the values of the latest step; also a module's, of all parameters."""
    for module, _ in _by_module(model, parameters):
        yield module.register_state_dict_pre_hook(_Take(parameters))


class _OfParameters:
    """What a hook does with some of a model's."""

    def __init__(self, parameters: Sequence[Exchanged]) -> None:
        self._parameters = parameters

    def __reduce__(self) -> Any:
        """The parameters of a copy of the model are its own."""
        return type(self), ((),)


class _Take(_OfParameters):
    """Takes what comes late."""

    def __call__(self, *_: Any) -> None:
        take_waiting(self._parameters)


class _Hold(_OfParameters):
    """Gives parameters memory of their own."""

    def __call__(self, *_: Any) -> None:
        for each in self._parameters:
            each.hold()


def _by_module(
    model: nn.Module, parameters: Sequence[Exchanged]
) -> Iterator[tuple[nn.Module, list[Exchanged]]]:
    of = {id(each.tensor): each for each in parameters}
    for module in model.modules():
        own = [of[id(p)] for p in module.parameters(recurse=False) if id(p) in of]
        if own:
            yield module, own


def _copy_views(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """A state_dict() does not change with the parameters, and may be written to."""
    for name, _ in module.named_parameters(recurse=False):
        if prefix + name in state:
            state[prefix + name] = state[prefix + name].clone()
