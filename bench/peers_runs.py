"""One run of each side of bench/peers: starts it, reads its JSON, and insists that it was right."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN_LIMIT_S = 600
WARMUP = 3


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    model: tuple  # zerocompute's arguments
    elements: int
    workers: int
    rounds: int
    variants: tuple = ("",)  # of phub: names of VARIANTS, joined by "+"

    @property
    def bytes(self):
        return self.elements * 4


VARIANTS = {
    "sums": "--no-optimize",
    "results": "--copy=results",  # which go into memory of the workers' own
    "all": "--copy=all",  # gradients come from such memory, too
}


class Failure(Exception):
    pass


def run(command, env=None):
    """The standard output of a command that must succeed."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True,
                              timeout=RUN_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Failure(f"{' '.join(command)}: no end after {RUN_LIMIT_S} s") from None
    except FileNotFoundError:
        name = Path(command[0]).name
        raise Failure(f"{command[0]} is not there: make it with "
                      f"cmake --build --preset release --target {name}") from None
    if done.returncode != 0:
        raise Failure(f"{' '.join(command)}: exit status {done.returncode}\n"
                      f"{done.stderr}{done.stdout}")
    return done.stdout


def checked_us(who, case, row):
    """The median of a run, if it computed what it should have."""
    if row["wrong"] != 0:
        raise Failure(f"{who} computed {row['wrong']} wrong elements in case {case}")
    if row["bytes"] != case.bytes or row["workers"] != case.workers:
        raise Failure(f"{who} ran {row['workers']} workers with {row['bytes']} bytes in {case}")
    return row["p50_us"]


# --- Open MPI

def mca(**values):
    return [word for name, value in values.items() for word in ("--mca", name, str(value))]


def algorithm(number):
    return mca(coll_tuned_use_dynamic_rules=1, coll_tuned_allreduce_algorithm=number)


def either_wait(settings):
    """A process that waits can spin or yield its core: which is better depends on how many there are."""
    return settings | {f"{name}, yielding": flags + mca(mpi_yield_when_idle=1)
                       for name, flags in settings.items()}


CMA = mca(btl_vader_single_copy_mechanism="cma")
NO_CMA = mca(btl_vader_single_copy_mechanism="none")
# Over the loopback interface, which it leaves out unless told.
TCP = mca(btl_tcp_if_include="lo", oob_tcp_if_include="lo")
MPI_BTL = {"shm": "vader,self", "tcp": "tcp,self"}
MPI_SETTINGS = {
    "shm": either_wait({
        "default": [],
        "no CMA, Rabenseifner": NO_CMA + algorithm(6),
        "CMA, segmented ring": CMA + algorithm(5),
        "CMA, default": CMA,
        "CMA, ring": CMA + algorithm(4),
    }),
    "tcp": either_wait({
        "default": TCP,
        "ring": TCP + algorithm(4),
        "segmented ring": TCP + algorithm(5),
        "Rabenseifner": TCP + algorithm(6),
    }),
}


def run_mpi(host, case, transport, flags):
    command = [*host.prefix, "mpirun", "-np", str(case.workers), "--oversubscribe", "--bind-to",
               "none"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    command += mca(pml="ob1", btl=MPI_BTL[transport]) + flags
    command += [host.binary("peers_mpi"), str(case.elements), str(WARMUP), str(case.rounds)]
    return checked_us("Open MPI", case, json.loads(run(command).strip().splitlines()[-1]))


# --- gloo

GLOO_ALGORITHMS = ("ring", "ring_chunked", "halving_doubling", "bcube")
# One process per rank, told who it is by its environment.
LAUNCH = ('for ((RANK = 0; RANK < WORLD_SIZE; ++RANK)); do export RANK; "$@" & ranks+=($!); '
          'done; for rank in "${ranks[@]}"; do wait "$rank" || exit; done')


def run_ranks(host, case, command):
    """The JSON that rank 0 of these processes prints."""
    return json.loads(run([*host.prefix, "bash", "-c", LAUNCH, "launch", *command],
                          dict(os.environ, WORLD_SIZE=str(case.workers))))


def run_gloo(host, case, name):
    with tempfile.TemporaryDirectory() as store:
        row = run_ranks(host, case, [host.binary("peers_gloo"), store, "127.0.0.1", name,
                                     str(case.elements), str(WARMUP), str(case.rounds)])
    return checked_us("gloo", case, row)


# --- torch.distributed

PYTHONS = (sys.executable, "/usr/bin/python3")


def python_with_torch():
    """A Python that has torch.distributed with gloo, or None."""
    question = "from torch import distributed; distributed.ProcessGroupGloo"
    for python in PYTHONS:
        found = subprocess.run([python, "-c", question], capture_output=True, check=False)
        if found.returncode == 0:
            return python
    return None


def run_torch(host, case, python, name="torch.distributed", more=()):
    with tempfile.TemporaryDirectory() as store:
        row = run_ranks(host, case, [python, str(ROOT / "bench" / "peers_torch.py"), store, "lo",
                                     str(case.elements), str(WARMUP), str(case.rounds), *more])
    return checked_us(name, case, row)


# --- plain sockets, and phub

# The size of a write: a chunk, or as much as the socket takes.
SOCKET_SETTINGS = {"32 KiB writes": ("32768", "262144"), "large writes": ("1048576", "262144")}


def run_sockets(host, case, setting):
    threads = min(os.cpu_count() or 1, 16)
    output = run([*host.prefix, host.binary("sockets_floor"), str(case.bytes), str(case.workers),
                  str(threads), str(case.rounds), *SOCKET_SETTINGS[setting]])
    return checked_us("sockets_floor", case, json.loads(output))


def run_phub(host, case, transport, variant):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [*host.prefix, host.binary("zerocompute"), *case.model, "--workers",
                   str(case.workers), "--transport", transport, "-w", str(WARMUP), "-n",
                   str(case.rounds), "--no-limit", "--quiet", "--json", file.name]
        run(command + [VARIANTS[name] for name in variant.split("+") if name])
        return checked_us("phub", case, json.load(file)["rows"][0])


# --- where

CUBIC = ("ip link set lo up && ip route replace table local local 127.0.0.0/8 dev lo "
         'congctl cubic && exec "$@"')


class Host:
    """This machine's build, and what its commands run under."""

    def __init__(self, build, cubic):
        self.bin = build / "bin"
        # A network namespace of its own, whose loopback interface has another congestion control.
        self.prefix = ["unshare", "--net", "bash", "-c", CUBIC, "cubic"] if cubic else []

    def binary(self, name):
        return str(self.bin / name)
