"""`phub run -n 4 -- python train.py`: a box and its ranks on this machine, for one training."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from phub import _library, errors

GRACE_S = 5.0  # between SIGTERM and SIGKILL
_READY = "listening on "  # what the box says before its address
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _start(
    command: Sequence[str], environment: Mapping[str, str], errors_to: int | None
) -> subprocess.Popen[str]:
    """In a process group of its own, so that its children end with it."""
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors_to,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_die_with_parent,  # noqa: PLW1509  # there are no other threads yet
    )


def _signal(process: subprocess.Popen[str], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # its group is empty
        os.killpg(process.pid, number)


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """SIGTERM, and SIGKILL for what is left of their groups after GRACE_S."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    limit = time.monotonic() + GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, limit - time.monotonic()))
        _signal(process, signal.SIGKILL)
        process.wait()


def _status_of(code: int) -> int:
    """As a shell has it: 128 + the signal's number."""
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _box() -> Iterator[str]:
    """A box that serves this machine alone. Yields its address, HOST:PORT."""
    program = _library.find_program()
    command = [program, "serve", "--listen", "127.0.0.1:0", "--pin", "false"]
    box = _start(command, {"PHUB_LOG_LEVEL": "warn", **os.environ}, errors_to=None)
    try:
        assert box.stdout is not None
        address = next((line.split()[-1] for line in box.stdout if line.startswith(_READY)), None)
        if address is None:
            raise errors.UnavailableError("the box did not start: its messages are above")
        yield address
    finally:
        _end([box])


def _environment(server: str, rank: int, ranks: int, job: str | None) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {
        "PHUB_JOB": "run",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "PHUB_SERVER": server,
        "PHUB_RANK": str(rank),
        "PHUB_WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        **({"PHUB_JOB": job} if job else {}),
    }


def _run_ranks(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], *, keep_going: bool
) -> int:
    """Runs a process per environment to its end. Returns the status of the first that failed."""
    ranks: list[subprocess.Popen[str]] = []
    outputs: list[threading.Thread] = []
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    status = 0
    try:
        for environment in environments:
            ranks.append(_start(command, environment, errors_to=subprocess.STDOUT))
        for rank, process in enumerate(ranks):
            outputs.append(_in_thread(_print_prefixed, process, rank))
            _in_thread(_tell_end, process, rank, ended)
        for _ in ranks:
            rank = ended.get()
            code = ranks[rank].returncode
            if code == 0:
                continue
            print(f"phub run: rank {rank} {_how_it_ended(code)}", file=sys.stderr, flush=True)
            status = status or _status_of(code)
            if not keep_going:
                break
    finally:
        _end(ranks)
    for output in outputs:
        output.join(GRACE_S)  # a process that left the group may hold the pipe open
    return status


def _print_prefixed(process: subprocess.Popen[str], rank: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(f"{rank}| {line.rstrip()}\n")
        sys.stdout.flush()


def _tell_end(process: subprocess.Popen[str], rank: int, ended: queue.SimpleQueue[int]) -> None:
    process.wait()
    ended.put(rank)


def _in_thread(body: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=body, args=arguments, daemon=True)
    thread.start()
    return thread


def _how_it_ended(code: int) -> str:
    return f"exited with status {code}" if code > 0 else f"was killed by signal {-code}"


def _interrupt(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str]) -> int:
    """The command `phub run`. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="phub run",
        description="Starts a box and the ranks of a training on this machine. Each rank finds "
        "PHUB_SERVER, PHUB_RANK, PHUB_WORLD_SIZE and PHUB_JOB in its environment. Its output has "
        "its rank before each line. When a rank fails, the others are ended, and its status is the "
        "command's.",
    )
    parser.add_argument("-n", "--ranks", type=int, default=1, help="how many (%(default)s)")
    parser.add_argument("--server", help="a box that runs already, HOST:PORT, instead of a new one")
    parser.add_argument("--job", help="the job's name (PHUB_JOB, else 'run')")
    parser.add_argument(
        "--keep-going", action="store_true", help="when a rank fails, the others go on"
    )
    parser.add_argument("command", nargs="+", help="after --: what each rank runs")
    given = parser.parse_args(arguments)
    if not 1 <= given.ranks <= 1024:
        parser.error(f"-n {given.ranks}: from 1 to 1024 ranks")
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    box = contextlib.nullcontext(given.server) if given.server else _box()
    try:
        with box as server:
            environments = [
                _environment(server, rank, given.ranks, given.job) for rank in range(given.ranks)
            ]
            return _run_ranks(given.command, environments, keep_going=given.keep_going)
    except (FileNotFoundError, PermissionError) as error:
        print(f"phub run: {error}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
