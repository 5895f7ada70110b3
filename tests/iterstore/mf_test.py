#!/usr/bin/env python3
"""mf over packages and their tags: with 1, 2 and 4 processes, als ends where alternating least squares in NumPy
does, and sgd within 3% of its error on what was held out; a file of ratings, and files that are none.

    mf_test.py PHUB MF
"""
import os
import random
import re
import subprocess
import sys
import tempfile

from programs import box_of, run_ranks

LIMIT_S, WIDTH, LAMBDA = 100, 8, 0.05
SEED = int(os.environ.get("PHUB_SEED", random.randrange(2**31)))
phub, mf = sys.argv[1:]
try:
    import numpy
except ImportError as missing:
    print(f"skipped: {missing} (scripts/setup --test installs python3-numpy)")
    sys.exit(77)


def tags_of(text, zeros):
    """Lines "package tag 1", and as many times `zeros` others with 0."""
    ones = set()
    for package in re.split(r"\n\n+", text):
        name = re.search(r"^Package: (.*)$", package, re.MULTILINE)
        tags = re.search(r"^Tag: (.*(?:\n .*)*)$", package, re.MULTILINE)
        if name and tags:
            ones |= {(name[1], tag.strip()) for tag in tags[1].split(",") if tag.strip()}
    draw = random.Random(SEED)
    rows, columns = (sorted({one[way] for one in ones}) for way in (0, 1))
    others = set()
    while len(others) < zeros * len(ones):
        cell = draw.choice(rows), draw.choice(columns)
        if cell not in ones:
            others.add(cell)
    return [(*cell, 1) for cell in sorted(ones)] + [(*cell, 0) for cell in sorted(others)]


def mixed(h):
    mask = (1 << 64) - 1
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & mask
    h = (h ^ h >> 27) * 0x94D049BB133111EB & mask
    return h ^ h >> 31


def least_squares(cells, iterations):
    """(error of the cells, of those held out), of all rows and columns in one process."""
    rows, columns = ({name: n for n, name in enumerate(dict.fromkeys(cell[way] for cell in cells))} for way in (0, 1))
    at = numpy.array([(rows[r], columns[c]) for r, c, _ in cells])
    values = numpy.array([v for *_, v in cells], float)
    held = numpy.array([mixed(mixed(SEED + 1) ^ (int(r) << 32 | int(c))) % 10**6 < 10**5 for r, c in at])
    (known, there), (known_values, there_values) = (at[~held], at[held]), (values[~held], values[held])
    mean = known_values.mean()
    draw = numpy.random.default_rng(SEED)
    x, y = numpy.zeros((len(rows), WIDTH)), draw.normal(0, 0.1, (len(columns), WIDTH))

    def solve(mine, other, way):
        order = numpy.argsort(known[:, way], kind="stable")
        ends = numpy.searchsorted(known[order, way], numpy.arange(len(mine) + 1))
        for n in range(len(mine)):
            cut = order[ends[n]:ends[n + 1]]
            v = other[known[cut, 1 - way]]
            left = v.T @ v + LAMBDA * len(cut) * numpy.eye(WIDTH)
            mine[n] = numpy.linalg.solve(left, v.T @ (known_values[cut] - mean)) if len(cut) else 0

    for _ in range(iterations):
        solve(x, y, 0)
        error = error_of(known, known_values - mean, x, y)
        solve(y, x, 1)
    return error, error_of(there, there_values - mean, x, y)


def error_of(at, values, x, y):
    return numpy.sqrt(numpy.mean((values - numpy.einsum("ij,ij->i", x[at[:, 0]], y[at[:, 1]])) ** 2))


def run(address, world, *arguments, expect=0):
    command = [mf, "--server", address, "--width", str(WIDTH), "--lambda", str(LAMBDA),
               "--seed", str(SEED), "--job", re.sub("[^a-z0-9]+", "-", "-".join(["mf", str(world), *arguments[2:]])),
               *arguments]
    outputs = run_ranks(command, world, LIMIT_S, expect)
    if expect:
        return outputs[0][1]
    found = [float(number) for number in re.findall("error ([0-9.]+)", outputs[0][0])]
    return found[-2:]  # of the last iteration, and of what was held out


def near(what, found, want, most):
    assert abs(found - want) <= most * want, f"PHUB_SEED={SEED}: {what}: {found} instead of {want}"


def all_of(folder, address):
    with open(os.path.join(folder, "packages"), "wb") as file:
        if subprocess.run(["apt-cache", "dumpavail"], stdout=file, check=False).returncode:
            print("skipped: no apt-cache")
            return 77
    cells = tags_of(open(file.name, encoding="utf-8", errors="replace").read(), 3)
    if len(cells) < 1000:
        print("skipped: apt's package lists have no tags (apt-get update fetches them)")
        return 77
    ratings = os.path.join(folder, "ratings.csv")
    with open(ratings, "w", encoding="utf-8") as file:
        file.write("userId,movieId,rating,timestamp\n")
        file.writelines(f"{row.replace(':', '.')},{column.replace(':', '.')},{value},964982703\n" for row, column, value in cells)
    # Fewer, so that NumPy's loops end soon: of every eighth package.
    kept = {row for n, row in enumerate(sorted({row for row, *_ in cells})) if n % 8 == 0}
    few = [cell for cell in cells if cell[0] in kept]
    part = os.path.join(folder, "part")
    with open(part, "w", encoding="utf-8") as file:
        file.writelines(f"{row.replace(':', '.')}\t{column.replace(':', '.')}\t{value}\n" for row, column, value in few)
    want = least_squares(few, 40)
    one = run(address, 1, "--cells", part, "--iterations", "40")
    near("als, known", one[0], want[0], 0.01)  # they begin with other vectors
    near("als, held out", one[1], want[1], 0.02)
    for world, threads in ((2, 2), (4, 1)):
        found = run(address, world, "--cells", part, "--iterations", "40", "--threads", str(threads))
        near(f"als of {world} processes", found[1], one[1], 1e-4)  # it prints six digits
    sgd = run(address, 2, "--cells", part, "--iterations", "120", "--method", "sgd", "--clocks", "20")
    near("sgd, held out", sgd[1], want[1], 0.03)
    first = run(address, 1, "--cells", ratings, "--iterations", "3")[1]
    for given in ("virtual", "real", "never"):
        found = run(address, 2, "--cells", ratings, "--iterations", "3", "--gather", given)
        near(f"gathered as {given}", found[1], first, 1e-4)
    for text in ("", "a b c\n", "a b 1\na b nan\n", "a b 1\na 2\n"):
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
        said = run(address, 1, "--cells", part, expect=1)
        assert part in said and ("line" in said or "no lines" in said), (text, said)
    print(f"# {len(few)} cells: als {one[1]:.4f} held out, NumPy {want[1]:.4f}; sgd {sgd[1]:.4f}")
    return 0


def main():
    with tempfile.TemporaryDirectory() as folder:
        with box_of(phub, folder) as address:
            return all_of(folder, address)


if __name__ == "__main__":
    sys.exit(main())
