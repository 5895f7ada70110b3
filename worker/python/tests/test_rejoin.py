"""Boxes and ranks that die in a training, which goes on: to the bit as if nothing had died."""

import functools
import random
import signal

import pytest
import torch
from conftest import EVERY, SEED, SavingBox, leave, of_ranks, pushed, refused, wait_until
from deaths import FORK, JOB, STEPS, NoDeath, death_anywhere, live
from exact import assert_same_bits, job, parameters_of
from models import descend
from torch import nn

import phub
from phub.tuning import ByBranch


def make_net():
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.3), nn.Linear(24, 5)
    )


class Batches:
    """In an order of its own, in which it can go on."""

    def __init__(self, rank):
        self.random = torch.Generator().manual_seed(SEED + rank)

    def __next__(self):
        inputs = torch.randn(8, 12, generator=self.random)
        return inputs, torch.randint(5, (8,), generator=self.random)

    def state_dict(self):
        return {"random": self.random.get_state()}

    def load_state_dict(self, state):
        self.random.set_state(state["random"])


def made(net, name, **options):
    plain = torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)
    return phub.DistributedOptimizer(plain, net, job=name, **options)


def trains(rank, overlap, transport, zero_copy, scaled, gradient_dtype, name, death):
    net = make_net()
    options = {"overlap": overlap, "transport": transport, "zero_copy": zero_copy}
    options |= {"gradient_dtype": gradient_dtype, "on_nonfinite": "skip" if scaled else "stop"}
    optimizer = made(net, name, **options)
    scaler = phub.GradScaler(optimizer, growth_interval=4, enabled=scaled)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
    batches = Batches(rank)
    torch.manual_seed(SEED + rank)  # for the dropout

    def make_step(step):
        death.at(rank, step, 0)
        optimizer.zero_grad()
        inputs, labels = next(batches)
        scaler.scale(nn.functional.cross_entropy(net(inputs), labels)).backward()
        death.at(rank, step, 1)
        scaler.step(optimizer)
        death.at(rank, step, 2)
        scaler.update()
        schedule.step()

    lives = live(optimizer, make_step, schedule=schedule, batches=batches, scaler=scaler)
    optimizer.synchronize()
    result = [each.state_dict() for each in (net, optimizer, scaler)]
    optimizer.worker.barrier()
    return lives, result


@pytest.mark.parametrize(
    "how",
    [
        ("backward", "shm", False, False, "f32"),
        ("backward", "tcp", False, True, "f32"),
        ("forward", "shm", False, True, "f32"),
        ("backward", "shm", True, False, "f32"),
        ("backward", "tcp", False, False, "int4"),
    ],
    ids=lambda how: "-".join(map(str, how)),
)
def test_a_training_goes_on_after_the_boxs_death(saving_box, start, how):
    calm = start(trains, 2, *how, "calm", NoDeath()).results()
    death = death_anywhere(how)
    found = death.happens(saving_box, start(trains, 2, *how, JOB, death))
    assert_same_bits(found, [(2, result) for _, result in calm])


def test_programs_that_are_started_again_go_on(saving_box, start):
    """After all have died: box and ranks."""
    how = "backward", "shm", False, True, "topk"
    ((_, expected), *_) = start(trains, 2, *how, "calm", NoDeath()).results()
    death = death_anywhere("of all")
    death.happens_to_all(saving_box, start(trains, 2, *how, JOB, death))
    found, _ = start(trains, 2, *how, JOB, NoDeath()).results()
    assert_same_bits(found, (1, expected))


def loses_the_box_early(rank, begun, gone):
    net = make_net()
    optimizer = made(net, JOB)

    def train():
        for _ in optimizer.steps(STEPS):
            net(torch.ones(2, 12)).sum().backward()
            optimizer.step()
            begun.set()
            assert gone.wait(60)

    with pytest.raises(phub.RewoundError):
        train()
    optimizer.rejoin()


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(memory_path, start):
    begun, gone = FORK.Event(), FORK.Event()
    with SavingBox(memory_path, 1000) as box:
        ranks = start(loses_the_box_early, 1, begun, gone, PHUB_SERVER=box.address)
        assert begun.wait(60)
        box.die_and_come_back()
        gone.set()
        refused("gone before its first checkpoint", ranks.result, 0)


