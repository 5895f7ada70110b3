"""What exchanges gradients is set up, and never called: an error, before a rank trains alone."""

import contextlib
import copy
import ctypes
import gc
import io
import itertools
import os
import weakref
from pathlib import Path

import pytest
import torch
from conftest import of_ranks, refused
from exact import job, parameters_of
from models import descend
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import phub
from phub import _alone


def net_of(rank=0):
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def by_hand(net):
    class ByHand:
        @torch.no_grad()
        def step(self):
            for p in net.parameters():
                p -= 0.1 * p.grad

        def zero_grad(self):
            net.zero_grad()

    return ByHand()


OPTIMIZERS = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), 0.1),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), 0.1),
    "fused": lambda net: torch.optim.AdamW(net.parameters(), 0.1, fused=True),
    "by-hand": by_hand,
}


def step(forward, optimizer):
    descend(optimizer, forward(torch.ones(2, 4)).sum())


@pytest.mark.parametrize("way", ["not registered", "module"])
@of_ranks(1)
def test_the_second_backward_is_an_error(rank, way):
    for name, make in OPTIMIZERS.items():
        net = net_of()
        if way == "not registered":
            state, forward = phub.DDPState(net, job=name), net
        else:
            wrapped = phub.ddp(net, job=name)
            state, forward = wrapped.phub, wrapped.module
        optimizer = make(net)
        step(forward, optimizer)
        message = rf"'{name}': parameter '2\.bias' was changed.*not called.*register_comm_hook"
        refused(message, step, forward, optimizer)
        state.close()  # it has been said


@of_ranks(1)
def test_a_model_that_is_converted_after_ddp_is_told_so(rank):
    wrapped = phub.ddp(net_of(), job="converted")
    optimizer = OPTIMIZERS["sgd"](wrapped)
    wrapped.bfloat16()
    inputs = torch.ones(2, 4, dtype=torch.bfloat16)
    wrapped(inputs).sum().backward()
    optimizer.step()
    refused(r"convert the model \(bfloat16.*before", lambda: wrapped(inputs).sum().backward())


@of_ranks(1)
def test_close_is_an_error_without_any_exchange(rank):
    wrapped = phub.ddp(net_of(), job="module")
    step(wrapped.module, OPTIMIZERS["sgd"](wrapped))
    refused("no gradient.*never called.*no_sync", wrapped.phub.close)
    wrapped.phub.close()  # it has been said

    wrapped = phub.ddp(net_of(), job="no_sync")
    for _ in range(3):
        with wrapped.no_sync():
            step(wrapped, OPTIMIZERS["sgd"](wrapped))
    refused("leave the last one of each step outside", wrapped.phub.close)

    wrapped = phub.ddp(net_of(), job="error")
    step(wrapped.module, OPTIMIZERS["sgd"](wrapped))
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        wrapped.phub.close()  # does not hide it


def step_of_autograd_grad(forward, optimizer):
    parameters = list(forward.parameters())
    gradients = torch.autograd.grad(forward(torch.ones(2, 4)).sum(), parameters)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    optimizer.step()


@pytest.mark.parametrize(
    ("way", "expected"),
    [("no_sync", "was a backward()"), ("grad", "was a step()"), ("nothing", ""), ("well", "")],
)
@of_ranks(1)
def test_a_program_that_ends_without_any_exchange_and_close_is_told(rank, way, expected):
    wrapped = phub.ddp(net_of(), job=way)
    optimizer = OPTIMIZERS["sgd"](wrapped)
    if way == "no_sync":
        with wrapped.no_sync():
            step(wrapped, optimizer)
    if way == "grad":
        step_of_autograd_grad(wrapped, optimizer)
    if way == "well":
        step(wrapped, optimizer)
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        del wrapped, optimizer
        gc.collect()
    said = output.getvalue()
    assert expected in said
    begins = f"phub: job '{way}' ends and has exchanged no gradient"
    assert said.startswith(begins) == (expected != "")


@of_ranks(2)
def test_what_is_no_fault_is_no_error(rank):
    """Accumulation, steps of this rank's own before the first exchange, nothing, and a copy."""
    net = net_of(rank)
    wrapped = phub.ddp(net)
    optimizer = OPTIMIZERS["sgd"](net)
    for _ in range(3):
        with wrapped.no_sync():
            wrapped(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for _ in range(2):
        with wrapped.no_sync():
            step(wrapped, optimizer)
    other = copy.deepcopy(net)
    for _ in range(3):
        step(wrapped, optimizer)
        step(other, OPTIMIZERS["sgd"](other))
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())  # it costs nothing now
    wrapped.phub.close()
    ddp = DistributedDataParallel(net, process_group=_alone.Group())
    state = phub.DDPState(net, job="accumulates")
    ddp.register_comm_hook(state, phub.ddp_hook)
    for forward in (net, net, ddp):
        forward(torch.ones(2, 4)).sum().backward()
    state.close()
    phub.DDPState(net, job="nothing").close()
    return parameters_of(net)


