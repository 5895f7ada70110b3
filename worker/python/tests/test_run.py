"""`phub run`: environment, prefixes, and how ranks end together."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import wait_until

import phub

PACKAGE = Path(phub.__file__).parents[1]


def command(*arguments):
    return [sys.executable, "-m", "phub", "run", *arguments]


def environment():
    return {**os.environ, "PYTHONPATH": str(PACKAGE)}


def run(*arguments, **more):
    return subprocess.run(
        command(*arguments),
        env={**environment(), **more},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def of_python(script):
    return ["--", sys.executable, "-c", script]


SUMS = """
import os, phub
with phub.Worker({"key": 4}) as worker:
    worker.gradient("key")[0] = worker.rank + 1
    worker.push("key")
    worker.wait("key")
    print(f"{worker.rank} of {worker.world_size}: {worker.parameters('key')[0]}")
"""


def test_ranks_find_a_box_and_each_other():
    done = run("-n", "3", *of_python(SUMS), RANK="7", WORLD_SIZE="9")
    assert sorted(done.stdout.splitlines()) == [f"{r}| {r} of 3: 6.0" for r in range(3)]
    assert done.returncode == 0


RENDEZVOUS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
sum = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(sum)
print(dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], int(sum))
dist.destroy_process_group()
"""


def test_frameworks_find_what_torchrun_sets():
    pytest.importorskip("torch")
    done = run("-n", "2", *of_python(RENDEZVOUS), RANK="7", WORLD_SIZE="9", MASTER_ADDR="nowhere")
    assert sorted(line for line in done.stdout.splitlines() if "| " in line) == [
        "0| 0 2 0 3",
        "1| 1 2 1 3",
    ], done.stdout
    assert done.returncode == 0


def test_a_box_that_runs_is_used(box):
    done = run(
        "-n",
        "2",
        "--server",
        box.address,
        "--job",
        "named",
        *of_python("import os; print(os.environ['PHUB_SERVER'], os.environ['PHUB_JOB'])"),
    )
    assert sorted(done.stdout.splitlines()) == [f"{r}| {box.address} named" for r in range(2)]


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
    done = run("-n", "3", *of_python(FAILS.replace("END", end)))  # which waits for 120 s
    assert done.returncode == status
    assert done.stdout == "1| it fails\n"
    assert f"rank 1 {how}" in done.stderr


def test_keep_going_lets_the_others_end_by_themselves():
    script = FAILS.replace("END", "sys.exit(3)").replace("sleep(600)", "sleep(1); print('done')")
    done = run("-n", "3", "--keep-going", *of_python(script))
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()) == ["0| done", "1| it fails", "2| done"]


def alive(processes):
    return [
        p
        for p in processes
        if Path(f"/proc/{p}").exists() and "State:\tZ" not in Path(f"/proc/{p}/status").read_text()
    ]


SLEEPS = """
import os, subprocess
child = subprocess.Popen(["sleep", "600"])
print("processes", os.getpid(), child.pid)
child.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ranks_and_their_children_end_with_it(number):
    with subprocess.Popen(
        command("-n", "2", *of_python(SLEEPS)), env=environment(), stdout=subprocess.PIPE, text=True
    ) as launcher:
        lines = [launcher.stdout.readline() for _ in range(2)]
        processes = [int(each) for line in lines for each in re.findall(r" (\d+)", line)]
        assert len(processes) == 4
        launcher.send_signal(number)
        assert launcher.wait(60) == (-9 if number == signal.SIGKILL else 128 + number)
    if number == signal.SIGKILL:  # nobody is left to end the children's children
        processes = processes[::2]
    wait_until(lambda: not alive(processes), f"the end of {processes}", 30)


CHATTERS = """
for i in range(5000):
    print("line", i, "x" * 100)
"""


def test_ranks_go_on_when_nobody_reads_their_output():
    with subprocess.Popen(
        command("-n", "2", *of_python(CHATTERS)),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert "| line 0 " in launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(60) == 1
        said = launcher.stderr.read()
    assert said == "phub run: output of ranks is lost: standard output: Broken pipe\n"


def test_ranks_go_on_when_the_disk_of_their_output_is_full(tmp_path):
    last = tmp_path / "last"
    script = CHATTERS + f"open({str(last)!r}, 'w').close()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(*of_python(script)),
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert last.exists()
    assert done.returncode == 1
    assert "output of ranks is lost: standard output: No space left on device" in done.stderr


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", ">/dev/full 2>&1"])
def test_it_ends_without_any_output(closed):
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *command(*of_python(CHATTERS))],
        env=environment(),
        timeout=60,
        check=False,
    )
    assert done.returncode == 1


def test_output_is_that_of_the_ranks_in_any_locale():
    line = "Grüße ".encode() + bytes([0xFF])  # the end is no UTF-8
    script = f"import os; os.write(1, {line + bytes([10])!r})"
    done = subprocess.run(
        command("-n", "2", *of_python(script)),
        env={**environment(), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert sorted(done.stdout.splitlines()) == [b"0| " + line, b"1| " + line]
    assert done.returncode == 0


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


def test_a_script_without_an_interpreter_is_no_traceback(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    script.chmod(0o755)
    done = run("--", str(script))
    assert done.returncode == 126
    assert str(script) in done.stderr
    assert "-- python train.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_that_is_not_there_is_named():
    done = run("--", "/nowhere/train")
    assert done.returncode == 127
    assert "/nowhere/train" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "--", "true"], "-n 0: from 1 to 1024"),
        ([], "required: command"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_box_that_cannot_start_is_an_error(tmp_path):
    program = tmp_path / "phub"
    program.write_text("#!/bin/sh\necho no memory >&2\nexit 1\n")
    program.chmod(0o755)
    done = run("--", "true", PHUB_PROGRAM=str(program))
    assert done.returncode == 1
    assert "no memory" in done.stderr
    assert "the box did not start" in done.stderr


def test_every_other_command_is_the_boxs():
    done = subprocess.run(
        [sys.executable, "-m", "phub", "--help"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
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
    said = sorted(done.stdout.splitlines())
    assert [line.split(":")[0] for line in said] == [
        "0| phub.RankLostError",
        "2| phub.RankLostError",
    ]
    for line in said:
        assert "rank 1" in line
        assert line.endswith((f"({script}, line 8)", f"({script}, line 9)"))
    assert "Traceback" not in done.stderr


def said_at_the_end(statement):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{statement}"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done
    return done.stderr.splitlines()


def test_other_errors_keep_their_tracebacks():
    assert said_at_the_end("import phub\nraise phub.FencedError('gone\\nfor good')") == [
        "phub.FencedError: gone for good (<string>, line 3)"
    ]
    mine = said_at_the_end("import phub\nraise phub.InvalidError('mine')")
    assert mine[0].startswith("Traceback")
    hook = "sys.excepthook = lambda *_: print('hook', file=sys.stderr)"
    for before in (True, False):
        lines = [hook, "import phub"] if before else ["import phub", hook]
        assert said_at_the_end("\n".join([*lines, "raise phub.RankLostError('x')"])) == ["hook"]