@of_ranks(1)
def test_steps_are_made_once_each_and_all_of_them(rank):
    net = make_net()
    optimizer = made(net, job("steps"))

    class Unsafe:
        def state_dict(self):
            return {"net": net}

    def begins(optimizer, steps, **kept):
        next(optimizer.steps(steps, **kept))

    refused("numbers, strings, tensors", begins, optimizer, 3, unsafe=Unsafe())
    assert next(iter(optimizer.steps(1))) == 0
    message = "step 0 of steps.. was not made"
    refused(message, lambda: list(optimizer.steps(2)), error=RuntimeError)
    other = made(net, job("other"))
    other.step()
    refused("before steps", begins, other, 3, error=RuntimeError)


# ---- A rank dies.


def trains_on(rank, name, begun, joined, steps):
    net = make_net().eval()  # without dropout: whatever the rank, its state follows from the step
    optimizer = made(net, name, lease_ms=2000)
    if optimizer.steps_done:
        joined.set()
    for step in optimizer.steps(steps):
        if step == 3 and rank == 1:
            begun.set()
            signal.pause()
        if step == steps - 1:
            assert joined.wait(60)
        inputs = torch.full((4, 12), 0.1 * step + rank)
        descend(optimizer, net(inputs).square().sum())
    return parameters_of(net)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_go_on_without_a_rank_and_with_its_successor(box, start, end):
    begun, joined = FORK.Event(), FORK.Event()
    name = f"successor-{end}"
    ranks = start(trains_on, 4, name, begun, joined, 12)
    assert begun.wait(60)
    ranks.kill(1, end)
    wait_until(lambda: box.status(name)["completed_round"] > 4, "a step without the rank")
    ranks.kill(1)
    ranks.replace(1)
    results = ranks.results()
    assert_same_bits(results, [results[0]] * 4)


# ---- The ranks make the steps themselves: their own file has all.


NO_SCALER = torch.amp.GradScaler(enabled=False)


def learn(model, optimizer, scaler, schedule, batch, here):
    """A step; here(place) is called in it."""
    here(0)
    optimizer.zero_grad()
    inputs, labels = batch
    scaler.scale(nn.functional.cross_entropy(model(inputs), labels)).backward()
    here(1)
    scaler.step(optimizer)
    here(2)
    scaler.update()
    schedule.step()


def lives_on(rank, file, name, death):
    """The lives of a program as in README.md."""
    lives = 0
    while True:
        lives += 1
        net = make_net()
        model = phub.ddp(net, job=name, connect_timeout_ms=60_000)
        try:
            return lives, lives_once(rank, file, net, model, death)
        except (phub.UnavailableError, phub.NotFoundError, phub.FencedError):
            pass
        finally:
            model.phub.close()


def lives_once(rank, file, net, model, death):
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
    kept = {"model": net, "optimizer": optimizer, "schedule": schedule}
    first = 0
    if file.exists():  # all ranks are here, so rank 0 does not write it any more
        saved = torch.load(file)
        first = saved["step"]
        for name, each in kept.items():
            each.load_state_dict(saved[name])
    for step in range(first, STEPS):
        if rank == 0 and step % EVERY == 0:
            states = {name: each.state_dict() for name, each in kept.items()}
            torch.save({"step": step, **states}, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
        torch.manual_seed(SEED + 1000 * step + rank)
        batch = torch.randn(8, 12), torch.randint(5, (8,))
        here = functools.partial(death.at, rank, step)
        learn(model, optimizer, NO_SCALER, schedule, batch, here)
    model.phub.worker.barrier()  # nobody leaves before all have made the last step
    return parameters_of(net), optimizer.state_dict()


def test_ddp_goes_on_from_the_programs_own_checkpoint(saving_box, start, tmp_path):
    calm = start(lives_on, 2, tmp_path / "calm.pt", "calm", NoDeath()).results()
    death = death_anywhere()
    death.allow(STEPS - 1)
    ranks = start(lives_on, 2, tmp_path / "training.pt", JOB, death)
    death.await_due()
    saving_box.die_and_come_back()
    death.allow(STEPS)
    assert_same_bits(ranks.results(), [(2, result) for _, result in calm])


# ---- What a rank has for itself is of the branch that runs: as in a job of its own.

RATE, OTHER, THIRD = 0.05, 0.2, 0.01
FORKED = 6


def turns():
    """(branch, rounds), after which branch 1 runs; the third is forked meanwhile."""
    draw = random.Random(SEED)
    turns = [(draw.choice((0, 1)), draw.randint(1, 3)) for _ in range(12)]
    return [*turns, (2, 8), (0, 2), (2, 4), 1]


def interleaves(worker):
    assert worker.fork(0, {"lr": OTHER, "batch": SIZE}, round=FORKED) == (1, FORKED)
    assert [each.batch for each in worker.branches()] == [0, SIZE]
    assert worker.schedule(*turns()[:12], 0, round=FORKED) == FORKED


def forks_again(worker):
    """Of a branch that may wait."""
    done = FORKED + sum(rounds for _, rounds in turns()[:12])
    assert worker.fork(0, {"lr": THIRD}, round=done)[0] == 2
    worker.schedule(*turns()[12:], round=done)


SAMPLES, OWN_SIZE, SIZE = 160, 16, 8  # no batch of one sample, which BatchNorm refuses


def learns(rank, job, decide, death, small_from=None):
    """(branch, batch, loss) of each step, and what the rank has in the end. `small_from`: batches
    are small from this round on; None: they are as the server says."""
    torch.manual_seed(SEED)
    inputs, labels = torch.randn(SAMPLES, 12), torch.randint(5, (SAMPLES,))
    net = make_net()
    made = torch.optim.SGD(net.parameters(), RATE, momentum=0.5)
    optimizer = phub.DistributedOptimizer(made, net, transport="tcp", job=job, branches=2)
    sampler = phub.Sampler(labels, rank=rank, world_size=2, seed=SEED)
    torch.manual_seed(SEED + rank)
    course = {}

    def make_step(step):
        death.at(rank, step, 0)
        if rank == 0 and step == 1:  # the optimizer's own values went out in step 0
            for each in decide:
                each(optimizer.worker)
        batch = optimizer.worker.batch_in(step + 1)
        if small_from is not None:
            batch = SIZE if step + 1 >= small_from else 0
        at = sampler.next(batch or OWN_SIZE)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs[at]), labels[at])
        course[step] = optimizer.worker.branch_in(step + 1), batch, loss.item()
        loss.backward()
        death.at(rank, step, 1)
        optimizer.step()
        death.at(rank, step, 2)

    live(optimizer, make_step, sampler=sampler)
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    leave(optimizer)
    return [course[step] for step in sorted(course)], buffers


