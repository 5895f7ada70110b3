"""Backend "phub": calls that do not fit, modes of autograd, and groups one after the other."""

import os
import signal
import threading
import time

import pytest
import torch
from conftest import of_ranks, refused
from test_backend import group
from torch import distributed

import phub
from phub import _group_work, backend


def ones(numbers, dtype=torch.float32):
    return torch.ones(numbers, dtype=dtype)


# What rank 0 does, what the others do, and what all of them are told.
DIFFERENT = {
    "lengths": (
        lambda: distributed.all_reduce(ones(100)),
        lambda: distributed.all_reduce(ones(200)),
        "rank 0: all_reduce.sum. of 100 float32, rank [12]: all_reduce.sum. of 200 float32",
    ),
    "formats": (
        lambda: distributed.all_reduce(ones(100)),
        lambda: distributed.all_reduce(ones(100, torch.float64)),
        "of 100 float32, rank [12]: all_reduce.sum. of 100 float64",
    ),
    "operations": (
        lambda: distributed.all_reduce(ones(100)),
        lambda: distributed.all_reduce(ones(100), distributed.ReduceOp.MAX),
        "all_reduce.sum. .* all_reduce.max.",
    ),
    "roots": (
        lambda: distributed.broadcast(ones(5), 0),
        lambda: distributed.broadcast(ones(5), 1),
        "broadcast of 5 float32 with root 0, .* with root 1",
    ),
    "calls": (
        lambda: distributed.barrier(),
        lambda: distributed.all_gather([ones(5), ones(5), ones(5)], ones(5)),
        "rank 0: barrier, rank [12]: all_gather of 15 float32",
    ),
    "wrong there": (
        lambda: distributed.all_gather([ones(5), ones(5), ones(5)], ones(5)),
        lambda: distributed.all_gather([ones(5), ones(5)], ones(5)),
        "rank [12]: a call that failed|all_gather: 2 tensors for 3 ranks",
    ),
}


@pytest.mark.parametrize("later", [False, True])
@of_ranks(3)
def test_ranks_that_differ_are_told(rank, tmp_path, later):
    with group(rank, 3, tmp_path / "store"):
        if later:  # all kinds of jobs are there
            distributed.all_reduce(ones(3))
            distributed.all_reduce(ones(3, torch.float64))
        for mine, others, text in DIFFERENT.values():
            refused(text, mine if rank == 0 else others)
            every = [torch.zeros(2) for _ in range(3)]
            distributed.all_gather(every, torch.full((2,), float(rank)))
            assert [each[1].item() for each in every] == [0, 1, 2]


# What writes behind an output, or into a part of it.
WRONG = {
    "shorter": (lambda: distributed.reduce_scatter_tensor(ones(4), ones(8000)), "4 torch.float32"),
    "shorter list": (
        lambda: distributed.reduce_scatter(ones(4), [ones(1000), ones(1000)]),
        "4 torch.float32 of this rank, where 1000",
    ),
    "list": (lambda: distributed.reduce_scatter(ones(4), [ones(4)]), "1 tensors for 2 ranks"),
    "uneven": (lambda: distributed.all_gather_into_tensor(ones(9), ones(4)), "9 elements for 2"),
    "gather into": (lambda: distributed.all_gather_into_tensor(ones(6), ones(4)), "4 torch.f"),
    "other format": (
        lambda: distributed.all_gather_into_tensor(ones(8, torch.int32), ones(4)),
        "float32 of this rank, where 4 torch.int32",
    ),
    "broadcast": (lambda: distributed.all_gather([ones(3), ones(3)], ones(1)), "1 torch.float32"),
}


@of_ranks(2)
def test_what_does_not_fit_is_refused(rank, tmp_path):
    with group(rank, 2, tmp_path / "store"):
        for wrong, text in WRONG.values():
            refused(text, wrong)
        refused("4 torch.float32 of this rank, where 4 torch.float64",
                lambda: distributed.distributed_c10d._get_default_group()._reduce_scatter_base(
                    ones(4), ones(8, torch.float64)).wait())  # fmt: skip
        mine = ones(3)
        distributed.all_reduce(mine)
        assert mine.tolist() == [2, 2, 2]


