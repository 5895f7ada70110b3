"""Trainings whose steps the box makes, compared with PyTorch's optimizers in one process."""

import copy
import os

import pytest
import torch
from conftest import leave, of_ranks, refused
from exact import assert_same_bits, exact_roots, gradients_of, job, parameters_of, replay, replayed
from models import Branches, loss_of, make_net, train
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop

import phub
from phub import _tensors

OPTIMIZERS = {
    "sgd": (SGD, {"lr": 0.05}),
    "momentum": (SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.1}),
    "nesterov": (SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "adam": (Adam, {"lr": 1e-2, "betas": (0.3, 0.98), "eps": 1e-7}),
    "adamw": (AdamW, {"lr": 1e-2}),
    "adagrad": (Adagrad, {"lr": 0.05, "lr_decay": 0.01}),
    "rmsprop": (RMSprop, {"lr": 1e-3, "alpha": 0.9}),
    "rmsprop_momentum": (RMSprop, {"lr": 1e-3, "momentum": 0.7}),
    "adadelta": (Adadelta, {"lr": 0.5, "rho": 0.8, "eps": 1e-5}),
    "lion": (phub.Lion, {"lr": 1e-3, "betas": (0.8, 0.98)}),
    "lars": (phub.Lars, {"lr": 2.0, "momentum": 0.8, "trust_coeff": 0.02}),
    "lamb": (phub.Lamb, {"lr": 1e-2, "betas": (0.8, 0.98), "always_adapt": True}),
}


def plain(net, kind="adamw"):
    """Two groups: matrices with decay, and the rest with another rate."""
    make, options = OPTIMIZERS[kind]
    matrices = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.004}]
    ours = make.__module__.startswith("phub")
    return make(groups, **options, **({} if ours else {"foreach": False}))


def made(net=None, kind="adamw", **options):
    net = net or make_net()
    return net, phub.DistributedOptimizer(plain(net, kind), net, **options)


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)


def is_view(parameter, optimizer):
    there = torch.frombuffer(optimizer.worker.parameters("2.weight"), dtype=torch.uint8)
    return parameter.data_ptr() == there.data_ptr()


def trains(rank, kinds, steps, dtype, options):
    if options.pop("copied", False):  # by the worker, as those of large parameters are
        _tensors._LARGE_BYTES = 0
    results = {}
    for kind in kinds:
        net = make_net().to(dtype)
        with torch.no_grad():
            net[2].weight.add_(rank)  # rank 0's count
        _, optimizer = made(net, kind, accumulate=2, job=job(kind), **options)
        assert optimizer.worker.connection.startswith(options["transport"])
        assert is_view(net[2].weight, optimizer) == options.get("zero_copy", False)
        assert "0.bias" not in optimizer.worker.keys
        gradients = train(optimizer, net, rank, range(steps), 2, schedule_of(optimizer))
        optimizer.synchronize()
        results[kind] = gradients, parameters_of(net), optimizer.state_dict()
        leave(optimizer)
        with torch.no_grad():
            net[2].weight.zero_()  # it is the program's own again
    return results


def assert_same_state(one, other):
    assert one["param_groups"] == other["param_groups"]
    theirs = {k: {n: v for n, v in s.items() if v is not None} for k, s in other["state"].items()}
    assert_same_bits(*({k: v for k, v in s.items() if v} for s in (one["state"], theirs)))


TWO = "momentum", "adamw"


