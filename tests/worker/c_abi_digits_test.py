#!/usr/bin/python3
"""worker/examples/digits.py, as the system's Python runs it: three ranks learn, and agree.

    c_abi_digits_test.py PHUB LIBRARY DIGITS.CSV
"""
import os, re, subprocess, sys

RANKS, LEAST_PERCENT = 3, 90
phub, library, digits = sys.argv[1:]
try:
    import numpy
except ImportError as missing:
    print(f"skipped: {missing} (scripts/setup --test installs python3-numpy)")
    sys.exit(77)

example = os.path.join(os.path.dirname(__file__), "../../worker/examples/digits.py")
server = subprocess.Popen([phub, "serve", "--listen", "127.0.0.1:0", "--pin", "false"],
                          stdout=subprocess.PIPE, text=True)
try:
    address = next(line.split()[-1] for line in server.stdout if line.startswith("listening on"))
    environment = dict(os.environ, PHUB_SERVER=address, PHUB_LIBRARY=library,
                       WORLD_SIZE=str(RANKS), OPENBLAS_NUM_THREADS="1")
    ranks = [subprocess.Popen([sys.executable, example, digits], text=True, stdout=subprocess.PIPE,
                              env=dict(environment, RANK=str(rank))) for rank in range(RANKS)]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
finally:
    server.kill()
print(*outputs, sep="", end="")
assert all(rank.returncode == 0 for rank in ranks), [rank.returncode for rank in ranks]
percents = [float(re.search(r"([0-9.]+)%", output)[1]) for output in outputs]
parameters = {re.search(r"parameters ([0-9a-f]{8})$", output, re.M)[1] for output in outputs}
assert len(parameters) == 1, f"the ranks' parameters differ: {parameters}"
assert percents[0] >= LEAST_PERCENT, f"{percents[0]}% is less than {LEAST_PERCENT}%"
