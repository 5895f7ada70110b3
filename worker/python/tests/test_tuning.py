"""What a tuner decides, held to brute force; what it needs of a box is a branch of numbers here."""

import itertools
import math
import random
import statistics

import pytest
from conftest import SEED, refused

from phub._decisions import Trial, may_overtake
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

NOISY = [2.0, 2.3, 1.9, 2.2, 1.8, 2.1, 1.9, 2.2, 1.7]
FALLING = [10 - 0.5 * at for at in range(20)]
JUMPING = [6.0] * 3 + [1.0] * 3 + [3.0] * 3 + [1.0] * 3  # falls by 5, and four times rises by 2
# Six windows of three, without the first two: the last mean is 1. A loss differs from the next by
# 0.5, so the error of one is 0.5 / sqrt(2), and of a difference of means of three:
ERROR = 0.5 / math.sqrt(3)
UP = {start: start + abs(start) + 0.1 for start in (2.0, -2.0)}  # by as much as it was


@pytest.mark.parametrize(
    ("losses", "start", "course", "speed"),
    [
        (FALLING, None, Course.CONVERGING, (10 - 1 - ERROR) / 20),
        (FALLING, 5, Course.CONVERGING, (5 - 1 - ERROR) / 20),
        (FALLING[::-1], 9.3, Course.UNSTABLE, 0),  # from 9.3 to 9.5 may be by chance
        (FALLING[::-1], 8, Course.UNSTABLE, (8 - 9.5 + ERROR) / 20),
        (JUMPING, None, Course.UNSTABLE, (5 - 2 - math.sqrt((25 + 4 + 4) / 11 / 3)) / 12),
        ([1.0, 2.0], None, Course.UNSTABLE, 0),
        ([], None, Course.UNSTABLE, None),
        ([7.0], None, Course.UNSTABLE, None),
        ([3.0, 2.0, math.nan], None, Course.DIVERGED, None),
        ([3.0, 2.0, math.inf], None, Course.DIVERGED, None),
        (NOISY, 2.1, Course.UNSTABLE, 0),
        ([2.1 - 0.02 * at for at in range(9)], 2.1, Course.CONVERGING, None),  # falls no less
        *(([at] * 3 + [up] * 3, at, Course.DIVERGED, -math.inf) for at, up in UP.items()),
        *(([at] * 3 + [up + 9, at, up + 9], at, Course.UNSTABLE, None) for at, up in UP.items()),
        # Nor has the mean of the window risen so.
        *(([at] * 57 + [up] * 3, at, Course.UNSTABLE, None) for at, up in UP.items()),
    ],
)
def test_courses_and_speeds_by_hand(losses, start, course, speed):
    verdict = judge(losses, **({} if start is None else {"start": start}))
    assert verdict.course is course
    assert speed is None or verdict.speed == speed or math.isclose(verdict.speed, speed)


@pytest.mark.parametrize(
    ("losses", "windows", "loss"),
    [
        (FALLING, {}, 1),
        # Nine are three of three: one bad batch in each does not make them jump.
        ([9.0, 3.0, 3.0, 5.0, 2.0, 2.0, 3.0, 1.0, 2.0], {}, 2),
        ([9.0] * 30 + [1.0, 2.0, 3.0], {}, 2),
        ([9.0] * 94 + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], {}, (4 * 9 + 21) / 10),
        # A rest of the windows is left out at the front.
        ([100.0] + [3.0] * 3 + [2.0] * 3 + [1.0] * 3, {"windows": 3}, 1),
    ],
)
def test_the_loss_is_the_mean_of_the_last_window(losses, windows, loss):
    assert judge(losses, **windows).loss == loss


def test_a_speed_leaves_the_rest_of_the_windows_out():
    speed = judge([5.0] + [4.0] * 3 + [1.0] * 3, windows=2).speed
    assert math.isclose(speed, (5 - 1 - math.sqrt((1 + 9) / 6 / 3)) / 7)


# ---- What is tried.


def proposed(search, speed=lambda row: 0):
    """All rows, each told the speed of the one before."""
    rows = []
    while (row := search.propose()) is not None:
        assert row not in rows, "nothing twice"
        rows.append(row)
        search.tell(row, speed(row))
    return rows


def decades(rows):
    return [round(math.log10(row["lr"]), 9) for row in rows]


def test_a_grid_has_all_combinations_once():
    space = {"lr": Between(1e-4, 1), "momentum": (0.0, 0.9), "decay": Between(0, 3, False)}
    rows = proposed(grid(space, 4, SEED))
    found = [(decades([row])[0], row["momentum"], row["decay"]) for row in rows]
    exponents = (-4, round(-4 + 4 / 3, 9), round(-4 + 8 / 3, 9), 0)
    assert sorted(found) == sorted(itertools.product(exponents, (0.0, 0.9), (0, 1, 2, 3)))


def peak(at):
    return lambda row: -abs(math.log10(row["lr"]) - at) - 1


