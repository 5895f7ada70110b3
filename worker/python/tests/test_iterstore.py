"""A store reads what one thread computes over plain arrays, and refuses what is wrong."""

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import EVERY, SEED, refused, wait_until

from phub import errors
from phub.iterstore import NO_ROW, Store, Table

CLOCKS, ROWS, COLUMNS = 4, 40, 3
FOLDS = {"add": np.add, "multiply": np.multiply, "min": np.minimum, "max": np.maximum}
FOLDS["or"] = np.bitwise_or
TABLES = [
    Table(f"{dtype}-{operation}", ROWS, COLUMNS if operation == "min" else 1, dtype, operation)
    for dtype in ("float32", "float64", "int32", "int64")
    for operation in FOLDS
    if operation != "or" or dtype.startswith("int")
]


def begun(table):
    """The operation's identity, in every row."""
    dtype = np.dtype(table.dtype)
    whole = dtype.kind == "i"
    ends = (np.iinfo(dtype).min, np.iinfo(dtype).max) if whole else (-np.inf, np.inf)
    identity = {"multiply": 1, "min": ends[1], "max": ends[0]}.get(table.operation, 0)
    shape = ROWS if table.columns == 1 else (ROWS, table.columns)
    return np.full(shape, identity, dtype)


def calls_of(rank, thread, clock):
    """(table, rows, values) of a thread's updates, whose order changes no bit, and what it reads.

    Whole numbers that are exact in float32, and factors that are powers of two.
    """
    draw = np.random.default_rng([SEED, rank, thread, clock])
    for table in TABLES:
        rows = draw.integers(ROWS, size=draw.integers(1, 12))
        shape = len(rows) if table.columns == 1 else (len(rows), table.columns)
        multiplies = table.operation == "multiply"
        values = draw.choice([1, -1, 2], shape) if multiplies else draw.integers(-999, 999, shape)
        yield table, rows, values.astype(table.dtype), draw.integers(ROWS, size=9)


def iterate(mine, rank, clock):
    """What the thread reads, table by table: before its updates, and after them."""
    read = []
    for table, rows, values, others in calls_of(rank, mine.number, clock):
        before = mine.read_batch(table.name, others)
        mine.update_batch(table.name, rows, values)
        read.append((before, mine.read_batch(table.name, rows)))
    mine.clock()
    return read


def runs(rank, world, threads, gather, options):
    def body(mine):
        if gather == "virtual":
            with mine.virtual():
                assert mine.is_virtual
                for before, after in iterate(mine, rank, 0):
                    assert not before.any()
                    assert not after.any()
        read = []
        for clock in range(CLOCKS):
            if gather == "gathering" and clock == 1:
                mine.gathering()
            read.append(iterate(mine, rank, clock))
            if gather == "gathering" and clock == 1:
                mine.finish()
            assert not mine.is_virtual
        return read

    with Store(TABLES, threads=threads, chunk_elements=64, **options) as store:
        assert (store.rank, store.world_size) == (rank, world)
        read = store.run(body)
        assert store.stats.clocks == CLOCKS
        assert store.stats.placed == (gather != "never")
        return read, {table.name: store.table(table.name) for table in TABLES}


def alone(world, threads):
    """By rank and thread what they read, and the tables."""
    states = {table.name: begun(table) for table in TABLES}
    read = [[[] for _ in range(threads)] for _ in range(world)]
    for clock in range(CLOCKS):
        changed = {name: state.copy() for name, state in states.items()}
        for rank in range(world):
            for thread in range(threads):
                seen = []
                for table, rows, values, others in calls_of(rank, thread, clock):
                    fold, mine = FOLDS[table.operation], states[table.name].copy()
                    before = mine[others]
                    fold.at(mine, rows, values)
                    fold.at(changed[table.name], rows, values)
                    seen.append((before, mine[rows]))
                read[rank][thread].append(seen)
        states = changed
    return read, states


