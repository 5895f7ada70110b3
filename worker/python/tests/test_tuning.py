"""What a tuner decides, held to brute force; what it needs of a box is a branch of numbers here."""

import math
import random

import pytest
from conftest import SEED

import phub
from phub._trials import Course, judge
from phub.tuning import Between, Decisions, Discard, Fork, Policy, Run, climb, grid, sampled, tpe

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
    # Six windows of three, without the first two: the last mean is 1. Nothing rises. A loss differs
    # from the next by 0.5, so the error of one is 0.5 / sqrt(2), and of a difference of means of
    # three 0.5 / sqrt(3).
    assert verdict.course is Course.CONVERGING
    assert verdict.loss == 1
    assert math.isclose(verdict.speed, (10 - 1 - 0.5 / math.sqrt(3)) / 20)
    assert math.isclose(judge(falling, start=5).speed, (5 - 1 - 0.5 / math.sqrt(3)) / 20)
    rising = judge(falling[::-1], start=9.3)
    assert rising.course is Course.UNSTABLE
    assert rising.speed == 0, "from 9.3 to 9.5 may be by chance"
    assert math.isclose(judge(falling[::-1], start=8).speed, (8 - 9.5 + 0.5 / math.sqrt(3)) / 20)
    jumping = [6.0] * 3 + [1.0] * 3 + [3.0] * 3 + [1.0] * 3
    assert judge(jumping).course is Course.UNSTABLE  # it falls by 5, and four times rises by 2
    error = math.sqrt((25 + 4 + 4) / 11 / 3)
    assert math.isclose(judge(jumping).speed, (5 - 2 - error) / 12)
    assert judge([1.0, 2.0]).speed == 0
    for bad in (math.nan, math.inf):
        assert judge([3.0, 2.0, bad]).course is Course.DIVERGED
    assert judge([]).course is judge([7.0]).course is Course.UNSTABLE


def test_a_fall_within_the_noise_is_none():
    noisy = [2.0, 2.3, 1.9, 2.2, 1.8, 2.1, 1.9, 2.2, 1.7]
    assert judge(noisy, start=2.1).course is Course.UNSTABLE
    assert judge(noisy, start=2.1).speed == 0
    steady = [2.1 - 0.02 * at for at in range(9)]  # no less
    assert judge(steady, start=2.1).course is Course.CONVERGING


@pytest.mark.parametrize("start", [2.0, -2.0])
def test_what_rises_by_as_much_as_it_was_has_diverged(start):
    up = start + abs(start) + 0.1
    assert judge([start, start, start, up, up, up], start).course is Course.DIVERGED
    assert judge([start, start, start, up, up, up], start).speed == -math.inf
    assert judge([start] * 3 + [up + 9, start, up + 9], start).course is Course.UNSTABLE
    calm = [start] * 57 + [up] * 3
    assert judge(calm, start).course is Course.UNSTABLE, "nor the mean of the window"


def test_few_clocks_are_few_windows():
    """Nine are three of three: one bad batch in each does not make them jump."""
    assert judge([9.0, 3.0, 3.0, 5.0, 2.0, 2.0, 3.0, 1.0, 2.0]).loss == 2
    assert judge([9.0] * 30 + [1.0, 2.0, 3.0]).loss == 2
    assert judge([9.0] * 94 + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).loss == (4 * 9 + 21) / 10


def test_a_rest_of_the_windows_is_left_out_at_the_front():
    assert judge([100.0] + [3.0] * 3 + [2.0] * 3 + [1.0] * 3, windows=3).loss == 1
    speed = judge([5.0] + [4.0] * 3 + [1.0] * 3, windows=2).speed
    assert math.isclose(speed, (5 - 1 - math.sqrt((1 + 9) / 6 / 3)) / 7)


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


def climbed(space, speed):
    """All that is proposed."""
    search, rows = climb(space), []
    while (row := search.propose()) is not None:
        assert row not in rows, "nothing twice"
        rows.append(row)
        search.tell(row, speed(row))
    return rows


