"""The box's arithmetic, to the bit, and what trainings are compared by."""

import io
import os
from contextlib import contextmanager, nullcontext
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
    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    root = patch.object(torch.Tensor, "sqrt", exact_sqrt)
    with root, patch.object(torch.Tensor, "sqrt_", exact_sqrt_):
        yield


def mean(gradients):
    """In rank order, times float(1/n)."""
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total * torch.tensor(1 / len(gradients), dtype=torch.float32)


def job(name):
    """One of the test's jobs."""
    return f"{os.environ.get('PHUB_JOB', 'job')}-{name}".replace(" ", "-")[:200]


def saved(value):
    """What torch.save() and torch.load() make of it."""
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return torch.load(content, weights_only=False)


def parameters_of(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def gradients_of(net):
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def replayed(gradients_of_ranks, net, optimizer, at_box=True, average=mean):
    """Yields after each step of one process, which has the gradients of all ranks."""
    for steps in zip(*gradients_of_ranks, strict=True):
        for name, parameter in net.named_parameters():
            if name in steps[0]:
                parameter.grad = average([step[name] for step in steps])
        with exact_roots() if at_box else nullcontext():
            optimizer.step()
        yield


def replay(gradients_of_ranks, net, optimizer, schedule=None, at_box=True, average=mean):
    """The parameters after all of them."""
    for _ in replayed(gradients_of_ranks, net, optimizer, at_box, average):
        if schedule:
            schedule.step()
    return parameters_of(net)


def assert_same_bits(one, other, where=""):
    """Of tensors and numbers, in lists and dictionaries of any depth."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert_same_bits(value, other[key], f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for at, pair in enumerate(zip(one, other, strict=True)):
            assert_same_bits(*pair, f"{where}[{at}]")
    else:
        assert one == other, where
