"""A box for the tests, and ranks that are forked from the process of the tests."""

import functools
import inspect
import json
import multiprocessing
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from pathlib import Path

import pytest

# PyTorch without fused multiply-adds, whose bits the box has; before anything imports it.
os.environ["ATEN_CPU_CAPABILITY"] = "default"
# Whether there is a GPU is asked without CUDA, which would not live through the forks.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch._dynamo  # an optimizer's first step imports it, for a second, in each rank
from exact import assert_same_bits

import phub
from phub import _library

torch.set_num_threads(1)  # ranks are forked, and OpenMP's threads are not
PACKAGE = Path(__file__).resolve().parents[1]
SEED = int(os.environ.get("PHUB_SEED", secrets.randbelow(1 << 30)))
EVERY = 5  # steps of a SavingBox between checkpoints
LIMIT_S = 120  # of a whole test's ranks, on a loaded machine
LAUNCHERS = ("PHUB_", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_", "OMPI_", "TORCHELASTIC_")


class Box:
    """A server of its own process."""

    def __init__(self, *arguments, listen="127.0.0.1:0"):
        command = [_library.find_program(), "serve", "--listen", listen, "--pin", "false"]
        command.extend(arguments)
        end = time.monotonic() + LIMIT_S
        while not self._starts(command):
            self.process.wait()
            # Where another one listened, the port may be somebody else's for a moment.
            assert not listen.endswith(":0"), "the box does not start"
            assert time.monotonic() < end, f"the box does not start within {LIMIT_S} s"
            time.sleep(0.05)

    def _starts(self, command):
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        said = (line for line in self.process.stdout if line.startswith("listening on"))
        self.address = next(said, "").rpartition(" ")[2].strip()
        return self.address != ""

    def status(self, job):
        """What the box says of a job; {}: it has none of this name."""
        with urllib.request.urlopen(f"http://{self.address}/v1/status", timeout=LIMIT_S) as answer:
            jobs = json.load(answer)["jobs"]
        return next((each for each in jobs if each["name"] == job), {})

    def log(self, job):
        """The records of a job's log, of one that has ended, too."""
        records, more = [], True
        while more:
            address = f"http://{self.address}/v1/jobs/{job}/log?from={len(records)}"
            with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
                page = json.load(answer)
            records += page["records"]
            more = page.get("more", False)
        return records

    def shards(self):
        """How many boxes serve under it."""
        with urllib.request.urlopen(f"http://{self.address}/v1/status", timeout=LIMIT_S) as answer:
            return len(json.load(answer).get("shards", ()))

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


class SavingBox(Box):
    """One that keeps checkpoints, and comes back from them."""

    def __init__(self, folder, every, **more):
        self.folder, self.every = folder, every
        super().__init__("--checkpoints", str(folder), "--checkpoint-every", str(every), **more)

    def die_and_come_back(self):
        self.kill()
        SavingBox.__init__(self, self.folder, self.every, listen=self.address)


class Ranks:
    """A process per rank, each forked, which calls body(rank, *arguments)."""

    def __init__(self, body, world, *arguments, **environment):
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        self._make = context, body, world, arguments, environment
        for rank in range(world):
            self._start(rank)

    def _start(self, rank):
        context, body, world, arguments, environment = self._make
        here, there = context.Pipe(duplex=False)
        given = {"PHUB_RANK": str(rank), "PHUB_WORLD_SIZE": str(world), **environment}
        process = context.Process(target=_rank, args=(there, body, rank, arguments, given))
        process.start()
        there.close()
        self.pipes[rank:] = [here, *self.pipes[rank + 1 :]]
        self.processes[rank:] = [process, *self.processes[rank + 1 :]]

    def replace(self, rank):
        """Another process takes the place of one that was killed."""
        self.processes[rank].join()
        self._start(rank)

    def kill(self, rank, number=signal.SIGKILL):
        os.kill(self.processes[rank].pid, number)

    def result(self, rank):
        """What the rank's body returned; raises what it raised."""
        if not self.pipes[rank].poll(LIMIT_S):
            pytest.fail(f"rank {rank} has not ended within {LIMIT_S} s")
        try:
            value, error, trace = pickle.loads(self.pipes[rank].recv_bytes())
        except EOFError:
            pytest.fail(f"rank {rank} died without an answer")
        if error is not None:
            print(f"rank {rank}:\n{trace}")
            raise error
        return value

    def results(self):
        return [self.result(rank) for rank in range(len(self.processes))]

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()


def _rank(pipe, body, rank, arguments, environment):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    os.environ.update(environment)
    answer = None, None, ""
    try:
        answer = body(rank, *arguments), None, ""
    except BaseException as error:
        answer = None, error, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()


def of_ranks(world):
    """Makes a test of what each of the ranks does, a process. What they return must be the same."""

    def decorate(body):
        @functools.wraps(body)
        def test(box, start, **given):
            results = start(body, world, *given.values()).results()
            for each in results[1:]:
                assert_same_bits(each, results[0])

        _, *others = inspect.signature(body).parameters.values()
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        fixtures = [inspect.Parameter(name, kind) for name in ("box", "start")]
        test.__signature__ = inspect.Signature([*fixtures, *others])
        return test

    return decorate


@pytest.fixture(autouse=True)
def _seed():
    print(f"PHUB_SEED={SEED}")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(LAUNCHERS) and name not in ("PHUB_LIBRARY", "PHUB_PROGRAM"):
            monkeypatch.delenv(name)


@pytest.fixture
def own_box():
    """A box that the test may kill."""
    with Box() as box:
        yield box


@pytest.fixture
def memory_path():
    """A folder where no other program's writes hold up a sync."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def saving_box(memory_path, monkeypatch):
    """A box that keeps checkpoints, and that the test may kill."""
    with SavingBox(memory_path / "checkpoints", EVERY) as box:
        monkeypatch.setenv("PHUB_SERVER", box.address)
        yield box


@pytest.fixture(scope="session")
def _shared_box():
    with Box() as box:
        yield box


@pytest.fixture
def box(_shared_box, monkeypatch, request):
    """The box of all tests; the test's jobs have its name."""
    monkeypatch.setenv("PHUB_SERVER", _shared_box.address)
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    monkeypatch.setenv("PHUB_JOB", name)
    return _shared_box


@pytest.fixture
def start():
    """start(body, world, *arguments, **environment): Ranks that end with the test."""
    started = []

    def ranks(body, world, *arguments, **environment):
        started.append(Ranks(body, world, *arguments, **environment))
        return started[-1]

    yield ranks
    for each in started:
        each.end()


def wait_until(condition, what, limit_s=LIMIT_S):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s} s: {what}"
        time.sleep(0.02)


def refused(message, call, *arguments, error=phub.InvalidError, **options):
    """The call raises an error whose message this pattern finds."""
    with pytest.raises(error, match=message):
        call(*arguments, **options)


def pushed(worker, key, value=None):
    """What comes back of a gradient, which is as it was unless a value is given."""
    if value is not None:
        np.asarray(worker.gradient(key))[:] = value
    worker.push(key)
    worker.wait(key)
    return np.array(worker.parameters(key))


def leave(state):
    """When all ranks have come so far."""
    state.worker.barrier()
    state.close()


def python(*arguments, **environment):
    """What starts a process of Python with phub, whose output is text."""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    given["env"] = {**os.environ, "PYTHONPATH": str(PACKAGE), **environment}
    return {"args": [sys.executable, *arguments], **given}


def ran(*arguments, cwd=None, **environment):
    """A process of Python that has ended."""
    given = python(*arguments, **environment)
    return subprocess.run(**given, cwd=cwd, timeout=170, check=False)
