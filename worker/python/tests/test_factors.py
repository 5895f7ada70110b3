"""Gradients of fully connected layers as factors, in trainings with phub.ddp."""

import copy

import numpy as np
import pytest
import torch
from conftest import SEED
from exact import assert_same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phub

SAMPLES = 6


def model_of(seed=SEED):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(20, 70), nn.ReLU(), nn.Linear(70, 33, bias=False), nn.ReLU(), nn.Linear(33, 5)
    )


def batch_of(rank, step, whole=False):
    random = torch.Generator().manual_seed(SEED + 100 * rank + step)
    samples = 1 + (rank + step) % SAMPLES
    if whole:
        return torch.randint(-3, 4, (samples, 20), generator=random).float()
    return torch.randn(samples, 20, generator=random)


def gradients_of(net):
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def trains(rank, transport, factors, steps):
    net = model_of(SEED + rank)  # all begin with rank 0's
    wrapped = phub.ddp(net, transport=transport, factors=factors)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    means, parameters = [], []
    for step in range(steps):
        optimizer.zero_grad()
        wrapped(batch_of(rank, step)).square().mean().backward()
        means.append(gradients_of(net))
        optimizer.step()
        parameters.append({name: p.detach().clone() for name, p in net.named_parameters()})
    return means, parameters


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("factors", [{"*": SAMPLES}, {"2.weight": 1, "[02].*": SAMPLES}])
def test_ranks_stay_alike_and_have_the_mean_of_all(box, start, transport, factors):
    world, steps = 3, 8
    means, parameters = zip(*start(trains, world, transport, factors, steps).results(), strict=True)
    net = model_of()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    for step in range(steps):
        total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        for rank in range(world):
            optimizer.zero_grad()
            net(batch_of(rank, step)).square().mean().backward()
            for name, p in net.named_parameters():
                total[name] += p.grad
        for name, p in net.named_parameters():
            p.grad = means[0][step][name]
            assert torch.allclose(p.grad, total[name] / world, rtol=1e-4, atol=1e-6), name
        optimizer.step()
        for rank in range(world):
            assert_same_bits(means[rank][step], means[0][step])
            assert_same_bits(parameters[rank][step], parameters[0][step])


def factors_of(rank, steps):
    """Of whole numbers, whose products and sums are exact."""
    net = nn.Linear(20, 4)
    with torch.no_grad():
        net.weight.fill_(1)
    wrapped = phub.ddp(net, factors={"weight": SAMPLES})
    means = []
    for step in range(steps):
        net.zero_grad()
        inputs = batch_of(rank, step, whole=True)
        (wrapped(inputs) * torch.arange(1, len(inputs) + 1)[:, None]).sum().backward()
        means.append(net.weight.grad.clone())
    return means


def test_a_mean_is_the_sum_of_products_times_the_reciprocal(box, start):
    world, steps = 3, 7
    for means in start(factors_of, world, steps).results():
        for step, mean in enumerate(means):
            total = np.zeros((4, 20), np.float32)
            for rank in range(world):
                inputs = batch_of(rank, step, whole=True).numpy()
                errors = np.arange(1, len(inputs) + 1, dtype=np.float32)
                total += np.outer(np.ones(4, np.float32), errors @ inputs)
            assert np.array_equal(mean.numpy(), total * np.float32(1 / np.float32(world)))


def uses_every_other_layer(rank):
    net = nn.ModuleList([nn.Linear(6, 40), nn.Linear(6, 40)])

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = net

        def forward(self, inputs):
            return self.layers[rank](inputs) + 0 * sum(layer.bias.sum() for layer in self.layers)

    wrapped = phub.ddp(Either(), factors={"*.weight": 2})
    own = torch.full((2, 6), float(rank + 1))
    wrapped(own).sum().backward()
    with torch.no_grad():  # and without a gradient
        assert wrapped(own).shape == (2, 40)
    return [layer.weight.grad.clone() for layer in net]


def test_a_layer_that_a_rank_does_not_use_counts_as_zero(box, start):
    for gradients in start(uses_every_other_layer, 2).results():
        for rank, gradient in enumerate(gradients):
            assert torch.equal(gradient, torch.full((40, 6), float(rank + 1)))


def accumulates(rank):
    net = model_of()
    wrapped = phub.ddp(net, factors={"0.weight": SAMPLES})
    inputs = batch_of(0, 0)
    wrapped(inputs).sum().backward()
    once = net[0].weight.grad.clone()
    wrapped(inputs).sum().backward()
    assert torch.equal(net[0].weight.grad, once + once)
    with pytest.raises(phub.InvalidError, match="no_sync"), wrapped.no_sync():
        wrapped(inputs).sum().backward()


def test_gradients_are_added_to_those_that_are_there(box, start):
    start(accumulates, 1).results()


def goes_on_alone(rank):
    net = model_of()
    wrapped = phub.ddp(net, factors={"*": SAMPLES}, lease_ms=1000)
    for step in range(4):
        if rank == 1 and step == 2:
            return None
        net.zero_grad()
        wrapped(batch_of(rank, step)).square().mean().backward()
    return gradients_of(net)


def test_who_is_gone_counts_no_more(box, start):
    found, _ = start(goes_on_alone, 2).results()
    alone = model_of()
    alone(batch_of(0, 3)).square().mean().backward()
    for name, gradient in gradients_of(alone).items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-6), name


def state_is_the_models(rank):
    net = model_of()
    names = list(net.state_dict())
    wrapped = phub.ddp(net, factors={"*": SAMPLES})
    assert list(net.state_dict()) == names
    assert isinstance(wrapped, DistributedDataParallel)
    other = copy.deepcopy(model_of(5))
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(batch_of(0, 0)), net(batch_of(0, 0)))


def test_the_models_state_stays_as_it_is(box, start):
    start(state_is_the_models, 1).results()


@pytest.mark.parametrize(
    ("factors", "error", "message"),
    [
        ({"7.weight": 4}, phub.NotFoundError, "none of the model's 3 weights of nn.Linear matches"),
        ({"*": 0}, phub.InvalidError, "has 0 samples; at least 1"),
        ({"*": True}, phub.InvalidError, "has True samples"),
        ({"*": 2.5}, phub.InvalidError, "has 2.5 samples"),
    ],
)
def test_wrong_factors_are_named(factors, error, message):
    with pytest.raises(error, match=message):
        phub.ddp(model_of(), factors=factors)


def has_too_many(rank):
    net = model_of()
    wrapped = phub.ddp(net, factors={"0.weight": 2})
    with pytest.raises(
        phub.InvalidError, match="'0.weight' has 3 samples, and there is room for 2"
    ):
        wrapped(torch.ones(3, 20)).sum().backward()


def uses_a_layer_twice(rank):
    layer = nn.Linear(8, 8)
    wrapped = phub.ddp(nn.Sequential(layer, layer), factors={"0.weight": 4})
    with pytest.raises(phub.InvalidError, match="'0.weight' is used twice in a step"):
        wrapped(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("body", [has_too_many, uses_a_layer_twice])
def test_steps_that_cannot_be_are_refused(box, start, body):
    start(body, 1).results()


def test_factors_of_other_formats_are_refused(box):
    with pytest.raises(phub.InvalidError, match="float32 on the CPU, and '0.weight' is torch.bf"):
        phub.ddp(model_of().bfloat16(), factors={"0.weight": 2})
