"""Ranks whose models differ, where each makes its own steps, are told so."""

import copy
import warnings

import torch
from conftest import of_ranks, refused
from models import descend
from torch import nn

import phub
from phub import _same


class Net(nn.Module):
    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.first, self.second = nn.Linear(4, 600), nn.Linear(600, 2)
        self.norm, self.drop = nn.BatchNorm1d(600), nn.Dropout(0.5)

    def forward(self, inputs):
        return self.second(self.drop(self.norm(self.first(inputs))))


def make(rank, job):
    net = Net(rank)
    return net, phub.ddp(net, job=job), torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def loss_of(forward, rank, step):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    return forward(inputs).square().mean()


def train(forward, optimizer, rank, steps=5):
    for step in range(steps):
        descend(optimizer, loss_of(forward, rank, step))


def rate(rank, job="rate"):
    _, wrapped, optimizer = make(rank, job)
    optimizer.param_groups[0]["lr"] *= 1 + rank
    train(wrapped, optimizer, rank)


def loads_a_model(rank):
    net, wrapped, optimizer = make(rank, "loads-a-model")
    if rank == 0:
        net.load_state_dict(Net(7).state_dict())
    train(wrapped, optimizer, rank)


def two_losses(rank):
    _, wrapped, optimizer = make(rank, "two-losses")
    for _ in range(3):
        optimizer.zero_grad()
        out = wrapped(torch.full((8, 4), 1.0 + rank) * torch.arange(8).unsqueeze(1))
        out.square().mean().backward(retain_graph=True)
        out.sin().mean().backward()
        optimizer.step()


def another_layer(rank):
    net, wrapped, _ = make(rank, "another-layer")
    torch.manual_seed(0)
    net.drop = nn.Linear(600, 600)
    train(wrapped, torch.optim.SGD(net.parameters(), 0.1), rank)


def one_more_backward(rank):
    _, wrapped, optimizer = make(rank, "one-more-backward")
    train(wrapped, optimizer, rank, 1)
    if rank == 0:
        loss_of(wrapped, rank, 9).backward()
    train(wrapped, optimizer, rank, 4 + rank)


def without_box(rank):
    net = Net(rank)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = phub.DistributedOptimizer(optimizer, net, server=False, job="without-box")
    optimizer.param_groups[0]["lr"] *= 1 + rank
    train(net, optimizer, rank)


DIFFERENT_STEPS = [rate, loads_a_model, two_losses, another_layer, one_more_backward, without_box]


def said_by(body, rank):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        body(rank)
    return [str(each.message) for each in caught if each.category is RuntimeWarning]


@of_ranks(2)
def test_ranks_that_make_different_steps_are_warned(rank):
    for body in DIFFERENT_STEPS:
        said = said_by(body, rank)
        assert len(said) == 1, (body, said)
        assert "is not the same on all ranks in step" in said[0], (body, said)
        assert f"'{body.__name__.replace('_', '-')}', rank {rank}: 'first.weight'" in said[0] or (
            body in (another_layer, two_losses)
        ), said
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        refused("not the same", rate, rank, "an-error", error=RuntimeWarning)


@of_ranks(2)
def test_what_is_not_exchanged_must_be_the_same(rank):
    def frozen(_rank):
        net = Net(rank)
        net.first.weight.requires_grad_(False)
        phub.ddp(net, job="frozen")

    def random_buffer(_rank):
        net = Net(0)
        torch.manual_seed(rank)
        net.register_buffer("order", torch.randperm(3000))
        phub.ddp(net, job="buffer")

    for body, name in ((frozen, "first.weight"), (random_buffer, "order")):
        (said,) = said_by(body, rank)
        assert f"'{name}' is not the same on all ranks, and nobody exchanges it" in said


def is_well(rank):
    """Seeds of each rank, no_sync, statistics and an evaluation of one rank."""
    net, wrapped, optimizer = make(rank, "is-well")
    torch.manual_seed(rank)
    for _ in range(2):
        with wrapped.no_sync():
            loss_of(wrapped, rank, 1).backward()
        train(wrapped, optimizer, rank, 4)
        if rank == 0:
            copy.deepcopy(net).eval()(torch.ones(2, 4))
    wrapped.phub.close()
    net = Net(rank)
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer = phub.DistributedOptimizer(optimizer, net, server=False, job="other")
    train(net, optimizer, rank)
    optimizer.close()


@of_ranks(2)
def test_nothing_is_said_of_ranks_that_are_well(rank):
    assert said_by(is_well, rank) == []


@of_ranks(2)
def test_a_box_that_refuses_the_comparison_does_not_end_the_training(rank):
    def refuses(*_arguments, **_more):
        raise phub.UnauthorizedError("no token for it")

    _same.worker_beside = refuses  # in this process alone
    (said,) = said_by(rate, rank)
    assert "of job 'rate' train without comparing their models: no token for it" in said


@of_ranks(2)
def test_ranks_that_take_the_same_data_are_warned(rank):
    net, wrapped, optimizer = make(rank, "data")
    net.drop = nn.Identity()
    said = said_by(lambda _: train(wrapped, optimizer, 0, 3), rank)
    assert said == []  # not yet
    (said,) = said_by(lambda _: train(wrapped, optimizer, 0, 7), rank)
    assert "all ranks had the same gradients in 3 steps" in said
    assert "DistributedSampler" in said