def changes(rate, round_):
    """Of a job that is not forked: this rate from this round on."""
    return lambda worker: worker.set_hyper({"lr": rate}, round=round_)


def of(branch, course):
    return [losses for running, *losses in course if running == branch]


def test_each_branch_has_its_own_statistics_order_batches_and_random_numbers(box, start):
    def alone(name, *decide, small_from=FORKED + STEPS):
        ranks = start(learns, 2, name, decide, NoDeath(), small_from).results()
        return [course for course, _ in ranks]

    both = start(learns, 2, "both", (interleaves, forks_again), NoDeath()).results()
    forked = len(of(0, both[0][0][: FORKED - 1 + sum(n for _, n in turns()[:12])]))
    root = alone("root")
    child = alone("child", changes(OTHER, FORKED), small_from=FORKED)
    third = alone("third", changes(THIRD, forked + 1))
    for rank in range(2):
        course = both[rank][0]
        assert {(branch, batch) for branch, batch, _ in course} == {(0, 0), (1, SIZE), (2, 0)}
        befores, alone_ = (0, FORKED - 1, forked), (root[rank], child[rank], third[rank])
        for branch, (before, expected) in enumerate(zip(befores, alone_, strict=True)):
            mine = of(branch, course)
            assert mine == of(0, expected)[before : before + len(mine)], (branch, turns())
    assert both[0][0] != both[1][0]


def test_they_are_in_the_checkpoints(saving_box, start):
    calm = start(learns, 2, "calm", (interleaves, forks_again), NoDeath()).results()
    death = death_anywhere("branches")
    ranks = start(learns, 2, JOB, (interleaves, forks_again), death)
    assert_same_bits(death.happens(saving_box, ranks), calm)


def test_what_fails_is_told_and_can_be_done_again(box):
    worker = phub.Worker({"key": 8}, job="fails", optimizer="sgd", branches=1)
    worker.wait_all()
    fails, state = [True], [b"zero"]

    def save():
        if fails[0]:
            raise KeyError("not now")
        return state[0]

    own = ByBranch(save, state.append)
    branch, at = worker.fork(0)
    while worker.round("key") + 1 < at:
        assert own.begin(worker) == 0
        pushed(worker, "key")
    with pytest.raises(KeyError):
        own.begin(worker)
    fails[0] = False
    assert own.begin(worker) == 0
    again = ByBranch(save, state.append)
    again.restore(own.saved())
    assert again.saved() == own.saved()
    for wrong in (b"", own.saved()[:-1], own.saved() + b"x"):
        with pytest.raises(phub.MismatchError):
            again.restore(wrong)
    at = worker.schedule(branch)
    state[0] = b"zero'"
    while worker.round("key") + 1 < at:
        pushed(worker, "key")
        again.begin(worker)
    assert state == [b"zero'", b"zero"]
