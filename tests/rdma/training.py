"""In the worker's machine: a job whose workers check every bit of it.

The workers' gradients are those of tests/worker/fault_oracle.h: a contribution that was lost,
repeated or changed is seen in the sums.
"""

import json
import re
import signal
import subprocess
import time

from machines import SERVER, TESTS, completed_round, end, expect, job, until


class Training:
    """One job and the workers in it; a round moves 0.3 MiB of each."""

    def __init__(self, name, ranks, lease_ms, **options):
        keys = {"a": 1, "b": 20000, "c": 8192, "d": 50000}
        self.spec = {
            "name": name, "world_size": ranks, "lease_ms": lease_ms, "chunk_elements": 2048,
            "keys": [{"name": key, "elements": elements} for key, elements in keys.items()],
            "optimizer": "none", "progress_limit_ms": 60000} | options
        self.workers, self.notes = [], []

    def start(self, rank, *flags):
        notes = f"/tmp/{self.spec['name']}{len(self.notes)}"
        command = [f"{TESTS}/fault_worker", "--server", SERVER, "--job", json.dumps(self.spec),
                   "--notes", notes, "--rank", str(rank), *flags]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.workers.append(worker)
        self.notes.append(notes)
        return worker

    def status(self):
        return job(self.spec["name"])

    def round(self):
        return completed_round(self.spec["name"])

    def goes_on(self, rounds, seconds):
        """How long that many more rounds take."""
        begin, goal = time.monotonic(), self.round() + rounds
        until(lambda: self.round() >= goal, seconds, f"round {goal}: {self.status()}")
        return time.monotonic() - begin

    def finish(self):
        """Everyone who is alive leaves. Returns how often they reconnected."""
        living = [worker for worker in self.workers if worker.poll() is None]
        for worker in living:
            worker.send_signal(signal.SIGTERM)
        end(living)
        reconnections = 0
        for worker in living:
            output = worker.stdout.read()
            expect(worker.returncode == 0 and output.endswith("left\n"),
                   f"a worker ended with status {worker.returncode}: {output}")
            reconnections += int(re.search(r"reconnected (\d+)", output)[1])
        return reconnections

    def check(self, first=0):
        """What the workers saw, from that one on, against the server's log, bit for bit."""
        done = subprocess.run([f"{TESTS}/fault_check", "--server", SERVER, "--job",
                               json.dumps(self.spec), *self.notes[first:]], capture_output=True, text=True)
        expect(done.returncode == 0, f"fault_check: {done.stdout}{done.stderr}")
        return done.stdout.replace("\n", "; ").strip("; ")

    def kill(self):
        for worker in self.workers:
            worker.kill()
