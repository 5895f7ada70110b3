"""Steps of the box for models of FSDP2: each process of a replica exchanges its shard."""

import multiprocessing
import os
import re
import time

import pytest
import torch
from conftest import EVERY, leave, of_ranks, refused, wait_until
from exact import assert_same_bits, job, parameters_of, replay
from torch import distributed, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import phub
from phub import _device
from phub._sharded import AwaitedShard

REPLICAS, STEPS = 2, 5


class Odd(nn.Module):
    """Its sizes are no multiples of the shards, and of two parameters a process has nothing."""

    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(6, 5), nn.Linear(5, 5)
        self.seldom, self.last = nn.Linear(5, 5), nn.Linear(5, 1)

    def visited_again(self, x):
        return self.again(x)

    def units(self):
        return (self.first, self.again, self.seldom, self)

    def forward(self, x, step):
        x = torch.tanh(self.visited_again(torch.tanh(self.first(x))))
        x = self.seldom(x) if step % 2 else self.visited_again(x)
        return self.last(torch.tanh(x)).square().sum()


def odd(replica):
    torch.manual_seed(replica)  # the first one's count
    return Odd()


def batch(rank, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.1}),
}


def optimizer_of(kind, model):
    """Of two groups."""
    make, values = OPTIMIZERS[kind]
    last = {id(p) for p in model.last.parameters()}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in last]},
        {"params": list(model.last.parameters()), "lr": values["lr"] / 2},
    ]
    return make(groups, **values)


BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def begin(rank, shards, store, device="cpu"):
    """Returns the replica, the shard and the mesh."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    replica, shard = divmod(rank, shards)
    distributed.init_process_group(
        BACKENDS[device], init_method=f"file://{store}-{replica}", rank=shard, world_size=shards
    )
    return replica, shard, init_device_mesh(device, (shards,))


def sharded(model, mesh, **policies):
    for unit in model.units():
        fully_shard(unit, mesh=mesh, **policies)
    return model


def whole(tensors):
    return {
        name: t.full_tensor() if isinstance(t, DTensor) else t.clone()
        for name, t in tensors.items()
        if t is not None
    }


def trained(rank, model, optimizer, steps, schedule=None):
    """The replica's gradients, by step."""
    found = []
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step), step).backward()
        found.append(whole({name: p.grad for name, p in model.named_parameters()}))
        optimizer.step()
        if schedule:
            schedule.step()
    return found


def state_of(optimizer):
    """In the order of the parameters."""
    return [whole(each) for _, each in sorted(optimizer.state_dict()["state"].items())]


