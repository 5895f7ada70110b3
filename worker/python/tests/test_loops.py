"""Loops as frameworks write them: closures, gradients that are touched, wrapped models."""

import math
import warnings

import pytest
import torch
from conftest import of_ranks
from exact import assert_same_bits, job, parameters_of
from models import loss_of, make_net
from torch import nn

import phub


def made(net, name, **options):
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    return phub.DistributedOptimizer(optimizer, net, job=job(name), **options)


def trains(rank, way, overlap):
    net = make_net()
    optimizer = made(net, way, overlap=overlap)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(net, rank, step)
            loss.backward()
            return loss

        if way == "closure":
            with torch.no_grad():
                assert optimizer.step(closure).item() > 0
            continue
        closure()
        if way == "touched":
            assert nn.utils.clip_grad_norm_(net.parameters(), math.inf) > 0
        optimizer.step()
    optimizer.synchronize()
    optimizer.worker.barrier()
    return parameters_of(net)


@pytest.mark.parametrize("overlap", ["backward", "forward", False])
@of_ranks(2)
def test_a_loop_gives_the_bits_of_the_plain_one(rank, overlap):
    plain = trains(rank, "plain", overlap)
    for way in ("closure", "touched"):
        assert_same_bits(plain, trains(rank, way, overlap))


@of_ranks(1)
def test_a_layer_that_came_later_is_refused(rank):
    def two_layers():
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    for name in ("1", "later"):
        net = two_layers()
        optimizer = made(net, f"layer-{name}")
        setattr(net, name, nn.Linear(4, 4))
        net(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RuntimeError, match=rf"'{name}\.weight' came into the model"):
            optimizer.step()
        optimizer.close()
    net = two_layers()
    optimizer = made(net, "removed")
    del net[1]
    net.append(nn.Linear(4, 4).requires_grad_(False))
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@of_ranks(1)
def test_steps_that_never_accumulate_are_warned(rank):
    net = nn.Linear(4, 4)
    optimizer = made(net, "parts", accumulate=3)

    def steps(*parts):
        for part in parts:
            for _ in range(part):
                net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(3, 2, 3, 1, 3)
        with optimizer.no_sync():
            net(torch.ones(2, 4)).sum().backward()
        steps(3, 1)
    with pytest.warns(RuntimeWarning, match=r"after 1 backward\(\) twice, and accumulate is 3"):
        steps(1)


@of_ranks(2)
def test_statistics_of_one_rank_are_not_those_of_all(rank):
    net = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    for make in (lambda: made(net, "optimizer"), lambda: phub.ddp(net, job=job("ddp"))):
        # The rank that is refused first leaves; the other may hear of that while it still waits.
        refused = "'1' is a SyncBatchNorm.*has 1, the job 2|left before the job had begun"
        with pytest.raises((phub.InvalidError, phub.RankLostError), match=refused):
            make()
