#!/usr/bin/python3
"""worker/examples/digits.py, as the system's Python runs it: three ranks learn, and agree. What the server saves of them has
names and shapes.

    c_abi_digits_test.py PHUB LIBRARY DIGITS.CSV
"""
import json, os, pathlib, re, subprocess, sys, tempfile

RANKS, LEAST_PERCENT = 3, 90
phub, library, digits = sys.argv[1:]
try:
    import numpy
except ImportError as missing:
    print(f"skipped: {missing} (scripts/setup --test installs python3-numpy)")
    sys.exit(77)

example = os.path.join(os.path.dirname(__file__), "../../worker/examples/digits.py")
folder = tempfile.TemporaryDirectory()
server = subprocess.Popen([phub, "serve", "--listen", "127.0.0.1:0", "--pin", "false", "--checkpoints", folder.name,
                           "--checkpoint-every", "20"], stdout=subprocess.PIPE, text=True)
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

# As safetensors' documentation has it, and with its package if that is there.
SHAPES = {"w1": (64, 64), "b1": (64,), "w2": (64, 10), "b2": (10,)}
exported = pathlib.Path(folder.name) / "exported"
subprocess.run([phub, "checkpoint", "export", folder.name, "digits-py", exported], check=True)
files = {file.name for file in exported.iterdir()}
assert files == {"parameters.safetensors", "state-momentum_buffer.safetensors"}, files
for file in files:
    data = (exported / file).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    assert {name: tuple(entry["shape"]) for name, entry in header.items() if name[0] != "_"} == SHAPES, header
    try:
        from safetensors import safe_open
    except ImportError:
        continue
    with safe_open(exported / file, framework="numpy") as opened:
        assert {name: opened.get_tensor(name).shape for name in opened.keys()} == SHAPES
shown = subprocess.run([phub, "checkpoint", "show", folder.name, "digits-py"], capture_output=True, text=True, check=True)
assert "F32 [64, 10]  w2" in shown.stdout, shown.stdout
