#!/usr/bin/env python3
"""pagerank, in C++ and in Python, over the dependencies of Debian's packages: with 1, 2 and 4 processes
the same ranks as a power iteration in one (NumPy), and as igraph's, where that is installed.

    pagerank_test.py PHUB PAGERANK PAGERANK.PY LIBRARY
"""
import os
import re
import subprocess
import sys
import tempfile

from programs import box_of, run_ranks

LIMIT_S, MOST_L1, DAMPING = 200, 1e-9, 0.85
phub, pagerank, in_python, library = sys.argv[1:]
PACKAGE = os.path.join(os.path.dirname(in_python), "../python")
try:
    import numpy
except ImportError as missing:
    print(f"skipped: {missing} (scripts/setup --test installs python3-numpy)")
    sys.exit(77)


def graph_of(path):
    """Names, and pairs of their numbers; read another way than the program's."""
    text = open(path, encoding="utf-8", errors="replace").read()
    names, needs = [], []
    for package in re.split(r"\n\n+", text):
        name = re.search(r"^Package: (.*)$", package, re.MULTILINE)
        if not name:
            continue
        names.append(name[1])
        for needed in re.findall(r"^(?:Pre-)?Depends: (.*)$", package, re.MULTILINE):
            for other in re.split(r"[,|]", needed):
                needs.append((name[1], re.match(r"\s*([^\s:(]*)", other)[1]))
    names = sorted(set(names))
    number = {name: n for n, name in enumerate(names)}
    links = sorted({(number[a], number[b]) for a, b in needs if b in number and a != b})
    return names, links


def power_iteration(count, links):
    source, target = numpy.array(links).T
    degree = numpy.bincount(source, minlength=count)
    ranks = numpy.full(count, 1 / count)
    for _ in range(300):
        share = numpy.where(degree > 0, ranks / numpy.maximum(degree, 1), 0)
        passed = numpy.bincount(target, weights=share[source], minlength=count)
        ranks = (1 - DAMPING + DAMPING * ranks[degree == 0].sum()) / count + DAMPING * passed
    return ranks


def ranks_in(out):
    lines = [line.split() for line in open(out, encoding="utf-8")]
    return [line[0] for line in lines], numpy.array([float(line[1]) for line in lines])


def run(folder, address, world, *arguments):
    out = os.path.join(folder, "ranks")
    command = [pagerank, "--server", address, "--packages", os.path.join(folder, "packages"),
               "--job", "-".join(["pr", str(world), *arguments]).replace("--", ""), "--out", out, *arguments]
    run_ranks(command, world, LIMIT_S)
    return ranks_in(out)


def run_in_python(folder, world, threads):
    out = os.path.join(folder, "ranks-python")
    environment = {**os.environ, "PHUB_PROGRAM": phub, "PHUB_LIBRARY": library, "PYTHONPATH": PACKAGE,
                   "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "phub", "run", "-n", str(world), "--", sys.executable, in_python,
               os.path.join(folder, "packages"), "--threads", str(threads), "--out", out]
    subprocess.run(command, env=environment, timeout=LIMIT_S, check=True)
    return ranks_in(out)


def main():
    with tempfile.TemporaryDirectory() as folder:
        packages = os.path.join(folder, "packages")
        with open(packages, "wb") as file:
            if subprocess.run(["apt-cache", "dumpavail"], stdout=file, check=False).returncode:
                print("skipped: no apt-cache")
                return 77
        names, links = graph_of(packages)
        if len(links) < 1000:
            print("skipped: apt has no package lists (apt-get update fetches them)")
            return 77
        want = {"a power iteration": power_iteration(len(names), links)}
        try:
            import igraph
            graph = igraph.Graph(n=len(names), edges=links, directed=True)
            want["igraph"] = numpy.array(graph.pagerank(damping=DAMPING))
        except ImportError:
            print("igraph is not installed: not compared with it")

        def check(program, got_names, got):
            assert got_names == names
            for whose, ranks in want.items():
                apart = float(numpy.abs(got - ranks).sum())
                print(f"{program}: {apart:.2g} from {whose}")
                assert apart <= MOST_L1, apart

        with box_of(phub, folder) as address:
            for world, arguments in ((1, []), (2, ["--threads", "3"]), (4, []),
                                     (2, ["--gather", "real"]), (2, ["--gather", "never", "--threads", "2"]),
                                     (3, ["--consistency", "ssp", "--slack", "2"])):
                check(f"{world} processes {' '.join(arguments)}", *run(folder, address, world, *arguments))
        for world, threads in (1, 1), (2, 3):
            check(f"in Python, {world} processes of {threads} threads", *run_in_python(folder, world, threads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
