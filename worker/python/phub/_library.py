"""Finds and loads libphub_worker.so, whose functions and structs are as worker/phub.h has them."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
from collections.abc import Iterator
from ctypes import (
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

_NAME = "libphub_worker.so.0"
_PACKAGE = Path(__file__).resolve().parent
_BUILD_TREE = _PACKAGE.parents[2] / "build/release"
_SCALARS = {
    "char": ctypes.c_char,
    "double": c_double,
    "float": c_float,
    "int": c_int,
    "int32_t": c_int32,
    "int64_t": c_int64,
    "size_t": c_size_t,
    "uint32_t": c_uint32,
    "uint64_t": c_uint64,
}


@functools.cache
def _header() -> str:
    """worker/phub.h without its comments: the package's own, or that of the tree around it."""
    own = _PACKAGE / "phub.h"
    text = (own if own.is_file() else _PACKAGE.parents[1] / "phub.h").read_text("utf-8")
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


ABI_VERSION = int(_header().split("#define PHUB_ABI_VERSION ")[1].split()[0])


def _type(declared: str) -> Any:
    """The type of "const float* left". ctypes takes any buffer and address for a c_void_p."""
    if "*" in declared:
        return c_char_p if re.fullmatch(r"(const )?char\* \w+", declared) else c_void_p
    return _SCALARS.get(declared.split(maxsplit=1)[0], c_void_p)  # the others are functions


def _arguments(function: str) -> list[Any]:
    """The types of the arguments of a function of the header."""
    found = re.search(rf"\bphub_{function}\(([^)]*)\);", _header())
    if not found:
        raise AttributeError(f"worker/phub.h has no phub_{function}")
    return [_type(" ".join(argument.split())) for argument in found[1].split(",")]


def _fields(struct: str) -> list[tuple[str, Any]]:
    """The fields of a struct of the header."""
    body = _header().split(f"typedef struct {struct} {{")[1].split("}")[0]
    return [
        (name.split()[-1], _type(" ".join(line.split(",")[0].split())))
        for line in body.split(";")[:-1]
        for name in line.split(",")
    ]


class Info(ctypes.Structure):
    """phub_info."""

    _fields_ = _fields("phub_info")


class Stats(ctypes.Structure):
    """phub_stats."""

    _fields_ = _fields("phub_stats")


class RoundVerdict(ctypes.Structure):
    """phub_round_verdict."""

    _fields_ = _fields("phub_round_verdict")


class BranchInfo(ctypes.Structure):
    """phub_branch."""

    _fields_ = _fields("phub_branch")


class StoreCounters(ctypes.Structure):
    """phub_store_counters."""

    _fields_ = _fields("phub_store_counters")


class Range(ctypes.Structure):
    """phub_range."""

    _fields_ = _fields("phub_range")


class KeyMemory(ctypes.Structure):
    """phub_key_memory."""

    _fields_ = _fields("phub_key_memory")


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
    function = getattr(library(), f"phub_{name}")
    function.argtypes = _arguments(name)
    return function


def call(function: str, *arguments: Any) -> None:
    """Calls phub_`function`. Raises the Error of its code, with the library's message."""
    code = _function(function)(*arguments)
    if code:
        message = library().phub_last_error().decode(errors="replace")
        # No variable has the error: its traceback has this frame, with what the arguments refer to.
        if callback.__dict__.get("error") is None:
            raise errors.of_code(code, message)
        raise errors.of_code(code, message) from callback.__dict__.pop("error")
