"""What people use around an optimizer: torch.compile, checkpoints, buffers, an address, FSDP2."""

import copy
import os

import pytest
import torch
import torch._functorch.aot_autograd  # which a rank's first compilation would import
from conftest import SEED, leave, of_ranks, refused
from exact import assert_same_bits, job, parameters_of
from models import GPT, descend, text_batch, wrapped
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import phub
from phub import fsdp

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2}),
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
        descend(optimizer, model(text_batch(rank, step)))


# ---- torch.distributed.checkpoint.


def saves_and_loads(rank, folder, kind, options):
    model, optimizer = made(kind, job=job(1), **options)
    train(rank, model, optimizer, range(3))
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] /= 2  # another rate than a new optimizer has
    if options.get("delay"):
        optimizer.synchronize()  # all ranks go on with what rank 0 saves
    if rank == 0:
        model_state, optimizer_state = states.get_state_dict(model, optimizer)
        saved = {"model": model_state, "optimizer": optimizer_state}
        checkpoint.save(saved, checkpoint_id=folder, no_dist=True)
    optimizer.worker.barrier()
    assert optimizer.worker.round("last.weight") == 3  # no step of its own
    train(rank, model, optimizer, range(3, 5))
    optimizer.worker.barrier()
    expected = model.state_dict(), optimizer.state_dict()

    other, again = made(kind, seed=2, job=job(2), **options)
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
    ("kind", "options"),
    [
        ("adamw", {}),
        ("adamw", {"zero_copy": True}),
        ("adamw", {"delay": 1}),
        ("momentum", {}),
        ("adamw", {"server": False}),
        ("momentum", {"server": False}),
        ("sgd", {"server": False}),
    ],
)
def test_checkpoints_of_pytorch_have_model_and_optimizer(box, start, tmp_path, kind, options):
    start(saves_and_loads, 2, tmp_path, kind, options).results()


def reads_state(rank, kind):
    trained = []
    for reads in (False, True):
        model, optimizer = made(kind, job=job(reads), server=False)
        for step in range(4):
            if reads and rank == 0:  # alone, and while there are no gradients
                for _ in range(2):
                    states.get_optimizer_state_dict(model, optimizer)
            train(rank, model, optimizer, [step])
            optimizer.zero_grad()
        assert optimizer.worker.round("last.weight") == 4
        trained.append((model.state_dict(), optimizer.state_dict()))
        optimizer.worker.barrier()
    assert_same_bits(trained[0][0], trained[1][0])
    assert_same_bits(trained[0][1], trained[1][1])
    return trained[0][0]


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_reading_the_state_is_no_step(box, start, kind):
    """Of the optimizer's own, which PyTorch makes a step for if it has none yet."""
    first, second = start(reads_state, 2, kind).results()
    assert_same_bits(first, second)


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
            losses.append(descend(its, each(text_batch(rank, step))))
        assert abs(losses[0] - losses[1]) < 1e-4
    assert optimizer.worker.round("last.weight") == 4


# ---- Buffers.


def with_buffers(rank):
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model.register_buffer("flags", torch.tensor([rank == 0, rank == 1]))
    model.register_buffer("whole", torch.tensor(2**40 + rank))
    return model


def syncs(rank, form, options):
    model = with_buffers(rank)
    _, state, _ = wrapped(form, model, **options)
    assert {state.worker.gradient_dtype(key) for key in state.worker.keys} == {"f32"}
    seen = []
    for step in range(2):
        model[1](torch.randn(8, 4))
        if rank == 0 and step == 1:
            model[1](torch.randn(8, 4))
        before = {name: b.clone() for name, b in model.named_buffers()}
        state.sync_buffers()
        seen.append((before, copy.deepcopy(dict(model.named_buffers()))))
    leave(state)
    return seen


CODED = {"formats": {"*": "int4", "*.bias": "f32"}, "gradient_dtype": "int8"}
CODED["rounding"] = "stochastic"


@pytest.mark.parametrize("options", [{}, CODED], ids=["exact", "coded"])
@pytest.mark.parametrize("form", ["ddp", "optimizer"])
def test_buffers_are_made_the_same(box, start, form, options):
    """Exactly, also where gradients are coded."""
    ranks = start(syncs, 3, form, options).results()
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
    refused("no buffers", optimizer.sync_buffers)


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


