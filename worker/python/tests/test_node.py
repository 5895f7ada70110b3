"""Hosts of several processes, which send one model each: emulated on this machine."""

import os
import re
import signal
import threading
import time
import urllib.request

import pytest
import torch
from conftest import SEED, of_ranks, refused, wait_until
from deaths import FORK
from exact import assert_same_bits, gradients_of, job, parameters_of
from models import differ, recorded
from test_device import take_the_way_of_a_gpu
from torch import distributed, nn

import phub
from phub._packed import Packed, part_of

HOSTS, LOCAL = 2, 2
WORLD = HOSTS * LOCAL
NODE = {"node": "reduce"}
SMALL_BUCKETS = {"ddp_options": {"bucket_cap_mb": 0.0005}}


def on_host(local_rank, processes=LOCAL):
    """What a launcher says to this process."""
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(processes))


class Net(nn.Module):
    """Most sizes are no multiples of two, one parameter has one element, and one lies otherwise."""

    def __init__(self, width=37):
        super().__init__()
        torch.manual_seed(SEED)
        self.first, self.second = nn.Linear(12, width), nn.Linear(width, 5)
        self.third = nn.Linear(5, 4, bias=False)
        self.third.weight = nn.Parameter(self.third.weight.detach().t().contiguous().t())
        self.activation = nn.PReLU()

    def forward(self, x):
        return self.third(self.activation(self.second(self.activation(self.first(x)))))


def batch_of(rank, step):
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(SEED + 1000 * step + rank))


def trains(rank, options, dtype, on_gpu):
    """Of three steps: this rank's own gradients, and the means."""
    on_host(rank % LOCAL)
    if on_gpu:
        take_the_way_of_a_gpu()
    net = Net().to(dtype)
    first = parameters_of(net)
    differ(net, rank)
    wrapped, own = recorded(net, **NODE, **options)
    assert_same_bits(parameters_of(net), first)  # rank 0's
    assert (wrapped.phub.rank, wrapped.phub.world_size) == (rank, WORLD)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    means = []
    for step in range(3):
        optimizer.zero_grad()
        wrapped(batch_of(rank, step).to(dtype)).square().sum().backward()
        means.append(gradients_of(net))
        optimizer.step()
    wrapped.phub.worker.barrier()
    wrapped.phub.close()
    return own, means


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
WAYS = [  # options, the type, the way of a GPU, and the bits that are left
    ({}, F32, False, 20),
    (SMALL_BUCKETS, F32, False, 20),
    ({"ddp_options": {"gradient_as_bucket_view": False}, "transport": "tcp"}, F32, False, 20),
    (SMALL_BUCKETS, F32, True, 20),
    ({"formats": {"*.weight": "bf16"}}, F32, False, 7),
    ({"gradient_dtype": "fp8-e4m3"}, F32, False, 3),
    ({"reduction": "sum"}, F32, False, 20),
    ({}, BF16, False, 6),
    ({}, F16, False, 9),
]


@pytest.mark.parametrize(("options", "dtype", "on_gpu", "bits"), WAYS, ids=str)
def test_gradients_are_the_mean_of_all_ranks(box, start, options, dtype, on_gpu, bits):
    """As PyTorch computes it."""
    results = start(trains, WORLD, options, dtype, on_gpu).results()
    own, means = zip(*results, strict=True)
    for step in range(3):
        for name in own[0][step]:
            found = torch.stack([each[step][name].float() for each in own])
            expected = found.sum(0) if options.get("reduction") == "sum" else found.mean(0)
            error = (means[0][step][name].float() - expected).abs().max()
            assert error <= found.abs().max() * WORLD * 2.0**-bits, (step, name)
        assert not torch.equal(own[0][step]["first.weight"], own[1][step]["first.weight"])
    for each in means[1:]:
        assert_same_bits(each, means[0])


