#!/usr/bin/env python3
"""The networks of the GeePS applications with their parameters in a store: in lock-step, with a rate that is a power
of two, they end with the bits that a job of the box ends with, on every rank; with more devices in a process; after a
checkpoint, too. Out of lock-step they end. Alone, one learns in half of its memory, and has the same bits in the least.

    networks_test.py PHUB DIGITS GEEPS_DIGITS [GEEPS_TEXT GEEPS_VIDEO]
"""
import os
import re
import subprocess
import sys
import tempfile

from programs import box_of, one_is_refused, run_ranks

LIMIT_S = 200
phub, data, digits, *others = sys.argv[1:]
COMMON = ["--lr", "0.25"]
DIGITS = [digits, "--data", data, "--batch", "8", *COMMON]
CASES = {
    "logreg": [*DIGITS, "--model", "logreg"],
    "cnn": [*DIGITS, "--model", "cnn"],
    "mlp, with another rate": [*DIGITS, "--model", "mlp", "--lr-decay", "0.5", "--lr-every", "5"],
    "mlp, with two devices": [*DIGITS, "--model", "mlp", "--devices", "2"],
}
if others:
    text, video = others
    CASES["lstm"] = [text, "--hidden", "16", *COMMON]
    CASES["video"] = [video, "--batch", "4", "--frames", "4", *COMMON]


def digests(outputs):
    found = {digest for out, _ in outputs for digest in re.findall(r"digest ([0-9a-f]{16})", out)}
    assert len(found) == 1, outputs
    return found


def said(outputs, *words):
    for _, errors in outputs:
        assert all(word in errors for word in words), (words, errors)


with tempfile.TemporaryDirectory() as folder, box_of(phub, folder) as server:
    def run(case, job, *options, iterations=12, world=2, expect=0):
        command = [*CASES[case], "--server", server, "--job", job, "--iterations", str(iterations), *options]
        return run_ranks(command, world, LIMIT_S, expect)

    for n, case in enumerate(CASES):
        there, here = digests(run(case, f"box{n}")), digests(run(case, f"store{n}", "--store", "--piece", "4K"))
        assert there == here, (case, there, here)
        print(f"{case}: {here}")

    saved = ["--checkpoint", os.path.join(folder, "cnn.%r"), "--store"]
    run("cnn", "begins", *saved, iterations=5)
    assert digests(run("cnn", "goes_on", *saved, "--resume")) == digests(run("cnn", "again", "--store"))

    alone = subprocess.run([*CASES["cnn"], "--server", server, "--job", "alone", "--store", "--iterations", "1"],
                           capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert alone.returncode == 0 and "rank 0: digest" in alone.stdout, alone  # the only rank needs no --rank

    here = [*CASES["cnn"], "--server", server, "--store", "--job"]
    os.rename(os.path.join(folder, "cnn.0"), os.path.join(folder, "later"))
    run("cnn", "earlier", *saved, iterations=3)
    os.rename(os.path.join(folder, "later"), os.path.join(folder, "cnn.0"))
    one_is_refused([[*here, "apart", *saved[:2], "--resume", "--iterations", "15"]] * 2, LIMIT_S, "'from iteration 12'",
                   "'from iteration 3'")
    one_is_refused([[*here, "seeds"], [*here, "seeds", "--seed", "5"]], LIMIT_S, "'seed 1'", "'seed 5'")

    run("lstm" if others else "cnn", "ssp", "--store", "--consistency", "ssp", "--slack", "2")
    run("logreg", "async", "--store", "--consistency", "async")

    def by_itself(*options):
        done = subprocess.run([digits, "--data", data, "--standalone", *options], capture_output=True, text=True,
                              timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done
        return done.stdout

    small = ["--model", "cnn", "--batch", "8", "--iterations", "10", "--budget"]
    least, most = (re.findall("digest ([0-9a-f]{16})", by_itself(*small, budget)) for budget in ("least", "100%"))
    assert least == most and len(most) == 1, (least, most)
    learned = by_itself("--model", "mlp", "--lr", "0.3", "--iterations", "800", "--budget", "50%")
    assert float(re.findall("held-out accuracy ([0-9.]+)", learned)[-1]) >= 95, learned

    said(run("cnn", "adam", "--store", "--optimizer", "adam", world=1, expect=1), "--store: only sgd")
    said(run("cnn", "alone", "--store", "--standalone", world=1, expect=1), "--store", "--standalone")
