#!/usr/bin/env python3
"""bench/ladder: that it measures what it says, what it refuses; and the pictures of it, of bench/torch_loss and of geeps_bench.

  ladder_test.py CASE BUILD_BIN

As scripts_test.py, whose means it has."""

import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.dont_write_bytecode = True
from scripts_test import BENCH, ROOT, SKIPPED, expect, run  # noqa: E402


def module(name):
    """A script of bench/ as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(BENCH / name))
    found = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(found)
    return found


def ladder_climbs(folder, binaries):
    ladder = [BENCH / "ladder", "--tiny", "--build", binaries.parent, "--json", folder / "ladder.json"]
    # Computing hides what goes over a fast link, and not what goes over a slow one.
    expect(run(*ladder, "--rate", "10gbit", "--ways", "choice"), "whole  fc.weight", "What computing hides (58 layers, 200.00 ms")
    assert json.loads((folder / "ladder.json").read_text())["rows"][0]["factors"] == []
    expect(run(*ladder, "--paper-gbps", "1"), "Ways of matrices (ranks: 2; samples of each: 32", "ranks  fc.weight")
    found = json.loads((folder / "ladder.json").read_text())
    rows = {row["way"]: row for row in found["rows"]}
    assert list(rows) == ["without", "with", "choice", "choice-real", "first", "slack-1", "slack-2"], rows
    assert all(row["speedup"] > 0 for row in rows.values()), rows
    assert rows["without"]["back_early"] == 0, rows
    whole, factors = 2 * 4 * 1000 * 1024, 4 * 32 * (1000 + 1024)
    for way in ("choice", "choice-real"):
        assert rows[way]["factors"] == ["fc"], rows[way]
        assert rows["with"]["box_received"] - rows[way]["box_received"] == whole - 2 * factors, rows
        assert rows["with"]["box_sent"] - rows[way]["box_sent"] == whole - 4 * factors, rows
    expect(run(*ladder, "--ways", "with,none", status=2), "'none' is not one of")
    return 0


def ladder_refuses(_, __):
    ladder = module("ladder")

    class Setting:
        warmup, iterations, colocated = 1, 2, False

    row = {"wrong": 0, "layers": 10, "pushed_early": 10, "job_bytes": 10**7,
           "bytes": {"box_received": 2 * 10**7, "box_sent": 2 * 10**7}}
    right = [6 * 10**7, 8 * 10**7]

    def refused(message, way="with", counts=right, **fields):
        try:
            ladder.check("m", 2, way, Setting, [row | fields] * 2, [counts])
        except ladder.Failure as failure:
            assert message, failure
            expect(str(failure), message)
            return
        assert not message, f"not refused: {message}"

    refused("")
    refused("", way="without", pushed_early=0)
    refused("[1, 1] wrong results", wrong=1)
    refused("9 were pushed before", pushed_early=9)
    refused("10 were pushed before", way="without")
    refused("a box received 68000000 bytes", counts=[68 * 10**6, right[1]])
    refused("a box sent 60000000 bytes", counts=[right[0], 60 * 10**6])

    # With boxes on all nodes: as bench/peers has it.
    from peers_rack import Placement
    Setting.colocated = True
    whole = {"box_received": 3 * 10**7, "box_sent": 3 * 10**7, "worker_received": 10**7, "worker_sent": 10**7}
    link = Placement("", 3, True).bytes_of_link(3, 10**7)
    assert all(abs(each - link) < 1 for each in ladder.of_link(Setting, 3, whole)), link
    return 0


def sharded_compares(folder, binaries):
    """In a rack if one can be made here, with ps-lite if it was built."""
    peer = ["ps-lite"] if (binaries / "layers_ps_lite").exists() else []
    rack = module("sharded").can_make_racks()
    ways = [*peer, "phub-box", *(["phub-sharded"] if rack else [])]
    sharded = [BENCH / "sharded", "--tiny", "--build", binaries.parent, "--json", folder / "sharded.json"]
    run(*sharded, "--ways", ",".join(ways), "--rate", "200mbit" if rack else "local")
    rows = json.loads((folder / "sharded.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ways and rows[0]["times_first"] == 1, rows
    for row in rows:
        assert row["speedup"] > 0 and row["iteration_s"] > row["alone_s"] > 0, row
        assert row["counted"] is None or abs(row["counted"] - 1) < 0.05, row
    if peer:
        expect(run(*sharded, "--ways", "ps-lite", "--rate", "local", status=1, PHUB_PEERS_SPOIL="1"), "wrong results")
    expect(run(*sharded, "--ways", "phub-box,none", status=2), "'none' is not one of")
    expect(run(BENCH / "sharded", "--models", "alexnet,none", status=2), "'none' is not one of")
    for option, value in (("--nodes", "1"), ("--paper-gbps", "10,x"), ("--paper-gbps", "0"), ("--iterations", "0"),
                          ("--iterations", "2000"), ("--warmup", "2000"), ("--rate", "fast"), ("--rate", "0mbit"),
                          ("--compute-ms", "alexnet"), ("--compute-ms", "alexnet=0"), ("--compute-ms", "none=1"),
                          ("--json", folder / "none" / "sharded.json")):
        expect(run(BENCH / "sharded", option, value, status=2), option)
    expect(run(*sharded, "--rate", "local", "--ways", "phub-box,phub-sharded", status=2), "phub-sharded needs a rack")
    expect(run(*sharded, "--nodes", "3", status=2), "--tiny has its own")
    if not peer:
        expect(run(*sharded, "--ways", "ps-lite", status=1), "layers_ps_lite is not there")
    expect(run(*sharded, "--ps-lite", folder, status=1), "is not the source of ps-lite")
    return 0


def a_failed_rank_ends_all(folder, _):
    """And what they started, also if nobody fails but time is over."""
    runs = module("layers_runs.py")
    # Each rank leaves a child that holds its output, and notes its number.
    left = 'sleep 600 & echo $! >> "$FOLDER/pids"; echo "rank $RANK"; '
    ranks = [{"RANK": str(rank), "FOLDER": str(folder)} for rank in range(3)]
    assert runs.outputs_of(["bash", "-c", 'echo "rank $RANK"'], ranks) == "rank 0\nrank 1\nrank 2\n"

    def fails(message, command, **limit):
        (folder / "pids").write_text("")
        begin = time.monotonic()
        try:
            runs.outputs_of(["bash", "-c", left + command], ranks, **limit)
        except runs.Failure as failure:
            expect(str(failure), message, "rank 1")
        else:
            raise AssertionError(f"no failure: {message}")
        assert time.monotonic() - begin < 60
        pids = (folder / "pids").read_text().split()
        assert len(pids) == 3, pids
        for pid in pids:
            stat = Path(f"/proc/{pid}/stat")
            for _ in range(200):
                if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                    break
                time.sleep(0.02)
            else:
                raise AssertionError(f"{pid} lives on")

    fails("a rank failed", 'sleep 2; ((RANK != 1)) || exit 3; wait')
    fails("no end after 2 s", "wait", limit_s=2)
    return 0


def sharded_refuses(_, __):
    sharded = module("sharded")

    class Setting:
        warmup, iterations = 1, 2

    model, nodes = 10**7, 4
    row = {"wrong": 0, "layers": 10, "pushed_early": 10, "job_bytes": model}
    # Every host with a server has a part, and sends and receives the others' gradients and results in each of 3 rounds.
    each = 2 * (nodes - 1) * model * 3 // nodes
    first = (nodes - 1) * model // nodes
    right = {"ps-lite": [[each, each]] * nodes, "phub-sharded": [[each + first, each + first]] * nodes,
             "phub-box": [[nodes * model * 3, nodes * model * 4]]}

    def refused(message, way="ps-lite", counts=None, **fields):
        try:
            ratio = sharded.check("m", sharded.WAYS[way], Setting, nodes, [row | fields] * nodes, counts or right[way])
        except sharded.Failure as failure:
            assert message, failure
            expect(str(failure), message)
            return
        assert not message and abs(ratio - 1) < 1e-6, f"{way}: not refused: {message}"

    for way in right:
        refused("", way)
    refused("[1, 1, 1, 1] wrong results", wrong=1)
    refused("9 were pushed before", pushed_early=9)
    refused("servers' hosts received 240000000 bytes", counts=[[each * 4 // 3, each]] * nodes)
    refused("servers' hosts sent 120000000 bytes", "phub-box", counts=[[nodes * model * 3, nodes * model * 3]])
    return 0


def geeps_is_drawn(folder, binaries):
    if not has_matplotlib():
        return SKIPPED

    def drawn(picture, *files):
        text = run(BENCH / "plot_geeps", *files, "--out", folder)
        expect(text, f"geeps_{picture}.png")
        assert (folder / f"geeps_{picture}.png").stat().st_size > 5000
        return text

    def points_of(picture):
        file = folder / f"{picture}.json"
        run(binaries / "geeps_bench", "--tiny", "--only", picture, "--json", file)
        drawn(picture, file)
        return json.loads(file.read_text())["points"]

    forms = points_of("forms")
    assert [(point["workers"], point["form"]) for point in forms] == [
        (workers, form) for workers in (1, 2, 4) for form in ("cache", "host")], forms
    assert all(0 < point["images_per_s"] < point["never_waits"] for point in forms), forms
    rate = forms[0]["never_waits"]
    assert all(abs(point["never_waits"] - point["workers"] * rate) < 1 for point in forms), forms

    batches = points_of("batches")
    whole, quarter = ([point["budget_percent"] for point in batches if point["images"] == images] for images in (200, 50))
    assert whole[-1] == quarter[-1] == 100 and len(whole) < len(quarter), batches  # what fits
    for images in (200, 100, 50):
        moved = [point["moved_bytes"] for point in batches if abs(point["images"] - images) < 1]
        assert moved == sorted(moved, reverse=True) and moved[-1] == 0 < moved[0], batches

    sizes = points_of("sizes")
    assert [point["layers"] for point in sizes] == [16, 10, 6, 4, 2], sizes
    assert len({point["budget_bytes"] for point in sizes}) == 1, sizes
    minibatches = points_of("minibatches")
    assert [round(point["images"]) for point in minibatches] == [25, 50, 100, 200], minibatches
    for point in minibatches:  # it moves what does not fit
        assert (point["moved_bytes"] == 0) == (point["all_bytes"] <= point["budget_bytes"]), minibatches
        assert 0 < max(point["images_per_s"], point["all_images_per_s"]) < point["never_waits"], minibatches
    assert [point["moved_bytes"] > 0 for point in minibatches] == [False, False, True, True], minibatches
    partitions = points_of("partitions")
    assert [point["partitions"] for point in partitions] == [1, 2, 4, 8], partitions
    assert all(0 < point["images_per_s"] < point["never_waits"] for point in partitions), partitions
    frames = points_of("frames")
    assert [(point["form"], point["frames"]) for point in frames] == [
        ("kept", 4), ("swapped", 16), ("kept", 8), ("swapped", 16), ("kept", 16)], frames
    for point in frames:
        assert (point["moved_bytes"] == 0) == (point["form"] == "kept") and 0 < point["busy"] <= 1, frames
        assert abs(point["ms_per_frame"] * point["frames"] / 1e3 / point["s_per_iteration"] - 1) < 1e-6, frames
    largest = points_of("largest")
    assert all(0 < point["kept"] < point["swapped"] for point in largest), largest

    file = folder / "loss.json"
    run(binaries / "time_to_loss", "--tiny", "--data", ROOT / "build" / "data" / "digits.csv", "--json", file)
    text = drawn("accuracy", file, folder / "sizes.json")
    expect(text, "geeps_sizes.png")
    cached = folder / "cached.json"
    run(binaries / "time_to_loss", "--tiny", "--data", ROOT / "build" / "data" / "digits.csv", "--modes", "bsp",
        "--cache", "100%", "--json", cached)
    drawn("accuracy", file, cached)

    def refused(found, message):
        file.write_text(json.dumps(found))
        expect(run(BENCH / "plot_geeps", file, "--out", folder, status=1), message)

    refused({"rows": [], "points": []}, "no picture can be drawn")
    refused({"rows": [{"accuracies": []}]}, "no picture can be drawn")  # rank 0 made no round in time
    for wrong in ([], {}, {"rows": [], "points": [{"picture": "none"}]}, {"rows": [], "points": [{"picture": "largest"}]},
                  {"rows": [], "points": [forms[0] | {"form": "none"}]}, {"rows": [], "points": [frames[0] | {"form": "cache"}]},
                  {"rows": [{"accuracies": [[1, 2, 3]]}]},
                  {"rows": [{"accuracies": [[1, 2]], "consistency": "bsp", "slack": 0}], "workers": 1, "batch": 1}):
        refused(wrong, "is no file of geeps_bench's or time_to_loss's --json")
    return 0


def has_matplotlib():
    return subprocess.run(["/usr/bin/python3", "-c", "import matplotlib"], capture_output=True, check=False).returncode == 0


def a_tuning():
    tuned = [{"kind": "begin", "job": "j", "branch": 0},
             {"kind": "fork", "round": 3, "branch": 1, "parent": 0, "values": {"lr": 0.1}},
             {"kind": "fork", "round": 3, "branch": 2, "parent": 0, "values": {"lr": 1.0}}]
    tuned += [{"kind": "loss", "round": at, "branch": 0 if at < 4 else 1 + at % 2, "loss": None if at == 5 else 9.0 / at,
               "ranks": 2} for at in range(1, 40)]
    tuned += [{"kind": "ran", "round": 20}, {"kind": "chosen", "round": 20, "branch": 1, "values": {"lr": 0.1}},
              {"kind": "discard", "round": 21, "branch": 2}, {"kind": "end", "round": 40}]
    return tuned


def plots_draw(folder, _):
    if not has_matplotlib():
        return SKIPPED
    file = folder / "rows.json"

    def drawn(script, found, picture):
        file.write_text(json.dumps(found))
        run(BENCH / script, file, "--out", folder)
        assert (folder / picture).stat().st_size > 5000

    def refused(script, found, message):
        file.write_text(json.dumps(found))
        expect(run(BENCH / script, file, "--out", folder, status=1), message)

    rung = {"model": "alexnet", "nodes": 8, "way": "with", "speedup": 4.0}
    drawn("plot_ladder", {"rows": [rung, rung | {"way": "without", "speedup": 2.0}]}, "ladder.png")
    refused("plot_ladder", {"rows": [rung | {"way": "up"}]}, "is no file of bench/ladder's --json")
    refused("plot_ladder", {"rows": []}, "no picture can be drawn")

    bar = {"model": "alexnet", "nodes": 8, "way": "ps-lite", "paper_gbps": 10, "times_first": 1.0}
    drawn("plot_sharded", {"rows": [bar, bar | {"way": "phub-box", "times_first": 1.9}, bar | {"paper_gbps": 56}]},
          "sharded.png")
    refused("plot_sharded", {"rows": [bar | {"way": "up"}]}, "is no file of bench/sharded's --json")
    refused("plot_sharded", {"rows": [bar | {"times_first": "fast"}]}, "is no file of bench/sharded's --json")
    refused("plot_sharded", {"rows": [bar | {"times_first": float("nan")}]}, "is no file of bench/sharded's --json")
    refused("plot_sharded", {"rows": []}, "no picture can be drawn")
    refused("plot_sharded", {"rows": [bar, bar]}, "measured more than once")
    refused("plot_sharded", {"rows": [bar, bar | {"way": "phub-box", "model": "vgg11"}]}, "compare with different ways")

    def training(error):
        return {"model": "quick", "ranks": 8, "windows": 4, "symbols": 32, "rows": [
            {"form": "f32", "rate": "1gbit", "turns": [{"losses": [[5, 0.1, 2.3, error], [10, 0.2, 1.1, error]]}]}]}
    drawn("plot_loss", training(0.5), "loss.png")
    drawn("plot_loss", training(None), "loss.png")
    refused("plot_loss", {"rows": []}, "is no file of bench/torch_loss's --json")

    tuned = a_tuning()
    log = folder / "tune.log"
    log.write_text("\n".join(map(json.dumps, tuned)))
    run(BENCH / "plot_tune", log, "--out", folder)
    assert (folder / "tune.png").stat().st_size > 5000
    log.write_text(json.dumps(tuned[0]))
    expect(run(BENCH / "plot_tune", log, "--out", folder, status=1), "is no file of phub tune --log")
    run("/usr/bin/python3", __file__, "appended_logs_are_one_course", folder)  # which has matplotlib
    return 0


def appended_logs_are_one_course(_, __):
    tuning, tuned = module("plot_tune").Tuning, a_tuning()

    def losses(first, end, branch, loss):
        return [{"kind": "loss", "round": at, "branch": branch, "loss": loss, "ranks": 2} for at in range(first, end)]

    again = [{"kind": "begin", "job": "j", "branch": 1}, *(row for row in tuned if row["kind"] == "loss" and row["round"] > 9)]
    found = tuning([*tuned, *again, *losses(40, 50, 1, 0.5)])
    assert [at for _, rounds, _ in found.runs for at in rounds] == [*range(1, 50)]
    assert (found.chosen, found.forks, found.values[1]) == ([(20, 1)], [3, 3], {"lr": 0.1})
    found = tuning([*tuned, {"kind": "rewound", "round": 40, "branch": 0}, *losses(11, 15, 0, 3.0)])
    assert [at for _, rounds, _ in found.runs for at in rounds] == [*range(1, 15)]
    assert (found.chosen, found.forks) == ([], [3, 3])  # what was chosen in round 20 is void
    found = tuning([*tuned, {"kind": "begin", "job": "other", "branch": 0}, *losses(1, 5, 0, 3.0)])
    assert (found.job, found.chosen, found.forks, found.values) == ("other", [], [], {0: {}})
    assert found.runs == [(0, [1, 2, 3, 4], [3.0] * 4)]
    return 0


def plots_refuse(folder, _):
    """A file of something else, and a folder that cannot be made."""
    if not has_matplotlib():
        return SKIPPED
    binary, long = folder / "binary", 100_000
    binary.write_bytes(b"\x80" * long)
    for script in ("plot", "plot_geeps", "plot_ladder", "plot_loss", "plot_sharded", "plot_topics", "plot_tune"):
        text = run(BENCH / script, binary, "--out", folder, status=1)
        expect(text, f"{binary} is no file of", "invalid start byte")
        assert len(text) < 1000, f"{script} prints {len(text)} characters"
    counts, nowhere = folder / "counts", binary / "out"
    counts.write_text("sea 9 1\n")
    rung = {"model": "alexnet", "nodes": 8, "way": "with", "speedup": 4.0}
    ladder = folder / "ladder.json"
    ladder.write_text(json.dumps({"rows": [rung]}))
    for command in (("plot_topics", counts), ("plot_ladder", ladder), ("plot_model", "--draw")):
        text = run(BENCH / command[0], *command[1:], "--out", nowhere, status=1)
        expect(text, f"{nowhere}: Not a directory")
        assert "Traceback" not in text, text
    return 0


def topics_are_drawn(folder, binaries):
    if not has_matplotlib():
        return SKIPPED
    counts = folder / "counts.txt"
    counts.write_text("# lda alpha 0.1 beta 0.01\nsea 9 1 0\nship 6 0 0\ncamel 0 5 0\nand 30 30 0\n")
    expect(run(BENCH / "plot_topics", counts, "--out", folder), "topics.png")
    assert (folder / "topics.png").stat().st_size > 5000
    run(BENCH / "plot_topics", counts, "--words", "3", "--format", "svg", "--out", folder)
    picture = (folder / "topics.svg").read_text()
    for title in ("topic 0: 55.6% of all words", "topic 1: 44.4% of all words"):
        expect(picture, title)
    assert "topic 2" not in picture  # of no word
    # "and" is in both topics, and more of topic 1 than of all words.
    for word, times in (("sea", 1), ("ship", 1), ("camel", 1), ("and", 1)):
        assert len(re.findall(f"<!-- {word} -->", picture)) == times, word
    for text, message in (("sea 1 2\nship 1\n", "line 2: it is not a word"), ("sea 1 -2\n", "line 1: it is not a word"),
                          ("sea a b\n", "is no file of lda --out"), ("", "has no words"), ("sea 0 0\n", "has no words")):
        counts.write_text(text)
        expect(run(BENCH / "plot_topics", counts, "--out", folder, status=1), message)
    expect(run(BENCH / "plot_topics", folder / "none", "--out", folder, status=1), "No such file")
    return 0


CASES = {case.__name__: case for case in (ladder_climbs, ladder_refuses, sharded_compares, sharded_refuses, a_failed_rank_ends_all, plots_draw, appended_logs_are_one_course, plots_refuse,
                                          geeps_is_drawn, topics_are_drawn)}


def main():
    name, binaries = sys.argv[1], Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        status = CASES[name](Path(folder), binaries)
    print("skipped: what it needs is not here" if status == SKIPPED else "passed")
    return status


if __name__ == "__main__":
    sys.exit(main())
