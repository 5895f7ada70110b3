"""Convolutional networks on generated images (bench/torch_images.py), trained with each way.

The loss goes as it does in one process that has all ranks' images, and the box counts the bytes of
the formula.
"""

import sys
from argparse import Namespace
from fnmatch import fnmatchcase
from functools import cache

import pytest
import torch
from conftest import PACKAGE, SEED, wait_until
from models import descend

import phub

sys.path.insert(0, str(PACKAGE.parents[1] / "bench"))
from torch_images import ImageTask

WORLD, STEPS, BATCH, HELD_OUT = 3, 4, 8, 60
RATE = {"quick": 0.02, "alexnet": 0.05, "googlenet": 0.02}
CHUNK, SCALE_BYTES = 8192, 4
WAYS = {
    "whole": {},
    "factors": {"factors": {"classifier.*.weight": BATCH}},
    "int8": {"gradient_dtype": "int8", "parameter_dtype": "bf16"},
    "both": {"factors": {"classifier.*.weight": BATCH}, "formats": {"features.*": "int8"}},
}


def task_of(name):
    torch.set_num_threads(1)
    task = ImageTask(Namespace(model=name, batch=BATCH))
    task.held_out = [part[:HELD_OUT] for part in task.held_out]
    torch.manual_seed(SEED)
    return task, task.model()


def counted(box, job):
    """(received, sent) by the box's cores for a job."""
    flow = box.status(job).get("flow", {})
    return flow.get("bytes_in", 0), flow.get("bytes_out", 0)


def trains(rank, box, name, way, job):
    """The losses of held-out images, and what the box counts: of the job, then of its factors."""
    task, model = task_of(name)
    net = phub.ddp(model, transport="tcp", **WAYS[way])
    optimizer = torch.optim.SGD(model.parameters(), RATE[name], momentum=0.9)
    losses = []
    for step in range(STEPS):
        descend(optimizer, net(task.batch(rank, WORLD, SEED + step)))
        with torch.no_grad():
            losses.append(task.judge(model)[0])
    expected = bytes_of_steps(name, way)
    jobs = [job, f"{job}-factors"][: len(expected)]
    if rank == 0:  # what the box says is a moment old
        wait_until(lambda: [counted(box, each) for each in jobs] == expected, expected, 5)
    net.phub.worker.barrier()
    bytes_of = [counted(box, each) for each in jobs]
    net.phub.worker.barrier()
    net.phub.close()
    return losses, bytes_of


@cache
def losses_alone(name):
    """In one process, on the images of all ranks together."""
    task, model = task_of(name)
    optimizer = torch.optim.SGD(model.parameters(), RATE[name], momentum=0.9)
    losses = []
    for step in range(STEPS):
        batches = [task.batch(rank, WORLD, SEED + step) for rank in range(WORLD)]
        descend(optimizer, model(tuple(torch.cat(part) for part in zip(*batches, strict=True))))
        with torch.no_grad():
            losses.append(task.judge(model)[0])
    return losses


def bytes_of_steps(name, way):
    """What a training costs the box: [(received, sent)] of the job, and of that of factors."""
    options = WAYS[way]
    coded = {"*": "int8"} if "gradient_dtype" in options else options.get("formats", {})
    result_bytes = 2 if "parameter_dtype" in options else 4
    received = sent = factors = 0
    for key, parameter in task_of(name)[1].named_parameters():
        if any(fnmatchcase(key, pattern) for pattern in options.get("factors", {})):
            factors += 4 * (BATCH * sum(parameter.shape) + 1)
            continue
        elements = parameter.numel()
        if any(fnmatchcase(key, pattern) for pattern in coded):
            received += -(-elements // 4) * 4 + SCALE_BYTES * -(-elements // CHUNK)
        else:
            received += 4 * elements
        sent += result_bytes * elements
    # All get what the job begins with. Rank 0's parameters come in it, or in a job of their own.
    first = 0 if options else received
    each = [(STEPS * WORLD * received + first, (STEPS + 1) * WORLD * sent)]
    if factors:  # and a number that counts the ranks
        each.append((STEPS * WORLD * (factors + 4), (STEPS + 1) * WORLD * (WORLD * factors + 4)))
    return each


CASES = [*(("quick", way) for way in WAYS), ("alexnet", "both"), ("googlenet", "whole")]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_each_way_learns_alike_and_costs_its_formula(box, start, monkeypatch, name, way):
    job = f"images-{name}-{way}"
    monkeypatch.setenv("PHUB_JOB", job)
    alone = losses_alone(name)
    assert max(alone) - min(alone) > 0.01, alone  # else equal losses would say nothing
    ranks = start(trains, WORLD, box, name, way, job).results()
    expected = bytes_of_steps(name, way)
    assert ranks[0][1] == expected
    noise = 2e-3 if way in ("whole", "factors") else 0.2
    for losses, _ in ranks:
        assert losses == ranks[0][0]  # all ranks have the same parameters
        for own, one in zip(losses, alone, strict=True):
            assert abs(own - one) <= noise * max(1, one), (losses, alone)
