#!/usr/bin/env python3
"""pagerank, mf and lda over files that a user may have, each in a process that is alone and starts its own box: the
outcome is that of NumPy over the same file, and a file that is none is refused with its line.

    own_files_test.py PHUB PAGERANK MF LDA
"""
import os
import random
import subprocess
import sys
import tempfile

from programs import box_of, run_ranks

LIMIT_S = 120
SEED = int(os.environ.get("PHUB_SEED", random.randrange(2**31)))
phub, pagerank, mf, lda = sys.argv[1:]
try:
    import numpy
except ImportError as missing:
    print(f"skipped: {missing} (scripts/setup --test installs python3-numpy)")
    sys.exit(77)


class Folder:
    def __init__(self, path):
        self.path = path

    def file(self, name, text=None):
        path = os.path.join(self.path, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if text is not None:
            with open(path, "w", encoding="utf-8", newline="") as out:
                out.write(text)
        return path

    def lines(self, name):
        with open(self.file(name), encoding="utf-8") as file:
            return file.read().splitlines()


def run(command, *arguments, status=0):
    """What it says. It names neither a rank nor a server."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PHUB_")}
    done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert done.returncode == status, (command, arguments, done)
    return done.stdout + done.stderr


def refused(words, command, *arguments):
    said = run(command, *arguments, status=1)
    assert all(word in said for word in words) and len(said) < 600, (arguments, words, said)


# ---- pagerank

def ranks_by_numpy(links, damping):
    """{node: rank}, of links (from, to, weight) that may come several times; nodes without links give theirs to all."""
    names = list(dict.fromkeys(node for a, b, _ in links for node in (a, b)))
    number = {name: n for n, name in enumerate(names)}
    matrix = numpy.zeros((len(names), len(names)))
    for a, b, weight in links:
        matrix[number[b], number[a]] += weight
    sums = matrix.sum(0)
    matrix[:, sums > 0] /= sums[sums > 0]
    matrix[:, sums == 0] = 1 / len(names)
    count = len(names)
    ranks = numpy.linalg.solve(numpy.eye(count) - damping * matrix, numpy.full(count, (1 - damping) / count))
    return dict(zip(names, ranks / ranks.sum()))


def ranks_in(folder, name):
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in folder.lines(name)}


def same_ranks(found, want):
    assert found.keys() == want.keys(), (SEED, found.keys() ^ want.keys())
    apart = sum(abs(found[node] - want[node]) for node in want)
    assert apart < 1e-6, f"PHUB_SEED={SEED}: {apart}"


def ranks_are_those_of_numpy(folder):
    draw = random.Random(SEED)
    nodes = [f"node{n}é" for n in range(120)]
    links = [(draw.choice(nodes[:90]), draw.choice(nodes), draw.choice([0.5, 1, 2.25, 7])) for _ in range(900)]
    links += links[:5]
    text = "# a comment\r\n" + "\r\n".join(f"{a}\t{b} {weight}" for a, b, weight in links)
    out = folder.file("ranks")
    for name, written, arguments, damping in (
            ("links.txt", text, [], 0.85), ("links.txt", text, ["--damping", "0.99", "--threads", "2"], 0.99),
            ("links.csv", "source,target,weight\n" + "".join(f"{a},{b},{w}\n" for a, b, w in links), [], 0.85)):
        run(pagerank, "--links", folder.file(name, written), "--out", out, *arguments)
        same_ranks(ranks_in(folder, "ranks"), ranks_by_numpy(links, damping))
    both = [link for a, b, w in links for link in ((a, b, w), (b, a, w) if a != b else (a, b, 0))]
    run(pagerank, "--links", folder.file("links.txt"), "--undirected", "--out", out)
    same_ranks(ranks_in(folder, "ranks"), ranks_by_numpy(both, 0.85))
    # With a box, in several processes.
    with box_of(phub, folder.path) as address:
        run_ranks([pagerank, "--server", address, "--links", folder.file("links.txt"), "--out", out], 2, LIMIT_S)
        same_ranks(ranks_in(folder, "ranks"), ranks_by_numpy(links, 0.85))


def links_that_are_none(folder):
    for text, *words in (("a b\na\n", "links, line 2"), ("a b nan\n", "line 1", "'nan' is not a weight"), ("", "has no links"),
                         ("a b -1", "line 1", "'-1' is not a weight"), ("a b 1 2", "line 1", "more follows")):
        refused(["pagerank: ", *words], pagerank, "--links", folder.file("links", text))
    refused(["Without --numbered"], pagerank, "--numbered", "--links", folder.file("links", "0 4000000000\n"))
    said = run(pagerank, "--links", folder.file("links", "a b\nb a\n"), "--damping", "0.9", "--iterations", "10")
    assert "after 10 iterations the ranks may be 6 apart" in said, said
    run(pagerank, "--links", folder.file("links", "a b 0\n"), "--out", folder.file("ranks"))
    same_ranks(ranks_in(folder, "ranks"), {"a": 0.5, "b": 0.5})


def main():
    with tempfile.TemporaryDirectory() as path:
        for test in ranks_are_those_of_numpy, links_that_are_none:
            test(Folder(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