def cliff(row):
    return -math.inf if row["lr"] > 0.5 else 0 if row["lr"] < 0.05 else row["lr"]


def ramp(at, a_step_below):
    """A speed that is 1 at a decade, and nothing above it."""
    return lambda row: {at: 1, at - 1: a_step_below}.get(round(math.log10(row["lr"]), 6), 0)


@pytest.mark.parametrize(
    ("speed", "expected"),
    [
        # From the middle by decades to the peak, and half a step to its faster side.
        (peak(-0.6), [-2, -1, 0, -0.5]),
        (peak(-1.2), [-2, -1, 0, -1.5]),
        (peak(-4.1), [-2, -1, -3, -4, -5, -4.5]),
        (peak(9), [-2, -1, 0, 1, 0.5]),  # not beyond the end
        # Up where there is no speed, and down from what diverges, which is no tie.
        (cliff, [-2, -1, 0, -1.5]),
        # Upward where the speed still rises steeply.
        (ramp(-1, 0.4), [-2, -1, 0, -0.5]),
        (ramp(-1, 0.6), [-2, -1, 0, -1.5]),
        (lambda row: -math.inf if row["lr"] > 5e-4 else row["lr"], [-2, -1, -3]),
    ],
)
def test_a_climb_by_hand(speed, expected):
    found = decades(proposed(climb({"lr": Between(1e-5, 10)}), speed))
    assert (found if len(expected) > 3 else found[:3]) == expected


def test_a_climb_without_any_speed_ends():
    assert len(proposed(climb({"lr": Between(1e-5, 10)}))) <= 5


def test_a_climb_along_several():
    """Each is found where the others are; lists are tried whole, ranges by differences in parts."""
    space = {"lr": Between(1e-4, 1), "momentum": Between(0, 1, False), "decay": (0.0, 1e-4, 1e-3)}

    def speed(row):
        far = abs(math.log10(row["lr"]) + 3) + 4 * abs(row["momentum"] - 0.9)
        return -far - (row["decay"] != 1e-3) - 1

    rows = proposed(climb(space), speed)
    best = max(rows, key=speed)
    assert math.isclose(best["lr"], 1e-3)
    assert (best["momentum"], best["decay"]) == (0.875, 1e-3)
    assert {row["decay"] for row in rows} == {*space["decay"]}
    assert len(rows) < 20
    assert all(0 <= row["momentum"] <= 1 for row in rows)


def test_a_climb_goes_along_one_again_when_another_has_moved():
    """Of two that depend on each other."""
    space = {"a": Between(0, 1, False), "b": Between(0, 1, False)}

    def ridge(row):
        return -abs(row["a"] - row["b"]) - 3 * abs(row["b"] - 1) - 1

    assert max(proposed(climb(space), ridge), key=ridge) == {"a": 1, "b": 1}


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
    rows = proposed(make(space, 60, SEED), lambda row: row["lr"] if row["lr"] < 0.1 else -math.inf)
    assert len(rows) == 60
    assert all(1e-6 <= row["lr"] <= 1 and row["momentum"] in space["momentum"] for row in rows)
    assert len({math.floor(decade) for decade in decades(rows)}) > 2


def test_what_cannot_be_is_refused():
    for make, *arguments in (
        (Between, 0, 1),
        (Between, 1, 1),
        (Between, 1, math.inf),
        (grid, {}),
        (grid, {"lr": ()}),
        (grid, RATES, 1),
        (climb, {}),
        (climb, {"lr": ()}),
        (Policy(branches=2).check,),
        (Policy(first_clocks=20, most_clocks=10).check,),
        (Policy(compare="beauty").check,),
        (Policy(schedule="none").check,),
    ):
        refused(".", make, *arguments)


# ---- What is decided.


def until_best(world, policy, search):
    """The decisions, what takes answers, and the answer to the next one."""
    decisions = Decisions(policy, search)
    requests, answer = decisions.requests(), None
    while decisions.best is None:
        answer = world.answer(requests.send(answer))
    return decisions, requests, answer


def test_a_branch_that_diverges_at_once_goes_back():
    """In the first window after its search: to what it was forked from, and its value is bad."""
    world = Descent()
    decisions, requests, answer = until_best(world, Policy(), lambda: grid({"lr": (0.3, 0.1)}, 2))
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
        assert not isinstance(request, Fork) or request.values != bad


@pytest.mark.parametrize("schedule", ["whole", "slices"])
@pytest.mark.parametrize("compare", ["speed", "loss"])
def test_the_best_of_what_was_tried_is_found(schedule, compare):
    """Without noise losses only fall, or rise for ever: each value alone tells which is best."""
    world = Descent()
    policy = Policy(schedule=schedule, slice_clocks=3, compare=compare, branches=POINTS + 2)
    decisions, *_ = until_best(world, policy, lambda: grid(RATES, POINTS, SEED))
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


