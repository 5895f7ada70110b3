"""Every option of the C interface, in every form: its results are right, or it is refused."""

import re

import pytest
import torch
from conftest import PACKAGE
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import phub
from phub import _alone

VALUES = {
    "server": (),  # the box of the test, and the names of its jobs
    "token": (),
    "job": (),
    "transport": ("shm", "tcp"),
    "rank": (0,),
    "replace": (1,),
    "await_ranks": (0,),
    "connect_timeout_ms": (1000,),
    "wait_timeout_ms": (60000,),
    "rejoin_limit_ms": (1000,),
    "silence_limit_ms": (60000,),
    "spin_us": (0, 10),
    "local_world_size": (1,),
    "nic_budget": ("10gbit",),
    "send_order": ("fifo", "random", "magnitude"),
    "carry_over": (1,),
    "trace": ("",),
    "trace_events": (10,),
    "world_size": (1,),
    "min_ranks": (1,),
    "max_ranks": (2,),
    "quorum": (1,),
    "grace_ms": (0,),
    "grace": ("fixed",),
    "late_decay": (1, 1.0, "1"),
    "chunk_elements": (32,),
    "optimizer": ("sgd", "momentum", "adam", "fold", "none"),
    "state_dtype": ("f32", "8bit"),
    "gradient_dtype": ("bf16", "int8", "fp8-e4m3", "int32"),
    "parameter_dtype": ("f16", "bf16", "int8"),
    "reduction": ("sum", "mean"),
    "weights": ("no", "yes"),
    "groups": ("1",),
    "work": ("all", "sum"),
    "consistency": ("bsp", "ssp", "async"),
    "slack": (0, "0", 1),
    "initial": ("zeros", "broadcast"),
    "on_loss": ("shrink", "wait", "fail"),
    "on_nonfinite": ("stop", "exclude", "pass", "skip"),
    "unused": ("zero", "skip"),
    "branches": (1,),
    "saved": ("yes", "no"),
    "rounding": ("nearest", "stochastic"),
    "lease_ms": (5000,),
    "progress_limit_ms": (60000,),
    "wait_limit_ms": (60000,),
    "join_limit_ms": (60000,),
}
# These must not be taken by a form whose results are gradients.
NEVER = {
    **{("optimizer", value): "none" for value in ("sgd", "momentum", "adam", "fold")},
    ("work", "sum"): "all",
    **{("consistency", value): "bsp" for value in ("ssp", "async")},
    ("on_nonfinite", "skip"): "pass",
    ("unused", "skip"): "zero",
    ("quorum", 1): "0",
}
AT_BOX = {key for key in NEVER if key[0] in ("work", "consistency")}


def with_ddp(net, options):
    wrapped = phub.ddp(net, **options)
    return wrapped, wrapped.phub.close, None


def with_state(net, options):
    state = phub.DDPState(net, **options)
    if options.get("initial") == "broadcast":
        state.broadcast_parameters()
    wrapped = DistributedDataParallel(net, process_group=_alone.Group())
    wrapped.register_comm_hook(state, phub.ddp_hook)
    return wrapped, state.close, None


def with_node(net, options):
    return with_ddp(net, {"node": distributed.group.WORLD, **options})


def with_fsdp(net, options):
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    return net, phub.FSDPState(net, **options).close, None


def at_worker(net, options):
    return at_box(net, {"server": False, **options})


def at_box(net, options):
    optimizer = phub.DistributedOptimizer(torch.optim.SGD(net.parameters(), 1.0), net, **options)
    return net, optimizer.close, optimizer


FORMS = {f.__name__: f for f in (with_ddp, with_node, with_state, with_fsdp, at_worker, at_box)}


def plain(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def gradients_of(form, options):
    """Of three steps: rank 0's, as there is one, which are 1, 2 and 3."""
    net = nn.Linear(2, 1, bias=False)
    net.weight.data.fill_(100.0)
    wrapped, close, optimizer = FORMS[form](net, options)
    found = []
    try:
        for step in (1, 2, 3):
            before = plain(net.weight)
            net.zero_grad()
            wrapped(torch.full((1, 2), float(step))).sum().backward()
            if optimizer:
                optimizer.step()
                found.append(before - plain(net.weight))
            else:
                found.append(plain(net.weight.grad))
    finally:
        close()
    return torch.stack(found).squeeze(1)


def walks(_rank, form, store):
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    want = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    wrong = []
    for name, values in VALUES.items():
        if name == "optimizer" and form in ("at_worker", "at_box"):
            continue  # it is the first argument's name: Python refuses a second one
        for value in values:
            said = f"{name}={value!r}"
            try:
                found = gradients_of(form, {name: value, "job": f"{form}-{name}-{value}"})
            except phub.InvalidError as error:
                never = NEVER.get((name, value))
                if never and not (said in str(error) and repr(never) in str(error)):
                    wrong.append(f"{said}: {error}")
                continue
            if (name, value) in (AT_BOX if form == "at_box" else NEVER):
                wrong.append(f"{said} is taken")
            # Parameters of 100 in 16 bits, and what is coded in 8.
            if not torch.allclose(found, want, rtol=0.05, atol=0.0):
                wrong.append(f"{said}: {found.tolist()}")
    distributed.destroy_process_group()
    return wrong


@pytest.mark.parametrize("form", FORMS)
def test_an_option_leaves_gradients_right_or_is_refused(box, start, tmp_path, form):
    assert start(walks, 1, form, tmp_path / "store").results() == [[]]


def test_all_options_are_tried():
    """Those that worker/phub.h lists."""
    text = (PACKAGE.parent / "phub.h").read_text()
    begin = text.index("/* Sets an option by its name.")
    listed = text[begin : text.index("PHUB_API", begin)]
    assert set(VALUES) == set(re.findall(r"^ \*   (\w+)  ", listed, re.MULTILINE))
