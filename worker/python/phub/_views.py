"""Tensors over the library's memory."""

from __future__ import annotations

import warnings

import torch


def tensor_over(memory: memoryview, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of all its numbers. Nobody writes to one over what comes back."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not writable.*")
        return torch.frombuffer(memory, dtype=dtype)
