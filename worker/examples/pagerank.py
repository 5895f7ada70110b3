#!/usr/bin/python3
"""Ranks Debian's packages by their dependencies, as pagerank.cc does, with NumPy and phub.iterstore.

    apt-cache dumpavail >packages
    for rank in 0 1; do ./pagerank.py --world 2 --rank $rank --packages packages & done; wait

Every thread has a part of the links, and passes on over each what its source's rank has changed by.
"""
import argparse, os, re
import numpy as np
from phub.iterstore import Store, Table

options = argparse.ArgumentParser(description="Ranks Debian's packages by their dependencies.")
options.add_argument("--server", help="HOST:PORT of phub serve", default=os.environ.get("PHUB_SERVER", "127.0.0.1:7717"))
options.add_argument("--job", help="name of the store", default="pagerank-py")
options.add_argument("--world", help="number of processes", type=int, default=int(os.environ.get("WORLD_SIZE", 1)))
options.add_argument("--rank", help="this process's", type=int, default=int(os.environ.get("RANK", 0)))
options.add_argument("--threads", help="of each process", type=int, default=2)
options.add_argument("--iterations", type=int, default=150)
options.add_argument("--packages", help="what `apt-cache dumpavail` prints", default="packages")
options.add_argument("--out", help="write every package's rank to this file")
options = options.parse_args()
damping = 0.85


def read_links(path):
    """The packages' names, and their dependencies as pairs of numbers, by source."""
    names, needs = set(), set()
    for line in open(path, encoding="utf-8", errors="replace"):
        field, _, value = line.partition(": ")
        if field == "Package":
            name = value.strip()
            names.add(name)
        elif field in ("Depends", "Pre-Depends"):
            needs.update((name, re.match(r" *([^ :(]*)", other.strip())[1]) for other in re.split(r"[,|]", value))
    number = {name: n for n, name in enumerate(sorted(names))}
    return list(number), np.array(sorted((number[a], number[b]) for a, b in needs if b in number and a != b))


def rank_part(mine):
    """The work of a thread, with its part of the links."""
    part, parts = options.rank * options.threads + mine.number, options.world * options.threads
    source, target = links[len(links) * part // parts : len(links) * (part + 1) // parts].T
    sources, of_link = np.unique(source, return_inverse=True)
    share = damping / np.bincount(links[:, 0], minlength=len(names))[sources]
    passed_on = np.zeros(len(sources))

    def iterate(passed_on):
        rank = 1 - damping + mine.read_batch("ranks", sources)
        mine.update_batch("ranks", target, (share * (rank - passed_on))[of_link])
        mine.clock()
        return rank

    with mine.virtual():
        iterate(passed_on)
    for _ in range(options.iterations):
        passed_on = iterate(passed_on)


names, links = read_links(options.packages)
table = Table("ranks", len(names), dtype="float64", fixed=True)  # what each has more than 1 - damping
job = {"server": options.server, "job": options.job, "world_size": options.world, "rank": options.rank}
with Store([table], threads=options.threads, on_loss="fail", **job) as store:
    store.run(rank_part)
    ranks = store.table("ranks") + (1 - damping)
ranks /= ranks.sum()
if options.rank == 0:
    print(f"{len(names)} packages, {len(links)} dependencies")
    for n in np.argsort(-ranks, kind="stable")[:5]:
        print(f"{names[n]:<24} {ranks[n]:.6f}")
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            file.writelines(f"{name} {rank:.17g}\n" for name, rank in zip(names, ranks))
