"""In the worker's machine: faults while workers train. faults.py CASE…"""

import re
import signal
import subprocess
import sys
import time

from machines import NICS, end, expect, figure, get, on_box, run_cases, until
from training import Training


def training(name, ranks, lease_ms, flags=(), **options):
    """A training with a worker for every rank, some rounds old."""
    made = Training(name, ranks, lease_ms, **options)
    for rank in range(ranks):
        made.start(rank, *flags)
    made.goes_on(3, 60)
    transport = made.status()["transport"]
    expect(transport == "verbs", f"the job goes over {transport}")
    return made


def wires(rule, nics=NICS):
    """netem in both directions of the wires; rule None: none."""
    action = f"replace dev eth{{}} root netem {rule}" if rule else "del dev eth{} root"
    commands = " && ".join(f"tc qdisc {action.format(nic)}" for nic in nics)
    if rule:  # this machine's last: the command crosses a wire
        on_box(commands)
    subprocess.run(["bash", "-c", commands], check=True)
    if not rule:
        on_box(commands)


def loss():
    run = training("loss", 2, 10000)
    calm = run.goes_on(10, 60)
    wires("delay 500us loss 1% duplicate 1% reorder 5% 25%")
    try:
        took = run.goes_on(10, 90)
        dropped = subprocess.run(["tc", "-s", "qdisc"], capture_output=True, text=True).stdout
        lost = sum(int(n) for n in re.findall(r"dropped (\d+)", dropped))
    finally:
        wires(None)
    reconnections = run.finish()
    expect(lost > 0, "netem lost nothing")
    figure(f"1% lost, 1% repeated, 5% overtaken: 10 rounds in {took:.1f} s instead of {calm:.1f} s, "
           f"{lost} packets of this side lost, {reconnections} reconnections; {run.check()}")


def wire():
    # Several jobs: some break while they send, some when all is sent and only results are missing.
    # Workers of the last one only look whether results are there.
    runs = [training(f"wire{n}", 2, 10000, flags, on_loss="fail")
            for n, flags in enumerate([(), (), ("--poll",)])]
    wires("loss 100%", [1])
    time.sleep(7)  # queue pairs try for 4 s
    wires(None, [1])
    begin = time.monotonic()
    for run in runs:
        run.goes_on(3, 30)
    took = time.monotonic() - begin
    reconnections = [run.finish() for run in runs]
    checked = [run.check() for run in runs]
    expect(all(reconnections), f"somebody had to reconnect in every job, not {reconnections}")
    expect(took <= 10, f"three rounds after the wire was back took {took:.1f} s")
    figure(f"wire cut for 7 s: three rounds of all jobs {took:.1f} s after it was back, "
           f"{reconnections} reconnections; {', '.join(checked)}")


def withheld():
    run = training("withheld", 3, 10000, on_loss="fail")
    on_box("kill -STOP $SERVER; sleep 2; kill -CONT $SERVER")
    took = run.goes_on(3, 30)
    reconnections = run.finish()
    expect(took <= 5, f"three rounds after the stop took {took:.1f} s")
    figure(f"server stopped for 2 s: three rounds {took:.1f} s later, {reconnections} "
           f"reconnections; {run.check()}")


def killed():
    run = Training("killed", 3, 1000, on_loss="shrink")
    for rank in range(2):
        run.start(rank)
    victim = run.start(2, "--die-in", "6")
    expect(victim.wait(60) == -signal.SIGKILL, f"the victim ended with {victim.returncode}")
    begin = time.monotonic()
    until(lambda: run.round() >= 8, 20, f"the others go on: {run.status()}")
    took = time.monotonic() - begin
    run.finish()
    lost = [r for r in get("/v1/jobs/killed/log")["records"] if r["kind"] == "lost"]
    expect([r["rank"] for r in lost] == [2], f"lost: {lost}")
    last = sorted({r["round"] for r in lost[0]["last_rounds"]})
    expect(last == [5, 6], f"the victim's last rounds: {lost}")  # some of its chunks got through
    expect(took <= 6, f"lease 1 s: the others went on after {took:.1f} s")
    figure(f"killed in the middle of a round, lease 1 s: two rounds more after {took:.1f} s; "
           f"{run.check()}")


def unplugged():
    """A device of the box goes: its job ends and says why, the others go on, new ones use the rest."""
    over_verbs = training("unplugged", 2, 10000, on_loss="fail")
    over_tcp = Training("beside", 2, 10000, on_loss="fail")
    for rank in range(2):
        over_tcp.start(rank, "--transport", "tcp")
    over_tcp.goes_on(3, 60)
    begin = time.monotonic()
    # It does not return before the last process has closed the device.
    on_box("setsid -f rdma link delete rxe3 >/dev/null 2>&1")
    end(over_verbs.workers, 30)
    took = time.monotonic() - begin
    for worker in over_verbs.workers:
        output = worker.stdout.read()
        expect(worker.returncode == 3 and "rxe3" in output, f"a worker of the device ended with {output}")
    records = get("/v1/jobs/unplugged/log")["records"]
    expect(records[-1]["kind"] == "failed" and "rxe3" in records[-1]["reason"], f"the log: {records[-1]}")
    over_tcp.goes_on(5, 30)
    left = training("left", 2, 10000, on_loss="fail")
    nics = {queue["nic"] for core in left.status()["cores"] for queue in core["queues"]}
    expect(nics and "rxe3" not in nics, f"the next job uses {nics}")
    for run in (over_tcp, left):
        expect(run.finish() == 0, "somebody had to reconnect")
    figure(f"a device removed: its job ended after {took:.1f} s ({records[-1]['reason']}); "
           f"the one over tcp {over_tcp.check()}; the next one on {sorted(nics)} {left.check()}")


run_cases({"loss": loss, "wire": wire, "withheld": withheld, "killed": killed, "unplugged": unplugged},
          sys.argv[1:])
