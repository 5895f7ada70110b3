"""What bench/believe predicts and measures: each case as a cluster for rack_model, and as a run of the
product that says how long a round took."""

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from peers_runs import ROOT, Failure, run

WARMUP = 2
RACK_WARMUP = 1


def host(kind, role, count, nics, link_gbps, **rates):
    lines = [f'kind = "{kind}"', f'role = "{role}"', f"count = {count}",
             f'topology = "pack:1 core:{os.cpu_count()} pu:1"', f"nics = {nics}",
             f"link_gbps = {link_gbps}", *(f"{name} = {value:.6g}" for name, value in rates.items())]
    return "[[host]]\n" + "\n".join(lines) + "\n\n"


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    costs: str  # shm, loopback or rack
    model: tuple
    cluster: Callable  # calibration -> TOML
    prediction: tuple  # more arguments of rack_model
    measure: Callable  # Machine -> seconds

    @property
    def file(self):
        return re.sub("[^0-9A-Za-z]+", "-", self.name)


def checked(row):
    if row["wrong"] != 0:
        raise Failure(f"{row['wrong']} elements were wrong")
    return row["p50_us"] * 1e-6


# --- on this host

def on_this_host(machine, model, workers, transport, rounds):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run([machine.path("zerocompute"), "--model", *model, "--workers", str(workers), "--transport",
             transport, "-w", str(WARMUP), "-n", str(rounds), "--no-limit", "--quiet", "--json",
             file.name])
        return checked(json.load(file)["rows"][0])


def shm(workers):
    return Case(f"shm, {workers} workers", "shm", ("resnet50",),
                lambda found: host("machine", "worker", 1, 1, 1, memory_gbps=found["memory_gb_s"],
                                   core_gbps=found["core_gb_s"]),
                ("--shm", "--ranks", str(workers)),
                lambda machine: on_this_host(machine, ("resnet50",), workers, "shm", 12))


def loopback(workers):
    def cluster(found):  # no wire limits, the memory is in the cost of a byte
        return (host("worker", "worker", workers, 1, 10000, core_gbps=found["core_gb_s"]) +
                host("box", "box", 1, 1, 10000, core_gbps=found["core_gb_s"]))
    return Case(f"tcp over loopback, {workers} workers", "loopback", ("resnet50",), cluster,
                ("--placement", "dedicated-central"),
                lambda machine: on_this_host(machine, ("resnet50",), workers, "tcp", 8))


# --- in an emulated rack

# A host of the rack: the first $BOXES serve (the first of all is the server, the others its shards), and
# all but the first $APART train. They meet through files in $MEET.
HOST = r"""
set -u
address() { printf 10.77.0.%d $(($1 + 2)); }
box=''
serve() { "$PHUB" serve --insecure --transports tcp "$@" >"$MEET/box$RANK" 2>&1 & box=$!; }
if ((RANK == 0)); then serve --listen "$RACK_ADDRESS:7717"
elif ((RANK < BOXES)); then serve --join "$(address 0):7717" --listen "$RACK_ADDRESS:7717"; fi
if ((RANK < BOXES)); then
  for ((i = 0; i < 300; ++i)); do
    curl -sf "http://$RACK_ADDRESS:7717/readyz" >/dev/null && touch "$MEET/ready$RANK" && break
    sleep 0.1
  done
fi
count() { local files=("$MEET"/$1*); [[ -e ${files[0]} ]] && echo ${#files[@]} || echo 0; }
status=0
if ((RANK >= APART)); then
  for ((i = 0; i < 400 && $(count ready) < BOXES; ++i)); do sleep 0.1; done
  PHUB_SERVER=$(address 0):7717 RANK=$((RANK - APART)) WORLD_SIZE=$((WORLD_SIZE - APART)) \
    "$ZEROCOMPUTE" "$@" || status=$?
  touch "$MEET/done$RANK"
fi
if [[ -n $box ]]; then
  while kill -0 "$box" 2>/dev/null && (($(count done) < WORLD_SIZE - APART)); do sleep 0.1; done
  kill "$box" 2>/dev/null
  wait "$box"
fi
exit "$status"
"""


def in_rack(machine, model, hosts, boxes, apart, rate, rounds):
    """`boxes` of the hosts serve, all but the first `apart` train."""
    with tempfile.TemporaryDirectory() as meet:
        script, rows = Path(meet) / "host", Path(meet) / "rows.json"
        script.write_text(HOST)
        command = (f"BOXES={boxes} APART={apart} MEET={meet} PHUB={machine.path('phub')} "
                   f"ZEROCOMPUTE={machine.path('zerocompute')} bash {script} --one-rank --model "
                   f"{model} --transport tcp -w {RACK_WARMUP} -n {rounds} --quiet --json {rows}")
        run([str(ROOT / "scripts/rack"), "--workers", str(hosts), "--nics", "1", "--rate", rate, "--",
             "", command])
        return checked(json.loads(rows.read_text())["rows"][0])


