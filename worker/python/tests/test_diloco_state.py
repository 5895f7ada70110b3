"""Trainings of replicas that stop and go on, to the bit, and replicas of several processes."""

import os
from unittest.mock import patch

import pytest
import torch
from conftest import SavingBox, leave, of_ranks, refused
from deaths import FORK, JOB, STEPS, NoDeath, death_anywhere, live
from exact import assert_same_bits, job, saved
from models import loss_of, make_net
from test_diloco import HOW, STREAMING, made, make_step, net_of, now
from test_rejoin import Batches
from test_rejoin import make_net as make_stateful
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import phub
from phub import _outer_state

HALF, WHOLE = 12, 24  # steps


def stops_and_goes_on(rank, how, half):
    net = net_of(rank, how)
    outer, inner = made(net, how, job("whole"))
    for step in range(WHOLE):
        make_step(net, inner, rank, step)
        if step == half - 1:
            state = saved([net.state_dict(), outer.state_dict()])
    expected = now(net), outer.base()
    leave(outer)

    net = net_of(rank + 1, how)
    outer, inner = made(net, how, job("second"))
    net.load_state_dict(state[0])
    outer.load_state_dict(state[1])
    assert outer.steps_done == half
    for step in range(half, WHOLE):
        make_step(net, inner, rank, step)
    assert_same_bits((now(net), outer.base()), expected, f"rank {rank}")
    leave(outer)


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("diloco", HALF),
        ("diloco", HALF + 1),
        ("late", HALF + 2),
        ("streaming", HALF),
        ("bfloat16", HALF),
        ("two-inner", HALF),
        ("local-sgd", HALF + 3),
    ],
)
def test_a_state_goes_on_to_the_bit(box, start, name, half):
    start(stops_and_goes_on, 2, HOW[name], half).results()


@of_ranks(2)
def test_a_state_of_something_else_is_refused(rank):
    net = net_of(rank, {})
    outer, inner = made(net, STREAMING, job("states"))
    for step in range(3):
        make_step(net, inner, rank, step)
    refused("state_dict.. after step 3: with fragments=3", outer.state_dict, error=RuntimeError)
    for step in range(3, 6):
        make_step(net, inner, rank, step)
    state = outer.state_dict()
    assert ("momentum_buffer" in state["outer"]) == (rank == 0)
    leave(outer)
    others = [
        ({**STREAMING, "sync_every": 7}, "sync_every=6, and this one has sync_every=7"),
        ({**STREAMING, "fragments": 2}, "fragments=3, and this one has fragments=2"),
        ({**STREAMING, "kind": "both"}, "of 1 inner optimizers, and this DiLoCo has 2"),
        (
            {**STREAMING, "parameter_dtype": "int8"},
            "load_state_dict.. with parameter_dtype='int8'",
        ),
    ]
    for number, (how, message) in enumerate(others):
        other, _ = made(net_of(rank, {}), how, job(f"other-{number}"))
        refused(message, other.load_state_dict, state)
        leave(other)
    other, _ = made(net_of(rank, {}), STREAMING, job("lacks"))
    del state["outer"]["base"]
    refused("the state lacks 'base'", other.load_state_dict, state)
    leave(other)
    if rank == 0:
        refuses_another_outer_state()


def refuses_another_outer_state():
    """And loads no part of the state."""
    net = net_of(0, {})
    how = {**STREAMING, "rank": 0, "world_size": 1}
    outer, inner = made(net, how, job("alone"))
    for step in range(6):
        make_step(net, inner, 0, step)
    state = saved(outer.state_dict())
    leave(outer)
    for number, (what, message) in enumerate(
        [
            ("base", "shape .1,. for parameter '2.weight'"),
            ("momentum_buffer", "shape .1,. for parameter '2.weight'"),
            ("steps", "no steps of parameter '2.weight'"),
        ]
    ):
        of_outer = dict(state["outer"][what])
        if what == "steps":
            del of_outer["2.weight"]
        else:
            of_outer["2.weight"] = torch.zeros(1)
        bad = {**state, "outer": {**state["outer"], what: of_outer}}
        other, (inner,) = made(net_of(0, {}), how, job(f"bad-{number}"))
        refused(message, other.load_state_dict, bad)
        assert other.steps_done == 0
        assert not inner.state_dict()["state"]
        leave(other)


