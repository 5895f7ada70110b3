"""A box and the ranks of a program with a store, for the tests beside this file."""

import contextlib
import os
import subprocess


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
