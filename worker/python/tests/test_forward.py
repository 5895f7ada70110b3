"""With overlap="forward" whatever reads a parameter waits for its new value, and nothing else."""

import copy
import io
import itertools
import multiprocessing
import os
import pickle

import torch
from exact import assert_same_bits as assert_same_bits_by_name
from models import loss_of, make_net
from torch import nn
from torch.optim.swa_utils import AveragedModel

import phub


def assert_same_bits(one, other):
    assert_same_bits_by_name(dict(enumerate(one)), dict(enumerate(other)))


def made(net, name="", **options):
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-2)
    job = f"{os.environ['PHUB_JOB']}{name}"[:200]
    return phub.DistributedOptimizer(optimizer, net, job=job, **options)


def train(rank, net, optimizer, steps=2):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()


def saved(value):
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return torch.load(content, weights_only=False)


def averaged(net):
    average = AveragedModel(make_net())
    average.update_parameters(net)
    return average.module


def evaluated(net):
    with torch.no_grad():
        return [net(torch.ones(2, 12))]


def held(net):
    return [p.data for p in net.parameters()]


# What reads the parameters, and returns them, or what depends on them.
READS = {
    "parameters": lambda net: [p.detach() for p in net.parameters()],
    "data": held,
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


def reads(rank):
    """By each way, after two steps with overlap="forward"; and what it finds with False."""
    found = {}
    for (way, read), zero_copy in itertools.product(READS.items(), (False, True)):
        for overlap in ("forward", False):
            net = make_net()
            name = f"-{way}-{zero_copy}-{overlap}".replace(" ", "-")
            optimizer = made(net, name, overlap=overlap, zero_copy=zero_copy)
            train(rank, net, optimizer)
            values = read(net)
            values = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values]
            found.setdefault((way, zero_copy), []).append(values)
            optimizer.worker.barrier()
            optimizer.close()
    return found


def test_whatever_reads_a_parameter_finds_its_new_value(box, start):
    for found in start(reads, 2).results():
        assert len(found) == 2 * len(READS)
        for way, (read, expected) in found.items():
            if isinstance(expected[0], torch.Tensor):
                assert_same_bits(read, expected)
            else:
                assert read == expected, way


def has_views(rank):
    """Taken before the steps: they read the parameter's memory without its knowledge."""
    found = []
    for zero_copy, overlap in itertools.product((False, True), ("forward", False)):
        net = make_net()
        name = f"-{zero_copy}-{overlap}"
        optimizer = made(net, name, overlap=overlap, zero_copy=zero_copy)
        view, numbers = net[0].weight.detach(), net[2].weight.detach().numpy()
        train(rank, net, optimizer, steps=3)
        found.append([view.clone(), torch.from_numpy(numbers.copy())])
        assert net[2].bias.detach().count_nonzero() > 0
        optimizer.worker.barrier()
        optimizer.close()
    return found


def test_a_view_that_was_taken_before_has_the_new_values(box, start):
    for found in start(has_views, 2).results():
        for read, expected in zip(found[::2], found[1::2], strict=True):
            assert_same_bits(read, expected)


def asks_for_no_numbers(rank):
    net = make_net()
    optimizer = made(net, overlap="forward")
    train(rank, net, optimizer)
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
    return [mine.waits for mine in optimizer._mine]


def test_what_reads_no_numbers_waits_for_nothing(box, start):
    assert start(asks_for_no_numbers, 1).results() == [[True] * 4]


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
    loss = loss_of(make_net(), 1, 0)  # the same, without our hooks
    assert loss > 0
    optimizer._begin_round()
    first.push()
    assert came_to_the_first_layer.wait(100)
    for mine in others:
        mine.push()
    optimizer.step()
    return evaluated(net), optimizer.worker.round("2.weight")


def test_forward_begins_before_all_parameters_are_there(box, start):
    event = multiprocessing.get_context("fork").Event()
    (one, rounds), (other, _) = start(begins_forward, 2, event).results()
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


def runs_compiled(rank):
    torch.set_num_threads(1)
    results = []
    kinds = ("script", "wrapped", "in place", "outside")
    for kind, overlap in itertools.product(kinds, ("forward", False)):
        net = make_net()
        whole = compiled(net, kind)
        optimizer = made(net, f"-{kind}-{overlap}".replace(" ", "-"), overlap=overlap)
        train(rank, whole, optimizer, steps=3)
        if overlap and kind != "outside":
            assert [mine.waits for mine in optimizer._mine] == [True, False, False, True]
        results.append(evaluated(whole))
    return results


def test_what_is_compiled_has_the_new_values(box, start):
    (found,) = start(runs_compiled, 1).results()
    for read, expected in zip(found[::2], found[1::2], strict=True):
        assert_same_bits(read, expected)


def is_dropped(rank):
    """The program keeps the model alone."""
    found = []
    for overlap in ("forward", False):
        net = make_net()
        train(rank, net, made(net, f"-{overlap}", overlap=overlap))
        found.append(evaluated(net))
    return found


def test_the_values_come_after_the_optimizer_is_dropped_too(box, start):
    ((read, expected),) = start(is_dropped, 1).results()
    assert_same_bits(read, expected)