@pytest.mark.parametrize(
    ("world", "threads", "gather", "options"),
    [
        (1, 1, "never", {}),
        (2, 3, "virtual", {}),
        (3, 2, "gathering", {"transport": "tcp", "batches": 2}),
        (2, 2, "virtual", {"static_index": False, "placement": False}),
    ],
)
def test_reads_what_one_thread_computes(box, start, world, threads, gather, options):
    want, states = alone(world, threads)
    ranks = start(runs, world, world, threads, gather, options).results()
    for rank, (read, tables) in enumerate(ranks):
        np.testing.assert_equal(read, want[rank])
        np.testing.assert_equal(tables, states)
        assert [tables[table.name].dtype for table in TABLES] == [table.dtype for table in TABLES]


@pytest.fixture
def one(box):
    """A store of one rank and thread, with tables of one column, of several, and that change."""
    tables = [
        Table("vector", 6, dtype=np.int64),
        Table("matrix", 6, 2, np.float64),
        Table("changing", 2, spare=2),
    ]
    with Store(tables, rank=0) as store, store.thread(0) as mine:
        yield store, mine


def test_arrays_of_the_caller(one):
    _, mine = one
    into = np.full((3, 2), 7.0)
    mine.update_batch("matrix", np.array([0, 2, 4], np.uint8), np.arange(6.0).reshape(2, 3).T)
    assert mine.read_batch("matrix", (4, 2, 1), into) is into
    assert into.tolist() == [[2, 5], [1, 4], [0, 0]]
    mine.update_batch("vector", [5, 5], np.array([[1], [2]]))
    assert mine.read_batch("vector", [5], np.zeros((1, 1), np.int64)).tolist() == [[3]]
    assert mine.read_batch("vector", []).shape == (0,)
    mine.clock()
    with mine.virtual():
        mine.read_batch("matrix", [0, 1, 2], into)
        mine.update_batch("vector", [0], [99])
        mine.clock()
    assert into.tolist() == [[2, 5], [1, 4], [0, 0]]
    assert mine.read_batch("vector", [0]).tolist() == [0]


def test_counts_and_settings(box):
    def counted(**settings):
        with Store([Table("t", 9)], rank=0, **settings) as store, store.thread(0) as mine:
            mine.virtual()
            for ends in (mine.finish, list):
                mine.read_batch("t", range(5))
                mine.clock()
                ends()
            return store.stats

    assert counted().in_sequence == 5
    assert counted().cached == 5
    assert counted(push_early=True).pushed_early == 0  # it only reads
    assert counted(static_index=np.False_).by_index == 5


def test_rows_come_and_go(one):
    store, mine = one
    row = 2**63 + 5
    mine.add_row("changing", row)
    assert not mine.has_row("changing", row)
    mine.clock()
    mine.clock()
    assert mine.has_row("changing", row)
    assert sorted(store.rows("changing")) == [0, 1, row, NO_ROW]
    mine.update_batch("changing", [row], np.array([2.5], np.float32))
    mine.clock()
    place = store.rows("changing").tolist().index(row)
    assert store.table("changing").tolist() == [2.5 if at == place else 0 for at in range(4)]
    mine.delete_row("changing", np.uint64(row))
    mine.clock()
    mine.clock()
    assert not mine.has_row("changing", row)
    refused("was deleted", mine.read_batch, "changing", [row])


FLOATS = np.zeros(2)
WRONG = {
    "no table 'other'": lambda mine: mine.read_batch("other", [0]),
    "no row 6": lambda mine: mine.read_batch("vector", [0, 6]),
    "no row -1": lambda mine: mine.read_batch("vector", [2, -1]),
    "whole numbers": lambda mine: mine.read_batch("vector", [0.5]),
    r"shape \(1, 2\)": lambda mine: mine.read_batch("vector", [[0, 1]]),
    "of int64": lambda mine: mine.update_batch("vector", [0, 1], FLOATS),
    r"of shape \(2,\)": lambda mine: mine.update_batch("vector", [0, 1], [1, 2, 3]),
    r"of shape \(2, 2\)": lambda mine: mine.update_batch("matrix", [0, 1], FLOATS),
    "not of .2, 3.": lambda mine: mine.update_batch("matrix", [0, 1], np.zeros((2, 3))),
    "must be contiguous": lambda mine: mine.read_batch("matrix", [0], np.zeros((2, 2)).T[:1]),
    "aligned and writable": lambda mine: mine.read_batch("matrix", [0], read_only((1, 2))),
    "is a NumPy array": lambda mine: mine.read_batch("vector", [0], [0]),
    "no iteration is being recorded": lambda mine: mine.finish(),
    "spare rows": lambda mine: mine.add_row("vector", 7),
    "has already row 0": lambda mine: mine.add_row("changing", 0),
    "the row is -1": lambda mine: mine.delete_row("changing", -1),
    "the row is 18446744073709551616": lambda mine: mine.has_row("changing", 2**64),
}