def trains(rank, shards, store, kind, options, device="cpu"):
    replica, shard, mesh = begin(rank, shards, store, device)
    model = sharded(odd(replica), mesh)
    optimizer = phub.DistributedOptimizer(
        optimizer_of(kind, model),
        model,
        **{"rank": replica, "world_size": REPLICAS, "job": job(shard), **options},
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    gradients = trained(rank, model, optimizer, range(STEPS), schedule)
    optimizer.synchronize()
    result = gradients, whole(dict(model.named_parameters())), state_of(optimizer)
    leave(optimizer)
    distributed.destroy_process_group()
    return result


@pytest.mark.parametrize(
    ("shards", "kind", "options"),
    [
        (1, "momentum", {}),
        (2, "sgd", {"overlap": False}),
        (2, "momentum", {"overlap": "forward"}),
        (2, "adamw", {}),
        (2, "adamw", {"overlap": "forward"}),
        (2, "adamw", {"delay": 1}),
        (3, "adagrad", {"overlap": "forward"}),
    ],
)
def test_steps_are_those_of_one_process(box, start, tmp_path, shards, kind, options):
    """Of the whole model, with the mean of the replicas' gradients in their order."""
    ranks = start(trains, REPLICAS * shards, shards, tmp_path / "store", kind, options).results()
    for replica in range(REPLICAS):
        for other in ranks[replica * shards : (replica + 1) * shards]:
            assert_same_bits(other, ranks[replica * shards])
    gradients = [ranks[replica * shards][0] for replica in range(REPLICAS)]
    net = odd(0)
    reference = optimizer_of(kind, net)
    schedule = torch.optim.lr_scheduler.StepLR(reference, 2)
    nothing = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    assert any(len(step) < len(nothing) for step in gradients[0])
    whole_ones = [[{**nothing, **step} for step in of_one] for of_one in gradients]
    expected = replay(whole_ones, net, reference, schedule)
    for _, parameters, state in ranks:
        assert_same_bits(parameters, expected)
        assert_same_bits(state, state_of(reference))


def test_gradients_are_those_of_all_processes(box, start, tmp_path):
    """Which one process computes that has no shards: nearly, as it adds in another order."""
    shards = 2
    _, result, _ = start(trains, 2 * shards, shards, tmp_path / "store", "adamw", {}).results()[0]
    net = odd(0)
    optimizer = optimizer_of("adamw", net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(REPLICAS * shards):
            (net(batch(rank, step), step) / (REPLICAS * shards)).backward()
        for p in net.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(result, parameters_of(net))


def pushes(rank, store, options, is_checkpointed):
    """What was pushed before step(), in each of the steps."""
    replica, shard, mesh = begin(rank, 1, store)
    model = sharded(odd(replica), mesh)
    if is_checkpointed:
        again = model.visited_again
        model.visited_again = lambda x: checkpoint(again, x, use_reentrant=False)
    optimizer = phub.DistributedOptimizer(optimizer_of("sgd", model), model, **options)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step), step).backward()
        found.append({mine.name for mine in optimizer._mine if mine.pushed})
        optimizer.step()
    leave(optimizer)
    distributed.destroy_process_group()
    return found


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_what_is_visited_once_is_pushed_by_backward(box, start, tmp_path, is_checkpointed):
    units = {
        name: {f"{name}.weight", f"{name}.bias"} for name in ("first", "again", "seldom", "last")
    }
    once = units["first"] | units["last"]
    twice = [once, once | units["again"] | units["seldom"], once]
    assert start(pushes, 2, tmp_path / "store", {}, is_checkpointed).results() == [twice] * 2
    nothing, options = [set()] * 3, {"overlap": False}
    assert start(pushes, 2, tmp_path / "at", options, is_checkpointed).results() == [nothing] * 2


def accumulates(rank, store, options):
    replica, shard, mesh = begin(rank, 1, store)
    model = sharded(odd(replica), mesh)
    optimizer = phub.DistributedOptimizer(optimizer_of("sgd", model), model, **options)
    for step in range(4):
        model(batch(rank, step), step).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    result = whole(dict(model.named_parameters()))
    leave(optimizer)
    distributed.destroy_process_group()
    return result


def test_gradients_are_added_up(box, start, tmp_path):
    one, *others = [
        start(accumulates, 2, tmp_path / str(number), {"job": job(number), **options}).results()
        for number, options in enumerate([{"accumulate": 2}, {"overlap": False}])
    ]
    for other in others:
        assert_same_bits(other, one)


def reads(rank, store, how):
    """With overlap="forward": whatever reads a shard waits for it, and nothing else does."""
    replica, shard, mesh = begin(rank, 2, store)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if how == "mixed" else None
    model = sharded(odd(replica), mesh, **({"mp_policy": policy} if policy else {}))
    options = {"rank": replica, "world_size": REPLICAS, "job": job(shard)}
    weight = model.first.weight
    view = weight.detach().to_local() if how == "earlier view" else None
    optimizer = phub.DistributedOptimizer(
        optimizer_of("sgd", model), model, overlap="forward", **options
    )

    def waiting():
        named = model.named_parameters()
        return {n.split(".")[0] for n, p in named if type(p) is AwaitedShard}

    everything = {"first", "again", "seldom", "last"}
    for step in range(2):
        optimizer.zero_grad()
        model(batch(rank, step), step).float().backward()
        optimizer.step()
    assert waiting() == everything  # of the one with a view, the bias
    weights = {id(mine.tensor): mine for mine in optimizer._mine}
    seen = []
    if how in ("forward", "mixed"):
        model.again.register_forward_pre_hook(lambda *_: seen.append(waiting()), prepend=True)
        model(batch(rank, 0), 0)
        assert seen[0] == {"again", "seldom"}, seen  # the root has those of `last`
        assert waiting() == {"seldom"}
        weight = model.again.weight
    elif how == "unshard":
        model.first.unshard()
        model.first.reshard()
    elif how == "local":
        assert weight.to_local().shape == (3 - shard, 6)
    elif how == "whole":
        weight.full_tensor()
    elif how == "norm":
        weight.norm()
    elif how == "state":
        model.state_dict()
    elif how == "view":  # step() waits for that shard, as the program has a view of it
        optimizer.synchronize()
        view = weight.detach().to_local()
        optimizer.zero_grad()
        model(batch(rank, 0), 0).backward()
        optimizer.step()
        assert view.data_ptr() == weight.to_local().data_ptr()
    mine = weights[id(weight)]
    assert type(weight) is DTensor
    assert not mine.waits
    optimizer.worker.wait(mine.name)
    assert torch.equal(weight.to_local(), mine.result)
    optimizer.synchronize()
    assert waiting() == set()
    leave(optimizer)
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    "how",
    ["forward", "mixed", "unshard", "local", "whole", "norm", "state", "view", "earlier view"],
)
def test_who_reads_a_shard_waits_for_it(box, start, tmp_path, how):
    start(reads, 4, tmp_path / "store", how).results()


