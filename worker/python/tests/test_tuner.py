"""A tuner drives the branches of a real job: all of them train as they would in one process."""

import math

import pytest
import torch
from blobs import RULES, WORLD, begun, replayed
from conftest import SEED, of_ranks
from deaths import JOB, death_anywhere
from deaths import STEPS as STEPS_OF_DEATHS
from exact import parameters_of

import phub
from phub.tuning import Discard, Fork, Policy, Run, Tuner, grid

STEPS = 160
POLICY = Policy(first_clocks=8, most_clocks=32, window=6, plateau=2, improvement=1e-6)


def search_of(rule):
    return lambda: grid({"lr": RULES[rule][1]}, seed=SEED)


def made(rule, branches=POLICY.branches - 1, **options):
    model, plain = begun(rule)
    options = {"transport": "tcp", "on_nonfinite": "pass", "branches": branches, **options}
    return model, phub.DistributedOptimizer(plain, model, **options)


def trains(rank, rule):
    """What rank 0's tuner did, its losses, the parameters at the end, and the branches."""
    model, optimizer = made(rule)
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
    parameters = list(parameters_of(model).values())
    optimizer.worker.barrier()
    optimizer.close()
    return events, losses, parameters, alive


@pytest.mark.parametrize("rule", RULES)
def test_every_branch_trains_as_in_one_process(box, start, rule):
    ranks = start(trains, WORLD, rule).results()
    events, losses, parameters, alive = ranks[0]
    for mine, others in zip(parameters, ranks[1][2], strict=True):
        assert torch.allclose(mine, others, rtol=0, atol=0, equal_nan=True)  # a trial may run
    tried = [
        e.request.values["lr"] for e in events if isinstance(e.request, Fork) if e.request.values
    ]
    assert set(RULES[rule][1]) <= set(tried)
    runs, forks = {}, []
    for e in events:
        if isinstance(e.request, Fork):
            forks.append((e.round, e.branch, e.request.parent, e.request.values))
        elif isinstance(e.request, Run):
            runs.update(dict.fromkeys(e.rounds, e.request.branch))
    ran = [runs.get(at, 0) for at in range(1, max(runs) + 1)]
    for mine, (one, _) in zip(losses, replayed(rule, ran, forks), strict=False):
        if not math.isfinite(one):
            assert not math.isfinite(mine)
            continue
        assert math.isclose(mine, one, rel_tol=2e-3, abs_tol=2e-3), (mine, one, events)
    made = {0} | {e.branch for e in events if isinstance(e.request, Fork)}
    gone = {e.request.branch for e in events if isinstance(e.request, Discard)}
    assert set(alive) == made - gone


def trains_at_a_box_that_dies(rank, death):
    """As `trains`; and the branches that rank 0's tuner has in the end."""
    model, optimizer = made("sgd", job=JOB)
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
    parameters = list(parameters_of(model).values())
    optimizer.worker.barrier()
    optimizer.close()
    return lives, parameters, alive, tuner and tuner._driver._alive, losses


def test_a_tuner_goes_on_with_its_job(saving_box, start):
    death = death_anywhere("tuner")
    ranks = death.happens(saving_box, start(trains_at_a_box_that_dies, 2, death))
    (lives, mine, alive, of_tuner, losses), (_, others, *_) = ranks
    assert lives == 2
    assert len(losses) == STEPS_OF_DEATHS
    assert alive == of_tuner
    for one, other in zip(mine, others, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@of_ranks(1)
def test_a_job_without_room_for_its_branches_says_so(rank):
    model, optimizer = made("sgd", branches=1)
    tuner = Tuner(optimizer.worker, search_of("sgd"), POLICY)

    def train():
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(step, rank)
            tuner.step(loss.item())
            loss.backward()
            optimizer.step()

    with pytest.raises(phub.FullError, match="branches"):
        train()
    optimizer.close()
