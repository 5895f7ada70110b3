"""A store of rows that the threads of a job's processes read and update, iteration by iteration.

What one iteration accesses, once recorded, says where rows should lie for the next ones. It needs
NumPy. Calls are those of worker/iterstore/store.h, which says what is read when.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar, Union

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from phub import _library, errors
from phub._library import call
from phub._numbers import whole_number
from phub._options import Option, set_options
from phub._row_arrays import TableArrays, row_numbers
from phub._saver import Saver, SaverCall, set_saver
from phub._waiting import waiting_call

__all__ = ["NO_ROW", "Store", "StoreStats", "StoreThread", "Table"]

NO_ROW = 2**64 - 1  # no row has this number
_SETTINGS = (  # phub_store_options_set; the others are of the job
    "placement",
    "numa",
    "static_index",
    "batches",
    "push_early",
    "gather_again",
)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Table:
    """Rows of `columns` values of float32, float64, int32 or int64.

    An update changes a row by the `operation`: "add", "multiply", "min", "max" or, of whole
    numbers, "or"; the table begins with its identity.
    `fixed`: this process will access only rows that it recorded, and update only those that it
    recorded as updated; only these travel. A call that strays from that is right, but waits until
    all other threads, of all processes, have come to a clock.
    `spare`: places for rows that are added later; in lock-step, and not of a table that is fixed.
    """

    name: str
    rows: int
    columns: int = 1
    dtype: DTypeLike = "float32"
    operation: str = "add"
    fixed: bool = False
    spare: int = 0


@dataclass(frozen=True)
class StoreStats:
    """Counters of a store; accesses are those since rows were placed last."""

    in_sequence: int  # accesses that came as recorded
    by_index: int  # others, of rows that the thread is known to access
    dynamic: int  # others: by a hash map with locks
    places: int  # rows of threads that have a place of their own
    cached: int  # of these, that have a copy of the state
    clocks: int
    placed: int  # times that rows were placed
    widened: int  # times that a table ceased to be fixed, until rows were placed anew
    pushes: int  # of the present job, as in phub.Stats
    chunks_pushed: int
    chunks_received: int
    bytes_copied: int
    sleeps: int
    reconnections: int
    pushed_early: int  # batches that went before the clock, in the present job


class Store:
    """What one process has of a store: a rank of its job.

    with Store([Table("ranks", pages, dtype="float64")], threads=4, job="ranks") as store:
        store.run(body)  # body(mine) in each thread, with a StoreThread
        ranks = store.table("ranks")

    Errors are `phub.Error`s. One of `clock` or `finish` is that of all threads, and ends the store.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        threads: int = 1,
        saver: Saver | None = None,
        **options: Union[Option, float],  # noqa: UP007
    ) -> None:
        """Joins nothing yet: the first access or `finish` does, and waits for all ranks.

        tables: the same on every rank.
        threads: of each process; each has a `StoreThread`.
        saver: what this process has for itself: called with a number of clocks after which the box
            saves the store, returns bytes by name, which `restored` gives back. Of the store it
            calls nothing but `clocks`; all threads are in `clock` or `table` meanwhile. A run that
            goes on has as many ranks, and makes the same calls up to its first `finish`, which goes
            on with the tables and `clocks` of the checkpoint. Needs on_loss="fail", and neither
            gather_again nor spare rows; rows are placed once.
        options: gather_again, push_early, placement, numa, static_index and batches, of
            phub_store_options_set in worker/phub.h; and those of a `phub.Worker`: job, rank,
            world_size, consistency, slack, on_loss, `box` … What is not given comes from the
            launcher's environment; there must be a rank. With on_loss="fail" a rank that is lost
            ends the store, else the others go on without its updates. With push_early an update
            that comes when its batch has gone waits until all other threads, of all ranks, are in
            `clock`, `finish` or `table`: an iteration has no barrier of its own. After a lost rank
            it ends the store.
        """
        self.tables = tuple(tables)
        self.threads = threads
        self._arrays = {
            table.name: TableArrays.of(table.name, number, table.columns, table.dtype)
            for number, table in enumerate(self.tables)
        }
        settings = {name: options.pop(name) for name in _SETTINGS if name in options}
        self._saver: SaverCall | None = None
        settings["threads"] = threads
        self._handle: c_void_p | None = _made(self, settings, options, saver)
        self._destroy = weakref.finalize(self, _leave, self._handle)

    @property
    def rank(self) -> int:
        """Which rank this is, from 0: a program divides its data by it."""
        return self._rank()[0]

    @property
    def world_size(self) -> int:
        """How many there are."""
        return self._rank()[1]

    def thread(self, number: int) -> StoreThread:
        """The calling thread becomes this one of 0 to threads - 1; it alone may use it."""
        return StoreThread(self, number)

    def run(self, body: Callable[[StoreThread], _Result]) -> list[_Result]:
        """Calls `body` in a new thread for each of the store's; returns what they returned.

        Raises what the first of them raised. Ctrl-C ends the wait for them, not their calls.
        """
        results: dict[int, _Result] = {}
        failed: list[BaseException] = []

        def one(number: int) -> None:
            with contextlib.ExitStack() as stack:
                try:
                    results[number] = body(stack.enter_context(self.thread(number)))
                except BaseException as error:
                    failed.append(error)  # before others find that this one is gone

        threads = [
            threading.Thread(target=one, args=(number,), name=f"phub-store-{number}", daemon=True)
            for number in range(self.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return [results[number] for number in range(self.threads)]

    def table(self, name: str) -> NDArray[Any]:
        """A copy of the table's whole state, with all that was clocked.

        All ranks call it, after equally many clocks, while no thread is in a call. Shape (rows,),
        or (rows, columns) if there are several. Of a table with spare rows: place after place, the
        identity where there is no row.
        """
        of = self._table(name)
        into = np.zeros(of.shape(self._places(of)), of.dtype)
        waiting_call("store_table", self._open, of.number, into.ctypes.data, into.nbytes)
        return into

    @property
    def clocks(self) -> int:
        """The clocks so far, from the first `finish` on with those before the checkpoint."""
        found = c_uint64()
        call("store_clocks", self._open, byref(found))
        return found.value

    def restored(self, name: str) -> bytes | None:
        """What the saver saved after `clocks`, if `finish` went on from there.

        None: the store began, or there is nothing of this name.
        """
        found, size = c_void_p(), c_size_t()
        try:
            call("store_restored", self._open, name.encode(), byref(found), byref(size))
        except errors.NotFoundError:
            return None
        return ctypes.string_at(found, size.value)

    def rows(self, name: str) -> NDArray[np.uint64]:
        """The row in each place of the table; NO_ROW: none. While no thread is in a call."""
        of = self._table(name)
        into = np.zeros(self._places(of), np.uint64)
        call("store_rows", self._open, of.number, into.ctypes.data, len(into))
        return into

    @property
    def stats(self) -> StoreStats:
        """While no thread is in a call."""
        found = _library.StoreCounters(size=ctypes.sizeof(_library.StoreCounters))
        call("store_stats", self._open, byref(found))
        return StoreStats(*(getattr(found, name) for name in StoreStats.__dataclass_fields__))

    def close(self) -> None:
        """Leaves the job, when the last StoreThread is closed, too. Others go on without it."""
        self._handle = None
        self._destroy()

    def abandon(self) -> None:
        """Ends it as if the process had died: to the others this rank is lost.

        The next store of the name goes on from the checkpoint, if there is one. For a program that
        fails, and lives on. Calls of other threads that wait raise FencedError.
        """
        if self._handle is not None:
            call("store_abandon", self._handle)
        self.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """With an exception it does not leave: to the others a rank that fails is lost."""
        ended = kind is GeneratorExit or (isinstance(error, SystemExit) and not error.code)
        if kind is None or ended:
            self.close()
        else:
            self.abandon()

    @property
    def _open(self) -> c_void_p:
        if self._handle is None:
            raise errors.BadHandleError("the store was closed")
        return self._handle

    def _rank(self) -> tuple[int, int]:
        rank, world_size = c_uint32(), c_uint32()
        call("store_rank", self._open, byref(rank), byref(world_size))
        return rank.value, world_size.value

    def _table(self, name: str) -> TableArrays:
        try:
            return self._arrays[name]
        except KeyError:
            raise errors.NotFoundError(f"the store has no table '{name}'") from None

    def _places(self, of: TableArrays) -> int:
        table = self.tables[of.number]
        return table.rows + table.spare


class StoreThread:
    """One thread's access to a store: made and used on that thread, and closed.

    with mine.virtual():  # recorded, and nothing else happens
        iteration(mine)
    for _ in range(100):
        iteration(mine)

    One that is closed makes no more clocks: the next clock of the others is an error. Ctrl-C does
    not end its calls: use `Store.run`, so that they are not the main thread's.
    """

    def __init__(self, store: Store, number: int) -> None:
        """As `Store.thread`. Raises InvalidError: the store has this one already."""
        self.number = whole_number("the number of the thread", number, 32)
        self._store = store
        made = c_void_p()
        call("store_thread_create", store._open, self.number, byref(made))
        self._handle: c_void_p | None = made
        self._destroy = weakref.finalize(self, _destroy, "store_thread_destroy", made)

    # ---- An iteration.

    def read_batch(
        self, table: str, rows: ArrayLike, into: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """The rows after the last clock, with what this thread has updated since.

        rows: their numbers, in any order, also several times.
        into: where they go, of the table's dtype, contiguous, of shape (rows,), or (rows, columns)
            if there are several; None: a new array. Returned in either case. In a virtual iteration
            it is left as it is; a new array has zeros.
        """
        of, numbers = self._store._table(table), row_numbers(rows)
        found = np.zeros(of.shape(len(numbers)), of.dtype) if into is None else into
        self._access("store_read", of, numbers, of.room(found, len(numbers)))
        return found

    def update_batch(self, table: str, rows: ArrayLike, values: ArrayLike) -> None:
        """Changes each row by its values, with the table's operation.

        A row that comes several times is changed as often, in this order. values: of the table's
        dtype and of a shape as in `read_batch`. They are copied.
        """
        of, numbers = self._store._table(table), row_numbers(rows)
        self._access("store_update", of, numbers, of.values(values, len(numbers)))

    def clock(self) -> None:
        """What the threads have updated goes out with the last of them, for which this waits."""
        call("store_clock", self._open)

    # ---- Recording.

    def virtual(self) -> contextlib.AbstractContextManager[None]:
        """Records what is called until `finish`, and does nothing else.

        As a context manager it finishes at the end. What is read is not the state then: see
        `is_virtual`.
        """
        call("store_begin_virtual", self._open)
        return self._recording()

    def gathering(self) -> contextlib.AbstractContextManager[None]:
        """The same of a real iteration."""
        call("store_begin_gathering", self._open)
        return self._recording()

    @property
    def is_virtual(self) -> bool:
        """Whether the program must not change anything of its own now."""
        found = c_int()
        call("store_is_virtual", self._open, byref(found))
        return bool(found.value)

    def finish(self) -> None:
        """Places the rows as the recorded iteration wants them.

        All threads of all ranks call it, with everything clocked.
        """
        call("store_finish", self._open)

    # ---- Rows that come and go, of a table with spare ones.

    def add_row(self, table: str, row: SupportsIndex) -> None:
        """Asks for another row: all ranks have it from the second clock behind this on, at most."""
        self._change("store_add_row", table, row)

    def delete_row(self, table: str, row: SupportsIndex) -> None:
        """Asks for one less."""
        self._change("store_delete_row", table, row)

    def has_row(self, table: str, row: SupportsIndex) -> bool:
        """Whether the table has this row now."""
        found = c_int()
        self._change("store_has_row", table, row, byref(found))
        return bool(found.value)

    # ---- The end.

    def close(self) -> None:
        """Later calls raise BadHandleError. When all are closed, new ones may be made."""
        self._handle = None
        self._destroy()

    def __enter__(self) -> StoreThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _open(self) -> c_void_p:
        if self._handle is None:
            raise errors.BadHandleError("this thread of the store was closed")
        return self._handle

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        yield
        self.finish()

    def _access(
        self, function: str, of: TableArrays, rows: NDArray[np.uint64], values: NDArray[Any]
    ) -> None:
        memory = values.ctypes.data, values.nbytes
        call(function, self._open, of.number, rows.ctypes.data, len(rows), of.type, *memory)

    def _change(self, function: str, table: str, row: SupportsIndex, *more: Any) -> None:
        number = whole_number("the row", row, 64)
        call(function, self._open, self._store._table(table).number, number, *more)


def _made(
    store: Store, settings: dict[str, Any], options: dict[str, Any], saver: Saver | None
) -> c_void_p:
    made, of_worker, of_store = c_void_p(), c_void_p(), c_void_p()
    call("options_from_environment", byref(of_worker))
    try:
        set_options(of_worker, options)
        if saver is not None:
            store._saver = set_saver(of_worker, saver)  # as long as the store
        call("store_options_create", byref(of_store))
        try:
            _set(of_store, store, settings)
            call("store_create", of_worker, of_store, byref(made))
        finally:
            call("store_options_destroy", of_store)
    finally:
        call("options_destroy", of_worker)
    return made


def _set(options: c_void_p, store: Store, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        text = str(int(value) if isinstance(value, (bool, np.bool_)) else value)
        call("store_options_set", options, name.encode(), text.encode())
    for table in store.tables:
        call(
            "store_options_add_table",
            options,
            table.name.encode(),
            whole_number(f"table '{table.name}': the number of rows", table.rows, 64),
            whole_number(f"table '{table.name}': the number of columns", table.columns, 32),
            store._table(table.name).type,
            table.operation.encode(),
            int(table.fixed),
            whole_number(f"table '{table.name}': the number of spare rows", table.spare, 64),
        )


def _destroy(function: str, handle: c_void_p) -> None:
    with contextlib.suppress(errors.Error):
        call(function, handle)


def _leave(handle: c_void_p) -> None:
    # As of a worker: a process that ends with an exception has not left.
    if getattr(sys, "last_value", None) is None:
        _destroy("store_destroy", handle)
