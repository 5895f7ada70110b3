#!/usr/bin/env python3
"""pagerank, mf and lda over files that a user may have, each in a process that is alone and starts its own box: the
outcome is that of NumPy over the same file, and a file that is none is refused with its line.

    own_files_test.py PHUB PAGERANK MF LDA
"""
import os
import random
import shutil
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
    both = [link for a, b, w in links for link in ((a, b, w), (b, a, w))]
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
    # Without a program for its box beside it.
    shutil.copy(pagerank, folder.file("alone/pagerank"))
    refused(["there is no ", "--server HOST:PORT"], folder.file("alone/pagerank"), "--links", folder.file("links"))


# ---- mf

def error_in(said):
    return float(said.split("held out: error ")[1].split()[0])


def model_in(folder, name):
    """(mean, vectors of rows, of columns)"""
    words = [line.split(" ") for line in folder.lines(name)]
    assert words[0][0] == "mean"
    vectors = [{line[1]: numpy.array(line[2:], float) for line in words if line[0] == kind} for kind in ("row", "column")]
    return float(words[0][1]), *vectors


def ratings_are_predicted(folder):
    noise, width = 0.1, 3
    draw = numpy.random.default_rng(SEED)
    users, items = draw.normal(0, 1, (80, width)), draw.normal(0, 1, (50, width))
    cells = [(u, i, 3 + users[u] @ items[i] + draw.normal(0, noise)) for u in range(80) for i in range(50) if draw.random() < 0.6]
    unseen = [(u, i) for u in range(80) for i in range(50) if (u, i) not in {cell[:2] for cell in cells}]
    ratings = folder.file("ratings.csv", "userId,movieId,rating,timestamp\r\n" + "".join(f"{u + 1},{i + 1},{v},9\r\n" for u, i, v in cells))
    pairs = folder.file("pairs", "".join(f"{u + 1}\t{i + 1}\n" for u, i in unseen) + "nobody 1")
    out, predictions = folder.file("model"), folder.file("predictions")
    common = ["--width", str(width), "--lambda", "0.001", "--iterations", "60", "--seed", str(SEED), "--test-share", "0.2"]
    asked = ["--out", out, "--predict", pairs, "--predictions", predictions]

    def check(words):
        """The predictions are those of the model, and near what was rated without noise."""
        mean, of_rows, of_columns = model_in(folder, "model")
        found = [line.split(" ") for line in folder.lines("predictions")]
        assert found.pop()[:2] == ["nobody", "1"] and "1 of them have a name" in words and len(found) == len(unseen), words
        for (u, i), (user, item, value) in zip(unseen, found):
            assert (user, item) == (str(u + 1), str(i + 1))
            assert abs(float(value) - (mean + of_rows[user] @ of_columns[item])) < 1e-9
        value = numpy.array([float(line[2]) for line in found])
        want = numpy.array([3 + users[u] @ items[i] for u, i in unseen])
        error = float(numpy.sqrt(numpy.mean((value - want) ** 2)))
        assert error < 2 * noise, f"PHUB_SEED={SEED}: {error}"  # that of the mean is above 1
        return value

    said = run(mf, "--in", ratings, *common, *asked)
    first = check(said)
    assert 0.5 * noise < error_in(said) < 2 * noise, f"PHUB_SEED={SEED}: {said}"
    written = folder.lines("predictions")
    run(mf, "--model", out, *asked[2:])  # the model alone
    assert folder.lines("predictions") == written
    # scipy's format has the same cells in the same order.
    matrix = folder.file("ratings.mtx", "%%MatrixMarket matrix coordinate real general\n%\n" + f"80 50 {len(cells)}\n" +
                         "".join(f"{u + 1} {i + 1} {v}\n" for u, i, v in cells))
    again = run(mf, "--in", matrix, *common, *asked)
    assert error_in(again) == error_in(said), (SEED, said, again)
    with box_of(phub, folder.path) as address:
        said = run_ranks([mf, "--server", address, "--in", ratings, *common, *asked, "--threads", "2"], 2, LIMIT_S)[0][0]
    assert numpy.abs(check(said) - first).max() < 1e-4, SEED
    said = run(mf, "--in", ratings, *common[:-2], "--test-share", "0", *asked)
    assert " 0 held out" in said and "held out: error" not in said, said
    check(said)


