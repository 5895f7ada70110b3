"""In the worker's machine: whole jobs over four wires. exchange.py FOLDER CASE…

FOLDER has the digits that were trained over shared memory: `digits`.
"""

import filecmp
import functools
import json
import os
import subprocess
import sys
import threading
import time

from machines import (BIN, NICS, SERVER, TESTS, Failure, completed_round, end, expect, figure, get,
                      job, on_box, refused_packets, request, run_cases, until, wait_for_server, wire_bytes)

ROUNDS = 300  # of the digits, as in run
MIB = 1 << 20
PACKET = 4096 + 58  # bytes on the wire


def train_digits(port, check):
    """The training ends with the parameters of shared memory; check(status) sees it while it goes on."""
    folder = sys.argv[1]
    begin = time.monotonic()
    workers = [
        subprocess.Popen([f"{BIN}/digits", "--server", f"10.77.0.1:{port}", "--job", "digits", "--world", "4",
                          "--rounds", str(ROUNDS), "--rank", str(rank), "--out", f"/tmp/digits{rank}"],
                         env=os.environ | {"PHUB_TRANSPORT": "verbs"})
        for rank in range(4)
    ]
    try:
        check(until(lambda: (s := job("digits", port)) and s.get("completed_round", 0) > 1 and s, 60,
                    "the job goes on"))
    finally:
        end(workers, 150)
    for rank, worker in enumerate(workers):
        expect(worker.returncode == 0, f"rank {rank} ended with status {worker.returncode}")
        expect(filecmp.cmp(f"/tmp/digits{rank}", f"{folder}/digits", shallow=False),
               f"rank {rank} has other parameters than over shared memory")
    return time.monotonic() - begin


def digits():
    def check(status):
        expect(status["transport"] == "verbs", f"the job goes over {status['transport']}")

    seconds = train_digits(7717, check)
    figure(f"digits: 4 ranks x {ROUNDS} rounds in {seconds:.0f} s, "
           f"all parameters equal those over shared memory")


def shards():
    """A box under a server, each with a NIC of both nodes."""
    port, boxes = 7727, {0: ("rxe0", "rxe2"), 1: ("rxe1", "rxe3")}
    started = []
    for box, nics in boxes.items():
        role = "--join 10.77.0.1:7727 --listen 10.77.0.1:0" if box else "--listen '*:7727'"
        started.append(on_box(f"{BIN}/phub serve {role} --insecure --transports verbs --devices {','.join(nics)} "
                              f"--cores 2 --pin false >/tmp/serve{box} 2>&1 & echo $!").strip())
        if box == 0:
            wait_for_server(port)
    try:
        until(lambda: get("/v1/status", port).get("shards"), 30, "a box serves under the server")
        before = wire_bytes()

        def check(status):
            queues = [(core.get("box", 0), queue["nic"]) for core in status["cores"] for queue in core["queues"]]
            expect(sorted(set(queues)) == [(box, nic) for box, nics in boxes.items() for nic in nics],
                   f"queues of every NIC of both boxes: {queues}")

        seconds = train_digits(port, check)
        wires = [after[0] - b[0] for after, b in zip(wire_bytes(), before)]
        expect(max(wires) < 2 * min(wires), f"bytes to the boxes, on each wire: {wires}")
        figure(f"shards: 4 ranks x {ROUNDS} rounds in {seconds:.0f} s at two boxes of two NICs, "
               f"all parameters equal those over shared memory; bytes to the boxes on each wire: {wires}")
    except Exception:
        print(on_box("cat /tmp/serve[01]"), flush=True)
        raise
    finally:
        on_box(f"kill {' '.join(reversed(started))}")


