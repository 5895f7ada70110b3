#!/usr/bin/python3
"""Learns handwritten digits, data-parallel, through libphub_worker.so and nothing but NumPy.

    phub serve --checkpoints checkpoints --checkpoint-every 50 &
    for rank in 0 1 2; do RANK=$rank WORLD_SIZE=3 ./digits.py digits.csv & done; wait

A rank whose server dies waits for it, and goes on from its last checkpoint: with the same bits, since
the state of its random numbers is in there. A second argument is the number of rounds.
"""
import ctypes, json, os, sys, zlib
import numpy as np

phub = ctypes.CDLL(os.environ.get("PHUB_LIBRARY", "libphub_worker.so.0"))
phub.phub_last_error.restype = ctypes.c_char_p
OK, NOT_FOUND, REWOUND = 0, 5, 15
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
pixels, hidden, classes, batch = 64, 64, 10, 32
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 300
layers = {b"w1": (pixels, hidden), b"b1": (hidden,), b"w2": (hidden, classes), b"b2": (classes,)}
shapes = list(layers.values())

class Rewound(Exception):
    pass

def call(function, *arguments, allowed=OK):  # each returns 0, or leaves a message
    code = getattr(phub, "phub_" + function)(*arguments)
    if code == REWOUND:
        raise Rewound
    if code not in (OK, allowed):
        sys.exit(phub.phub_last_error().decode())
    return code

def array_of(function, key, shape):  # a NumPy array in phub's own memory: nothing is copied
    memory = ctypes.c_void_p()
    call(function, worker, ctypes.c_size_t(key), ctypes.byref(memory), None)
    return np.ctypeslib.as_array(ctypes.cast(memory, ctypes.POINTER(ctypes.c_float)), shape)

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
def save(_, round, state):  # with which the next round begins
    numbers = json.dumps(random.bit_generator.state).encode()
    return phub.phub_save(ctypes.c_void_p(state), b"random", numbers, ctypes.c_size_t(len(numbers)))

def restore():
    numbers, size = ctypes.c_void_p(), ctypes.c_size_t()
    if call("restored", worker, b"random", ctypes.byref(numbers), ctypes.byref(size), allowed=NOT_FOUND) == OK:
        random.bit_generator.state = json.loads(ctypes.string_at(numbers, size.value))

class Info(ctypes.Structure):  # phub_info, up to what is needed here
    _fields_ = [("size", ctypes.c_size_t), ("rank", ctypes.c_uint32), ("incarnation", ctypes.c_uint32),
                ("world_size", ctypes.c_uint32), ("initial_counts", ctypes.c_uint32), ("first_round", ctypes.c_uint64)]

def first_round():
    info = Info(size=ctypes.sizeof(Info))
    call("worker_info", worker, ctypes.byref(info))
    return info.first_round

def train():  # from the job's present round on
    global random
    first = first_round()
    random = np.random.default_rng([rank, first])
    initial = [random.normal(0, (2 / shape[0]) ** 0.5, shape) * (len(shape) > 1) for shape in shapes]
    initial = np.concatenate([one.ravel() for one in initial]).astype(np.float32)  # rank 0's count, when the job begins
    call("broadcast", worker, initial.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(initial.size))
    restore()
    w1, b1, w2, b2 = parameters = [array_of("parameters", key, shape) for key, shape in enumerate(shapes)]
    gradients = [array_of("gradient", key, shape) for key, shape in enumerate(shapes)]
    for _ in range(first, rounds + 1):
        images, labels = np.split(shard[random.integers(len(shard), size=batch)], [pixels], axis=1)
        units = np.maximum(images @ w1 + b1, 0)
        logits = units @ w2 + b2
        scores = np.exp(logits - logits.max(1, keepdims=True))
        error = (scores / scores.sum(1, keepdims=True) - np.eye(classes)[labels[:, 0].astype(int)]) / batch
        below = (error @ w2.T) * (units > 0)
        computed = images.T @ below, below.sum(0), units.T @ error, error.sum(0)
        for key in reversed(range(len(layers))):
            gradients[key][:] = computed[key]
            call("push", worker, ctypes.c_size_t(key), -key)  # the first layer is needed first
        call("wait_all", worker)
    return parameters

options, worker = ctypes.c_void_p(), ctypes.c_void_p()
call("options_from_environment", ctypes.byref(options))
for option in b"job=digits-py", b"optimizer=nesterov", b"reduction=mean", b"initial=broadcast":
    call("options_set", options, *option.split(b"="))
call("options_set_hyper", options, b"lr", ctypes.c_double(0.1))
call("options_set_saver", options, save, None)
for name, shape in layers.items():
    call("options_add_shaped_key", options, name, (ctypes.c_uint64 * len(shape))(*shape), ctypes.c_size_t(len(shape)))
call("worker_create", options, ctypes.byref(worker))

data = np.loadtxt(sys.argv[1], delimiter=",", dtype=np.float32) / ([16] * pixels + [1])
held_out = np.arange(len(data)) % 6 == 5
test, shard = data[held_out], data[~held_out][rank::world]
while True:
    try:
        w1, b1, w2, b2 = train()
        break
    except Rewound:
        print(f"rank {rank}: the server is gone; waiting for it", flush=True)
        call("rejoin", worker, None)
guesses = (np.maximum(test[:, :pixels] @ w1 + b1, 0) @ w2 + b2).argmax(1)
bits = zlib.crc32(b"".join(each.tobytes() for each in (w1, b1, w2, b2)))  # the same on every rank
print(f"rank {rank} of {world}: {(guesses == test[:, pixels]).mean():.1%} of {len(test)} held-out digits, "
      f"parameters {bits:08x}")
call("worker_destroy", worker)
