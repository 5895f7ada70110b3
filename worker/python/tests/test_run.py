"""`phub run`: environment, prefixes, and how ranks end together."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import python, ran, wait_until


def of_python(script):
    return ["--", sys.executable, "-c", script]


def launcher(*arguments, **environment):
    return python("-m", "phub", "run", *arguments, **environment)


def run(*arguments, **environment):
    return ran("-m", "phub", "run", *arguments, **environment)


# ---- What ranks find.

SUMS = """
import os, phub
with phub.Worker({"key": 4}) as worker:
    worker.gradient("key")[0] = worker.rank + 1
    worker.push("key")
    worker.wait("key")
    print(f"{worker.rank} of {worker.world_size}: {worker.parameters('key')[0]}")
"""
RENDEZVOUS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
sum = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(sum)
print(dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], int(sum))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("script", "ranks", "says"),
    [(SUMS, 3, "{rank} of 3: 6.0"), (RENDEZVOUS, 2, "{rank} 2 {rank} 3")],
)
def test_ranks_find_a_box_and_each_other(script, ranks, says):
    """As frameworks do under torchrun; what an outer launcher has set does not count."""
    outer = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "nowhere"}
    done = run("-n", str(ranks), *of_python(script), **outer)
    said = sorted(line for line in done.stdout.splitlines() if "| " in line)
    assert said == [f"{rank}| {says.format(rank=rank)}" for rank in range(ranks)], done
    assert done.returncode == 0


def test_a_box_that_runs_is_used(box):
    script = "import os; print(os.environ['PHUB_SERVER'], os.environ['PHUB_JOB'])"
    done = run("-n", "2", "--server", box.address, "--job", "named", *of_python(script))
    assert sorted(done.stdout.splitlines()) == [f"{r}| {box.address} named" for r in range(2)]


# ---- How ranks end.

FAILS = """
import os, sys, time
if os.environ["PHUB_RANK"] == "1":
    print("it fails", file=sys.stderr)
    END
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("end", "status", "how"),
    [
        ("sys.exit(3)", 3, "exited with status 3"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by signal 9, SIGKILL"),
    ],
)
def test_when_one_fails_the_others_end(end, status, how):
    done = run("-n", "3", *of_python(FAILS.replace("END", end)))  # which waits for 170 s
    assert done.returncode == status
    assert done.stdout == "1| it fails\n"
    assert f"rank 1 {how}" in done.stderr


def test_keep_going_lets_the_others_end_by_themselves():
    script = FAILS.replace("END", "sys.exit(3)").replace("sleep(600)", "sleep(1); print('done')")
    done = run("-n", "3", "--keep-going", *of_python(script))
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()) == ["0| done", "1| it fails", "2| done"]


def alive(processes):
    statuses = (Path(f"/proc/{process}/status") for process in processes)
    return [each for each in statuses if each.exists() and "State:\tZ" not in each.read_text()]


SLEEPS = """
import os, subprocess
child = subprocess.Popen(["sleep", "600"])
print("processes", os.getpid(), child.pid)
child.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ranks_and_their_children_end_with_it(number):
    with subprocess.Popen(**launcher("-n", "2", *of_python(SLEEPS))) as started:
        lines = [started.stdout.readline() for _ in range(2)]
        processes = [int(each) for line in lines for each in re.findall(r" (\d+)", line)]
        assert len(processes) == 4
        started.send_signal(number)
        assert started.wait(60) == (-9 if number == signal.SIGKILL else 128 + number)
    if number == signal.SIGKILL:  # nobody is left to end the children's children
        processes = processes[::2]
    wait_until(lambda: not alive(processes), f"the end of {processes}", 30)


BOX_DIES = """
import os, signal, time
if os.environ["PHUB_RANK"] == "0":
    parent = os.getppid()
    siblings = open(f"/proc/{parent}/task/{parent}/children").read().split()
    box, = [p for p in siblings if open(f"/proc/{p}/comm").read() == "phub\\n"]
    os.kill(int(box), signal.SIGKILL)
time.sleep(600)
"""


def test_a_box_that_was_killed_is_named_and_ends_the_ranks():
    done = run("-n", "2", *of_python(BOX_DIES))
    assert done.returncode == 137
    assert "the box was killed by signal 9, SIGKILL" in done.stderr
    assert "before its ranks" in done.stderr


# ---- Output.

CHATTERS = """
for i in range(5000):
    print("line", i, "x" * 100)
