"""A population of branches, of which the worst learn from the best."""

import copy
import math
import random
import types

import pytest
from conftest import SEED, refused
from test_tuner import Late
from test_tuning import CURVATURES, RATES, Descent, alone, first_below

from phub._decisions import lives
from phub._population import decisions_of
from phub._trials import Course, judge
from phub.tuning import Between, Discard, Driver, Fork, Policy, Population, Run

PLAN = Policy(branches=6, window=10, plateau=4)


def grown(world, policy=PLAN, space=RATES, seed=SEED, clocks=4000):
    """All requests, with what they were answered, until it ends or has run so many clocks."""
    decisions = of(policy, space, seed)
    requests, answer, said = decisions.requests(), None, []
    while len(world.losses) < clocks:
        try:
            request = requests.send(answer)
        except StopIteration:
            return decisions, said
        answer = world.answer(request)
        said.append((request, answer))
    return decisions, said


def of(policy, space, seed):
    return decisions_of(policy, Population(space, seed))


def lately(losses):
    """In the second half of a turn."""
    turn = losses[-PLAN.window :]
    half = turn[-max(1, len(turn) // 2) :]
    return sum(half) / len(half)


def diverged(losses, start):
    return judge(losses[-640:], start).course is Course.DIVERGED


@pytest.mark.parametrize("seed", range(5))
def test_it_comes_near_the_best_fixed_rate_wherever_it_begins(seed):
    world = Descent(noise=0.3, seed=seed)
    grown(world, seed=seed)
    assert world.most <= PLAN.branches
    fixed = min(
        at
        for i in range(11)
        if (at := first_below(alone(RATES["lr"].at(i / 10), 3000), 1e-3)) is not None
    )
    reached = first_below(world.losses, 1e-3)
    assert reached is not None
    assert reached < 4 * PLAN.branches * fixed


def test_the_worst_become_children_of_the_best_with_values_near_theirs():
    heard, values, starts, factors = {}, {}, {}, []
    _, said = grown(Descent())
    for (before, _), (request, answer) in zip([(None, None), *said], said, strict=False):
        if isinstance(request, Run):
            heard.setdefault(request.branch, []).extend(answer)
        if not isinstance(request, Fork):
            continue
        parent = request.parent
        starts[answer] = lately(heard[parent]) if parent in heard else starts.get(parent, 1.0)
        if not request.values:
            continue
        values[answer] = request.values["lr"]
        if parent == 0:  # the first ones
            starts[answer] = sum(CURVATURES)
            continue
        losses = {
            branch: math.inf if diverged(each, starts[branch]) else lately(each)
            for branch, each in heard.items()
        }
        worst = losses.pop(before.branch)
        del heard[before.branch]
        others = filter(math.isfinite, losses.values())
        assert not math.isfinite(worst) or worst >= max(others)
        if parent in losses:  # or a copy of what was the best, as all diverged
            assert losses[parent] == min(losses.values())
            factors.append(values[answer] / values[parent])
    near = [math.isclose(factor, 0.8) or math.isclose(factor, 1.2) for factor in factors]
    assert len(factors) > 10
    assert 0.5 < sum(near) / len(near) < 1, "some are drawn anew"


def test_what_is_drawn_follows_from_the_seed():
    def course(seed):
        return [request for request, _ in grown(Descent(noise=0.1, seed=1), seed=seed)[1]]

    assert course(3) == course(3)
    assert course(3) != course(4)


def test_where_all_diverge_it_ends_with_what_there_was():
    world = Descent()
    decisions, said = grown(world, space={"lr": Between(1e6, 1e7)})
    assert [*world.branches] == [0]
    assert (decisions.best, decisions.safe) == (None, 0)
    assert decisions.why == "the population has diverged, all of it"
    assert isinstance(said[-1][0], Discard)


def test_where_all_diverge_later_they_begin_again_from_a_copy_of_the_best():
    world, ruined, forks, before = Descent(), set(), [], [None]

    def answer(request, answer=world.answer):
        turn_begins = isinstance(request, Run) and isinstance(before[0], Fork)
        before[0] = request
        if turn_begins and not ruined and len(world.losses) > 100:
            ruined.update(world.branches)
        if isinstance(request, Run) and request.branch in ruined:
            return [math.nan] * request.clocks
        if isinstance(request, Fork) and ruined:
            forks.append(request)
        return answer(request)

    world.answer = answer
    decisions, said = grown(world)
    (copy_of_best,) = {request.parent for request in forks[: PLAN.branches - 1]}
    assert copy_of_best in [made for request, made in said if isinstance(request, Fork)]
    assert not any(isinstance(r, Run) and r.branch == copy_of_best for r, _ in said)
    assert math.isfinite(decisions.best.losses[-1])


def test_they_begin_again_with_values_near_those_of_the_copy():
    """Which the best of the last turn, a worse one, does not have."""
    members, near = PLAN.branches - 1, []

    class Noted(Population):
        def near(self, values, draw):
            near.append(values)
            return super().near(values, draw)

    def losses(branch, clocks):
        turn = max(0, clocks - members) // (members * PLAN.window)
        best = turn + 1  # of the first turn 1, of the second 2
        return math.nan if turn == 2 else (1.3 if branch == best else 1.5) + 0.1 * turn

    requests, answer = decisions_of(PLAN, Noted(RATES, SEED)).requests(), None
    made, clocks = {}, 0
    while len(near) < 2 + members:
        request = requests.send(answer)
        answer = None
        if isinstance(request, Fork):
            answer = len(made) + 1
            made[answer] = request.values
        elif isinstance(request, Run):
            answer = [losses(request.branch, clocks)] * request.clocks
            clocks += request.clocks
    assert near == [made[1], made[2], *[made[1]] * members]


def test_noise_alone_ends_hardly_any():
    draw, decisions = random.Random(1), of(Policy(branches=6, plateau=1000), RATES, 1)
    requests, answer, made, killed, clocks = decisions.requests(), None, 0, 0, 0
    while clocks < 10_000:
        request = requests.send(answer)
        answer = None
        if isinstance(request, Fork):
            answer = made = made + 1
        elif isinstance(request, Run):
            answer = [math.exp(draw.gauss(0, 0.5)) for _ in range(request.clocks)]
            clocks += request.clocks
        else:
            killed += sum(t.branch == request.branch and not lives(t) for t in decisions.trials)
    assert killed < 6  # of 200 turns


def test_one_that_finds_nothing_better_ends_with_the_best_alone():
    world = Descent()
    world.answer = lambda request, answer=world.answer: (
        [1.0 + request.branch] * request.clocks if isinstance(request, Run) else answer(request)
    )
    decisions, _ = grown(world)
    assert decisions.best.branch == decisions.safe == 1
    assert [*world.branches] == [1]
    assert decisions.why == "the population finds no lower loss any more"


def test_values_stay_in_their_ranges_and_lists():
    momentum = Between(0, 0.9, logarithmic=False)
    space = {"lr": Between(0.5, 1), "momentum": momentum, "batch": (8, 16, 32)}
    population, draw = Population(space), random.Random(SEED)
    values, seen = population().propose(), {name: set() for name in space}
    for _ in range(300):
        values = population.near(values, draw)
        for name, value in values.items():
            seen[name].add(value)
    for name in ("lr", "momentum"):
        assert min(seen[name]) == space[name].low
        assert max(seen[name]) == space[name].high
    assert seen["batch"] == {8, 16, 32}
    refused("needs a hyperparameter", Population, {})


@pytest.mark.parametrize("latest", [0, 5])
def test_a_late_driver_carries_it_out_and_goes_on_from_its_state(latest):
    draw = random.Random(SEED)
    job = Late(lambda: 1 + draw.randint(0, latest))
    space = {"lr": Between(1e-4, 3)}
    policy = Policy(branches=4, window=8, plateau=5)
    driver = Driver(job, of(policy, space, SEED), 0)
    states = []
    while job.round < 1000 and not driver.done:
        driver.hear(*job.step())
        driver.decide()
        if job.round in (40, 100, 160):
            states.append((copy.deepcopy(driver.state_dict()), driver.branch))
        assert len(driver.state_dict()["course"]) < 40, "it is that of a turn"
    if not driver.done:
        driver.stop()
    assert job.there() == {driver.branch}
    state, _ = job.states[driver.branch]  # one that has begun to rise may be the lowest still
    assert abs(state) < 0.1
    for state, branch in states:
        again = Driver(types.SimpleNamespace(), of(policy, space, SEED), 0)
        again.load_state_dict(copy.deepcopy(state), state["alive"], [(0, branch)])
        assert repr(again.state_dict()) == repr(state)