def read_only(shape):
    array = np.zeros(shape)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("words", WRONG)
def test_wrong_calls(one, words):
    store, mine = one
    mine.update_batch("vector", [0], [1])
    refused(words, WRONG[words], mine, error=(errors.InvalidError, errors.NotFoundError))
    refused("not clocked", store.table, "vector")
    mine.clock()
    assert store.table("vector").tolist() == [1, 0, 0, 0, 0, 0]
    assert not store.table("matrix").any()


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        (Table("t", 1, dtype="float16"), {}, "not float16"),
        (Table("t", 1, dtype=">f8"), {}, "not >f8"),
        (Table("t", 1, dtype="words"), {}, "not words"),
        (Table("t", 1, operation="or"), {}, "no operation 'or'"),
        (Table("t", -1), {}, "the number of rows is -1"),
        (Table("t", 1, 2**32), {}, "the number of columns is 4294967296"),
        (Table("t", 1, fixed=True, spare=1), {}, "cannot be fixed"),
        (Table("t", 1), {"threads": 0}, "1 to 4096 threads"),
        (Table("t", 1), {"batches": 1.5}, "'1.5'"),
        (Table("t", 1), {"numa": 2}, "got 2"),
        (Table("t", 1), {"gather_again": -1}, "gather_again"),
        (Table("t", 1), {"static_idx": False}, "no option 'static_idx'"),
        (Table("t", 1), {"rank": -1}, "rank is -1"),
    ],
)
def test_wrong_options(box, table, options, words):
    refused(words, Store, [table], **{"rank": 0, **options})


def test_threads_are_their_own(one):
    store, mine = one
    closed = {"error": errors.BadHandleError}
    refused("has a StoreThread already", store.thread, 0)
    refused("0 to 0", store.thread, 1)
    with ThreadPoolExecutor() as pool:
        refused("thread", pool.submit(mine.clock).result, error=errors.WrongThreadError)
    mine.clock()
    mine.close()
    mine.close()
    refused("was closed", mine.clock, **closed)
    with store.thread(0) as again:
        again.clock()
    store.close()
    refused("was closed", store.table, "vector", **closed)


def test_an_error_of_a_thread_is_that_of_the_run(box):
    def body(mine):
        mine.clock()
        if mine.number == 1:
            raise ArithmeticError("of thread 1")
        mine.clock()

    with Store([Table("t", 3)], threads=3, rank=0) as store:
        refused("of thread 1", store.run, body, error=ArithmeticError)
        refused("thread 1 of the store is gone", store.run, lambda mine: mine.clock())


def goes_while_another_fails(rank):
    try:
        with Store([Table("t", 3)], on_loss="fail") as store, store.thread(0) as mine:
            mine.clock()
            if rank == 1:
                raise ArithmeticError
            for _ in range(2):
                mine.clock()
                mine.read_batch("t", [0])
    except ArithmeticError:
        os._exit(1)  # while there still is a `store`, as where nothing catches it


def test_a_rank_that_fails_is_lost(box, start):
    with pytest.raises(errors.RankLostError):
        start(goes_while_another_fails, 2).result(0)


def saved_run(rank, clocks):
    """Rows of a generator's choice, by its numbers; the generator is what the rank saves."""
    random = np.random.default_rng([SEED, rank])

    def iteration(mine):
        rows = random.integers(500, size=40)
        mine.update_batch("t", rows, random.standard_normal((40, 3)))
        mine.clock()

    def body(mine):
        mine.update_batch("t", np.arange(500), np.ones((500, 3)))
        mine.clock()
        with mine.virtual():
            mine.read_batch("t", np.arange(rank, 500, 2))
        assert (store.restored("random") is None) == (store.clocks == 1)
        assert store.restored("other") is None
        if saved := store.restored("random"):
            random.bit_generator.state = pickle.loads(saved)
        began = store.clocks
        while store.clocks < clocks:
            iteration(mine)
            time.sleep(0.005)
        return began

    def saver(at):
        assert at == store.clocks
        return {"random": pickle.dumps(random.bit_generator.state)}

    tables = [Table("t", 500, 3, np.float64)]
    with Store(tables, saver=saver, on_loss="fail", chunk_elements=64) as store:
        return store.run(body)[0], store.table("t")