@of_ranks(2)
def test_parts_of_different_lengths(rank, tmp_path):
    with group(rank, 2, tmp_path / "store"):
        every = [torch.zeros(4), torch.zeros(5)]
        distributed.all_gather(every, torch.full((4 + rank,), rank + 1.0))
        assert [each.tolist() for each in every] == [[1] * 4, [2] * 5]
        output = torch.zeros(4 + rank)
        distributed.reduce_scatter(output, [ones(4), ones(5)])
        assert output.tolist() == [2] * (4 + rank)


def exchanged(rank, later):
    """With parameters, and tensors that are not contiguous."""
    mine = torch.nn.Parameter(torch.full((4, 2), rank + 1.0))
    every = [torch.zeros(4, 2) for _ in range(2)]
    whole, strided = torch.zeros(8, 2), torch.nn.Parameter(torch.ones(4, 2)).T
    assert not strided.is_contiguous()
    for work in (
        distributed.all_gather(every, mine, async_op=later),
        distributed.all_gather_into_tensor(whole, mine, async_op=later),
        distributed.all_reduce(strided, distributed.ReduceOp.AVG, async_op=later),
        distributed.broadcast(strided, 0, async_op=later),
    ):
        assert work is None or work.wait()
    assert not any(each.requires_grad for each in [*every, whole])
    assert (
        [each[0, 0].item() for each in every] == [whole[0, 0].item(), whole[7, 1].item()] == [1, 2]
    )
    assert (strided == 1).all()
    distributed.all_reduce(mine, async_op=later) if later else distributed.all_reduce(mine)
    distributed.barrier()
    assert (mine == 3).all()


@pytest.mark.parametrize("later", [False, True])
@of_ranks(2)
def test_modes_of_autograd(rank, tmp_path, later):
    with group(rank, 2, tmp_path / "store"):
        exchanged(rank, later)
        with torch.no_grad():
            exchanged(rank, later)
        with torch.inference_mode():
            exchanged(rank, later)


@of_ranks(3)
def test_one_after_the_other_in_one_store(rank, tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"), 3)
    for turn in range(4):
        distributed.init_process_group("phub", store=store, rank=rank, world_size=3)
        mine = torch.full((1000,), rank + float(turn))
        distributed.all_reduce(mine)
        assert (mine == 3 + 3 * turn).all()
        distributed.destroy_process_group()


def test_a_server_for_some(start, tmp_path):
    def body(rank):
        os.environ.pop("PHUB_SERVER", None)
        if rank == 1:
            os.environ["PHUB_SERVER"] = "127.0.0.1:9"
        kind = phub.InvalidError if rank == 0 else phub.UnavailableError
        text = "rank 1 has PHUB_SERVER in its environment, rank 0 has not"
        refused(text, group(rank, 2, tmp_path / "store").__enter__, error=kind)

    start(body, 2).results()


def test_the_end_has_one_limit(box, start, tmp_path, monkeypatch):
    """Whatever the number of formats."""
    monkeypatch.setattr(backend, "_END_S", 1.0)

    def body(rank):
        with group(rank, 2, tmp_path / "store"):
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32):
                distributed.all_reduce(ones(3, dtype))
            if rank == 1:
                time.sleep(5)
                os._exit(0)
            began = time.monotonic()
        return time.monotonic() - began

    assert start(body, 2).result(0) < 3


@of_ranks(1)
def test_an_interrupt_is_one(rank):
    """And not an error of the future, which takes no KeyboardInterrupt."""
    assert rank == 0
    work = _group_work.Work([])
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        _group_work.Course().run(lambda: time.sleep(30), work, later=False)
    assert work.is_completed()
    assert not work.is_success()
