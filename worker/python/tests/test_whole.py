"""Adafactor and Muon, whose steps the box makes of whole parameters: what test_optimizer.py, which
compares bits, cannot: the optimizers of PyTorch, whose sums and products are rounded otherwise.
"""

import copy

import pytest
import torch
from conftest import leave, of_ranks, refused
from exact import job, parameters_of, replay
from models import GPT, make_net, text_batch, train
from torch import nn

import phub


def muon(net, kind=phub.Muon, **values):
    """Matrices by Muon, all else by AdamW."""
    matrices = [p for p in net.parameters() if p.dim() == 2]
    if kind is torch.optim.Muon:
        return kind(matrices, lr=0.02, **values)
    rest = [p for p in net.parameters() if p.dim() != 2]
    others = {"params": rest, "lr": 3e-3, "ns_steps": 0, "eps": 1e-8}
    return kind([{"params": matrices, "lr": 0.02}, others], **values)


def adafactor(net, kind):
    return kind(net.parameters(), lr=0.05, weight_decay=0.01)


def matrices_alone():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 16, bias=False), nn.ReLU(), nn.Linear(16, 5, bias=False))


def distance(one, other):
    """By how much the parameters differ, as a part of how far they have gone."""
    start, one, other = (torch.cat([p.flatten() for p in each]) for each in (*one, other))
    return ((one - other).norm() / (one - start).norm()).item()


CASES = {
    "phub.Muon": (make_net, muon, 1e-3),
    "match_rms": (make_net, lambda net: muon(net, adjust_lr_fn="match_rms_adamw"), 1e-3),
    "no nesterov": (make_net, lambda net: muon(net, nesterov=False, ns_steps=3), 1e-3),
    "torch.Muon": (matrices_alone, lambda net: muon(net, torch.optim.Muon), 0.15),
    "torch.Adafactor": (make_net, lambda net: adafactor(net, torch.optim.Adafactor), 1e-3),
}


def takes_steps(rank, case):
    make, optimizer_of, _ = CASES[case]
    net = make()
    optimizer = phub.DistributedOptimizer(optimizer_of(net), net, job=job(case))
    gradients = train(optimizer, net, rank, range(8))
    optimizer.synchronize()
    state = optimizer.state_dict()
    leave(optimizer)
    return gradients, parameters_of(net), state


@pytest.mark.parametrize("case", CASES)
def test_steps_at_the_box_are_those_in_one_process_but_for_rounding(box, start, case):
    gradients, parameters, states = zip(*start(takes_steps, 2, case).results(), strict=True)
    make, optimizer_of, limit = CASES[case]
    net = make()
    first = [p.detach().clone() for p in net.parameters() if p.requires_grad]
    optimizer = optimizer_of(net)
    expected = replay(gradients, net, optimizer)
    apart = distance(
        (first, [p for n, p in net.named_parameters() if p.requires_grad]),
        [parameters[0][n] for n, p in net.named_parameters() if p.requires_grad],
    )
    assert 0 <= apart < limit, f"{case}: {apart}"
    assert all(torch.equal(parameters[0][n], parameters[1][n]) for n in expected)
    mine, theirs = states[0]["state"], optimizer.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for number, of in theirs.items():
        assert mine[number].keys() == of.keys(), number
        for name, value in of.items():
            assert torch.allclose(mine[number][name], value, rtol=1e-2, atol=1e-4), (number, name)


@of_ranks(1)
def test_state_comes_back_to_the_box(rank):
    for case, (make, optimizer_of, _) in CASES.items():
        net = make()
        optimizer = phub.DistributedOptimizer(optimizer_of(net), net, job=job(f"from-{case}"))
        train(optimizer, net, rank, range(3))
        optimizer.synchronize()
        saved, model = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
        train(optimizer, net, rank, range(3, 6))
        optimizer.synchronize()
        once = parameters_of(net)
        net.load_state_dict(model)
        optimizer.load_state_dict(saved)
        train(optimizer, net, rank, range(3, 6))
        optimizer.synchronize()
        for name, value in parameters_of(net).items():
            assert torch.equal(value, once[name]), (case, name)
        optimizer.close()


def learns(rank, server):
    """The last losses of a small GPT, of whose parameters all but the embeddings are Muon's."""
    torch.manual_seed(1)
    net = GPT(width=48, blocks=2, heads=4)
    rest = [p for n, p in net.named_parameters() if p.dim() != 2 or n.startswith(("sym", "pl"))]
    hidden = [p for p in net.parameters() if all(p is not other for other in rest)]
    groups = [{"params": hidden, "lr": 0.02}, {"params": rest, "lr": 3e-3, "ns_steps": 0}]
    optimizer = phub.DistributedOptimizer(phub.Muon(groups), net, server=server, job=job("gpt"))
    losses = []
    for step in range(60):
        optimizer.zero_grad()
        loss = net(text_batch(rank, step, rows=8))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.close()
    return losses


def test_a_small_model_learns_as_in_one_process(box, start):
    at_box, by_ranks = (start(learns, 2, server).results() for server in (True, False))
    for one, other in zip(at_box, by_ranks, strict=True):
        assert one[0] == other[0] > 4.5
        ends = [sum(losses[-5:]) / 5 for losses in (one, other)]
        assert max(ends) < 3.8
        assert abs(ends[0] - ends[1]) < 0.2, ends


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: phub.Muon(p, lr=-1), "lr is -1"),
        (lambda p: phub.Muon(p, ns_steps=100), "ns_steps is 100: it is from 0"),
        (lambda p: phub.Muon(p, adjust_lr_fn="own"), "adjust_lr_fn is 'own'"),
        (lambda p: phub.Muon(p, betas=(1, 1)), "betas are"),
        (lambda p: phub.Adafactor(p, d=0.5), "d is 0.5: it is at least 1"),
        (lambda p: phub.Adafactor(p, beta2_decay=0.8), "beta2_decay is 0.8"),
        (lambda p: phub.Adafactor(p, eps=(None, -1)), "eps is -1"),
    ],
)
def test_values_that_the_box_would_refuse(make, message):
    refused(message, make, [nn.Parameter(torch.zeros(2, 2))])


@of_ranks(1)
def test_what_the_box_does_not_do(rank):
    net = matrices_alone()
    own = torch.optim.Muon(net.parameters(), ns_coefficients=(3, -4, 2))
    refused("ns_coefficients .3, -4, 2.", phub.DistributedOptimizer, own, net)
    refused("max_norm", phub.DistributedOptimizer, muon(net), net, max_norm=1.0)