"""


def test_ranks_go_on_when_nobody_reads_their_output():
    with subprocess.Popen(**launcher("-n", "2", *of_python(CHATTERS))) as started:
        assert "| line 0 " in started.stdout.readline()
        started.stdout.close()
        assert started.wait(60) == 1
        said = started.stderr.read()
    assert said == "phub run: output of ranks is lost: standard output: Broken pipe\n"


def test_ranks_go_on_when_the_disk_of_their_output_is_full(tmp_path):
    last = tmp_path / "last"
    script = CHATTERS + f"open({str(last)!r}, 'w').close()"
    with Path("/dev/full").open("w") as full:
        given = {**launcher(*of_python(script)), "stdout": full}
        done = subprocess.run(**given, timeout=60, check=False)
    assert last.exists()
    assert done.returncode == 1
    assert "output of ranks is lost: standard output: No space left on device" in done.stderr


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", ">/dev/full 2>&1"])
def test_it_ends_without_any_output(closed):
    given = launcher(*of_python(CHATTERS))
    given["args"] = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *given["args"]]
    assert subprocess.run(**given, timeout=60, check=False).returncode == 1


def test_output_is_that_of_the_ranks_in_any_locale():
    line = "Grüße ".encode() + bytes([0xFF])  # the end is no UTF-8
    script = of_python(f"import os; os.write(1, {line + bytes([10])!r})")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    given = {**launcher("-n", "2", *script, **locale), "text": False}
    done = subprocess.run(**given, timeout=60, check=False)
    assert sorted(done.stdout.splitlines()) == [b"0| " + line, b"1| " + line]
    assert done.returncode == 0


# ---- What is wrong.


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "status", "messages"),
    [
        (["--", "TRAIN"], 126, ["train.py", "-- python train.py"]),
        (["--", "/nowhere/train"], 127, ["/nowhere/train"]),
        (["-n", "0", "--", "true"], 2, ["-n 0: from 1 to 1024"]),
        ([], 2, ["required: command"]),
    ],
)
def test_what_cannot_run_is_named(tmp_path, arguments, status, messages):
    """A script without an interpreter, for one."""
    script = executable(tmp_path / "train.py", "print('trained')\n")
    done = run(*(script if each == "TRAIN" else each for each in arguments))
    assert done.returncode == status
    assert all(message in done.stderr for message in messages), done
    assert "Traceback" not in done.stderr


def test_a_box_that_cannot_start_is_an_error(tmp_path):
    program = executable(tmp_path / "phub", "#!/bin/sh\necho no memory >&2\nexit 1\n")
    done = run("--", "true", PHUB_PROGRAM=program)
    assert done.returncode == 1
    assert "no memory" in done.stderr
    assert "the box did not start" in done.stderr


def test_every_other_command_is_the_boxs():
    done = ran("-m", "phub", "--help")
    assert "serve" in done.stdout, done.stderr


# ---- What ranks say that end because of others.

LOSES = """
import os, signal, phub
worker = phub.Worker({"key": 4}, on_loss="fail")
worker.barrier()
if worker.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    worker.push("key")
    worker.wait("key")
"""


def test_a_lost_rank_is_a_line_of_each_other(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LOSES)
    done = run("-n", "3", "--keep-going", "--", sys.executable, str(script))
    assert done.returncode == 137, done
    for rank, line in zip((0, 2), sorted(done.stdout.splitlines()), strict=True):
        where = re.escape(str(script))
        said = rf"{rank}\| phub.RankLostError: .*rank 1.*\({where}, line [89]\)"
        assert re.fullmatch(said, line), line
    assert "Traceback" not in done.stderr


def test_other_errors_keep_their_tracebacks():
    def said_at_the_end(*lines):
        done = ran("-c", "\n".join(["import sys", *lines]))
        assert done.returncode == 1, done
        return done.stderr.splitlines()

    fenced = said_at_the_end("import phub", "raise phub.FencedError('gone\\nfor good')")
    assert fenced == ["phub.FencedError: gone for good (<string>, line 3)"]
    traceback, *_ = said_at_the_end("import phub", "raise phub.InvalidError('mine')")
    assert traceback.startswith("Traceback")
    hook = "sys.excepthook = lambda *_: print('hook', file=sys.stderr)"
    for lines in ([hook, "import phub"], ["import phub", hook]):
        assert said_at_the_end(*lines, "raise phub.RankLostError('x')") == ["hook"]
