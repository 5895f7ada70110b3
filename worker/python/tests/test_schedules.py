"""Learning rates that the box computes, against PyTorch's schedulers in one process."""

import math

import pytest
import torch
from exact import assert_same_bits, job, parameters_of, replay
from models import make_net, train
from torch.optim import lr_scheduler

import phub

RANKS = 2
STEPS = 14

# Our settings, and the factor of the rate after n steps: what LambdaLR multiplies `lr` by.
CLOSED_FORMS = {
    "exponential": ({"lr_exponential": 0.9}, lambda n: math.pow(0.9, n)),
    "inverse": (
        {"lr_inverse": 0.25, "lr_inverse_power": 0.75},
        lambda n: math.pow(1 + 0.25 * n, -0.75),
    ),
    "polynomial": (
        {"lr_polynomial": 9, "lr_polynomial_power": 2},
        lambda n: math.pow(1 - min(n / 9, 1), 2),
    ),
    "cosine": (
        {"lr_cosine": 11, "lr_end": 0.125},
        lambda n: 0.125 + (1 - 0.125) * ((1 + math.cos(math.pi * min(n / 11, 1))) / 2),
    ),
    "warm_up": (
        {"lr_warmup": 5, "lr_warmup_from": 0.25, "lr_exponential": 0.5},
        lambda n: 0.25 + (1 - 0.25) * (n / 5) if n < 5 else math.pow(0.5, n - 5),
    ),
}
# PyTorch computes a rate from the one before, or in another form: nearly the same bits.
SCHEDULERS = {
    "exponential": (
        {"lr_exponential": 0.9},
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    ),
    "polynomial": (
        {"lr_polynomial": 9, "lr_polynomial_power": 2},
        lambda o: lr_scheduler.PolynomialLR(o, 9, 2),
    ),
    "linear": (
        {"lr_polynomial": 9, "lr_end": 0.5},
        lambda o: lr_scheduler.LinearLR(o, 1.0, 0.5, 9),
    ),
    "cosine": (
        {"lr_cosine": STEPS},
        lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    ),
    "warm_up": (
        {"lr_warmup": 5, "lr_warmup_from": 0.25, "lr_cosine": 9},
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 0.25, 1.0, 5), lr_scheduler.CosineAnnealingLR(o, 9)],
            [5],
        ),
    ),
}


def plain(net):
    parameters = list(net.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.004}]
    return torch.optim.AdamW(groups, 1e-2, foreach=False)


def trains(rank, schedules, overlap):
    results = []
    for number, schedule in enumerate(schedules):
        net = make_net()
        optimizer = phub.DistributedOptimizer(
            plain(net), net, overlap=overlap, schedule=schedule, job=job(number)
        )
        rates = [group["lr"] for group in optimizer.param_groups]
        gradients = train(optimizer, net, rank, range(STEPS))
        optimizer.synchronize()
        assert [group["lr"] for group in optimizer.param_groups] == rates
        results.append((gradients, parameters_of(net)))
        optimizer.worker.barrier()
        optimizer.close()
    return results


def both(start, table, overlap):
    """Each rank's parameters, and those of one process with the scheduler beside the settings."""
    ranks = start(trains, RANKS, [settings for settings, _ in table.values()], overlap).results()
    for (_, make_scheduler), *results in zip(table.values(), *ranks, strict=True):
        gradients, parameters = zip(*results, strict=True)
        net = make_net()
        optimizer = plain(net)
        expected = replay(gradients, net, optimizer, make_scheduler(optimizer))
        for each in parameters:
            yield each, expected


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_rates_are_those_of_the_closed_forms_to_the_bit(box, start, overlap):
    table = {
        name: (settings, lambda o, f=factor: lr_scheduler.LambdaLR(o, f))
        for name, (settings, factor) in CLOSED_FORMS.items()
    }
    for each, expected in both(start, table, overlap):
        assert_same_bits(each, expected)


def test_pytorchs_schedulers_give_nearly_the_same(box, start):
    for each, expected in both(start, SCHEDULERS, "backward"):
        torch.testing.assert_close(each, expected, rtol=1e-6, atol=1e-7)
