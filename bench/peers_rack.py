"""The exchange between the hosts of an emulated rack (scripts/rack): phub where its parts may run, and its peers."""

import dataclasses
import json
import re
import shlex
import tempfile
from pathlib import Path

from peers_runs import GLOO_ALGORITHMS, ROOT, Failure, algorithm, checked_us, mca, run

WARMUP = 1
# What crosses a host's NICs beside gradients and parameters: the control port, and what was sent again.
COUNTED_TOLERANCE, COUNTED_SLACK_BYTES = 0.05, 1 << 20


def bits_per_s(rate):
    number, unit = re.fullmatch(r"([0-9.]+)([kmg]?)bit", rate).groups()
    return float(number) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[unit]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a parameter server's boxes are: phub/README.md, "Where the parts run"."""
    name: str
    boxes: int
    colocated: bool
    near: bool = False  # a worker and a box of one host exchange over memory

    def options(self, workers):
        return ["--boxes", str(self.boxes),
                *(["--colocated"] if self.colocated else ["--nics", str(self.nics(workers))])]

    def nics(self, workers):
        return 1 if self.colocated else max(1, workers // self.boxes)

    def bytes_of_server(self, workers, model):
        """In each direction over the NICs of a host that serves, in a round."""
        if not self.colocated:
            return workers * model / self.boxes
        if self.boxes == 1:
            return (workers - 1) * model
        return 2 * (workers - 1) / workers * model

    def bytes_of_link(self, workers, model):
        """Over the busiest link."""
        other = 0 if self.colocated and self.boxes > 1 else model
        return max(self.bytes_of_server(workers, model) / self.nics(workers), other)

    def bytes_of_uplink(self, workers, model, racks):
        """Over the busiest link between racks, each way. scripts/rack deals hosts out in their order."""
        rack_of_worker = [worker * racks // workers for worker in range(workers)]
        rack_of_box = (rack_of_worker[:self.boxes] if self.colocated else
                       [box * racks // self.boxes for box in range(self.boxes)])
        # Gradients of the rack's workers that go elsewhere, and results that its boxes send elsewhere.
        pairs = [(worker, box) for worker in rack_of_worker for box in rack_of_box if worker != box]
        return max(sum(rack in pair for pair in pairs) for rack in range(racks)) * model / self.boxes

    def floor_us(self, workers, model, network):
        return max(self.bytes_of_link(workers, model) * 8e6 / bits_per_s(network.rate),
                   self.bytes_of_uplink(workers, model, network.racks) * 8e6 / bits_per_s(network.uplink))

    def bytes_of_run(self, workers, model, rounds):
        """What (received, sent) each NIC or host that is counted; the first parameters have no gradients before them."""
        one = self.bytes_of_server(workers, model)
        ways = (rounds + 0.5, rounds + 0.5) if self.colocated and self.boxes > 1 else (rounds, rounds + 1)
        return {name: tuple(one * way for way in ways) for name in self.servers()}

    def servers(self):
        if self.colocated:
            return [f"worker{box}" for box in range(self.boxes)]
        return ["box"] + [f"box{box}" for box in range(1, self.boxes)]


class TwoLevels(Placement):
    """A box in every rack, which adds its workers' gradients. The first one's host has the root, too. A box has
    one NIC more than its rack has workers, for the others."""

    def nics(self, workers):
        return workers // self.boxes + 1

    def bytes_of_server(self, workers, model):
        return (workers // self.boxes + 1) * model

    def bytes_of_uplink(self, workers, model, racks):
        return (racks - 1) * model

    def bytes_of_run(self, workers, model, rounds):
        others = self.boxes - 1
        of_workers = [workers // self.boxes * model * way for way in (rounds, rounds + 1)]
        down, up = model * (rounds + 1), model * rounds
        root = (of_workers[0] + others * up, of_workers[1] + others * down)
        rack = (of_workers[0] + down, of_workers[1] + up)
        hosts = {name: rack for name in self.servers()} | {"box": root}
        uplinks = {f"switch{number}": (down, up) for number in range(self.boxes)}
        return hosts | uplinks | {"switch0": (others * up, others * down)}


PLACEMENTS = ("dedicated-central", "dedicated-sharded", "colocated-central", "colocated-sharded")
TWO_LEVELS = "two-levels"
NEAR = "+near"


def placements(names, workers, boxes, racks):
    number = {"dedicated-central": 1, "dedicated-sharded": boxes, "colocated-central": 1,
              "colocated-sharded": workers, TWO_LEVELS: racks}
    for name in names:
        if name.removesuffix(NEAR) not in number:
            raise Failure(f"--placements: '{name}' is not one of {', '.join(number)}")
        if name.endswith(NEAR) and not name.startswith("colocated"):
            raise Failure(f"--placements: '{name}': no worker has a box on its host there")
    if TWO_LEVELS in names and (racks < 2 or workers % racks):
        raise Failure(f"--placements: {TWO_LEVELS} needs --racks, with as many workers in each: "
                      f"{workers} workers in {racks} racks are not")
    return [(TwoLevels if name == TWO_LEVELS else Placement)(
        name, number[name.removesuffix(NEAR)], name.startswith("colocated"), name.endswith(NEAR)) for name in names]


@dataclasses.dataclass(frozen=True)
class Network:
    rate: str    # of a host's link, as tc says it
    racks: int
    uplink: str  # the rate between racks
    cubic: bool
    mtu: int = 1500  # of every link, in bytes

    def __str__(self):
        between = f", {self.uplink} between {self.racks} racks" if self.racks > 1 else ""
        return f"links of {self.rate}{between}, with an MTU of {self.mtu} bytes"

    def options(self):
        return ["--rate", self.rate, "--racks", str(self.racks), "--uplink", self.uplink, "--mtu", str(self.mtu),
                *(["--cubic"] if self.cubic else [])]

    def allreduce_floor_us(self, workers, model):
        """No all-reduce takes less, nor does ps-lite: of each link, and of what a rack alone has of the sum."""
        link_us = 2 * (workers - 1) / workers * model * 8e6 / bits_per_s(self.rate)
        return max(link_us, model * 8e6 / bits_per_s(self.uplink) if self.racks > 1 else 0)


class Rack:
    """What all sides run in."""

    def __init__(self, host, network):
        self.host, self.network = host, network

    def run(self, case, box_command, worker_command, *options):
        return run([str(ROOT / "scripts" / "rack"), "--workers", str(case.workers), *self.network.options(),
                    *options, "--", box_command, worker_command])


def rows_of(output):
    """The lines of JSON that rank 0 has printed."""
    lines = (line.removeprefix("worker 0| ") for line in output.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


# --- phub

SERVE = "--insecure --transports tcp --pin false"


def exchange(host, case, file, *options, transport="tcp"):
    return " ".join([host.binary("zerocompute"), "--one-rank", *case.model, "--transport", transport,
                     "-w", str(WARMUP), "-n", str(case.rounds), *options, "--quiet", "--json", file])


def with_boxes(phub, boxes, command):
    """What a rack's boxes run, and its workers, once all boxes serve."""
    box = (f"if ((BOX)); then exec {phub} serve --join $PHUB_SERVER --listen 0.0.0.0:0 {SERVE}; "
           f"else exec {phub} serve --listen 0.0.0.0:7717 {SERVE}; fi")
    # Jobs that are created when all boxes serve have a part at each.
    ready = (f"{phub} status --server $PHUB_SERVER 2>/dev/null | "
             f"awk '/^with it serves /{{n++}} END{{exit !(NR && n == {boxes - 1})}}'")
    return box, f"until {ready}; do sleep 0.1; done; {command}"


def phub_commands(host, case, placement, file):
    transport = "auto" if placement.near else "tcp"
    command = f"exec {exchange(host, case, file, transport=transport)}"
    return with_boxes(host.binary("phub"), placement.boxes, command)


def two_level_commands(host, case, placement, file):
    """The root has port 7717, and the box of each rack 7718."""
    phub = host.binary("phub")
    answers = f"{phub} status --server $PHUB_SERVER >/dev/null 2>&1"
    box = (f"((BOX)) || {phub} serve --listen 0.0.0.0:7717 {SERVE} & "
           f"until {answers}; do sleep 0.1; done; "
           f"exec {phub} serve --listen 0.0.0.0:7718 --parent $PHUB_SERVER {SERVE}")
    groups = ",".join([str(case.workers // placement.boxes)] * placement.boxes)
    return box, (f"export PHUB_SERVER=$RACK_BOXES:7718; until {answers}; do sleep 0.1; done; "
                 f"exec {exchange(host, case, file, '--groups', groups)}")


def counted(output, names):
    """Bytes of TCP payload (received, sent) over all NICs of each host, and over each rack's uplink."""
    totals = {name: [0, 0] for name in names}
    for name, received, sent in re.findall(r"^(\w+) (?:eth|up)\d+ payload received (\d+) sent (\d+) bytes$",
                                           output, re.MULTILINE):
        if name in totals:
            totals[name][0] += int(received)
            totals[name][1] += int(sent)
    return totals


def check_counted(case, placement, totals):
    """What has crossed the NICs, as parts of what the table says; the one furthest from it."""
    expected = placement.bytes_of_run(case.workers, case.bytes, WARMUP + case.rounds)
    ratios = []
    for name, ways in totals.items():
        for way, is_bytes, should in zip(("received", "sent"), ways, expected[name]):
            if abs(is_bytes - should) > COUNTED_TOLERANCE * should + COUNTED_SLACK_BYTES:
                raise Failure(f"{placement.name}, {case.name}: {name} {way} {is_bytes} bytes of payload, "
                              f"and {should:.0f} were to come")
            ratios.append(is_bytes / should)
    return max(ratios, key=lambda ratio: abs(ratio - 1))


@dataclasses.dataclass(frozen=True)
class Timed:
    """What a run measured."""
    us: float
    busy: float | None  # this machine's processors, which all hosts share, while it was timed: 0 to 1


def timed(who, case, row):
    return Timed(checked_us(who, case, row), row.get("machine_busy"))


def run_phub(rack, case, placement):
    """(Timed, counted bytes in terms of the expected ones)"""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        of = two_level_commands if placement.name == TWO_LEVELS else phub_commands
        commands = of(rack.host, case, placement, file.name)
        # Rank 0 alone writes the file.
        output = rack.run(case, *commands, *placement.options(case.workers), "--counters")
        measured = timed("phub", case, json.load(file)["rows"][0])
    names = placement.bytes_of_run(case.workers, case.bytes, 0).keys()
    return measured, check_counted(case, placement, counted(output, names))


# --- peers, on the workers' hosts alone. Each returns Timed by setting.

ALONE = ("--nics", "1")


def run_gloo(rack, case):
    with tempfile.TemporaryDirectory() as store:
        output = rack.run(case, "", " ".join(
            [rack.host.binary("peers_gloo"), store, "$RACK_ADDRESS", ",".join(GLOO_ALGORITHMS),
             str(case.elements), str(WARMUP), str(case.rounds)]), *ALONE)
    rows = rows_of(output)
    if len(rows) != len(GLOO_ALGORITHMS):
        raise Failure(f"gloo in the rack reported {len(rows)} algorithms:\n{output}")
    return {f"gloo, {row['algorithm']}": timed("gloo", case, row) for row in rows}


MPI_SETTINGS = {
    "default": [],
    "ring": algorithm(4),
    "segmented ring": algorithm(5),
    "Rabenseifner": algorithm(6),
    "han": mca(coll_han_priority=100),
}
# What Open MPI uses as its ssh: the name of a host, and a command for it.
AGENT = """#!/bin/bash
host=$1
shift
exec ip netns exec "$host" unshare --uts --ipc bash -c \
  'printf %s "$0" >/proc/sys/kernel/hostname && mount -t tmpfs shm /dev/shm && exec bash -c "$1"' "$host" "$*"
"""


def run_mpi(rack, case, settings):
    hosts = ",".join(f"worker{rank}:1" for rank in range(case.workers))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "agent"
        agent.write_text(AGENT)
        agent.chmod(0o755)
        nic = "10.77.0.0/24"
        fixed = mca(plm_rsh_agent=agent, plm_rsh_no_tree_spawn=1, pml="ob1", btl="tcp,self",
                    btl_tcp_if_include=nic, oob_tcp_if_include=nic, mpi_yield_when_idle=1)
        for name in settings:
            command = ["mpirun", "--allow-run-as-root", "-np", str(case.workers), "--host", hosts, "--bind-to",
                       "none", *fixed, *MPI_SETTINGS[name], rack.host.binary("peers_mpi"),
                       str(case.elements), str(WARMUP), str(case.rounds)]
            rows = rows_of(rack.run(case, "", f"((RANK)) || exec {shlex.join(command)}", *ALONE))
            if len(rows) != 1:
                raise Failure(f"Open MPI in the rack reported {len(rows)} rows")
            found[f"Open MPI, {name}"] = timed("Open MPI", case, rows[0])
    return found


def run_ps_lite(rack, case):
    """A server beside every worker."""
    with tempfile.TemporaryDirectory() as store:
        program = " ".join([rack.host.binary("peers_ps_lite"), store, str(case.elements), str(WARMUP),
                            str(case.rounds)])
        command = (f"export DMLC_NUM_WORKER={case.workers} DMLC_NUM_SERVER={case.workers} "
                   "DMLC_PS_ROOT_URI=10.77.0.2 DMLC_PS_ROOT_PORT=7720 DMLC_NODE_HOST=$RACK_ADDRESS\n"
                   f"((RANK)) || DMLC_ROLE=scheduler {program} &\n"
                   f"DMLC_ROLE=server {program} &\n"
                   f"DMLC_ROLE=worker {program} && wait")
        # Whichever worker ps-lite calls the first prints.
        output = re.sub(r"^worker \d+\| ", "worker 0| ", rack.run(case, "", command, *ALONE), flags=re.M)
    rows = rows_of(output)
    if len(rows) != 1:
        raise Failure(f"ps-lite in the rack reported {len(rows)} rows:\n{output}")
    return {"ps-lite, colocated-sharded": timed("ps-lite", case, rows[0])}


def peer_runs(available, rack, case):
    """By kind of peer, what measures all its settings, or the named ones only."""
    runs = {}
    if "peers_gloo" in available:
        runs["gloo"] = lambda kept: run_gloo(rack, case)
    if "peers_mpi" in available:
        runs["Open MPI"] = lambda kept: run_mpi(
            rack, case, [name.removeprefix("Open MPI, ") for name in kept] if kept else MPI_SETTINGS)
    if "peers_ps_lite" in available:
        runs["ps-lite"] = lambda kept: run_ps_lite(rack, case)
    return runs