def whole_numbers(rank, places, is_turned, dtype):
    """In hosts of any ranks, which a process group says, and whose ranks may be others."""
    store, own = f"file://{os.environ['STORE']}", WORLD - 1 - rank if is_turned else rank
    distributed.init_process_group("gloo", init_method=store, rank=own, world_size=WORLD)
    groups = [distributed.new_group(place) for place in places]
    mine = next(group for group, place in zip(groups, places, strict=True) if own in place)
    net = nn.ModuleList(nn.Linear(size, 3, bias=False, dtype=dtype) for size in (1, 2, 5, 64))
    net.forward = lambda inputs: sum(layer(x).sum() for layer, x in zip(net, inputs, strict=True))
    nn.init.constant_(net[3].weight, rank + 1)
    wrapped = phub.ddp(net, node=mine)
    assert (net[3].weight == 1).all()  # rank 0's
    found, expected = [], []
    for step in range(3):
        random = torch.Generator().manual_seed(SEED + step)
        inputs = [
            [torch.randint(-9, 10, (1, layer.in_features), generator=random) for layer in net]
            for _ in range(WORLD)
        ]
        net.zero_grad()
        wrapped([each.to(dtype) for each in inputs[rank]]).backward()
        found.append([layer.weight.grad.clone() for layer in net])
        sums = [torch.stack(each).sum(0) for each in zip(*inputs, strict=True)]
        expected.append([(each / WORLD).to(dtype).expand(3, -1) for each in sums])
    wrapped.phub.worker.barrier()
    wrapped.phub.close()
    distributed.destroy_process_group()
    return found, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("places", "is_turned"),
    [([[0, 1], [2, 3]], False), ([[0, 2], [1, 3]], False), ([[0, 3], [1, 2]], True)],
    ids=str,
)
def test_means_of_whole_numbers_are_exact(box, start, tmp_path, places, is_turned, dtype):
    ranks = start(whole_numbers, WORLD, places, is_turned, dtype, STORE=str(tmp_path / "store"))
    for found, expected in ranks.results():
        assert_same_bits(found, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_rows_have_all_of_a_gradient_and_zeros(size):
    random = torch.Generator().manual_seed(SEED)
    gradients = [torch.randn(shape, generator=random) for shape in ((1,), (7,), (3, 4), (2, 5, 5))]
    gradients.append(torch.randn(4, 6, generator=random).t())
    parts = {str(n): part_of(nn.Parameter(g), size) for n, g in enumerate(gradients)}
    packed = Packed(0, parts, size)
    packed.rows.fill_(float("nan"))
    packed.begin(gradients)
    packed.fill(0.5)
    before, columns = [g.clone() for g in gradients], [p.numel() for p in parts.values()]
    for gradient, rows in zip(gradients, packed.rows.split(columns, 1), strict=True):
        flat = rows.flatten()
        assert torch.equal(flat[: gradient.numel()], 0.5 * gradient.flatten())
        assert not flat[gradient.numel() :].any()
    packed.rows.mul_(2)
    for gradient in gradients:
        gradient.fill_(0)
    packed.take()
    assert_same_bits(gradients, before)
    assert [p.numel() for p in packed.gradients()] == columns


# ---- What is sent.


def sends(rank, options, reports):
    on_host(rank % LOCAL)
    net = Net(8001)
    wrapped = phub.ddp(net, **options)
    for step in range(5):
        if step == 1:
            wrapped.phub.worker.barrier()
            reports.put(rank)
            while reports.qsize():  # the test has looked
                time.sleep(0.01)
        wrapped(batch_of(rank, step)).square().sum().backward()
    wrapped.phub.worker.barrier()
    state = getattr(wrapped.phub, "parts", wrapped.phub)
    stats = state.worker.stats.pushes, sum(state.worker._elements)
    wrapped.phub.close()
    return stats


def received(box):
    with urllib.request.urlopen(f"http://{box.address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = re.findall(r"^phub_core_received_bytes_total\S* (\S+)", text, re.MULTILINE)
    return sum(float(each) for each in found)


def received_at_rest(box):
    last = [-1.0]

    def is_the_same():
        time.sleep(1.5)  # the metrics are of up to a second ago
        last.append(received(box))
        return last[-1] == last[-2]

    wait_until(is_the_same, "no more bytes")
    return last[-1]


@pytest.mark.parametrize(("options", "models"), [({}, WORLD), (NODE, HOSTS)], ids=str)
def test_a_host_sends_one_model_a_step(own_box, start, options, models):
    reports = FORK.Queue()
    ranks = start(sends, WORLD, options, reports, PHUB_SERVER=own_box.address, PHUB_JOB="sent")
    wait_until(lambda: reports.qsize() == WORLD, "a step of all")
    before = received_at_rest(own_box)
    for _ in range(WORLD):
        reports.get()
    results = ranks.results()
    sent = (received_at_rest(own_box) - before) / 4
    elements = sum(p.numel() for p in Net(8001).parameters())
    print(f"{sent / HOSTS:.0f} bytes of a host to the box in a step; a model has {4 * elements}")
    # Besides there are what is rounded up, and digests of the models in some steps.
    assert models * 4 * elements <= sent <= models * 4 * elements * 1.01
    share = elements * models / WORLD
    assert all(share <= elements_of_job <= share + 10 for _, elements_of_job in results)


# ---- Models, and hosts of any size.


class Turned(nn.Module):
    """Uses its layers in an order of each rank's own, so that DDP's buckets would have another."""

    def __init__(self, rank, layers=6):
        super().__init__()
        torch.manual_seed(SEED)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.statistics = nn.BatchNorm1d(4)
        self.rank, self.unused = rank, ()

    def forward(self, x):
        x = self.statistics(x)
        order = range(self.rank, self.rank + len(self.layers))
        used = [at % len(self.layers) for at in order if at % len(self.layers) not in self.unused]
        for at in used:
            x = x + self.layers[at](x).tanh()
        return x.square().sum()


def turns(rank, unused):
    """With find_unused_parameters if ranks use other layers."""
    on_host(rank % LOCAL)
    options = {"ddp_options": {"bucket_cap_mb": 1e-4, "find_unused_parameters": bool(unused)}}
    net = Turned(rank)
    net.unused = unused[rank] if unused else ()
    wrapped, own = recorded(net, **NODE, **options)
    for step in range(3):
        net.zero_grad()
        wrapped(batch_of(rank, step)[:, :4]).backward()
    wrapped.phub.sync_buffers()
    mean = net.statistics.running_mean.clone()
    wrapped.phub.worker.barrier()
    wrapped.phub.close()
    return own[-1], gradients_of(net), mean


@pytest.mark.parametrize("unused", [(), ((0,), (0, 1), (0, 2), (0,))], ids=["all", "some"])
def test_processes_of_a_host_may_use_layers_in_another_order(box, start, unused):
    own, means, statistics = zip(*start(turns, WORLD, unused).results(), strict=True)
    for name in own[0]:
        if unused and name.startswith("layers.0"):
            assert name not in means[0]  # nobody used it
            continue
        expected = torch.stack([each[name] for each in own]).mean(0)
        torch.testing.assert_close(means[0][name], expected, rtol=1e-4, atol=1e-5)
    for each in means[1:]:
        assert_same_bits(each, means[0])
    assert_same_bits(statistics[1:], statistics[:1] * (WORLD - 1))


def has_many_small(rank):
    on_host(rank % LOCAL)
    torch.manual_seed(SEED)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(140)))
    wrapped, own = recorded(net, **NODE)
    for _ in range(2):
        net.zero_grad()
        wrapped(batch_of(rank, 0)[:, :3]).sum().backward()
    keys = wrapped.phub.parts.worker.keys
    wrapped.phub.worker.barrier()
    wrapped.phub.close()
    return own[-1], gradients_of(net), keys


