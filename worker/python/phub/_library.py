"""Finds and loads libphub_worker.so, and declares the functions of worker/phub.h that are used."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

from phub import errors

ABI_VERSION = 0  # PHUB_ABI_VERSION of the header that the declarations below are of
_NAME = "libphub_worker.so.0"
_PACKAGE = Path(__file__).resolve().parent
_BUILD_TREE = _PACKAGE.parents[2] / "build/release"


class Info(ctypes.Structure):
    """phub_info."""

    _fields_ = (
        ("size", c_size_t),
        ("rank", c_uint32),
        ("incarnation", c_uint32),
        ("world_size", c_uint32),
        ("initial_counts", c_uint32),
        ("first_round", c_uint64),
        ("keys", c_size_t),
    )


class Stats(ctypes.Structure):
    """phub_stats."""

    _fields_ = (
        ("size", c_size_t),
        ("pushes", c_uint64),
        ("chunks_pushed", c_uint64),
        ("chunks_received", c_uint64),
        ("bytes_copied", c_uint64),
        ("sleeps", c_uint64),
        ("reconnections", c_uint64),
        ("chunks_carried_over", c_uint64),
    )


class RoundVerdict(ctypes.Structure):
    """phub_round_verdict."""

    _fields_ = (
        ("size", c_size_t),
        ("round", c_uint64),
        ("norm", c_double),
        ("skipped", c_uint32),
    )


class BranchInfo(ctypes.Structure):
    """phub_branch."""

    _fields_ = (
        ("round", c_uint64),
        ("rounds", c_uint64),
        ("branch", c_uint32),
        ("parent", c_uint32),
        ("runs", c_uint32),
        ("killed", c_uint32),
        ("batch", c_uint64),
    )


class StoreCounters(ctypes.Structure):
    """phub_store_counters."""

    _fields_ = (
        ("size", c_size_t),
        ("in_sequence", c_uint64),
        ("by_index", c_uint64),
        ("dynamic", c_uint64),
        ("places", c_uint64),
        ("cached", c_uint64),
        ("clocks", c_uint64),
        ("placed", c_uint64),
        ("widened", c_uint64),
        ("pushes", c_uint64),
        ("chunks_pushed", c_uint64),
        ("chunks_received", c_uint64),
        ("bytes_copied", c_uint64),
        ("sleeps", c_uint64),
        ("reconnections", c_uint64),
    )


class Range(ctypes.Structure):
    """phub_range."""

    _fields_ = (
        ("begin", c_uint64),
        ("end", c_uint64),
    )


class KeyMemory(ctypes.Structure):
    """phub_key_memory."""

    _fields_ = (
        ("size", c_size_t),
        ("gradient", c_void_p),
        ("parameters", c_void_p),
        ("gradient_dtype", c_char_p),
        ("parameter_dtype", c_char_p),
        ("gradient_scale", c_float),
    )


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "options_from_environment": (POINTER(c_void_p),),
    "options_destroy": (c_void_p,),
    "options_set": (c_void_p, c_char_p, c_char_p),
    "options_set_number": (c_void_p, c_char_p, c_int64),
    "options_add_key": (c_void_p, c_char_p, c_uint64),
    "options_add_shaped_key": (c_void_p, c_char_p, POINTER(c_uint64), c_size_t),
    "options_tune_key": (c_void_p, c_size_t, c_int32, c_double, c_double),
    "options_set_group": (c_void_p, c_size_t, c_uint32),
    "options_set_rank_limit": (c_void_p, c_size_t, c_uint32),
    "options_set_rows_limit": (c_void_p, c_size_t, c_uint32, c_int),
    "options_set_operation": (c_void_p, c_size_t, c_char_p, c_char_p),
    "options_set_interest": (
        c_void_p,
        c_size_t,
        POINTER(Range),
        c_size_t,
        POINTER(Range),
        c_size_t,
    ),
    "options_set_format": (c_void_p, c_char_p, c_char_p),
    "options_set_hyper": (c_void_p, c_char_p, c_double),
    "options_set_saver": (c_void_p, c_void_p, c_void_p),
    "save": (c_void_p, c_char_p, c_char_p, c_size_t),
    "worker_create": (c_void_p, POINTER(c_void_p)),
    "rejoin": (c_void_p, POINTER(c_uint64)),
    "worker_destroy": (c_void_p,),
    "leave": (c_void_p,),
    "abandon": (c_void_p,),
    "worker_info": (c_void_p, POINTER(Info)),
    "restored": (c_void_p, c_char_p, POINTER(c_void_p), POINTER(c_size_t)),
    "save_point": (c_void_p, c_uint64),
    "job_name": (c_void_p, POINTER(c_char_p)),
    "worker_connection": (c_void_p, c_char_p, c_size_t),
    "gradient": (c_void_p, c_size_t, POINTER(c_void_p), POINTER(c_size_t)),
    "gradient_dtype": (c_void_p, c_size_t, POINTER(c_char_p)),
    "parameters": (c_void_p, c_size_t, POINTER(c_void_p), POINTER(c_size_t)),
    "add_products": (c_void_p, c_void_p, c_size_t, c_size_t, c_size_t, c_void_p),
    "register_memory": (c_void_p, c_size_t, POINTER(KeyMemory)),
    "broadcast_keys": (c_void_p, POINTER(c_void_p), c_size_t),
    "push": (c_void_p, c_size_t, c_int32),
    "push_null": (c_void_p, c_size_t),
    "push_factors": (c_void_p, c_size_t, c_void_p, c_void_p, c_uint32, c_int32),
    "push_rows": (c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_int32),
    "wait": (c_void_p, c_size_t),
    "wait_all": (c_void_p,),
    "try_wait": (c_void_p, c_size_t, POINTER(c_int)),
    "poll": (c_void_p, POINTER(c_size_t)),
    "pull": (c_void_p, c_size_t, c_void_p, c_size_t),
    "round": (c_void_p, c_size_t, POINTER(c_uint64)),
    "verdict": (c_void_p, POINTER(RoundVerdict)),
    "set_hyper": (c_void_p, POINTER(c_char_p), POINTER(c_double), c_size_t, POINTER(c_uint64)),
    "fork": (
        c_void_p,
        c_uint32,
        POINTER(c_char_p),
        POINTER(c_double),
        c_size_t,
        POINTER(c_uint64),
        POINTER(c_uint32),
    ),
    "schedule": (c_void_p, POINTER(c_uint32), POINTER(c_uint64), c_size_t, POINTER(c_uint64)),
    "discard": (c_void_p, c_uint32, POINTER(c_uint64)),
    "kill": (c_void_p, c_uint32, POINTER(c_uint64)),
    "revive": (c_void_p, c_uint32, POINTER(c_uint64)),
    "branch_in": (c_void_p, c_uint64, POINTER(c_uint32)),
    "batch_in": (c_void_p, c_uint64, POINTER(c_uint64)),
    "branch_runs": (c_void_p, POINTER(c_uint64), POINTER(c_uint32), c_size_t, POINTER(c_size_t)),
    "branches": (c_void_p, POINTER(BranchInfo), c_size_t, POINTER(c_size_t)),
    "report_loss": (c_void_p, c_double, c_uint64),
    "state_name": (c_void_p, c_size_t, POINTER(c_char_p)),
    "get_state": (c_void_p, POINTER(c_size_t), c_size_t, *(3 * (c_void_p,))),
    "set_state": (c_void_p, POINTER(c_size_t), c_size_t, *(3 * (c_void_p,))),
    "options_set_memory_device": (c_void_p, c_void_p),
    "device_open_cuda": (c_int, c_uint64, POINTER(c_void_p)),
    "device_open_host": (c_uint64, c_double, c_uint64, POINTER(c_void_p)),
    "device_close": (c_void_p,),
    "device_keys_create": (c_void_p, c_void_p, POINTER(c_void_p)),
    "device_keys_destroy": (c_void_p,),
    "push_device": (c_void_p, c_size_t, c_void_p, c_char_p, c_float, c_int32, c_void_p),
    "push_factors_device": (
        c_void_p,
        c_size_t,
        c_void_p,
        c_void_p,
        c_uint32,
        c_int32,
        c_void_p,
    ),
    "pull_device": (c_void_p, c_size_t, c_void_p, c_char_p, c_void_p),
    "wait_device": (c_void_p,),
    "waits_for": (c_void_p, c_char_p, c_size_t),
    "barrier": (c_void_p,),
    "worker_stats": (c_void_p, POINTER(Stats)),
    "by_branch_create": (c_void_p, c_void_p, c_void_p, POINTER(c_void_p)),
    "by_branch_destroy": (c_void_p,),
    "by_branch_begin": (c_void_p, c_void_p, c_uint64, POINTER(c_uint32)),
    "by_branch_saved": (c_void_p, POINTER(c_void_p), POINTER(c_size_t)),
    "by_branch_restore": (c_void_p, c_char_p, c_size_t),
    "store_options_create": (POINTER(c_void_p),),
    "store_options_destroy": (c_void_p,),
    "store_options_set": (c_void_p, c_char_p, c_char_p),
    "store_options_add_table": (
        c_void_p,
        c_char_p,
        c_uint64,
        c_uint32,
        c_char_p,
        c_char_p,
        c_int,
        c_uint64,
    ),
    "store_create": (c_void_p, c_void_p, POINTER(c_void_p)),
    "store_destroy": (c_void_p,),
    "store_rank": (c_void_p, POINTER(c_uint32), POINTER(c_uint32)),
    "store_table": (c_void_p, c_uint32, c_void_p, c_size_t),
    "store_rows": (c_void_p, c_uint32, c_void_p, c_size_t),
    "store_stats": (c_void_p, POINTER(StoreCounters)),
    "store_thread_create": (c_void_p, c_uint32, POINTER(c_void_p)),
    "store_thread_destroy": (c_void_p,),
    "store_begin_virtual": (c_void_p,),
    "store_begin_gathering": (c_void_p,),
    "store_is_virtual": (c_void_p, POINTER(c_int)),
    "store_finish": (c_void_p,),
    "store_read": (c_void_p, c_uint32, c_void_p, c_size_t, c_char_p, c_void_p, c_size_t),
    "store_update": (c_void_p, c_uint32, c_void_p, c_size_t, c_char_p, c_void_p, c_size_t),
    "store_clock": (c_void_p,),
    "store_add_row": (c_void_p, c_uint32, c_uint64),
    "store_delete_row": (c_void_p, c_uint32, c_uint64),
    "store_has_row": (c_void_p, c_uint32, c_uint64, POINTER(c_int)),
}


def find_library() -> str:
    """What to load: PHUB_LIBRARY, the package's own, a build tree's around it, an installed one."""
    if named := os.environ.get("PHUB_LIBRARY"):
        return named
    places = (_PACKAGE / _NAME, _BUILD_TREE / "worker" / _NAME)
    return next((str(place) for place in places if place.is_file()), _NAME)


def find_program(name: str = "phub") -> str:
    """A program: for the box's PHUB_PROGRAM, else found as the library is. Raises LibraryError."""
    if name == "phub" and (named := os.environ.get("PHUB_PROGRAM")):
        return named
    for place in (_PACKAGE / "bin" / name, _BUILD_TREE / "bin" / name, *_in_path(name)):
        if os.access(place, os.X_OK):
            return str(place)
    raise errors.LibraryError(
        f"the program `{name}` is not there: put it in PATH (an installation of phub has it in "
        "bin/); for the box's, PHUB_PROGRAM may name the file, or PHUB_SERVER a box elsewhere"
    )


