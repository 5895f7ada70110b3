#!/usr/bin/python3
"""worker/examples/digits.py, as the system's Python runs it: three ranks learn, and agree; and once
more, to the same bits, with a server that is killed and started again.

    c_abi_digits_test.py PHUB LIBRARY DIGITS.CSV
"""
import json, os, re, subprocess, sys, tempfile, time, urllib.request

RANKS, ROUNDS, LEAST_PERCENT, LIMIT_S = 3, 3000, 90, 120
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a busy disk is slower than the ranks
phub, library, digits = sys.argv[1:]
try:
    import numpy
except ImportError as missing:
    print(f"skipped: {missing} (scripts/setup --test installs python3-numpy)")
    sys.exit(77)

example = os.path.join(os.path.dirname(__file__), "../../worker/examples/digits.py")


def serve(folder, listen="127.0.0.1:0"):
    """The server and its address."""
    server = subprocess.Popen([phub, "serve", "--listen", listen, "--pin", "false", "--checkpoints", folder,
                               "--checkpoint-every", "20"], stdout=subprocess.PIPE, text=True)
    for line in server.stdout:
        if line.startswith("listening on"):
            return server, line.split()[-1]
    sys.exit(f"the server did not start: {server.wait()}")


def durable_round(address):
    with urllib.request.urlopen(f"http://{address}/v1/status", timeout=LIMIT_S) as answer:
        return max([job.get("durable_round", 0) for job in json.load(answer)["jobs"]], default=0)


def train(server_dies):
    """What each rank has printed."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        server, address = serve(folder)
        environment = dict(os.environ, PHUB_SERVER=address, PHUB_LIBRARY=library,
                           WORLD_SIZE=str(RANKS), OPENBLAS_NUM_THREADS="1")
        ranks = [subprocess.Popen([sys.executable, example, digits, str(ROUNDS)], text=True, stdout=subprocess.PIPE,
                                  env=dict(environment, RANK=str(rank))) for rank in range(RANKS)]
        try:
            if server_dies:
                until = time.monotonic() + LIMIT_S
                while durable_round(address) == 0:
                    assert time.monotonic() < until, "no checkpoint"
                    time.sleep(0.005)
                server.kill()
                server.wait()
                server, address = serve(folder, address)
            outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
        finally:
            for process in (server, *ranks):
                process.kill()
                process.wait()
    print(*outputs, sep="", end="")
    assert all(rank.returncode == 0 for rank in ranks), [rank.returncode for rank in ranks]
    assert all(("waiting for it" in output) == server_dies for output in outputs)
    percents = [float(re.search(r"([0-9.]+)%", output)[1]) for output in outputs]
    parameters = {re.search(r"parameters ([0-9a-f]{8})$", output, re.M)[1] for output in outputs}
    assert len(parameters) == 1, f"the ranks' parameters differ: {parameters}"
    assert percents[0] >= LEAST_PERCENT, f"{percents[0]}% is less than {LEAST_PERCENT}%"
    return parameters.pop()


undisturbed, disturbed = train(server_dies=False), train(server_dies=True)
assert disturbed == undisturbed, f"with a server that died: {disturbed}, without: {undisturbed}"
