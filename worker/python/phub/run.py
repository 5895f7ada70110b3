"""`phub run -n 4 -- python train.py`: a box and its ranks on this machine, for one training."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

from phub import _library, errors

GRACE_S = 5.0  # between SIGTERM and SIGKILL
_BOX = -1  # in place of a rank
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
        encoding="utf-8",  # of any locale: bytes of other encodings go through as they are
        errors="surrogateescape",
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


class _Output:
    """The command's own output. Threads write whole lines, and never wait for each other's ranks.

    What cannot be written is dropped, so that no rank waits for a pipe that nobody empties.
    """

    def __init__(self) -> None:
        self.failure: OSError | None = None  # the first
        self._lock = threading.Lock()

    def write(self, line: str) -> None:
        with self._lock:
            try:
                _write(sys.stdout, line)
            except OSError as error:
                if self.failure is None:
                    self.failure = error
                    _say(f"output of ranks is lost: standard output: {error.strerror}")


def _write(stream: TextIO | None, text: str) -> None:
    """To the descriptor itself: nothing stays in a buffer, and the locale does not matter."""
    if stream is None:  # it was closed when the command began: its number may be another file's
        raise OSError(errno.EBADF, "it is closed")
    file = stream.fileno()
    left = text.encode("utf-8", "surrogateescape")
    while left:
        try:
            left = left[os.write(file, left) :]
        except BlockingIOError:  # somebody has set O_NONBLOCK
            select.select([], [file], [])


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # there is nobody to tell
        _write(sys.stderr, f"phub run: {message}\n")


def _status_of(code: int) -> int:
    """As a shell has it: 128 + the signal's number."""
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _box() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A box that serves this machine alone. Yields its address, HOST:PORT, and its process."""
    program = _library.find_program()
    command = [program, "serve", "--listen", "127.0.0.1:0", "--pin", "false"]
    box = _start(command, {"PHUB_LOG_LEVEL": "warn", **os.environ}, errors_to=None)
    try:
        assert box.stdout is not None
        address = next((line.split()[-1] for line in box.stdout if line.startswith(_READY)), None)
        if address is None:
            raise errors.UnavailableError("the box did not start: its messages are above")
        yield address, box
    finally:
        _end([box])


def _free_port() -> int:
    """For the ranks' own use. The kernel gives none that it gave a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _environment(server: str, rank: int, ranks: int, job: str | None, port: int) -> dict[str, str]:
    """What phub looks for, and what torch and its frameworks find under torchrun."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {
        "PHUB_JOB": "run",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "PHUB_SERVER": server,
        "PHUB_RANK": str(rank),
        "PHUB_WORLD_SIZE": str(ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **({"PHUB_JOB": job} if job else {}),
    }


def _run_ranks(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    box: subprocess.Popen[str] | None,
    *,
    keep_going: bool,
) -> int:
    """Runs a process per environment to its end. Returns the status of the first that failed.

    box: the command's own; the ranks cannot go on without it.
    """
    ranks: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    output = _Output()
    try:
        for environment in environments:
            ranks.append(_start(command, environment, errors_to=subprocess.STDOUT))
        for rank, process in enumerate(ranks):
            readers.append(_in_thread(_print_prefixed, process, rank, output))
            _in_thread(_tell_end, process, rank, ended)
        if box is not None:
            _in_thread(_tell_end, box, _BOX, ended)
        status = _wait(ranks, box, ended, keep_going=keep_going)
    finally:
        _end(ranks)
    for rank, reader in enumerate(readers):
        reader.join(GRACE_S)
        if reader.is_alive():
            _say(
                f"the rest of rank {rank}'s output is not shown: nobody reads it here, "
                "or a process that the rank has left behind holds it open"
            )
    return status or (1 if output.failure else 0)


def _wait(
    ranks: Sequence[subprocess.Popen[str]],
    box: subprocess.Popen[str] | None,
    ended: queue.SimpleQueue[int],
    *,
    keep_going: bool,
) -> int:
    """Until all ranks have ended or, unless keep_going, one of them or the box has failed."""
    status = 0
    left = len(ranks)
    while left > 0:
        rank = ended.get()
        if rank == _BOX:
            assert box is not None
            code = box.returncode
            _say(f"the box {_how_it_ended(code)} before its ranks")
        else:
            left -= 1
            code = ranks[rank].returncode
            if code != 0:
                _say(f"rank {rank} {_how_it_ended(code)}")
        status = status or _status_of(code)
        if code != 0 and not keep_going:
            break
    return status


def _print_prefixed(process: subprocess.Popen[str], rank: int, output: _Output) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        output.write(f"{rank}| {line.rstrip()}\n")


def _tell_end(process: subprocess.Popen[str], rank: int, ended: queue.SimpleQueue[int]) -> None:
    process.wait()
    ended.put(rank)


def _in_thread(body: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=body, args=arguments, daemon=True)
    thread.start()
    return thread


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"
    hint = " (the kernel does so when memory runs out: see dmesg)" if name == "SIGKILL" else ""
    return f"was killed by signal {-code}, {name}{hint}"


def _interrupt(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str]) -> int:
    """The command `phub run`. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="phub run",
        description="Starts a box and the ranks of a training on this machine. Each rank finds "
        "PHUB_SERVER, PHUB_RANK, PHUB_WORLD_SIZE and PHUB_JOB in its environment, and RANK, "
        "LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as under torchrun. Its output has "
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
    around = contextlib.nullcontext((given.server, None)) if given.server else _box()
    try:
        with around as (server, box):
            port = _free_port()
            environments = [
                _environment(server, rank, given.ranks, given.job, port)
                for rank in range(given.ranks)
            ]
            return _run_ranks(given.command, environments, box, keep_going=given.keep_going)
    except errors.Error:
        raise
    except OSError as error:
        remedy = ""
        if error.errno == errno.ENOEXEC:
            remedy = ": name its interpreter, as in `-- python train.py`, or begin it with `#!`"
        _say(f"{error}{remedy}")
        return 127 if isinstance(error, FileNotFoundError) else 126
