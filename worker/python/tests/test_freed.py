"""A model whose training is over is freed, and the worker's memory, without a collection."""

import ctypes
import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import phub

TURNS = 20
WIDTH = 1024  # 4 MiB
PAGE = os.sysconf("SC_PAGESIZE")

FORMS = {
    "backward": {},
    "forward": {"overlap": "forward"},
    "no overlap": {"overlap": False},
    "zero copy": {"zero_copy": True},
    "own steps": {"server": False},
    "factors": {"factors": {"0.weight": 4}},
    "skips": {"on_nonfinite": "skip"},
    "counts": {},
    "ddp": {},
}


def resident():
    ctypes.CDLL(None).malloc_trim(0)  # what free() keeps for later is no leak
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def turn(number, form, options):
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    job = f"{os.environ['PHUB_JOB']}-{number}"
    if form == "ddp":
        model = phub.ddp(net, job=job)
        model(torch.ones(2, WIDTH)).sum().backward()
        model.phub.close()
        return weakref.ref(net), weakref.ref(model), weakref.ref(net[0].weight)
    local = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = phub.DistributedOptimizer(local, net, job=job, **options)
    scaler = phub.GradScaler(optimizer) if form == "skips" else None
    for _ in optimizer.steps(2) if form == "counts" else range(2):
        optimizer.zero_grad()
        loss = net(torch.ones(2, WIDTH)).sum()
        (scaler.scale(loss) if scaler else loss).backward()
        (scaler or optimizer).step(*[optimizer][: 1 if scaler else 0])
        if scaler:
            scaler.update()
    optimizer.close()
    with torch.no_grad():
        net[0].weight.zero_()
    return weakref.ref(net), weakref.ref(optimizer), weakref.ref(net[0].weight)


def trains_again_and_again(rank, form, options):
    torch.set_num_threads(1)
    turn("first", form, options)
    gc.collect()
    gc.disable()
    before = 0
    for number in range(TURNS):
        assert [each() for each in turn(number, form, options)] == [None, None, None]
        if number == 4:
            before = resident()
    return resident() - before


@pytest.mark.parametrize("form", FORMS)
def test_what_is_closed_is_freed(box, start, form):
    (grown,) = start(trains_again_and_again, 1, form, FORMS[form]).results()
    assert grown < 3 * 4 * WIDTH * WIDTH  # of 15 turns
