"""A box and the ranks of a program with a store, for the tests beside this file."""

import contextlib
import os
import subprocess
import time


@contextlib.contextmanager
def box_of(phub, folder):
    """The address of a box of its own process."""
    server = subprocess.Popen([phub, "serve", "--listen", "127.0.0.1:0", "--pin", "false", "--socket-dir",
                               os.path.join(folder, "socket")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield next(line.split()[-1] for line in server.stdout if line.startswith("listening on"))
    finally:
        server.kill()
        server.wait()


def run_ranks(command, world, limit_s, expect=0):
    """(stdout, stderr) of each rank; all end with this status."""
    processes = [subprocess.Popen([*command, "--world", str(world), "--rank", str(rank)], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True) for rank in range(world)]
    try:
        outputs = [process.communicate(timeout=limit_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    status = [process.returncode for process in processes]
    assert status == [expect] * world, (command, status, outputs)
    return outputs


def one_is_refused(commands, limit_s, *words):
    """A rank each, of one job: whichever comes second is told these words; the other one would wait for it."""
    ranks = [subprocess.Popen([*command, "--world", str(len(commands)), "--rank", str(rank)], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True) for rank, command in enumerate(commands)]
    try:
        end = time.monotonic() + limit_s
        while all(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            time.sleep(0.01)
        told = next(rank for rank in ranks if rank.poll() is not None)
        said = told.communicate()[0]
        assert told.returncode == 1 and all(word in said for word in words), (commands, said)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
