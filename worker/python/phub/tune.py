"""`phub tune`: drives the branches of a training from outside, by the losses that it reports."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from phub import _climb, _search, errors
from phub._control import Control, RemoteJob, RoundLoss, token_from_environment
from phub._decisions import COMPARE, LEAST_BRANCHES, SCHEDULE, Policy
from phub._driver import Driver
from phub._population import Population, decisions_of
from phub._search import Between, Search, Space
from phub._tune_course import Course, Log

_ENDED = "the job has ended"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # end the tuner
_MOMENT_S = 3.0  # for which a job may not be there, at a box that has begun again
_PATIENCE_S = 30.0  # while the box does not answer, or the training says nothing
_MOST_S = 1e6  # that an option may say

_DESCRIPTION = """\
Finds hyperparameters of a training that runs: tries values on branches of the job, and goes on
with the best, again and again. The training reports the loss of its rounds, or of every few, as of
a validation set (report_loss; of several --loss names the one that counts); its job has the option
`branches`, of at least --branches less one, and on_nonfinite "pass"."""

_EPILOG = """\
What is tried: --search lr=log:1e-5..1 (a range, by ratios), --search momentum=linear:0..0.95 (by
differences), --search weight_decay=0,1e-4,1e-3 (these). More than one: --method climb goes along
one after another, grid tries all combinations. --method pbt is a population (Jaderberg et al.
2017): --branches less one train with values of their own, --window clocks in turn; then the worst
becomes a copy of the best with values a little off, and so on.

PHUB_TOKEN or PHUB_TOKEN_FILE has the token, of role admin, if the box asks for one. Where it has
TLS: --server https://HOST:PORT, and PHUB_CA names the file of the authority.

