"""Boxes and ranks that die in a training, which goes on: to the bit as if nothing had died."""

import functools
import signal

import pytest
import torch
from conftest import EVERY, SEED, SavingBox, of_ranks, wait_until
from deaths import FORK, JOB, STEPS, NoDeath, death_anywhere, live
from exact import assert_same_bits, job, parameters_of
from torch import nn

import phub

NO_SCALER = torch.amp.GradScaler(enabled=False)


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


# ---- The box makes the steps.


def trains(rank, overlap, transport, zero_copy, scaled, gradient_dtype, name, death):
    net = make_net()
    optimizer = phub.DistributedOptimizer(
        torch.optim.AdamW(net.parameters(), 1e-2, foreach=False),
        net,
        overlap=overlap,
        transport=transport,
        zero_copy=zero_copy,
        gradient_dtype=gradient_dtype,
        on_nonfinite="skip" if scaled else "stop",
        job=name,
    )
    scaler = phub.GradScaler(optimizer, growth_interval=4, enabled=scaled)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
    batches = Batches(rank)
    torch.manual_seed(SEED + rank)  # for the dropout

    def make_step(step):
        here = functools.partial(death.at, rank, step)
        learn(net, optimizer, scaler, schedule, next(batches), here)

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
    ranks = start(trains, 2, *how, JOB, death)
    death.allow_a_checkpoint(saving_box)
    death.await_due()
    saving_box.kill()
    ranks.end()
    saving_box.die_and_come_back()
    found, _ = start(trains, 2, *how, JOB, NoDeath()).results()
    assert_same_bits(found, (1, expected))


def loses_the_box_early(rank, begun, gone):
    net = make_net()
    optimizer = phub.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net, job=JOB)

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
    box = SavingBox(memory_path, 1000)
    begun, gone = FORK.Event(), FORK.Event()
    ranks = start(loses_the_box_early, 1, begun, gone, PHUB_SERVER=box.address)
    try:
        assert begun.wait(60)
        box.die_and_come_back()
        gone.set()
        with pytest.raises(phub.InvalidError, match="gone before its first checkpoint"):
            ranks.result(0)
    finally:
        box.kill()


@of_ranks(1)
def test_steps_are_made_once_each_and_all_of_them(rank):
    net = make_net()
    optimizer = phub.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net)

    class Unsafe:
        def state_dict(self):
            return {"net": net}

    with pytest.raises(phub.InvalidError, match="numbers, strings, tensors"):
        next(optimizer.steps(3, unsafe=Unsafe()))
    assert next(iter(optimizer.steps(1))) == 0
    with pytest.raises(RuntimeError, match="step 0 of steps.. was not made"):
        for _ in optimizer.steps(2):
            pass
    other = phub.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net, job=job("other"))
    other.step()
    with pytest.raises(RuntimeError, match="before steps"):
        next(other.steps(3))


# ---- A rank dies.


def trains_on(rank, begun, joined, steps):
    net = make_net().eval()  # without dropout: whatever the rank, its state follows from the step
    optimizer = phub.DistributedOptimizer(
        torch.optim.AdamW(net.parameters(), 1e-2), net, lease_ms=2000
    )
    if optimizer.steps_done:
        joined.set()
    for step in optimizer.steps(steps):
        if step == 3 and rank == 1:
            begun.set()
            signal.pause()
        if step == steps - 1:
            assert joined.wait(60)
        inputs = torch.full((4, 12), 0.1 * step + rank)
        net(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(net)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_go_on_without_a_rank_and_with_its_successor(box, start, end):
    begun, joined = FORK.Event(), FORK.Event()
    ranks = start(trains_on, 4, begun, joined, 12, PHUB_JOB=f"successor-{end}")
    assert begun.wait(60)
    ranks.kill(1, end)
    name = f"successor-{end}"
    wait_until(lambda: box.status(name)["completed_round"] > 4, "a step without the rank")
    ranks.kill(1)
    ranks.replace(1)
    results = ranks.results()
    for each in results[1:]:
        assert_same_bits(each, results[0])


# ---- The ranks make the steps themselves: their own file has all.


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
