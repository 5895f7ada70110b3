"""Trainings whose steps the box makes, compared with PyTorch's optimizers in one process."""

import copy
import os

import pytest
import torch
from conftest import of_ranks
from exact import (
    assert_same_bits,
    exact_roots,
    gradients_of,
    job,
    parameters_of,
    replay,
    replayed,
)
from models import loss_of, make_net, train
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop

import phub

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
}


def plain(net, kind="adamw"):
    """Two groups: matrices with decay, and the rest with another rate."""
    make, options = OPTIMIZERS[kind]
    matrices = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.004}]
    return make(groups, **options, foreach=False)


def made(net=None, kind="adamw", **options):
    net = net or make_net()
    return net, phub.DistributedOptimizer(plain(net, kind), net, **options)


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)


def is_view(parameter, optimizer):
    there = torch.frombuffer(optimizer.worker.parameters("2.weight"), dtype=torch.float32)
    return parameter.data_ptr() == there.data_ptr()


def trains(rank, kinds, steps, options):
    results = {}
    for kind in kinds:
        net = make_net()
        with torch.no_grad():
            net[2].weight.add_(rank)  # rank 0's count
        _, optimizer = made(net, kind, accumulate=2, job=job(kind), **options)
        assert optimizer.worker.connection.startswith(options["transport"])
        assert is_view(net[2].weight, optimizer) == options.get("zero_copy", False)
        assert "0.bias" not in optimizer.worker.keys
        gradients = train(optimizer, net, rank, range(steps), 2, schedule_of(optimizer))
        optimizer.synchronize()
        results[kind] = gradients, parameters_of(net), optimizer.state_dict()
        optimizer.worker.barrier()
        optimizer.close()
        with torch.no_grad():
            net[2].weight.zero_()  # it is the program's own again
    return results


def assert_same_state(one, other):
    assert one["param_groups"] == other["param_groups"]
    theirs = {
        key: {n: v for n, v in s.items() if v is not None} for key, s in other["state"].items()
    }
    assert_same_bits(
        {key: value for key, value in one["state"].items() if value},
        {key: value for key, value in theirs.items() if value},
    )


@pytest.mark.parametrize(
    ("world", "steps", "kinds", "options"),
    [
        *((world, 12, OPTIMIZERS, {"transport": "shm"}) for world in (1, 4)),
        *((world, 12, OPTIMIZERS, {"transport": "tcp"}) for world in (1, 4)),
        *((2, 50, OPTIMIZERS, {"transport": each}) for each in ("shm", "tcp")),
        (2, 12, ("momentum", "adamw"), {"transport": "shm", "overlap": "forward"}),
        (2, 12, ("momentum", "adamw"), {"transport": "shm", "overlap": False}),
        (2, 5, ("adam",), {"transport": "tcp", "gradient_dtype": "bf16"}),
        *(
            (2, 12, OPTIMIZERS, {"transport": transport, "overlap": overlap, "zero_copy": True})
            for transport in ("shm", "tcp")
            for overlap in ("backward", "forward", False)
        ),
    ],
)
def test_parameters_and_state_are_those_of_pytorch_to_the_bit(
    box, start, world, steps, kinds, options
):
    results = start(trains, world, kinds, steps, options).results()
    for kind in kinds:
        gradients, parameters, states = zip(*(result[kind] for result in results), strict=True)
        if "gradient_dtype" in options:
            gradients = [
                [{n: g.bfloat16().float() for n, g in step.items()} for step in of_rank]
                for of_rank in gradients
            ]
        net = make_net()
        optimizer = plain(net, kind)
        expected = replay(gradients, net, optimizer, schedule_of(optimizer))
        for each, state in zip(parameters, states, strict=True):
            assert_same_bits(each, expected)
            assert_same_state(state, optimizer.state_dict())
        if world > 1:  # or the ranks had the same batches
            assert not torch.equal(gradients[0][0]["2.weight"], gradients[1][0]["2.weight"])


