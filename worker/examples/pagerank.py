#!/usr/bin/python3
"""Ranks Debian's packages by their dependencies, as pagerank.cc does, with NumPy and phub.iterstore.

    apt-cache dumpavail >packages
    phub run -n 2 -- python pagerank.py packages

Every thread has a part of the links, and passes on over each what its source's rank has changed by.
"""
import argparse, re
import numpy as np
from phub.iterstore import Store, Table

options = argparse.ArgumentParser(description="Ranks Debian's packages by their dependencies.")
options.add_argument("packages", help="what `apt-cache dumpavail` prints")
options.add_argument("--threads", help="of each process", type=int, default=2)
options.add_argument("--iterations", type=int, default=150)
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
    part, parts = store.rank * store.threads + mine.number, store.world_size * store.threads
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
with Store([table], threads=options.threads, job="pagerank", on_loss="fail") as store:
    store.run(rank_part)
    ranks = store.table("ranks") + (1 - damping)
    ranks /= ranks.sum()
    first = store.rank == 0
if first:
    print(f"{len(names)} packages, {len(links)} dependencies")
    for n in np.argsort(-ranks, kind="stable")[:5]:
        print(f"{names[n]:<24} {ranks[n]:.6f}")
if first and options.out:
    with open(options.out, "w", encoding="utf-8") as file:
        file.writelines(f"{name} {rank:.17g}\n" for name, rank in zip(names, ranks))
