"""A worker: one rank of a job."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping, Sequence
from ctypes import byref, c_char_p, c_double, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from phub import _library, errors
from phub._facts import Branch, Stats, Verdict
from phub._handle import Handle
from phub._library import call
from phub._memory import Memory, format_in_memory, memory_of_key, memory_of_numbers
from phub._memory_device import MemoryDevice
from phub._numbers import real_number, signed_number, whole_number
from phub._options import Key, Option, add_keys, set_formats, set_options
from phub._saver import Saver, set_saver
from phub._waiting import waiting_call

_DESCRIPTION_BYTES = 4096
_MOST_RUNS = 1025  # PHUB_MOST_BRANCH_RUNS
_MOST_BRANCHES = 511  # of a job: 255 that are killed, and one more than the option may be


def _named(values: Mapping[str, float]) -> tuple[Any, Any, int]:
    """Names, numbers, and how many there are, as C has them."""
    names = (c_char_p * len(values))(*(name.encode() for name in values))
    numbers = (c_double * len(values))(*(_hyper(name, values[name]) for name in values))
    return names, numbers, len(values)


def _hyper(name: str, value: float) -> float:
    return real_number(f"hyperparameter '{name}'", value)


def _branch(given: int) -> int:
    return whole_number("the branch", given, 32)


def _round(given: int) -> int:
    return whole_number("the round", given, 64)


def _priority(given: int) -> int:
    return signed_number("the priority", given, 32)


class Worker:
    """One rank of a job: pushes gradients to the box, and has the box's results.

    Any thread may call any method; calls for one key must be in the order push, wait. Errors are
    `phub.Error`s. Where a method waits, Ctrl-C ends it in the main thread. After fork() the child
    must make a worker of its own.
    """

    def __init__(
        self,
        keys: Mapping[str, int | Key],
        *,
        hyper: Mapping[str, float] | None = None,
        formats: Mapping[str, str] | None = None,
        saver: Saver | None = None,
        **options: Option,
    ) -> None:
        """Joins the job; the first rank creates it. Returns when all ranks have joined.

        keys: elements by name, or a `Key`; the same in the same order on every rank.
        hyper: the optimizer's values, such as {"lr": 0.1}.
        formats: of gradients on the wire, by patterns of keys' names, such as {"*.weight": "int8"}:
            those of phub_options_set_format in worker/phub.h. Where several patterns match a key,
            the last counts; where none does, the option gradient_dtype. Each must match a key.
        saver: what this rank has for itself: called with a round that the box saves, returns bytes
            by name, which `restored` gives back. It neither pushes nor waits.
        options: those of phub_options_set in worker/phub.h: job, rank, world_size, transport,
            optimizer, reduction, on_loss, lease_ms …, and `box`, its `server`: the box's address,
            HOST:PORT, or several with commas. What is not given comes from the launcher's
            environment: PHUB_SERVER, PHUB_JOB, PHUB_RANK and PHUB_WORLD_SIZE, or RANK and
            WORLD_SIZE …
            And `memory_device`, the number of a GPU, in whose memory gradients and parameters lie,
            so that the NIC reads and writes them there: over transport verbs or ofi, where it
            reaches that GPU. Room for twice as much is taken, which `rejoin` needs. `gradient` and
            `parameters` are not for Python then; `pull` copies. Raises UnavailableError (no such
            GPU, or a library without CUDA), FullError, or InvalidError, which says what cannot.
        """
        ordinal = options.pop("memory_device", None)
        made = c_void_p()
        call("options_from_environment", byref(made))
        try:
            set_options(made, options)
            add_keys(made, keys)
            set_formats(made, formats or {})
            for name, value in (hyper or {}).items():
                call("options_set_hyper", made, name.encode(), _hyper(name, value))
            used = set_saver(made, saver) if saver else None
            self.memory_device = None if ordinal is None else MemoryDevice(ordinal, keys)
            if self.memory_device:
                call("options_set_memory_device", made, self.memory_device.handle)
            self._handle = Handle(made, used)
        finally:
            call("options_destroy", made)
        self.keys = tuple(keys)
        self._index = {name: index for index, name in enumerate(self.keys)}
        self._elements = [key.elements if isinstance(key, Key) else key for key in keys.values()]
        self._matrices = [
            key.shape if isinstance(key, Key) and key.rank_limit else (0, 0)
            for key in keys.values()
        ]
        self._columns = [
            key.shape[-1] if isinstance(key, Key) and key.rows_limit and key.shape else 0
            for key in keys.values()
        ]
        self._is_words = [isinstance(key, Key) and bool(key.operation) for key in keys.values()]
        self._parameter_dtype = format_in_memory(str(options.get("parameter_dtype", "f32")))
        self._owners: dict[int, tuple[object, object]] = {}
        self.on_device: Any = None  # a DeviceKeys, which then exchanges the keys

    # ---- The job.

    @property
    def rank(self) -> int:
        """Which rank this is, from 0."""
        return int(self._info().rank)

    @property
    def world_size(self) -> int:
        """The ranks of the job when it began."""
        return int(self._info().world_size)

    @property
    def first_round(self) -> int:
        """The first round in which this worker takes part: 1, unless it joined later."""
        return int(self._info().first_round)

    @property
    def initial_counts(self) -> bool:
        """Whether the job begins with the parameters that this worker broadcasts."""
        return bool(self._info().initial_counts)

    @property
    def job(self) -> str:
        """The job's name."""
        found = c_char_p()
        call("job_name", self._worker, byref(found))
        return (found.value or b"").decode()

    @property
    def connection(self) -> str:
        """The transport with its devices and memory, for people."""
        return self._text("worker_connection")

    @property
    def stats(self) -> Stats:
        """Counters since the start."""
        found = _library.Stats(size=ctypes.sizeof(_library.Stats))
        call("worker_stats", self._worker, byref(found))
        return Stats(*(getattr(found, name) for name in Stats.__dataclass_fields__))

    def waits_for(self) -> str:
        """Which ranks and keys hold the job up, if a wait has lasted long; else ""."""
        return self._text("waits_for")

    # ---- Memory.

    def gradient(self, key: str) -> memoryview:
        """The key's gradient in the library's memory: write it, then push.

        Shape (elements,), of float32; of uint16 (the bits) if `gradient_dtype` says bf16 or f16.
        Over shared memory the box sums this memory, unless it is coded for the wire. Not to be
        written from push to wait.
        `numpy.asarray` and `torch.frombuffer` take it as it is. A view keeps the memory mapped,
        also after `close`.
        """
        return self._view("gradient", key, self.gradient_dtype(key))

    def gradient_dtype(self, key: str) -> str:
        """Of `gradient`: f32, bf16 or f16, as on the wire; f32 where that is a coded format."""
        found = c_char_p()
        call("gradient_dtype", self._worker, self._at(key), byref(found))
        return (found.value or b"").decode()

    @property
    def parameter_dtype(self) -> str:
        """Of `parameters`: f32, bf16 or f16, as on the wire; f32 where that is a coded format."""
        return self._parameter_dtype

    def parameters(self, key: str) -> memoryview:
        """The key's parameters (optimizer none: the sum or mean); shape as `gradient`, read-only.

        Valid from wait to the key's next push.
        """
        return self._view("parameters", key, self._parameter_dtype).toreadonly()

    def register_memory(
        self,
        key: str,
        gradient: Any = None,
        parameters: Any = None,
        *,
        gradient_dtype: str | None = None,
        parameter_dtype: str | None = None,
        scale: float = 1.0,
    ) -> None:
        """From its next push on, sends the key from `gradient`; wait leaves it in `parameters`.

        Both are contiguous buffers (NumPy arrays, memoryviews) or a `Memory`, of `elements` numbers
        in their format (f32, bf16 or f16; None: that of the library's memory); they may be the
        same. None: the library's memory. The gradient is multiplied by `scale`. The worker keeps
        both alive until they are replaced. Over TCP a gradient in its format on the wire is sent in
        place; otherwise it is copied once.
        """
        index = self._at(key)
        if scale == 0:  # C has it for 1
            raise errors.InvalidError(f"key '{key}': the scale is 0: use push_null")
        formats = (
            gradient_dtype or self.gradient_dtype(key),
            parameter_dtype or self._parameter_dtype,
        )
        source = self._memory(key, gradient, formats[0])
        target = self._memory(key, parameters, formats[1])
        memory = _library.KeyMemory(
            size=ctypes.sizeof(_library.KeyMemory),
            gradient=source.address or None,
            parameters=target.address or None,
            gradient_dtype=formats[0].encode(),
            parameter_dtype=formats[1].encode(),
            gradient_scale=real_number("the scale", scale),
        )
        waiting_call("register_memory", self._worker, index, byref(memory))
        self._owners[index] = (source, target)

    # ---- The exchange.

    def broadcast(self, initial: Mapping[str, Any] | None = None) -> None:
        """Sets the job's initial parameters: rank 0's count (option initial="broadcast").

        initial: by key a contiguous float32 buffer or a `Memory`; the other ranks may pass None.
        Returns when this worker has all keys, in `parameters` (also in registered memory).
        """
        if initial is None:
            waiting_call("broadcast_keys", self._worker, None, 0)
            return
        missing = [key for key in self.keys if key not in initial]
        if missing:
            raise errors.InvalidError(f"broadcast: there is nothing for key '{missing[0]}'")
        for key in initial:
            self._at(key)  # raises NotFoundError: it would not count
        memories = [self._memory(key, initial[key], "f32") for key in self.keys]
        addresses = (c_void_p * len(memories))(*(memory.address for memory in memories))
        waiting_call("broadcast_keys", self._worker, addresses, len(memories))

    def push(self, key: str, priority: int = 0) -> None:
        """Starts the exchange of a key; its gradient is lent until wait.

        Every rank pushes every key once a round. Waits only if the key's previous result is not
        here. `priority` is added to the key's, for this push.
        """
        call("push", self._worker, self._at(key), _priority(priority))

    def push_null(self, key: str) -> None:
        """Pushes a gradient of zero: nothing is sent, and this rank counts as having taken part."""
        call("push_null", self._worker, self._at(key))

    def push_factors(self, key: str, left: Any, right: Any, priority: int = 0) -> None:
        """As `push`, of a key with a rank_limit: the gradient is a sum of outer products.

        left: contiguous float32, (pairs, rows); right: (pairs, columns); buffers or `Memory`. They
        are copied. The box adds up those of all ranks, in the order of ranks and pairs. Without any
        pair it is `push_null`.
        """
        index = self._at(key)
        rows, columns = self._matrices[index]
        if not rows:
            raise errors.InvalidError(
                f"key '{key}' has no rank_limit: its gradient is sent as it is"
            )
        sides = [memory_of_numbers(key, "factors", given, "float32") for given in (left, right)]
        pairs = sides[0].bytes // (4 * rows)
        wanted = (pairs * rows * 4, pairs * columns * 4)
        if (sides[0].bytes, sides[1].bytes) != wanted:
            raise errors.InvalidError(
                f"key '{key}': factors of {sides[0].bytes} and {sides[1].bytes} bytes are not "
                f"float32 of (pairs, {rows}) and (pairs, {columns})"
            )
        addresses = (side.address or None for side in sides)
        call("push_factors", self._worker, index, *addresses, pairs, _priority(priority))

    def push_rows(self, key: str, indices: Any, elements: Any, priority: int = 0) -> None:
        """As `push`, of a key with a rows_limit: those rows of the gradient that are not zero.

        indices: contiguous int64, (count,); elements: float32, (count, columns); buffers or
        `Memory`. They are copied. What comes twice is added up, in this order. The box adds up each
        row, in the order of the ranks that have it. Without any row it is `push_null`.
        """
        index = self._at(key)
        columns = self._columns[index]
        if not columns:
            raise errors.InvalidError(f"key '{key}' has no rows_limit: all rows of it are sent")
        given = (
            memory_of_numbers(key, "indices of rows", indices, "int64"),
            memory_of_numbers(key, "elements of rows", elements, "float32"),
        )
        count = given[0].bytes // 8
        if (given[0].bytes, given[1].bytes) != (count * 8, count * columns * 4):
            raise errors.InvalidError(
                f"key '{key}': rows of {given[0].bytes} and {given[1].bytes} bytes are not int64 "
                f"of (count,) and float32 of (count, {columns})"
            )
        addresses = (each.address or None for each in given)
        call("push_rows", self._worker, index, *addresses, count, _priority(priority))

    def wait(self, key: str) -> None:
        """Returns when the key's result is here; at once if it was not pushed since."""
        if not self.ready(key):
            waiting_call("wait", self._worker, self._at(key))

    def wait_all(self) -> None:
        """Returns when the results of all keys are here."""
        waiting_call("wait_all", self._worker)

    def ready(self, key: str) -> bool:
        """Whether `wait` would return at once. Makes progress."""
        found = c_int()
        call("try_wait", self._worker, self._at(key), byref(found))
        return bool(found.value)

    def poll(self) -> int:
        """Makes progress without waiting. Returns the number of keys whose result is not here."""
        found = c_size_t()
        call("poll", self._worker, byref(found))
        return found.value

    def pull(self, key: str, into: Any) -> None:
        """Waits, and copies the key's parameters to a contiguous buffer, in the job's format."""
        memory = self._memory(key, into, self._parameter_dtype)
        waiting_call("pull", self._worker, self._at(key), memory.address, memory.bytes)

    def round(self, key: str) -> int:
        """The latest round whose result is here."""
        found = c_uint64()
        call("round", self._worker, self._at(key), byref(found))
        return found.value

    @property
    def verdict(self) -> Verdict | None:
        """On the latest round of which a result is here, in a job with gated rounds.

        Rounds are gated with the hyperparameter max_norm, or on_nonfinite="skip". None: in other
        jobs, and before the first round.
        """
        self._settle()
        found = _library.RoundVerdict(size=ctypes.sizeof(_library.RoundVerdict))
        call("verdict", self._worker, byref(found))
        if not found.round:
            return None
        return Verdict(found.round, found.norm, bool(found.skipped))

    def set_hyper(self, values: Mapping[str, float], round: int = 0) -> int:  # noqa: A002
        """Changes hyperparameters of the job from `round` on (0: the next). Returns the round.

        That may be a later one; with a `batch` among them it is after the one in progress.
        Any rank may call it, one or all of them: what several set for one round must be the same.
        """
        self._settle()
        at = c_uint64(_round(round))
        call("set_hyper", self._worker, *_named(values), byref(at))
        return at.value

    # ---- Branches, of a job with the option `branches`. One rank decides, or a program beside it.

    def fork(
        self,
        parent: int = 0,
        hyper: Mapping[str, float] | None = None,
        round: int = 0,  # noqa: A002
    ) -> tuple[int, int]:
        """A branch that is as `parent` is before `round` (0: as soon as possible), but for `hyper`.

        Returns its number, and the round. It has the parent's parameters, and the optimizer's
        state. Nothing changes it until it is scheduled. Raises FullError: the job has as many as
        its option `branches` allows.
        """
        self._settle()
        at, child = c_uint64(_round(round)), c_uint32()
        call("fork", self._worker, _branch(parent), *_named(hyper or {}), byref(at), byref(child))
        return child.value, at.value

    def schedule(self, *turns: int | tuple[int, int], round: int = 0) -> int:  # noqa: A002
        """From `round` on (0: as soon as possible) these branches run, one after the other.

        Each turn is (branch, rounds), the last a branch alone, which goes on until something else
        is scheduled. Returns the round; the result of the round before it is what the first of
        them has.
        """
        self._settle()
        pairs = [turn if isinstance(turn, tuple) else (turn, 0) for turn in turns]
        branches = (c_uint32 * len(pairs))(*(_branch(branch) for branch, _ in pairs))
        rounds = (c_uint64 * len(pairs))(
            *(whole_number("the number of rounds", rounds, 64) for _, rounds in pairs)
        )
        at = c_uint64(_round(round))
        call("schedule", self._worker, branches, rounds, len(pairs), byref(at))
        return at.value

    def discard(self, branch: int, round: int = 0) -> int:  # noqa: A002
        """The branch is gone from `round` on, and there is room for another. Returns the round."""
        self._settle()
        at = c_uint64(_round(round))
        call("discard", self._worker, _branch(branch), byref(at))
        return at.value

    def kill(self, branch: int, round: int = 0) -> int:  # noqa: A002
        """The branch goes to files at the box, and there is room for another when it is there.

        The box takes a checkpoint for it once the rounds before the returned one are complete, and
        then branches() has it `on_disk`. It can be revived, or discarded. Raises InvalidError: the
        box keeps no checkpoints, or the branch is the last one that is scheduled.
        """
        self._settle()
        at = c_uint64(_round(round))
        call("kill", self._worker, _branch(branch), byref(at))
        return at.value

    def revive(self, branch: int, round: int = 0) -> int:  # noqa: A002
        """From `round` on the branch is there as if it had never been killed. Returns the round.

        The box reads its files meanwhile. Raises FullError: there is no room; InvalidError or
        NotFoundError: it is not killed, or its files are damaged or gone.
        """
        self._settle()
        at = c_uint64(_round(round))
        call("revive", self._worker, _branch(branch), byref(at))
        return at.value

    def branch_in(self, round: int) -> int:  # noqa: A002
        """The branch that runs in `round`: final for the one behind the latest result here."""
        self._settle()
        found = c_uint32()
        call("branch_in", self._worker, _round(round), byref(found))
        return found.value

    def batch_in(self, round: int) -> int:  # noqa: A002
        """The hyperparameter `batch` of the branch that runs then, in samples; 0: none is set."""
        self._settle()
        found = c_uint64()
        call("batch_in", self._worker, _round(round), byref(found))
        return found.value

    def branch_runs(self) -> tuple[tuple[int, int], ...]:
        """(round, branch): from this round on it runs, as far as it is decided. Rounds ascend."""
        self._settle()
        rounds, branches = (c_uint64 * _MOST_RUNS)(), (c_uint32 * _MOST_RUNS)()
        count = c_size_t()
        call("branch_runs", self._worker, rounds, branches, _MOST_RUNS, byref(count))
        return tuple(zip(rounds[: count.value], branches[: count.value], strict=True))

    def branches(self) -> tuple[Branch, ...]:
        """All that there are, when everything is done that was decided."""
        self._settle()
        found = (_library.BranchInfo * _MOST_BRANCHES)()
        count = c_size_t()
        call("branches", self._worker, found, _MOST_BRANCHES, byref(count))
        return tuple(
            Branch(
                of.branch,
                of.parent,
                of.round,
                of.rounds,
                bool(of.runs),
                killed=of.killed > 0,
                on_disk=of.killed > 1,
                batch=of.batch,
            )
            for of in found[: count.value]
        )

    def report_loss(self, loss: float, round: int = 0) -> None:  # noqa: A002
        """Tells the box this rank's loss in `round` (0: the one that it pushes next).

        Before it pushes that round, and in ascending rounds; also a loss that is not finite. The
        box keeps the means of the latest rounds, of all ranks that report, for `phub tune`.
        """
        self._settle()
        call("report_loss", self._worker, real_number("the loss", loss), _round(round))

    # ---- The state at the box, between rounds. TakenError: another rank reads or sets it.

    @property
    def state_names(self) -> tuple[str, ...]:
        """What the optimizer keeps of a key: "exp_avg", "exp_avg_sq" … beside its parameters."""
        names: list[str] = []
        found = c_char_p()
        with contextlib.suppress(errors.NotFoundError):
            while True:
                call("state_name", self._worker, len(names), byref(found))
                names.append((found.value or b"").decode())
        return tuple(names)

    def get_state(self, into: Mapping[str, Sequence[Any]]) -> dict[str, int]:
        """Copies the state of these keys: of each the parameters, then what `state_names` says.

        Each array is a contiguous float32 buffer or a `Memory`. Returns the optimizer's steps of
        each key. For jobs in lock-step, when this rank has all results and has pushed no key since.
        """
        self._settle()
        steps = (c_uint64 * len(into))()
        indices, arrays = self._state_arrays(into)
        waiting_call("get_state", self._worker, indices, len(into), arrays, steps, None)
        return dict(zip(into, steps, strict=True))

    def set_state(self, arrays: Mapping[str, Sequence[Any]], steps: Mapping[str, int]) -> int:
        """Sets the state of these keys for all ranks, as `get_state` gets it; one rank calls it.

        Returns the round from which on the optimizer works on it.
        """
        self._settle()
        numbers = (c_uint64 * len(arrays))(
            *(whole_number(f"the steps of key '{key}'", steps[key], 64) for key in arrays)
        )
        indices, addresses = self._state_arrays(arrays)
        at = c_uint64()
        waiting_call("set_state", self._worker, indices, len(arrays), addresses, numbers, byref(at))
        return at.value

    # ---- This rank's own state, if the worker was made with a saver.

    def restored(self, name: str) -> bytes | None:
        """What the saver saved after the round before `first_round`, if the job goes on from there.

        None: there is nothing of this name; the job begins, or this rank joined it in progress.
        """
        found, size = c_void_p(), c_size_t()
        try:
            call("restored", self._worker, name.encode(), byref(found), byref(size))
        except errors.NotFoundError:
            return None
        return ctypes.string_at(found, size.value)

    def save_point(self, round: int) -> None:  # noqa: A002
        """After `round`, when the state is whole: from now on only this calls the saver."""
        self._settle()
        waiting_call("save_point", self._worker, _round(round))

    def barrier(self) -> None:
        """Waits for all live ranks."""
        waiting_call("barrier", self._worker)

    # ---- The end.

    def rejoin(self) -> int:
        """After RewoundError: waits for a server that goes on with the job. Returns the next round.

        That round may be earlier than what this rank has seen, and the parameters are those of the
        round before: call `broadcast`. Views of the worker's memory become invalid: drop them.
        """
        self._leave_device()
        found = c_uint64()
        waiting_call("rejoin", self._worker, byref(found))
        return found.value

    def close(self) -> None:
        """Leaves the job; later calls raise BadHandleError. The others go on without this rank."""
        self._end("leave")

    def abandon(self) -> None:
        """Ends it as if the process had died: to the others this rank is lost (on_loss).

        At once, or after lease_ms. For a program that fails, and lives on.
        """
        self._end("abandon")

    def _end(self, function: str) -> None:
        handle = self.__dict__.pop("_handle", None)
        if handle is None:
            return
        with contextlib.suppress(errors.Error):  # then the box notices by itself
            call(function, handle.value)
        if handle.saver:
            handle.saver.forget()
        self._leave_device()
        self._owners.clear()

    def __enter__(self) -> Worker:
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

    # ---- Inside.

    def _settle(self) -> None:
        """Before a call for the time between rounds: what streams have not pushed yet, is."""
        if self.on_device:
            self.on_device.wait()

    def _leave_device(self) -> None:
        on_device, self.on_device = self.on_device, None
        if on_device:
            on_device.close()

    @property
    def _worker(self) -> c_void_p:
        handle: Handle | None = self.__dict__.get("_handle")
        if handle is None:
            raise errors.BadHandleError("the worker was closed")
        return handle.value

    def _at(self, key: str) -> int:
        try:
            return self._index[key]
        except KeyError:
            raise errors.NotFoundError(f"the job has no key '{key}'") from None

    def _info(self) -> _library.Info:
        info = _library.Info(size=ctypes.sizeof(_library.Info))
        call("worker_info", self._worker, byref(info))
        return info

    def _text(self, function: str) -> str:
        text = ctypes.create_string_buffer(_DESCRIPTION_BYTES)
        call(function, self._worker, text, len(text))
        return text.value.decode(errors="replace")

    def _view(self, function: str, key: str, dtype: str) -> memoryview:
        if self.memory_device:
            raise errors.InvalidError(
                f"the {function} of key '{key}' lie in the memory of a GPU (memory_device): use "
                "DistributedOptimizer or DDP, or `pull`, or leave memory_device out"
            )
        address, size = c_void_p(), c_size_t()
        call(function, self._worker, self._at(key), byref(address), byref(size))
        memory = (ctypes.c_ubyte * size.value).from_address(address.value or 0)
        memory.handle = self._handle  # type: ignore[attr-defined]  # for as long as there is a view
        return memoryview(memory).cast("B").cast("f" if dtype == "f32" else "H")  # type: ignore[return-value]

    def _state_arrays(self, given: Mapping[str, Sequence[Any]]) -> tuple[Any, Any]:
        needed = 1 + len(self.state_names)
        for key, arrays in given.items():
            if len(arrays) != needed:
                raise errors.InvalidError(
                    f"key '{key}': the state is {needed} arrays (parameters, "
                    f"{', '.join(self.state_names)}), not {len(arrays)}"
                )
        addresses = [self._memory(key, a, "f32").address for key in given for a in given[key]]
        indices = (c_size_t * len(given))(*(self._at(key) for key in given))
        return indices, (c_void_p * len(addresses))(*addresses)

    def _memory(self, key: str, given: Any, dtype: str) -> Memory:
        index = self._at(key)
        words = self._is_words[index]
        return memory_of_key(key, given, self._elements[index], dtype, are_words=words)
