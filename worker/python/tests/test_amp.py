"""Loss scaling, against one process with torch's GradScaler on the mean of the gradients."""

import multiprocessing
import signal

import pytest
import torch
from conftest import SEED
from exact import assert_same_bits, exact_roots, mean
from models import make_net
from torch import nn

import phub

STEPS = 14
OVERFLOWS = {1: 0, 4: 1, 5: 1}  # a step, and the only rank whose gradients are infinite in it
SCALING = {"init_scale": 2.0**14, "growth_interval": 3}


def plain(net):
    return torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)


def loss_of(net, rank, step, dtype):
    random = torch.Generator().manual_seed(SEED + 1000 * step + rank)
    inputs = torch.randn(8, 12, generator=random).to(dtype)
    labels = torch.randint(5, (8,), generator=random)
    loss = nn.functional.cross_entropy(net(inputs).float(), labels)
    return loss * float("inf") if OVERFLOWS.get(step) == rank else loss


def parameters_of(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def gradients_of(net):
    return {n: p.grad.float() for n, p in net.named_parameters() if p.grad is not None}


def scaled(rank, dtype, options):
    """An optimizer and its scaler."""
    net = make_net().to(dtype)
    optimizer = phub.DistributedOptimizer(plain(net), net, on_nonfinite="skip", **options)
    return net, optimizer, phub.GradScaler(optimizer, **SCALING)


def trains(rank, dtype, options):
    net, optimizer, scaler = scaled(rank, dtype, options)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, rank, step, dtype)).backward()
        gradients = gradients_of(net)
        scaler.step(optimizer)
        scaler.update()
        optimizer.synchronize()
        seen.append((gradients, parameters_of(net), scaler.state_dict(), optimizer.skipped))
    optimizer.worker.barrier()
    optimizer.close()
    return seen


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("overlap", ["backward", "forward", False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_steps_and_scales_are_those_of_torch(box, start, dtype, overlap, ranks):
    options = {"overlap": overlap, "transport": "shm" if ranks == 2 else "tcp"}
    results = start(trains, ranks, dtype, options).results()
    net = make_net().to(dtype).float()  # the box's parameters are float32
    optimizer = plain(net)
    scaler = torch.amp.GradScaler("cpu", **SCALING)
    skips = 0
    for step, seen in enumerate(zip(*results, strict=True)):
        before = parameters_of(net)
        scaler.scale(torch.zeros(()))
        for name, parameter in net.named_parameters():
            if name in seen[0][0]:
                parameter.grad = mean([gradients[name] for gradients, *_ in seen])
        with exact_roots():
            scaler.step(optimizer)
        scaler.update()
        expected = {name: p.to(dtype) for name, p in parameters_of(net).items()}
        skipped = all(torch.equal(p, before[n]) for n, p in net.named_parameters())
        assert skipped or step not in OVERFLOWS
        skips += skipped
        for _, parameters, state, was_skipped in seen:
            assert was_skipped == skipped
            assert state == scaler.state_dict()
            assert_same_bits(parameters, expected)
    assert len(OVERFLOWS) <= skips < STEPS / 2


def goes_on(rank):
    _, _, scaler = scaled(rank, torch.float32, {})
    scaler.load_state_dict({**scaler.state_dict(), "scale": 512.0, "_growth_tracker": 2})
    before = scaler.get_scale()
    net, optimizer = scaler._optimizer._model, scaler._optimizer
    scaler.scale(loss_of(net, 1, 0, torch.float32)).backward()
    scaler.step(optimizer)
    scaler.update()
    return before, scaler.get_scale(), optimizer.grad_norm


def norm_without_scaling(rank):
    net = make_net()
    loss_of(net, 1, 0, torch.float32).backward()
    return nn.utils.get_total_norm(list(gradients_of(net).values())).item()


def test_a_saved_scale_goes_on(box, start):
    ((before, after, norm),) = start(goes_on, 1).results()
    assert (before, after) == (512, 1024)
    assert norm == pytest.approx(norm_without_scaling(0), rel=1e-5)


# ---- What would be wrong.


def pushed(rank, **options):
    net, optimizer, scaler = scaled(rank, torch.float32, options)
    scaler.scale(loss_of(net, 1, 0, torch.float32)).backward()
    return net, optimizer, scaler


def unscales(rank):
    _, optimizer, scaler = pushed(rank)
    scaler.unscale_(optimizer)


def updates_early(rank):
    _, optimizer, scaler = pushed(rank)
    scaler.update(2.0)
    scaler.step(optimizer)


def steps_another(rank):
    net, _, scaler = pushed(rank)
    scaler.step(plain(net))


def updates_without_step(rank):
    _, _, scaler = pushed(rank)
    scaler.update()


def steps_without_scale(rank):
    net, optimizer, scaler = scaled(rank, torch.float32, {})
    loss_of(net, 1, 0, torch.float32).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (unscales, "the box divides.*max_norm"),
        (updates_early, "the scale of the gradients was changed between.*to 2.0.*scaler.update"),
        (steps_another, "for the DistributedOptimizer that it was made of"),
        (updates_without_step, "update.. before step"),
        (steps_without_scale, "step.. before scale.."),
    ],
)
def test_guards(box, start, body, message):
    with pytest.raises(RuntimeError, match=message):
        start(body, 1).results()


def never_steps(rank):
    net = make_net()
    optimizer = phub.DistributedOptimizer(plain(net), net, on_nonfinite="skip")
    scaler = phub.GradScaler(optimizer, init_scale=2.0**-97)
    before = parameters_of(net)
    for step in range(3):  # to 2^-100, less than 1e-30
        optimizer.zero_grad()
        loss = loss_of(net, rank, step, torch.float32)
        scaler.scale(loss * float("nan") if rank == 0 else loss).backward()
        scaler.step(optimizer)
        if step < 2:
            scaler.update()
    with pytest.raises(RuntimeError, match="scale has become 8e-31.*look for it in the loss"):
        scaler.update()
    assert_same_bits(parameters_of(net), before)


def test_a_scaler_that_leaves_out_every_step_is_an_error(box, start):
    start(never_steps, 2).results()


def scales_what_cannot_be(rank, options):
    net = make_net()
    phub.GradScaler(phub.DistributedOptimizer(plain(net), net, **options))


@pytest.mark.parametrize("options", [{}, {"server": False}])
def test_optimizers_that_do_not_skip_are_refused(box, start, options):
    with pytest.raises(phub.InvalidError, match="on_nonfinite='skip' and server=True"):
        start(scales_what_cannot_be, 1, options).results()


def is_replaced(rank, begun, over):
    net, optimizer, scaler = scaled(rank, torch.float32, {})
    step = 0
    while not over.is_set():
        step += 1
        optimizer.zero_grad()
        scaler.scale(loss_of(net, rank, 100 + step, torch.float32)).backward()
        scaler.step(optimizer)
        scaler.update()
        if rank == 1:
            begun.set()
            signal.pause()


def test_a_rank_that_joins_later_does_not_guess_the_scale(box, start):
    context = multiprocessing.get_context("fork")
    begun, over = context.Event(), context.Event()
    ranks = start(is_replaced, 2, begun, over)
    assert begun.wait(60)
    ranks.kill(1)
    ranks.replace(1)
    with pytest.raises(phub.InvalidError, match="does not know the scale.*scaler=scaler"):
        ranks.result(1)
    over.set()
    ranks.result(0)