@pytest.mark.parametrize(
    ("world", "steps", "transport", "kinds", "options"),
    [
        (1, 12, "shm", OPTIMIZERS, {}),
        (1, 12, "tcp", OPTIMIZERS, {}),
        (2, 30, "shm", OPTIMIZERS, {}),
        (2, 30, "tcp", OPTIMIZERS, {}),
        (4, 12, "shm", OPTIMIZERS, {}),
        (4, 12, "tcp", OPTIMIZERS, {}),
        (2, 12, "shm", TWO, {"overlap": "forward"}),
        (2, 12, "shm", TWO, {"overlap": False}),
        (2, 12, "shm", TWO, {"copied": True}),
        (2, 12, "tcp", TWO, {"copied": True, "overlap": "forward"}),
        (2, 5, "shm", ["adam"], {"copied": True, "dtype": torch.bfloat16}),
        (2, 5, "tcp", ["adam"], {"gradient_dtype": "bf16"}),
        (2, 5, "shm", ["adam"], {"dtype": torch.bfloat16}),
        (2, 12, "shm", OPTIMIZERS, {"zero_copy": True}),
        (2, 12, "shm", TWO, {"zero_copy": True, "overlap": "forward"}),
        (2, 12, "shm", TWO, {"zero_copy": True, "overlap": False}),
        (2, 12, "tcp", TWO, {"zero_copy": True}),
        (2, 12, "tcp", OPTIMIZERS, {"zero_copy": True, "overlap": "forward"}),
        (2, 12, "tcp", TWO, {"zero_copy": True, "overlap": False}),
    ],
)
def test_parameters_and_state_are_those_of_pytorch_to_the_bit(
    box, start, world, steps, transport, kinds, options
):
    options = {"dtype": torch.float32, "transport": transport, **options}
    dtype = options.pop("dtype")  # the box's parameters are float32
    results = start(trains, world, kinds, steps, dtype, options).results()
    for kind in kinds:
        gradients, parameters, states = zip(*(result[kind] for result in results), strict=True)
        sent = torch.bfloat16 if "gradient_dtype" in options else dtype
        gradients = [
            [{n: g.to(sent).float() for n, g in step.items()} for step in of_rank]
            for of_rank in gradients
        ]
        net = make_net().to(dtype).float()
        optimizer = plain(net, kind)
        expected = replay(gradients, net, optimizer, schedule_of(optimizer))
        for each, state in zip(parameters, states, strict=True):
            assert_same_bits(each, {name: p.to(dtype) for name, p in expected.items()})
            assert_same_state(state, optimizer.state_dict())
        if world > 1:  # or the ranks had the same batches
            assert not torch.equal(gradients[0][0]["2.weight"], gradients[1][0]["2.weight"])


@of_ranks(1)
def test_a_rank_that_joins_later_takes_what_the_job_has(rank):
    nets, gradients = [make_net(), make_net()], []
    with torch.no_grad():
        nets[1][2].weight.zero_()

    def step(optimizers, number):
        for each, (net, optimizer) in enumerate(zip(nets, optimizers, strict=False)):
            optimizer.zero_grad()
            loss_of(net, each, number).backward()
        for optimizer in optimizers:
            optimizer.step()
        gradients.append([gradients_of(net) for net in nets[: len(optimizers)]])

    _, first = made(nets[0], max_ranks=2, rank=0)
    step([first], 0)
    first.param_groups[0]["lr"] = 0.02
    step([first], 1)
    _, second = made(nets[1], max_ranks=2, rank=1)
    assert_same_bits(parameters_of(nets[0]), parameters_of(nets[1]))
    step([first, second], 2)
    first.param_groups[0]["lr"] = second.param_groups[0]["lr"] = 0.005
    step([first, second], 3)
    assert_same_bits(parameters_of(nets[0]), parameters_of(nets[1]))

    alone = make_net()
    optimizer = plain(alone)
    for of_ranks_, rate in zip(gradients, (1e-2, 0.02, 0.02, 0.005), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        replay([[of_rank] for of_rank in of_ranks_], alone, optimizer)
    assert_same_bits(parameters_of(nets[0]), parameters_of(alone))


@of_ranks(2)
def test_modules_may_be_unused(rank):
    found = []
    for overlap in ("backward", "forward"):
        net = make_net()
        net.unused = nn.Linear(2, 2)
        net.forward = lambda x, net=net: net[2](net[1](net[0](x)))
        optimizer = SGD(net.parameters(), 0.1)
        optimizer = phub.DistributedOptimizer(optimizer, net, overlap=overlap, job=job(overlap))
        train(optimizer, net, rank, range(3))
        optimizer.synchronize()
        found.append(parameters_of(net))
    assert_same_bits(*found)
    return found


def trains_in_8_bits(rank):
    net, optimizer = made(state_dtype="8bit")
    gradients = train(optimizer, net, rank, range(12))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)  # what was rounded stays
    assert_same_bits(optimizer.state_dict(), state)
    parameters = parameters_of(net)
    leave(optimizer)
    return gradients, parameters, state