The tuner ends when the job does, when a search finds nothing any more, or a population no lower
loss, or with Ctrl-C; the training goes on with the best branch, or with that from which the search
began, and the tuner discards the others that it made. One that was killed leaves them:
--discard-others of the next one."""


def _numbers(text: str, given: str) -> list[float]:
    try:
        numbers = [float(each) for each in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(map(math.isfinite, numbers)):
        raise errors.InvalidError(f"--search {given}: '{text}' is not a list of numbers")
    return numbers


def _range(text: str, given: str, *, logarithmic: bool) -> Between:
    ends = text.split("..")
    if len(ends) != 2 or "," in text:
        raise errors.InvalidError(f"--search {given}: a range is LOW..HIGH, not '{text}'")
    low, high = (_numbers(end, given)[0] for end in ends)
    return Between(low, high, logarithmic)


def space_of(given: Sequence[str]) -> Space:
    """What is tried, of arguments such as lr=log:1e-5..1. Raises InvalidError."""
    space: dict[str, Between | Sequence[float]] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not name or not equals or not text:
            raise errors.InvalidError(f"--search {each}: it is NAME=VALUES, such as lr=log:1e-5..1")
        if name in space:
            raise errors.InvalidError(f"--search {each}: {name} is given twice")
        kind, colon, rest = text.partition(":")
        if not colon:
            space[name] = _numbers(text, each)
        elif kind in ("log", "linear"):
            space[name] = _range(rest, each, logarithmic=kind == "log")
        else:
            raise errors.InvalidError(f"--search {each}: a range is log: or linear:, not '{kind}:'")
    return space


def search_of(given: argparse.Namespace) -> Callable[[], Search]:
    """Makes a new search for each. Raises InvalidError."""
    space = space_of(given.tried)
    searches: dict[str, Callable[[], Search]] = {
        "climb": lambda: _climb.climb(space),
        "grid": lambda: _search.grid(space, given.points, given.seed),
        "sampled": lambda: _search.sampled(space, given.points, given.seed),
        "tpe": lambda: _search.tpe(space, given.points, given.seed),
        "pbt": Population(space, given.seed),
    }
    search = searches[given.method]
    search()  # says now what cannot be
    return search


# Options that a method has no use for.
_OF_SEARCHES = ("compare", "schedule", "first_clocks", "most_clocks", "slice_clocks", "points")
_IN_VAIN = {"pbt": _OF_SEARCHES, "climb": ("points", "seed")}


def _check_used(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    for name in _IN_VAIN.get(given.method, ()):
        if getattr(given, name) != parser.get_default(name):
            option = name.replace("_", "-")
            parser.error(f"--method {given.method} has no use for --{option}: leave it out")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phub tune",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    server = os.environ.get("PHUB_SERVER", "127.0.0.1:7717")
    parser.add_argument("--server", default=server, help="PHUB_SERVER, else %(default)s")
    parser.add_argument("--job", default=os.environ.get("PHUB_JOB"), help="its name (PHUB_JOB)")
    parser.add_argument(
        "--loss",
        default="loss",
        metavar="NAME",
        help="by which losses of the training it decides, such as validation (%(default)s)",
    )
    parser.add_argument(
        "--search", dest="tried", action="append", required=True, metavar="NAME=VALUES"
    )
    parser.add_argument(
        "--method",
        choices=("climb", "grid", "sampled", "tpe", "pbt"),
        default="climb",
        help="(%(default)s)",
    )
    parser.add_argument(
        "--points",
        type=int,
        default=7,
        help="of each range of a grid; trials of sampled and tpe (%(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order or the draws (%(default)s)"
    )
    for name, most in (("compare", COMPARE), ("schedule", SCHEDULE)):
        parser.add_argument(f"--{name}", choices=most, default=getattr(Policy, name))
    for each in dataclasses.fields(Policy):
        if isinstance(each.default, int | float):
            option = "--" + each.name.replace("_", "-")
            parser.add_argument(
                option, type=type(each.default), default=each.default, help="(%(default)s)"
            )
    parser.add_argument(
        "--discard-others",
        action="store_true",
        help="first, all branches but the one that runs, such as those that a killed tuner left",
    )
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="is appended to, for bench/plot_tune"
    )
    parser.add_argument(
        "--every", type=float, default=0.1, metavar="SECONDS", help="asks the box (%(default)s)"
    )
    parser.add_argument(
        "--wait", type=float, default=60, metavar="SECONDS", help="for the job (%(default)s)"
    )
    return parser


def _policy_of(given: argparse.Namespace) -> Policy:
    policy = Policy(**{each.name: getattr(given, each.name) for each in dataclasses.fields(Policy)})
    policy.check()
    return policy


def _found(job: RemoteJob, limit_s: float) -> tuple[list[int], list[tuple[int, int]]]:
    """The branches of the job, and which run, when it is there."""
    end = time.monotonic() + limit_s
    while True:
        try:
            return job.branches()
        except (errors.NotFoundError, errors.UnavailableError):
            if time.monotonic() >= end:
                raise
        time.sleep(0.1)


class _Follower:
    """Has a driver hear a job's losses, and decide."""

    def __init__(
        self,
        job: RemoteJob,
        driver: Driver,
        course: Course,
        others: Sequence[int],
        given: argparse.Namespace,
    ) -> None:
        """others: branches that were there before, and stay."""
        self._job, self._driver, self._course = job, driver, course
        self._others, self._needed = others, given.branches - 1  # beside the one that runs
        self._room_is_known = False
        self._values = search_of(given)().propose() or {}  # such as will be tried
        self._every_s, self._wait_s = given.every, given.wait
        self._name, self._names = given.loss, set[str]()  # of losses; those that it has heard of

    def follow(self) -> str:
        """Until the job ends, or the search does. Returns why."""
        while True:
            try:
                return self._follow_life()
            except errors.RewoundError as error:
                if not self._job.has_gone_on():
                    return _ENDED
                print(f"phub tune: {error}; a new search begins", file=sys.stderr)
            self._begin_anew()

    def _begin_anew(self) -> None:
        end = time.monotonic() + max(self._wait_s, _PATIENCE_S)
        while True:
            try:
                job = RemoteJob(self._job.control, self._job.name)
                job.losses(0)  # of which life it is
                self._driver.begin_anew(job, *job.branches())
                break
            except (errors.NotFoundError, errors.RewoundError, errors.UnavailableError):
                if time.monotonic() >= end:
                    raise
            time.sleep(0.1)
        self._job = job
        self._course.rewound(self._driver.branch)

    def _follow_life(self) -> str:
        since, silent_until = 0, time.monotonic() + _PATIENCE_S
        while True:
            told = self._ask(since)
            if told is None:
                return _ENDED
            since = told[-1].round + 1 if told else since
            self._names.update(each.name for each in told)
            heard = [each for each in told if each.name == self._name]
            for each in heard:
                self._check_driver(each)
                self._driver.hear(each.round, each.branch, each.loss)
                self._course.hear(each)
            if self._name not in self._names and time.monotonic() >= silent_until:
                silent_until = math.inf
                print(f"phub tune: {self._silence()}", file=sys.stderr)
            if heard and not self._decided(since):
                return _ENDED
            self._course.decided(self._driver.decisions, self._driver.branch)
            self._course.show()
            if self._driver.done:
                return self._driver.decisions.why
            time.sleep(self._every_s)

    def _silence(self) -> str:
        said = f"no rank of job '{self._job.name}' has reported a loss"
        if not self._names:
            return f"{said} yet (report_loss)"
        others = ", ".join(sorted(self._names))
        return f"{said} of the name {self._name}, but of {others}: --loss says which one counts"

    def _ask(self, since: int) -> list[RoundLoss] | None:
        """The losses. None: the job has ended. While the box is away, and its ranks, it waits."""
        began, was_away = time.monotonic(), False
        while True:
            try:
                return self._job.losses(since)
            except errors.NotFoundError:  # it may have been away for a moment
                if time.monotonic() >= began + (_PATIENCE_S if was_away else _MOMENT_S):
                    return None
            except errors.UnavailableError:
                was_away = True
                if time.monotonic() >= began + _PATIENCE_S:
                    raise
            time.sleep(min(0.1, self._every_s))

    def _decided(self, since: int) -> bool:
        """False: the job ended meanwhile."""
        try:
            with _uninterrupted():
                self._check_room()
                self._driver.decide()
        except (errors.NotFoundError, errors.UnavailableError):
            # If the box has begun again, this is RewoundError: what was decided is void.
            if self._ask(since) is None:
                return False
            raise
        return True

    def _check_room(self) -> None:
        """Before the first decision, so that no search fails halfway, or tries in vain."""
        if self._room_is_known:
            return
        room = self._job.room(self._driver.branch, self._needed, self._values)
        self._room_is_known = True
        if room < self._needed:
            raise errors.FullError(self._no_room(room))

    def _no_room(self, room: int) -> str:
        said = (
            f"--branches {self._needed + 1} needs {self._needed} branches beside the one that runs,"
            f" and job '{self._job.name}' has room for {room} more"
        )
        if self._others:
            return (
                f"{said}: branches {[*self._others]} were there before, of another tuner or of one "
                "that was killed; if nobody needs them, --discard-others discards them"
            )
        fewer = f", or give --branches {room + 1}" if room + 1 >= LEAST_BRANCHES else ""
        return f"{said}: begin the job with the option branches={self._needed}{fewer}"

    def _check_driver(self, heard: RoundLoss) -> None:
        if self._driver.is_driven_by_others(heard.round, heard.branch):
            raise errors.TakenError(
                f"branch {heard.branch} ran in round {heard.round}, for which this tuner had "
                f"scheduled {self._driver.branch}: somebody else drives the branches of job "
                f"'{self._job.name}', such as another tuner"
            )


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals wait: what the box was asked for, the driver knows."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _stop(driver: Driver) -> None:
    """The job goes on without this tuner, and without the branches that only it needs."""
    try:
        with _uninterrupted():
            driver.stop()
    except errors.Error as error:
        print(
            f"phub tune: branches that it made may still be there (--discard-others of the next "
            f"one discards them): {error}",
            file=sys.stderr,
        )


