"""The box's arithmetic, to the bit."""

from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch


def exact_sqrt(tensor):
    """MKL's may be off by a unit."""
    return torch.from_numpy(np.sqrt(tensor.numpy()))


def exact_sqrt_(tensor):
    """The same in place."""
    return tensor.copy_(exact_sqrt(tensor))


@contextmanager
def exact_roots():
    """PyTorch's optimizers with them."""
    root = patch.object(torch.Tensor, "sqrt", exact_sqrt)
    with root, patch.object(torch.Tensor, "sqrt_", exact_sqrt_):
        yield


def mean(gradients):
    """In rank order, times float(1/n)."""
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total * torch.tensor(1 / len(gradients), dtype=torch.float32)


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
