"""Coded gradients as kernels/encode.h describes them, in NumPy."""

import numpy as np

CHUNK = 8192  # the default of chunk_elements


def int8(x):
    """What the box gets of a chunk."""
    largest = np.abs(x).max()
    if largest == 0:
        return np.zeros_like(x)
    scale = np.float32(min(max(largest / np.float32(127), 2.0**-126), 2.0**121))
    codes = np.rint(np.clip(x * (np.float32(1) / scale), -127, 127))
    return codes.astype(np.float32) * scale


def chosen_of(x):
    """The largest one in 32."""
    entries = max(-(-len(x) // 32), 8)
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:entries])


def bf16(x):
    bits = x.view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return bits.view(np.float32)


def topk(x):
    """The same."""
    sent = np.zeros_like(x)
    chosen = chosen_of(x)
    sent[chosen] = bf16(x[chosen])
    return sent


def mean(x):
    return bf16(np.array([sum(map(float, x)) / len(x)], np.float32))[0]


def topk_int2(x):
    """The same."""
    sent = np.zeros_like(x)
    chosen = chosen_of(x)
    size = np.abs(x[chosen])
    least, most = size.min(), size.max()
    is_low = size == 0 if least == 0 else size - least <= most - size
    low = mean(size[is_low])
    high = low if is_low.all() else mean(size[~is_low])
    is_high = (size - low) / (high - low) > 0.5 if low < high else np.zeros(len(size), bool)
    sent[chosen] = np.copysign(np.where(is_high, high, low), x[chosen])
    return sent


CODES = {"f32": lambda x: x, "int8": int8, "topk": topk, "topk-int2": topk_int2}


def phases_of(schedule):
    """The last round of each code, and the code: of "int8", or of "f32*30,int8*40,topk"."""
    last = 0
    for phase in schedule.split(","):
        name, _, rounds = phase.partition("*")
        last += int(rounds or 1 << 40)
        yield last, CODES[name]


class Sender:
    """A rank's gradients of one key, with the residual of what was sent."""

    def __init__(self, schedule, chunk=CHUNK):
        self.phases = list(phases_of(schedule))
        self.chunk, self.residual, self.round = chunk, np.float32(0), 0

    def send(self, gradient):
        """What the box gets."""
        self.round += 1
        code = next(code for last, code in self.phases if self.round <= last)
        x = np.asarray(gradient, np.float32) + self.residual
        chunks = np.split(x, range(self.chunk, len(x), self.chunk))
        sent = np.concatenate([code(chunk) for chunk in chunks])
        self.residual = x - sent
        return sent