def test_small_parts_are_exchanged_together(box, start):
    own, means, keys = zip(*start(has_many_small, WORLD).results(), strict=True)
    assert keys[0] == ("small-parameters:0",)
    for name in own[0]:
        expected = torch.stack([each[name] for each in own]).mean(0)
        torch.testing.assert_close(means[0][name], expected)


def is_one_of(rank, processes):
    on_host(rank % processes, processes)
    net = Net()
    wrapped, own = recorded(net, **NODE)
    wrapped(batch_of(rank, 0)).square().sum().backward()
    wrapped.phub.worker.barrier()
    wrapped.phub.close()
    return own[0], gradients_of(net)


@pytest.mark.parametrize(("processes", "hosts"), [(3, 1), (1, 3), (3, 2)])
def test_hosts_of_any_number_of_processes(box, start, processes, hosts):
    own, means = zip(*start(is_one_of, processes * hosts, processes).results(), strict=True)
    for name in own[0]:
        expected = torch.stack([each[name] for each in own]).mean(0)
        torch.testing.assert_close(means[-1][name], expected, rtol=1e-4, atol=1e-4)


def overlaps(rank):
    """A mean is given to the host's processes only when all sums of the step were pushed."""
    on_host(rank % LOCAL)
    wrapped = phub.ddp(Net(), **NODE, **SMALL_BUCKETS)
    wrapped(batch_of(rank, 0)).square().sum().backward()  # DDP makes small ones now
    state, pushed = wrapped.phub, threading.Semaphore(0)
    exchange, give_all = state.parts.exchange, state.host.give_all

    def push(bucket):
        if bucket.is_last():
            pushed.release()
        return exchange(bucket)

    def give(*tensors):
        assert pushed.acquire(timeout=60), "what is pushed waits for means"
        pushed.release()
        return give_all(*tensors)

    state.parts.exchange, state.host.give_all = push, give
    wrapped.zero_grad()
    wrapped(batch_of(rank, 0)).square().sum().backward()
    return [len(state._packed), gradients_of(wrapped.module)]


