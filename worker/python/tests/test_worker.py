"""The core: a job's options, memory, exchange and errors, without PyTorch."""

import subprocess
import weakref

import numpy as np
import pytest
from conftest import SavingBox, of_ranks, pushed, refused, wait_until

import phub
from phub import _library

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])


@TRANSPORTS
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


def test_a_second_worker_and_a_program_without_a_launcher_are_told_the_way_out(box, monkeypatch):
    with phub.Worker({"w": 4}, rank=0, world_size=1):
        message = r"taken by.*This process is itself in job '.*'.*job='NAME'.*call close\(\) first"
        refused(message, phub.Worker, {"w": 4}, rank=0, world_size=1, error=phub.TakenError)
    phub.Worker({"w": 4}, rank=0, world_size=1).close()
    for name in ("PHUB_SERVER", "PHUB_JOB"):
        monkeypatch.delenv(name)
    refused("Give the job a name.*phub run -n 2 -- python", phub.Worker, {"w": 4})


@of_ranks(2)
def test_a_rank_sends_what_it_writes_and_gets_what_it_reads(rank):
    half = (32 * rank, 32 * rank + 32)
    key = phub.Key(64, writes=[half], reads=[(0, 64)] if rank == 0 else ())
    with phub.Worker({"t": key, "other": phub.Key(8, reads=())}, chunk_elements=32) as worker:
        found = pushed(worker, "t", rank + 1)
        refused("neither write nor read", worker.push, "other")
        worker.barrier()
        assert worker.stats.chunks_pushed == (2 if rank == 0 else 1)
        assert rank > 0 or np.array_equal(found, [1] * 32 + [2] * 32)


@TRANSPORTS
@of_ranks(2)
def test_own_memory_is_sent_scaled_and_converted(rank, transport):
    with phub.Worker({"key": 5000}, transport=transport, reduction="mean") as worker:
        result, pulled = np.zeros((2, 5000), np.float32)
        worker.register_memory("key", np.full(5000, rank + 1, np.float32), result, scale=2.0)
        pushed(worker, "key")
        assert (result == 3.0).all()
        worker.pull("key", pulled)
        assert np.array_equal(pulled, result)
        worker.register_memory("key")
        worker.push_copy("key", np.full(5000, 3 * rank, np.float32))
        worker.wait("key")
        assert (np.asarray(worker.parameters("key")) == 1.5).all()
        refused("20000", worker.push_copy, "key", np.zeros(4999, np.float32))
        refused("format 'i'", worker.push_copy, "key", np.zeros(5000, np.int32))
        half = np.full(5000, rank, np.float16)
        worker.register_memory("key", half, half, gradient_dtype="f16", parameter_dtype="f16")
        pushed(worker, "key")
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


