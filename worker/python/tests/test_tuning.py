"""What a tuner decides, held to brute force; what it needs of a box is a branch of numbers here."""

import math
import random

import pytest
from conftest import SEED

import phub
from phub._trials import Course, judge
from phub.tuning import Between, Decisions, Discard, Fork, Policy, Run, grid, sampled, tpe

CURVATURES = (1.0, 0.3, 0.1, 0.03)
RATES = {"lr": Between(1e-4, 10)}
POINTS = 11


class Descent:
    """Branches of a gradient descent on a sum of squares."""

    def __init__(self, noise=0.0, seed=0):
        self.noise, self.draw = noise, random.Random(seed)
        self.branches = {0: ([1.0] * len(CURVATURES), {"lr": 1e-3})}
        self.made, self.most = 1, 1
        self.losses = []

    def answer(self, request):
        if isinstance(request, Fork):
            state, values = self.branches[request.parent]
            self.branches[self.made] = (list(state), values | request.values)
            self.made += 1
            self.most = max(self.most, len(self.branches))
            return self.made - 1
        if isinstance(request, Discard):
            del self.branches[request.branch]
            return None
        state, values = self.branches[request.branch]
        losses = []
        for _ in range(request.clocks):
            losses.append(sum(c * x * x for c, x in zip(CURVATURES, state, strict=True)))
            for at, curvature in enumerate(CURVATURES):
                jitter = 1 + self.noise * self.draw.gauss(0, 1)
                state[at] *= 1 - 2 * values["lr"] * curvature * jitter
            if losses[-1] > 1e30:
                losses[-1] = math.nan
        self.losses += losses
        return losses


def tuned(world, policy, search, clocks):
    """Runs a tuner for so many clocks. Returns its decisions, and whether it ended by itself."""
    decisions = Decisions(policy, search)
    requests, answer = decisions.requests(), None
    try:
        while len(world.losses) < clocks:
            answer = world.answer(requests.send(answer))
    except StopIteration:
        return decisions, True
    return decisions, False


def first_below(losses, goal):
    return next((at for at, loss in enumerate(losses) if loss < goal), None)


def alone(rate, clocks):
    world = Descent()
    world.branches[0] = (world.branches[0][0], {"lr": rate})
    return world.answer(Run(0, clocks))


# ---- What losses say.


def test_speeds_by_hand():
    falling = [10 - 0.5 * at for at in range(20)]
    verdict = judge(falling)
    # Ten windows of two: the last mean is 0.75. Nothing rises.
    assert verdict.course is Course.CONVERGING
    assert verdict.loss == 0.75
    assert verdict.speed == (10 - 0.75) / 20
    assert judge(falling, start=5).speed == (5 - 0.75) / 20
    jumping = [4.0, 1.0, 3.0, 1.0]
    assert judge(jumping).course is Course.UNSTABLE  # it falls by 3, and rises by 2
    assert judge(jumping).speed == (3 - 2) / 4
    assert judge([1.0, 2.0]).speed == 0
    for bad in (math.nan, math.inf):
        assert judge([3.0, 2.0, bad]).course is Course.DIVERGED
    assert judge([]).course is judge([7.0]).course is Course.UNSTABLE


def test_a_rest_of_the_windows_is_left_out_at_the_front():
    assert judge([100.0, 3.0, 2.0, 1.0], windows=3).loss == 1
    assert judge([5.0] + [4.0] * 3 + [1.0] * 3, windows=2).speed == (5 - 1) / 7


# ---- What is tried.


def test_a_grid_has_all_combinations_once():
    space = {"lr": Between(1e-4, 1), "momentum": (0.0, 0.9), "decay": Between(0, 3, False)}
    search = grid(space, 4, SEED)
    rows = []
    while (row := search.propose()) is not None:
        rows.append((round(math.log10(row["lr"]), 9), row["momentum"], row["decay"]))
    exponents = (-4, round(-4 + 4 / 3, 9), round(-4 + 8 / 3, 9), 0)
    expected = [(e, m, d) for e in exponents for m in (0.0, 0.9) for d in (0, 1, 2, 3)]
    assert sorted(rows) == sorted(expected)


@pytest.mark.parametrize("make", [sampled, tpe])
def test_draws_are_in_their_range_and_over_all_of_it(make):
    if make is tpe:
        pytest.importorskip("optuna", reason="optuna is not installed: no search by TPE")
    space = {"lr": Between(1e-6, 1), "momentum": (0.0, 0.5, 0.9)}
    search = make(space, 60, SEED)
    decades = set()
    for _ in range(60):
        row = search.propose()
        assert 1e-6 <= row["lr"] <= 1
        assert row["momentum"] in space["momentum"]
        decades.add(math.floor(math.log10(row["lr"])))
        search.tell(row, row["lr"])
    assert search.propose() is None
    assert len(decades) > 2


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Between(0, 1),
        lambda: Between(1, 1),
        lambda: Between(1, math.inf),
        lambda: grid({}),
        lambda: grid({"lr": ()}),
        lambda: grid(RATES, 1),
        lambda: Policy(branches=2).check(),
        lambda: Policy(first_clocks=20, most_clocks=10).check(),
        lambda: Policy(compare="beauty").check(),
        lambda: Policy(schedule="none").check(),
    ],
)
def test_what_cannot_be_is_refused(bad):
    with pytest.raises(phub.InvalidError):
        bad()


