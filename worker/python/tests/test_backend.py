"""torch.distributed with backend "phub": bits in rank order, deaths, and the box of rank 0."""

import contextlib
import os
import random
import re
import signal
import socket
import sys
import time
from unittest.mock import patch

import pytest
import torch
from conftest import PACKAGE, SEED, of_ranks, ran, refused, wait_until
from exact import assert_same_bits
from torch import distributed, nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

import phub
from phub import _group_box, _sums, backend

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])


@contextlib.contextmanager
def group(rank, world, path, **options):
    store = distributed.FileStore(str(path), world)
    distributed.init_process_group("phub", store=store, rank=rank, world_size=world, **options)
    try:
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()


def drawn(world, numbers, dtype, draw):
    """A tensor of each rank, the same everywhere; its elements are of many sizes."""
    every = []
    for _ in range(world):
        powers = torch.randint(-6, 6, (numbers,), generator=draw)
        every.append((torch.randn(numbers, generator=draw) * 2.0**powers).to(dtype))
    return every


def reduced(every, op=ReduceOp.SUM):
    """In rank order; of 16 bits in float32."""
    short = every[0].dtype in (torch.bfloat16, torch.float16)
    total = every[0].float() if short and op != ReduceOp.PRODUCT else every[0].clone()
    for each in every[1:]:
        total = total * each if op == ReduceOp.PRODUCT else total + each.to(total.dtype)
    total = total.to(every[0].dtype)
    return total / len(every) if op == ReduceOp.AVG else total


def check_reductions(rank, world):
    dice = random.Random(SEED)
    draw = torch.Generator().manual_seed(SEED)
    sizes = [0, 1, 255, 256, 257, 1023, 1 << 20, (1 << 20) + (1 << 18) + 5]
    sizes += [dice.randint(1, 1 << dice.randint(1, 21)) for _ in range(12)]
    for numbers in sizes:
        dtype = dice.choice(FLOATS)
        op = dice.choice([ReduceOp.SUM, ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT])
        every = drawn(world, numbers, dtype, draw)
        expected = reduced(every, op)
        mine = every[rank].clone()
        work = distributed.all_reduce(mine, op, async_op=dice.random() < 0.5)
        assert work is None or work.wait()
        assert_same_bits(mine, expected)
        root = dice.randrange(world)
        mine = every[rank].clone()
        distributed.reduce(mine, root, op)
        assert_same_bits(mine, expected if rank == root else every[rank])


@TRANSPORTS
def test_reductions_are_in_rank_order(box, start, tmp_path, transport):
    def body(rank, world):
        os.environ["PHUB_TRANSPORT"] = transport
        with group(rank, world, tmp_path / "store"):
            assert distributed.get_backend() == "phub"
            check_reductions(rank, world)

    start(body, 3, 3).results()


@of_ranks(4)
def test_reductions_of_parts(rank, tmp_path):
    draw = torch.Generator().manual_seed(SEED)
    with group(rank, 4, tmp_path / "store"):
        for dtype in FLOATS:
            every = drawn(4, 4 * 3001, dtype, draw)
            expected = reduced(every).view(4, -1)[rank]
            output = torch.zeros(3001, dtype=dtype)
            distributed.reduce_scatter_tensor(output, every[rank].clone())
            assert_same_bits(output, expected)
            output.zero_()
            distributed.reduce_scatter(output, list(every[rank].view(4, -1).unbind()))
            assert_same_bits(output, expected)
            columns = every[rank].view(3001, 4)[:, 1].clone().view(-1, 1).expand(-1, 2)[:, :1]
            distributed.all_reduce(columns)  # not contiguous
            assert_same_bits(columns.reshape(-1), reduced([e.view(3001, 4)[:, 1] for e in every]))


@of_ranks(3)
def test_many_at_once(rank, tmp_path):
    draw = torch.Generator().manual_seed(SEED)
    with group(rank, 3, tmp_path / "store"):
        every = [drawn(3, 1 + 37 * i, torch.float32, draw) for i in range(60)]
        every += [drawn(3, 300_000 + i, torch.float32, draw) for i in range(6)]
        mine = [each[rank].clone() for each in every]
        works = [distributed.all_reduce(each, async_op=True) for each in mine]
        assert all(work.wait() and work.is_completed() for work in works)
        assert_same_bits(mine, [reduced(each) for each in every])
        future = distributed.all_reduce(mine[0], async_op=True).get_future()
        assert future.wait()[0] is mine[0]
        mine = [each[rank].clone() for each in every]
        with distributed._coalescing_manager():
            for each in mine:
                distributed.all_reduce(each)
        assert_same_bits(mine, [reduced(each) for each in every])


