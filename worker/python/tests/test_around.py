"""What people use around an optimizer: torch.compile and torch.distributed.checkpoint."""

import os

import pytest
import torch
from models import GPT, text_batch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as states

import phub

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
}


def made(kind, seed=1, **options):
    torch.set_num_threads(1)
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


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


# ---- torch.distributed.checkpoint.


def saves_and_loads(rank, folder, kind, zero_copy):
    job = os.environ["PHUB_JOB"]
    model, optimizer = made(kind, job=f"{job}-1", zero_copy=zero_copy)
    train(rank, model, optimizer, range(3))
    optimizer.zero_grad()
    if rank == 0:
        model_state, optimizer_state = states.get_state_dict(model, optimizer)
        saved = {"model": model_state, "optimizer": optimizer_state}
        checkpoint.save(saved, checkpoint_id=folder, no_dist=True)
    optimizer.worker.barrier()
    assert optimizer.worker.round("last.weight") == 3  # no step of its own
    train(rank, model, optimizer, range(3, 5))
    optimizer.worker.barrier()
    expected = model.state_dict(), optimizer.state_dict()

    other, again = made(kind, seed=2, job=f"{job}-2", zero_copy=zero_copy)
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
    assert_same(other.state_dict(), expected[0])
    assert_same(again.state_dict(), expected[1])
    again.worker.barrier()


@pytest.mark.parametrize(
    ("kind", "zero_copy"), [("adamw", False), ("adamw", True), ("momentum", False)]
)
def test_checkpoints_of_pytorch_have_model_and_optimizer(box, start, tmp_path, kind, zero_copy):
    start(saves_and_loads, 2, tmp_path, kind, zero_copy).results()


# ---- torch.compile.


def compiles(rank, zero_copy):
    model, optimizer = made("adamw", zero_copy=zero_copy)
    plain_model, local = GPT(width=48, blocks=2), None
    plain_model.load_state_dict(model.state_dict())
    local = torch.optim.AdamW(plain_model.parameters(), 1e-3, foreach=False)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    losses = []
    for step in range(4):
        for each, its in ((model, optimizer), (plain_model, local)):
            its.zero_grad()
            loss = each(text_batch(rank, step))
            loss.backward()
            its.step()
            losses.append(loss.item())
    return losses, optimizer.worker.round("last.weight")


@pytest.mark.parametrize("zero_copy", [False, True])
def test_blocks_may_be_compiled(box, start, zero_copy):
    ((losses, rounds),) = start(compiles, 1, zero_copy).results()
    assert rounds == 4
    for compiled, plain in zip(losses[::2], losses[1::2], strict=True):
        assert abs(compiled - plain) < 1e-4
