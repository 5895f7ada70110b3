"""The exchange of zerocompute with torch.distributed (all_reduce of its gloo backend): every process
contributes a gradient and ends up with the sum. Same gradients, same check, same clock as peers_gloo;
rank 0 prints one line of JSON.

  RANK=0 WORLD_SIZE=4 python3 peers_torch.py STORE INTERFACE ELEMENTS WARMUP ROUNDS [FOLDER SETTING]

one process per rank. With FOLDER and SETTING the gradients go through DeepSpeed's all-reduce, which
peers_deepspeed.py has compiled there. STORE is a folder, empty before, in which the ranks find each other; INTERFACE
the network's (lo).
"""

import datetime
import json
import os
import sys
import time

import numpy
import torch
from peers_deepspeed import all_reduce_of
from torch import distributed

RANKS_PER_HASH = 8
LIMIT = datetime.timedelta(seconds=300)


def seed_of(round_, group):
    """As in zerocompute/gradients.cc, and so is what follows."""
    mask = (1 << 64) - 1
    z = ((round_ << 20) + group + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) & 0xFFFFFFFF


def hashes(round_, group, first, count):
    h = numpy.arange(first, first + count, dtype=numpy.uint32)
    h += numpy.uint32(seed_of(round_, group))
    h *= numpy.uint32(0x9E3779B1)
    h ^= h >> numpy.uint32(15)
    h *= numpy.uint32(0x85EBCA77)
    h ^= h >> numpy.uint32(13)
    return h


def nibble(h, rank):
    shift = numpy.uint32(4 * (rank % RANKS_PER_HASH))
    return ((h >> shift) & numpy.uint32(15)).astype(numpy.float32) - numpy.float32(8)


def gradient(rank, round_, count):
    return nibble(hashes(round_, rank // RANKS_PER_HASH, 0, count), rank)


def sum_of_gradients(ranks, round_, first, count):
    total = numpy.zeros(count, dtype=numpy.float32)
    for rank in range(ranks):
        if rank % RANKS_PER_HASH == 0:
            h = hashes(round_, rank // RANKS_PER_HASH, first, count)
        total += nibble(h, rank)
    return total


def reduced(values, operation):
    tensor = torch.tensor(values, dtype=torch.int64)
    distributed.all_reduce(tensor, op=operation)
    return tensor.tolist()


def measure(rank, ranks, elements, warmup, rounds, all_reduce):
    data = torch.empty(elements, dtype=torch.float32)
    memory = data.numpy()
    round_us, wrong = [], 0
    for round_ in range(1, warmup + rounds + 1):
        memory[:] = gradient(rank, round_, elements)
        if os.environ.get("PHUB_PEERS_SPOIL") == str(rank):
            memory[0] += 1
        distributed.barrier()
        start = time.monotonic_ns()
        all_reduce(data)
        end = time.monotonic_ns()
        distributed.barrier()
        # The start negated: one reduction finds both ends.
        ends = reduced([-start, end], distributed.ReduceOp.MAX)
        if round_ > warmup:
            round_us.append(sum(ends) / 1e3)
        # As in zerocompute: all elements, each on one process per round.
        part = (rank + round_) % ranks
        first, last = elements * part // ranks, elements * (part + 1) // ranks
        expected = sum_of_gradients(ranks, round_, first, last - first)
        wrong += int(numpy.count_nonzero(memory[first:last] != expected))
    return round_us, reduced([wrong], distributed.ReduceOp.SUM)[0]


def main():
    try:
        store, interface = sys.argv[1:3]
        elements, warmup, rounds = map(int, sys.argv[3:6])
        deepspeed = sys.argv[6:]
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if len(deepspeed) not in (0, 2) or elements < 1 or warmup < 0 or rounds < 1 or not 0 <= rank < ranks:
            raise ValueError
    except (ValueError, KeyError):
        print("usage: RANK=0 WORLD_SIZE=4 peers_torch.py STORE INTERFACE ELEMENTS WARMUP ROUNDS "
              "[FOLDER SETTING]",
              file=sys.stderr)
        return 2
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{os.path.abspath(store)}/torch",
                                   rank=rank, world_size=ranks, timeout=LIMIT)
    all_reduce = distributed.all_reduce
    if deepspeed:
        all_reduce = all_reduce_of(*deepspeed, rank, ranks, os.path.basename(os.path.abspath(store)))
    round_us, wrong = measure(rank, ranks, elements, warmup, rounds, all_reduce)
    if rank == 0:
        low, median, high, most = numpy.quantile(round_us, (0, 0.5, 0.99, 1))
        print(json.dumps({"workers": ranks, "bytes": elements * 4, "rounds": rounds, "min_us": low,
                          "p50_us": median, "p99_us": high, "max_us": most, "wrong": wrong}),
              flush=True)
    distributed.barrier()  # nobody leaves while another still talks to it
    return 0


if __name__ == "__main__":
    sys.exit(main())