# ---- FSDP2 within replicas and the box between them, compared with DDP through the box.

STEPS = 4


def model_of(rank):
    torch.manual_seed(rank)  # the first one's count
    return GPT(width=48, blocks=2)


def train_sgd(model, wrapped, batch_of):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    for step in range(STEPS):
        descend(optimizer, wrapped(batch_of(step)))


def with_ddp(replica):
    model = model_of(replica)
    train_sgd(model, phub.ddp(model), lambda step: text_batch(replica, step))
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
    train_sgd(model, model, lambda step: text_batch(replica, step))
    result = {name: p.full_tensor() for name, p in model.named_parameters()}
    leave(state)
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


def with_hooks(rank, store, how, waits):
    """What two replicas of a process have; `waits`: their hooks wait for every mean."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}-{rank}-{waits}", rank=0, world_size=1
    )
    if waits:
        fsdp._is_read_late = lambda *_: False
    policy = {"reduce_dtype": torch.bfloat16} if how == "of another type" else {}
    model = model_of(rank)
    for part in (*model.blocks, model):
        fully_shard(
            part, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(**policy)
        )
        if how == "divided later":
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(3.0)
    state = phub.FSDPState(model, rank=rank, world_size=2, job=job(f"{waits}"))
    calls, seen = [], []
    for name, kind in {"push": "push", "push_copy": "push", "wait": "wait"}.items():
        call = getattr(state.worker, name)
        setattr(
            state.worker,
            name,
            lambda *given, kind=kind, call=call: (calls.append(kind), call(*given)),
        )
    if how == "seen at once":
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        model.set_requires_gradient_sync(how != "by hand")
        for turn in range(2 if how == "added up" else 1):
            model(text_batch(rank, 2 * step + turn)).backward()
        if how == "by hand":  # as pipelines do
            model.set_requires_gradient_sync(True)
            for part in (*model.blocks, model):
                part._get_fsdp_state()._fsdp_param_group.post_backward()
        optimizer.step()
    result = {name: p.full_tensor() for name, p in model.named_parameters()}
    leave(state)
    distributed.destroy_process_group()
    return result | {f"seen {i}": each for i, each in enumerate(seen)}, calls


@pytest.mark.parametrize(
    "how", ["plain", "of another type", "added up", "divided later", "seen at once", "by hand"]
)
def test_a_mean_is_waited_for_where_it_is_read(box, start, tmp_path, how):
    (one, calls), (other, _) = start(with_hooks, 2, tmp_path / "store", how, False).results()
    (waited, in_turn), _ = start(with_hooks, 2, tmp_path / "store", how, True).results()
    assert_same_bits(one, waited)
    if how != "seen at once":
        assert_same_bits(one, other)
    keys = 3
    assert in_turn == ["push", "wait"] * (len(in_turn) // 2)
    late = ["push"] * keys + ["wait"] * keys
    if how in ("plain", "of another type"):
        assert calls == late * STEPS
    elif how == "added up":
        assert calls == (late + ["push", "wait"] * keys) * STEPS
    else:
        assert calls == in_turn


@of_ranks(1)
def test_shards_have_one_order_in_memory(rank, tmp_path):
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    net = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(NotImplementedError, match="non-contiguous"):  # PyTorch's own
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    distributed.destroy_process_group()


# ---- Data loaders.


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((4,), float(index)), torch.tensor([float(index)])


def loads_with_forked_workers(rank):
    torch.manual_seed(SEED)
    model = nn.Linear(4, 1)
    wrapped = phub.ddp(model)
    sampler = torch.utils.data.DistributedSampler(
        Numbers(), wrapped.phub.world_size, wrapped.phub.rank, shuffle=False
    )
    loader = torch.utils.data.DataLoader(
        Numbers(), 4, sampler=sampler, num_workers=2, multiprocessing_context="fork"
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    seen = []
    for _ in range(2):  # workers are forked again, now in the middle of the job
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(inputs), targets).backward()
            optimizer.step()
            seen += targets.flatten().tolist()
    assert wrapped.phub.worker.round("weight") == 6
    return seen, parameters_of(model)


def test_data_loaders_with_forked_workers(box, start):
    one, other = start(loads_with_forked_workers, 2).results()
    assert sorted(one[0] + other[0]) == sorted(2 * [float(i) for i in range(24)])
    assert_same_bits(one[1], other[1])
