"""In the worker's machine: the box, its server, the wires, and how cases are run."""

import json
import os
import socket
import subprocess
import sys
import time

import box

SERVER = "10.77.0.1:7717"
BIN = "build/release/bin"
TESTS = "build/release/tests"
NICS = range(4)


class Failure(Exception):
    pass


def expect(condition, sentence):
    if not condition:
        raise Failure(sentence)


def figure(text):
    print(f"figure: {text} (soft-RoCE in an emulated machine)", flush=True)


def on_box(command):
    """The output of a command in the box's machine."""
    with socket.create_connection(("10.77.0.1", box.PORT)) as connection:
        connection.sendall(json.dumps(command).encode() + b"\n")
        with connection.makefile() as answer:
            status, output, errors = json.loads(answer.read())
    expect(status == 0, f"on the box, {command}: status {status}: {output}{errors}")
    return output


def request(method, path, body=None, port=7717):
    """A request of the control port."""
    sent = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: box\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("10.77.0.1", port), timeout=30) as connection:
        connection.sendall(head.encode() + sent)
        with connection.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
    expect(b" 200 " in head.split(b"\r\n")[0], f"{method} {path}: {head.decode()} {body.decode()}")
    return json.loads(body)


def get(path, port=7717):
    return request("GET", path, port=port)


def job(name, port=7717):
    """The status of a job, or None."""
    return next((j for j in get("/v1/status", port)["jobs"] if j["name"] == name), None)


def completed_round(name):
    status = job(name)
    return status.get("completed_round", 0) if status else 0


# Limits end what hangs; on a machine that is busy, all takes longer than on one at rest.
PATIENCE = 5


def until(condition, seconds, what):
    """The condition's first true value."""
    seconds *= PATIENCE
    give_up = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        expect(time.monotonic() < give_up, f"after {seconds} s still not: {what}")
        time.sleep(0.1)


def wait_for_server(port=7717):
    def answers():
        try:
            return get("/v1/status", port)
        except OSError:
            return None

    until(answers, 30, "the server answers")


def wire_bytes():
    """Bytes that crossed each wire so far: (to the box, from the box)."""
    def counter(nic, name):
        with open(f"/sys/class/net/eth{nic}/statistics/{name}_bytes") as file:
            return int(file.read())

    return [(counter(nic, "tx"), counter(nic, "rx")) for nic in NICS]


def refused_packets():
    """Packets that each wire brought twice or after a gap so far: (to the box, from the box)."""
    command = "cat /sys/class/infiniband/rxe[0-3]/ports/1/hw_counters/{duplicate,out_of_seq}_request"
    def read(output):
        counts = [int(count) for count in output.split()]  # of all NICs for one, then for the other
        return [counts[nic] + counts[len(NICS) + nic] for nic in NICS]

    here = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    return list(zip(read(on_box(command)), read(here.stdout)))


def end(processes, seconds=60):
    """Waits for processes; kills what hangs."""
    seconds *= PATIENCE
    give_up = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.1, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
            raise Failure(f"{process.args[0]} was still running after {seconds} s")


def print_jobs():
    try:
        print(json.dumps(get("/v1/status")["jobs"]), flush=True)
    except (Failure, OSError) as error:
        print(f"no status: {error}", flush=True)


def run_cases(cases, names):
    """Every case, whatever became of those before it. Ends the program."""
    wait_for_server()
    failed = False
    for name in names:
        begin = time.monotonic()
        try:
            cases[name]()
            print(f"ok {name} ({time.monotonic() - begin:.0f} s)", flush=True)
        except (Failure, OSError, ValueError, KeyError, subprocess.SubprocessError) as failure:
            failed = True
            print(f"FAILED {name}: {type(failure).__name__}: {failure}", flush=True)
            print_jobs()
    sys.stdout.flush()
    os._exit(failed)  # not as long as workers that hang
