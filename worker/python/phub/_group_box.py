"""The box of a process group: the one that PHUB_SERVER names, or one that rank 0 starts.

A box that rank 0 starts serves this machine alone. It ends when no process holds its standard input
open any more, a pipe, in whatever way they have ended; each rank holds it until its own end. So the
box outlives rank 0 as long as others need it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import NamedTuple, Protocol

from phub import _library, errors

_READY = b"listening on "  # what the box says before its address
_OWN_ENVIRONMENT = "environment"  # in place of an address: each rank's PHUB_SERVER


class Store(Protocol):
    """What is used of torch.distributed's."""

    def set(self, key: str, value: str) -> object: ...
    def get(self, key: str) -> bytes: ...


class Meeting(NamedTuple):
    """Where the ranks of a group meet, and under which name."""

    server: str | None  # None: that of the environment
    job: str


_held: dict[str, int] = {}  # by pipe: it is open here for as long as the process is there
_own: tuple[str, str] | None = None  # address and pipe of the box that this process has started


def meet(store: Store, rank: int, size: int) -> Meeting:
    """For a new group; all ranks call it. Raises UnavailableError, InvalidError, LibraryError."""
    if size == 1:
        return Meeting(None, "")
    named = os.environ.get("PHUB_SERVER", "")
    store.set(f"host{rank}", f"{_host()}\n{'PHUB_SERVER' if named else ''}")
    if rank == 0:
        try:
            found = [store.get(f"host{other}").decode().split("\n") for other in range(size)]
            store.set("box", "\n".join(_offer(found)))
        except BaseException as failed:
            store.set("box", f"!{failed}")
            raise
    offer = store.get("box").decode()
    if offer.startswith("!"):
        raise errors.UnavailableError(f"rank 0 has found no box: {offer[1:]}")
    job, server, pipe = offer.split("\n")
    if pipe and pipe not in _held:
        try:
            _held[pipe] = os.open(pipe, os.O_WRONLY)
        except OSError as failed:
            raise errors.UnavailableError("rank 0 has ended, which started the box") from failed
    return Meeting(None if server == _OWN_ENVIRONMENT else server, job)


def _offer(ranks: list[list[str]]) -> tuple[str, str, str]:
    """The job's name, the box's address, and its pipe; "": it has none."""
    job = f"{os.environ.get('PHUB_JOB', 'group')}-{secrets.token_hex(6)}"
    hosts, named = {host for host, _ in ranks}, [name for _, name in ranks]
    if len(set(named)) > 1:
        with_name, without = named.index("PHUB_SERVER"), named.index("")
        raise errors.InvalidError(
            f"rank {with_name} has PHUB_SERVER in its environment, rank {without} has not: set it "
            "on all, or on none"
        )
    if named[0]:
        return job, _OWN_ENVIRONMENT, ""
    if len(hosts) > 1:
        raise errors.InvalidError(
            'the ranks of a group of backend "phub" are on several hosts: start a box that all of '
            "them reach (`phub serve`), and set PHUB_SERVER to its address on each"
        )
    return (job, *_start())


def _host() -> str:
    """The same for those that reach each other's loopback addresses and descriptors."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')} {os.readlink('/proc/self/ns/pid')}"


def _start() -> tuple[str, str]:
    """Starts the box, unless this process has done so. Returns its address and pipe."""
    global _own
    if _own is not None:
        return _own
    program = _library.find_program()
    read_end, write_end = os.pipe()
    pipe = f"/proc/{os.getpid()}/fd/{write_end}"
    _held[pipe] = write_end
    output, box_output = os.pipe()
    arguments = ["serve", "--listen", "127.0.0.1:0", "--pin", "false", "--end-with-input"]
    try:
        # In a session of its own: Ctrl-C is for the ranks.
        os.posix_spawn(
            program,
            [program, *arguments],
            {"PHUB_LOG_LEVEL": "warn", **os.environ},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, read_end, 0),
                (os.POSIX_SPAWN_DUP2, box_output, 1),
            ],
            setsid=True,
        )
    finally:
        os.close(read_end)
        os.close(box_output)
    with open(output, "rb") as lines:
        address = next((line.split()[-1] for line in lines if line.startswith(_READY)), None)
    if address is None:
        raise errors.UnavailableError("the box did not start: its messages are above")
    _own = address.decode(), pipe
    return _own


def _forget() -> None:
    """In a child of fork(): the parent's box is not held by it."""
    global _own
    _own = None
    for descriptor in _held.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
