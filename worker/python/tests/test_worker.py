"""The core: a job's options, memory, exchange and errors, without PyTorch."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from ctypes import c_char_p, c_double, c_int32, c_uint64, c_void_p
from pathlib import Path

import numpy as np
import pytest
from conftest import Box, SavingBox, of_ranks, wait_until

import phub
from phub import _library
from phub._library import find_program

PACKAGE = Path(phub.__file__).parents[1]


def pushed(worker, key, value=None):
    """What comes back of it."""
    if value is not None:
        np.asarray(worker.gradient(key))[:] = value
    worker.push(key)
    worker.wait(key)
    return np.array(worker.parameters(key))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@of_ranks(3)
def test_sums_are_those_of_all_ranks(rank, transport):
    keys = {"a": 1000, "b": phub.Key(70_001, priority=1)}
    with phub.Worker(keys, transport=transport) as worker:
        for round_ in range(1, 6):
            for key in reversed(worker.keys):
                gradient = np.asarray(worker.gradient(key))
                gradient[:] = np.arange(len(gradient)) % 97 + rank * round_
                worker.push(key)
            worker.wait_all()
        assert worker.round("a") == 5
        assert worker.stats.pushes == 2 * 5
        assert worker.connection.startswith(transport)
        for key in worker.keys:
            got = np.array(worker.parameters(key))
            assert np.array_equal(got, (np.arange(len(got)) % 97 * 3 + 15).astype(np.float32))


@pytest.mark.parametrize(("groups", "total"), [("", 1), ("1,2", 1 + 2**-23)])
@of_ranks(3)
def test_groups_order_the_sum(rank, groups, total):
    with phub.Worker({"key": 8}, groups=groups) as worker:
        assert pushed(worker, "key", 1 if rank == 0 else 2**-24)[0] == total


def test_a_second_worker_in_a_job_of_this_process_is_told_the_way_out(box):
    with phub.Worker({"w": 4}, rank=0, world_size=1):
        message = r"taken by.*This process is itself in job '.*'.*job='NAME'.*call close\(\) first"
        with pytest.raises(phub.TakenError, match=message):
            phub.Worker({"w": 4}, rank=0, world_size=1)
    phub.Worker({"w": 4}, rank=0, world_size=1).close()


def test_a_program_without_a_launcher_is_told_of_one():
    with pytest.raises(phub.InvalidError, match="Give the job a name.*phub run -n 2 -- python"):
        phub.Worker({"w": 4})


@of_ranks(2)
def test_a_rank_sends_what_it_writes_and_gets_what_it_reads(rank):
    half = (32 * rank, 32 * rank + 32)
    key = phub.Key(64, writes=[half], reads=[(0, 64)] if rank == 0 else ())
    with phub.Worker({"t": key, "other": phub.Key(8, reads=())}, chunk_elements=32) as worker:
        found = pushed(worker, "t", rank + 1)
        with pytest.raises(phub.InvalidError, match="neither write nor read"):
            worker.push("other")
        worker.barrier()
        assert worker.stats.chunks_pushed == (2 if rank == 0 else 1)
        assert rank > 0 or np.array_equal(found, [1] * 32 + [2] * 32)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@of_ranks(2)
def test_own_memory_is_sent_scaled_and_converted(rank, transport):
    with phub.Worker({"key": 5000}, transport=transport, reduction="mean") as worker:
        gradient = np.full(5000, rank + 1, np.float32)
        result = np.zeros(5000, np.float32)
        worker.register_memory("key", gradient, result, scale=2.0)
        worker.push("key")
        worker.wait("key")
        assert (result == 3.0).all()
        pulled = np.zeros(5000, np.float32)
        worker.pull("key", pulled)
        assert np.array_equal(pulled, result)
        half = np.full(5000, rank, np.float16)
        worker.register_memory("key", half, half, gradient_dtype="f16", parameter_dtype="f16")
        worker.push("key")
        worker.wait("key")
        assert (half == 0.5).all()


def test_registered_memory_lives_until_it_is_replaced(box):
    with phub.Worker({"key": 8}) as worker:
        memory = np.zeros(8, np.float32)
        there = weakref.ref(memory)
        worker.register_memory("key", memory, memory)
        del memory
        assert there() is not None
        worker.register_memory("key")
        assert there() is None


@of_ranks(2)
def test_broadcast_gives_rank_0s_parameters(rank):
    with phub.Worker({"a": 3, "b": 2}, initial="broadcast") as worker:
        mine = {"a": np.array([1, 2, 3], np.float32), "b": np.array([4, 5], np.float32)}
        worker.broadcast(mine if rank == 0 else None)
        assert worker.initial_counts == (rank == 0)
        assert worker.parameters("a").tolist() == [1, 2, 3]
        assert worker.parameters("b").tolist() == [4, 5]


@of_ranks(2)
def test_the_box_applies_an_optimizer(rank):
    with phub.Worker({"w": 4}, optimizer="sgd", hyper={"lr": 0.5}, initial="zeros") as worker:
        assert pushed(worker, "w", 1).tolist() == [-1.0] * 4
        if rank == 0:
            worker.set_hyper({"lr": 0.25})
        worker.barrier()
        assert pushed(worker, "w").tolist() == [-1.5] * 4


def test_checkpoints_have_the_shapes_of_keys(tmp_path):
    saving = Box("--checkpoints", str(tmp_path), "--checkpoint-every", "1")
    try:
        keys = {"w": phub.Key(600, shape=(3, 4, 50)), "b": 10}
        with phub.Worker(keys, server=saving.address, job="shapes", optimizer="sgd") as worker:

            def saved_after_another_round():
                for key in worker.keys:
                    worker.push_null(key)
                worker.wait_all()
                return list(tmp_path.glob("shapes/round-*/manifest.json"))

            wait_until(saved_after_another_round, "a checkpoint")
    finally:
        saving.kill()
    command = [find_program(), "checkpoint", "show", str(tmp_path), "shapes"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "F32 [3, 4, 50]  w" in shown
    assert "F32 [10]  b" in shown


def test_what_is_not_pushed_is_there_at_once(box):
    with phub.Worker({"key": 8}) as worker:
        assert worker.ready("key")
        worker.wait("key")
        worker.push_null("key")
        worker.wait("key")
        assert worker.poll() == 0
        assert worker.parameters("key").tolist() == [0] * 8


WRONG_OPTIONS = [
    ({"optimiser": "sgd"}, "'optimizer'"),
    ({"optimizer": "sdg"}, "sdg"),
    ({"server": "127.0.0.1:1", "connect_timeout_ms": 100}, "127.0.0.1:1"),
    ({"world_size": "two"}, "two"),
    ({"world_size": 4, "groups": "2;2"}, "at character 2 of '2;2'"),
    ({"rank": 7, "world_size": 2}, "7"),
    ({"branches": 1.5}, r"option 'branches' is 1\.5: it must be a whole number"),
    ({"branches": 2**64 + 1}, "option 'branches' is 18446744073709551617: it must"),
    ({"hyper": {"lr": "x"}, "optimizer": "sgd"}, "hyperparameter 'lr' is 'x': it must be a nu"),
    ({"memory_device": 2**32}, "the number of a GPU, not 4294967296"),
    ({"memory_device": "cuda:0"}, "number of a GPU, not 'cuda:0'"),
    ({"hyper": {"momentum": 0.9}, "optimizer": "sgd"}, "'momentum' is 0.9, and optimizer 'sgd'"),
    ({"hyper": {"lr": 0.1}}, "'lr' is 0.1, and optimizer 'none' .* is for all but none"),
    ({"formats": {"*.wieght": "int8"}}, r"1 keys .* '\*\.wieght'"),
    ({"formats": {"*": "int7"}}, "got 'int7'; did you mean 'int8'"),
    ({"gradient_dtype": "fp8"}, "fp8-e5m2, int32, int8, int4, topk"),
    ({"rounding": "stochastically"}, "one of nearest, stochastic"),
    ({"parameter_dtype": "int8"}, "parameter_dtype"),
    ({"gradient_dtype": "topk", "chunk_elements": 1 << 17}, "chunks of at most 65536"),
]
MATRIX = {"elements": 400, "shape": (100, 4)}
WRONG_KEYS = [
    ({**MATRIX, "rows_limit": 2**40}, "rows_limit is 1099511627776: it must"),
    ({**MATRIX, "rank_limit": -1}, "rank_limit is -1: it must"),
    ({**MATRIX, "lazy": True}, "'key': lazy is for a key .* a rows_limit"),
    ({"shape": (2.0,)}, r"a dimension of its shape is 2\.0: it must be a whole number"),
    ({"shape": (2, 3)}, r"'key'.*shape \(2, 3\).*elements, which is 8"),
    ({"elements": 1, "shape": (1,) * 9}, "'key'.*1 to 8 dimensions, not 9"),
    ({"priority": 2**31}, "priority is 2147483648: it must"),
    ({"group": 2**32}, "group is 4294967296: it must"),
    ({"lr_scale": "x"}, "lr_scale is 'x': it must be a number"),
    ({"writes": [(0, 2**64)]}, "an end of a range is 18446744073709551616: it must"),
    ({"elements": 2**64 + 8}, "the number of elements is 18446744073709551624: it must"),
    ({"elements": 8.0}, r"the number of elements is 8\.0: it must be a whole number"),
    ({"elements": 0}, "key 'key' has 0 elements"),
]


@pytest.mark.parametrize(
    ("key", "options", "message"),
    [
        *(({}, options, message) for options, message in WRONG_OPTIONS),
        *((key, {}, message) for key, message in WRONG_KEYS),
    ],
)
def test_options_and_numbers_of_keys_that_do_not_fit_are_named(box, key, options, message):
    kinds = {"127.0.0.1:1": phub.UnavailableError, "7": phub.Error}
    kind = phub.NotFoundError if "wieght" in message else kinds.get(message, phub.InvalidError)
    with pytest.raises(kind, match=message):
        phub.Worker({"key": phub.Key(**{"elements": 8, **key})}, **options)


TOO_LARGE = {
    "the branch is 4294967296: it must": [
        lambda worker: worker.fork(2**32),
        lambda worker: worker.schedule(2**32),
        lambda worker: worker.schedule((2**32, 3), 0),
        lambda worker: worker.discard(2**32),
        lambda worker: worker.kill(2**32),
        lambda worker: worker.revive(2**32),
    ],
    "the branch is -1: it must": [lambda worker: worker.fork(-1)],
    "the branch is 'x': it must be a whole number": [lambda worker: worker.fork("x")],
    "the number of rounds is 18446744073709551616": [lambda worker: worker.schedule((0, 2**64), 0)],
    "the round is 18446744073709551616: it must": [
        lambda worker: worker.fork(0, round=2**64),
        lambda worker: worker.schedule(0, round=2**64),
        lambda worker: worker.discard(0, round=2**64),
        lambda worker: worker.kill(0, round=2**64),
        lambda worker: worker.revive(0, round=2**64),
        lambda worker: worker.set_hyper({"lr": 1}, round=2**64),
        lambda worker: worker.branch_in(2**64),
        lambda worker: worker.batch_in(2**64),
        lambda worker: worker.report_loss(1, round=2**64),
        lambda worker: worker.save_point(2**64),
    ],
    "the loss is 'x': it must be a number": [lambda worker: worker.report_loss("x")],
    "hyperparameter 'lr' is 'x': it must": [
        lambda worker: worker.set_hyper({"lr": "x"}),
        lambda worker: worker.fork(0, {"lr": "x"}),
    ],
    "the priority is 2147483648: it must": [lambda worker: worker.push("key", 2**31)],
    "the scale is None: it must": [lambda worker: worker.register_memory("key", scale=None)],
}


def test_numbers_of_calls_that_do_not_fit_are_named(box):
    options = {"optimizer": "sgd", "hyper": {"lr": 1}, "branches": 1}
    with phub.Worker({"key": 8}, rank=0, world_size=1, **options) as worker:
        worker.wait_all()
        for said, calls in TOO_LARGE.items():
            for call in calls:
                with pytest.raises(phub.InvalidError, match=said):
                    call(worker)
        assert [each.branch for each in worker.branches()] == [0]
        worker.report_loss(np.float32(0.5), round=np.int64(1))


FLOATS = np.zeros(8, np.float32)
WRONG_CALLS = [
    ("no key 'kee'", lambda worker: worker.push("kee")),
    (
        "nothing for key 'key'",
        lambda worker: worker.broadcast({}),
    ),
    ("no key 'kee'", lambda worker: worker.broadcast({"key": FLOATS, "kee": FLOATS})),
    ("read-only", lambda worker: worker.parameters("key").__setitem__(0, 1)),
]
WRONG_MEMORY = [
    ("'key'.*28 bytes.*8 elements of f32 are 32", FLOATS[:7], {}),
    ("writable contiguous", np.zeros(16, np.float32)[::2], {}),
    ("writable contiguous", "text", {}),
    ("'key'.* f32, and these are of the format", np.zeros(8, np.int32), {}),
    ("'key'.* f32, and these are of the format", np.zeros(8, ">f4"), {}),
    ("'key'.* f32, and these are of the format", np.zeros(8, np.uint32), {}),
    ("are bf16, and .* the format 'e'", np.zeros(8, np.float16), {"gradient_dtype": "bf16"}),
    ("'key': the scale is 0: use push_null", None, {"scale": 0}),
    ("f32, bf16 or f16, not 'int8'", FLOATS, {"gradient_dtype": "int8"}),
    ("8 bytes.*8 elements of f32 are 32", np.zeros(8, np.int8), {}),
]


def test_wrong_calls_and_memory_are_named(box):
    with phub.Worker({"key": 8}, initial="broadcast") as worker:
        for message, call in WRONG_CALLS:
            with pytest.raises((phub.Error, TypeError), match=message):
                call(worker)
        for message, memory, options in WRONG_MEMORY:
            with pytest.raises(phub.InvalidError, match=message):
                worker.register_memory("key", memory, **options)


def test_parameters_that_would_not_count_are_refused(box):
    with phub.Worker({"key": 8}, optimizer="sgd") as worker:
        with pytest.raises(phub.InvalidError, match="begins with zeros.*'broadcast' in the option"):
            worker.broadcast({"key": np.ones(8, np.float32)})
        worker.broadcast()
        worker.push("key")
        worker.wait("key")


def test_a_state_within_a_round_is_refused(box):
    with phub.Worker({"key": 8, "other": 2}, optimizer="sgd") as worker:
        worker.push("key")
        with pytest.raises(phub.InvalidError, match="'key' is pushed up to round 1, .*'other' up"):
            worker.get_state({"key": [np.zeros(8, np.float32)]})
        worker.push("other")
        assert worker.get_state({"key": [np.zeros(8, np.float32)]}) == {"key": 1}


def test_a_key_that_was_never_pushed_is_told(box, capfd):
    with phub.Worker({"key": 8, "other": 2, "third": 2}) as worker:
        for _ in range(3):
            worker.push("key")
            worker.push("third")
            worker.wait_all()
    assert "took part in 3 rounds, and never pushed key 'other': nothing" in capfd.readouterr().err


def test_after_close_calls_are_errors_and_views_are_not(box):
    worker = phub.Worker({"key": 8})
    gradient, parameters = worker.gradient("key"), worker.parameters("key")
    worker.close()
    worker.close()
    with pytest.raises(phub.BadHandleError, match="closed"):
        worker.push("key")
    del worker
    gradient[3] = 5.0  # a SIGSEGV if it were unmapped
    assert parameters[3] == 0


def shared_mappings():
    return Path("/proc/self/maps").read_text().count("memfd:")


def test_the_last_view_unmaps_the_memory(box):
    before = shared_mappings()
    worker = phub.Worker({"key": 8}, transport="shm")
    view = worker.gradient("key")
    worker.close()
    del worker
    assert shared_mappings() > before
    del view
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
    import multiprocessing

    ready = multiprocessing.get_context("fork").Event()
    ranks = start(waits, 2, ready)
    assert ready.wait(60)
    time.sleep(0.3)  # so that it probably waits; it is right either way
    ranks.kill(0, signal.SIGINT)
    ranks.result(0)  # long before the limit of progress


def test_other_threads_wait_too(box):
    with phub.Worker({"key": 8}) as worker:
        worker.push("key")
        thread = threading.Thread(target=worker.wait, args=("key",))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()


def test_a_child_of_fork_is_refused_and_ends_nothing(box):
    with phub.Worker({"key": 8}) as worker:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                worker.push("key")
            except phub.WrongThreadError:
                status = 0
            del worker
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        worker.push("key")
        worker.wait("key")


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
    lost = pytest.raises(phub.RankLostError, match="rank 1")
    with lost if is_lost else contextlib.nullcontext():
        start(body, 2, how).result(0)


SCRIPT = """
import phub
worker = phub.Worker({"key": 8}, on_loss="fail")
worker.push("key"); worker.wait("key")
END
"""


@pytest.mark.parametrize(("end", "fails"), [("", False), ("raise ValueError", True)])
def test_a_script_that_ends_well_has_left_and_one_with_an_exception_is_lost(
    box, monkeypatch, end, fails
):
    """Nothing closes the worker."""
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE))
    monkeypatch.setenv("PHUB_WORLD_SIZE", "2")
    script = [sys.executable, "-c", SCRIPT.replace("END", end)]
    other = subprocess.Popen(script, env={**os.environ, "PHUB_RANK": "1"}, stderr=subprocess.PIPE)
    monkeypatch.setenv("PHUB_RANK", "0")
    with phub.Worker({"key": 8}, on_loss="fail") as worker:
        worker.push("key")
        worker.wait("key")
        _, said = other.communicate(timeout=60)
        assert other.returncode == (1 if fails else 0), said
        with pytest.raises(phub.RankLostError) if fails else contextlib.nullcontext():
            for _ in range(3):
                worker.push("key")
                worker.wait("key")


# ---- Loading.


def python(script, **environment):
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(PACKAGE), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_needs_neither_torch_nor_numpy():
    said = python(
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import phub; phub.Worker; print('ok')"
    )
    assert said.stdout == "ok\n", said.stderr


def test_a_library_that_is_not_there_is_named():
    said = python("import phub; phub.Worker({'key': 1})", PHUB_LIBRARY="/nowhere/lib.so")
    assert "LibraryError: phub's library cannot be used: /nowhere/lib.so" in said.stderr
    assert "Set PHUB_LIBRARY" in said.stderr


def test_a_library_that_is_not_phubs_is_named(tmp_path):
    libc = next(
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libc.so" in line
    )
    said = python("import phub; phub.Worker({'key': 1})", PHUB_LIBRARY=libc)
    assert "undefined symbol: phub_last_error. Set PHUB_LIBRARY" in said.stderr


def test_a_library_of_another_abi_is_refused(tmp_path):
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(
        'const char* phub_last_error(void) { return ""; }\n'
        'const char* phub_version(void) { return "9.1"; }\n'
        "int phub_abi_version(void) { return 7; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    said = python("import phub; phub.Worker({'key': 1})", PHUB_LIBRARY=str(library))
    assert f"{library} is of ABI 7 (version 9.1)" in said.stderr


def test_the_codes_are_those_of_the_header():
    from phub import errors

    header = (PACKAGE.parents[0] / "phub.h").read_text()
    codes = header.split("typedef enum phub_code {")[1].split("}")[0]
    for number, kind in enumerate(errors.BY_CODE, 1):
        assert f"PHUB_{kind.code.upper()} = {number}" in codes


def test_types_are_those_of_the_header():
    from phub import _library

    fields = dict(_library.StoreCounters._fields_)
    assert list(fields)[:4] == ["size", "in_sequence", "by_index", "dynamic"]
    assert set(list(fields.values())[1:]) == {c_uint64}
    assert len(fields) == 15
    assert dict(_library.KeyMemory._fields_)["gradient_dtype"] is c_char_p
    assert _library._arguments("report_loss") == [c_void_p, c_double, c_uint64]
    assert _library._arguments("push_then")[2:] == [c_int32, c_void_p, c_void_p]
    with pytest.raises(AttributeError, match="no phub_nothing"):
        _library._arguments("nothing")


def test_waits_for_is_empty_while_nothing_is_late(box):
    with phub.Worker({"key": 8}) as worker:
        assert worker.waits_for() == ""
        wait_until(lambda: worker.first_round == 1, "the first round")


# ---- Branches.


@of_ranks(2)
def test_branches_run_in_turns(rank):
    options = {"optimizer": "sgd", "hyper": {"lr": 1}, "branches": 1}
    with phub.Worker({"w": 4}, **options) as worker:
        worker.wait_all()
        if rank == 0:
            assert worker.fork(0, {"lr": 2}, round=3) == (1, 3)
            with pytest.raises(phub.FullError, match="no room for another"):
                worker.fork()
            assert worker.schedule((1, 1), 0, round=3) == 3
        worker.barrier()
        seen = []
        for step in range(1, 5):
            value = pushed(worker, "w", 1)[0]
            seen.append((worker.branch_in(step + 1), value))
        assert seen == [(0, -2), (1, -4), (0, -4), (0, -6)]
        if rank == 0:
            worker.set_hyper({"lr": 0.5})  # then the box knows the round
            root, child = worker.branches()
            assert child == phub.Branch(branch=1, parent=0, round=3, rounds=3, runs=False)
            assert (root.branch, root.runs) == (0, True)
            worker.discard(1)
            assert [branch.branch for branch in worker.branches()] == [0]
        worker.barrier()


def kills_a_branch(rank):
    options = {"optimizer": "momentum", "hyper": {"lr": 1, "momentum": 0.5}, "branches": 1}
    with phub.Worker({"w": 4}, **options) as worker:
        worker.wait_all()

        def step():
            return float(pushed(worker, "w", 1)[0])

        assert worker.fork(0, {"lr": 2}, round=3) == (1, 3)
        values = [step() for _ in range(3)]
        assert worker.kill(1) == 5
        assert not worker.branches()[1].on_disk
        with pytest.raises(phub.InvalidError, match="killed already"):
            worker.kill(1)
        values += [step() for _ in range(2)]
        wait_until(lambda: worker.branches()[1].on_disk, "the checkpoint that has the branch")
        assert worker.branches()[1].killed
        assert worker.fork()[0] == 2
        with pytest.raises(phub.FullError, match="no room for another"):
            worker.revive(1)
        worker.discard(2)
        at = worker.revive(1)
        assert not worker.branches()[1].killed
        at = worker.schedule(1, round=at + 1)
        values += [step() for _ in range(at - 1 - len(values))]
        return [*values[:2], values[-1], step()]


def test_a_branch_that_was_killed_comes_back(saving_box, start):
    # Two rounds of momentum: -1, then -1.5 more; the branch's next is 2 * (0.5 * 1.5 + 1) more.
    assert start(kills_a_branch, 1, PHUB_JOB="killed").results() == [[-1, -2.5, -2.5, -6]]


# ---- Groups, and the state at the box.


@of_ranks(2)
def test_groups_and_state(rank):
    keys = {"a": 4, "b": phub.Key(6, group=1)}
    with phub.Worker(keys, optimizer="momentum", hyper={"lr": 1, "lr@1": 0.5}) as worker:
        assert worker.state_names == ("momentum_buffer",)
        worker.wait_all()
        for key in keys:
            pushed(worker, key, 1)
        worker.set_hyper({"lr@1": 0.25})
        first, second = pushed(worker, "a")[0], pushed(worker, "b")[0]
        assert first == pytest.approx(-2 - 3.8)
        assert second == pytest.approx(-2 * 0.5 - 3.8 * 0.25)
        if rank == 0:
            arrays = {"b": [np.zeros(6, np.float32) for _ in range(2)]}
            steps = worker.get_state(arrays)
            assert steps == {"b": 2}
            assert [a[0] for a in arrays["b"]] == [second, np.float32(3.8)]
            with pytest.raises(phub.InvalidError, match="2 arrays .parameters, momentum_buffer."):
                worker.get_state({"b": arrays["b"][:1]})
            arrays["b"][0][:], arrays["b"][1][:] = 100, 0
            assert worker.set_state(arrays, steps) == 3
        pushed(worker, "a")
        assert pushed(worker, "b")[0] == pytest.approx(100 - 2 * 0.25)


# ---- What a rank has for itself.


def test_a_saver_that_fails_is_the_cause_of_the_error(memory_path, monkeypatch):
    monkeypatch.setenv("PHUB_JOB", "fails")
    box = SavingBox(memory_path, 1)

    def saver(round_):
        if round_ == 1:
            raise KeyError("state")
        return {"round": str(round_).encode()}

    try:
        options = {"server": box.address, "optimizer": "sgd", "saver": saver}
        with phub.Worker({"key": 8}, **options) as worker:
            assert worker.job == "fails"
            worker.push_null("key")
            with pytest.raises(phub.InvalidError, match="no checkpoint of round 1") as raised:
                worker.wait("key")
            assert isinstance(raised.value.__cause__, KeyError)
            worker.push_null("key")
            worker.wait("key")
            with pytest.raises(phub.InvalidError, match="out of range") as raised:
                _library.call("push_null", worker._worker, 8)
            assert raised.value.__cause__ is None
    finally:
        box.kill()


def saves_and_rejoins(rank):
    kept = {"round": b"0"}
    with phub.Worker({"key": 8}, optimizer="sgd", saver=lambda _: dict(kept)) as worker:
        assert worker.restored("round") is None

        def train(first):
            for round_ in range(first, 10_000):
                worker.push_null("key")
                worker.wait("key")
                kept["round"] = str(round_).encode()
                worker.save_point(round_)

        with pytest.raises(phub.RewoundError):
            train(1)
        first = worker.rejoin()
        assert worker.restored("round") == str(first - 1).encode()
        assert worker.restored("other") is None


def test_what_is_saved_at_save_points_comes_back(memory_path, start):
    box = SavingBox(memory_path, 3)
    try:
        ranks = start(saves_and_rejoins, 2, PHUB_SERVER=box.address, PHUB_JOB="saves")
        wait_until(lambda: box.status("saves").get("durable_round", 0) > 5, "a checkpoint")
        box.die_and_come_back()
        ranks.results()
    finally:
        box.kill()


@of_ranks(1)
def test_others_wait_ten_minutes_for_a_rank_that_validates(rank):
    with phub.Worker({"w": 4}):
        wrong = {"progress_limit_ms": 60_000, "max_ranks": 1, "replace": True}
        with pytest.raises(phub.MismatchError, match="60000 here and 600000 in the job"):
            phub.Worker({"w": 4}, **wrong)