def _without_others(job: RemoteJob, others: Sequence[int], given: argparse.Namespace) -> list[int]:
    """Those of them that stay."""
    if not given.discard_others:
        return [*others]
    for branch in others:
        job.discard(branch)
        print(f"branch {branch} was there before, and is discarded", flush=True)
    return []


def _tune(given: argparse.Namespace) -> None:
    decisions = decisions_of(_policy_of(given), search_of(given))
    job = RemoteJob(Control(given.server, token_from_environment()), given.job)
    log = Log(given.log)
    branches, runs = _found(job, given.wait)
    root = runs[-1][1]
    course = Course(log, sys.stdout, given.job, root)
    about = {"tried": given.tried, "method": given.method, "seed": given.seed}
    log.add("begin", job=given.job, branch=root, **about)
    if given.method != "climb":
        print(f"{given.method} with seed {given.seed}", flush=True)
    others = [branch for branch in branches if branch != root]
    if others := _without_others(job, others, given):
        print(f"phub tune: branches {others} were there before, and take room", file=sys.stderr)
    driver = Driver(job, decisions, root, course.tell, branches)
    why = "it was interrupted"
    try:
        why = _Follower(job, driver, course, others, given).follow()
    except errors.Error as error:
        why = f"it failed: {error}"
        raise
    finally:
        if why != _ENDED:
            _stop(driver)
        course.end(why)


def _interrupt(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str]) -> int:
    """The command `phub tune`. Returns the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if not given.job:
        parser.error("--job NAME, or PHUB_JOB, says which job is to be tuned")
    _check_used(given, parser)
    if not 0 < given.every <= _MOST_S or not 0 <= given.wait <= _MOST_S:
        parser.error(f"--every is above 0, --wait not below 0, and both are at most {_MOST_S:g}")
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    _tune(given)
    return 0
