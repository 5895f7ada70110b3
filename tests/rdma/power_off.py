"""The workers' machine goes off in the middle of a training: the box has to notice, and to keep
nothing of it.

  power_off.py worker  in the worker's machine: trains until the box says "off", and is off
  power_off.py box     in the box's machine: the server, and the case
"""

import signal
import socket
import subprocess
import sys
import time

from machines import NICS, expect, figure, get, job, run_cases, until, wait_for_server
from training import Training

PORT = 7791
LEASE_MS = 3000


def worker():
    wait_for_server()
    run = Training("power", 2, LEASE_MS)
    for rank in range(2):
        run.start(rank)
    run.goes_on(3, 30)
    with socket.create_server(("10.77.0.2", PORT)) as listener:
        listener.accept()
    with open("/proc/sysrq-trigger", "w") as trigger:
        trigger.write("o")
    time.sleep(60)


def queue_pairs():
    # Queue pair 1 of a device is the kernel's.
    listed = subprocess.run(["rdma", "resource", "show", "qp"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if "comm phub" in line]


def answers(port):
    try:
        with socket.create_connection(("10.77.0.2", port), timeout=5):
            return True
    except OSError:
        return False


def power_off():
    until(lambda: answers(PORT), 40, "the workers train")
    before = len(queue_pairs())
    begin = time.monotonic()
    expect(before >= 2 * len(NICS), f"{before} queue pairs of 2 workers")

    def all_lost():
        records = get("/v1/jobs/power/log")["records"]
        return sorted(r["rank"] for r in records if r["kind"] == "lost") == [0, 1] and records

    records = until(all_lost, 20, f"both ranks are lost: {job('power')}")
    noticed = time.monotonic() - begin
    until(lambda: not queue_pairs(), 10, f"no queue pair is left: {queue_pairs()}")
    gone = time.monotonic() - begin
    expect(noticed <= LEASE_MS / 1000 + 5, f"noticed after {noticed:.1f} s")
    reasons = {r["reason"] for r in records if r["kind"] == "lost"}
    figure(f"workers' machine off, lease {LEASE_MS} ms: noticed after {noticed:.1f} s ({reasons}), "
           f"{before} queue pairs gone after {gone:.1f} s")


def main():
    if sys.argv[1] == "worker":
        return worker()
    server = subprocess.Popen(["build/release/bin/phub", "serve", "--listen", "*:7717", "--insecure"])

    def stop():
        server.send_signal(signal.SIGTERM)
        status = server.wait(20)
        expect(status == 0, f"the server ended with status {status}")

    def case():
        try:
            power_off()
        finally:
            stop()

    return run_cases({"power_off": case}, ["power_off"])


main()
