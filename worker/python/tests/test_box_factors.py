"""Trainings whose steps the box makes of factors, compared with the same without factors."""

import numpy as np
import pytest
import torch
from conftest import SEED
from exact import assert_same_bits
from torch import nn

import phub

SAMPLES = 6
RANKS = 2


def model_of(seed=SEED):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(20, 70), nn.ReLU(), nn.Linear(70, 33, bias=False), nn.ReLU(), nn.Linear(33, 5)
    )


def batch_of(rank, step, size=20):
    random = torch.Generator().manual_seed(SEED + 100 * rank + step)
    return torch.randint(-3, 4, (1 + (rank + step) % SAMPLES, size), generator=random).float()


def parameters_of(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def whole_numbers(rank, transport, steps):
    """Errors of 1, 2 …: products, sums, means of two and steps of 1/4 are exact."""
    net = nn.Linear(20, 4)
    with torch.no_grad():
        net.weight.fill_(1)
        net.bias.fill_(0)
    optimizer = phub.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 0.25), net, factors={"*": SAMPLES}, transport=transport
    )
    seen = []
    for step in range(steps):
        inputs = batch_of(rank, step)
        (net(inputs) * torch.arange(1, len(inputs) + 1)[:, None]).sum().backward()
        assert net.weight.grad is None
        assert net.bias.grad is not None
        optimizer.step()
        optimizer.zero_grad()
        seen.append(net.weight.detach().clone())
    optimizer.close()
    net(batch_of(rank, 0)).sum().backward()  # as before
    assert net.weight.grad is not None
    return seen


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_box_multiplies_and_steps(box, start, transport):
    steps = 6
    for seen in start(whole_numbers, RANKS, transport, steps).results():
        weight = np.ones((4, 20), np.float32)
        for step in range(steps):
            for rank in range(RANKS):
                inputs = batch_of(rank, step).numpy()
                errors = np.arange(1, len(inputs) + 1, dtype=np.float32)
                weight -= np.outer(np.ones(4, np.float32), errors @ inputs) / RANKS / 4
            assert np.array_equal(seen[step].numpy(), weight)


def trains(rank, factors, steps, options):
    net = model_of(SEED + rank)  # all begin with rank 0's
    plain = torch.optim.Adam(net.parameters(), 0.01)
    optimizer = phub.DistributedOptimizer(plain, net, accumulate=2, factors=factors, **options)
    for step in range(2 * steps):
        net(batch_of(rank, step)).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.synchronize()
    state = optimizer.state_dict()["state"]
    optimizer.close()
    return parameters_of(net), state[0]["exp_avg"]


@pytest.mark.parametrize(
    "options", [{}, {"overlap": "forward"}, {"overlap": False}, {"zero_copy": True}]
)
def test_they_learn_as_without_factors(box, start, options):
    results = [
        start(trains, RANKS, factors, 5, options).results()
        for factors in ({"[02].*": 2 * SAMPLES, "4.weight": 2 * SAMPLES}, {})
    ]
    for with_factors, without in zip(*results, strict=True):
        assert_same_bits(with_factors[0], results[0][0][0])
        for name, tensor in with_factors[0].items():
            assert torch.allclose(tensor, without[0][name], rtol=1e-3, atol=1e-4), name
        assert torch.allclose(with_factors[1], without[1], rtol=1e-3, atol=1e-4)


def refuses(rank):
    net = model_of()

    def made(**options):
        return phub.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net, **options)

    with pytest.raises(phub.InvalidError, match="server=True"):
        made(server=False, factors={"*": 2})
    with pytest.raises(phub.NotFoundError, match="'9.weight'"):
        made(factors={"9.weight": 2})
    with pytest.raises(phub.InvalidError, match="factors=5: it is a number of samples by patterns"):
        made(factors=5)
    with pytest.raises(phub.InvalidError, match="0 samples"):
        made(factors={"*": 0})
    optimizer = made(factors={"0.*": 2})
    with pytest.raises(phub.InvalidError, match="3 samples in a step, and there is room for 2"):
        net(torch.ones(3, 20)).sum().backward()
    optimizer.close()


def uses_twice(rank):
    net = model_of()
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = phub.DistributedOptimizer(sgd, net, factors={"0.*": 2})
    with pytest.raises(phub.InvalidError, match="used twice"):
        (net(torch.ones(1, 20)) + net(torch.zeros(1, 20))).sum().backward()
    optimizer.close()


def test_what_cannot_be_is_refused(box, start):
    start(refuses, 1).results()


def test_a_layer_is_used_once(box, start):
    start(uses_twice, 1).results()


def pushes(rank):
    keys = {"m": phub.Key(6, shape=(3, 2), rank_limit=2), "v": 3}
    worker = phub.Worker(keys)
    worker.wait_all()
    left = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    right = np.array([[1, -1], [2, 0]], np.float32)
    worker.push_factors("m", left, right)
    worker.wait("m")
    found = np.array(worker.parameters("m")).reshape(3, 2)
    with pytest.raises(phub.InvalidError, match=r"are not float32 of \(pairs, 3\)"):
        worker.push_factors("m", left, left)
    with pytest.raises(phub.InvalidError, match="'m': factors are float32, .* format 'd'"):
        worker.push_factors("m", left.astype(np.float64), right.astype(np.float64))
    worker.push_factors("m", left[:0].copy(), right[:0].copy())  # none
    worker.wait("m")
    assert not np.array(worker.parameters("m")).any()
    with pytest.raises(phub.InvalidError, match="no rank_limit"):
        worker.push_factors("v", left, right)
    worker.close()
    return found


def test_a_worker_pushes_factors(box, start):
    (found,) = start(pushes, 1).results()
    assert np.array_equal(found, [[9, -1], [12, -2], [15, -3]])
