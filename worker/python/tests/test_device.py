"""The way of a GPU's parameters: over a device of host memory, the bits of the usual way; on a GPU,
where there is one, the same but for how sums are rounded."""

import copy
from ctypes import byref, c_void_p

import pytest
import test_around
import test_sharded
import torch
from conftest import SEED, Box, leave, of_ranks, refused
from exact import assert_same_bits, gradients_of, job, parameters_of
from models import differ
from test_ddp import ordered_gradients
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import phub
from phub import _device, _memory_device, fsdp
from phub._library import call

STEPS = 4
HOST, CUDA = "host", "cuda"
need_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU")
both_ways = pytest.mark.parametrize("way", [HOST, pytest.param(CUDA, marks=need_gpu)])


def open_host(_, budget):
    opened = c_void_p()
    call("device_open_host", budget, 0.0, 0, byref(opened))
    return opened


def take_the_way_of_a_gpu():
    """Of this process, a rank: a device of host memory has the calling thread as its stream."""
    _device.is_gpu = lambda device: device.type == "cpu"
    _device.open_device = open_host
    _device.stream_of = lambda _: None


def go(way):
    """Of this process, a rank, before it has parameters."""
    if way == HOST:
        take_the_way_of_a_gpu()
    elif way == CUDA:
        torch.backends.cudnn.allow_tf32 = False


def make_net(rank, way="cpu"):
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5 * 4 * 4, 7), nn.PReLU())
    net = net.to(memory_format=torch.channels_last)  # parameters that are not contiguous
    assert not net[0].weight.is_contiguous()
    with torch.no_grad():
        net[2].weight.add_(rank)  # rank 0's count
    return net.cuda() if way == CUDA else net


def loss_of(net, rank, step):
    random = torch.Generator().manual_seed(SEED + 1000 * step + rank)
    inputs = torch.randn(8, 3, 6, 6, generator=random)
    labels = torch.randint(7, (8,), generator=random)
    there = next(net.parameters()).device
    return nn.functional.cross_entropy(net(inputs.to(there)), labels.to(there))


