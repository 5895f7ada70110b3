"""A training whose rate is tuned, and what its branches are in one process."""

import copy
import math

import torch
from conftest import SEED
from torch import nn
from torch.nn import functional

WORLD, BATCH, FIRST_RATE = 2, 64, 1e-5
RULES = {
    "sgd": (
        lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.5),
        (1e-3, 0.3, 1e-2, 1e38),
    ),
    "adam": (torch.optim.Adam, (1e-4, 3e-3, 0.03)),
}


class Blobs(nn.Module):
    """Points around four centres, told apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(SEED)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, step, rank):
        draw = torch.Generator().manual_seed(SEED + 1000 * rank + step)
        labels = torch.randint(4, (BATCH,), generator=draw)
        points = 3 * torch.eye(4, 8)[labels] + torch.randn(BATCH, 8, generator=draw)
        return functional.cross_entropy(self.net(points), labels)


def begun(rule):
    model = Blobs()
    return model, RULES[rule][0](model.parameters(), FIRST_RATE)


def replayed(rule, ran, forks, begun=begun):
    """Each rank's loss of each round. `ran`: the branch of each round, from the first one on;
    `forks`: (round, branch, parent, values) in their order."""
    branches = {0: begun(rule)}
    losses = []
    for at, running in enumerate(ran, 1):
        for _, branch, parent, values in (fork for fork in forks if fork[0] == at):
            child = copy.deepcopy(branches[parent])  # both in one, so they fit
            child[1].param_groups[0].update(values)
            branches[branch] = child
        model, optimizer = branches[running]
        optimizer.zero_grad()
        of_ranks = [model(at - 1, rank) for rank in range(WORLD)]
        losses.append([loss.item() for loss in of_ranks])
        (sum(of_ranks) / WORLD).backward()
        optimizer.step()
    return losses


def assert_near(found, expected, where):
    """Of losses, as far as rounding does not decide how they diverge."""
    if not found < 1e6:
        assert not expected < 1e5, where
    else:
        assert math.isclose(found, expected, rel_tol=2e-3, abs_tol=2e-3), (found, expected, where)


def assert_alike(parameters):
    """Of all ranks, also where some trial runs that has diverged."""
    for each in parameters[1:]:
        for one, other in zip(parameters[0], each, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