def test_what_is_pushed_does_not_wait_for_means(box, start):
    results = start(overlaps, WORLD).results()
    assert results[0][0] > 1
    assert_same_bits(results[1:], results[:1] * (WORLD - 1))


def is_compiled(rank):
    on_host(rank % LOCAL)
    wrapped, own = recorded(Net(), **NODE)
    compiled = torch.compile(wrapped, backend="eager")
    for _ in range(2):
        wrapped.zero_grad()
        compiled(batch_of(rank, 0)).square().sum().backward()
    wrapped.phub.worker.barrier()
    wrapped.phub.close()
    return own[-1], gradients_of(wrapped.module)


def test_a_compiled_model_is_exchanged(box, start):
    own, means = zip(*start(is_compiled, WORLD).results(), strict=True)
    expected = {name: torch.stack([each[name] for each in own]).mean(0) for name in own[0]}
    torch.testing.assert_close(means[0], expected, rtol=1e-4, atol=1e-4)


# ---- What is refused, and what fails.


def is_refused(rank, places, widths, message):
    on_host(*places[rank])
    refused(message, phub.ddp, Net(widths[rank]), **NODE)


UNEQUAL = "3 ranks are not on hosts with as many processes each.*2 with rank 0, 1 with rank 2"


@pytest.mark.parametrize(
    ("places", "widths", "message"),
    [
        ([(0, 2), (1, 2), (0, 1)], [9, 9, 9], UNEQUAL),
        ([(0, 2), (1, 2), (1, 2), (0, 2)], [9] * 4, "not on hosts.*1 with rank 1"),
        ([(0, 1)] * 3, [9, 9, 8], "rank 2 has other parameters than rank 0"),
    ],
    ids=["unequal", "cyclic", "models"],
)
def test_hosts_and_models_that_are_not_alike(box, start, places, widths, message):
    """All ranks are told."""
    start(is_refused, len(places), places, widths, message).results()


