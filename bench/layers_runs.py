"""Runs of `layers` for bench/ladder and bench/sharded: alone, in an emulated rack (scripts/rack), or over loopback.

A `setting` has `bin` (the folder of the programs), `rate` (of every link) and `cubic`."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
import urllib.request

from box import Box
from peers_rack import counted, rows_of, with_boxes
from peers_runs import ROOT, RUN_LIMIT_S, Failure, run

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
    command = "exec env PHUB_TRANSPORT=tcp " + shlex.join([str(setting.bin / "layers"), *options])
    return run_rack(setting, nodes, boxes.options(), boxes.hosts(),
                    with_boxes(shlex.quote(f"{setting.bin}/phub"), boxes.number, command))


def status_of(rank):
    """The exit status or signal of a process that ended, and None of one that did not. Leaves the process unreaped, so that
    nothing else can get the number of its group."""
    ended = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None if ended is None else ended.si_status


def kill_groups(ranks):
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def wait_for_all(ranks, limit_s):
    """Returns why they have to be killed: one failed, or limit_s are over. None: all ended well."""
    deadline = time.monotonic() + limit_s
    while True:
        found = [status_of(rank) for rank in ranks]
        if any(found):
            return "a rank failed"
        if all(status == 0 for status in found):
            return None
        if time.monotonic() > deadline:
            return f"no end after {limit_s} s"
        time.sleep(0.02)


def outputs_of(command, environments, limit_s=RUN_LIMIT_S):
    """What one process for each of these environments prints. When one fails, or after limit_s, all are killed, and so are
    those that they started."""
    ranks = []
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in environments]
        stack.callback(kill_groups, ranks)
        for environment, file in zip(environments, files):
            ranks.append(subprocess.Popen(command, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT,
                                          start_new_session=True))
        why = wait_for_all(ranks, limit_s)
        output = ""
        for file in files:
            file.seek(0)
            output += file.read()
    if why:
        raise Failure(f"{why}:\n{output}")
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
