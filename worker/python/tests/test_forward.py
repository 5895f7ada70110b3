"""Loops as people and frameworks write them, and what reads parameters between their steps.

With overlap="forward" whatever reads a parameter waits for its new value, and nothing else.
"""

import copy
import math
import pickle
import warnings

import pytest
import torch
from conftest import leave, of_ranks, refused
from deaths import FORK
from exact import assert_same_bits, job, parameters_of, saved
from models import loss_of, make_net, train
from torch import nn
from torch.optim.swa_utils import AveragedModel

import phub


def made(net, name="", **options):
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-2)
    return phub.DistributedOptimizer(optimizer, net, job=job(name), **options)


def averaged(net):
    average = AveragedModel(make_net())
    average.update_parameters(net)
    return average.module


def evaluated(net):
    with torch.no_grad():
        return [net(torch.ones(2, 12))]


# What reads the parameters, and returns them, or what depends on them.
READS = {
    "parameters": lambda net: [p.detach() for p in net.parameters()],
    "data": lambda net: [p.data for p in net.parameters()],
    "clone": lambda net: [p.clone() for p in net.parameters()],
    "numpy": lambda net: [torch.from_numpy(p.detach().numpy()) for p in net.parameters()],
    "item": lambda net: [p.flatten()[0].item() for p in net.parameters()],
    "list": lambda net: [p.tolist() for p in net.parameters()],
    "vector": lambda net: [nn.utils.parameters_to_vector(net.parameters())],
    "norms": lambda net: list(torch._foreach_norm(list(net.parameters()))),
    "text": lambda net: [repr(p) for p in net.parameters()],
    "state_dict": lambda net: list(net.state_dict().values()),
    "state of a part": lambda net: list(net[0].state_dict().values()),
    "kept variables": lambda net: [p * 1 for p in net.state_dict(keep_vars=True).values()],
    "save": lambda net: list(saved(net.state_dict()).values()),
    "save of one": lambda net: [saved(net[0].weight)],
    "pickle": lambda net: [pickle.loads(pickle.dumps(net[0].weight))],
    "deepcopy": lambda net: list(copy.deepcopy(net).parameters()),
    "deepcopy of one": lambda net: [copy.deepcopy(net[0].weight)],
    "copy": lambda net: [copy.copy(net[0].weight) * 1],
    "average": lambda net: list(averaged(net).parameters()),
    "evaluation": evaluated,
    "function": lambda net: [nn.functional.linear(torch.ones(1, 12), net[0].weight)],
    "call of a function": lambda net: [
        torch.func.functional_call(net, dict(net.named_parameters()), (torch.ones(2, 12),))
    ],
    "vmap": lambda net: [torch.vmap(lambda x: net[0].weight @ x)(torch.ones(2, 12))],
    "gradient of inputs": lambda net: [
        torch.func.grad(lambda x: (net[0].weight @ x).sum())(torch.ones(12))
    ],
    "conversion": lambda net: list(net.double().parameters()),
}


WAYS = pytest.mark.parametrize("zero_copy", [False, True])


@WAYS
@of_ranks(2)
def test_whatever_reads_a_parameter_finds_its_new_value(rank, zero_copy):
    """By each way, after two steps with overlap="forward" it finds what it does with False."""
    for way, read in READS.items():
        found = []
        for overlap in ("forward", False):
            net = make_net()
            optimizer = made(net, f"{way}-{overlap}", overlap=overlap, zero_copy=zero_copy)
            train(optimizer, net, rank, range(2))
            values = read(net)
            found.append([v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values])
            leave(optimizer)
        assert_same_bits(*found, way)


@WAYS
@of_ranks(2)
def test_a_view_that_was_taken_before_has_the_new_values(rank, zero_copy):
    """It reads the parameter's memory without its knowledge."""
    found = []
    for overlap in ("forward", False):
        net = make_net()
        optimizer = made(net, overlap, overlap=overlap, zero_copy=zero_copy)
        view, numbers = net[0].weight.detach(), net[2].weight.detach().numpy()
        train(optimizer, net, rank, range(3))
        found.append([view.clone(), torch.from_numpy(numbers.copy())])
        assert net[2].bias.detach().count_nonzero() > 0
        leave(optimizer)
    assert_same_bits(*found)


@of_ranks(1)
def test_what_reads_no_numbers_waits_for_nothing(rank):
    net = make_net()
    optimizer = made(net, overlap="forward")
    train(optimizer, net, rank, range(2))
    for p in net.parameters():
        assert p.shape == p.size()
        assert p.numel() * p.element_size() == p.nbytes
        assert isinstance(p, nn.Parameter)
        assert p.is_leaf
        assert p.dtype == torch.float32
        assert p.device.type == "cpu"
    optimizer.zero_grad()
    net.zero_grad()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    assert [mine.waits for mine in optimizer._mine] == [True] * 4


def begins_forward(rank, came_to_the_first_layer):
    """Rank 1 has no gradient of the last layer before rank 0's next forward() has begun."""
    net = make_net()
    optimizer = made(net, overlap="forward", progress_limit_ms=100_000)
    if rank == 0:
        net[1].register_forward_hook(lambda *_: came_to_the_first_layer.set())
    optimizer.zero_grad()
    came_to_the_first_layer.clear()
    if rank == 0:
        loss_of(net, 0, 0).backward()
        came_to_the_first_layer.clear()
        optimizer.step()
        assert optimizer.worker.round("2.weight") == 0
        return evaluated(net), optimizer.worker.round("2.weight")
    (first,) = (mine for mine in optimizer._mine if mine.name == "0.weight")
    others = [mine for mine in optimizer._mine if mine is not first]
    optimizer._round.begin()
    first.push()
    assert came_to_the_first_layer.wait(100)
    for mine in others:
        mine.push()
    optimizer.step()
    return evaluated(net), optimizer.worker.round("2.weight")


def test_forward_begins_before_all_parameters_are_there(box, start):
    (one, rounds), (other, _) = start(begins_forward, 2, FORK.Event()).results()
    assert rounds == 1
    assert_same_bits(one, other)


def compiled(net, kind):
    """A module that makes forward()."""
    if kind == "script":
        net[2] = torch.jit.script(net[2])
    elif kind == "wrapped":
        net[2] = torch.compile(net[2], backend="aot_eager")
    elif kind == "in place":
        net[2].compile(backend="aot_eager")
    return torch.compile(net, backend="aot_eager") if kind == "outside" else net


@of_ranks(1)
def test_what_is_compiled_has_the_new_values(rank):
    for kind in ("script", "wrapped", "in place", "outside"):
        found = []
        for overlap in ("forward", False):
            net = make_net()
            whole = compiled(net, kind)
            optimizer = made(net, f"{kind}-{overlap}", overlap=overlap)
            train(optimizer, whole, rank, range(3))
            if overlap and kind != "outside":
                assert [mine.waits for mine in optimizer._mine] == [True, False, False, True]
            found.append(evaluated(whole))
        assert_same_bits(*found)


@of_ranks(1)
def test_the_values_come_after_the_optimizer_is_dropped_too(rank):
    """The program keeps the model alone."""
    found = []
    for overlap in ("forward", False):
        net = make_net()
        train(made(net, overlap, overlap=overlap), net, rank, range(2))
        found.append(evaluated(net))
    assert_same_bits(*found)


# ---- Loops.


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
    leave(optimizer)
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
        refused(rf"'{name}\.weight' came into the model", optimizer.step, error=RuntimeError)
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
        said = "'1' is a SyncBatchNorm.*has 1, the job 2|left before the job had begun"
        refused(said, make, error=(phub.InvalidError, phub.RankLostError))
