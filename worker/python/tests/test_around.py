"""What people use around an optimizer: torch.compile, checkpoints, buffers, and the address."""

import copy

import pytest
import torch
import torch._functorch.aot_autograd  # which a rank's first compilation would import
from conftest import of_ranks
from exact import assert_same_bits, job
from models import GPT, text_batch, wrapped
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as states

import phub

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
}


def made(kind, seed=1, **options):
    torch.manual_seed(seed)
    model = GPT(width=48, blocks=2)
    make, values = OPTIMIZERS[kind]
    optimizer = make(model.parameters(), **values)
    return model, phub.DistributedOptimizer(optimizer, model, **options)


def train(rank, model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        model(text_batch(rank, step)).backward()
        optimizer.step()


# ---- torch.distributed.checkpoint.


def saves_and_loads(rank, folder, kind, zero_copy):
    model, optimizer = made(kind, job=job(1), zero_copy=zero_copy)
    train(rank, model, optimizer, range(3))
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] /= 2  # another rate than a new optimizer has
    if rank == 0:
        model_state, optimizer_state = states.get_state_dict(model, optimizer)
        saved = {"model": model_state, "optimizer": optimizer_state}
        checkpoint.save(saved, checkpoint_id=folder, no_dist=True)
    optimizer.worker.barrier()
    assert optimizer.worker.round("last.weight") == 3  # no step of its own
    train(rank, model, optimizer, range(3, 5))
    optimizer.worker.barrier()
    expected = model.state_dict(), optimizer.state_dict()

    other, again = made(kind, seed=2, job=job(2), zero_copy=zero_copy)
    model_state, optimizer_state = states.get_state_dict(other, again)
    given = {"model": model_state, "optimizer": optimizer_state}
    checkpoint.load(given, checkpoint_id=folder, no_dist=True)
    states.set_state_dict(
        other, again, model_state_dict=given["model"], optim_state_dict=given["optimizer"]
    )
    assert again.worker.round("last.weight") == 0
    again.worker.barrier()
    train(rank, other, again, range(3, 5))
    again.worker.barrier()
    assert_same_bits(other.state_dict(), expected[0])
    assert_same_bits(again.state_dict(), expected[1])
    again.worker.barrier()


@pytest.mark.parametrize(
    ("kind", "zero_copy"), [("adamw", False), ("adamw", True), ("momentum", False)]
)
def test_checkpoints_of_pytorch_have_model_and_optimizer(box, start, tmp_path, kind, zero_copy):
    start(saves_and_loads, 2, tmp_path, kind, zero_copy).results()


# ---- torch.compile.


@pytest.mark.parametrize("zero_copy", [False, True])
@of_ranks(1)
def test_blocks_may_be_compiled(rank, zero_copy):
    model, optimizer = made("adamw", zero_copy=zero_copy)
    plain = GPT(width=48, blocks=2)
    plain.load_state_dict(model.state_dict())
    local = torch.optim.AdamW(plain.parameters(), 1e-3, foreach=False)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    for step in range(4):
        losses = []
        for each, its in ((model, optimizer), (plain, local)):
            its.zero_grad()
            loss = each(text_batch(rank, step))
            loss.backward()
            its.step()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-4
    assert optimizer.worker.round("last.weight") == 4


# ---- Buffers.


def with_buffers(rank):
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model.register_buffer("flags", torch.tensor([rank == 0, rank == 1]))
    model.register_buffer("whole", torch.tensor(2**40 + rank))
    return model


def syncs(rank, form):
    model = with_buffers(rank)
    _, state, _ = wrapped(form, model)
    seen = []
    for step in range(2):
        model[1](torch.randn(8, 4))
        if rank == 0 and step == 1:
            model[1](torch.randn(8, 4))
        before = {name: b.clone() for name, b in model.named_buffers()}
        state.sync_buffers()
        seen.append((before, copy.deepcopy(dict(model.named_buffers()))))
    state.worker.barrier()
    state.close()
    return seen


@pytest.mark.parametrize("form", ["ddp", "optimizer"])
def test_buffers_are_made_the_same(box, start, form):
    ranks = start(syncs, 3, form).results()
    for step in range(2):
        befores, afters = zip(*(rank[step] for rank in ranks), strict=True)
        assert_same_bits(afters[1], afters[0])
        assert_same_bits(afters[2], afters[0])
        for name in ("1.running_mean", "1.running_var"):
            total = befores[0][name] + befores[1][name] + befores[2][name]
            assert_same_bits(afters[0][name], total * torch.tensor(1 / 3))
        for name in ("1.num_batches_tracked", "flags", "whole"):
            assert_same_bits(afters[0][name], befores[0][name])
    assert ranks[1][1][0]["1.num_batches_tracked"] == 2
    assert ranks[1][1][1]["1.num_batches_tracked"] == 3


@of_ranks(1)
def test_without_buffers_there_is_nothing_to_make_the_same(rank):
    _, optimizer = made("adamw")
    with pytest.raises(phub.InvalidError, match="no buffers"):
        optimizer.sync_buffers()


# ---- Where the box is.


def makes(rank, kind, address):
    """With the box's address as an option."""
    if kind == "worker":
        state = phub.Worker({"w": 3}, box=address)
    else:
        _, state, _ = wrapped(kind, nn.Linear(3, 2), box=address)
    ranks = state.world_size
    state.close()
    return ranks


@pytest.mark.parametrize("kind", ["ddp", "optimizer", "worker"])
def test_the_boxs_address_may_be_an_option(box, start, kind):
    several = f"127.0.0.1:1,{box.address}"
    elsewhere = "127.0.0.1:1"  # the option counts
    assert start(makes, 2, kind, several, PHUB_SERVER=elsewhere).results() == [2, 2]
