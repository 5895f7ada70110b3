"""FSDP2 within replicas and the box between them, compared with DDP through the box."""

import os

import pytest
import torch
from conftest import of_ranks
from exact import assert_same_bits, job, parameters_of
from models import GPT, text_batch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import phub

STEPS = 4


def model_of(rank):
    torch.manual_seed(rank)  # the first one's count
    return GPT(width=48, blocks=2)


def train(model, wrapped, batch_of):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(batch_of(step)).backward()
        optimizer.step()


def with_ddp(replica):
    model = model_of(replica)
    train(model, phub.ddp(model), lambda step: text_batch(replica, step))
    return parameters_of(model)


def with_fsdp(rank, shards, store, formats=None):
    """Replica `rank // shards`. All processes of a replica have its batch."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    replica, shard = divmod(rank, shards)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}-{replica}", rank=shard, world_size=shards
    )
    mesh = init_device_mesh("cpu", (shards,))
    model = model_of(replica)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = phub.FSDPState(model, rank=replica, world_size=2, job=job(shard), formats=formats)
    assert state.worker.keys == ("blocks.0", "blocks.1", "model")
    train(model, model, lambda step: text_batch(replica, step))
    result = {name: p.full_tensor() for name, p in model.named_parameters()}
    state.worker.barrier()
    state.close()
    distributed.destroy_process_group()
    return result


@pytest.mark.parametrize(
    ("shards", "formats"), [(1, None), (2, None), (1, {"*": "int8", "model": "bf16"})]
)
def test_parameters_are_those_of_ddp(box, start, tmp_path, shards, formats):
    """Nearly, if gradients are coded."""
    expected = start(with_ddp, 2).results()[0]
    one, *others = start(with_fsdp, 2 * shards, shards, tmp_path / "store", formats).results()
    for other in others:
        assert_same_bits(one, other)
    if shards == 1 and not formats:
        assert_same_bits(one, expected)
    else:
        limits = {"rtol": 0, "atol": 0.01} if formats else {}
        torch.testing.assert_close(one, expected, **limits)
        assert not formats or any(not torch.equal(p, expected[name]) for name, p in one.items())


@of_ranks(1)
def test_shards_have_one_order_in_memory(rank, tmp_path):
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    net = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(NotImplementedError, match="non-contiguous"):  # PyTorch's own
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    distributed.destroy_process_group()


def test_a_model_that_is_not_sharded_is_refused():
    with pytest.raises(phub.InvalidError, match="call fully_shard"):
        phub.FSDPState(model_of(0))
