"""The names of a model's parameters and buffers, as keys of a job have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

_T = TypeVar("_T")
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, checkpoint_wrapper


def plain_name(name: str) -> str:
    """The name that a parameter has when nothing wraps its module."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def by_name(keys: Mapping[str, _T]) -> dict[str, _T]:
    """In an order that all ranks have, in whichever they have made their modules."""
    return dict(sorted(keys.items()))