@of_ranks(3)
def test_what_has_the_same_bits_anyhow(rank, tmp_path):
    with group(rank, 3, tmp_path / "store"):
        numbers = torch.tensor([rank, 7 - rank], dtype=torch.int64)
        all_expected = {
            ReduceOp.SUM: [3, 18],
            ReduceOp.PRODUCT: [0, 210],
            ReduceOp.MAX: [2, 7],
            ReduceOp.MIN: [0, 5],
            ReduceOp.BOR: [3, 7],
            ReduceOp.BAND: [0, 4],
        }
        for op, expected in all_expected.items():
            mine = numbers.clone()
            distributed.all_reduce(mine, op)
            assert mine.tolist() == expected
        largest = torch.tensor([-1.5 * rank])
        distributed.all_reduce(largest, ReduceOp.MAX)
        assert largest.item() == 0
        mine = torch.full((5,), float(rank))
        distributed.broadcast(mine, 2)
        assert mine.tolist() == [2.0] * 5
        found = [None] * 3
        distributed.all_gather_object(found, {"rank": rank})
        assert [each["rank"] for each in found] == [0, 1, 2]
        output = torch.zeros(3, dtype=torch.int32)
        distributed.all_to_all_single(output, torch.arange(3, dtype=torch.int32) + 10 * rank)
        assert output.tolist() == [rank, 10 + rank, 20 + rank]
        got = torch.zeros(2)
        sends = distributed.isend(torch.full((2,), float(rank)), (rank + 1) % 3)
        distributed.recv(got, (rank - 1) % 3)
        sends.wait()
        assert got.tolist() == [(rank - 1) % 3] * 2
        distributed.barrier()


@of_ranks(3)
def test_what_is_moved_has_its_bits(rank, tmp_path):
    """Bytes of any number, and of words that would be NaNs with a payload."""
    dice = random.Random(SEED)
    draw = torch.Generator().manual_seed(SEED)
    with group(rank, 3, tmp_path / "store"):
        for length in [0, 1, 3, 1023, 1025, *(dice.randint(1, 3_000_000) for _ in range(6))]:
            every = [
                torch.randint(256, (length,), dtype=torch.uint8, generator=draw) for _ in "abc"
            ]
            root = dice.randrange(3)
            mine = every[rank].clone()
            distributed.broadcast(mine, root)
            assert torch.equal(mine, every[root])
            found = [torch.empty(length, dtype=torch.uint8) for _ in range(3)]
            distributed.all_gather(found, every[rank])
            assert_same_bits(found, every)
            together = torch.empty(3 * length, dtype=torch.uint8)
            distributed.all_gather_into_tensor(together, every[rank])
            assert torch.equal(together, torch.cat(every))
            if length:
                found = [torch.empty(length, dtype=torch.uint8) for _ in range(3)]
                work = distributed.all_gather(found, every[rank], async_op=True)
                assert work.wait()
                assert work.result() == found
        strided = torch.zeros(4, 6)[:, ::2]
        distributed.broadcast(strided.copy_(torch.full((4, 3), float(rank))), 1)
        assert strided.unique().tolist() == [1.0]


@of_ranks(2)
def test_memory_is_left_alone_afterwards(rank, tmp_path):
    """What comes later on the same keys is for other memory."""
    with group(rank, 2, tmp_path / "store"):
        every = [torch.ones(256, dtype=torch.int32) for _ in range(2 * _sums.TURNS)]
        for each in every:
            distributed.broadcast(each, 0)
            each.fill_(7)
        for _ in every:
            distributed.barrier()
        assert all((each == 7).all() for each in every)


@of_ranks(4)
def test_groups_of_some_ranks(rank, tmp_path):
    with group(rank, 4, tmp_path / "store"):
        mesh = distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for name, expected in {"a": rank % 2 * 2 + 2, "b": rank // 2 * 4 + 1}.items():
            mine = torch.full((1000,), float(rank))
            distributed.all_reduce(mine, group=mesh.get_group(name))
            assert set(mine.tolist()) == {float(expected)}
        odd = distributed.new_group([1, 3])
        if rank in (1, 3):
            mine = torch.tensor([float(rank)])
            distributed.all_reduce(mine, group=odd)
            assert mine.item() == 4
        distributed.barrier()


@of_ranks(3)
def test_ddp(rank, tmp_path):
    def make():
        torch.manual_seed(SEED)
        return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 3))

    def gradients(net, at):
        draw = torch.Generator().manual_seed(SEED + at)
        net.zero_grad()
        net(torch.randn(16, 20, generator=draw)).square().sum().backward()
        return [parameter.grad.clone() for parameter in net.parameters()]

    third = torch.tensor(1 / 3)  # that DDP multiplies by
    alone = [[each * third for each in gradients(make(), at)] for at in range(3)]
    with group(rank, 3, tmp_path / "store"):
        torch.manual_seed(SEED + rank)
        net = make() if rank == 0 else nn.Sequential(*make())
        model = DistributedDataParallel(net)
        found = gradients(model, rank)
    assert_same_bits(found, [reduced(list(each)) for each in zip(*alone, strict=True)])
    return found