def test_states_of_8_bits_are_close_to_those_of_pytorch(box, start):
    results = start(trains_in_8_bits, 2).results()
    net = make_net()
    optimizer = plain(net)
    expected = replay([gradients for gradients, _, _ in results], net, optimizer)
    theirs = optimizer.state_dict()["state"]
    for _, parameters, state in results:
        for name, values in expected.items():
            torch.testing.assert_close(parameters[name], values, rtol=0, atol=0.02)
        for at, of_one in state["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                want = theirs[at][name]
                assert of_one[name].dtype == torch.float32
                assert (of_one[name] - want).abs().max() <= 0.1 * want.abs().max()
                if want.numel() > 32:
                    assert not torch.equal(of_one[name], want)  # or it is not of 8 bits


# By step and rank. Nobody uses branch 1 in the first step and the last, nor branch 2 in most.
USED = [((0,), (0,)), ((0, 1), (1,)), ((0,), (1, 2)), ((1,), (1,)), ((0, 1), (0,)), ((0,), (0,))]


def uses_some_branches(rank, kinds):
    results = []
    for kind in kinds:
        net, optimizer = made(Branches(), kind, unused="skip", job=job(kind))
        random = torch.Generator().manual_seed(rank)
        gradients = []
        for used in USED:
            optimizer.zero_grad()
            net(torch.randn(5, 4, generator=random), used[rank]).square().sum().backward()
            gradients.append(gradients_of(net))
            optimizer.step()
        results.append((gradients, parameters_of(net), optimizer.state_dict()))
        leave(optimizer)
    return results


def test_what_no_rank_uses_is_left_out(box, start):
    kinds = ["momentum", "adamw", "rmsprop"]
    ranks = start(uses_some_branches, 2, kinds).results()
    for kind, *of_each in zip(kinds, *ranks, strict=True):
        net = Branches()
        optimizer = plain(net, kind)
        zeros = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        for steps in zip(*(gradients for gradients, _, _ in of_each), strict=True):
            optimizer.zero_grad()
            used = set().union(*steps)
            replay([[{n: step.get(n, zeros[n]) for n in used}] for step in steps], net, optimizer)
        for _, parameters, state in of_each:
            assert_same_bits(parameters, parameters_of(net))
            assert_same_state(state, optimizer.state_dict())


# ---- Accumulation and state.


@of_ranks(2)
def test_no_sync_accumulates(rank):
    net, optimizer = made()
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(net, rank, 2 * step).backward()
            assert not any(mine.pushed for mine in optimizer._mine)
        loss_of(net, rank, 2 * step + 1).backward()
        assert all(mine.pushed for mine in optimizer._mine)
        optimizer.step()
    assert optimizer.worker.round("0.weight") == 3


def goes_on(rank, kind, options):
    """Three steps at the box, three in plain PyTorch, three at another job."""
    net = make_net()
    _, one = made(net, kind, job=job("one"), **options)
    gradients = train(one, net, rank, range(3))
    local = plain(net, kind)
    local.load_state_dict(one.state_dict())
    one.close()
    with exact_roots():
        gradients += train(local, net, rank, range(3, 6))
    two = phub.DistributedOptimizer(local, net, job=job("two"), **options)
    gradients += train(two, net, rank, range(6, 9))
    saved, model = copy.deepcopy(two.state_dict()), copy.deepcopy(net.state_dict())
    train(two, net, rank, range(9, 12))  # in vain
    net.load_state_dict(model)
    two.load_state_dict(saved)
    assert two.optimizer.param_groups is two.param_groups
    gradients += train(two, net, rank, range(9, 12))
    state = two.state_dict()
    two.close()
    return gradients, parameters_of(net), state


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in OPTIMIZERS), ("adamw", {"zero_copy": True})],
    ids=[*OPTIMIZERS, "that_is_not_copied_can_be_loaded"],
)
def test_state_goes_to_pytorch_and_back(box, start, kind, options):
    ((gradients, parameters, state),) = start(goes_on, 1, kind, options).results()
    net = make_net()
    optimizer = plain(net, kind)
    assert_same_bits(parameters, replay([gradients], net, optimizer))
    state["param_groups"] = optimizer.state_dict()["param_groups"]  # without a schedule's
    assert_same_state(state, optimizer.state_dict())


