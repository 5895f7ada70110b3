"""`phub tune`: a real training, tuned from outside, is what it would be in one process."""

import contextlib
import copy
import io
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from blobs import RULES, WORLD, begun, replayed
from conftest import SEED, Box, of_ranks, wait_until
from exact import parameters_of
from torch import nn

import phub
from phub.__main__ import main
from phub._control import Control, RemoteJob, RoundLoss
from phub._driver import Driver
from phub._tune_course import Course, Log
from phub.tune import _parser, search_of
from phub.tuning import Between, Decisions, Discard, Event, Fork, Policy, Run, grid, sampled

PACKAGE = Path(phub.__file__).parents[1]
MOST_STEPS = 50_000
BRANCHES = 4


def tune(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "phub", "tune", *arguments],
        env={**os.environ, "PYTHONPATH": str(PACKAGE), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rows_of(log):
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def trains(rank, rule, folder):
    """Until there is a file `enough`. Returns this rank's losses, and its parameters at the end."""
    model, made = begun(rule)
    optimizer = phub.DistributedOptimizer(
        made, model, transport="tcp", branches=BRANCHES - 1, on_nonfinite="pass"
    )
    losses, enough, stop = [], folder / "enough", folder / "stop"
    end = MOST_STEPS
    while len(losses) < end:
        if end == MOST_STEPS and stop.exists():
            end = int(stop.read_text())
        if rank == 0 and end == MOST_STEPS and enough.exists():  # nobody is a round ahead
            (folder / "new").write_text(str(len(losses) + 20))
            (folder / "new").replace(stop)
        optimizer.zero_grad()
        loss = model(len(losses), rank)
        losses.append(loss.item())
        optimizer.worker.report_loss(losses[-1])
        loss.backward()
        optimizer.step()
    optimizer.worker.barrier()
    parameters = list(parameters_of(model).values())
    optimizer.worker.barrier()
    optimizer.close()
    return losses, parameters


@pytest.mark.parametrize("rule", RULES)
def test_every_branch_trains_as_in_one_process(box, start, monkeypatch, tmp_path, rule):
    monkeypatch.setenv("PHUB_JOB", f"tune-{rule}")
    log = tmp_path / "log"
    values = ",".join(map(str, RULES[rule][1]))
    tuner = tune(
        *("--server", box.address, "--job", f"tune-{rule}", "--search", f"lr={values}"),
        *("--first-clocks", "8", "--most-clocks", "256", "--window", "6", "--plateau", "2"),
        *("--every", "0.01", "--seed", str(SEED), "--log", str(log)),
    )
    ranks = start(trains, WORLD, rule, tmp_path)

    def is_enough():
        ended = tuner.poll() is not None  # as it does when a later search finds nothing better
        kinds = [row["kind"] for row in rows_of(log)]
        enough = kinds.count("discard") >= 3 and "chosen" in kinds
        assert enough or not ended, tuner.communicate()
        return enough

    wait_until(is_enough, "a search is over")
    (tmp_path / "enough").touch()
    (first, mine), (second, others) = ranks.results()
    out, err = tuner.communicate(timeout=60)
    assert tuner.returncode == 0, err
    assert re.search("(the job has ended|nothing that converges); best: lr ", out), out
    for one, other in zip(mine, others, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)  # some trial may run
    rows = rows_of(log)
    heard = [row for row in rows if row["kind"] == "loss"]
    assert [row["round"] for row in heard] == list(range(1, len(heard) + 1))
    assert len(heard) < len(first)
    forks = [
        (row["round"], row["branch"], row["parent"], row["values"])
        for row in rows
        if row["kind"] == "fork"
    ]
    together = replayed(rule, [row["branch"] for row in heard], forks)
    for row, expected, *losses in zip(heard, together, first, second, strict=False):
        mean, one = (sum(each) / WORLD for each in (losses, expected))
        assert row["ranks"] == WORLD
        assert row["loss"] == (mean if math.isfinite(mean) else None)
        if not mean < 1e6:  # it diverges, and rounding decides how
            assert not one < 1e5
            continue
        assert math.isclose(mean, one, rel_tol=2e-3, abs_tol=2e-3), (row, one)
    chosen = next(row for row in rows if row["kind"] == "chosen")
    assert chosen["values"]["lr"] in RULES[rule][1]
    assert any(row["branch"] == chosen["branch"] for row in heard)


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
        known = job.ran[branch][: len(losses)]
        assert len(known) == len(losses)
        assert all(
            a == b or math.isnan(a) and math.isnan(b) for a, b in zip(known, losses, strict=True)
        )
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
    """From any round (a third of them), with its branches, or those of the next decisions."""
    job = Late(lambda: 1 + latest)
    assert job.fork(0, {}, 0)[0] == BACKUP
    driver = driver_of(job, [])
    points = []
    drive(job, driver, lambda: points.append(copy.deepcopy((driver.state_dict(), job))))
    for (state, then), (_, next_) in [*itertools.pairwise(points)][SEED % 3 :: 3]:
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
        assert (
            other.there() - {BACKUP} == {changed.branch} == {state["safe"]} or not state["course"]
        )


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
    rows = [line.split() for line in screen.splitlines()[1:]]
    assert rows == [
        ["BRANCH", "VALUES", "CLOCKS", "LOSS", "FALLS", "STATE"],
        ["0", "as", "it", "began", "0", "-", "-", "waits"],
        ["1", "lr", "0.25", "4", "nan", "-", "runs"],
        ["2", "lr", "0.25", "0", "-", "-", "copy"],
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


# ---- Mistakes.


MISTAKES = [
    ("--search lr=0.1", "--job NAME"),
    ("--job x", "--search"),
    ("--job x --search lr", "lr=log:1e-5..1"),
    ("--job x --search lr=log:0..1", "positive"),
    ("--job x --search lr=log:1e-3", "LOW..HIGH"),
    ("--job x --search lr=log:1,2..3", "LOW..HIGH"),
    ("--job x --search lr=cubic:1..2", "not 'cubic:'"),
    ("--job x --search lr=1,two", "'1,two' is not a list of numbers"),
    ("--job x --search lr=1,nan", "'1,nan' is not a list of numbers"),
    ("--job x --search lr=1..2 --points 9", "'1..2' is not a list"),
    ("--job x --search lr=1 --search lr=2", "lr is given twice"),
    ("GIVEN --branches 2", "branches of a tuner"),
    ("GIVEN --method grid --points 1", "at least 2"),
    ("GIVEN --method sampled --points 0", "at least 1"),
    ("GIVEN --compare beauty", "beauty"),
    ("GIVEN --every 0", "--every"),
    ("GIVEN --every nan", "--every"),
    ("GIVEN --wait inf", "--wait"),
    ("--job x --search lr=log:1..2 --method grid --points 1000000000", "take fewer points"),
    (
        "GIVEN --method sampled --points 1000000000",
        "1000000000 trials does not end: at most 100000",
    ),
    ("GIVEN --method tpe --points 1000000000", "1000000000 trials does not end: at most 100000"),
    ("GIVEN --improvement nan", "improvement of a tuner"),
    ("GIVEN --server nowhere", "host and port"),
    ("GIVEN --log /nowhere/log", "--log /nowhere/log"),
    ("GIVEN --server 127.0.0.1:1 --wait 0", "no phub server at 127.0.0.1:1"),
]


@of_ranks(1)
def test_mistakes_are_told(rank):
    for name in ("PHUB_JOB", "PHUB_SERVER"):
        del os.environ[name]
    for arguments, said in MISTAKES:
        sys.argv[1:] = ["tune", *arguments.replace("GIVEN", "--job x --search lr=1,2").split()]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main()
            except SystemExit as end:
                status = end.code
        assert status in (1, 2), arguments
        assert said in err.getvalue(), arguments
        assert out.getvalue() == ""


def holds(rank, folder, **options):
    """A rank of a job that does nothing until the file `enough` is there."""
    with phub.Worker({"key": 8}, optimizer="sgd", transport="tcp", **options) as worker:
        wait_until((folder / "enough").exists, "the test is over")
        return worker.rank


def test_it_climbs_if_nothing_else_is_said():
    about = ["--job", "run", "--search", "lr=log:1e-5..10", "--points", "2"]

    def first(*more):
        return search_of(_parser().parse_args([*about, *more]))().propose()["lr"]

    assert math.isclose(first(), 1e-2)
    assert first("--method", "climb") == first()
    assert min(abs(first("--method", "grid") - end) for end in (1e-5, 10)) < 1e-9


def test_the_help_names_hyperparameters_that_there_are():
    page = (PACKAGE.parent / "training.md").read_text()
    there = re.findall(r"^\| `(\w+)` \|", page[page.index("| name | default | used by") :], re.M)
    taught = re.findall(r"--search ([a-z_]+)=", _parser().format_help())
    assert len(taught) > 2
    assert set(taught) <= set(there)


def test_a_job_that_cannot_be_tuned_says_so(box, start, tmp_path):
    name = os.environ["PHUB_JOB"]
    about = ("--server", box.address, "--search", "lr=1,2", "--wait", "0")
    tuner = tune(*about, "--job", "nobody")
    assert "there is no job 'nobody'" in tuner.communicate(timeout=60)[1]
    ranks = start(holds, 1, tmp_path)
    wait_until(lambda: box.status(name).get("state") == "running", "the job runs")
    tuner = tune(*about, "--job", name)
    assert "has no branches" in tuner.communicate(timeout=60)[1]
    assert tuner.returncode == 1
    (tmp_path / "enough").touch()
    ranks.results()


def goes_on(rank, folder):
    """Until there is a file `enough`, at a box that may come back."""
    model = nn.Linear(4, 1)
    made = torch.optim.SGD(model.parameters(), 1e-3)
    optimizer = phub.DistributedOptimizer(made, model, transport="tcp", branches=2)
    while not (folder / "enough").exists():
        try:
            for step in optimizer.steps(optimizer.steps_done + 20):
                optimizer.worker.report_loss(1 / (step + 1))
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                time.sleep(0.002)
        except phub.RewoundError:
            optimizer.rejoin()
    optimizer.close()


def learns(rank, folder, **options):
    """Until there is a file `enough`: each branch's loss falls as ever."""
    with phub.Worker(
        {"key": 8}, optimizer="sgd", hyper={"lr": 0.1}, transport="tcp", **options
    ) as worker:
        step = 0
        while not (folder / "enough").exists():
            step += 1
            worker.report_loss(1e3 - 0.01 * step)
            worker.push("key")
            worker.wait("key")
            time.sleep(0.002)


@contextlib.contextmanager
def learning(box, start, folder, **options):
    """A job, as a program beside it sees it, and what it is tuned with."""
    name = os.environ["PHUB_JOB"]
    ranks = start(lambda rank: learns(rank, folder, **options), 1)
    wait_until(lambda: box.status(name).get("completed_round", 0) > 2, "the job runs")
    about = ("--server", box.address, "--job", name, "--every", "0.01", "--search", "lr=0.1,0.2")
    try:
        yield RemoteJob(Control(box.address), name), about
    finally:
        (folder / "enough").touch()
    ranks.results()


def ended(tuner, status):
    out, err = tuner.communicate(timeout=60)
    assert tuner.returncode == status, err
    assert "Traceback" not in err
    return out, err


def of_kind(log, kind):
    return [row for row in rows_of(log) if row["kind"] == kind]


def stops(tuner, log, kind, number, times=1):
    """After it has written so many lines of this kind. Returns what it says."""
    wait_until(lambda: len(of_kind(log, kind)) >= times, f"{times} lines: {kind}")
    tuner.send_signal(number)
    return ended(tuner, 128 + number)


def test_a_tuner_that_is_stopped_lets_the_best_branch_run_and_can_be_begun_again(
    box, start, tmp_path
):
    log = tmp_path / "log"
    with learning(box, start, tmp_path, branches=3) as (job, about):
        stops(tune(*about, "--log", str(log)), log, "chosen", signal.SIGINT)
        best = of_kind(log, "chosen")[-1]["branch"]
        there, runs = job.branches()
        assert there == [best]
        assert runs[-1][1] == best
        kept = log.read_text()
        _, err = stops(tune(*about, "--log", str(log)), log, "chosen", signal.SIGTERM, 2)
        assert "were there before" not in err
        assert log.read_text().startswith(kept)
        assert [row["branch"] for row in of_kind(log, "begin")] == [0, best]


def test_one_that_is_stopped_within_a_search_lets_run_what_that_began_with(box, start, tmp_path):
    log = tmp_path / "log"
    with learning(box, start, tmp_path, branches=3) as (job, about):
        tuner = tune(*about, "--first-clocks", "400", "--log", str(log))
        stops(tuner, log, "fork", signal.SIGINT)
        there, runs = job.branches()
        assert there == [0]
        assert runs[-1][1] == 0


def test_what_a_killed_tuner_left_is_told_and_discarded(box, start, tmp_path):
    log = tmp_path / "log"
    with learning(box, start, tmp_path, branches=3) as (job, about):
        killed = tune(*about, "--log", str(log))
        wait_until(lambda: of_kind(log, "chosen"), "a branch is chosen")
        killed.kill()
        killed.communicate(timeout=60)
        there, runs = job.branches()
        others = [branch for branch in there if branch != runs[-1][1]]
        assert others
        _, err = ended(tune(*about), 1)
        assert f"branches {others} were there before" in err
        assert "--discard-others" in err
        assert job.branches()[0] == there
        third = tune(*about, "--discard-others", "--log", str(log))
        out, _ = stops(third, log, "chosen", signal.SIGINT, 2)
        assert f"branch {others[0]} was there before, and is discarded" in out
        assert len(job.branches()[0]) == 1


@pytest.mark.parametrize(
    ("branches", "search", "messages"),
    [
        (
            2,
            ("lr=0.1,0.2",),
            ["has room for 2 more: begin the job with the option branches=3, or", "--branches 3"],
        ),
        (4, ("lrr=0.1,0.2", "--method", "grid"), ["unknown hyperparameter 'lrr'"]),
        (4, ("momentum=0.5,0.9", "--method", "grid"), ["and optimizer 'sgd' does not use it"]),
        (4, ("lr@3=0.5,0.9", "--method", "grid"), ["'lr@3': the keys are of groups 0 to 0"]),
    ],
    ids=["too_few", "unknown", "unused", "no_group"],
)
def test_what_the_job_would_not_take_is_told_before_anything_is_tried(
    box, start, tmp_path, branches, search, messages
):
    log = tmp_path / "log"
    with learning(box, start, tmp_path, branches=branches) as (job, about):
        _, err = ended(tune(*about[:-1], *search, "--log", str(log)), 1)
        assert all(message in err for message in messages), err
        assert not of_kind(log, "fork")
        assert job.branches()[0] == [0]


def test_two_tuners_of_one_job_are_noticed(box, start, tmp_path):
    log = tmp_path / "log"
    with learning(box, start, tmp_path, branches=8) as (job, about):
        tuner = tune(*about, "--log", str(log))
        wait_until(lambda: of_kind(log, "fork"), "a branch is tried")
        other, _ = job.fork(0)
        job.schedule(other)
        _, err = ended(tuner, 1)
        assert "somebody else drives the branches" in err


def test_decisions_are_of_the_life_whose_losses_were_heard(
    saving_box, start, tmp_path, monkeypatch
):
    name = "lives"
    monkeypatch.setenv("PHUB_JOB", name)
    ranks = start(goes_on, 1, tmp_path)
    wait_until(lambda: saving_box.status(name).get("durable_round", 0) > 0, "a checkpoint")
    before = RemoteJob(Control(saving_box.address), name)
    assert before.losses(0)
    before.fork(0, {"lr": 0.1})
    saving_box.die_and_come_back()
    wait_until(lambda: saving_box.status(name).get("state") == "running", "the job goes on")
    for decide in (lambda: before.fork(0), lambda: before.schedule(0), lambda: before.discard(1)):
        with pytest.raises(phub.RewoundError, match="looks anew"):
            decide()
    again = RemoteJob(Control(saving_box.address), name)
    wait_until(lambda: again.losses(0), "losses")
    again.fork(0, {"lr": 0.1})
    (tmp_path / "enough").touch()
    ranks.results()


def test_a_tuner_begins_anew_when_the_job_goes_on_from_a_checkpoint(
    saving_box, start, tmp_path, monkeypatch
):
    """There is room for a search only if what the first one forked is discarded."""
    monkeypatch.setenv("PHUB_JOB", "goes-on")
    log = tmp_path / "log"
    tuner = tune(
        *("--server", saving_box.address, "--job", "goes-on", "--search", "lr=1e-3,2e-3"),
        *("--branches", "3", "--first-clocks", "20", "--every", "0.01", "--log", str(log)),
    )
    ranks = start(goes_on, 1, tmp_path)

    def forked(times):
        return lambda: [row["kind"] for row in rows_of(log)].count("fork") >= times

    def is_saved_with_a_branch():
        return forked(1)() and saving_box.status("goes-on").get("durable_round", 0) > max(
            row["round"] for row in rows_of(log) if row["kind"] == "fork"
        )

    wait_until(is_saved_with_a_branch, "a checkpoint with a branch")
    saving_box.die_and_come_back()
    wait_until(lambda: any(row["kind"] == "rewound" for row in rows_of(log)), "it begins anew")
    so_far = [row["kind"] for row in rows_of(log)].count("fork")
    wait_until(forked(so_far + 2), "another search")
    (tmp_path / "enough").touch()
    ranks.results()
    out, err = tuner.communicate(timeout=60)
    assert tuner.returncode == 0, err
    assert "a new search begins" in err
    assert "the job has gone on from a checkpoint" in out
    assert "the job has ended" in out


@contextlib.contextmanager
def guarded(tmp_path):
    """A box with TLS that asks for tokens; an admin's, and one that may only train."""
    make = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj "
        "/CN=box -addext subjectAltName=IP:127.0.0.1 -keyout box.key -out box.pem"
    )
    subprocess.run(make.split(), cwd=tmp_path, check=True, capture_output=True)
    tokens, entries = {}, ""
    for role in ("admin", "train"):
        new = [phub._library.find_program(), "token", "new", "--name", role, "--role", role]
        lines = subprocess.run(new, capture_output=True, text=True, check=True).stdout.splitlines()
        tokens[role] = lines[1]
        entries += "\n".join(lines[lines.index("[[token]]") :]) + "\n"
    (tmp_path / "tokens.toml").write_text(entries)
    for name in ("tokens.toml", "box.key"):
        (tmp_path / name).chmod(0o600)
    files = [str(tmp_path / name) for name in ("box.pem", "box.key", "tokens.toml")]
    box = Box("--tls-cert", files[0], "--tls-key", files[1], "--tokens", files[2])
    try:
        yield box, tokens
    finally:
        box.kill()


def test_who_drives_from_outside_is_an_admin(start, tmp_path, monkeypatch):
    with guarded(tmp_path) as (box, tokens):
        server = box.address
        monkeypatch.setenv("PHUB_CA", str(tmp_path / "box.pem"))
        ranks = start(
            lambda rank: holds(rank, tmp_path, branches=1),
            1,
            PHUB_SERVER=server,
            PHUB_JOB="mine",
            PHUB_TOKEN=tokens["train"],
        )
        admin = RemoteJob(Control(server, tokens["admin"]), "mine")

        def is_there():
            with contextlib.suppress(phub.NotFoundError):
                return admin.branches() == ([0], [(1, 0)])

        wait_until(is_there, "the job is there")
        assert admin.losses(0) == []
        about = ("--server", server, "--job", "mine", "--search", "lr=1,2", "--wait", "0")
        for token, said in (("train", "role admin"), ("none", "token")):
            tuner = tune(*about, PHUB_TOKEN=tokens.get(token, ""))
            assert said in tuner.communicate(timeout=60)[1]
            assert tuner.returncode == 1
        tuner = tune(*about, PHUB_CA="", PHUB_TOKEN=tokens["admin"])
        assert "PHUB_CA" in tuner.communicate(timeout=60)[1]
        (tmp_path / "enough").touch()
        ranks.results()
