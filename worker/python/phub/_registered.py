"""Makes the name of backend "phub" known to torch.distributed, without loading PyTorch.

`import phub` may come before or after `import torch`. Where PyTorch is not loaded yet, it is told
when it is: a finder of modules, which is there for one module and goes with it, adds a call to what
its loader does.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_NAME = "phub"
_MODULE = "torch.distributed.distributed_c10d"


def _make(*arguments: Any) -> Any:
    from phub.backend import ProcessGroup  # noqa: PLC0415  # it needs PyTorch

    return ProcessGroup(*arguments)


def _register(c10d: ModuleType) -> None:
    if _NAME.upper() not in c10d.Backend._plugins:  # noqa: SLF001
        c10d.Backend.register_backend(_NAME, _make, devices=["cpu", "cuda"])


class _Loader(importlib.abc.Loader):
    """Does what another one does, and registers the backend."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        if hasattr(module, "Backend"):  # PyTorch may be built without distributed
            _register(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def register() -> None:
    """Now, or as soon as PyTorch is there."""
    if (loaded := sys.modules.get(_MODULE)) is None:
        sys.meta_path.insert(0, _Finder())
    elif hasattr(loaded, "Backend"):
        _register(loaded)
