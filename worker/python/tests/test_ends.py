"""How a worker ends, in each way that its process may; and how its library is found."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from ctypes import c_char_p, c_double, c_int32, c_uint64, c_void_p
from pathlib import Path

import pytest
from conftest import PACKAGE, pushed, python, ran, refused
from deaths import FORK

import phub
from phub import _library, errors


def shared_mappings():
    return Path("/proc/self/maps").read_text().count("memfd:")


def test_after_close_calls_are_errors_and_the_last_view_unmaps_the_memory(box):
    before = shared_mappings()
    worker = phub.Worker({"key": 8}, transport="shm")
    gradient, parameters = worker.gradient("key"), worker.parameters("key")
    worker.close()
    worker.close()
    refused("closed", worker.push, "key", error=phub.BadHandleError)
    del worker
    gradient[3] = 5.0  # a SIGSEGV if it were unmapped
    assert parameters[3] == 0
    assert shared_mappings() > before
    del gradient, parameters
    assert shared_mappings() == before


def waits(rank, ready):
    worker = phub.Worker({"key": 8})
    if rank == 1:
        time.sleep(600)
    worker.push("key")
    ready.set()
    try:
        worker.wait("key")
    except KeyboardInterrupt:
        worker.close()
        return
    raise AssertionError("the wait ended")


def test_ctrl_c_ends_a_wait(box, start):
    ready = FORK.Event()
    ranks = start(waits, 2, ready)
    assert ready.wait(60)
    time.sleep(0.3)  # so that it probably waits; it is right either way
    ranks.kill(0, signal.SIGINT)
    ranks.result(0)  # long before the limit of progress


def test_other_threads_wait_and_a_child_of_fork_is_refused_and_ends_nothing(box):
    with phub.Worker({"key": 8}) as worker:
        worker.push("key")
        thread = threading.Thread(target=worker.wait, args=("key",))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        child = os.fork()
        if child == 0:
            pushes = 0
            with contextlib.suppress(phub.WrongThreadError):
                worker.push("key")
                pushes = 1
            del worker
            os._exit(pushes)
        assert os.waitpid(child, 0)[1] == 0
        pushed(worker, "key")


def dies(rank, on_loss):
    worker = phub.Worker({"key": 8}, on_loss=on_loss)
    pushed(worker, "key")
    if rank == 1:
        os._exit(0)
    for _ in range(3):  # the round in which it is lost ends with the others' gradients
        pushed(worker, "key")


def fails(rank, failure):
    """Rank 1 in the second round, within its `with`."""
    with contextlib.suppress(KeyError), phub.Worker({"key": 8}, on_loss="fail") as worker:
        for step in range(4):
            if rank == 1 and step == 1:
                raise failure
            pushed(worker, "key")
    if rank == 1:
        worker = None
        time.sleep(3600)  # the process lives on: what it has done counts


def lost(is_lost):
    known = pytest.raises(phub.RankLostError, match="rank 1")
    return known if is_lost else contextlib.nullcontext()


@pytest.mark.parametrize(
    ("body", "how", "is_lost"),
    [
        (fails, KeyError("image"), True),
        (fails, SystemExit("no data"), True),
        (fails, SystemExit(0), False),
        (dies, "fail", True),
        (dies, "shrink", False),
    ],
)
def test_a_rank_that_fails_within_its_with_or_dies_is_lost(box, start, body, how, is_lost):
    """Which costs the others nothing where the job shrinks; one that ends within its has left."""
    with lost(is_lost):
        start(body, 2, how).result(0)


SCRIPT = """
import phub
worker = phub.Worker({"key": 8}, on_loss="fail")
worker.push("key"); worker.wait("key")
"""


@pytest.mark.parametrize(("end", "fails"), [("", False), ("raise ValueError", True)])
def test_a_script_that_ends_well_has_left_and_one_with_an_exception_is_lost(box, end, fails):
    """Nothing closes the worker."""
    job = {"PHUB_WORLD_SIZE": "2", "PHUB_RANK": "1"}
    other = subprocess.Popen(**python("-c", SCRIPT + end, **job))
    with phub.Worker({"key": 8}, rank=0, world_size=2, on_loss="fail") as worker:
        pushed(worker, "key")
        _, said = other.communicate(timeout=60)
        assert other.returncode == (1 if fails else 0), said
        with lost(fails):
            for _ in range(3):
                pushed(worker, "key")


# ---- Loading.


def test_import_needs_neither_torch_nor_numpy():
    no_modules = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
    said = ran("-c", no_modules + "import phub; phub.Worker; print('ok')")
    assert said.stdout == "ok\n", said.stderr


def library_of_another_abi(folder):
    source, library = folder / "other.c", folder / "other.so"
    source.write_text(
        'const char* phub_last_error(void) { return ""; }\n'
        'const char* phub_version(void) { return "9.1"; }\n'
        "int phub_abi_version(void) { return 7; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def libc(_folder):
    maps = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in maps if "libc.so" in line)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda _: "/nowhere/lib.so",
            "LibraryError: phub's library cannot be used: {}.*Set PHUB_LIBRARY",
        ),
        (libc, "undefined symbol: phub_last_error. Set PHUB_LIBRARY"),
        (library_of_another_abi, r"{} is of ABI 7 \(version 9.1\)"),
    ],
    ids=["nowhere", "another", "another_abi"],
)
def test_a_library_that_is_not_there_or_another_is_named(tmp_path, make, said):
    library = str(make(tmp_path))
    done = ran("-c", "import phub; phub.Worker({'key': 1})", PHUB_LIBRARY=library)
    assert re.search(said.format(library), done.stderr, re.S), done.stderr


def test_codes_and_types_are_those_of_the_header():
    codes = (PACKAGE.parent / "phub.h").read_text().split("typedef enum phub_code {")[1]
    for number, kind in enumerate(errors.BY_CODE, 1):
        assert f"PHUB_{kind.code.upper()} = {number}" in codes.split("}")[0]
    fields = dict(_library.StoreCounters._fields_)
    assert list(fields)[:4] == ["size", "in_sequence", "by_index", "dynamic"]
    assert set(list(fields.values())[1:]) == {c_uint64}
    assert len(fields) == 16
    assert dict(_library.KeyMemory._fields_)["gradient_dtype"] is c_char_p
    assert _library._arguments("report_named_loss") == [c_void_p, c_char_p, c_double, c_uint64]
    assert _library._arguments("push_then")[2:] == [c_int32, c_void_p, c_void_p]
    refused("no phub_nothing", _library._arguments, "nothing", error=AttributeError)
