"""A worker: one rank of a job."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from phub import _library, errors
from phub._branches import BranchCalls, hyper_value
from phub._facts import Stats, Verdict
from phub._handle import Handle
from phub._key_states import StateCalls
from phub._library import call
from phub._memory import Memory, format_in_memory, memory_of_numbers
from phub._memory_device import MemoryDevice
from phub._numbers import real_number, signed_number
from phub._options import Key, Option, add_keys, set_formats, set_options
from phub._saver import Saver, set_saver
from phub._waiting import waiting_call

_DESCRIPTION_BYTES = 4096


def _priority(given: int) -> int:
    return signed_number("the priority", given, 32)


def fails(kind: type[BaseException] | None, error: BaseException | None) -> bool:
    """Whether what ends a `with` in this way has failed."""
    ended = kind is GeneratorExit or (isinstance(error, SystemExit) and not error.code)
    return kind is not None and not ended


class Worker(BranchCalls, StateCalls):
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
                call("options_set_hyper", made, name.encode(), hyper_value(name, value))
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
        self.on_device = None
        self.of_branches: dict[str, Any] = {}  # what else OwnBranches keeps of each branch

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
    def queues(self) -> int:
        """Of the job: a core of a box and a NIC have one each."""
        return int(self._info().queues)

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
        """Of `gradient`: f32, bf16 or f16, as on the wire; f32 with weights or a coded format."""
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

    def weight(self, value: float) -> None:
        """The weight of the pushes that follow, until the next call; 1 at the beginning.

        In a job with the option weights="yes": a round adds up the gradients of the ranks times
        their weights, and a mean divides by the sum of the weights. With the number of samples or
        tokens as its weight, each counts the same. Raises InvalidError: it is not finite, or below
        2^-126, or the job has no weights.
        """
        call("set_weight", self._worker, real_number("the weight", value))

    def push(self, key: str, priority: int = 0) -> None:
        """Starts the exchange of a key; its gradient is lent until wait.

        Every rank pushes every key once a round. Waits only if the key's previous result is not
        here. `priority` is added to the key's, for this push.
        """
        call("push", self._worker, self._at(key), _priority(priority))

    def push_copy(self, key: str, gradient: Any, priority: int = 0) -> None:
        """As `push`, after copying the gradient from a contiguous buffer to `gradient(key)`."""
        memory = gradient
        if not isinstance(gradient, Memory):
            memory = self._memory(key, gradient, self.gradient_dtype(key))
        at = self._at(key)
        call("push_copy", self._worker, at, memory.address, memory.bytes, _priority(priority))

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

    def remark(self, subject: str, text: str) -> None:
        """Tells who looks at the job what this rank has decided for it: a sentence on a subject.

        It is seen in `phub status`, on the box's page and in its messages, and replaces the one
        before it on that subject ("factors"), of any rank; "" takes that away. Raises InvalidError
        for subjects of more than 64 bytes and texts of more than 4096; FullError: the job has
        remarks on 32 other subjects.
        """
        call("remark", self._worker, subject.encode(), text.encode())

    def barrier(self) -> None:
        """Waits for all live ranks."""
        waiting_call("barrier", self._worker)

    # ---- The end.

    def rejoin(self) -> int:
        """After RewoundError: waits for a server that goes on with the job. Returns the next round.

        That round may be earlier than what this rank has seen, and the parameters are those of the
        round before: call `broadcast`. Views of the worker's memory become invalid: drop them. With
        a quorum what was pushed for an earlier round, without a result so far, counted once or
        never will: do not push it again.
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
        if fails(kind, error):
            self.abandon()
        else:
            self.close()

    # ---- Inside.

    def _leave_device(self) -> None:
        on_device, self.on_device = self.on_device, None
        if on_device:
            on_device.close()

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