def trains_and_saves(rank, overlap):
    """Rank 0 saves after each step, and a new rate comes before and after it."""
    net, optimizer = made(overlap=overlap)
    gradients, saved = [], []
    for step in range(4):
        if rank == 0:
            optimizer.param_groups[0]["lr"] = 1.0
            saved.append(optimizer.state_dict()["state"])
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        gradients += train(optimizer, net, rank, [step])
    optimizer.synchronize()
    return gradients, parameters_of(net), saved


@pytest.mark.parametrize("overlap", ["backward", "forward", False])
def test_a_rate_may_change_after_a_rank_has_saved(box, start, overlap):
    gradients, parameters, saved = zip(*start(trains_and_saves, 2, overlap).results(), strict=True)
    net = make_net()
    optimizer = plain(net)
    for step, _ in enumerate(replayed(gradients, net, optimizer)):
        assert all(of["step"] == step for of in saved[0][step].values())
        optimizer.param_groups[0]["lr"] = 1e-2 / (2 + step)
    for each in parameters:
        assert_same_bits(each, parameters_of(net))


@of_ranks(2)
def test_a_scheduler_of_an_optimizer_that_has_state_sets_the_first_rate(rank):
    net = make_net()
    local = plain(net)
    train(local, net, 0, [0])
    optimizer = phub.DistributedOptimizer(local, net)
    torch.optim.lr_scheduler.LinearLR(optimizer, 0.1)  # it sets the first rate now
    train(optimizer, net, rank, [1])
    assert {int(of["step"]) for of in optimizer.state_dict()["state"].values()} == {2}
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


# ---- Steps without overlap, and of the ranks' own.


@of_ranks(1)
def test_without_overlap_gradients_may_change(rank):
    net, optimizer = made(overlap=False)
    loss_of(net, rank, 0).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    optimizer.param_groups[0]["lr"] = 0.5
    clipped = gradients_of(net)
    optimizer.step()
    assert_same_bits(gradients_of(net), clipped)  # they stay
    alone = make_net()
    local = plain(alone)
    local.param_groups[0]["lr"] = 0.5
    assert_same_bits(parameters_of(net), replay([[clipped]], alone, local))


def sets_another_rate(rank):
    net, optimizer = made()
    optimizer.param_groups[0]["lr"] = 0.5 + rank
    train(optimizer, net, rank, [0])


def test_ranks_with_different_rates_are_told(box, start):
    message = "sets lr@0 to .*the ranks of a job set the same"
    refused(message, start(sets_another_rate, 2).results, error=phub.MismatchError)


class Own(AdamW):
    pass


def steps_itself(rank):
    net = make_net()
    optimizer = phub.DistributedOptimizer(Own(net.parameters(), foreach=False), net, server=False)
    gradients, norms = [], []
    with exact_roots():
        for step in range(4):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            gradients.append(gradients_of(net))
            if step % 2:
                optimizer.synchronize()
                norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 1e9)))
            optimizer.step()
    return gradients, parameters_of(net), set(optimizer.state_dict()["state"]), norms


def test_ranks_make_any_step_themselves(box, start):
    gradients, parameters, states, norms = zip(*start(steps_itself, 2).results(), strict=True)
    net = make_net()
    optimizer = Own(net.parameters(), foreach=False)
    replay(gradients, net, optimizer)
    for each, state in zip(parameters, states, strict=True):
        assert_same_bits(each, parameters_of(net))
        assert state == set(optimizer.state_dict()["state"])
    assert norms[0] == norms[1]  # of the mean


# ---- When a rank dies.


def dies(rank):
    net, optimizer = made()
    schedule = schedule_of(optimizer)
    train(optimizer, net, rank, range(4), schedule=schedule)
    if rank == 0:
        os._exit(1)
    train(optimizer, net, rank, range(4, 10), schedule=schedule)
    return [group["lr"] for group in optimizer.param_groups], parameters_of(net)


def test_the_others_go_on_and_set_the_rates(box, start):
    ranks = start(dies, 3)
    one, other = ranks.result(1), ranks.result(2)
    assert one[0] != [1e-2, 0.004]
    assert_same_bits(one, other)