def decades(rows, name="lr"):
    return [round(math.log10(row[name]), 9) for row in rows]


def test_a_climb_by_hand():
    """From the middle by decades to the peak, and half a step to its faster side."""
    space = {"lr": Between(1e-5, 10)}

    def peak(at, steepness=1):
        return lambda row: -steepness * abs(math.log10(row["lr"]) - at) - 1

    assert decades(climbed(space, peak(-0.6))) == [-2, -1, 0, -0.5]
    assert decades(climbed(space, peak(-1.2))) == [-2, -1, 0, -1.5]
    assert decades(climbed(space, peak(-4.1))) == [-2, -1, -3, -4, -5, -4.5]
    assert decades(climbed(space, peak(9))) == [-2, -1, 0, 1, 0.5]  # not beyond the end


def test_a_climb_goes_up_where_there_is_no_speed_and_down_from_what_diverges():
    space = {"lr": Between(1e-5, 10)}

    def cliff(row):
        rate = row["lr"]
        return -math.inf if rate > 0.5 else 0 if rate < 0.05 else rate

    assert decades(climbed(space, cliff)) == [-2, -1, 0, -1.5]
    too_high = climbed(space, lambda row: -math.inf if row["lr"] > 5e-4 else row["lr"])
    assert decades(too_high)[:3] == [-2, -1, -3], "no tie of what diverges"
    assert len(climbed(space, lambda row: 0)) <= 5


def test_a_climb_along_several():
    """Each is found where the others are; lists are tried whole, ranges by differences in parts."""
    space = {"lr": Between(1e-4, 1), "momentum": Between(0, 1, False), "decay": (0.0, 1e-4, 1e-3)}

    def speed(row):
        far = abs(math.log10(row["lr"]) + 3) + 4 * abs(row["momentum"] - 0.9)
        return -far - (row["decay"] != 1e-3) - 1

    rows = climbed(space, speed)
    best = max(rows, key=speed)
    assert math.isclose(best["lr"], 1e-3)
    assert best["momentum"] == 0.875
    assert best["decay"] == 1e-3
    assert {row["decay"] for row in rows} == {*space["decay"]}
    assert len(rows) < 20
    assert all(0 <= row["momentum"] <= 1 for row in rows)


def test_a_climb_goes_along_one_again_when_another_has_moved():
    """Of two that depend on each other."""
    space = {"a": Between(0, 1, False), "b": Between(0, 1, False)}

    def ridge(row):
        return -abs(row["a"] - row["b"]) - 3 * abs(row["b"] - 1) - 1

    best = max(climbed(space, ridge), key=ridge)
    assert best == {"a": 1, "b": 1}


def test_a_climb_takes_the_latest_word():
    search = climb({"lr": Between(1e-5, 10)})
    middle = search.propose()
    search.tell(middle, 3)
    up = search.propose()
    search.tell(up, 1)
    search.tell(middle, 0.5)  # it has run on
    assert search.propose()["lr"] > up["lr"]


@pytest.mark.parametrize("make", [sampled, tpe])
def test_draws_are_in_their_range_and_over_all_of_it(make):
    if make is tpe:
        pytest.importorskip("optuna", reason="optuna is not installed: no search by TPE")
    space = {"lr": Between(1e-6, 1), "momentum": (0.0, 0.5, 0.9)}
    search = make(space, 60, SEED)
    seen = set()
    for _ in range(60):
        row = search.propose()
        assert 1e-6 <= row["lr"] <= 1
        assert row["momentum"] in space["momentum"]
        seen.add(math.floor(math.log10(row["lr"])))
        search.tell(row, row["lr"] if row["lr"] < 0.1 else -math.inf)
    assert search.propose() is None
    assert len(seen) > 2


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Between(0, 1),
        lambda: Between(1, 1),
        lambda: Between(1, math.inf),
        lambda: grid({}),
        lambda: grid({"lr": ()}),
        lambda: climb({}),
        lambda: climb({"lr": ()}),
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


