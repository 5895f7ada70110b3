"""Every option of the C interface × every form that hands gradients to the program's optimizer.

Either the gradient is right, or the option is refused by name.
"""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import phub

HEADER = Path(__file__).resolve().parents[3] / "worker" / "phub.h"
# Of each option, values that are not its default. `server` is `box` in Python, and the box's.
VALUES = {
    "server": [],
    "token": ["t"],
    "job": ["another"],
    "transport": ["tcp"],
    "rank": [0],
    "replace": [1],
    "await_ranks": [1],
    "connect_timeout_ms": [9_000],
    "wait_timeout_ms": [90_000],
    "rejoin_limit_ms": [1],
    "silence_limit_ms": [90_000],
    "spin_us": [5],
    "local_world_size": [1],
    "nic_budget": ["1gbit"],
    "send_order": ["magnitude"],
    "carry_over": [2],
    "trace": ["trace.json"],
    "trace_events": [1000],
    "world_size": [1],
    "min_ranks": [1],
    "max_ranks": [2],
    "chunk_elements": [64],
    "optimizer": ["sgd", "adamw", "fold"],
    "gradient_dtype": ["bf16", "int8"],
    "rounding": ["stochastic"],
    "parameter_dtype": ["bf16", "int8"],
    "reduction": ["sum"],
    "groups": ["1"],
    "work": ["none", "sum"],
    "consistency": ["ssp", "async"],
    "slack": [1],
    "initial": ["zeros"],
    "on_loss": ["fail"],
    "on_nonfinite": ["exclude", "skip"],
    "unused": ["skip"],
    "branches": [1],
    "lease_ms": [4_000],
    "progress_limit_ms": [90_000],
    "wait_limit_ms": [90_000],
    "join_limit_ms": [90_000],
}
MUST_REFUSE = {"optimizer", "work", "consistency", "slack"}


def net_of_100():
    net = torch.nn.Linear(2, 1, bias=False)
    net.weight.data.fill_(100.0)
    return net


def of_ddp(**options):
    wrapped = phub.ddp(net_of_100(), **options)
    return wrapped, wrapped.module.weight, wrapped.phub.close, lambda: None


def of_hook(**options):
    if not distributed.is_initialized():
        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    wrapped = DistributedDataParallel(net_of_100())
    state = phub.DDPState(wrapped.module, **options)
    wrapped.register_comm_hook(state, phub.ddp_hook)
    return wrapped, wrapped.module.weight, state.close, lambda: None


def of_optimizer(**options):
    net = net_of_100()
    plain = torch.optim.SGD(net.parameters(), 0.0)
    optimizer = phub.DistributedOptimizer(plain, net, server=False, **options)
    return net, net.weight, optimizer.close, optimizer.step


def of_fsdp(**options):
    if not distributed.is_initialized():
        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    net = net_of_100()
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    state = phub.FSDPState(net, **{"rank": 0, "world_size": 1, **options})
    return net, net.weight, state.close, lambda: None


FORMS = {f.__name__: f for f in (of_ddp, of_hook, of_optimizer, of_fsdp)}


def gradients_with(form, name, value):
    """Of three steps in which every element's gradient is 1; or why the option is refused."""
    options = {"job": f"{os.environ['PHUB_JOB']}-{name}-{value}", name: value}
    try:
        net, weight, close, end_step = FORMS[form](**options)
    except phub.Error as error:
        return str(error)
    try:
        seen = []
        for _ in range(3):
            weight.grad = None
            net(torch.ones(1, 2)).sum().backward()
            end_step()
            gradient = weight.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            seen += local.flatten().tolist()
        return seen
    except phub.Error as error:
        return str(error)
    finally:
        close()


def walk(rank, form, folder):
    os.chdir(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    found = {}
    for name, values in VALUES.items():
        if form == "of_optimizer" and name == "optimizer":
            continue  # its argument of this name is PyTorch's optimizer
        for value in values:
            found[name, value] = gradients_with(form, name, value)
    return found


def test_the_table_has_every_option():
    rows = re.search(r"The options of a job.*?\*/|\n \*   server .*?\*/", HEADER.read_text(), re.S)
    assert set(re.findall(r"^ \*   ([a-z_]+)  ", rows.group(0), re.M)) == set(VALUES)


@pytest.mark.parametrize("form", FORMS)
def test_an_option_leaves_the_gradient_right_or_is_refused(box, start, tmp_path, form):
    found = start(walk, 1, form, str(tmp_path)).result(0)
    for (name, value), what in found.items():
        if isinstance(what, str):
            assert name in what or str(value) in what, f"{form}, {name}={value!r}: {what}"
        else:
            assert what == [1.0] * 6, f"{form}, {name}={value!r}: gradients {what}"
    for (name, value), what in found.items():
        if name in MUST_REFUSE:
            assert isinstance(what, str), f"{form}, {name}={value!r} is taken"
            assert what.startswith(f"{name}="), what