def goes_on(rank, store, kind, saves):
    """Five steps; or two, and the others with what was saved then."""
    replica, shard, mesh = begin(rank, 2, store)
    options = {"rank": replica, "world_size": REPLICAS}
    model = sharded(odd(replica), mesh)
    optimizer = phub.DistributedOptimizer(
        optimizer_of(kind, model), model, job=job(shard), **options
    )
    trained(rank, model, optimizer, range(2))
    if saves:
        whole_ones = states.StateDictOptions(full_state_dict=saves == "whole")
        saved = states.get_state_dict(model, optimizer, options=whole_ones)
        leave(optimizer)
        model = sharded(odd(7), mesh)
        optimizer = phub.DistributedOptimizer(
            optimizer_of(kind, model), model, job=job(f"more-{shard}"), **options
        )
        states.set_state_dict(
            model,
            optimizer,
            model_state_dict=saved[0],
            optim_state_dict=saved[1],
            options=whole_ones,
        )
    trained(rank, model, optimizer, range(2, STEPS))
    result = whole(dict(model.named_parameters())), state_of(optimizer)
    leave(optimizer)
    distributed.destroy_process_group()
    return result


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
@pytest.mark.parametrize("saves", ["whole", "shards"])
def test_a_state_that_was_saved_goes_on(box, start, tmp_path, kind, saves):
    straight = start(goes_on, 4, tmp_path / "straight", kind, "", PHUB_JOB=job("s")).results()
    with_file = start(goes_on, 4, tmp_path / "saved", kind, saves, PHUB_JOB=job("f")).results()
    assert_same_bits(with_file, straight)


def begins_with(rank, store):
    """An optimizer that has made steps: momentum whose buffer is zero in one of the shards."""
    replica, shard, mesh = begin(rank, 2, store)
    model = sharded(odd(replica), mesh)
    optimizer = optimizer_of("momentum", model)
    for p in model.parameters():
        buffer = torch.zeros_like(p)
        if shard == 0:
            buffer.to_local().fill_(0.5)
        optimizer.state[p]["momentum_buffer"] = buffer
    options = {"rank": replica, "world_size": REPLICAS, "job": job(shard)}
    optimizer = phub.DistributedOptimizer(optimizer, model, **options)
    before = whole({n: optimizer.state_dict()["state"][0][n] for n in ("momentum_buffer",)})
    gradients = trained(rank, model, optimizer, range(2))
    result = before, gradients, whole(dict(model.named_parameters()))
    leave(optimizer)
    distributed.destroy_process_group()
    return result


