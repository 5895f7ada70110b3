"""Steps that the box scales, clips, leaves out or gives a rate by a formula, against torch's."""

import math
import signal

import pytest
import torch
from conftest import leave, of_ranks, pushed, refused
from deaths import FORK
from exact import assert_same_bits, gradients_of, job, parameters_of, replay, replayed
from models import loss_of, make_net, train
from torch import nn
from torch.optim import lr_scheduler

import phub

STEPS = 14
OVERFLOWS = {1: 0, 4: 1, 5: 1}  # a step, and the only rank whose gradients are infinite in it
SCALING = {"init_scale": 2.0**14, "growth_interval": 3}


def plain(net):
    return torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)


def made(dtype=torch.float32, scaling=SCALING, **options):
    """A net, its optimizer and a scaler."""
    net = make_net().to(dtype)
    options = {"on_nonfinite": "skip", **options}
    optimizer = phub.DistributedOptimizer(plain(net), net, **options)
    return net, optimizer, phub.GradScaler(optimizer, **scaling)


def overflowing(net, rank, step):
    loss = loss_of(net, rank, step)
    return loss * float("inf") if OVERFLOWS.get(step) == rank else loss


def in_float32(gradients):
    return {name: gradient.float() for name, gradient in gradients.items()}


def trains(rank, dtype, scaling, options):
    """Gradients, and after each step: parameters, scale, whether it was left out, norm."""
    net, optimizer, scaler = made(dtype, scaling, **options)
    assert optimizer.grad_norm is None
    assert not optimizer.skipped
    gradients, seen = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(overflowing(net, rank, step)).backward()
        gradients.append(in_float32(gradients_of(net)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.synchronize()
        word = scaler.state_dict(), optimizer.skipped, optimizer.grad_norm
        seen.append((parameters_of(net), *word))
    (steps,) = {int(s["step"]) for s in optimizer.state_dict()["state"].values()}
    assert steps == STEPS - sum(skipped for *_, skipped, _ in seen)
    leave(optimizer)
    return gradients, seen


class Scaled:
    """An optimizer and torch's scaler, which has made no step yet."""

    def __init__(self, optimizer):
        self.optimizer, self.scaler = optimizer, torch.amp.GradScaler("cpu", **SCALING)

    def step(self):
        self.scaler.scale(torch.zeros(()))
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("overlap", ["backward", "forward", False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_steps_and_scales_are_those_of_torch(box, start, dtype, overlap, ranks):
    options = {"overlap": overlap, "transport": "shm" if ranks == 2 else "tcp"}
    gradients, seen = zip(*start(trains, ranks, dtype, SCALING, options).results(), strict=True)
    net = make_net().to(dtype).float()  # the box's parameters are float32
    scaled = Scaled(plain(net))
    before, skips = parameters_of(net), 0
    for step, _ in enumerate(replayed(gradients, net, scaled)):
        skipped = all(torch.equal(p, before[n]) for n, p in net.named_parameters())
        assert skipped or step not in OVERFLOWS
        skips += skipped
        before = parameters_of(net)
        expected = {name: p.to(dtype) for name, p in before.items()}
        for of_rank in seen:
            assert_same_bits(of_rank[step][:3], (expected, scaled.scaler.state_dict(), skipped))
    assert len(OVERFLOWS) <= skips < STEPS / 2


@of_ranks(1)
def test_a_saved_scale_goes_on(rank):
    net, optimizer, scaler = made()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 512.0, "_growth_tracker": 2})
    assert scaler.get_scale() == 512
    scaler.scale(loss_of(net, 1, 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1024
    alone = make_net()
    loss_of(alone, 1, 0).backward()
    norm = nn.utils.get_total_norm(list(gradients_of(alone).values())).item()
    assert optimizer.grad_norm == pytest.approx(norm, rel=1e-5)


# ---- Clipping.


def first_norm(ranks):
    """Of the ranks' mean gradient in the first step."""
    net = make_net()
    for rank in range(ranks):
        (loss_of(net, rank, 0) / ranks).backward()
    return nn.utils.clip_grad_norm_(net.parameters(), float("inf")).item()


class Clipped:
    """An optimizer that clips before its steps, and leaves out those that are not finite."""

    def __init__(self, net, max_norm):
        self.net, self.optimizer, self.max_norm, self.clipped = net, plain(net), max_norm, 0

    def step(self):
        parameters = [p for p in self.net.parameters() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(parameters, self.max_norm, foreach=False)
        self.norm, self.skipped = norm.item(), not torch.isfinite(norm)
        self.clipped += self.max_norm < self.norm < float("inf")
        if not self.skipped:
            self.optimizer.step()


@pytest.mark.parametrize("overlap", ["backward", "forward"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_steps_are_clipped_and_skipped_as_pytorch_does(box, start, transport, overlap):
    max_norm = 0.9 * first_norm(2)  # the first step is clipped
    options = {"max_norm": max_norm, "transport": transport, "overlap": overlap}
    unscaled = torch.float32, {"enabled": False}
    gradients, seen = zip(*start(trains, 2, *unscaled, options).results(), strict=True)
    assert_same_bits([each[0] for each in seen[0]], [each[0] for each in seen[1]])
    net = make_net()
    clipped = Clipped(net, max_norm)
    for step, _ in enumerate(replayed(gradients, net, clipped)):
        for parameters, _, was_skipped, grad_norm in (of_rank[step] for of_rank in seen):
            assert was_skipped == (step in OVERFLOWS) == clipped.skipped
            assert was_skipped or grad_norm == pytest.approx(clipped.norm, rel=1e-6)
            torch.testing.assert_close(parameters, parameters_of(net), rtol=1e-5, atol=1e-6)
    assert clipped.clipped > 0


@of_ranks(1)
def test_a_worker_is_told_the_norm(rank):
    with phub.Worker({"w": 4}, optimizer="sgd", hyper={"lr": 1, "max_norm": 1}) as worker:
        assert worker.verdict is None
        assert pushed(worker, "w", 2) == pytest.approx([-0.5] * 4)
        assert worker.verdict == phub.Verdict(round=1, norm=4.0, skipped=False)


# ---- What would be wrong.


def updates_early(_net, optimizer, scaler):
    scaler.update(2.0)
    scaler.step(optimizer)


GUARDS = [
    ("the box divides.*max_norm", lambda _, optimizer, scaler: scaler.unscale_(optimizer)),
    ("the scale of the gradients was changed between.*to 2.0.*scaler.update", updates_early),
    (
        "for the DistributedOptimizer that it was made of",
        lambda net, _, scaler: scaler.step(plain(net)),
    ),
    ("update.. before step", lambda _, optimizer, scaler: scaler.update()),
]


@of_ranks(1)
def test_guards(rank):
    for number, (message, act) in enumerate(GUARDS):
        net, optimizer, scaler = made(job=job(number))
        scaler.scale(loss_of(net, 1, 0)).backward()
        refused(message, act, net, optimizer, scaler, error=RuntimeError)
    net, optimizer, scaler = made(scaling={"device": "cpu"}, job=job("scale"))
    assert scaler.get_scale() == 65536.0
    loss_of(net, 1, 0).backward()
    refused("step.. before scale..", scaler.step, optimizer, error=RuntimeError)
    refused("on device 'cpu'", made, scaling={"device": "cuda"}, job=job("cuda"))
    for server in (True, False):
        options = {"server": server, "job": job(server)}
        optimizer = phub.DistributedOptimizer(plain(net), net, **options)
        refused("='skip' and server=True", phub.GradScaler, optimizer)


@of_ranks(2)
def test_a_scaler_that_leaves_out_every_step_is_an_error(rank):
    net, optimizer, scaler = made(scaling={"init_scale": 2.0**-97})
    before = parameters_of(net)
    for step in range(3):  # to 2^-100, less than 1e-30
        optimizer.zero_grad()
        loss = loss_of(net, rank, step)
        scaler.scale(loss * float("nan") if rank == 0 else loss).backward()
        scaler.step(optimizer)
        if step < 2:
            scaler.update()
    message = "scale has become 8e-31.*look for it in the loss"
    refused(message, scaler.update, error=RuntimeError)
    assert_same_bits(parameters_of(net), before)


def is_replaced(rank, begun, over):
    net, optimizer, scaler = made()
    step = 0
    while not over.is_set():
        step += 1
        optimizer.zero_grad()
        scaler.scale(loss_of(net, rank, 100 + step)).backward()
        scaler.step(optimizer)
        scaler.update()
        if rank == 1:
            begun.set()
            signal.pause()


def test_a_rank_that_joins_later_does_not_guess_the_scale(box, start):
    begun, over = FORK.Event(), FORK.Event()
    ranks = start(is_replaced, 2, begun, over)
    assert begun.wait(60)
    ranks.kill(1)
    ranks.replace(1)
    refused("does not know the scale.*scaler=scaler", ranks.result, 1)
    over.set()
    ranks.result(0)


# ---- Rates by a formula.

# Our settings, and the factor of the rate after n steps: what LambdaLR multiplies `lr` by.
WARM_UP = {"lr_warmup": 5, "lr_warmup_from": 0.25}
CLOSED_FORMS = [
    ({"lr_exponential": 0.9}, lambda n: math.pow(0.9, n)),
    ({"lr_inverse": 0.25, "lr_inverse_power": 0.75}, lambda n: math.pow(1 + 0.25 * n, -0.75)),
    ({"lr_polynomial": 9, "lr_polynomial_power": 2}, lambda n: math.pow(1 - min(n / 9, 1), 2)),
    (
        {"lr_cosine": 11, "lr_end": 0.125},
        lambda n: 0.125 + (1 - 0.125) * ((1 + math.cos(math.pi * min(n / 11, 1))) / 2),
    ),
    (
        {**WARM_UP, "lr_exponential": 0.5},
        lambda n: 0.25 + (1 - 0.25) * (n / 5) if n < 5 else math.pow(0.5, n - 5),
    ),
]


def warmed_up(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.25, 1.0, 5)]
    parts.append(lr_scheduler.CosineAnnealingLR(optimizer, 9))
    return lr_scheduler.SequentialLR(optimizer, parts, [5])


# PyTorch computes a rate from the one before, or in another form: nearly the same bits.
SCHEDULERS = [
    ({"lr_exponential": 0.9}, lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    (
        {"lr_polynomial": 9, "lr_polynomial_power": 2},
        lambda o: lr_scheduler.PolynomialLR(o, 9, 2),
    ),
    ({"lr_polynomial": 9, "lr_end": 0.5}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.5, 9)),
    ({"lr_cosine": STEPS}, lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS)),
    ({**WARM_UP, "lr_cosine": 9}, warmed_up),
]


def of_two_groups(net):
    parameters = list(net.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.004}]
    return torch.optim.AdamW(groups, 1e-2, foreach=False)


def trains_by(rank, schedules, overlap):
    results = []
    for number, schedule in enumerate(schedules):
        net = make_net()
        optimizer = phub.DistributedOptimizer(
            of_two_groups(net), net, overlap=overlap, schedule=schedule, job=job(number)
        )
        rates = [group["lr"] for group in optimizer.param_groups]
        gradients = train(optimizer, net, rank, range(STEPS))
        optimizer.synchronize()
        assert [group["lr"] for group in optimizer.param_groups] == rates
        results.append((gradients, parameters_of(net)))
        leave(optimizer)
    return results


@pytest.mark.parametrize(
    ("overlap", "closed"), [("backward", True), ("forward", True), ("backward", False)]
)
def test_rates_are_those_of_the_closed_forms_and_nearly_pytorchs(box, start, overlap, closed):
    """The closed forms to the bit, each beside the settings in one process."""
    table = CLOSED_FORMS if closed else SCHEDULERS
    ranks = start(trains_by, 2, [settings for settings, _ in table], overlap).results()
    for (_, make), *results in zip(table, *ranks, strict=True):
        gradients, parameters = zip(*results, strict=True)
        net = make_net()
        optimizer = of_two_groups(net)
        schedule = lr_scheduler.LambdaLR(optimizer, make) if closed else make(optimizer)
        expected = replay(gradients, net, optimizer, schedule)
        for each in parameters:
            if closed:
                assert_same_bits(each, expected)
            else:
                torch.testing.assert_close(each, expected, rtol=1e-6, atol=1e-7)
