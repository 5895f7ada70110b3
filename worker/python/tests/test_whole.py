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


def adafactor(net, kind, **values):
    return kind(net.parameters(), lr=0.05, weight_decay=0.01, **values)


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
    "phub.Adafactor": (make_net, lambda net: adafactor(net, phub.Adafactor, d=1.5), 1e-5),
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
        (lambda p: phub.Muon(p, ns_steps=100), "ns_steps is 100: it is a whole"),
        (lambda p: phub.Muon(p, ns_steps=2.5), "ns_steps is 2.5: it is a whole number"),
        (lambda p: phub.Muon([{"params": p, "ns_steps": 100}]), "ns_steps is 100"),
        (lambda p: phub.Muon([{"params": p, "eps": 0.0}]), "eps is 0.0: it is above 0"),
        (lambda p: phub.Muon(p, lr=float("inf")), "lr is inf"),
        (lambda p: phub.Muon(p, adjust_lr_fn="own"), "adjust_lr_fn is 'own'"),
        (lambda p: phub.Muon(p, betas=(1, 1)), "betas are"),
        (lambda p: phub.Adafactor(p, d=0.5), "d is 0.5: it is at least 1"),
        (lambda p: phub.Adafactor([{"params": p, "d": 0.5}]), "d is 0.5"),
        (lambda p: phub.Adafactor(p, d=float("inf")), "d is inf"),
        (lambda p: phub.Adafactor(p, eps=(0.0, 1e-3)), "eps is 0.0: it is above 0"),
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
    deep = nn.ParameterList([nn.Parameter(torch.zeros([2] * 9))])
    refused("9 dimensions", phub.DistributedOptimizer, phub.Adafactor(deep.parameters()), deep)
    refused("max_norm", phub.DistributedOptimizer, muon(net), net, max_norm=1.0)


@of_ranks(1)
def test_steps_of_muon_cannot_change(rank):
    net = matrices_alone()
    optimizer = phub.DistributedOptimizer(muon(net), net, overlap=False, job=job("fixed"))
    train(optimizer, net, rank, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["ns_steps"] = 0
    refused("group 0 has ns_steps=0, and the job began with 5", optimizer.load_state_dict, saved)
    optimizer.param_groups[0]["ns_steps"] = 3
    refused("group 0 has ns_steps=3", train, optimizer, net, rank, range(1))
    optimizer.param_groups[0]["ns_steps"] = 5
    train(optimizer, net, rank, range(1))
    optimizer.close()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_adafactor_steps_parameters_of_other_types(kind):
    shapes = (6, 5), (7,), (3, 4, 2)
    torch.manual_seed(5)
    first = [torch.randn(shape).bfloat16().float() for shape in shapes]
    of_float, of_kind = (
        [nn.Parameter(p.to(k, copy=True)) for p in first] for k in (torch.float32, kind)
    )
    optimizers = [phub.Adafactor(each, lr=0.1) for each in (of_float, of_kind)]
    for step in range(8):
        for one, other in zip(of_float, of_kind, strict=True):
            one.grad = torch.randn_like(one).bfloat16().float() * (step > 0)
            other.grad = one.grad.to(kind)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    of_kind = [p.detach().float() for p in of_kind]
    apart = distance((first, of_kind), of_float)
    assert apart < (1e-4 if kind == torch.float64 else 0.1), apart
