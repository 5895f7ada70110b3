"""Processes of bench/outer and bench/outer_goodput, and the memory that they have."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from peers_runs import ROOT, Failure, run

APPS = ROOT / "bench" / "outer_apps"
LIMIT_S = 600
FOLDER = ROOT / "build" / "outer"
PACKAGES = {
    "torchft": ["torchft==0.2.0", "torch==2.13.0", "numpy==2.4.6"],
    "nvflare": ["nvflare==2.9.0", "numpy==2.4.6"],
    "flower": ["flwr==1.42.0", "numpy==2.4.6"],
}


def environment_of(peer):
    """The programs of a folder that has its packages. Raises Failure if pip cannot install them."""
    folder = FOLDER / peer
    python = folder / "bin" / "python"
    wanted = folder / "packages.txt"
    if not wanted.exists() or wanted.read_text().split() != PACKAGES[peer]:
        shutil.rmtree(folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(folder)])
        run([str(python), "-m", "pip", "install", "-q", *PACKAGES[peer]])
        wanted.write_text("\n".join(PACKAGES[peer]))
    return folder / "bin"


def phub_environment(arguments, job):
    """Of its learners."""
    return {"PHUB_LIBRARY": str(arguments.build / "worker" / "libphub_worker.so"),
            "PHUB_TRANSPORT": "tcp", "PHUB_JOB": job,
            "PYTHONPATH": f"{APPS}:{ROOT / 'worker' / 'python'}"}


class Processes:
    """The processes of a run, which end with it, and the most memory that some of them have."""

    def __init__(self, environment, folder):
        self.environment = os.environ | {"PYTHONPATH": str(APPS), "OMP_NUM_THREADS": "1"} | environment
        self.folder = folder
        self.started = []
        self.most_mib = 0.0
        self.ends = threading.Event()

    def __enter__(self):
        return self

    def start(self, name, command, environment=None, **more):
        with open(self.folder / f"{name}.log", "w") as log:
            process = subprocess.Popen(
                [str(word) for word in command], cwd=APPS, stdout=more.pop("stdout", log), stderr=log,
                env=self.environment | (environment or {}), start_new_session=True, text=True, **more)
        self.started.append(process)
        return process

    def output(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def watch(self, of_server):
        """From now on. of_server: whether a process, by its id and command line, is the server's."""
        def look():
            while not self.ends.wait(0.1):
                self.most_mib = max(self.most_mib, sum(
                    own_mib(process) for process in processes_below(self.started) if of_server(*process)))
        self.watching = threading.Thread(target=look)
        self.watching.start()

    def wait_for(self, what, done, alive=(), limit_s=LIMIT_S):
        """Until done(). Raises Failure after limit_s, or if one of `alive` has ended."""
        began = time.monotonic()
        while not done():
            ended = any(process.poll() is not None for process in alive)
            if ended or time.monotonic() - began > limit_s:
                why = "a process ended" if ended else f"not after {limit_s} s"
                raise Failure(f"{what}: {why}\n{self.tails()}")
            time.sleep(0.05)

    def join(self, processes):
        """Until all have ended. Raises Failure at the first that fails."""
        def are_done():
            codes = [process.poll() for process in processes]
            if any(codes):
                raise Failure(f"a process failed\n{self.tails()}")
            return None not in codes
        self.wait_for("the run's end", are_done)

    def tails(self):
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-1500:]}"
                         for log in sorted(self.folder.glob("*.log")))

    def __exit__(self, *_):
        self.ends.set()
        if hasattr(self, "watching"):
            self.watching.join()
        below = [process for process, _ in processes_below(self.started)]
        for process in below:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for process in self.started:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # also those whose parent has ended
            except ProcessLookupError:
                pass
            process.wait()


def processes_below(started):
    """(id, command line) of these processes and all below them."""
    children, words = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(entry.name))
    todo, found = [process.pid for process in started if process.poll() is None], []
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return [(process, words.get(process, "")) for process in found]


def own_mib(process):
    """Resident memory, with an equal part of what is shared."""
    try:
        for line in Path(f"/proc/{process[0]}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0
