"""A model whose training is over is freed, and the worker's memory, without a collection."""

import ctypes
import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
from conftest import of_ranks
from exact import job
from torch import nn

import phub

TURNS = 10
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
    if form == "ddp":
        model = phub.ddp(net, job=job(number))
        model(torch.ones(2, WIDTH)).sum().backward()
        model.phub.close()
        return weakref.ref(net), weakref.ref(model), weakref.ref(net[0].weight)
    local = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = phub.DistributedOptimizer(local, net, job=job(number), **options)
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


@pytest.mark.parametrize("form", FORMS)
@of_ranks(1)
def test_what_is_closed_is_freed(rank, form):
    turn("first", form, FORMS[form])
    gc.collect()
    gc.disable()
    before = 0
    for number in range(TURNS):
        assert [each() for each in turn(number, form, FORMS[form])] == [None, None, None]
        if number == 4:
            before = resident()
    assert resident() - before < 3 * 4 * WIDTH * WIDTH  # of 5 turns
