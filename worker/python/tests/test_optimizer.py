"""Trainings whose steps the box makes, compared with PyTorch's optimizers in one process."""

import copy
import os
from unittest.mock import Mock

import pytest
import torch
from exact import assert_same_bits, exact_roots, mean
from models import loss_of, make_net
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


def plain(kind, net):
    """Two groups: matrices with decay, and the rest with another rate."""
    make, options = OPTIMIZERS[kind]
    matrices = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.004}]
    return make(groups, **options, foreach=False)


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)


def unscheduled(optimizer):
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


def gradients_of(net):
    return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


def parameters_of(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def job(name):
    return f"{os.environ['PHUB_JOB']}-{name}"[:200]


def trains(rank, kinds, transport, steps, options):
    results = {}
    for kind in kinds:
        net = make_net()
        with torch.no_grad():
            net[2].weight.add_(rank)  # rank 0's count
        optimizer = phub.DistributedOptimizer(
            plain(kind, net), net, accumulate=2, transport=transport, job=job(kind), **options
        )
        assert optimizer.worker.connection.startswith(transport)
        assert is_view(net[2].weight, optimizer) == options.get("zero_copy", False)
        assert "0.bias" not in optimizer.worker.keys
        schedule = schedule_of(optimizer)
        gradients = []
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(2):
                loss_of(net, rank, 2 * step + part).backward()
            gradients.append(gradients_of(net))
            optimizer.step()
            schedule.step()
        optimizer.synchronize()
        results[kind] = gradients, parameters_of(net), optimizer.state_dict()
        optimizer.worker.barrier()
        optimizer.close()
        with torch.no_grad():
            net[2].weight.zero_()  # it is the program's own again
    return results


def is_view(parameter, optimizer):
    there = torch.frombuffer(optimizer.worker.parameters("2.weight"), dtype=torch.float32)
    return parameter.data_ptr() == there.data_ptr()


def replay(gradients_of_ranks, net, optimizer, schedule):
    """One process, with the gradients of all ranks."""
    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    with exact_roots():
        for steps in zip(*gradients_of_ranks, strict=True):
            for name, parameter in net.named_parameters():
                if name in steps[0]:
                    parameter.grad = mean([step[name] for step in steps])
            optimizer.step()
            schedule.step()


def assert_same_state(one, other):
    assert one["param_groups"] == other["param_groups"]
    ours = {key: value for key, value in one["state"].items() if value}
    theirs = {
        key: {n: v for n, v in s.items() if v is not None} for key, s in other["state"].items()
    }
    theirs = {key: value for key, value in theirs.items() if value}
    assert ours.keys() == theirs.keys()
    for key, state in ours.items():
        assert_same_bits(state, theirs[key])


def check(results, kinds):
    for kind in kinds:
        gradients, parameters, states = zip(*(result[kind] for result in results), strict=True)
        net = make_net()
        optimizer = plain(kind, net)
        replay(gradients, net, optimizer, schedule_of(optimizer))
        for each, state in zip(parameters, states, strict=True):
            assert_same_bits(each, parameters_of(net))
            assert_same_state(state, optimizer.state_dict())
        if len(results) > 1:  # or the ranks had the same batches
            assert not torch.equal(gradients[0][0]["2.weight"], gradients[1][0]["2.weight"])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_parameters_and_state_are_those_of_pytorch_to_the_bit(box, start, transport, world):
    results = start(trains, world, tuple(OPTIMIZERS), transport, 50, {}).results()
    check(results, OPTIMIZERS)


@pytest.mark.parametrize("overlap", ["forward", False])
def test_any_overlap_gives_the_same_bits(box, start, overlap):
    kinds = ("momentum", "adamw")
    results = start(trains, 2, kinds, "shm", 12, {"overlap": overlap}).results()
    check(results, kinds)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("overlap", ["backward", "forward", False])
def test_parameters_that_are_not_copied_have_the_same_bits(box, start, transport, overlap):
    options = {"overlap": overlap, "zero_copy": True}
    results = start(trains, 2, tuple(OPTIMIZERS), transport, 12, options).results()
    check(results, OPTIMIZERS)


def test_gradients_are_converted_on_their_way(box, start):
    options = {"gradient_dtype": "bf16"}
    results = start(trains, 2, ("adam",), "tcp", 5, options).results()
    for result in results:
        gradients = result["adam"][0]
        gradients[:] = [{n: g.bfloat16().float() for n, g in step.items()} for step in gradients]
    check(results, ("adam",))


def trains_in_bfloat16(rank):
    net = make_net().bfloat16()
    optimizer = phub.DistributedOptimizer(plain("adamw", net), net)
    gradients = []
    for step in range(4):
        optimizer.zero_grad()
        net(torch.full((2, 12), step + 0.5, dtype=torch.bfloat16)).float().square().sum().backward()
        gradients.append({n: g.float() for n, g in gradients_of(net).items()})
        optimizer.step()
    return gradients, parameters_of(net)


def test_the_box_keeps_float32_for_parameters_of_16_bits(box, start):
    ((gradients, parameters),) = start(trains_in_bfloat16, 1).results()
    net = make_net().bfloat16().float()
    optimizer = plain("adamw", net)
    replay([gradients], net, optimizer, unscheduled(optimizer))
    assert_same_bits(parameters, {n: p.bfloat16() for n, p in parameters_of(net).items()})


def joins_late(rank):
    nets, gradients = [make_net(), make_net()], []
    with torch.no_grad():
        nets[1][2].weight.zero_()

    def train(optimizers, step):
        for each, (net, optimizer) in enumerate(zip(nets, optimizers, strict=False)):
            optimizer.zero_grad()
            loss_of(net, each, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        gradients.append([gradients_of(net) for net in nets[: len(optimizers)]])

    def made_of(net, rank):
        return phub.DistributedOptimizer(plain("adamw", net), net, max_ranks=2, rank=rank)

    first = made_of(nets[0], 0)
    train([first], 0)
    first.param_groups[0]["lr"] = 0.02
    train([first], 1)
    second = made_of(nets[1], 1)
    assert_same_bits(parameters_of(nets[0]), parameters_of(nets[1]))
    train([first, second], 2)
    first.param_groups[0]["lr"] = second.param_groups[0]["lr"] = 0.005
    train([first, second], 3)
    assert_same_bits(parameters_of(nets[0]), parameters_of(nets[1]))
    return gradients, parameters_of(nets[0])


def test_a_rank_that_joins_later_takes_what_the_job_has(box, start):
    ((gradients, parameters),) = start(joins_late, 1).results()
    net = make_net()
    optimizer = plain("adamw", net)
    for of_ranks, rate in zip(gradients, (1e-2, 0.02, 0.02, 0.005), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        replay([[of_rank] for of_rank in of_ranks], net, optimizer, unscheduled(optimizer))
    assert_same_bits(parameters, parameters_of(net))


def has_an_unused_module(rank, overlap):
    net = make_net()
    net.unused = nn.Linear(2, 2)
    net.forward = lambda x: net[2](net[1](net[0](x)))
    optimizer = SGD(net.parameters(), 0.1)
    optimizer = phub.DistributedOptimizer(optimizer, net, overlap=overlap, job=job(overlap))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()
    optimizer.synchronize()
    return parameters_of(net)


def test_modules_may_be_unused(box, start):
    one, other = (start(has_an_unused_module, 2, o).results() for o in ("backward", "forward"))
    for each in (*one, *other):
        assert_same_bits(each, one[0])


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
        net = Branches()
        optimizer = phub.DistributedOptimizer(plain(kind, net), net, unused="skip", job=job(kind))
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
    for kind, *of_ranks in zip(kinds, *ranks, strict=True):
        net = Branches()
        optimizer = plain(kind, net)
        zeros = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        for steps in zip(*(gradients for gradients, _, _ in of_ranks), strict=True):
            for p in net.parameters():
                p.grad = None
            used = set().union(*steps)
            whole = [{n: step.get(n, zeros[n]) for n in used} for step in steps]
            replay([[step] for step in whole], net, optimizer, Mock())
        for _, parameters, state in of_ranks:
            assert_same_bits(parameters, parameters_of(net))
            assert_same_state(state, optimizer.state_dict())


# ---- Accumulation and state.


def accumulates_without_sync(rank):
    net = make_net()
    optimizer = phub.DistributedOptimizer(plain("adamw", net), net)
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(net, rank, 2 * step).backward()
            assert not any(mine.pushed for mine in optimizer._mine)
        loss_of(net, rank, 2 * step + 1).backward()
        assert all(mine.pushed for mine in optimizer._mine)
        optimizer.step()
    return optimizer.worker.round("0.weight")


def test_no_sync_accumulates(box, start):
    assert start(accumulates_without_sync, 2).results() == [3, 3]


def goes_on(rank, kind, **options):
    """Three steps at the box, three in plain PyTorch, three at another job."""
    net = make_net()
    gradients = []

    def train(optimizer, first):
        for step in range(first, first + 3):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            gradients.append(gradients_of(net))
            optimizer.step()

    one = phub.DistributedOptimizer(plain(kind, net), net, job=job("one"), **options)
    train(one, 0)
    local = plain(kind, net)
    local.load_state_dict(one.state_dict())
    one.close()
    with exact_roots():
        train(local, 3)
    two = phub.DistributedOptimizer(local, net, job=job("two"), **options)
    train(two, 6)
    saved, model = copy.deepcopy(two.state_dict()), copy.deepcopy(net.state_dict())
    train(two, 9)  # in vain
    del gradients[9:]
    net.load_state_dict(model)
    two.load_state_dict(saved)
    assert two.optimizer.param_groups is two.param_groups
    train(two, 9)
    state = two.state_dict()
    two.close()
    return gradients, parameters_of(net), state


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_goes_to_pytorch_and_back(box, start, kind):
    ((gradients, parameters, state),) = start(goes_on, 1, kind).results()
    net = make_net()
    optimizer = plain(kind, net)
    replay([gradients], net, optimizer, unscheduled(optimizer))
    assert_same_bits(parameters, parameters_of(net))
    state["param_groups"] = optimizer.state_dict()["param_groups"]  # without a schedule's
    assert_same_state(state, optimizer.state_dict())


def goes_on_without_copies(rank):
    return goes_on(rank, "adamw", zero_copy=True)


def test_models_whose_parameters_are_not_copied_can_be_loaded(box, start):
    ((gradients, parameters, _),) = start(goes_on_without_copies, 1).results()
    net = make_net()
    optimizer = plain("adamw", net)
    replay([gradients], net, optimizer, unscheduled(optimizer))
    assert_same_bits(parameters, parameters_of(net))


# ---- Guards.


def pushed(rank, net=None, **options):
    net = net or make_net()
    optimizer = phub.DistributedOptimizer(plain("adamw", net), net, **options)
    loss_of(net, rank, 0).backward()
    return net, optimizer


def clips(rank):
    net, optimizer = pushed(rank)
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    optimizer.step()


def scales(rank, unscales=False, **options):
    net = make_net()
    optimizer = phub.DistributedOptimizer(plain("adamw", net), net, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(net, rank, 0)).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)


def unscales(rank):
    scales(rank, unscales=True)


def scales_for_its_own_step(rank):
    scales(rank, unscales=True, server=False)


def zeroes(rank):
    _, optimizer = pushed(rank)
    optimizer.zero_grad()
    optimizer.step()


def zeroes_in_place(rank):
    _, optimizer = pushed(rank)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def schedules_early(rank):
    _, optimizer = pushed(rank)
    optimizer.param_groups[1]["lr"] = 0.5
    optimizer.step()


def pushes_twice(rank):
    net, _ = pushed(rank)
    loss_of(net, rank, 1).backward()


def changes_parameters(rank):
    net = make_net()
    optimizer = phub.DistributedOptimizer(plain("adamw", net), net)
    with torch.no_grad():
        net[2].weight.clamp_(-0.1, 0.1)
    loss_of(net, rank, 0).backward()
    optimizer.step()


def freezes(rank):
    net, optimizer = pushed(rank)
    optimizer.step()
    optimizer.zero_grad()
    net[2].weight.requires_grad_(requires_grad=False)
    loss_of(net, rank, 0).backward()
    optimizer.step()


def unfreezes(rank):
    net = make_net()
    optimizer = phub.DistributedOptimizer(plain("adamw", net), net)
    net[0].bias.requires_grad_(requires_grad=True)
    loss_of(net, rank, 0).backward()
    optimizer.step()


def total_of(weight: torch.Tensor):
    return weight.square().sum()


def uses_early(rank):
    """In C++, where no function of a tensor's class is called."""
    net, optimizer = pushed(rank, overlap="forward")
    optimizer.step()
    torch.jit.script(total_of)(net[0].weight).backward()


def has_a_graph(rank):
    net = make_net()
    optimizer = phub.DistributedOptimizer(plain("adamw", net), net, zero_copy=True)
    loss_of(net, rank, 0).backward(create_graph=True)
    optimizer.step()


def uses_the_past(rank):
    """A backward() that needs a parameter after its gradient was pushed."""
    net = make_net()
    phub.DistributedOptimizer(plain("adamw", net), net, zero_copy=True)
    inputs = torch.ones(2, 12, requires_grad=True)
    late = nn.functional.linear(inputs.square(), net[0].weight.detach())
    net(late[:, :12]).sum().backward()


def reads_state_early(rank):
    _, optimizer = pushed(rank)
    optimizer.state_dict()


def adds_group(rank):
    _, optimizer = pushed(rank)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (clips, "the gradient of '.*' was changed after it was pushed.*server=False"),
        (scales, "torch's GradScaler.*phub.GradScaler.*phub.ddp.*bfloat16"),
        (unscales, "torch's GradScaler"),
        (scales_for_its_own_step, "torch's GradScaler"),
        (zeroes, "the gradient of '.*' is gone.*zero_grad.*after step"),
        (zeroes_in_place, "the gradient of '.*' was changed after it was pushed.*zero_grad"),
        (schedules_early, "lr of group 1 was changed between backward.* from 0.004 to 0.5.*after"),
        (
            pushes_twice,
            "gradient of '.*' was pushed already.*2 times.*accumulate=2.*no_sync.*GAN",
        ),
        (changes_parameters, "'2.weight' was changed by the program.*of the DistributedOptimizer"),
        (freezes, "'2.weight' was frozen"),
        (unfreezes, "'0.bias' requires a gradient now"),
        (uses_early, "'0.weight' was used before its new value.*synchronize"),
        (has_a_graph, "the gradient of '.*' has a graph .create_graph=True.*zero_copy"),
        (uses_the_past, "modified by an inplace operation"),
        (reads_state_early, "state_dict.. between.*after step"),
        (adds_group, "keys of a job cannot change"),
    ],
)
def test_guards(box, start, body, message):
    with pytest.raises(RuntimeError, match=message):
        start(body, 1).results()


