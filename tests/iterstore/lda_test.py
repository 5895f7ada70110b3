#!/usr/bin/env python3
"""lda over the chapters of the Bible: with 1, 2 and 3 processes a perplexity of held-out chapters near that of expectation
maximisation in NumPy with as many topics, and within 2% of gensim's, with --gensim; by one evaluator.

    lda_test.py PHUB LDA [--gensim]
"""
import os
import random
import re
import subprocess
import sys
import tempfile

from programs import box_of, run_ranks

MOST = {"NumPy": 1.2, "gensim": 1.02, "one process": 1.08}
LIMIT_S, TOPICS, ALPHA, BETA, ITERATIONS = 100, 20, 0.1, 0.01, 80
SEED = int(os.environ.get("PHUB_SEED", random.randrange(2**31)))
phub, lda = sys.argv[1:3]
try:
    import numpy
except ImportError as missing:
    print(f"skipped: {missing} (scripts/setup --test installs python3-numpy)")
    sys.exit(77)


def chapters():
    """A line each; nothing, where the text is not installed."""
    try:
        text = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    found = {}
    for chapter, verse in re.findall(r"^([1-3]?[A-Z][A-Za-z]*\d+):\d+ (.*)$", text, re.MULTILINE):
        found.setdefault(chapter, []).append(verse)
    return [" ".join(verses) for verses in found.values()]


def counts_of(documents, words):
    """How often each has each word."""
    number = {word: n for n, word in enumerate(words)}
    counts = numpy.zeros((len(documents), len(words)))
    for d, document in enumerate(documents):
        for word in re.findall("[a-z]+", document.lower()):
            if word in number:
                counts[d, number[word]] += 1
    return counts


def mixtures(counts, topics, iterations):
    """Of each document, by expectation maximisation with these topics."""
    theta = numpy.full((len(counts), len(topics)), 1 / len(topics))
    for _ in range(iterations):
        theta *= (counts / (theta @ topics + 1e-300)) @ topics.T
        theta += ALPHA
        theta /= theta.sum(1, keepdims=True)
    return theta


def perplexity(topics, halves):
    """Of the second half of each document, with the mixture that its first half has."""
    first, second = halves
    likely = mixtures(first, topics, 50) @ topics
    return numpy.exp(-(second * numpy.log(likely)).sum() / second.sum())


def expectation_maximisation(counts):
    draw = numpy.random.default_rng(SEED)
    topics = draw.dirichlet(numpy.ones(counts.shape[1]), TOPICS)
    theta = draw.dirichlet(numpy.ones(TOPICS), len(counts))
    for _ in range(ITERATIONS):
        ratio = counts / (theta @ topics + 1e-300)
        theta, topics = theta * (ratio @ topics.T) + ALPHA, topics * (theta.T @ ratio) + BETA
        theta /= theta.sum(1, keepdims=True)
        topics /= topics.sum(1, keepdims=True)
    return topics


def gensim_topics(counts):
    from gensim.models import LdaModel
    corpus = [[(int(w), int(row[w])) for w in numpy.flatnonzero(row)] for row in counts]
    model = LdaModel(corpus, TOPICS, {w: str(w) for w in range(counts.shape[1])}, alpha=[ALPHA] * TOPICS, eta=BETA,
                     passes=40, iterations=200, random_state=SEED % 2**32)
    return model.get_topics()


def run(folder, address, world, *arguments):
    out = os.path.join(folder, "counts")
    command = [lda, "--server", address, "--in", os.path.join(folder, "texts"), "--seed",
               str(SEED), "--topics", str(TOPICS), "--iterations", str(ITERATIONS), "--out", out,
               "--job", "-".join(["lda", str(world), *arguments]).replace("--", ""), *arguments]
    run_ranks(command, world, LIMIT_S)
    lines = [line.split() for line in open(out, encoding="utf-8")][1:]
    counts = numpy.array([[int(count) for count in line[1:]] for line in lines], float).T
    return [line[0] for line in lines], counts


def all_of(folder, address):
    documents = chapters()
    if len(documents) != 1189:
        print("skipped: the package bible-kjv is not installed (scripts/setup --test installs it)")
        return 77
    random.Random(SEED).shuffle(documents)
    held_out, known = documents[:120], documents[120:] if "--gensim" in sys.argv else documents[120:520]
    with open(os.path.join(folder, "texts"), "w", encoding="utf-8") as file:
        file.writelines(document + "\n" for document in known)
    want = None
    for world, arguments in ((1, []), (2, ["--threads", "2"]), (2, ["--consistency", "ssp", "--slack", "1"]),
                             (3, ["--gather", "never"])):
        words, counts = run(folder, address, world, *arguments)
        if want is None:
            train = counts_of(known, words)
            tokens = [re.findall("[a-z]+", document.lower()) for document in held_out]
            halves = [counts_of([" ".join(each[half::2]) for each in tokens], words) for half in (0, 1)]
            want = {"NumPy": perplexity(expectation_maximisation(train), halves)}
            if "--gensim" in sys.argv:
                want["gensim"] = perplexity(gensim_topics(train), halves)
        # Every word of every document has one topic, whoever drew it.
        assert (counts.sum(0) == train.sum(0)).all(), f"PHUB_SEED={SEED}: {world} processes {arguments}"
        topics = (counts + BETA) / (counts + BETA).sum(1, keepdims=True)
        found = perplexity(topics, halves)
        print(f"# {world} processes {' '.join(arguments)}: perplexity {found:.1f}; " +
              ", ".join(f"{whose} {number:.1f}" for whose, number in want.items()))
        # Expectation maximisation finds what is likeliest with the evaluator's own mixtures; sampling draws a state.
        assert all(found < MOST[whose] * number for whose, number in want.items()), f"PHUB_SEED={SEED}: {found}, {want}"
        want.setdefault("one process", found)
    return 0


def main():
    with tempfile.TemporaryDirectory() as folder:
        with box_of(phub, folder) as address:
            return all_of(folder, address)


if __name__ == "__main__":
    sys.exit(main())
