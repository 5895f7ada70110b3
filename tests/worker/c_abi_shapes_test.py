#!/usr/bin/python3
"""What a server saves, as NumPy reads it: a job that is made through the C interface, its names and its shapes.

    c_abi_shapes_test.py PHUB LIBRARY
"""
import ctypes, json, pathlib, subprocess, sys, tempfile, time

phub, library = sys.argv[1:]
try:
    import numpy
except ImportError as missing:
    print(f"skipped: {missing} (scripts/setup --test installs python3-numpy)")
    sys.exit(77)

SHAPES = {"w": (3, 4, 50), "b": (10,)}
c = ctypes.CDLL(library)
c.phub_last_error.restype = ctypes.c_char_p


def call(function, *arguments):
    assert getattr(c, "phub_" + function)(*arguments) == 0, c.phub_last_error()


def train(address, folder):
    """Until something is saved; returns the parameters of `w`, which are the same in every round."""
    options, worker, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("options_create", ctypes.byref(options))
    for name, value in ("server", address), ("job", "shapes"), ("optimizer", "adam"), ("initial", "broadcast"):
        call("options_set", options, name.encode(), value.encode())
    for name, shape in SHAPES.items():
        call("options_add_shaped_key", options, name.encode(), (ctypes.c_uint64 * len(shape))(*shape),
             ctypes.c_size_t(len(shape)))
    call("worker_create", options, ctypes.byref(worker))
    initial = numpy.arange(610, dtype=numpy.float32)
    call("broadcast", worker, initial.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(initial.size))
    give_up = time.monotonic() + 60
    while not list(folder.glob("shapes/round-*/manifest.json")):
        assert time.monotonic() < give_up, "nothing was saved"
        for key in range(len(SHAPES)):  # of zero: the parameters stay
            call("push_null", worker, ctypes.c_size_t(key))
        call("wait_all", worker)
    call("worker_destroy", worker)
    return initial[:600].reshape(SHAPES["w"])


def read(path):
    """Tensors by name, as safetensors' documentation has it."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    del header["__metadata__"]
    return {name: numpy.frombuffer(data[8 + length:][slice(*entry["data_offsets"])], "<f4").reshape(entry["shape"])
            for name, entry in header.items()}


with tempfile.TemporaryDirectory() as directory:
    folder, exported = pathlib.Path(directory) / "saved", pathlib.Path(directory) / "exported"
    server = subprocess.Popen([phub, "serve", "--listen", "127.0.0.1:0", "--pin", "false", "--checkpoints", folder,
                               "--checkpoint-every", "1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        expected = train(next(line.split()[-1] for line in server.stdout if line.startswith("listening on")), folder)
    finally:
        server.kill()
        server.wait()
    subprocess.run([phub, "checkpoint", "export", folder, "shapes", exported], check=True)
    files = {file.name: read(file) for file in exported.iterdir()}
    assert set(files) == {"parameters.safetensors", "state-exp_avg.safetensors", "state-exp_avg_sq.safetensors"}, files.keys()
    for name, tensors in files.items():
        assert {key: tensor.shape for key, tensor in tensors.items()} == SHAPES, name
    assert numpy.array_equal(files["parameters.safetensors"]["w"], expected)
    try:
        from safetensors import safe_open
        for file in exported.iterdir():
            with safe_open(file, framework="numpy") as opened:
                assert {key: opened.get_tensor(key).shape for key in opened.keys()} == SHAPES
    except ImportError:
        print("safetensors is not here: read with NumPy alone")
    shown = subprocess.run([phub, "checkpoint", "show", folder, "shapes"], capture_output=True, text=True, check=True).stdout
    assert shown.count("F32 [3, 4, 50]  w") == 3, shown