def gradients_may_change_before_step(rank):
    net, optimizer = pushed(rank, overlap=False)
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    optimizer.param_groups[0]["lr"] = 0.5
    clipped = gradients_of(net)
    optimizer.step()
    assert_same_bits(gradients_of(net), clipped)  # they stay
    return [clipped], parameters_of(net)


def test_without_overlap_gradients_may_change(box, start):
    ((gradients, parameters),) = start(gradients_may_change_before_step, 1).results()
    net = make_net()
    optimizer = plain("adamw", net)
    optimizer.param_groups[0]["lr"] = 0.5
    replay([gradients], net, optimizer, schedule_of(optimizer))
    assert_same_bits(parameters, parameters_of(net))


class Own(AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Own(p), "not of Own.*server=False"),
        (lambda p: torch.optim.NAdam(p), "not of NAdam.*server=False"),
        (lambda p: AdamW(p, amsgrad=True), "group 0 has amsgrad=True.*server=False"),
        (lambda p: SGD(p, 0.1, maximize=True), "maximize=True"),
        (lambda p: RMSprop(p, centered=True), "centered=True"),
        (lambda p: Adagrad(p, initial_accumulator_value=1), "initial_accumulator_value"),
        (lambda p: SGD([{"params": p[:1], "momentum": 0.9}, {"params": p[1:]}], 0.1), "group 1 is"),
        (lambda p: RMSprop([{"params": p[:1], "momentum": 0.9}, {"params": p[1:]}]), "momenta"),
        (lambda p: SGD([*p, nn.Parameter(torch.zeros(3))], 0.1), "shape .3,. that is not the mod"),
    ],
)
def test_what_the_box_cannot_do_is_refused(make, message):
    net = make_net()
    with pytest.raises(phub.InvalidError, match=message):
        phub.DistributedOptimizer(make(list(net.parameters())), net)


