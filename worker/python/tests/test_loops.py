"""Loops as frameworks write them: closures, gradients that are touched, wrapped models."""

import math
import os
import warnings

import pytest
import torch
from exact import assert_same_bits
from models import loss_of, make_net
from torch import nn

import phub


def made(net, name, **options):
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    job = f"{os.environ['PHUB_JOB']}-{name}"[:200]
    return phub.DistributedOptimizer(optimizer, net, job=job, **options)


def trains(rank, name, way, overlap):
    net = make_net()
    optimizer = made(net, name, overlap=overlap)
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
    parameters = dict(net.named_parameters())
    optimizer.worker.barrier()
    return parameters


@pytest.mark.parametrize("overlap", ["backward", "forward", False])
@pytest.mark.parametrize("way", ["closure", "touched"])
def test_a_loop_gives_the_bits_of_the_plain_one(box, start, way, overlap):
    for plain, other in zip(
        start(trains, 2, "plain", "plain", overlap).results(),
        start(trains, 2, "other", way, overlap).results(),
        strict=True,
    ):
        assert_same_bits(plain, other)


def has_a_device(rank):
    net = make_net()
    optimizer = made(net, "device", on_nonfinite="skip")
    with pytest.raises(phub.InvalidError, match="on device 'cpu'"):
        phub.GradScaler(optimizer, device="cuda")
    return phub.GradScaler(optimizer, device="cpu").get_scale()


def test_a_scaler_takes_the_device(box, start):
    assert start(has_a_device, 1).results() == [65536.0]


class Wrapper(nn.Module):
    """As torch.compile and checkpoint_wrapper do."""

    def __init__(self, module, name):
        super().__init__()
        self.add_module(name, module)


def wraps(rank):
    net = make_net()
    plain = [name for name, p in net.named_parameters() if p.requires_grad]
    net[2] = Wrapper(net[2], "_checkpoint_wrapped_module")
    net = Wrapper(net, "_orig_mod")
    return plain, list(made(net, "wrapped").worker.keys)


def test_keys_of_a_wrapped_model_have_the_plain_names(box, start):
    ((plain, keys),) = start(wraps, 1).results()
    assert keys == sorted(plain)


def changes_its_model(_rank):
    for name in ("1", "later"):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = made(net, f"layer-{name}")
        setattr(net, name, nn.Linear(4, 4))
        net(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RuntimeError, match=rf"'{name}\.weight' came into the model"):
            optimizer.step()
        optimizer.close()
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = made(net, "removed")
    del net[1]
    net.append(nn.Linear(4, 4).requires_grad_(False))
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_a_layer_that_came_later_is_refused(box, start):
    start(changes_its_model, 1).results()


def makes_parts(_rank):
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


def test_steps_that_never_accumulate_are_warned(box, start):
    start(makes_parts, 1).results()


def synchronizes_statistics(_rank):
    net = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    message = "'1' is a SyncBatchNorm.*its has 1, the job 2"
    with pytest.raises(phub.InvalidError, match=message):
        made(net, "optimizer")
    with pytest.raises(phub.InvalidError, match=message):
        phub.ddp(net, job=f"{os.environ['PHUB_JOB']}-ddp")


def test_statistics_of_one_rank_are_not_those_of_all(box, start):
    start(synchronizes_statistics, 2).results()