def ofi():
    """libfabric over the same devices, with every result checked."""
    port, ranks, rounds = 7737, 2, 20
    listen = " ".join(f"--listen 10.77.{nic}.1:{port}" for nic in NICS)
    server = on_box(f"{BIN}/phub serve {listen} --insecure --transports ofi --ofi-provider 'verbs;ofi_rxm' "
                    f"--pin false >/tmp/serve_ofi 2>&1 & echo $!").strip()
    try:
        wait_for_server(port)
        before, begin = wire_bytes(), time.monotonic()
        workers = [
            subprocess.Popen([f"{BIN}/zerocompute", "--one-rank", "--server", f"10.77.0.1:{port}", "--transport",
                              "ofi", "-b", "4M", "-n", str(rounds), "--no-limit", "--quiet", "--json", f"/tmp/ofi{rank}"],
                             env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "PHUB_JOB": "ofi"})
            for rank in range(ranks)
        ]
        end(workers, 150)
        for worker in workers:
            expect(worker.returncode == 0, f"zerocompute ended with status {worker.returncode}")
        with open("/tmp/ofi0") as file:
            for row in json.load(file)["rows"]:
                expect(row["wrong"] == 0 and row["checked"] > 0, f"over libfabric: {row}")
        wires = [after[0] - b[0] for after, b in zip(wire_bytes(), before)]
        expect(min(wires) > rounds * ranks * 4 * MIB / len(NICS), f"bytes to the box, on each wire: {wires}")
        figure(f"ofi: {ranks} ranks x {rounds} rounds of 4 MiB in {time.monotonic() - begin:.0f} s over "
               f"verbs;ofi_rxm, no wrong result; bytes to the box on each wire: {wires}")
    except Exception:
        print(on_box("cat /tmp/serve_ofi"), flush=True)
        raise
    finally:
        on_box(f"kill {server}; timeout 60 tail --pid={server} -f /dev/null")


class Load:
    """Two jobs of two ranks, 4 MiB a round, with every result checked; and what the box said of
    them meanwhile."""

    JOBS, RANKS, BYTES, WARMUP, ROUNDS = ("left", "right"), 2, 4 * MIB, 3, 30

    def __init__(self):
        self.statuses = {name: [] for name in self.JOBS}
        self.refused_before = refused_packets()
        self.before = wire_bytes()
        self.workers = []
        for name in self.JOBS:
            for rank in range(self.RANKS):
                command = [f"{BIN}/zerocompute", "--one-rank", "--server", SERVER, "--transport",
                           "verbs", "-b", "4M", "-n", str(self.ROUNDS), "-w", str(self.WARMUP),
                           "--no-limit", "--quiet"]
                if rank == 0:
                    command += ["--json", f"/tmp/{name}.json"]
                environment = {"RANK": str(rank), "WORLD_SIZE": str(self.RANKS), "PHUB_JOB": name}
                self.workers.append(subprocess.Popen(command, env=os.environ | environment,
                                                     stdout=subprocess.DEVNULL))
        self.watcher = threading.Thread(target=self.watch)
        self.watcher.start()

    def watch(self):
        while any(worker.poll() is None for worker in self.workers):
            for name in self.JOBS:
                status = job(f"{name}-0")
                if status and status.get("completed_round", 0) > 0:
                    self.statuses[name].append(status)
            time.sleep(0.2)

    def finish(self):
        end(self.workers, 120)
        self.watcher.join()
        self.after = wire_bytes()
        self.refused_after = refused_packets()
        for worker in self.workers:
            expect(worker.returncode == 0, f"zerocompute ended with status {worker.returncode}")


def check_results(load):
    for name in load.JOBS:
        with open(f"/tmp/{name}.json") as file:
            rows = json.load(file)["rows"]
        for row in rows:
            expect(row["wrong"] == 0 and row["checked"] > 0, f"job {name}: {row}")


def check_wires(load):
    payload = len(load.JOBS) * load.RANKS * load.BYTES
    rounds = load.WARMUP + load.ROUNDS
    # What comes back begins with the parameters before the first round.
    for way, name, sent in ((0, "to the box", payload * rounds), (1, "back", payload * (rounds + 1))):
        wires = [load.after[nic][way] - load.before[nic][way] for nic in NICS]
        again = [load.refused_after[nic][way] - load.refused_before[nic][way] for nic in NICS]
        once = [wire - PACKET * repeated for wire, repeated in zip(wires, again)]
        figure(f"wires, {name}: {' '.join(map(str, wires))} bytes, {sum(wires) / sent:.4f} per byte "
               f"of payload; without the packets sent again ({' '.join(map(str, again))}) "
               f"{sum(once) / sent:.4f}")
        # The first also carries the control port.
        expect(max(once[1:]) <= 1.02 * min(once[1:]) and
               0.98 * min(once[1:]) <= once[0] <= 1.04 * min(once[1:]),
               f"the wires {name} differ by more than 2%: {once}")
        expect(1 <= sum(once) / sent <= 1.03, f"{sum(once)} bytes on the wires {name}, {sent} sent")