def test_a_store_goes_on_to_the_bit_when_box_and_ranks_are_killed(saving_box, start):
    clocks = 1 + 60 * EVERY
    _, whole = start(saved_run, 2, clocks, PHUB_JOB="whole").result(0)
    ranks = start(saved_run, 2, clocks, PHUB_JOB="killed")
    durable = 0
    for _ in range(2):

        def is_saved(before=durable):
            return saving_box.status("killed.rows").get("durable_round", 0) > before

        wait_until(is_saved, "a checkpoint")
        durable = saving_box.status("killed.rows")["durable_round"]
        ranks.kill(0)
        saving_box.die_and_come_back()
        ranks.kill(1)
        for rank in range(2):
            ranks.replace(rank)
    for began, table in ranks.results():
        assert began > durable
        assert table.tobytes() == whole.tobytes()


class MistakeError(Exception):
    """Of the application, which catches it."""


def fails_and_lives_on(rank, within):
    """A store that an exception ends after a checkpoint, and the next one in the same process.

    within: the next one is made while the exception, and so the first store, is still there.
    """
    tables = [Table("t", 50, dtype=np.int64)]

    def saver(at):
        return {"clocks": str(at).encode()}

    def iterate(mine):
        mine.update_batch("t", [rank, 10], [1, 1])
        mine.clock()

    def once(end):
        with Store(tables, saver=saver, on_loss="fail") as store, store.thread(0) as mine:
            with mine.virtual():
                iterate(mine)
            began = store.clocks
            assert store.restored("clocks") == (str(began).encode() if began else None)
            return began, end(store, mine)

    def mistake(store, mine):
        while store.clocks < 3 * EVERY:
            iterate(mine)
            time.sleep(0.1)
        store.table("t")
        raise MistakeError

    def go_on(store, mine):
        for _ in range(2):
            iterate(mine)
        mine.close()
        return store.clocks, store.table("t").tolist()

    try:
        once(mistake)
    except (MistakeError, errors.RankLostError) as error:  # of this rank, or the other
        if within:
            return once(go_on), error.__traceback__ is not None
    return once(go_on), True


@pytest.mark.parametrize("within", [False, True])
def test_a_store_goes_on_after_an_exception_in_the_same_process(saving_box, start, within):
    ranks = start(fails_and_lives_on, 2, within, PHUB_JOB="mine").results()
    for (began, (clocks, table)), is_caught in ranks:
        assert is_caught
        assert began >= EVERY
        assert clocks == began + 2
        assert table[:2] == [clocks, clocks]
        assert table[10] == 2 * clocks


@pytest.mark.parametrize(("status", "goes_on"), [(0, False), (1, True)])
def test_an_exit_with_a_code_is_a_failure(saving_box, monkeypatch, status, goes_on):
    monkeypatch.setenv("PHUB_JOB", "exits")

    def once(end):
        tables = [Table("t", 5)]
        options = {"rank": 0, "saver": lambda _: {}, "on_loss": "fail"}
        with Store(tables, **options) as store, store.thread(0) as mine:
            with mine.virtual():
                pass
            return end(store, mine)

    def exits(store, mine):
        while not saving_box.status("exits.rows").get("durable_round", 0):
            mine.clock()
            time.sleep(0.02)
        raise SystemExit(status)

    with pytest.raises(SystemExit):
        once(exits)
    assert (once(lambda store, _: store.clocks) > 0) == goes_on


def test_an_abandoned_store_is_closed(box):
    store = Store([Table("t", 5)], rank=0)
    with store.thread(0) as mine:
        mine.clock()
        store.abandon()
        store.abandon()
        refused("fenced|abandoned", mine.clock, error=errors.FencedError)
        refused("the store was closed", store.table, "t", error=errors.BadHandleError)
