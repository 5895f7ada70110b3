"""`phub tune`: a real training, tuned from outside, is what it would be in one process."""

import contextlib
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from blobs import RULES, WORLD, assert_alike, assert_near, begun, replayed
from conftest import PACKAGE, Box, python, refused, wait_until
from exact import parameters_of
from torch import nn

import phub
from phub.__main__ import main
from phub._control import Control, RemoteJob
from phub._decisions import Decisions, Policy
from phub._driver import Driver
from phub._tune_course import Course, Log
from phub.tune import _parser, search_of

MOST_STEPS = 50_000
BRANCHES = 4


def tune(*arguments, **environment):
    return subprocess.Popen(**python("-m", "phub", "tune", *arguments, **environment))


def rows_of(log):
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def of_kind(log, kind):
    return [row for row in rows_of(log) if row["kind"] == kind]


def ended(tuner, status):
    """What it has said."""
    out, err = tuner.communicate(timeout=60)
    assert tuner.returncode == status, err
    assert "Traceback" not in err
    return out, err


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
        optimizer.worker.report_loss(losses[-1], name="mine")
        optimizer.worker.report_loss(1.01 ** len(losses))  # another, which is not asked for
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
        *("--every", "0.01", "--log", str(log), "--loss", "mine"),
    )
    ranks = start(trains, WORLD, rule, tmp_path)

    def is_enough():
        has_ended = tuner.poll() is not None  # as when a later search finds nothing better
        enough = len(of_kind(log, "discard")) >= 3 and of_kind(log, "chosen") != []
        assert enough or not has_ended, tuner.communicate()
        return enough

    wait_until(is_enough, "a search is over")
    (tmp_path / "enough").touch()
    (first, mine), (second, others) = ranks.results()
    out, _ = ended(tuner, 0)
    assert re.search("(the job has ended|nothing that converges); best: lr ", out), out
    assert_alike([mine, others])
    heard = of_kind(log, "loss")
    assert [row["round"] for row in heard] == list(range(1, len(heard) + 1))
    assert len(heard) < len(first)
    fields = "round", "branch", "parent", "values"
    forks = [tuple(row[field] for field in fields) for row in of_kind(log, "fork")]
    together = replayed(rule, [row["branch"] for row in heard], forks)
    for row, expected, *losses in zip(heard, together, first, second, strict=False):
        mean, one = (sum(each) / WORLD for each in (losses, expected))
        assert row["ranks"] == WORLD
        assert row["loss"] == (mean if math.isfinite(mean) else None)
        assert_near(mean, one, row)
    chosen = of_kind(log, "chosen")[0]
    assert chosen["values"]["lr"] in RULES[rule][1]
    assert any(row["branch"] == chosen["branch"] for row in heard)


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
    ("--job x --search lr=1..2", "'1..2' is not a list"),
    ("--job x --search lr=1 --search lr=2", "lr is given twice"),
    ("--job x --search lr=log:1..2 --method grid --points 1000000000", "take fewer points"),
    ("GIVEN --points 9", "--method climb has no use for --points"),
    ("GIVEN --method pbt --first-clocks 8", "--method pbt has no use for --first-clocks"),
    ("GIVEN --method pbt --compare loss", "--method pbt has no use for --compare"),
    ("GIVEN --branches 2", "branches of a tuner"),
    ("GIVEN --method grid --points 1", "at least 2"),
    ("GIVEN --method sampled --points 0", "at least 1"),
    ("GIVEN --compare beauty", "beauty"),
    ("GIVEN --every 0", "--every"),
    ("GIVEN --every nan", "--every"),
    ("GIVEN --wait inf", "--wait"),
    ("GIVEN --method sampled --points 1000000000", "1000000000 trials does not end: at most 1000"),
    ("GIVEN --method tpe --points 1000000000", "1000000000 trials does not end: at most 100000"),
    ("GIVEN --improvement nan", "improvement of a tuner"),
    ("GIVEN --server nowhere", "host and port"),
    ("GIVEN --log /nowhere/log", "--log /nowhere/log"),
    ("GIVEN --server 127.0.0.1:1 --wait 0", "no phub server at 127.0.0.1:1"),
]