# ---- The box saves what each rank has.


def trains(rank, how, name, death):
    net = make_stateful()
    inner = AdamW(net.parameters(), 1e-2, foreach=False)
    outer = phub.DiLoCo(net, inner, job=name, **how)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 7, 0.8)
    batches = Batches(rank)
    torch.manual_seed(rank)  # for the dropout

    def make_step(step):
        death.at(rank, step, 0)
        inner.zero_grad()
        inputs, labels = next(batches)
        nn.functional.cross_entropy(net(inputs), labels).backward()
        death.at(rank, step, 1)
        inner.step()
        death.at(rank, step, 2)
        schedule.step()

    lives = live(outer, make_step, schedule=schedule, batches=batches)
    result = [net.state_dict(), inner.state_dict(), outer.base()]
    outer.worker.barrier()
    return lives, result


SAVED = {
    "diloco": {"sync_every": 2},
    "late": {"sync_every": 3, "delay": 2, "transport": "tcp"},
    "streaming": {"sync_every": 3, "fragments": 3, "delay": 1, "alpha": 0.25},
    "int4": {"sync_every": 2, "fragments": 2, "delta": "int4"},
}


@pytest.mark.parametrize("name", SAVED)
def test_a_training_goes_on_after_the_boxs_death(saving_box, start, name):
    calm = start(trains, 2, SAVED[name], "calm", NoDeath()).results()
    death = death_anywhere(name, SAVED[name]["sync_every"])
    found = death.happens(saving_box, start(trains, 2, SAVED[name], JOB, death))
    assert_same_bits(found, [(2, result) for _, result in calm])


def test_programs_that_are_started_again_go_on(saving_box, start):
    how = SAVED["streaming"]
    expected = start(trains, 2, how, "calm", NoDeath()).results()
    death = death_anywhere("of all", how["sync_every"])
    death.happens_to_all(saving_box, start(trains, 2, how, JOB, death))
    assert_same_bits(start(trains, 2, how, JOB, NoDeath()).results(), expected)


def loses_the_box_early(rank, begun, gone):
    net = make_stateful()
    outer = phub.DiLoCo(net, SGD(net.parameters(), 0.1), job=JOB, **SAVED["late"])

    def train():
        for _ in outer.steps(STEPS):
            net(torch.ones(2, 12)).sum().backward()
            outer._inner[0].step()
            if outer.steps_done == 4:  # a result is under way
                begun.set()
                assert gone.wait(60)

    with pytest.raises(phub.RewoundError):
        train()
    outer.rejoin()


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(memory_path, start):
    begun, gone = FORK.Event(), FORK.Event()
    with SavingBox(memory_path, 1000) as box:
        ranks = start(loses_the_box_early, 1, begun, gone, PHUB_SERVER=box.address)
        assert begun.wait(60)
        box.die_and_come_back()
        gone.set()
        refused("gone before its first checkpoint", ranks.result, 0)


@of_ranks(1)
def test_steps_are_counted(rank):
    net = net_of(rank, {})
    outer, (inner,) = made(net, STREAMING, job("steps"))
    refused("steps.7. with fragments=3.*multiple of sync_every=6", outer.steps, 7)
    for step in outer.steps(6):
        make_step(net, [inner], rank, step)
        refused("in a loop over steps", outer.synchronize, error=RuntimeError)
    outer.synchronize()
    assert list(outer.steps(6)) == []
    with patch.object(_outer_state, "_SAVED_BYTES", 1000):
        refused("box saves at most 1000 of a rank", lambda: list(outer.steps(12)))
    refused("step 6 of steps.. was not made", lambda: list(outer.steps(12)), error=RuntimeError)
    outer.close()


# ---- An island of several processes, in DDP.

ISLANDS, PROCESSES = 2, 2