def asked(policy, search, answer_of):
    """The requests until there is a best, of branches whose losses are told by their values."""
    decisions = Decisions(policy, search)
    requests, answer, made, clocks, all_ = decisions.requests(), None, {0: {}}, {0: 0}, []
    while decisions.best is None:
        all_.append(request := requests.send(answer))
        if isinstance(request, Fork):
            made[answer := len(made)] = request.values
            clocks[answer] = 0
        elif isinstance(request, Run):
            began = clocks[request.branch]
            clocks[request.branch] += request.clocks
            rate = made[request.branch]["lr"]
            answer = [answer_of(rate, at) for at in range(began, began + request.clocks)]
    return decisions, all_


def clocks_by_values(decisions):
    return {trial.values["lr"]: len(trial.losses) for trial in decisions.trials}


def test_every_third_trial_that_does_not_converge_doubles_the_time():
    def losses(rate, at):
        return 5 - 0.5 * at if rate == 4 else 5 + (at % 2)

    rates = (1.0, 2.0, 3.0, 4.0, 5.0)
    listed = lambda: Listed([{"lr": rate} for rate in rates])  # noqa: E731
    decisions, _ = asked(Policy(first_clocks=6, branches=8), listed, losses)
    # The first three run 6, then 12; the fourth converges at once. So the others stay as they are.
    assert clocks_by_values(decisions) == {1: 12, 2: 12, 3: 12, 4: 12, 5: 12}
    assert decisions.best.values == {"lr": 4}


class Listed:
    def __init__(self, rows):
        self.rows, self.told = [*rows], []

    def propose(self):
        return self.rows.pop(0) if self.rows else None

    def tell(self, values, speed):
        self.told.append((values["lr"], speed))


def test_the_two_best_run_on_where_they_are_near_each_other():
    """What is ahead at first may stop to fall."""

    def losses(rate, at):
        return {1: 9 - at, 2: max(8 - 1.5 * at, 8 - 1.5 * 6), 3: 9 - 0.1 * at}[rate]

    def search():
        return Listed({"lr": rate} for rate in (1, 2, 3))

    decisions, requests = asked(Policy(first_clocks=6), search, losses)
    assert clocks_by_values(decisions) == {1: 12, 2: 12, 3: 6}
    assert decisions.best.values == {"lr": 1}
    decisions, _ = asked(Policy(first_clocks=6, branches=3), search, losses)
    assert decisions.best.values == {"lr": 2}, "there is room for one only"
    decisions, _ = asked(
        Policy(first_clocks=6), lambda: Listed({"lr": rate} for rate in (1, 3)), losses
    )
    assert clocks_by_values(decisions) == {1: 6, 3: 6}, "the other is too slow"


def test_a_trial_that_is_seen_to_diverge_stops():
    def losses(rate, at):
        return 5 * 2**at if rate == 2 else 5 - 0.1 * at

    search = Listed([{"lr": 2}, {"lr": 1}])
    decisions, _ = asked(Policy(first_clocks=30), lambda: search, losses)
    assert clocks_by_values(decisions) == {2: 6, 1: 30}
    assert (2, -math.inf) in search.told
    assert decisions.best.values == {"lr": 1}


def test_a_search_is_told_again_of_what_has_run_on():
    def losses(rate, at):
        return 5 - 0.1 * at if at >= 6 and rate == 1 else 5 + (at % 2)

    search = Listed([{"lr": 1}, {"lr": 2}, {"lr": 3}])
    asked(Policy(first_clocks=6, branches=6), lambda: search, losses)
    speeds = [speed for rate, speed in search.told if rate == 1]
    assert speeds[0] <= 0 < speeds[-1]


def test_a_climb_reaches_the_goal_within_twice_the_best_fixed_rate():
    goal, rates = 1e-3, [RATES["lr"].at(i / (POINTS - 1)) for i in range(POINTS)]
    world = Descent(noise=0.3, seed=SEED)
    tuned(world, Policy(), lambda: climb(RATES), 3000)
    reached = first_below(world.losses, goal)
    clocks = [first_below(alone(rate, 3000), goal) for rate in rates]
    assert reached <= 2 * min(found for found in clocks if found is not None)


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