def in_rack_with_nics(machine, model, workers, nics, rate, rounds):
    """The box of scripts/rack, with a NIC in each of its subnets."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run([str(ROOT / "scripts/rack"), "--workers", str(workers), "--nics", str(nics), "--rate", rate,
             "--", f"exec {machine.path('phub')} serve --listen 0.0.0.0:7717 --insecure --transports tcp",
             f"{machine.path('zerocompute')} --one-rank --model {model} --transport tcp -w {RACK_WARMUP} "
             f"-n {rounds} --quiet --json {file.name}"])
        return checked(json.load(file)["rows"][0])


def central(model, workers, nics, mbit, rounds):
    def cluster(found):
        return (host("worker", "worker", workers, 1, mbit / 1e3, core_gbps=found["core_gb_s"]) +
                host("box", "box", 1, nics, mbit / 1e3, core_gbps=found["core_gb_s"]))
    return Case(f"rack, {workers} workers, {nics} NICs of {mbit} Mbit/s", "rack", (model,), cluster,
                ("--placement", "dedicated-central"),
                lambda machine: in_rack_with_nics(machine, model, workers, nics, f"{mbit}mbit", rounds))


def below_a_parent(machine, model, workers, racks, nics, rate, uplink, rounds):
    """The first box of scripts/rack is the root. Each rack's own is the last one in it."""
    phub = machine.path("phub")
    serve = "--insecure --transports tcp --listen 0.0.0.0:7717"
    answers = f"{phub} status --server $PHUB_SERVER >/dev/null 2>&1"
    box = (f"((BOX)) || exec {phub} serve {serve}; until {answers}; do sleep 0.1; done; "
           f"exec {phub} serve {serve} --parent $PHUB_SERVER")
    groups = ",".join([str(workers // racks)] * racks)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run([str(ROOT / "scripts/rack"), "--workers", str(workers), "--boxes", str(racks + 1), "--nics", str(nics),
             "--racks", str(racks), "--rate", rate, "--uplink", uplink, "--", box,
             f"export PHUB_SERVER=${{RACK_BOXES##* }}:7717; until {answers}; do sleep 0.1; done; "
             f"{machine.path('zerocompute')} --one-rank --model {model} --transport tcp --groups {groups} "
             f"-w {RACK_WARMUP} -n {rounds} --quiet --json {file.name}"])
        return checked(json.load(file)["rows"][0])


def two_levels(model, workers, racks, nics, mbit, uplink_mbit, rounds):
    def cluster(found):
        return (host("worker", "worker", workers, 1, mbit / 1e3, core_gbps=found["core_gb_s"]) +
                host("box", "box", racks + 1, nics, mbit / 1e3, core_gbps=found["core_gb_s"]))
    return Case(f"rack, {workers} workers, two levels, uplinks of {uplink_mbit} Mbit/s", "rack", (model,), cluster,
                ("--placement", "dedicated-central", "--racks", str(racks), "--parent", "--uplink-gbps",
                 str(uplink_mbit / 1e3)),
                lambda machine: below_a_parent(machine, model, workers, racks, nics, f"{mbit}mbit",
                                               f"{uplink_mbit}mbit", rounds))


def placed(model, placement, workers, boxes, mbit, rounds):
    """Every host has one NIC. `boxes`: that are apart from the workers."""
    serving = boxes or (workers if placement == "colocated-sharded" else 1)

    def cluster(found):
        text = host("worker", "worker", workers, 1, mbit / 1e3, core_gbps=found["core_gb_s"])
        if boxes > 0:
            text += host("box", "box", boxes, 1, mbit / 1e3, core_gbps=found["core_gb_s"])
        return text
    return Case(f"rack, {workers} workers, {placement}", "rack", (model,), cluster,
                ("--placement", placement),
                lambda machine: in_rack(machine, model, workers + boxes, serving, boxes,
                                        f"{mbit}mbit", rounds))


def cases_of(quick):
    model, rounds = ("resnet18", 2) if quick else ("resnet50", 3)
    return [shm(4), shm(8), loopback(4),
            central(model, 4, 4, 1000, rounds), central(model, 8, 2, 1000, rounds),
            central("resnet18", 8, 10, 500, rounds), central("resnet18", 20, 10, 500, rounds),
            placed(model, "dedicated-central", 4, 1, 1000, rounds),
            placed(model, "dedicated-sharded", 4, 2, 1000, rounds),
            placed(model, "colocated-central", 4, 0, 1000, rounds),
            placed(model, "colocated-sharded", 4, 0, 1000, rounds),
            two_levels(model, 8, 2, 5, 500, 500, rounds)]
