"""Runs of `layers` for bench/ladder and bench/sharded: alone, in an emulated rack (scripts/rack), or over loopback.

A `setting` has `bin` (the folder of the programs), `rate` (of every link) and `cubic`."""

import dataclasses
import json
import os
import re
import subprocess
import tempfile
import urllib.request

from box import Box
from peers_rack import counted, rows_of, with_boxes
from peers_runs import ROOT, Failure, run

LOCAL = "local"  # instead of a rate: no rack, but this machine's loopback
SERVE = "--insecure --transports tcp --pin false --log-level warn"


@dataclasses.dataclass(frozen=True)
class Boxes:
    """Where the boxes of a rack are: on hosts of their own, or on those of the first workers."""
    number: int = 1
    colocated: bool = False
    nics: int = 1  # of each; a colocated box has its host's one

    def options(self):
        return ["--boxes", str(self.number), *(["--colocated"] if self.colocated else ["--nics", str(self.nics)])]

    def hosts(self):
        if self.colocated:
            return [f"worker{box}" for box in range(self.number)]
        return ["box"] + [f"box{box}" for box in range(1, self.number)]


def run_alone(setting, options):
    """The seconds of an iteration of one node without a box."""
    return json.loads(run([str(setting.bin / "layers"), "--alone", *options]))["iteration_s"]


def run_rack(setting, nodes, options, hosts, commands):
    """The rows that the nodes print, and the payload (received, sent) of each of these hosts."""
    output = run([str(ROOT / "scripts/rack"), "--workers", str(nodes), *options, "--rate", setting.rate,
                  *(["--cubic"] if setting.cubic else []), "--counters", "--", *commands])
    return rows_of(re.sub(r"^worker \d+\| ", "", output, flags=re.M)), list(counted(output, hosts).values())


def run_in_rack(setting, nodes, boxes, options):
    """As run_rack(), of `layers`, and of the hosts with a box."""
    command = " ".join(["exec env PHUB_TRANSPORT=tcp", str(setting.bin / "layers"), *options])
    return run_rack(setting, nodes, boxes.options(), boxes.hosts(),
                    with_boxes(f"{setting.bin}/phub", boxes.number, command))


def outputs_of(command, environments):
    """What one process for each of these environments prints."""
    ranks = [subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True) for environment in environments]
    output = "".join(rank.communicate()[0] for rank in ranks)
    if any(rank.returncode for rank in ranks):
        raise Failure(f"a rank failed:\n{output}")
    return output


def run_on_loopback(setting, nodes, options):
    """As run_in_rack() with one box; the bytes are what it counts."""
    with (tempfile.TemporaryDirectory(prefix="phub-layers-") as folder,
          Box(setting.bin.parent, folder, *SERVE.split()) as box):
        common = {"PHUB_SERVER": box.address, "PHUB_TRANSPORT": "tcp", "WORLD_SIZE": str(nodes)}
        output = outputs_of([str(setting.bin / "layers"), *options],
                            [common | {"RANK": str(rank)} for rank in range(nodes)])
        with urllib.request.urlopen(f"http://{box.address}/metrics", timeout=10) as page:
            metrics = page.read().decode()
    counts = [sum(int(n) for n in re.findall(rf"^phub_core_{way}_bytes_total\S* (\d+)", metrics, re.M))
              for way in ("received", "sent")]
    return rows_of(output), [counts]


def can_make_racks():
    return subprocess.run([ROOT / "scripts/rack", "--workers", "1", "--", "", "true"], capture_output=True,
                          check=False).returncode == 0


def chosen(parser, option, words, known):
    words = words.split(",")
    for word in words:
        if word not in known:
            parser.error(f"{option}: '{word}' is not one of {', '.join(known)}")
    return words