def _in_path(name: str) -> Iterator[Path]:
    """Programs of this name, without scripts: this package's own command is one."""
    for folder in os.get_exec_path():
        program = Path(folder, name)
        if program.is_file() and program.read_bytes()[:4] == b"\x7fELF":
            yield program


@functools.cache
def library() -> ctypes.CDLL:
    """The library, loaded at the first use. Raises LibraryError."""
    path = find_library()
    try:
        loaded = ctypes.CDLL(path)
        loaded.phub_last_error.restype = c_char_p
        loaded.phub_version.restype = c_char_p
        abi = loaded.phub_abi_version()
        for name, arguments in _FUNCTIONS.items():
            getattr(loaded, f"phub_{name}").argtypes = arguments
    except (OSError, AttributeError) as error:
        raise errors.LibraryError(
            f"phub's library cannot be used: {error}. Set PHUB_LIBRARY to the file {_NAME} of ABI "
            f"{ABI_VERSION} (an installation of phub has it in lib/), or build it: cmake --preset "
            "release && cmake --build --preset release --target phub_worker_shared phub"
        ) from error
    if abi != ABI_VERSION:
        raise errors.LibraryError(
            f"{path} is of ABI {abi} (version {loaded.phub_version().decode()}), and this package "
            f"of ABI {ABI_VERSION}: install the two of one version"
        )
    return loaded


callback = threading.local()  # its `error` is what a callback raised that the library called


@functools.cache
def _function(name: str) -> Any:
    return getattr(library(), f"phub_{name}")


def call(function: str, *arguments: Any) -> None:
    """Calls phub_`function`. Raises the Error of its code, with the library's message."""
    code = _function(function)(*arguments)
    if code:
        message = library().phub_last_error().decode(errors="replace")
        # No variable has the error: its traceback has this frame, with what the arguments refer to.
        if callback.__dict__.get("error") is None:
            raise errors.of_code(code, message)
        raise errors.of_code(code, message) from callback.__dict__.pop("error")