def test_wrong_options_are_refused():
    net = make_net()
    for wrong in ({"overlap": "both"}, {"accumulate": 0}, {"overlap": "forward", "server": False}):
        with pytest.raises(phub.InvalidError, match="overlap"):
            phub.DistributedOptimizer(plain("adamw", net), net, **wrong)


def test_parameters_that_cannot_be_views_are_refused():
    net = make_net()
    with pytest.raises(phub.InvalidError, match="zero_copy is for steps of the box"):
        phub.DistributedOptimizer(plain("adamw", net), net, zero_copy=True, server=False)
    net[2].bfloat16()
    with pytest.raises(phub.InvalidError, match="'2.weight' is torch.bfloat16.*torch.float32"):
        phub.DistributedOptimizer(plain("adamw", net), net, zero_copy=True)


def test_lbfgs_is_for_ddp():
    net = make_net()
    with pytest.raises(phub.InvalidError, match=r"a step of LBFGS.*use phub\.ddp"):
        phub.DistributedOptimizer(torch.optim.LBFGS(net.parameters()), net, server=False)


def test_jobs_out_of_lock_step_are_refused():
    net = make_net()
    with pytest.raises(phub.InvalidError, match="consistency='async'.*say 'bsp'"):
        phub.DistributedOptimizer(plain("adamw", net), net, consistency="async")