@of_ranks(1)
def test_fsdp_with_another_hook_is_an_error(rank, tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    for steps in (1, 2):
        net = net_of()
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
        state = phub.FSDPState(net, rank=0, world_size=1)
        net.set_all_reduce_hook(lambda gradients: None)
        optimizer = OPTIMIZERS["sgd"](net)
        step(net, optimizer)
        if steps == 1:
            refused("all-reduce hook", state.close)
            continue
        refused(r"'model\[\d\]' was changed.*all-reduce hook", step, net, optimizer)
        state.close()
    distributed.destroy_process_group()


@of_ranks(1)
def test_a_model_wrapped_twice_is_an_error_and_a_compiled_one_is_exchanged(rank):
    inner = phub.ddp(net_of())
    outer = DistributedDataParallel(inner, process_group=_alone.Group())
    refused("within another DistributedDataParallel", outer, torch.ones(2, 4))
    optimizer = OPTIMIZERS["sgd"](inner)
    compiled = torch.compile(inner, backend="eager")
    for _ in range(3):
        step(compiled, optimizer)
    assert inner.phub.worker.round("0.weight") == 3
    inner.phub.close()


def at_box(net, make, name, **options):
    own = make(net)
    return own, phub.DistributedOptimizer(own, net, job=name, **options)


@of_ranks(1)
def test_steps_of_another_optimizer_are_an_error(rank):
    sgd = OPTIMIZERS["sgd"]
    for server, (name, make) in itertools.product((True, False), OPTIMIZERS.items()):
        net, job_name = net_of(), f"{name}-{server}"
        own, optimizer = at_box(net, sgd, job_name, overlap=False, server=server)
        other = make(net)
        step(net, own if name == "sgd" else other)
        changed = rf"'{job_name}': parameter '2\.bias' was changed"
        refused(rf"{changed}.*step\(\) of the Distrib.*not called", step, net, other)
        optimizer.close()  # it has been said

    net = net_of()
    own, optimizer = at_box(net, sgd, "close", overlap=False)
    step(net, own)
    refused("no gradient.*DistributedOptimizer was never called", optimizer.close)

    net = net_of()
    own, optimizer = at_box(net, sgd, "overlap")
    step(net, own)
    message = "pushed already.*not of the optimizer that it has"
    refused(message, step, net, own, error=RuntimeError)


# ---- A model whose training is over is freed, and the worker's memory, without a collection.

TURNS = 10
WIDTH = 1024  # 4 MiB
PAGE = os.sysconf("SC_PAGESIZE")

FORMS = {
    "backward": {},
    "forward": {"overlap": "forward"},
    "no overlap": {"overlap": False},
    "zero copy": {"zero_copy": True},
    "own steps": {"server": False},
    "factors": {"factors": {"0.weight": 4}},
    "skips": {"on_nonfinite": "skip"},
    "counts": {},
    "ddp": {},
}


def resident():
    ctypes.CDLL(None).malloc_trim(0)  # what free() keeps for later is no leak
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def turn(number, form, options):
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    if form == "ddp":
        model = phub.ddp(net, job=job(number))
        model(torch.ones(2, WIDTH)).sum().backward()
        model.phub.close()
        return weakref.ref(net), weakref.ref(model), weakref.ref(net[0].weight)
    local = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = phub.DistributedOptimizer(local, net, job=job(number), **options)
    scaler = phub.GradScaler(optimizer) if form == "skips" else None
    for _ in optimizer.steps(2) if form == "counts" else range(2):
        optimizer.zero_grad()
        loss = net(torch.ones(2, WIDTH)).sum()
        (scaler.scale(loss) if scaler else loss).backward()
        (scaler or optimizer).step(*[optimizer][: 1 if scaler else 0])
        if scaler:
            scaler.update()
    optimizer.close()
    with torch.no_grad():
        net[0].weight.zero_()
    return weakref.ref(net), weakref.ref(optimizer), weakref.ref(net[0].weight)


@pytest.mark.parametrize("form", FORMS)
@of_ranks(1)
def test_what_is_closed_is_freed(rank, form):
    turn("first", form, FORMS[form])
    gc.collect()
    gc.disable()
    before = 0
    for number in range(TURNS):
        assert [each() for each in turn(number, form, FORMS[form])] == [None, None, None]
        if number == 4:
            before = resident()
    assert resident() - before < 3 * 4 * WIDTH * WIDTH  # of 5 turns
