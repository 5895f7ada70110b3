"""What a rank has beside the parameters at the box: saved with them, and given back."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from phub.errors import InvalidError


class Stateful(Protocol):
    """Schedulers, data loaders and others that can be saved."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings, tensors, and lists, tuples and dicts of these."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """The same, given back."""


class OwnState:
    """The values of the groups, the model's buffers, random numbers, and what the program keeps."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        saved = model.state_dict().keys()
        self._buffers = {name: b for name, b in model.named_buffers() if name in saved}
        self._kept: Mapping[str, Stateful] = {}
        self._optimizer = optimizer

    def keep(self, kept: Mapping[str, Stateful]) -> None:
        """Saves these as well. Raises InvalidError if one cannot be given back."""
        self._kept = kept
        self._load_as_saved(self.saved())

    def saved(self) -> bytes:
        """As it is now."""
        return self._saved_with(self._kept, self._more())

    def _more(self) -> dict[str, Any]:
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        return {"groups": groups}

    def _take_more(self, state: Mapping[str, Any]) -> None:
        for group, values in zip(self._optimizer.param_groups, state["groups"], strict=True):
            group.update({name: _there(v, group.get(name)) for name, v in values.items()})

    def saved_of_branch(self) -> bytes:
        """Without the groups' values, which the box has, and what is of all branches."""
        return self._saved_with(self._of_branch(), {})

    def _of_branch(self) -> Mapping[str, Stateful]:
        return {
            name: each
            for name, each in self._kept.items()
            if not getattr(each, "of_all_branches", False)
        }

    def _saved_with(self, kept: Mapping[str, Stateful], more: Mapping[str, Any]) -> bytes:
        content = io.BytesIO()
        state = {
            **more,
            "buffers": self._buffers,
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "kept": {name: each.state_dict() for name, each in kept.items()},
        }
        torch.save(state, content)
        return content.getvalue()

    def load(self, saved: bytes) -> None:
        """Makes it as it was."""
        self._take(self._load_as_saved(saved))

    def _take(self, state: Mapping[str, Any]) -> None:
        is_whole = "groups" in state  # else that of a branch, since when others may be kept
        kept = {
            name: each for name, each in self._kept.items() if is_whole or name in state["kept"]
        }
        if is_whole and state["kept"].keys() != kept.keys():
            raise InvalidError(
                f"the checkpoint has the state of {sorted(state['kept'])}, and steps() is given "
                f"{sorted(kept)}: give it the same"
            )
        if is_whole:
            self._take_more(state)
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                buffer.copy_(state["buffers"][name])
        for name, each in kept.items():
            each.load_state_dict(state["kept"][name])
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])

    @staticmethod
    def _load_as_saved(saved: bytes) -> dict[str, Any]:
        """Runs no code, whatever the bytes are."""
        try:
            state: dict[str, Any] = torch.load(
                io.BytesIO(saved), map_location="cpu", weights_only=True
            )
        except pickle.UnpicklingError as error:
            raise InvalidError(
                "what steps() keeps must have states of numbers, strings, tensors, and lists, "
                f"tuples and dicts of these: {error}"
            ) from None
        return state


def _there(value: Any, before: Any) -> Any:
    """Where the value before it is."""
    if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
        return value.to(before.device)
    return value