# ---- What is decided.


def test_a_branch_that_diverges_at_once_goes_back():
    """In the first window after its search: to what it was forked from, and its value is bad."""
    world = Descent()
    decisions = Decisions(Policy(), lambda: grid({"lr": (0.3, 0.1)}, 2))
    requests, answer = decisions.requests(), None
    while decisions.best is None:
        answer = world.answer(requests.send(answer))
    best = decisions.best.branch
    while not (isinstance(request := requests.send(answer), Run)):
        answer = world.answer(request)
    answer = [math.nan] * request.clocks
    while best in world.branches:
        answer = world.answer(requests.send(answer))
    assert list(world.branches) == [0]
    assert world.branches[0][0] == [1.0] * len(CURVATURES)
    bad = decisions.best.values
    while not isinstance(request := requests.send(answer), Run):
        answer = world.answer(request)
        if isinstance(request, Fork):
            assert request.values != bad


@pytest.mark.parametrize("schedule", ["whole", "slices"])
@pytest.mark.parametrize("compare", ["speed", "loss"])
def test_the_best_of_what_was_tried_is_found(schedule, compare):
    """Without noise losses only fall, or rise for ever: each value alone tells which is best."""
    world = Descent()
    policy = Policy(schedule=schedule, slice_clocks=3, compare=compare, branches=POINTS + 2)
    decisions = Decisions(policy, lambda: grid(RATES, POINTS, SEED))
    requests, answer = decisions.requests(), None
    while decisions.best is None:
        answer = world.answer(requests.send(answer))
    clocks = len(decisions.best.losses)
    ends = {}
    for trial in decisions.trials:
        losses = alone(trial.values["lr"], clocks)
        assert trial.losses == losses[: len(trial.losses)]
        if all(map(math.isfinite, losses)) and len(trial.losses) == clocks:
            ends[trial.values["lr"]] = sum(losses[-(clocks // 10) :])
    assert decisions.best.values["lr"] == min(ends, key=ends.get)
    assert world.most <= policy.branches


@pytest.mark.parametrize("branches", [3, 4, 6])
def test_no_more_branches_than_there_may_be(branches):
    world = Descent(noise=0.5, seed=SEED)
    tuned(world, Policy(branches=branches, first_clocks=2), lambda: sampled(RATES, 20, SEED), 2000)
    assert 2 < world.most <= branches


def test_trials_count_and_the_goal_is_reached_soon():
    """Against the best fixed rate of the grid, which nobody knows beforehand."""
    goal = 1e-3
    world = Descent(noise=0.3, seed=SEED)
    rates = [RATES["lr"].at(i / (POINTS - 1)) for i in range(POINTS)]
    tuned(world, Policy(), lambda: grid(RATES, POINTS, SEED), 3000)
    reached = first_below(world.losses, goal)
    clocks = {rate: first_below(alone(rate, 3000), goal) for rate in rates}
    assert reached is not None
    others = sorted(found for found in clocks.values() if found is not None)
    # All rates one after another, each until it is there or has diverged, need far more.
    assert reached < sum(others)


def test_nothing_is_left_over_when_all_diverge():
    world = Descent()
    decisions, ended = tuned(world, Policy(), lambda: grid({"lr": (50.0, 90.0)}, 2), 5000)
    assert ended
    assert decisions.best is None
    assert list(world.branches) == [0]


def test_a_branch_that_diverges_later_goes_back():
    """The best rate of a search is too large from some clock on."""

    class Cliff(Descent):
        def answer(self, request):
            losses = super().answer(request)
            if isinstance(request, Run) and len(self.losses) > 400 and not self.fallen:
                self.fallen = request.branch
                return [math.nan] * request.clocks
            return losses

    world = Cliff()
    world.fallen = None
    policy = Policy(first_clocks=4, window=5, improvement=1e-9, plateau=1000)
    tuned(world, policy, lambda: grid({"lr": (0.003, 0.001)}, 2), 900)
    assert world.fallen is not None
    assert world.fallen not in world.branches
    assert len(world.branches) >= 1
    assert all(math.isfinite(x) for state, _ in world.branches.values() for x in state)


def test_a_plateau_begins_a_new_search_which_may_find_nothing():
    world = Descent()
    searches = []

    def search():
        searches.append(len(world.losses))
        return grid({"lr": (0.5, 1e-9)} if len(searches) == 1 else {"lr": (0.0, 1e-12)}, 2)

    _, ended = tuned(world, Policy(window=20, plateau=2), search, 100_000)
    assert ended
    assert len(searches) == 2
    assert len(world.branches) == 1  # what was found is kept
