"""Learning rates that the box computes, against PyTorch's schedulers in one process."""

import math

import pytest
import torch
from exact import assert_same_bits, exact_roots, mean
from models import loss_of, make_net
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


def parameters_of(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def trains(rank, schedules, overlap):
    results = {}
    for number, schedule in enumerate(schedules):
        net = make_net()
        optimizer = phub.DistributedOptimizer(
            plain(net), net, overlap=overlap, schedule=schedule, job=f"scheduled-{number}"
        )
        rates = [group["lr"] for group in optimizer.param_groups]
        gradients = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            gradients.append(
                {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
            )
            optimizer.step()
        optimizer.synchronize()
        assert [group["lr"] for group in optimizer.param_groups] == rates
        results[number] = gradients, parameters_of(net)
        optimizer.worker.barrier()
        optimizer.close()
    return results


def replay(gradients_of_ranks, make_scheduler):
    """One process, with the gradients of all ranks."""
    net = make_net()
    optimizer = plain(net)
    scheduler = make_scheduler(optimizer)
    with exact_roots():
        for steps in zip(*gradients_of_ranks, strict=True):
            for name, parameter in net.named_parameters():
                if name in steps[0]:
                    parameter.grad = mean([step[name] for step in steps])
            optimizer.step()
            scheduler.step()
    return parameters_of(net)


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_rates_are_those_of_the_closed_forms_to_the_bit(box, start, overlap):
    schedules = [settings for settings, _ in CLOSED_FORMS.values()]
    results = start(trains, RANKS, schedules, overlap).results()
    for number, (_, factor) in enumerate(CLOSED_FORMS.values()):
        gradients, parameters = zip(*(result[number] for result in results), strict=True)
        wanted = replay(gradients, lambda o, f=factor: lr_scheduler.LambdaLR(o, f))
        for each in parameters:
            assert_same_bits(each, wanted)


def test_pytorchs_schedulers_give_nearly_the_same(box, start):
    schedules = [settings for settings, _ in SCHEDULERS.values()]
    results = start(trains, RANKS, schedules, "backward").results()
    for number, (_, make) in enumerate(SCHEDULERS.values()):
        gradients, parameters = zip(*(result[number] for result in results), strict=True)
        wanted = replay(gradients, make)
        for each in parameters:
            for name, value in each.items():
                torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-7)


def test_what_is_no_schedule_is_refused():
    net = make_net()
    with pytest.raises(phub.InvalidError, match="schedule has 'lr'.*lr_cosine"):
        phub.DistributedOptimizer(plain(net), net, schedule={"lr": 0.1})
    with pytest.raises(phub.InvalidError, match="schedule is for steps of the box"):
        phub.DistributedOptimizer(plain(net), net, server=False, schedule={"lr_cosine": 9})
