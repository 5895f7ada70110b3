"""A tuner drives the branches of a real job: all of them train as they would in one process."""

import copy
import math

import pytest
import torch
from conftest import SEED
from deaths import JOB, death_anywhere
from deaths import STEPS as STEPS_OF_DEATHS
from torch import nn
from torch.nn import functional

import phub
from phub.tuning import Discard, Fork, Policy, Run, Tuner, grid

WORLD, BATCH, STEPS, FIRST_RATE = 2, 64, 160, 1e-5
POLICY = Policy(first_clocks=8, most_clocks=32, window=6, plateau=2, improvement=1e-6)
RULES = {
    "sgd": (
        lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.5),
        (1e-3, 0.3, 1e-2, 1e38),
    ),
    "adam": (torch.optim.Adam, (1e-4, 3e-3, 0.03)),
}


class Blobs(nn.Module):
    """Points around four centres, told apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(SEED)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, step, rank):
        draw = torch.Generator().manual_seed(SEED + 1000 * rank + step)
        labels = torch.randint(4, (BATCH,), generator=draw)
        points = 3 * torch.eye(4, 8)[labels] + torch.randn(BATCH, 8, generator=draw)
        return functional.cross_entropy(self.net(points), labels)


def search_of(rule):
    return lambda: grid({"lr": RULES[rule][1]}, seed=SEED)


def trains(rank, rule):
    """What rank 0's tuner did, its losses, the parameters at the end, and the branches."""
    model = Blobs()
    made = RULES[rule][0](model.parameters(), FIRST_RATE)
    branches = POLICY.branches - 1
    optimizer = phub.DistributedOptimizer(
        made, model, transport="tcp", branches=branches, on_nonfinite="pass"
    )
    events, losses = [], []
    if rank == 0:
        tuner = Tuner(optimizer.worker, search_of(rule), POLICY, report=events.append)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(step, rank)
        losses.append(loss.item())
        if rank == 0:
            tuner.step(losses[-1])
        loss.backward()
        optimizer.step()
    optimizer.worker.barrier()
    alive = [each.branch for each in optimizer.worker.branches()]
    parameters = [p.detach().clone() for p in model.parameters()]
    optimizer.worker.barrier()
    optimizer.close()
    return events, losses, parameters, alive


def replayed(rule, events):
    """Rank 0's losses, of branches that are models and optimizers of one process."""
    model = Blobs()
    branches = {0: (model, RULES[rule][0](model.parameters(), FIRST_RATE))}
    runs, forks = {}, {}
    for event in events:
        if isinstance(event.request, Fork):
            forks.setdefault(event.round, []).append(event)
        elif isinstance(event.request, Run):
            runs.update(dict.fromkeys(event.rounds, event.request.branch))
    losses = []
    for step in range(max(runs)):
        for fork in forks.get(step + 1, []):
            child = copy.deepcopy(branches[fork.request.parent])  # both in one, so they fit
            child[1].param_groups[0].update(fork.request.values)
            branches[fork.branch] = child
        model, optimizer = branches[runs.get(step + 1, 0)]
        optimizer.zero_grad()
        of_ranks = [model(step, rank) for rank in range(WORLD)]
        losses.append(of_ranks[0].item())
        (sum(of_ranks) / WORLD).backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("rule", RULES)
def test_every_branch_trains_as_in_one_process(box, start, monkeypatch, rule):
    monkeypatch.setenv("PHUB_JOB", f"tuned-{rule}")
    ranks = start(trains, WORLD, rule).results()
    events, losses, parameters, alive = ranks[0]
    for mine, others in zip(parameters, ranks[1][2], strict=True):
        assert torch.allclose(mine, others, rtol=0, atol=0, equal_nan=True)  # a trial may run
    tried = [
        e.request.values["lr"] for e in events if isinstance(e.request, Fork) if e.request.values
    ]
    assert set(RULES[rule][1]) <= set(tried)
    for mine, one in zip(losses, replayed(rule, events), strict=False):
        if not math.isfinite(one):
            assert not math.isfinite(mine)
            continue
        assert math.isclose(mine, one, rel_tol=2e-3, abs_tol=2e-3), (mine, one, events)
    made = {0} | {e.branch for e in events if isinstance(e.request, Fork)}
    gone = {e.request.branch for e in events if isinstance(e.request, Discard)}
    assert set(alive) == made - gone


def trains_at_a_box_that_dies(rank, death):
    """As `trains`; and the branches that rank 0's tuner has in the end."""
    model = Blobs()
    made = torch.optim.SGD(model.parameters(), FIRST_RATE, momentum=0.5)
    optimizer = phub.DistributedOptimizer(
        made, model, transport="tcp", job=JOB, branches=POLICY.branches - 1, on_nonfinite="pass"
    )
    tuner = Tuner(optimizer.worker, search_of("sgd"), POLICY) if rank == 0 else None
    lives, losses, known = 1, [], {}
    while True:
        try:
            for step in optimizer.steps(STEPS_OF_DEATHS, **({"tuner": tuner} if tuner else {})):
                if tuner:  # it has begun anew, or knows what it knew
                    course = repr(tuner._driver._course)
                    assert lives == 1 or step not in known or course in (known[step], "[]")
                    known[step] = course
                death.at(rank, step, 0)
                optimizer.zero_grad()
                loss = model(step, rank)
                losses[step:] = [loss.item()]
                if tuner:
                    tuner.step(losses[-1])
                loss.backward()
                death.at(rank, step, 1)
                optimizer.step()
                death.at(rank, step, 2)
            break
        except phub.RewoundError:
            lives += 1
            optimizer.rejoin()
            known = {step: known[step] for step in known if step <= optimizer.steps_done}
    optimizer.synchronize()
    alive = {each.branch for each in optimizer.worker.branches()}
    parameters = [p.detach().clone() for p in model.parameters()]
    optimizer.worker.barrier()
    optimizer.close()
    return lives, parameters, alive, tuner and tuner._driver._alive, losses


def test_a_tuner_goes_on_with_its_job(saving_box, start):
    death = death_anywhere("tuner")
    ranks = start(trains_at_a_box_that_dies, 2, death)
    death.allow_a_checkpoint(saving_box)
    death.await_due()
    saving_box.die_and_come_back()
    death.allow(STEPS_OF_DEATHS)
    (lives, mine, alive, of_tuner, losses), (_, others, *_) = ranks.results()
    assert lives == 2
    assert len(losses) == STEPS_OF_DEATHS
    assert alive == of_tuner
    for one, other in zip(mine, others, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def with_little_room(rank):
    model = Blobs()
    made = torch.optim.SGD(model.parameters(), FIRST_RATE)
    optimizer = phub.DistributedOptimizer(
        made, model, transport="tcp", branches=1, on_nonfinite="pass"
    )
    tuner = Tuner(optimizer.worker, search_of("sgd"), POLICY)
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(step, rank)
            tuner.step(loss.item())
            loss.backward()
            optimizer.step()
    except phub.FullError as full:
        return str(full)
    finally:
        optimizer.close()


def test_a_job_without_room_for_its_branches_says_so(box, start, monkeypatch):
    monkeypatch.setenv("PHUB_JOB", "tuned-small")
    (said,) = start(with_little_room, 1).results()
    assert "branches" in said
