"""What a rank has for itself is that of the branch that runs: to the bit as in a job of its own."""

import random

import pytest
import torch
from conftest import SEED
from deaths import JOB, STEPS, NoDeath, death_anywhere, live
from exact import assert_same_bits
from test_rejoin import Batches, make_net
from torch import nn

import phub
from phub.tuning import ByBranch

RATE, OTHER, THIRD = 0.05, 0.2, 0.01
FORKED, FORKED_AGAIN = 6, 20


def turns_of(rank_seed):
    """(branch, rounds), after which branch 1 runs; the third is forked meanwhile."""
    draw = random.Random(SEED + rank_seed)
    turns = [(draw.choice((0, 1)), draw.randint(1, 3)) for _ in range(12)]
    return [*turns, (2, 8), (0, 2), (2, 4), 1]


def interleaves(worker):
    assert worker.fork(0, {"lr": OTHER}, round=FORKED) == (1, FORKED)
    assert worker.schedule(*turns_of(0)[:12], 0, round=FORKED) == FORKED


def forks_again(worker):
    """Of a branch that may wait."""
    done = FORKED + sum(rounds for _, rounds in turns_of(0)[:12])
    assert worker.fork(0, {"lr": THIRD}, round=done)[0] == 2
    worker.schedule(*turns_of(0)[12:], round=done)


def learns(rank, job, decide, death):
    """(branch, loss) of each step, and what the rank has in the end."""
    net = make_net()
    made = torch.optim.SGD(net.parameters(), RATE, momentum=0.5)
    optimizer = phub.DistributedOptimizer(made, net, transport="tcp", job=job, branches=2)
    batches = Batches(rank)
    torch.manual_seed(SEED + rank)
    course = {}

    def make_step(step):
        death.at(rank, step, 0)
        if rank == 0 and step == 1:  # the optimizer's own values went out in step 0
            for each in decide:
                each(optimizer.worker)
        inputs, labels = next(batches)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), labels)
        course[step] = optimizer.worker.branch_in(step + 1), loss.item()
        loss.backward()
        death.at(rank, step, 1)
        optimizer.step()
        death.at(rank, step, 2)

    live(optimizer, make_step, batches=batches)
    optimizer.worker.barrier()
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    optimizer.close()
    return [course[step] for step in sorted(course)], buffers


def changes(**at):
    """Of a job that is not forked: these rates from these rounds on."""

    def decide(worker):
        for rate, round_ in at.values():
            worker.set_hyper({"lr": rate}, round=round_)

    return decide


def alone(start, name, *decide):
    return [course for course, _ in start(learns, 2, name, decide, NoDeath()).results()]


def of(branch, course):
    return [loss for running, loss in course if running == branch]


def test_each_branch_has_its_own_statistics_order_and_random_numbers(box, start):
    both = start(learns, 2, "both", (interleaves, forks_again), NoDeath()).results()
    root = alone(start, "root")
    child = alone(start, "child", changes(first=(OTHER, FORKED)))
    forked = len(of(0, both[0][0][: FORKED - 1 + sum(n for _, n in turns_of(0)[:12])]))
    third = alone(start, "third", changes(first=(THIRD, forked + 1)))
    for rank in range(2):
        course = both[rank][0]
        assert {branch for branch, _ in course} == {0, 1, 2}
        for branch, before, expected in (
            (0, 0, root[rank]),
            (1, FORKED - 1, child[rank]),
            (2, forked, third[rank]),
        ):
            mine = of(branch, course)
            assert mine == of(0, expected)[before : before + len(mine)], (branch, turns_of(0))
    assert both[0][0] != both[1][0]


OWN_SIZE, SIZE = 16, 5


def learns_in_batches(rank, job, decide, small_from=None):
    """(branch, (batch, loss)) of each step. `small_from`: batches are small from this round on;
    None: they are as the server says."""
    torch.manual_seed(SEED)
    inputs, labels = torch.randn(150, 6), torch.randint(3, (150,))
    net = nn.Linear(6, 3)
    optimizer = phub.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), RATE), net, transport="tcp", job=job, branches=1
    )
    sampler = phub.Sampler(labels, rank=rank, world_size=2, seed=SEED)
    course = []
    for step in optimizer.steps(STEPS, sampler=sampler):
        if rank == 0 and step == 1:
            decide(optimizer.worker)
        if small_from is None:
            batch = optimizer.worker.batch_in(step + 1)
        else:
            batch = SIZE if step + 1 >= small_from else 0
        at = sampler.next(batch or OWN_SIZE)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs[at]), labels[at])
        course.append((optimizer.worker.branch_in(step + 1), (batch, loss.item())))
        loss.backward()
        optimizer.step()
    optimizer.worker.barrier()
    optimizer.close()
    return course


def test_each_branch_has_batches_of_its_own_size(box, start):
    values = {"lr": OTHER, "batch": SIZE}

    def interleaves_sizes(worker):
        assert worker.fork(0, values, round=FORKED) == (1, FORKED)
        assert [each.batch for each in worker.branches()] == [0, SIZE]
        worker.schedule(*turns_of(1)[:12], 1, round=FORKED)

    both = start(learns_in_batches, 2, "both", interleaves_sizes).results()
    root = start(learns_in_batches, 2, "root", lambda worker: None).results()

    def changes_rate(worker):
        worker.set_hyper({"lr": OTHER}, round=FORKED)

    child = start(learns_in_batches, 2, "child", changes_rate, FORKED).results()
    for rank, course in enumerate(both):
        for branch, before, alone_ in ((0, 0, root[rank]), (1, FORKED - 1, child[rank])):
            mine = of(branch, course)
            assert mine == of(0, alone_)[before : before + len(mine)], (branch, turns_of(1))
    assert {batch for _, (batch, _) in both[0]} == {0, SIZE}


def test_they_are_in_the_checkpoints(saving_box, start):
    calm = start(learns, 2, "calm", (interleaves, forks_again), NoDeath()).results()
    death = death_anywhere("branches")
    ranks = start(learns, 2, JOB, (interleaves, forks_again), death)
    assert_same_bits(death.happens(saving_box, ranks), calm)


def test_what_fails_is_told_and_can_be_done_again(box):
    worker = phub.Worker({"key": 8}, job="fails", optimizer="sgd", branches=1)
    worker.wait_all()
    fails, state = [True], [b"zero"]

    def save():
        if fails[0]:
            raise KeyError("not now")
        return state[0]

    own = ByBranch(save, state.append)
    branch, at = worker.fork(0)
    while worker.round("key") + 1 < at:
        assert own.begin(worker) == 0
        worker.push("key")
        worker.wait_all()
    with pytest.raises(KeyError):
        own.begin(worker)
    fails[0] = False
    assert own.begin(worker) == 0
    again = ByBranch(save, state.append)
    again.restore(own.saved())
    assert again.saved() == own.saved()
    for wrong in (b"", own.saved()[:-1], own.saved() + b"x"):
        with pytest.raises(phub.MismatchError):
            again.restore(wrong)
    at = worker.schedule(branch)
    state[0] = b"zero'"
    while worker.round("key") + 1 < at:
        worker.push("key")
        worker.wait_all()
        again.begin(worker)
    assert state == [b"zero'", b"zero"]
