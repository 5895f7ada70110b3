"""The box's arithmetic, to the bit."""

import numpy as np
import torch


def exact_sqrt(tensor):
    """MKL's may be off by a unit."""
    return torch.from_numpy(np.sqrt(tensor.numpy()))


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