def here(value):
    """With every tensor in memory of the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: here(each) for key, each in value.items()}
    return [here(each) for each in value] if isinstance(value, (list, tuple)) else value


def trains_ddp(rank, way, options):
    go(way)
    net = make_net(rank, way)
    wrapped = phub.ddp(net, job=job(way), **options)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    gradients = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, rank, step).backward()
        gradients.append(here(gradients_of(net)))
        optimizer.step()
    assert (wrapped.phub.worker.on_device is not None) == (way != "cpu")
    wrapped.phub.close()
    return [gradients, here(parameters_of(net))]


@pytest.mark.parametrize("options", [{}, {"server": False}])
@of_ranks(2)
def test_parameters_may_have_another_order_in_memory(rank, options):
    go(HOST)
    ordered_gradients(rank, options)


def check(start, body, way, options):
    """By the way of a GPU is as usual."""
    usual, there = (start(body, 2, each, options).results() for each in ("cpu", way))
    if way == HOST:
        assert_same_bits(there, usual)
    elif "formats" not in options:  # what is rounded otherwise may get another code
        torch.testing.assert_close(there, usual, rtol=1e-3, atol=1e-3)
    assert_same_bits(there[0][0], there[1][0])


@both_ways
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ddp_has_the_same_bits(box, start, way, transport):
    check(start, trains_ddp, way, {"transport": transport})


def trains_large_ddp(rank, way, options):
    go(way)
    torch.manual_seed(SEED)
    wrapped = phub.ddp(nn.Linear(1000, 700), job=job(way), **options)
    gradients = []
    for step in range(STEPS):
        wrapped.zero_grad()
        random = torch.Generator().manual_seed(SEED + 1000 * step + rank)
        wrapped(torch.randn(4, 1000, generator=random)).square().mean().backward()
        gradients.append(here(gradients_of(wrapped.module)))
    wrapped.phub.close()
    return [gradients]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_gradient_of_several_parts_has_the_same_bits(box, start, transport):
    check(start, trains_large_ddp, HOST, {"transport": transport})


def trains_optimizer(rank, way, options):
    go(way)
    net = make_net(rank, way)
    plain = torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)
    optimizer = phub.DistributedOptimizer(plain, net, job=job(way), **options)
    assert (optimizer.worker.on_device is not None) == (way != "cpu")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(options.get("accumulate", 1)):
            loss = loss_of(net, rank, 10 * step + part)
            if step == 2:
                loss = loss * 0 + net[2].weight.sum()
            loss.backward()
        if step == 2 and options.get("overlap") is False:
            net[0].weight.grad = None  # it counts as zero
        optimizer.step()
        norms.append(optimizer.grad_norm)
        schedule.step()
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.synchronize()
    state = optimizer.state_dict()
    optimizer.close()
    return here(parameters_of(net)), here(state), norms


@both_ways
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": "forward", "transport": "tcp"},
        {"overlap": False, "accumulate": 2},
        {"server": False},
        {"max_norm": 0.5, "gradient_dtype": "bf16"},
        {"gradient_dtype": "int8", "formats": {"*bias": "topk", "3.weight": "f16"}},
        {"delay": 1, "max_norm": 0.5, "accumulate": 2},
    ],
    ids=["backward", "forward", "accumulate", "mean", "clipped", "coded", "late"],
)
def test_distributed_optimizer_has_the_same_bits(box, start, way, options):
    check(start, trains_optimizer, way, options)


def trains_with_factors(rank, way, options):
    go(way)
    net = nn.Sequential(make_net(rank), nn.ReLU(), nn.Linear(7, 9), nn.Linear(9, 7))
    net = net.cuda() if way == CUDA else net
    differ(net, rank)
    optimizer = phub.DistributedOptimizer(
        torch.optim.AdamW(net.parameters(), 1e-2, foreach=False),
        net,
        job=job(way),
        factors={"0.2.weight": 16, "2.*": 16},
        **options,
    )
    assert (optimizer.worker.on_device is not None) == (way != "cpu")
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(options.get("accumulate", 1)):
            if step == 2:  # two of its layers are not used
                net[3](torch.ones(2, 9, device=net[3].weight.device)).sum().backward()
            else:
                loss_of(net, rank, 10 * step + part).backward()
        assert net[2].weight.grad is None
        optimizer.step()
    optimizer.synchronize()
    state = optimizer.state_dict()
    optimizer.close()
    return here(parameters_of(net)), here(state)


@both_ways
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": "forward", "transport": "tcp"},
        {"overlap": False, "accumulate": 2},
        {"parameter_dtype": "bf16", "formats": {"0.0.*": "int8"}},
        {"delay": 1},
    ],
    ids=["backward", "forward", "accumulate", "coded", "late"],
)
def test_factors_have_the_same_bits(box, start, way, options):
    check(start, trains_with_factors, way, options)


def lies_in_the_device(rank, way, options):
    """Over libfabric, which reads and writes a host device's memory as it would a GPU's."""
    if way == HOST:
        _memory_device.open_memory = open_host
        options = {**options, "memory_device": 0}
    result = trains_optimizer(rank, way, {**options, "transport": "ofi"})
    if way == HOST:
        one = {"job": job("one") + str(rank), "rank": 0, "world_size": 1}
        worker = phub.Worker({"w": 10}, transport="ofi", memory_device=0, **one)
        with worker, pytest.raises(phub.InvalidError, match=r"gradient of key 'w' lie in the mem"):
            worker.gradient("w")
    return result


@pytest.fixture
def ofi_box(box, monkeypatch):
    """One that takes gradients over libfabric, too."""
    with Box("--transports", "tcp,ofi") as own:
        monkeypatch.setenv("PHUB_SERVER", own.address)
        yield own


@pytest.mark.parametrize("options", [{}, {"server": False}, {"max_norm": 0.5}])
def test_keys_in_memory_of_the_device_have_the_same_bits(ofi_box, start, options):
    check(start, lies_in_the_device, HOST, options)


# ---- Models of fully_shard().


def go_with_shards(way):
    """As go(). Returns the keys of which results were pulled to the device."""
    go(way)
    pulled, pull = [], _device.DeviceKeys.pull
    _device.DeviceKeys.pull = lambda keys, key, into: (pulled.append(key), pull(keys, key, into))
    return pulled


def shards_at_box(rank, way, store, shards, kind, options):
    pulled = go_with_shards(way)
    there = "cuda" if way == CUDA else "cpu"
    result = test_sharded.trains(rank, shards, f"{store}-{way}", kind, options, there)
    assert bool(pulled) == (way != "cpu")
    return here(result)


def check_shards(start, way, processes, body, *given):
    """By the way of a GPU is as usual."""
    usual, there = (
        start(body, processes, each, *given, PHUB_JOB=job(each)).results() for each in ("cpu", way)
    )
    if way == HOST:
        assert_same_bits(there, usual)
    else:
        torch.testing.assert_close(there, usual, rtol=0.02, atol=0.02)  # of bf16, too


@both_ways
@pytest.mark.parametrize(
    ("shards", "kind", "options"),
    [
        (1, "adamw", {}),
        (2, "adamw", {"overlap": "forward"}),  # of two parameters a process has nothing
        (2, "momentum", {"overlap": False}),
        (2, "adamw", {"delay": 1}),
        (1, "adamw", {"overlap": "forward", "gradient_dtype": "int8"}),
    ],
    ids=["backward", "forward", "step", "late", "coded"],
)
def test_steps_of_shards_have_the_same_bits(box, start, tmp_path, way, shards, kind, options):
    if way == CUDA and (shards > 1 or "gradient_dtype" in options):
        pytest.skip("NCCL wants a GPU for each process; what is rounded may get another code")
    given = tmp_path / "store", shards, kind, options
    check_shards(start, way, test_sharded.REPLICAS * shards, shards_at_box, *given)


def shards_with_means(rank, way, store, shards, formats):
    pulled = go_with_shards(way)
    result = test_around.with_fsdp(rank, shards, f"{store}-{way}", formats)
    assert bool(pulled) == (way != "cpu")
    return result


@pytest.mark.parametrize(("shards", "formats"), [(2, None), (1, {"*": "int8", "model": "bf16"})])
def test_means_of_shards_have_the_same_bits(box, start, tmp_path, shards, formats):
    check_shards(start, HOST, 2 * shards, shards_with_means, tmp_path / "store", shards, formats)


def means_that_fsdp_reads(rank, way, store, how):
    pulled = go_with_shards(way)
    result, calls = test_around.with_hooks(rank, f"{store}-{way}", how, False)
    assert bool(pulled) == (not calls) == (way != "cpu")
    return result


@pytest.mark.parametrize(
    "how", ["plain", "of another type", "added up", "divided later", "seen at once", "by hand"]
)
def test_means_have_the_same_bits_whoever_reads_them(box, start, tmp_path, how):
    check_shards(start, HOST, 2, means_that_fsdp_reads, tmp_path / "store", how)


MIXED = {
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "bf16 and f32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "f16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16),
    "f64": MixedPrecisionPolicy(reduce_dtype=torch.float64),
}


def mixed_shards(rank, way, store, kind):
    pulled = go_with_shards(way)
    there = "cuda" if way == CUDA else "cpu"
    replica, _, mesh = test_sharded.begin(rank, 1, f"{store}-{way}", there)
    model = test_sharded.sharded(test_sharded.odd(replica), mesh, mp_policy=MIXED[kind])
    state = phub.FSDPState(model, rank=replica, world_size=test_sharded.REPLICAS)
    optimizer = test_sharded.optimizer_of("momentum", model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(test_sharded.batch(rank, 2 * step + 1), 1).float().backward()
        optimizer.step()
    result = test_sharded.whole(dict(model.named_parameters()))
    assert bool(pulled) == (way != "cpu")
    for unit in model.units():
        assert type(fsdp._scatters(unit)) is getattr(torch, there).Stream
    leave(state)
    distributed.destroy_process_group()
    return here(result)


@both_ways
@pytest.mark.parametrize("kind", list(MIXED))
def test_means_of_mixed_precision_have_the_same_bits(box, start, tmp_path, way, kind):
    check_shards(start, way, 2, mixed_shards, tmp_path / "store", kind)


class Stream:
    """A stream that notes which other ones it waits for."""

    def __init__(self):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)


@of_ranks(1)
def test_the_stream_of_a_step_waits_for_a_shard_that_another_stream_reads(rank, tmp_path):
    take_the_way_of_a_gpu()
    of_program, of_fsdp = Stream(), Stream()
    _device.current_stream = lambda _: of_program
    _, _, mesh = test_sharded.begin(rank, 1, tmp_path / "store")
    model = test_sharded.sharded(test_sharded.odd(0), mesh)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = phub.DistributedOptimizer(sgd, model, overlap="forward")
    test_sharded.trained(rank, model, optimizer, range(1))
    _device.current_stream = lambda _: of_fsdp
    model.first.weight.to_local()
    _device.current_stream = lambda _: of_program
    model.first.bias.to_local()
    assert of_program.waited == [of_fsdp]
    assert of_fsdp.waited == []
    optimizer.close()
    distributed.destroy_process_group()


@of_ranks(1)
def test_a_failure_is_the_error_of_the_next_call(rank):
    take_the_way_of_a_gpu()
    net = make_net(0)
    optimizer = phub.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net)
    loss_of(net, 0, 0).backward()
    optimizer.step()
    call("leave", optimizer.worker._worker)

    def next_calls():
        loss_of(net, 0, 1).backward()
        optimizer.step()

    refused("has left", next_calls, error=phub.FencedError)
    optimizer.close()