def ratings_that_are_none(folder):
    good = "".join(f"u{n % 7} i{n % 5} {n % 3}\n" for n in range(35))
    for text, *words in (("a b 1\na b nan\n", "ratings, line 2", "finite number"), ("", "has no lines"), ("a b 1\na b\n", "line 2"),
                         ("a b 1\n", "--test-share 0"), (good + "u i 1e999", "line 36")):
        refused(["mf: ", *words], mf, "--in", folder.file("ratings", text))
    refused(["kept.mtx", "line 3: entry 0, 1"], mf, "--in", folder.file("kept.mtx", "%%MatrixMarket matrix coordinate real general\n1 1 1\n0 1 1\n"))
    pairs = folder.file("pairs", "u1 i1\nu1\n")
    asked = ["--predict", pairs, "--predictions", folder.file("predictions")]
    refused(["pairs, line 2: 'u1' is not a row and a column"], mf, "--in", folder.file("ratings", good), *asked)
    folder.file("pairs", "u1 i1\n")
    for text, *words in (("", "line 1"), (good, "line 1", "mf --out"), ("mean 1\nrow a 1 2\ncolumn b 1\n", "line 3", "1 numbers"),
                         ("mean 1\nrow a 1 x\n", "line 2", "'x'"), ("mean 1\nrow a 1\n", "cut off"), ("mean nan\n", "line 1"),
                         ("mean 1\nrow a 1\nrow a 1\n", "line 3", "twice")):
        refused(["model", *words], mf, "--model", folder.file("model", text), *asked)


# ---- lda

SUBJECTS = {"sea": ["ship", "wave", "sail", "anchor", "harbour", "mast", "tide"],
            "bread": ["flour", "oven", "knead", "yeast", "crust", "dough", "bäcker"],
            "stars": ["orbit", "planet", "comet", "lens", "galaxy", "moon", "astronomy"]}


def document_of(subject, draw, words=60):
    return [draw.choice(SUBJECTS[subject]) for _ in range(words)]


def model_of(folder, name):
    """(alpha, beta, {word: counts})"""
    head, *lines = [line.split(" ") for line in folder.lines(name)]
    assert head[:3] == ["#", "lda", "alpha"] and head[4] == "beta", head
    return float(head[3]), float(head[5]), {word: numpy.array(counts, float) for word, *counts in lines}


def mixture_by_numpy(counted, model):
    """Shares of topics of a document {word: times}, by expectation maximisation."""
    alpha, beta, counts = model
    words = [word for word in counted if word in counts]
    sums = sum(counts.values())
    likely = numpy.array([(counts[word] + beta) / (sums + beta * len(counts)) for word in words])
    times = numpy.array([counted[word] for word in words])
    shares = numpy.full(len(sums), 1 / len(sums))
    for _ in range(2000):
        shares = alpha + (times[:, None] * likely * shares / (likely @ shares)[:, None]).sum(0)
        shares /= shares.sum()
    return shares


def topics_are_found(folder):
    seed = 1  # with others sampling may end with two subjects in a topic
    draw = random.Random(seed)
    subjects = [list(SUBJECTS)[n % 3] for n in range(45)]
    documents = [document_of(subject, draw) for subject in subjects]
    # A folder; upper case, punctuation and CRLF do not matter.
    for n, words in enumerate(documents):
        folder.file(f"texts/{n:02}.txt", "\r\n".join(f"{word.upper()}, a of…" for word in words) + "".join(f"\nthe {n}" for _ in range(3)))
    folder.file("texts/readme.md", "not a document")
    new = [(subject, document_of(subject, draw, 30)) for subject in SUBJECTS]
    for subject, words in new:
        folder.file(f"new/{subject}.txt", " ".join(words) + " never seen")
    common = ["--topics", "3", "--iterations", "60", "--seed", str(seed)]
    out, top, inferred = folder.file("model"), folder.file("top"), folder.file("inferred")
    chosen = ["--most-documents", "0.5"]  # each word is in a third
    asked = ["--out", out, "--top-words", top, "--top", "7"]

    def check(names=None):
        """The topics' seven words are a subject's each. Returns {subject: topic}."""
        found = {}
        for number, line in enumerate(folder.lines("top")):
            head, words = line.split(": ")
            assert head.startswith(f"topic {number} 0."), line
            words = [names[int(word)] if names else word for word in words.split(" ")[::2]]
            subject = next(subject for subject, own in SUBJECTS.items() if words[0] in own)
            assert set(words) == set(SUBJECTS[subject]), line
            found[subject] = number
        assert len(found) == 3, found
        return found

    def check_inferred(said):
        model = model_of(folder, "model")
        assert sum(counts.sum() for counts in model[2].values()) == 45 * 60
        topics = check()
        lines = dict(line.split(" ", 1) for line in said)
        assert sorted(lines) == sorted(f"{subject}.txt" for subject in SUBJECTS)
        for subject, words in new:
            shares = {int(each.split(":")[0]): float(each.split(":")[1]) for each in lines[f"{subject}.txt"].split(" ")}
            want = mixture_by_numpy({word: words.count(word) for word in words}, model)
            assert max(shares, key=shares.get) == topics[subject] and shares[topics[subject]] > 0.9, lines
            assert all(abs(want[topic] - share) < 1e-5 for topic, share in shares.items()), (want, shares)

    run(lda, "--in", folder.file("texts"), *chosen, *common, *asked, "--infer", folder.file("new"), "--inferred", inferred)
    check_inferred(folder.lines("inferred"))
    said = run(lda, "--model", out, "--infer", folder.file("new"))
    assert said.splitlines()[:3] == folder.lines("inferred") and "the model has 90 of their 96 words" in said, said
    # A document in each line; in several processes; Blei's and gensim's counts, with their words and without.
    run(lda, "--in", folder.file("lines", "\n".join(map(" ".join, documents))), *chosen, *common, *asked)
    check()
    with box_of(phub, folder.path) as address:
        run_ranks([lda, "--server", address, "--in", folder.file("lines"), *chosen, *common, *asked, "--threads", "2"], 2, LIMIT_S)
        check()
    names = sorted({word for words in documents for word in words})
    counts = [{names.index(word): words.count(word) for word in sorted(set(words))} for words in documents]
    ldac = folder.file("corpus.ldac", "".join(f"{len(of)} " + " ".join(f"{w}:{n}" for w, n in of.items()) + "\n" for of in counts))
    run(lda, "--in", ldac, *common, *asked)
    check(names)
    entries = [f"{d + 1} {w + 1} {n}\n" for d, of in enumerate(counts) for w, n in of.items()]
    matrix = folder.file("corpus.mtx", f"%%MatrixMarket matrix coordinate real general\n45 {len(names)} {len(entries)}      \n" + "".join(entries))
    words = folder.file("words", "45\n" + "".join(f"{n}\t{word}\t9\n" for n, word in enumerate(names)))
    # The vocabulary is of the one that has counts.
    run(lda, "--in", matrix, *common, *asked, "--vocabulary", words, "--infer", folder.file("new"), "--inferred", inferred)
    check_inferred(folder.lines("inferred"))
    for learnt in (["--in", folder.file("texts"), *chosen, *common], ["--model", out]):
        said = run(lda, *learnt, "--vocabulary", words, "--infer", matrix, "--inferred", inferred)
        assert "the model has 2700 of their 2700 words" in said and len(folder.lines("inferred")) == 45, said
    folder.file("corpus.vocab", "".join(f"{word}\r\n" for word in names))
    for corpus in ldac, matrix:
        run(lda, "--in", corpus, *common, *asked)
        check()