def begin(rank, folder):
    """The group of this process's island, which island it is, and the place there."""
    island, place = divmod(rank, PROCESSES)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ISLANDS * PROCESSES
    )
    groups = [
        distributed.new_group([i * PROCESSES + at for at in range(PROCESSES)])
        for i in range(ISLANDS)
    ]
    return groups[island], island, place


def trains_in_islands(rank, folder, how):
    group, island, place = begin(rank, folder)
    net = make_net()
    with torch.no_grad():
        net[2].weight.add_(rank)
    net.register_buffer("of_island", torch.tensor([float(rank)]))  # DDP gives it to all of one
    model = DistributedDataParallel(net, process_group=group)
    inner = SGD([p for p in net.parameters() if p.requires_grad], 0.1, momentum=0.9)
    refused("a DDP of 2 processes", phub.DiLoCo, model, inner)
    options = {"rank": island, "world_size": ISLANDS}
    seen = []
    outer = phub.DiLoCo(model, inner, job="islands", process_group=group, **options, **how)
    for step in range(8):
        inner.zero_grad()
        loss_of(model, rank, step).backward()
        inner.step()
        seen.append(now(net))
    assert outer.steps_done == 8
    if not place:  # all hear of a state that the first process cannot load
        without = {**outer.state_dict(), "outer": {}} if outer._course.is_even else None
    elif outer._course.is_even:
        without = outer.state_dict()
    if outer._course.is_even:
        error = phub.RankLostError if place else phub.InvalidError
        refused(
            "lacks 'base'|first process of this island", outer.load_state_dict, without, error=error
        )
    if place:
        refused("first process of this island's", lambda: outer.rank)
    else:
        assert (outer.rank, outer.world_size) == (island, ISLANDS)
        assert "0.weight" in outer.worker.keys  # as of a replica without DDP
    refused("steps.. and process_group", outer.steps, 9)
    refused("rejoin.. and process_group", outer.rejoin)
    outer.synchronize()
    outer.sync_buffers()
    assert net.of_island.item() == (0 + PROCESSES) / ISLANDS  # the first processes' mean
    seen.append(now(net))
    distributed.barrier()
    outer.close()
    distributed.destroy_process_group()
    return seen


@pytest.mark.parametrize("how", [{"sync_every": 3}, {**STREAMING, "alpha": 0.0}])
def test_islands_train_as_one_replica_each(box, start, tmp_path, how):
    found = start(trains_in_islands, ISLANDS * PROCESSES, tmp_path, how).results()
    for island in range(ISLANDS):
        assert_same_bits(found[2 * island], found[2 * island + 1])
    assert_same_bits(found[0][-1], found[2][-1])
    assert any(not torch.equal(found[0][0][name], found[2][0][name]) for name in found[0][0])


def fails_in_an_island(rank, folder):
    group, island, _ = begin(rank, folder)
    net = make_net()
    model = DistributedDataParallel(net, process_group=group)
    inner = SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    given = {"process_group": group}
    assert os.environ["PHUB_WORLD_SIZE"] == str(ISLANDS * PROCESSES)  # as phub run has it
    refused("a rank of the job is a whole island", phub.DiLoCo, model, inner, **given)
    refused("proximal=0.1 and process_group", phub.DiLoCo, model, inner, proximal=0.1, **given)
    options = {"rank": island, "world_size": ISLANDS, "on_loss": "fail"}
    outer = phub.DiLoCo(model, inner, job="fails", process_group=group, sync_every=2, **options)
    if island:
        if rank % PROCESSES == 0:
            outer.worker.abandon()
        return None
    try:
        for step in range(4):  # the first exchange may be complete without the other island
            inner.zero_grad()
            loss_of(model, rank, step).backward()
            inner.step()
    except phub.RankLostError as error:
        return str(error)
    return None


def test_all_of_an_island_hear_of_an_error(box, start, tmp_path):
    said, of_others, *_ = start(fails_in_an_island, ISLANDS * PROCESSES, tmp_path).results()
    assert "rank 1" in said
    assert "first process of this island" in of_others