def check_requests(load):
    for name in load.JOBS:
        statuses = load.statuses[name]
        expect(len(statuses) > 1, f"job {name} was seen {len(statuses)} times")
        first, last = statuses[0], statuses[-1]
        spent = {k: last["counters"].get(k, 0) - first["counters"].get(k, 0) for k in last["counters"]}
        chunks = (last["chunks_completed"] - first["chunks_completed"]) * load.RANKS
        expect(chunks > 0, f"job {name} did not go on while it was looked at")
        both_ways = 2 * chunks
        doorbells, polls = spent["doorbells"] / both_ways, spent["polls"] / both_ways
        figure(f"job {name}: {chunks} chunks each way, {spent}; per chunk and direction "
               f"{doorbells:.3f} doorbells, {polls:.3f} polls that found something")
        expect(doorbells <= 1 / 8 and polls <= 1 / 8, f"job {name}: more than 1/8")


def check_calls(load):
    calls = load.calls
    sleeps = calls.get("epoll_wait", 0) + calls.get("restart_syscall", 0)
    waiting = sum(calls.get(kind, 0) for kind in ("notify", "uverbs ioctl", "completion event"))
    ours = {k: n for k, n in calls.items()
            if k not in ("doorbell", "notify", "uverbs ioctl", "completion event", "epoll_wait", "restart_syscall",
                         "wake-up")}
    # A core is told to watch a job when that begins, and not to when it ends: not once a chunk.
    if ours.get("epoll_ctl", 0) <= 2 * len(load.JOBS) * 4:
        ours.pop("epoll_ctl", None)
    expect(calls.get("doorbell", 0) > 0, f"strace saw no doorbell: {calls}")
    expect(not ours, f"the cores' threads made calls of their own: {ours}")
    figure(f"system calls of the cores' threads: {dict(calls)}; {waiting / max(1, sleeps):.1f} "
           f"per sleep to be woken")
    after = sum(s[-1]["counters"]["doorbells"] for s in load.statuses.values())
    expect(calls.get("doorbell", 0) <= after - load.doorbells,
           f"{calls.get('doorbell', 0)} calls for {after - load.doorbells} doorbells")


def check_at_rest():
    """One request each way per chunk, counted where every chunk that was begun is done."""
    spec = {"name": "rest", "keys": [{"name": "a", "elements": 1}, {"name": "b", "elements": 8192},
                                     {"name": "c", "elements": 500000}, {"name": "d", "elements": 300000}],
            "world_size": 2, "optimizer": "none", "lease_ms": 10000}
    chunks, hang_in = 1 + 1 + 62 + 37, 6
    workers = [
        subprocess.Popen([f"{TESTS}/fault_worker", "--server", SERVER, "--job", json.dumps(spec),
                          "--rank", str(rank), "--notes", f"/tmp/rest{rank}", "--hang-in", str(hang_in)])
        for rank in range(2)
    ]
    try:
        # In its last round the keys c and d are pushed, a and b are not.
        done = (hang_in - 1) * chunks + 62 + 37
        status = until(lambda: (s := job("rest")) and s.get("chunks_completed") == done and s, 40,
                       f"{done} chunks are done: {job('rest')}")
        counters = status["counters"]
        expect(counters["receives"] == 2 * done, f"{done} chunks of 2 ranks: {counters}")
        expect(counters["sends"] == 2 * (done + chunks),
               f"{done} chunks for 2 ranks, and {chunks} before the first round: {counters}")
        figure(f"at rest after {done} chunks of 2 ranks: {counters['receives']} receives; "
               f"{counters['sends']} sends, {2 * chunks} of them before the first round")
    finally:
        for worker in workers:
            worker.kill()


@functools.cache
def loaded():
    """The load, over, with what was seen of the box in the middle of it."""
    load = Load()
    try:
        until(lambda: all(completed_round(f"{name}-0") > 1 for name in load.JOBS), 60,
              "both jobs run")
        load.doorbells = sum(job(f"{name}-0")["counters"]["doorbells"] for name in load.JOBS)
        load.calls = probe("calls 3")
        load.mappings = probe("memory")
        load.cores = probe("cores")
    finally:
        load.finish()
    return load


def probe(arguments):
    return json.loads(on_box(f"$PYTHON tests/rdma/box_probe.py {arguments}"))


def check_some_wires(load):
    """Under a load in which hardly anything was sent again. After a gap the sender begins again at
    it, and the receiver counts the gap, not what came again. Where nothing was sent again there is
    no excuse."""
    for _ in range(2):
        try:
            return check_wires(load)
        except Failure as failure:
            if load.refused_after == load.refused_before:
                raise
            print(f"{failure}: measured again", flush=True)
        load = Load()
        load.finish()
        check_results(load)
    return check_wires(load)


