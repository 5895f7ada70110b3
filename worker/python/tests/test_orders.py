"""Parameters whose memory has another order on one rank, and those that are trained later."""

import pytest
import torch
from conftest import SEED
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import phub

WORLD = 2


def net_of(rank, transposed):
    """The same parameters on all ranks; on the last one their memory has another order."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(24, 24))
    if rank == WORLD - 1:
        if transposed:
            with torch.no_grad():
                net[2].weight.data = net[2].weight.t().contiguous().t()
        else:
            net[0].to(memory_format=torch.channels_last)
    return net


def loss_of(net, rank):
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(SEED + rank))
    return net(x).pow(2).sum()


def gradients_of(net):
    return [p.grad.clone().contiguous() for p in net.parameters()]


def with_ddp(rank, net):
    wrapped = phub.ddp(net)
    loss_of(wrapped, rank).backward()
    return wrapped.phub


def with_ddp_copies(rank, net):
    wrapped = phub.ddp(net, ddp_options={"gradient_as_bucket_view": False})
    loss_of(wrapped, rank).backward()
    return wrapped.phub


def with_powersgd(rank, net):
    """Of two ranks with two samples each the gradient of the linear layer has rank 4 at most."""
    wrapped = phub.ddp(net, powersgd=5)
    loss_of(wrapped, rank).backward()
    return wrapped.phub


def with_hook(rank, net):
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    wrapped = DistributedDataParallel(net)
    state = phub.DDPState(wrapped.module)
    wrapped.register_comm_hook(state, phub.ddp_hook)
    loss_of(wrapped, rank).backward()
    return state


def with_optimizer(rank, net):
    """A step of the box with the rate 1 takes the mean gradient away."""
    plain = torch.optim.SGD(net.parameters(), 1.0)
    optimizer = phub.DistributedOptimizer(plain, net)
    before = [p.detach().clone() for p in net.parameters()]
    loss_of(net, rank).backward()
    optimizer.step()
    optimizer.synchronize()
    for p, old in zip(net.parameters(), before, strict=True):
        p.grad = old - p.detach()
    return optimizer


def exchanged(rank, form, transposed):
    net = net_of(rank, transposed)
    state = form(rank, net)
    found = gradients_of(net)
    state.worker.barrier()
    state.close()
    return found


def wanted(transposed):
    each = []
    for rank in range(WORLD):
        net = net_of(0, transposed)
        loss_of(net, rank).backward()
        each.append(gradients_of(net))
    return [sum(g) / WORLD for g in zip(*each, strict=True)]


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    "form", [with_ddp, with_ddp_copies, with_hook, with_powersgd, with_optimizer]
)
def test_the_mean_is_of_the_same_elements(box, start, form, transposed):
    for found in start(exchanged, WORLD, form, transposed).results():
        for mine, mean in zip(found, wanted(transposed), strict=True):
            error = ((mine - mean).norm() / mean.norm()).item()
            assert error < (1e-3 if form is not with_ddp else 1e-6), error


def trains_later(rank):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].weight.requires_grad_(False)
    wrapped = phub.ddp(net)
    wrapped(torch.ones(2, 4)).sum().backward()
    net[0].weight.requires_grad_(True)
    with pytest.raises(phub.InvalidError, match=r"'0\.weight' requires a gradient now"):
        wrapped(torch.ones(2, 4)).sum().backward()
    wrapped.phub.close()


def test_a_parameter_that_is_trained_later_is_an_error(box, start):
    start(trains_later, WORLD).results()