def test_a_death_is_named(box, start, tmp_path):
    """Also of a rank that nobody heard of since the last collective."""

    def body(rank):
        store = distributed.FileStore(str(tmp_path / "store"), 3)
        distributed.init_process_group("phub", store=store, rank=rank, world_size=3)
        mine = torch.ones(100_000)

        begun = []

        def reduce_for_long():
            for _ in range(100_000):
                begun.append(time.monotonic())
                distributed.all_reduce(mine)

        refused("rank 1", reduce_for_long, error=phub.RankLostError)
        took = time.monotonic() - begun[-1]
        refused(
            "rank 1", distributed.all_reduce(mine, async_op=True).wait, error=phub.RankLostError
        )
        distributed.destroy_process_group()
        return took

    ranks = start(body, 3)
    time.sleep(1 + random.Random(SEED).random())
    ranks.kill(1)
    for rank in (0, 2):
        assert ranks.result(rank) < 2.5  # the lease is 3 s: it was the connection's end


def test_a_rank_that_ends_early_is_missed(box, start, tmp_path, monkeypatch):
    """A sum of the others alone would be wrong, and nobody would know."""
    monkeypatch.setattr(backend, "_END_S", 0.5)

    def body(rank):
        with group(rank, 2, tmp_path / "store"):
            distributed.all_reduce(torch.ones(3))
            if rank == 0:
                refused("rank 1", distributed.all_reduce, torch.ones(3), error=phub.RankLostError)

    start(body, 2).results()


def test_the_box_ends_with_the_last_rank(start, tmp_path):
    def body(rank):
        store = distributed.FileStore(str(tmp_path / "store"), 2)
        distributed.init_process_group("phub", store=store, rank=rank, world_size=2)
        distributed.all_reduce(torch.ones(3))
        meeting = distributed.group.WORLD._meeting
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return meeting.server

    ranks = start(body, 2)
    host, port = ranks.result(1).split(":")

    def is_gone():
        with socket.socket() as caller:
            return caller.connect_ex((host, int(port))) != 0

    wait_until(is_gone, "the box has ended", 20)


def test_groups_share_the_box(start, tmp_path):
    def body(rank):
        servers = set()
        for turn in range(3):
            with group(rank, 2, tmp_path / f"store{turn}"):
                distributed.all_reduce(torch.ones(3))
                servers.add(distributed.group.WORLD._meeting.server)
        return len(servers)

    assert start(body, 2).results() == [1, 1]


def test_hosts_need_a_box(start, tmp_path):
    def body(rank):
        refuse = "several hosts.*PHUB_SERVER"
        kind = phub.InvalidError if rank == 0 else phub.UnavailableError
        with patch.object(_group_box, "_host", lambda: f"host {rank}"):
            refused(refuse, group(rank, 2, tmp_path / "store").__enter__, error=kind)

    start(body, 2).results()


def test_a_box_that_cannot_start(start, tmp_path):
    def body(rank):
        given = {"PHUB_PROGRAM": "/bin/false"}
        with patch.dict(os.environ, given):
            refused("did not start", group(rank, 2, tmp_path / "store").__enter__,
                    error=phub.UnavailableError)  # fmt: skip

    start(body, 2).results()


@pytest.mark.parametrize("order", ["phub, torch", "torch, phub"])
def test_the_name_is_known(order, tmp_path):
    program = (
        f"import {order}\n"
        "from torch import distributed\n"
        f"store = distributed.FileStore({str(tmp_path / 'store')!r}, 1)\n"
        "distributed.init_process_group('cpu:phub', store=store, rank=0, world_size=1)\n"
        "mine = torch.ones(3)\n"
        "distributed.all_reduce(mine)\n"
        "print(mine.tolist(), type(distributed.group.WORLD).__module__)\n"
    )
    done = ran("-c", program)
    assert done.stdout == "[1.0, 1.0, 1.0] phub.backend\n", done.stderr


@pytest.mark.parametrize("number", range(2))
def test_the_listings_of_the_page(number, tmp_path):
    listings = re.findall(
        r"^```python\n(.*?)^```$", (PACKAGE / "backend.md").read_text(), re.M | re.S
    )
    (tmp_path / "reduce.py").write_text(listings[number])
    done = ran("-m", "phub", "run", "-n", "4", "--", sys.executable, "reduce.py", cwd=tmp_path)
    lines = sorted(done.stdout.splitlines())
    end = ["1.25", "in rank order"][number]
    assert lines == [f"{rank}| rank {rank}: {end}" for rank in range(4)], done.stdout + done.stderr
    assert len(listings) == 2


def test_pieces():
    dice = random.Random(SEED)
    for length in [1, 1023, 1024, 1025, *(dice.randint(1, 1 << 28) for _ in range(200))]:
        for unit in (2, 4):
            begin = 0
            for at, first in _sums.cut(length, unit):
                assert first == begin < length
                begin += _sums.SIZES[at] * unit
            assert 0 <= begin - length < 256 * unit