@of_ranks(1)
def test_a_place_that_nobody_says(rank):
    refused("LOCAL_RANK='' and LOCAL_WORLD_SIZE=''.*node=group", phub.ddp, Net(), **NODE)
    on_host(1, 1)
    refused("LOCAL_RANK='1' and LOCAL_WORLD_SIZE='1'", phub.ddp, Net(), **NODE)
    refused("node='host': it is 'reduce', or", phub.ddp, Net(), node="host")
    on_host(0, 1)
    first = phub.ddp(Net(), job=job("late"), **NODE)
    first(batch_of(0, 0)).sum().backward()
    for _ in range(2):
        first.phub.close()
    again = lambda: first(batch_of(0, 0)).sum().backward()  # noqa: E731
    refused(r"close\(\) was called", again, error=phub.BadHandleError)


def trains_on(rank, reports, options, told=None):
    """told: gets the error, after which this process lives on."""
    try:
        return trains_to_the_end(rank, reports, options)
    except phub.Error as error:
        if told is None:
            raise
        told.put((rank, type(error).__name__, str(error)))
        time.sleep(600)


def trains_to_the_end(rank, reports, options):
    on_host(rank % LOCAL)
    net = Net()
    wrapped = phub.ddp(net, **NODE, **options, **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for step in range(20):
        optimizer.zero_grad()
        wrapped(batch_of(rank, step)).square().sum().backward()
        optimizer.step()
        reports.put((rank, step))
        if rank == WORLD - 1 and step == 2:
            time.sleep(600)
    return parameters_of(net)


def begun(start, options, *more, **environment):
    """Ranks of which the last one has done 3 steps, and hangs."""
    reports = FORK.Queue()
    ranks = start(trains_on, WORLD, reports, options, *more, **environment)
    while reports.get(timeout=120) != (WORLD - 1, 2):
        pass
    return ranks


@pytest.mark.parametrize(
    ("end", "options", "kind", "said"),
    [
        (signal.SIGKILL, {}, "RankLostError", "the processes of this host cannot"),
        (signal.SIGSTOP, {"progress_limit_ms": 3000}, "FencedError", "sent nothing for"),
    ],
    ids=["dies", "hangs"],
)
def test_the_other_hosts_go_on_when_a_process(box, start, end, options, kind, said):
    """The other one of its host lives on, and nobody waits for it."""
    told = FORK.Queue()
    ranks = begun(start, options, told)
    ranks.kill(WORLD - 1, end)
    assert_same_bits(ranks.result(0), ranks.result(1))
    rank, found, message = told.get(timeout=60)
    assert (rank, found) == (2, kind), message
    assert said in message


def has_a_nan(rank, told):
    """In the last element, which is of the parts of the last processes of each host."""
    on_host(rank % LOCAL)
    net = Net()
    wrapped = phub.ddp(net, **NODE, on_nonfinite="stop")
    if rank == 0:
        net.first.weight.register_hook(lambda g: g.flatten().put(torch.tensor(-1), NAN).view_as(g))
    try:
        wrapped(batch_of(rank, 0)).sum().backward()
    except phub.Error as error:
        told.put((rank, type(error).__name__))
        time.sleep(600)


NAN = torch.tensor(float("nan"))


def test_an_error_of_one_process_ends_those_of_its_host(box, start):
    """All live on."""
    told = FORK.Queue()
    start(has_a_nan, WORLD, told)
    kinds = dict(told.get(timeout=60) for _ in range(WORLD))
    assert kinds[1] == kinds[3] == "NonFiniteError"
    assert kinds.keys() == set(range(WORLD))


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda _, ranks: ranks.kill(WORLD - 1), phub.RankLostError),
        (lambda box, _: box.kill(), (phub.UnavailableError, phub.RankLostError)),
    ],
    ids=["rank", "box"],
)
def test_all_have_the_error(own_box, start, end, error):
    ranks = begun(start, {"on_loss": "fail"}, PHUB_SERVER=own_box.address, PHUB_JOB="fails")
    end(own_box, ranks)
    for rank in range(WORLD - 1):
        refused(".", ranks.result, rank, error=error)
