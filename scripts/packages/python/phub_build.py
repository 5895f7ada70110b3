"""The build backend of pyproject.toml: scikit-build-core, told what is compiled already.

Where build/release is a release build of this folder, `pip install .` brings it up to date and
packs it. Else it compiles all. It says on the terminal what it does and how far it is: pip shows
nothing of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from scikit_build_core import build as backend
from scikit_build_core.build import (  # noqa: F401  # hooks that stay as they are
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

ROOT = Path(__file__).resolve().parents[3]
TARGETS = ("phub", "phub_worker_shared", "zerocompute")
_STEP = re.compile(rb"\[ *(\d+)(?:/(\d+)|%)\]")  # of ninja, or of make


def build_wheel(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    return _built(backend.build_wheel, wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    return _built(backend.build_editable, wheel_directory, config_settings, metadata_directory)


def _built(
    make: Callable[..., str], directory: str, given: Mapping[str, Any] | None, metadata: str | None
) -> str:
    settings = dict(given or {})
    with _terminal() as terminal, progress(terminal):
        # Who says how it is to be compiled gets that.
        if not settings and bring_up_to_date(ROOT / "build/release", terminal):
            settings = {
                "cmake.source-dir": "scripts/packages/python",
                "cmake.define.PHUB_BUILT": str(ROOT / "build/release"),
            }
        else:
            _say(
                terminal,
                f"compiling everything: about 25 minutes of one core, and there are {cores()}. "
                "(scripts/setup installs what it needs. Of a current build/release nothing would "
                "be compiled again.)",
            )
        return make(directory, settings, metadata)


def cores() -> int:
    """That the compiler may use."""
    return len(os.sched_getaffinity(0))


def settings_of(tree: Path) -> dict[str, str]:
    """Of a build tree's CMakeCache.txt; {}: it has none."""
    try:
        lines = (tree / "CMakeCache.txt").read_text().splitlines()
    except OSError:
        return {}
    found = (re.match(r"([\w.-]+):\w+=(.*)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def why_not(tree: Path, root: Path) -> str:
    """Why a package cannot be made of what this tree has compiled; "": it can."""
    settings = settings_of(tree)
    if not settings:
        return "it is not there"
    if Path(settings.get("CMAKE_HOME_DIRECTORY", "")).resolve() != root.resolve():
        return f"it is of {settings.get('CMAKE_HOME_DIRECTORY')}"
    if settings.get("CMAKE_BUILD_TYPE") != "Release" or settings.get("PHUB_SANITIZE"):
        return "it is no plain release build"
    if settings.get("PHUB_BENCH") == "OFF":
        return "it is without zerocompute (PHUB_BENCH is OFF)"
    missing = [name for name in ("phub", "zerocompute") if not (tree / "bin" / name).is_file()]
    return f"it has no bin/{missing[0]}" if missing else ""


def bring_up_to_date(tree: Path, terminal: TextIO | None) -> bool:
    """False: nothing of it can be used, or it does not compile."""
    reason = why_not(tree, ROOT)
    if reason:
        _say(terminal, f"{tree} is not used: {reason}")
        return False
    _say(terminal, f"using {tree}; what has changed since is compiled")
    cmake = settings_of(tree).get("CMAKE_COMMAND", "cmake")
    command = [cmake, "--build", str(tree), "--target", *TARGETS]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        _say(terminal, f"{tree} is not used: {error}")
        return False
    return True


@contextlib.contextmanager
def _terminal() -> Iterator[TextIO | None]:
    """Who waits for pip; None: there is no terminal."""
    try:
        terminal = open("/dev/tty", "w", encoding="utf-8")  # noqa: SIM115
    except OSError:
        yield None
        return
    with terminal:
        yield terminal


def _say(terminal: TextIO | None, message: str) -> None:
    print(f"phub: {message}", flush=True)  # pip -v shows it
    if terminal:
        with contextlib.suppress(OSError):
            print(f"phub: {message}", file=terminal, flush=True)


@contextlib.contextmanager
def progress(terminal: TextIO | None) -> Iterator[None]:
    """Shows there which step of how many the compiler has come to; all output goes on to pip."""
    if terminal is None:
        yield
        return
    sys.stdout.flush()
    output = os.dup(1)
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(write)
    thread = threading.Thread(target=_follow, args=(read, output, terminal))
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)  # and so the pipe ends
        thread.join()
        os.close(output)


def _follow(read: int, output: int, terminal: TextIO) -> None:
    began, shown = time.monotonic(), ""
    with open(read, "rb") as lines:
        for line in lines:
            os.write(output, line)
            step = _STEP.match(line)
            if not step:
                continue
            done = f"{int(step[1])} of {int(step[2])}" if step[2] else f"{int(step[1])}%"
            minutes = (time.monotonic() - began) / 60
            shown = f"\rphub: compiled {done}, {minutes:.1f} minutes "
            with contextlib.suppress(OSError):
                print(shown, end="", file=terminal, flush=True)
    if shown:
        with contextlib.suppress(OSError):
            print(file=terminal, flush=True)