def test_mistakes_are_told(monkeypatch, capsys):
    for arguments, said in MISTAKES:
        given = arguments.replace("GIVEN", "--job x --search lr=1,2").split()
        monkeypatch.setattr(sys, "argv", ["phub", "tune", *given])
        try:
            status = main()
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        assert status in (1, 2), arguments
        assert said in err, arguments
        assert out == ""


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
    assert "there is no job 'nobody'" in ended(tune(*about, "--job", "nobody"), 1)[1]
    ranks = start(holds, 1, tmp_path)
    wait_until(lambda: box.status(name).get("state") == "running", "the job runs")
    assert "has no branches" in ended(tune(*about, "--job", name), 1)[1]
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
    options = {"optimizer": "sgd", "hyper": {"lr": 0.1}, "transport": "tcp", **options}
    with phub.Worker({"key": 8}, **options) as worker:
        for step in itertools.count(1):
            if (folder / "enough").exists():
                return
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
        assert (there, runs[-1][1]) == ([best], best)
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
        assert (there, runs[-1][1]) == ([0], 0)


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
    ("branches", "search", "said"),
    [
        (
            2,
            "lr=0.1,0.2",
            "room for 2 more: begin the job with the option branches=3, or.*--branches 3",
        ),
        (4, "lrr=0.1,0.2 --method grid", "unknown hyperparameter 'lrr'"),
        (4, "momentum=0.5,0.9 --method grid", "and optimizer 'sgd' does not use it"),
        (4, "lr@3=0.5,0.9 --method grid", "'lr@3': the keys are of groups 0 to 0"),
    ],
    ids=["too_few", "unknown", "unused", "no_group"],
)
def test_what_the_job_would_not_take_is_told_before_anything_is_tried(
    box, start, tmp_path, branches, search, said
):
    log = tmp_path / "log"
    with learning(box, start, tmp_path, branches=branches) as (job, about):
        _, err = ended(tune(*about[:-1], *search.split(), "--log", str(log)), 1)
        assert re.search(said, err, re.S), err
        assert not of_kind(log, "fork")
        assert job.branches()[0] == [0]


def test_a_tuner_that_hears_losses_of_other_names_says_which(box, start, tmp_path, monkeypatch):
    monkeypatch.setattr(phub.tune, "_PATIENCE_S", 0.1)
    with learning(box, start, tmp_path, branches=3) as (job, about):
        given = _parser().parse_args([*about, "--loss", "validation"])
        ends = threading.Timer(1, (tmp_path / "enough").touch)
        ends.start()
        driver = Driver(job, Decisions(Policy(), search_of(given)), 0)
        course = Course(Log(None), io.StringIO(), job.name, 0)
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            phub.tune._Follower(job, driver, course, [], given).follow()
    assert "loss of the name validation, but of loss: --loss says" in said.getvalue()


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
    for decide, branch in ((before.fork, 0), (before.schedule, 0), (before.discard, 1)):
        refused("looks anew", decide, branch, error=phub.RewoundError)
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

    def is_saved_with_a_branch():
        forks = [row["round"] for row in of_kind(log, "fork")]
        return forks and saving_box.status("goes-on").get("durable_round", 0) > max(forks)

    wait_until(is_saved_with_a_branch, "a checkpoint with a branch")
    saving_box.die_and_come_back()
    wait_until(lambda: of_kind(log, "rewound"), "it begins anew")

    def forks_since():
        kinds = [row["kind"] for row in rows_of(log)]
        return kinds[kinds.index("rewound") :].count("fork")

    wait_until(lambda: forks_since() >= 2, "another search", 40)
    (tmp_path / "enough").touch()
    ranks.results()
    out, err = ended(tuner, 0)
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
    files = {"tls-cert": "box.pem", "tls-key": "box.key", "tokens": "tokens.toml"}
    with Box(*(f"--{name}={tmp_path / file}" for name, file in files.items())) as box:
        yield box, tokens


def test_who_drives_from_outside_is_an_admin(start, tmp_path, monkeypatch):
    with guarded(tmp_path) as (box, tokens):
        server = box.address
        monkeypatch.setenv("PHUB_CA", str(tmp_path / "box.pem"))
        given = {"PHUB_SERVER": server, "PHUB_JOB": "mine", "PHUB_TOKEN": tokens["train"]}
        ranks = start(lambda rank: holds(rank, tmp_path, branches=1), 1, **given)
        admin = RemoteJob(Control(server, tokens["admin"]), "mine")

        def is_there():
            with contextlib.suppress(phub.NotFoundError):
                return admin.branches() == ([0], [(1, 0)])

        wait_until(is_there, "the job is there")
        assert admin.losses(0) == []
        about = ("--server", server, "--job", "mine", "--search", "lr=1,2", "--wait", "0")
        for said, given in (
            ("role admin", {"PHUB_TOKEN": tokens["train"]}),
            ("token", {"PHUB_TOKEN": ""}),
            ("PHUB_CA", {"PHUB_CA": "", "PHUB_TOKEN": tokens["admin"]}),
        ):
            assert said in ended(tune(*about, **given), 1)[1]
        (tmp_path / "enough").touch()
        ranks.results()