def test_checkpoints_have_the_shapes_of_keys(memory_path):
    keys = {"w": phub.Key(600, shape=(3, 4, 50)), "b": 10}
    with (
        SavingBox(memory_path, 1) as box,
        phub.Worker(keys, server=box.address, job="shapes", optimizer="sgd") as worker,
    ):

        def saved_after_another_round():
            for key in worker.keys:
                worker.push_null(key)
            worker.wait_all()
            return list(memory_path.glob("shapes/round-*/manifest.json"))

        wait_until(saved_after_another_round, "a checkpoint")
    command = [_library.find_program(), "checkpoint", "show", str(memory_path), "shapes"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "F32 [3, 4, 50]  w" in shown
    assert "F32 [10]  b" in shown


def test_what_is_not_pushed_is_there_at_once(box):
    with phub.Worker({"key": 8}) as worker:
        assert worker.waits_for() == ""
        assert worker.ready("key")
        worker.wait("key")
        worker.push_null("key")
        worker.wait("key")
        assert worker.poll() == 0
        assert worker.parameters("key").tolist() == [0] * 8
        assert worker.first_round == 1


# ---- What is refused.

MATRIX = {"elements": 400, "shape": (100, 4)}
SGD = {"optimizer": "sgd"}
WRONG_OPTIONS = [  # of the key, of the job, and what is said
    ({}, {"optimiser": "sgd"}, "'optimizer'"),
    ({}, {"optimizer": "sdg"}, "sdg"),
    ({}, {"server": "127.0.0.1:1", "connect_timeout_ms": 100}, "127.0.0.1:1"),
    ({}, {"world_size": "two"}, "two"),
    ({}, {"world_size": 4, "groups": "2;2"}, "at character 2 of '2;2'"),
    ({}, {"rank": 7, "world_size": 2}, "7"),
    ({}, {"branches": 1.5}, r"option 'branches' is 1\.5: it must be a whole number"),
    ({}, {"branches": 2**64 + 1}, "option 'branches' is 18446744073709551617: it must"),
    ({}, {"hyper": {"lr": "x"}, **SGD}, "hyperparameter 'lr' is 'x': it must be a nu"),
    ({}, {"memory_device": 2**32}, "the number of a GPU, not 4294967296"),
    ({}, {"memory_device": "cuda:0"}, "number of a GPU, not 'cuda:0'"),
    ({}, {"hyper": {"momentum": 0.9}, **SGD}, "'momentum' is 0.9, and optimizer 'sgd'"),
    ({}, {"hyper": {"lr": 0.1}}, "'lr' is 0.1, and optimizer 'none' .* is for all but none"),
    ({}, {"formats": {"*.wieght": "int8"}}, r"1 keys .* '\*\.wieght'"),
    ({}, {"formats": {"*": "int7"}}, "got 'int7'; did you mean 'int8'"),
    ({}, {"gradient_dtype": "fp8"}, "fp8-e5m2, int32, int8, int4, topk"),
    ({}, {"gradient_dtype": "f32*9,int7"}, r"a schedule such as .*, got 'f32\*9,int7'"),
    ({}, {"formats": {"*": "f32*0,int8"}}, r"format: .* a schedule .*, got 'f32\*0,int8'"),
    ({}, {"gradient_dtype": "f32*9,topk", "consistency": "ssp"}, "its formats go by rounds"),
    ({}, {"rounding": "stochastically"}, "one of nearest, stochastic"),
    ({}, {"parameter_dtype": "int8"}, "parameter_dtype"),
    ({}, {"gradient_dtype": "topk", "chunk_elements": 1 << 17}, "chunks of at most 65536"),
    ({**MATRIX, "rows_limit": 2**40}, {}, "rows_limit is 1099511627776: it must"),
    ({**MATRIX, "rank_limit": -1}, {}, "rank_limit is -1: it must"),
    ({**MATRIX, "lazy": True}, {}, "'key': lazy is for a key .* a rows_limit"),
    ({"shape": (2.0,)}, {}, r"a dimension of its shape is 2\.0: it must be a whole number"),
    ({"shape": (2, 3)}, {}, r"'key'.*shape \(2, 3\).*elements, which is 8"),
    ({"elements": 1, "shape": (1,) * 9}, {}, "'key'.*1 to 8 dimensions, not 9"),
    ({"priority": 2**31}, {}, "priority is 2147483648: it must"),
    ({"group": 2**32}, {}, "group is 4294967296: it must"),
    ({"lr_scale": "x"}, {}, "lr_scale is 'x': it must be a number"),
    ({"writes": [(0, 2**64)]}, {}, "an end of a range is 18446744073709551616: it must"),
    ({"elements": 2**64 + 8}, {}, "the number of elements is 18446744073709551624: it must"),
    ({"elements": 8.0}, {}, r"the number of elements is 8\.0: it must be a whole number"),
    ({"elements": 0}, {}, "key 'key' has 0 elements"),
]


@pytest.mark.parametrize(("key", "options", "message"), WRONG_OPTIONS)
def test_options_and_numbers_of_keys_that_do_not_fit_are_named(box, key, options, message):
    kinds = {"127.0.0.1:1": phub.UnavailableError, "7": phub.Error}
    kind = phub.NotFoundError if "wieght" in message else kinds.get(message, phub.InvalidError)
    with pytest.raises(kind, match=message):
        phub.Worker({"key": phub.Key(**{"elements": 8, **key})}, **options)


LARGE, BRANCH = {"round": 2**64}, "the branch is 4294967296: it must"
ROUND = "the round is 18446744073709551616: it must"
WRONG_NUMBERS = [  # what is said of calls, and what they are given
    (BRANCH, "fork schedule discard kill revive", (2**32,), {}),
    (BRANCH, "schedule", ((2**32, 3), 0), {}),
    ("the branch is -1: it must", "fork", (-1,), {}),
    ("the branch is 'x': it must be a whole number", "fork", ("x",), {}),
    ("the number of rounds is 18446744073709551616", "schedule", ((0, 2**64), 0), {}),
    (ROUND, "fork schedule discard kill revive", (0,), LARGE),
    (ROUND, "set_hyper", ({"lr": 1},), LARGE),
    (ROUND, "branch_in batch_in save_point", (2**64,), {}),
    (ROUND, "report_loss", (1,), LARGE),
    ("the loss is 'x': it must be a number", "report_loss", ("x",), {}),
    ("the name of a loss is 7: it must be text", "report_loss", (1,), {"name": 7}),
    ("the name of a loss is 'a.x00b': it must", "report_loss", (1,), {"name": "a\0b"}),
    ("'a b' cannot name a loss", "report_loss", (1,), {"name": "a b"}),
    ("hyperparameter 'lr' is 'x': it must", "set_hyper", ({"lr": "x"},), {}),
    ("hyperparameter 'lr' is 'x': it must", "fork", (0, {"lr": "x"}), {}),
    ("the priority is 2147483648: it must", "push", ("key", 2**31), {}),
    ("the scale is None: it must", "register_memory", ("key",), {"scale": None}),
]


def test_numbers_of_calls_that_do_not_fit_are_named(box):
    options = {"optimizer": "sgd", "hyper": {"lr": 1}, "branches": 1}
    with phub.Worker({"key": 8}, rank=0, world_size=1, **options) as worker:
        worker.wait_all()
        for message, calls, arguments, more in WRONG_NUMBERS:
            for call in calls.split():
                refused(message, getattr(worker, call), *arguments, **more)
        assert [each.branch for each in worker.branches()] == [0]
        worker.report_loss(np.float32(0.5), round=np.int64(1))
        worker.report_loss(0.5, name="validation")


FLOATS = np.zeros(8, np.float32)
WRONG_CALLS = [
    ("no key 'kee'", lambda worker: worker.push("kee")),
    ("nothing for key 'key'", lambda worker: worker.broadcast({})),
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
            refused(message, call, worker, error=(phub.Error, TypeError))
        for message, memory, options in WRONG_MEMORY:
            refused(message, worker.register_memory, "key", memory, **options)


def test_parameters_that_would_not_count_and_a_state_within_a_round_are_refused(box):
    with phub.Worker({"key": 8, "other": 2}, optimizer="sgd") as worker:
        arrays = {"key": [np.zeros(8, np.float32)]}
        ones = {"key": np.ones(8, np.float32), "other": np.ones(2, np.float32)}
        refused("begins with zeros.*'broadcast' in the option", worker.broadcast, ones)
        worker.broadcast()
        worker.push("key")
        refused("'key' is pushed up to round 1, .*'other' up", worker.get_state, arrays)
        worker.push("other")
        assert worker.get_state(arrays) == {"key": 1}


def test_a_key_that_was_never_pushed_is_told(box, capfd):
    with phub.Worker({"key": 8, "other": 2, "third": 2}) as worker:
        for _ in range(3):
            worker.push("key")
            worker.push("third")
            worker.wait_all()
    assert "took part in 3 rounds, and never pushed key 'other': nothing" in capfd.readouterr().err


# ---- Branches, groups, and the state at the box.


@of_ranks(2)
def test_branches_run_in_turns(rank):
    options = {"optimizer": "sgd", "hyper": {"lr": 1}, "branches": 1}
    with phub.Worker({"w": 4}, **options) as worker:
        worker.wait_all()
        if rank == 0:
            assert worker.fork(0, {"lr": 2}, round=3) == (1, 3)
            refused("no room for another", worker.fork, error=phub.FullError)
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

        def steps(number):
            return [float(pushed(worker, "w", 1)[0]) for _ in range(number)]

        assert worker.fork(0, {"lr": 2}, round=3) == (1, 3)
        values = steps(3)
        assert worker.kill(1) == 5
        assert not worker.branches()[1].on_disk
        refused("killed already", worker.kill, 1)
        values += steps(2)
        wait_until(lambda: worker.branches()[1].on_disk, "the checkpoint that has the branch")
        assert worker.branches()[1].killed
        assert worker.fork()[0] == 2
        refused("no room for another", worker.revive, 1, error=phub.FullError)
        worker.discard(2)
        at = worker.revive(1)
        assert not worker.branches()[1].killed
        at = worker.schedule(1, round=at + 1)
        values += steps(at - 1 - len(values))
        return [*values[:2], values[-1], *steps(1)]


def test_a_branch_that_was_killed_comes_back(saving_box, start):
    # Two rounds of momentum: -1, then -1.5 more; the branch's next is 2 * (0.5 * 1.5 + 1) more.
    assert start(kills_a_branch, 1, PHUB_JOB="killed").results() == [[-1, -2.5, -2.5, -6]]


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
            few = {"b": arrays["b"][:1]}
            refused("2 arrays .parameters, momentum_buffer.", worker.get_state, few)
            arrays["b"][0][:], arrays["b"][1][:] = 100, 0
            assert worker.set_state(arrays, steps) == 3
        pushed(worker, "a")
        assert pushed(worker, "b")[0] == pytest.approx(100 - 2 * 0.25)


# ---- What a rank has for itself.


def test_a_saver_that_fails_is_the_cause_of_the_error(memory_path, monkeypatch):
    monkeypatch.setenv("PHUB_JOB", "fails")

    def saver(round_):
        if round_ == 1:
            raise KeyError("state")
        return {"round": str(round_).encode()}

    def cause(message, call, *arguments):
        with pytest.raises(phub.InvalidError, match=message) as raised:
            call(*arguments)
        return raised.value.__cause__

    with (
        SavingBox(memory_path, 1) as box,
        phub.Worker({"key": 8}, server=box.address, optimizer="sgd", saver=saver) as worker,
    ):
        assert worker.job == "fails"
        worker.push_null("key")
        assert isinstance(cause("no checkpoint of round 1", worker.wait, "key"), KeyError)
        worker.push_null("key")
        worker.wait("key")
        assert cause("out of range", _library.call, "push_null", worker._worker, 8) is None


def saves_and_rejoins(rank):
    kept = {"round": b"0"}
    with phub.Worker({"key": 8}, optimizer="sgd", saver=lambda _: dict(kept)) as worker:
        assert worker.restored("round") is None

        def train():
            for round_ in range(1, 10_000):
                worker.push_null("key")
                worker.wait("key")
                kept["round"] = str(round_).encode()
                worker.save_point(round_)

        with pytest.raises(phub.RewoundError):
            train()
        first = worker.rejoin()
        assert worker.restored("round") == str(first - 1).encode()
        assert worker.restored("other") is None


def test_what_is_saved_at_save_points_comes_back(saving_box, start):
    ranks = start(saves_and_rejoins, 2, PHUB_JOB="saves")
    wait_until(lambda: saving_box.status("saves").get("durable_round", 0) > 5, "a checkpoint")
    saving_box.die_and_come_back()
    ranks.results()


@of_ranks(1)
def test_others_wait_ten_minutes_for_a_rank_that_validates(rank):
    with phub.Worker({"w": 4}):
        wrong = {"progress_limit_ms": 60_000, "max_ranks": 1, "replace": True}
        message = "60000 here and 600000 in the job"
        refused(message, phub.Worker, {"w": 4}, **wrong, error=phub.MismatchError)
