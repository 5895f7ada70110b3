"""A tuner drives the branches of a job: all of them train as they would in one process."""

import copy
import io
import itertools
import math
import random
from types import SimpleNamespace

import pytest
from blobs import RULES, WORLD, assert_alike, assert_near, begun, replayed
from conftest import SEED, leave, of_ranks, refused
from deaths import JOB, death_anywhere
from deaths import STEPS as STEPS_OF_DEATHS
from exact import parameters_of

import phub
from phub._control import RoundLoss
from phub._driver import Driver
from phub._tune_course import Course, Log
from phub.tuning import Between, Decisions, Discard, Event, Fork, Policy, Run, Tuner, grid, sampled

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
    leave(optimizer)
    return events, losses, parameters, alive


@pytest.mark.parametrize("rule", RULES)
def test_every_branch_trains_as_in_one_process(box, start, rule):
    ranks = start(trains, WORLD, rule).results()
    events, losses, parameters, alive = ranks[0]
    assert_alike([parameters, ranks[1][2]])
    runs, forks = {}, []
    for e in events:
        if isinstance(e.request, Fork):
            forks.append((e.round, e.branch, e.request.parent, e.request.values))
        elif isinstance(e.request, Run):
            runs.update(dict.fromkeys(e.rounds, e.request.branch))
    assert set(RULES[rule][1]) <= {values["lr"] for *_, values in forks if values}
    ran = [runs.get(at, 0) for at in range(1, max(runs) + 1)]
    for mine, (one, _) in zip(losses, replayed(rule, ran, forks), strict=False):
        assert_near(mine, one, events)
    made = {0} | {branch for _, branch, *_ in forks}
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
    leave(optimizer)
    return lives, parameters, alive, tuner and tuner._driver._alive, losses


def test_a_tuner_goes_on_with_its_job(saving_box, start):
    death = death_anywhere("tuner")
    ranks = death.happens(saving_box, start(trains_at_a_box_that_dies, 2, death))
    (lives, mine, alive, of_tuner, losses), (_, others, *_) = ranks
    assert lives == 2
    assert len(losses) == STEPS_OF_DEATHS
    assert alive == of_tuner
    assert_alike([mine, others])


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

    refused("branches", train, error=phub.FullError)
    optimizer.close()


# ---- A driver that is late.


class Late:
    """A job of numbers, in which what is decided holds some rounds later."""

    def __init__(self, late):
        self.late, self.round = late, 1
        self.states = {0: (1.0, 1e-3)}  # parameter, rate
        self.forks, self.runs, self.gone = [], [(1, 0)], []
        self.made, self.last = 0, 0
        self.ran = {0: []}
        self.course = {}  # by round: branch, loss

    def soon(self):
        self.last = max(self.last, self.round + self.late())
        return self.last

    def fork(self, parent, hyper, round):  # noqa: A002
        assert parent in self.ran
        self.made += 1
        self.ran[self.made] = []
        self.forks.append((self.soon(), self.made, parent, dict(hyper or {})))
        return self.made, self.last

    def schedule(self, branch, round):  # noqa: A002
        assert branch in self.ran
        at = self.soon()
        self.runs = [run for run in self.runs if run[0] < at] + [(at, branch)]
        return at

    def discard(self, branch, round):  # noqa: A002
        assert branch != self.runs[-1][1]
        self.gone.append(branch)
        assert len(self.ran) - len(self.gone) >= 1
        return self.soon()

    def there(self):
        return self.ran.keys() - {*self.gone}

    def step(self):
        """A round: (round, branch, loss)."""
        for at, child, parent, hyper in self.forks:
            if at == self.round:
                state, rate = self.states[parent]
                self.states[child] = state, hyper.get("lr", rate)
        branch = next(of for at, of in reversed(self.runs) if at <= self.round)
        state, rate = self.states[branch]
        loss = state * state if abs(state) < 1e15 else math.nan
        self.states[branch] = state * (1 - 2 * rate), rate
        self.ran[branch].append(loss)
        self.course[self.round] = branch, loss
        self.round += 1
        return self.round - 1, branch, loss


