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


def topk(x):
    """The same."""
    sent = np.zeros_like(x)
    entries = max(-(-len(x) // 32), 8)
    chosen = np.argsort(-np.abs(x), kind="stable")[:entries]
    bits = x[chosen].view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    sent[chosen] = bits.view(np.float32)
    return sent


class Sender:
    """A rank's gradients of one key, with the residual of what was sent."""

    def __init__(self, code, chunk=CHUNK):
        self.code, self.chunk, self.residual = code, chunk, np.float32(0)

    def send(self, gradient):
        """What the box gets."""
        x = np.asarray(gradient, np.float32) + self.residual
        chunks = np.split(x, range(self.chunk, len(x), self.chunk))
        sent = np.concatenate([self.code(chunk) for chunk in chunks])
        self.residual = x - sent
        return sent