def texts_that_are_none(folder):
    head = "%%MatrixMarket matrix coordinate real general\n"
    folder.file("corpus.vocab", "one\ntwo\n")
    for name, text, *words in (
            ("corpus.ldac", "1 0:1\n2 0:1\n", "corpus.ldac, line 2", "it has 1 words, and says 2"),
            ("corpus.ldac", "1 2:1\n", "line 1", "has no word 2"), ("corpus.ldac", "1 0:0.5\n", "line 1", "how often"),
            ("corpus.ldac", "1 0:99999999999\n", "line 1", "how often"), ("corpus.ldac", "x\n", "line 1"),
            ("corpus.ldac", "1 0:nan\n", "line 1", "how often"), ("corpus.ldac", "1 0-1\n", "line 1", "word:count"),
            ("corpus.mtx", head + "1 2 1\n1 1 0.25\n", "line 3", "tf-idf"), ("corpus.mtx", head + "1 2 1\n1 1 -1\n", "line 3"),
            ("corpus.mtx", head + "4000000000 2 1\n4000000000 1 1\n", "are rows documents?"),
            ("text", "", "0 documents"), ("text", "one two\n", "--least-documents"), ("folder/a.md", "one", "of which each is a document")):
        path = folder.file(name, text)
        refused(["lda: ", *words], lda, "--in", os.path.dirname(path) if name.startswith("folder") else path)
    latin = folder.file("latin")
    with open(latin, "wb") as file:
        file.write(b"one\ncaf\xe9 two\n")
    refused(["latin, line 2", "iconv"], lda, "--in", latin)
    for texts in (["--in", folder.file("text")], ["--in", folder.file("text"), "--infer", folder.file("text")],
                  ["--model", folder.file("model"), "--infer", folder.file("text")]):
        refused(["--vocabulary is for"], lda, *texts, "--vocabulary", folder.file("corpus.vocab"))
    good = folder.file("text", "one two\n")
    for text, *words in (("", "line 1", "lda --out"), ("one 1 2\n", "line 1"), ("# lda alpha 1 beta 0\n", "line 1"),
                         ("# lda alpha 1 beta 1\none 1 2\ntwo 1\n", "line 3"), ("# lda alpha 1 beta 1\none 1 -2\n", "line 2"),
                         ("# lda alpha 1 beta 1\n", "no words"), ("# lda alpha 1 beta 1\na 1\na 1\n", "line 3")):
        refused(["model", *words], lda, "--model", folder.file("model", text), "--infer", good)


def main():
    with tempfile.TemporaryDirectory() as path:
        for test in (ranks_are_those_of_numpy, links_that_are_none, ratings_are_predicted, ratings_that_are_none,
                     topics_are_found, texts_that_are_none):
            test(Folder(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