@pytest.mark.parametrize("latest", [0, 1, 7, 40])
def test_a_late_driver_gives_each_branch_its_losses(latest):
    draw = random.Random(SEED)
    job = Late(lambda: 1 + draw.randint(0, latest))
    search = sampled({"lr": Between(1e-4, 3)}, 8, SEED)
    events = []
    decisions = Decisions(Policy(first_clocks=4, window=10), lambda: search)
    driver = Driver(job, decisions, 0, events.append)
    heard = []
    most = 0
    while job.round < 4000 and not driver.done:
        heard.append(job.step())
        most = max(most, len(job.ran) - len(job.gone))
        if draw.randrange(latest + 1) == 0:  # asked now and then
            for each in heard:
                driver.hear(*each)
            heard = []
            driver.decide()
    told = {}
    for event in events:
        if isinstance(event.request, Run):
            told.setdefault(event.request.branch, []).extend(event.losses)
            assert len(event.rounds) == len(event.losses) >= event.request.clocks
    for branch, losses in told.items():
        assert repr(job.ran[branch][: len(losses)]) == repr(losses)  # NaN, too
    assert most <= 4
    assert {e.branch for e in events if isinstance(e.request, Fork)} == set(range(1, job.made + 1))
    assert [e.request.branch for e in events if isinstance(e.request, Discard)] == job.gone
    assert decisions.best is not None
    state, rate = job.states[driver.branch]
    assert math.isfinite(state)
    assert rate < 1, "what it goes on with converges"


@pytest.mark.parametrize("after", range(0, 120, 3))
def test_a_best_branch_that_diverges_is_gone_back_from(after):
    """Late by many windows: some copies are of what has diverged already."""
    job = Late(lambda: 25)
    decisions = Decisions(Policy(first_clocks=4, window=5), lambda: grid({"lr": (0.3, 0.2)}))
    driver = Driver(job, decisions, 0)
    ran = 0
    while job.round < 2000 and not driver.done:
        at, branch, loss = job.step()
        if decisions.best and branch == decisions.best.branch:
            ran += 1
            if ran == after + 1:
                job.states[branch] = (math.nan, 0.3)
        driver.hear(at, branch, loss)
        driver.decide()
    assert ran > after
    assert math.isfinite(job.states[driver.branch][0])


@pytest.mark.parametrize("every", [2, 7])
def test_losses_may_come_every_few_rounds(every):
    """As of a validation set: a clock is a loss that was heard."""
    job, events = Late(lambda: 1), []
    decisions = Decisions(
        Policy(first_clocks=4, window=10), lambda: sampled({"lr": Between(1e-4, 3)}, 8, SEED)
    )
    driver = Driver(job, decisions, 0, events.append)
    while job.round < 4000 * every and not driver.done:
        at, branch, loss = job.step()
        if at % every == 0:
            driver.hear(at, branch, loss)
            driver.decide()
    for event in events:
        if isinstance(event.request, Run):
            assert len(event.losses) >= event.request.clocks
            heard = [job.course[at] for at in event.rounds]
            assert repr(heard) == repr([(event.request.branch, loss) for loss in event.losses])
    assert decisions.best is not None
    assert job.states[driver.branch][1] < 1, "what it goes on with converges"


BACKUP = 1  # that somebody else has forked, which stays as it is


def driver_of(job, events, seed=SEED):
    policy = Policy(first_clocks=4, window=10)
    decisions = Decisions(policy, lambda: sampled({"lr": Between(1e-4, 3)}, 6, seed))
    return Driver(job, decisions, job.runs[-1][1], events.append, job.there())


def drive(job, driver, before_round=lambda: None):
    while job.round < 300 and not driver.done:
        before_round()
        driver.hear(*job.step())
        driver.decide()


def goes_on_from(state, job):
    events = []
    driver = driver_of(job, events)
    driver.load_state_dict(copy.deepcopy(state), job.there(), job.runs)
    drive(job, driver)
    assert job.there() - {BACKUP} == driver._alive
    assert job.runs[-1][1] == driver.branch
    for event in events:
        if isinstance(event.request, Run):  # it ran so, as far as this is remembered
            ran = [job.course[at] for at in event.rounds]
            assert ran == [(event.request.branch, loss) for loss in event.losses]