@pytest.mark.parametrize(
    ("search", "limit"),
    [
        # All rates one after another, each until it is there or has diverged, need far more.
        (lambda: grid(RATES, POINTS, SEED), sum),
        (lambda: climb(RATES), lambda clocks: 2 * min(clocks) + 1),
    ],
    ids=["grid", "climb"],
)
def test_trials_count_and_the_goal_is_reached_soon(search, limit):
    """Against the fixed rates of the grid, of which nobody knows the best beforehand."""
    goal, rates = 1e-3, [RATES["lr"].at(i / (POINTS - 1)) for i in range(POINTS)]
    there = []
    for seed in range(SEED, SEED + 3):  # one of a hundred is unlucky
        world = Descent(noise=0.3, seed=seed)
        tuned(world, Policy(), search, 3000)
        there.append(first_below(world.losses, goal))
    clocks = [first_below(alone(rate, 3000), goal) for rate in rates]
    assert statistics.median(there) < limit([each for each in clocks if each is not None])


class Listed:
    def __init__(self, *rates):
        self.rows, self.told = [{"lr": rate} for rate in rates], []

    def propose(self):
        return self.rows.pop(0) if self.rows else None

    def tell(self, values, speed):
        self.told.append((values["lr"], speed))


def asked(search, answer_of, **policy):
    """The best rate, and the clocks of each, of branches whose losses their rates tell."""
    decisions = Decisions(Policy(**policy), lambda: search)
    requests, answer, made, clocks = decisions.requests(), None, {0: {}}, {0: 0}
    while decisions.best is None:
        request = requests.send(answer)
        if isinstance(request, Fork):
            made[answer := len(made)] = request.values
            clocks[answer] = 0
        elif isinstance(request, Run):
            began = clocks[request.branch]
            clocks[request.branch] += request.clocks
            rate = made[request.branch]["lr"]
            answer = [answer_of(rate, at) for at in range(began, began + request.clocks)]
    ran = {trial.values["lr"]: len(trial.losses) for trial in decisions.trials}
    return decisions.best.values["lr"], ran


def test_every_third_trial_that_does_not_converge_doubles_the_time():
    def losses(rate, at):
        return 5 - 0.5 * at if rate == 4 else 5 + (at % 2)

    # The first three run 6, then 12; the fourth converges at once. So the others stay as they are.
    found = asked(Listed(1, 2, 3, 4, 5), losses, first_clocks=6, branches=8)
    assert found == (4, {1: 12, 2: 12, 3: 12, 4: 12, 5: 12})


def test_the_two_best_run_on_where_they_are_near_each_other():
    """What is ahead at first may stop to fall."""

    def losses(rate, at):
        return {1: 9 - at, 2: max(8 - 1.5 * at, 8 - 1.5 * 6), 3: 9 - 0.1 * at}[rate]

    assert asked(Listed(1, 2, 3), losses, first_clocks=6) == (1, {1: 12, 2: 12, 3: 6})
    # One that falls on as fast leaves the other none of the time that it would need.
    found = asked(
        Listed(1, 2, 3), lambda rate, at: 9 - {1: 1, 2: 1.5, 3: 0.1}[rate] * at, first_clocks=6
    )
    assert found == (2, {1: 6, 2: 12, 3: 6})
    best, _ = asked(Listed(1, 2, 3), losses, first_clocks=6, branches=3)
    assert best == 2, "there is room for one only"
    _, ran = asked(Listed(1, 3), losses, first_clocks=6)
    assert ran == {1: 6, 3: 6}, "the other is too slow"


def test_what_is_not_compared_by_speed_runs_on_as_long_as_its_rival():
    def losses(rate, at):
        return 9 - {1: 1, 2: 1.5, 3: 0.1}[rate] * at

    found = asked(Listed(1, 2, 3), losses, first_clocks=6, compare="loss")
    assert found == (2, {1: 12, 2: 12, 3: 6})


def test_a_short_trial_overtakes_by_all_that_it_has_fallen():
    def of(*losses):
        return Trial(1, {}, list(losses), 9)

    ahead = of(*(9 - 0.5 * at for at in range(12)))
    assert not may_overtake(of(9, 9, 9, 8.9, 8.8), ahead)
    assert may_overtake(of(9, 8, 7, 6, 5), ahead)


def test_a_trial_that_is_seen_to_diverge_stops():
    def losses(rate, at):
        return 5 * 2**at if rate == 2 else 5 - 0.1 * at

    search = Listed(2, 1)
    assert asked(search, losses, first_clocks=30) == (1, {2: 5, 1: 30})
    assert (2, -math.inf) in search.told


def test_a_search_is_told_again_of_what_has_run_on():
    def losses(rate, at):
        return 5 - 0.1 * at if at >= 6 and rate == 1 else 5 + (at % 2)

    search = Listed(1, 2, 3)
    asked(search, losses, first_clocks=6, branches=6)
    speeds = [speed for rate, speed in search.told if rate == 1]
    assert speeds[0] <= 0 < speeds[-1]


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