def zerocompute():
    load = loaded()
    check_results(load)
    check_some_wires(load)
    check_requests(load)
    check_calls(load)
    check_at_rest()


def check_chunks():
    """Every page of every chunk's slot is on the node of the NIC that brings it and of the CPU that
    sums it; the nodes are the kernel's, the addresses those that a rank is told to write to."""
    chunk, key_sizes = 8192, [1, 8192, 8193, 500000, 300001, 77777, 5] + [4000] * 20
    spec = {"name": "places", "world_size": 1, "max_ranks": 1, "optimizer": "none", "lease_ms": 30000,
            "chunk_elements": chunk,
            "keys": [{"name": f"key{i}", "elements": n} for i, n in enumerate(key_sizes)]}
    joined = request("POST", "/v1/jobs/places/join", {"version": 1, "spec": spec, "transport": "verbs"})
    sizes = [min(chunk, n - begin) for n in key_sizes for begin in range(0, n, chunk)]
    ranges, queue_of = [], []
    for queue, offer in enumerate(joined["offer"]["queues"]):
        begin = joined["layout"]["queue_offset"][queue]
        for index in joined["layout"]["queue_chunks"][queue]:
            first = offer["base"] + 4 * begin
            ranges.append([first, first + 4 * sizes[index] - 1])
            queue_of.append(queue)
            begin += (sizes[index] + 31) // 32 * 32
    expect(len(ranges) == len(sizes), f"{len(ranges)} chunks have a queue, there are {len(sizes)}")
    found = probe(f"pages '{json.dumps(ranges)}'")
    nic_nodes, cpu_nodes = probe("nics"), {}
    for node, cpus in probe("cores")["nodes"].items():
        first, _, last = cpus.partition("-")
        cpu_nodes |= {cpu: int(node[4:]) for cpu in range(int(first), int(last or first) + 1)}
    cpus = {core["core"]: core["cpu"] for node in get("/v1/status")["nodes"] for core in node["cores"]}
    places = {}  # of each queue: the node of its CPU, and of its NIC
    for core in job("places")["cores"]:
        for queue in core["queues"]:
            places[queue["queue"]] = (cpu_nodes[cpus[core["core"]]], nic_nodes[queue["nic"]])
            address = joined["offer"]["queues"][queue["queue"]]["address"]
            expect(address.startswith(f"10.77.{queue['nic'][3:]}.1:"), f"{queue} is connected to {address}")
    for queue, nodes in zip(queue_of, found):
        cpu, nic = places[queue]
        expect(nodes == [cpu] == [nic], f"a chunk of queue {queue} lies on {nodes}; its CPU is on {cpu}, its NIC on {nic}")
    expect(sorted(set(places.values())) == [(0, 0), (1, 1)], f"both nodes are used: {places}")
    request("DELETE", "/v1/jobs/places")
    figure(f"{len(ranges)} chunks, each on the node of its CPU and its NIC: "
           f"{found.count([0])} on node 0, {found.count([1])} on node 1")


def numa():
    check_chunks()
    load = loaded()
    on_node = {"0": 0, "1": 0}
    for mapping in load.mappings:
        for node, size in mapping["bytes"].items():
            expect(node == mapping["node"], f"{size} bytes on node {node} in a mapping of node {mapping}")
            on_node[node] += size
    # Slots, parameters and the optimizer's state.
    least = len(load.JOBS) * (load.RANKS + 2) * load.BYTES
    total = sum(on_node.values())
    expect(total >= least, f"{total} bytes are placed, the jobs have {least}")
    expect(max(on_node.values()) <= 1.05 * min(on_node.values()), f"unequal nodes: {on_node}")
    allowed, nodes = load.cores["allowed"], load.cores["nodes"]
    expect(sorted(allowed.values()) == ["0", "1", "2", "3"] and len(allowed) == 4,
           f"the cores' threads may run on {allowed}")
    expect(nodes == {"node0": "0-1", "node1": "2-3"}, f"nodes {nodes}")
    figure(f"{len(load.mappings)} mappings, {on_node['0'] / MIB:.1f} MiB on node 0 and "
           f"{on_node['1'] / MIB:.1f} MiB on node 1, none elsewhere; {allowed}")


run_cases({"digits": digits, "shards": shards, "ofi": ofi, "zerocompute": zerocompute, "numa": numa}, sys.argv[2:])