@of_ranks(1)
def test_the_box_keeps_float32_for_parameters_of_16_bits(rank):
    net, optimizer = made(make_net().bfloat16())
    gradients = []
    for step in range(4):
        optimizer.zero_grad()
        net(torch.full((2, 12), step + 0.5, dtype=torch.bfloat16)).float().square().sum().backward()
        gradients.append({n: g.float() for n, g in gradients_of(net).items()})
        optimizer.step()
    alone = make_net().bfloat16().float()
    expected = replay([gradients], alone, plain(alone))
    assert_same_bits(parameters_of(net), {n: p.bfloat16() for n, p in expected.items()})


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


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.branches = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, inputs, used):
        return sum(self.branches[branch](inputs) for branch in used)


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
        optimizer.worker.barrier()
        optimizer.close()
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


# ---- Guards.


def total_of(weight: torch.Tensor):
    return weight.square().sum()


def uses_early(net, optimizer):
    """In C++, where no function of a tensor's class is called."""
    optimizer.step()
    torch.jit.script(total_of)(net[0].weight).backward()


def freezes(net, optimizer):
    optimizer.step()
    optimizer.zero_grad()
    net[2].weight.requires_grad_(requires_grad=False)
    loss_of(net, 0, 0).backward()


# Between backward() and step().
AFTER_BACKWARD = [
    (
        "the gradient of '.*' was changed after it was pushed.*server=False",
        lambda net, _: nn.utils.clip_grad_norm_(net.parameters(), 1e-3),
    ),
    (
        "the gradient of '.*' is gone.*zero_grad.*after step",
        lambda _, optimizer: optimizer.zero_grad(),
    ),
    (
        "the gradient of '.*' was changed after it was pushed.*zero_grad",
        lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    ),
    (
        "lr of group 1 was changed between backward.* from 0.004 to 0.5.*after",
        lambda _, optimizer: optimizer.param_groups[1].update(lr=0.5),
    ),
    (
        "gradient of '.*' was pushed already.*2 times.*accumulate=2.*no_sync.*GAN",
        lambda net, _: loss_of(net, 0, 1).backward(),
    ),
    ("'2.weight' was frozen", freezes),
    ("'0.weight' was used before its new value.*synchronize", uses_early),
    ("state_dict.. between.*after step", lambda _, optimizer: optimizer.state_dict()),
    (
        "keys of a job cannot change",
        lambda _, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    ),
]


def changes_parameters(net, optimizer):
    with torch.no_grad():
        net[2].weight.clamp_(-0.1, 0.1)
    loss_of(net, 0, 0).backward()
    optimizer.step()


def unfreezes(net, optimizer):
    net[0].bias.requires_grad_(requires_grad=True)
    loss_of(net, 0, 0).backward()
    optimizer.step()


def scales(net, optimizer, unscales=False):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(net, 0, 0)).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)


def unscales(net, optimizer):
    scales(net, optimizer, unscales=True)


def has_a_graph(net, optimizer):
    loss_of(net, 0, 0).backward(create_graph=True)
    optimizer.step()


def uses_the_past(net, optimizer):
    """A backward() that needs a parameter after its gradient was pushed."""
    inputs = torch.ones(2, 12, requires_grad=True)
    late = nn.functional.linear(inputs.square(), net[0].weight.detach())
    net(late[:, :12]).sum().backward()


WRONG_STEPS = [
    ("'2.weight' was changed by the program.*of the DistributedOptimizer", changes_parameters, {}),
    ("'0.bias' requires a gradient now", unfreezes, {}),
    ("torch's GradScaler.*phub.GradScaler.*phub.ddp.*bfloat16", scales, {}),
    ("torch's GradScaler", unscales, {}),
    ("torch's GradScaler", unscales, {"server": False}),
    (
        "the gradient of '.*' has a graph .create_graph=True.*zero_copy",
        has_a_graph,
        {"zero_copy": True},
    ),
    ("modified by an inplace operation", uses_the_past, {"zero_copy": True}),
]