@pytest.mark.parametrize("latest", [0, 3])
def test_a_driver_goes_on_from_its_state(latest):
    """From any round (a fifth of them), with its branches, or those of the next decisions."""
    job = Late(lambda: 1 + latest)
    assert job.fork(0, {}, 0)[0] == BACKUP
    driver = driver_of(job, [])
    points = []
    drive(job, driver, lambda: points.append(copy.deepcopy((driver.state_dict(), job))))
    for (state, then), (_, next_) in [*itertools.pairwise(points)][SEED % 5 :: 5]:
        again = copy.deepcopy(then)
        goes_on_from(state, again)
        assert (again.course, again.gone) == (job.course, job.gone)  # as without a break
        decided = copy.deepcopy(next_)
        decided.round, decided.states, decided.course = then.round, {**then.states}, {**then.course}
        goes_on_from(state, decided)
        lost = copy.deepcopy(then)
        anew = driver_of(lost, [])
        anew.load_state_dict(copy.deepcopy(state), lost.there(), lost.runs)
        anew.begin_anew(lost, lost.there(), lost.runs)
        assert lost.there() - {BACKUP} == {anew.branch} == {state["safe"]} == {lost.runs[-1][1]}
        other = copy.deepcopy(then)
        changed = driver_of(other, [], SEED + 1)  # who tries other values
        changed.load_state_dict(copy.deepcopy(state), other.there(), other.runs)
        left = other.there() - {BACKUP}
        assert left == {changed.branch} == {state["safe"]} or not state["course"]


@pytest.mark.parametrize("latest", [0, 3])
def test_a_driver_begins_anew_with_its_job(latest):
    """As it was rounds before: there may be branches again that had been discarded since."""
    dice = random.Random(SEED)
    came_back = 0
    for _ in range(60):
        job, then = Late(lambda: 1 + latest), {}
        assert job.fork(0, {}, 0)[0] == BACKUP
        driver = driver_of(job, [])
        died = dice.randrange(20, 120)
        saved = dice.randrange(died - 15, died)
        while job.round < died and not driver.done:
            driver.hear(*job.step())
            driver.decide()
            if job.round == saved:
                then = copy.deepcopy(job)
        if not then:
            continue
        came_back += bool(then.there() - {BACKUP} - driver._alive)
        driver.begin_anew(then, then.there(), then.runs)
        assert then.there() - {BACKUP} == {driver.branch} == {then.runs[-1][1]}
    assert came_back > 0


# ---- What is shown.


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_a_table_in_place():
    out = Terminal()
    course = Course(Log(None), out, "job", 0)
    course.tell(Event(3, Fork(0, {"lr": 0.25}), branch=1))
    course.tell(Event(3, Fork(1, {}), branch=2))
    for at, loss in enumerate((4.0, 3.0, 2.0, math.nan), start=3):
        course.hear(RoundLoss(at, 1, 2, loss))
    decisions = Decisions(Policy(), lambda: grid({"lr": (1,)}))
    course.decided(decisions, 1)
    course.show()
    screen = out.getvalue()
    assert screen.startswith("\x1b[H\x1b[2Jjob job, round 6; best: none yet\n")
    assert [" ".join(line.split()) for line in screen.splitlines()[1:]] == [
        "BRANCH VALUES CLOCKS LOSS FALLS STATE",
        "0 as it began 0 - - waits",
        "1 lr 0.25 4 nan - runs",
        "2 lr 0.25 0 - - copy",
    ]


def test_a_terminal_forgets_branches_and_goes_on_without_the_best():
    course = Course(Log(None), Terminal(), "job", 0)
    decisions = Decisions(Policy(), lambda: grid({"lr": (1,)}))
    decisions.best = SimpleNamespace(branch=1, values={"lr": 1.0})
    for branch in range(1, 9):
        course.tell(Event(3, Fork(0, {"lr": branch}), branch=branch))
    for branch in range(1, 9):
        course.tell(Event(4, Discard(branch)))
        course.decided(decisions, 0)
        course.show()
    assert list(course.lines) == [0, 4, 5, 6, 7, 8]
