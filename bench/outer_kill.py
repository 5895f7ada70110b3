"""How long learners wait after SIGKILL of another one, for bench/outer --kill.

Learners sleep for STEP_MS as if they computed, exchange, and so on. One is killed as it "computes",
or in the middle of an exchange. Counted is when the others have made their next round, beside when
they would have: a time as between their rounds before.
"""

import json
import math
import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from outer_runs import Processes, environment_of, phub_environment
from peers_runs import Failure

BEFORE = 5  # rounds, of which the first may wait for learners that join
STEP_MS = 300
LIMIT_S = 60
MOMENTS = ("computing", "exchanging")
ADDRESS = "127.0.0.1:7729"


def exchanges_of(runs, rank):
    """When this learner went on after each exchange, and how long it took."""
    lines = runs.output(f"learner{rank}").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("[") and line.endswith("]\n")]


def rounds_of(runs, rank):
    return [at for at, _ in exchanges_of(runs, rank)]


def waits(runs, learners, moment):
    """How much later the others went on after the last one was killed, in seconds."""
    *others, last = range(len(learners))
    runs.wait_for("the first rounds", lambda: min(
        len(rounds_of(runs, rank)) for rank in range(len(learners))) >= BEFORE, alive=learners)
    if moment == "exchanging":
        exchanges = exchanges_of(runs, last)
        middle = statistics.median(length for _, length in exchanges[1:]) / 2
        time.sleep(max(0.0, exchanges[-1][0] + STEP_MS / 1000 + middle - time.monotonic()))
    os.killpg(learners[last].pid, signal.SIGKILL)
    killed = time.monotonic()

    def after(rank):
        return [at for at in rounds_of(runs, rank) if at > killed]

    runs.wait_for("the next round", lambda: all(after(rank) for rank in others),
                  alive=[learners[rank] for rank in others], limit_s=LIMIT_S)
    found = []
    for rank in others:
        before = [at for at in rounds_of(runs, rank) if at < killed][1:]
        period = statistics.median(b - a for a, b in zip(before, before[1:], strict=False))
        found.append(after(rank)[0] - before[-1] - period)
    return max(found)


def phub_waits(arguments, folder, moment, quorum):
    with Processes(phub_environment(arguments, "kill"), folder) as runs:
        runs.start("server", [arguments.build / "bin" / "phub", "serve", "--insecure", "--listen",
                              ADDRESS])
        learners = [
            runs.start(f"learner{rank}",
                       [arguments.python, "goodput_learner.py", arguments.parts, 3600, STEP_MS,
                        quorum, 20],
                       {"PHUB_SERVER": ADDRESS, "RANK": str(rank),
                        "WORLD_SIZE": str(arguments.ranks)})
            for rank in range(arguments.ranks)
        ]
        return waits(runs, learners, moment)


def torchft_waits(arguments, folder, moment, join_ms):
    python = environment_of("torchft") / "python"
    with Processes({}, folder) as runs:
        lighthouse = runs.start(
            "lighthouse", [python, "torchft_lighthouse.py", arguments.ranks - 1, join_ms],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        address = lighthouse.stdout.readline().strip()
        learners = [
            runs.start(f"learner{rank}", [python, "torchft_kill.py", arguments.parts, STEP_MS, rank,
                                          arguments.ranks, address])
            for rank in range(arguments.ranks)
        ]
        return waits(runs, learners, moment)


# By peer: how it is set, and what measures it.
FORMS = {
    "phub": {
        "all": lambda *given: phub_waits(*given, 0),
        "quorum": lambda *given: phub_waits(*given, given[0].ranks - 1),
    },
    "torchft": {
        "join 10 s": lambda *given: torchft_waits(*given, 10000),  # as its README has it
        "join 1 s": lambda *given: torchft_waits(*given, 1000),
        "join 0.1 s": lambda *given: torchft_waits(*given, 100),  # as its tests have it
    },
}


def later_by(peer, form, moment, arguments):
    """Infinite where a peer's learners do not go on."""
    try:
        with tempfile.TemporaryDirectory(prefix=f"phub-outer-kill-{peer}-") as folder:
            return FORMS[peer][form](arguments, Path(folder), moment)
    except Failure as failure:
        if peer == "phub":
            raise
        print(f"{peer}, {form}, {moment}: {str(failure).splitlines()[0]}", flush=True)
        return math.inf


def report_kills(arguments):
    """Prints a table. Returns its rows."""
    if others := set(arguments.peers) - set(FORMS):
        raise Failure(f"--kill: it is of {' and '.join(FORMS)}: leave out {', '.join(others)}")
    cases = [(peer, form, moment) for peer in arguments.peers for form in FORMS[peer]
             for moment in MOMENTS]
    found = {case: [] for case in cases}
    for _ in range(arguments.turns):
        for peer, form, moment in cases:
            later = later_by(peer, form, moment, arguments)
            found[peer, form, moment].append(later)
            print(f"{peer}, {form}, {moment}: {later * 1000:.0f} ms", flush=True)
    print(f"\n{'':10}{'':12}{'killed':12}{'ms later':>10}{'most':>8}")
    for (peer, form, moment), seconds in found.items():
        print(f"{peer:10}{form:12}{moment:12}{statistics.median(seconds) * 1000:10.0f}"
              f"{max(seconds) * 1000:8.0f}")
    return [{"peer": peer, "form": form, "killed": moment, "seconds": seconds}
            for (peer, form, moment), seconds in found.items()]