def sets_another_rate(rank):
    net = make_net()
    optimizer = phub.DistributedOptimizer(plain("adamw", net), net)
    optimizer.param_groups[0]["lr"] = 0.5 + rank
    loss_of(net, rank, 0).backward()
    optimizer.step()


def test_ranks_with_different_rates_are_told(box, start):
    ranks = start(sets_another_rate, 2, PHUB_JOB="rates")
    with pytest.raises(phub.MismatchError, match="sets lr@0 to .*the ranks of a job set the same"):
        ranks.results()


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
    return gradients, parameters_of(net), optimizer.state_dict(), norms


def test_ranks_make_any_step_themselves(box, start):
    gradients, parameters, states, norms = zip(*start(steps_itself, 2).results(), strict=True)
    net = make_net()
    optimizer = Own(net.parameters(), foreach=False)
    replay(gradients, net, optimizer, unscheduled(optimizer))
    for each, state in zip(parameters, states, strict=True):
        assert_same_bits(each, parameters_of(net))
        assert state["state"].keys() == optimizer.state_dict()["state"].keys()
    assert norms[0] == norms[1]  # of the mean


# ---- When a rank dies.


def dies(rank, steps):
    net = make_net()
    optimizer = phub.DistributedOptimizer(plain("adamw", net), net)
    schedule = schedule_of(optimizer)
    for step in range(steps):
        if rank == 0 and step == 4:
            os._exit(1)
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()
        schedule.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    return rates, parameters_of(net)


def test_the_others_go_on_and_set_the_rates(box, start):
    ranks = start(dies, 3, 10)
    one, other = ranks.result(1), ranks.result(2)
    assert one[0] == other[0] != [1e-2, 0.004]
    assert_same_bits(one[1], other[1])
