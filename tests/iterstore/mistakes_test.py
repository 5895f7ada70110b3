#!/usr/bin/env python3
"""What the programs with a store refuse, and that they say why: options that are no numbers, files that cannot be
read or written, an outcome that is not finite, ranks that were started with other options, and several without --rank.

    mistakes_test.py PHUB PAGERANK MF LDA
"""
import os
import subprocess
import sys
import tempfile

from programs import box_of, one_is_refused, run_ranks

LIMIT_S = 100
phub, pagerank, mf, lda = sys.argv[1:]

with tempfile.TemporaryDirectory() as folder, box_of(phub, folder) as address:
    def file(name, text=None):
        path = os.path.join(folder, name)
        if text is not None:
            with open(path, "w", encoding="utf-8") as out:
                out.write(text)
        return path

    cells = "".join(f"{row} {column} {row * column % 5}\n" for row in range(12) for column in range(12))
    common = ["--server", address, "--iterations", "3"]
    RANKS = [pagerank, *common, "--packages", file("packages", "Package: a\nDepends: b\n\nPackage: b\nDepends: a\n")]
    FACTORS = [mf, *common, "--cells", file("cells", cells)]
    TOPICS = [lda, *common, "--least-documents", "1", "--most-documents", "1", "--texts",
              file("texts", "one two three\nfour five six\n")]

    def given(command, option, value):
        """The command with this value of the option."""
        if option not in command:
            return [*command, option, value]
        at = command.index(option) + 1
        return [*command[:at], value, *command[at + 1:]]

    def refused(command, *words):
        done = subprocess.run([*command, "--world", "1", "--rank", "0"], capture_output=True, text=True,
                              timeout=LIMIT_S, check=False)
        said = done.stdout + done.stderr
        assert done.returncode > 0 and all(word in said for word in words) and len(said) < 500, (command, words, said)

    for command, option in ((RANKS, "--damping"), (FACTORS, "--lambda"), (FACTORS, "--rate"), (TOPICS, "--alpha"),
                            (TOPICS, "--beta"), (TOPICS, "--most-documents")):
        for value in "nan", "inf", "-1":
            refused([*command, option, value], option, f"'{value}' is not a number from")
    refused([*FACTORS, "--seed", "-1"], "--seed")

    refused([*FACTORS, "--method", "sgd", "--rate", "1000", "--job", "far"], "not finite", "--rate")
    for value in "nan", "inf":
        refused([mf, *common, "--cells", file("other", f"a b {value}\n{cells}")], "other, line 1")
    run_ranks([mf, *common, "--job", "header", "--cells", file("other", f"user film stars\n{cells}")], 1, LIMIT_S)

    for command, option in (RANKS, "--packages"), (FACTORS, "--cells"), (FACTORS, "--packages"), (TOPICS, "--texts"):
        if option == "--packages":
            command = command[:5]
        refused(given(command, option, folder), folder, "no files .txt" if command == TOPICS else "Is a directory")
        refused(given(command, option, file("none")), file("none"), "No such file")

    for command in RANKS, TOPICS:
        for out, why in ((file("none/out"), "No such file"), (folder, "Is a directory"), (file("cells/out"), "Not a directory")):
            refused([*given(command, "--iterations", "1000000"), "--out", out], out, why)
    kept = file("kept", "as it was")
    refused([*given(RANKS, "--packages", file("none")), "--out", kept], "none")
    assert open(kept, encoding="utf-8").read() == "as it was"

    def differ(job, one, other, *words):
        one_is_refused([[*command, "--job", job] for command in (one, other)], LIMIT_S, *words)

    for n, (command, option, value, name) in enumerate((
            (RANKS, "--iterations", "4", "iterations"), (RANKS, "--damping", "0.5", "damping"),
            (RANKS, "--threads", "2", "threads"), (RANKS, "--gather", "never", "gather"),
            (FACTORS, "--seed", "5", "seed"), (FACTORS, "--method", "sgd", "method"),
            (FACTORS, "--lambda", "0.5", "lambda"), (FACTORS, "--rate", "0.5", "rate"),
            (FACTORS, "--clocks", "5", "clocks"), (TOPICS, "--seed", "5", "seed"),
            (TOPICS, "--alpha", "0.5", "alpha"), (TOPICS, "--beta", "0.5", "beta"),
            (TOPICS, "--least-documents", "0", "least-documents"), (TOPICS, "--most-documents", "0.5", "most-documents"))):
        differ(f"differ{n}", command, given(command, option, value), f"'{name} {value}'")
    # Of this graph nodes and links are as many with these options.
    LINKS = [pagerank, *common, "--links", file("links", "1 0\n0 1\n")]
    for name in "numbered", "undirected":
        differ(name, LINKS, [*LINKS, f"--{name}"], f"'{name} false'", f"'{name} true'")
    # Files of as many lines, with other words.
    for n, (command, option, text) in enumerate((
            (RANKS, "--packages", "Package: a\nDepends: c\n\nPackage: c\nDepends: a\n"),
            (FACTORS, "--cells", cells.replace("3 3 4", "3 3 5")), (TOPICS, "--texts", "one two tree\nfour five six\n"))):
        differ(f"files{n}", command, given(command, option, file(f"other{n}", text)), "'file ")
    # A process that is alone needs no --rank; several do.
    for n, command in enumerate((RANKS, FACTORS, TOPICS)):
        for world, status, words in (([], 0, ""), (["--world", "2"], 1, "its rank is -1")):
            done = subprocess.run([*command, "--job", f"alone{n}", *world], capture_output=True, text=True, timeout=LIMIT_S,
                                  check=False)
            assert done.returncode == status and words in done.stderr, (command, world, done)
        # Half of what a launcher says is no word of being alone.
        done = subprocess.run([*command, "--job", f"half{n}"], env={**os.environ, "RANK": "1"}, capture_output=True,
                              text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 1 and "RANK=1 without WORLD_SIZE" in done.stderr, (command, done)

    differ("programs", RANKS, FACTORS, "'program pagerank'", "'program mf'")
    for n, command in enumerate((RANKS, FACTORS, TOPICS)):
        run_ranks([*command, "--job", f"same{n}"], 2, LIMIT_S)