def test_the_box_takes_the_state_of_an_optimizer_that_has_one(box, start, tmp_path):
    ranks = start(begins_with, 4, tmp_path / "store").results()
    net = odd(0)
    optimizer = optimizer_of("momentum", net)
    for p in net.parameters():
        buffer = torch.zeros_like(p)
        buffer[: -(-len(p) // 2)] = 0.5
        optimizer.state[p]["momentum_buffer"] = buffer
    assert ranks[0][0]["momentum_buffer"].any()
    nothing = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    of_replicas = [[{**nothing, **step} for step in ranks[2 * r][1]] for r in range(REPLICAS)]
    expected = replay(of_replicas, net, optimizer)
    for _, _, parameters in ranks:
        assert_same_bits(parameters, expected)


def changes(rank, store):
    replica, shard, mesh = begin(rank, 2, store)
    model = sharded(odd(replica), mesh)
    loaded = {name: t.clone() for name, t in model.state_dict().items()}
    model.load_state_dict(loaded, assign=True)  # FSDP pads them again
    options = {"rank": replica, "world_size": REPLICAS, "job": job(shard)}
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = phub.DistributedOptimizer(sgd, model, **options)
    trained(rank, model, optimizer, range(2))
    with torch.no_grad():
        model.first.weight.to_local().add_(1)
    model.zero_grad()
    loss = model(batch(rank, 0), 0)
    refused("'first.weight' was changed by the program", loss.backward, error=RuntimeError)
    distributed.barrier()
    optimizer.close()
    distributed.destroy_process_group()


def test_a_shard_that_the_program_changes_is_an_error(box, start, tmp_path):
    start(changes, 4, tmp_path / "store").results()


def joins(rank, store, how, form):
    replica, shard, mesh = begin(rank, 2, store)
    model = nn.Sequential(nn.Linear(4, 4))  # whose shards are of one shape
    fully_shard(model, mesh=mesh)
    options = {
        "one job": {"rank": rank, "world_size": 4, "job": job("of-all")},
        "crossed": {"rank": replica ^ shard, "world_size": REPLICAS, "job": job(shard)},
        "branches": {"rank": replica, "world_size": REPLICAS, "job": job(shard), "branches": 1},
    }[how]
    try:
        if form == "state":
            phub.FSDPState(model, **options)
        else:
            phub.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, **options)
    except phub.Error as error:
        return str(error)
    return ""


@pytest.mark.parametrize("form", ["state", "box"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("one job", "are in the jobs .*: each shard needs one of its own"),
        ("crossed", "have, in their jobs .*, the rank .*, which must be the same"),
    ],
)
def test_shards_have_jobs_of_their_own(box, start, tmp_path, how, message, form):
    for said in start(joins, 4, tmp_path / "store", how, form).results():
        assert re.search(message, said), said


def test_several_processes_in_a_replica_have_no_branches(box, start, tmp_path):
    for said in start(joins, 4, tmp_path / "store", "branches", "state").results():
        assert "branches are those of one job" in said


@of_ranks(1)
def test_what_does_not_go_with_shards_is_refused(rank, tmp_path):
    begin(rank, 1, tmp_path / "store")
    mesh = init_device_mesh("cpu", (1,))
    model = sharded(odd(0), mesh)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    cases = {
        "server": ({"server": False}, "use phub.FSDPState"),
        "zero_copy": ({"zero_copy": True}, "FSDP's memory"),
        "factors": ({"factors": {"*": 2}}, "factors are of a whole weight"),
        "rows": ({"rows": {"*": 2}}, "sparse=False"),
        "lazy": ({"lazy": "*"}, "sparse=False"),
        "max_norm": ({"max_norm": 1.0}, "clip_grad_norm_"),
        "skip": ({"on_nonfinite": "skip"}, "'pass'"),
        "branches": ({"branches": 2}, "branches"),
        "memory_device": ({"memory_device": 0}, "memory_device"),
    }
    for options, message in cases.values():
        refused(message, phub.DistributedOptimizer, sgd, model, **options)
    lamb = phub.Lamb(model.parameters())
    refused("sees the whole parameter", phub.DistributedOptimizer, lamb, model)
    optimizer = phub.DistributedOptimizer(sgd, model)
    for message, call in {
        "a GradScaler and a sharded model": lambda: phub.GradScaler(optimizer),
        r"rejoin\(\) and a sharded model": optimizer.rejoin,
        r"sync_buffers\(\) and a sharded model": optimizer.sync_buffers,
    }.items():
        refused(message, call)
    momentum = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer.close()
    optimizer = phub.DistributedOptimizer(momentum, model, job=job("state"))
    net = odd(0)
    unsharded = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(batch(0, 0), 0).backward()
    unsharded.step()
    optimizer.load_state_dict(unsharded.state_dict())
    loss = model(batch(0, 0), 0)
    refused("'momentum_buffer' that is not sharded", loss.backward)
    optimizer.close()
    embedding = nn.EmbeddingBag(8, 2, sparse=True)
    fully_shard(embedding, mesh=mesh)
    sgd = torch.optim.SGD(embedding.parameters(), 0.1)
    refused("'weight' has sparse gradients", phub.DistributedOptimizer, sgd, embedding)
    parts = odd(0)
    fully_shard(parts.first, mesh=mesh)
    sgd = torch.optim.SGD(parts.parameters(), 0.1)
    refused("'again.weight' is not sharded", phub.DistributedOptimizer, sgd, parts)
    with torch.device("meta"):
        elsewhere = Odd()
    sgd = torch.optim.SGD(sharded(elsewhere, mesh).parameters(), 0.1)
    refused("is on meta: phub needs the CPU or a GPU", phub.DistributedOptimizer, sgd, elsewhere)
    refused("is on meta: phub needs the CPU or a GPU", phub.FSDPState, elsewhere)
    _device.is_gpu = lambda device: device.type == "meta"
    both = nn.ModuleList([sharded(odd(0), mesh), elsewhere])
    refused("on several devices .* a rank per GPU", phub.FSDPState, both)
    sgd = torch.optim.SGD(both.parameters(), 0.1)
    refused("on several devices .* a rank per GPU", phub.DistributedOptimizer, sgd, both)
    there = {"memory_device": 0}
    sgd = torch.optim.SGD(elsewhere.parameters(), 0.1)
    refused("memory_device.*in memory of the host", phub.FSDPState, elsewhere, **there)
    refused(
        "memory_device.*in memory of the host", phub.DistributedOptimizer, sgd, elsewhere, **there
    )
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replica", "shard"))
    replicated = sharded(odd(0), both)
    sgd = torch.optim.SGD(replicated.parameters(), 0.1)
    refused("mesh of one dimension", phub.DistributedOptimizer, sgd, replicated)
    distributed.destroy_process_group()


def ends(rank, store):
    """What the others get when a replica fails, from a read of a shard."""
    begin(rank, 1, store)
    model = sharded(odd(rank), init_device_mesh("cpu", (1,)))
    optimizer = phub.DistributedOptimizer(
        optimizer_of("sgd", model), model, overlap="forward", on_loss="fail"
    )
    trained(rank, model, optimizer, range(2))
    if rank == 1:
        optimizer.worker.abandon()
        return
    with pytest.raises(phub.RankLostError):
        trained(rank, model, optimizer, range(2, STEPS))


def test_a_lost_replica_is_an_error_of_the_others(box, start, tmp_path):
    start(ends, 2, tmp_path / "store").results()


def counts(rank, store, name, events):
    """Steps until the box is gone, or to the end."""
    replica, shard, mesh = begin(rank, 2, store)
    model = sharded(odd(replica), mesh)
    options = {"rank": replica, "world_size": REPLICAS, "job": job(f"{name}-{shard}")}
    optimizer = phub.DistributedOptimizer(optimizer_of("momentum", model), model, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    first = optimizer.steps_done
    for step in optimizer.steps(EVERY + 4, schedule=schedule):
        trained(rank, model, optimizer, [step], schedule)
        if events:
            time.sleep(0.1)  # a box that looks later than at round EVERY saves the next multiple
        if events and step == EVERY + 2:
            begun, gone = events
            begun.release()
            assert gone.wait(60)
            return None
    result = first, whole(dict(model.named_parameters())), state_of(optimizer)
    leave(optimizer)
    distributed.destroy_process_group()
    return result


def test_all_processes_go_on_from_checkpoints_of_the_box(saving_box, start, tmp_path):
    straight = start(counts, 4, tmp_path / "straight", "straight", None).results()
    context = multiprocessing.get_context("fork")
    begun, gone = context.Semaphore(0), context.Event()
    ranks = start(counts, 4, tmp_path / "store", "training", (begun, gone))
    for _ in range(4):
        assert begun.acquire(timeout=60)
    jobs = [job(f"training-{shard}") for shard in range(2)]
    wait_until(
        lambda: all(saving_box.status(each).get("durable_round", 0) > 0 for each in jobs),
        "checkpoints",
    )
    saving_box.kill()
    gone.set()
    ranks.results()
    saving_box.die_and_come_back()
    again = start(counts, 4, tmp_path / "again", "training", None).results()
    assert_same_bits(again, [(EVERY, *others) for _, *others in straight])