def fails(act, message, *arguments):
    with pytest.raises(RuntimeError, match=message):
        act(*arguments)


@of_ranks(1)
def test_guards(rank):
    def changes_and_steps(change, net, optimizer):
        change(net, optimizer)
        optimizer.step()

    for number, (message, change) in enumerate(AFTER_BACKWARD):
        overlap = "forward" if change is uses_early else "backward"
        net, optimizer = made(job=job(number), overlap=overlap)
        loss_of(net, rank, 0).backward()
        fails(changes_and_steps, message, change, net, optimizer)
    for number, (message, makes_step, options) in enumerate(WRONG_STEPS):
        fails(makes_step, message, *made(job=job(f"wrong-{number}"), **options))


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


class Own(AdamW):
    pass


def of_two_groups(make):
    return lambda p: make([{"params": p[:1], "momentum": 0.9}, {"params": p[1:]}], 0.1)


def bfloat16(parameters):
    parameters[2].data = parameters[2].data.bfloat16()
    return AdamW(parameters)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Own, {}, "not of Own.*server=False"),
        (torch.optim.NAdam, {}, "not of NAdam.*server=False"),
        (lambda p: AdamW(p, amsgrad=True), {}, "group 0 has amsgrad=True.*server=False"),
        (lambda p: SGD(p, 0.1, maximize=True), {}, "maximize=True"),
        (lambda p: RMSprop(p, centered=True), {}, "centered=True"),
        (lambda p: Adagrad(p, initial_accumulator_value=1), {}, "initial_accumulator_value"),
        (of_two_groups(SGD), {}, "group 1 is"),
        (of_two_groups(RMSprop), {}, "momenta"),
        (lambda p: SGD([*p, nn.Parameter(torch.zeros(3))]), {}, "shape .3,. that is not the mod"),
        (AdamW, {"overlap": "both"}, "overlap"),
        (AdamW, {"accumulate": 0}, "overlap"),
        (AdamW, {"overlap": "forward", "server": False}, "overlap"),
        (AdamW, {"zero_copy": True, "server": False}, "zero_copy is for steps of the box"),
        (bfloat16, {"zero_copy": True}, "'2.weight' is torch.bfloat16.*torch.float32"),
        (torch.optim.LBFGS, {"server": False}, r"a step of LBFGS.*use phub\.ddp"),
        (AdamW, {"consistency": "async"}, "consistency='async'.*say 'bsp'"),
        (AdamW, {"server": False, "max_norm": 1.0}, "for steps of the box"),
        (
            AdamW,
            {"server": False, "on_nonfinite": "skip"},
            "keeps the gradients of the round before",
        ),
        (AdamW, {"schedule": {"lr": 0.1}}, "schedule has 'lr'.*lr_cosine"),
        (
            AdamW,
            {"server": False, "schedule": {"lr_cosine": 9}},
            "schedule is for steps of the box",
        ),
        (AdamW, {"server": "host:7717"}, "server='host:7717'.*box='HOST:PORT'"),
        (AdamW, {"memory_device": 0}, "is 0, and the parameters are on cpu"),
    ],
)
def test_what_cannot_be_is_refused(make, options, message):
    net = make_net()
    with pytest.raises(phub.InvalidError, match=message):
        phub.DistributedOptimizer(make(list(net.parameters())), net, **options)


def sets_another_rate(rank):
    net, optimizer = made()
    optimizer.param_groups[0]["lr"] = 0.5 + rank
    train(optimizer, net, rank, [0])


def test_ranks_with_different_rates_are_told(box, start):
    with pytest.raises(phub.MismatchError, match="sets lr@0 to .*the ranks of a job set the same"):
        start(sets_another_rate, 2).results()


# ---- Steps of the ranks' own.


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
