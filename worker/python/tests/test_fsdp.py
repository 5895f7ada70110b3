"""FSDP2 within replicas and the box between them, compared with DDP through the box."""

import os

import pytest
import torch
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
    return {name: p.detach().clone() for name, p in model.named_parameters()}


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
    job = f"{os.environ['PHUB_JOB']}-{shard}"
    state = phub.FSDPState(model, rank=replica, world_size=2, job=job, formats=formats)
    assert state.worker.keys == ("blocks.0", "blocks.1", "model")
    train(model, model, lambda step: text_batch(replica, step))
    result = {name: p.full_tensor() for name, p in model.named_parameters()}
    state.worker.barrier()
    state.close()
    distributed.destroy_process_group()
    return result


@pytest.mark.parametrize("shards", [1, 2])
def test_parameters_are_those_of_ddp(box, start, tmp_path, shards):
    expected = start(with_ddp, 2).results()[0]
    results = start(with_fsdp, 2 * shards, shards, tmp_path / "store").results()
    for result in results:
        assert result.keys() == expected.keys()
        for name, parameter in result.items():
            if shards == 1:
                assert torch.equal(parameter, expected[name]), name
            else:
                torch.testing.assert_close(parameter, expected[name])


def test_gradients_may_be_coded(box, start, tmp_path):
    expected = start(with_ddp, 2).results()[0]
    formats = {"*": "int8", "model": "bf16"}
    one, other = start(with_fsdp, 2, 1, tmp_path / "store", formats).results()
    assert any(not torch.equal(parameter, expected[name]) for name, parameter in one.items())
    for name, parameter in one.items():
        assert torch.equal(parameter, other[name]), name
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=0.01)


def is_not_contiguous(_rank, store):
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    net = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(NotImplementedError, match="non-contiguous"):  # PyTorch's own
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    distributed.destroy_process_group()


def test_shards_have_one_order_in_memory(start, tmp_path):
    start(is_not_contiguous, 1, tmp_path / "store").results()


def test_a_model_that_is_not_sharded_is_refused():
    with pytest.raises(phub.InvalidError, match="call fully_shard"):
        phub.FSDPState(model_of(0))
