#!/usr/bin/python3
"""Learns handwritten digits, data-parallel, through libphub_worker.so and nothing but NumPy.

    phub serve &
    for rank in 0 1 2; do RANK=$rank WORLD_SIZE=3 ./digits.py digits.csv & done; wait
"""
import ctypes, os, sys, zlib
import numpy as np

phub = ctypes.CDLL(os.environ.get("PHUB_LIBRARY", "libphub_worker.so.0"))
phub.phub_last_error.restype = ctypes.c_char_p
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
pixels, hidden, classes, batch, rounds = 64, 64, 10, 32, 300
layers = {b"w1": (pixels, hidden), b"b1": (hidden,), b"w2": (hidden, classes), b"b2": (classes,)}

def call(function, *arguments):  # each returns 0, or leaves a message
    if getattr(phub, "phub_" + function)(*arguments):
        sys.exit(phub.phub_last_error().decode())

def array_of(function, key, shape):  # a NumPy array in phub's own memory: nothing is copied
    memory = ctypes.c_void_p()
    call(function, worker, ctypes.c_size_t(key), ctypes.byref(memory), None)
    return np.ctypeslib.as_array(ctypes.cast(memory, ctypes.POINTER(ctypes.c_float)), shape)

options, worker = ctypes.c_void_p(), ctypes.c_void_p()
call("options_from_environment", ctypes.byref(options))
for option in b"job=digits-py", b"optimizer=nesterov", b"reduction=mean", b"initial=broadcast":
    call("options_set", options, *option.split(b"="))
call("options_set_hyper", options, b"lr", ctypes.c_double(0.1))
for name, shape in layers.items():
    call("options_add_shaped_key", options, name, (ctypes.c_uint64 * len(shape))(*shape), ctypes.c_size_t(len(shape)))
call("worker_create", options, ctypes.byref(worker))

random, shapes = np.random.default_rng(rank), list(layers.values())
initial = [random.normal(0, (2 / shape[0]) ** 0.5, shape) * (len(shape) > 1) for shape in shapes]
initial = np.concatenate([one.ravel() for one in initial]).astype(np.float32)  # rank 0's count
call("broadcast", worker, initial.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(initial.size))
w1, b1, w2, b2 = (array_of("parameters", key, shape) for key, shape in enumerate(shapes))
gradients = [array_of("gradient", key, shape) for key, shape in enumerate(shapes)]

data = np.loadtxt(sys.argv[1], delimiter=",", dtype=np.float32) / ([16] * pixels + [1])
held_out = np.arange(len(data)) % 6 == 5
test, shard = data[held_out], data[~held_out][rank::world]
for _ in range(rounds):
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
guesses = (np.maximum(test[:, :pixels] @ w1 + b1, 0) @ w2 + b2).argmax(1)
bits = zlib.crc32(b"".join(each.tobytes() for each in (w1, b1, w2, b2)))  # the same on every rank
print(f"rank {rank} of {world}: {(guesses == test[:, pixels]).mean():.1%} of {len(test)} held-out digits, "
      f"parameters {bits:08x}")
call("worker_destroy", worker)
