"""`pip install .` packs what build/release has, or compiles, and says which and how far it is."""

import importlib.util
import io
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from conftest import PACKAGE

BACKEND = PACKAGE.parents[1] / "scripts/packages/python/phub_build.py"
HOOKS = ["build_sdist", "build_wheel", "build_editable", "get_requires_for_build_editable"]
HOOKS += ["get_requires_for_build_sdist", "get_requires_for_build_wheel"]
HOOKS += ["prepare_metadata_for_build_editable", "prepare_metadata_for_build_wheel"]


@pytest.fixture
def backend(monkeypatch, tmp_path):
    """The module over a scikit-build-core that notes what it is told, with a root of its own."""
    made = []

    def make(directory, settings, metadata):
        made.append(settings)
        return "phub.whl"

    build = ModuleType("scikit_build_core.build")
    for name in HOOKS:
        setattr(build, name, make)
    package = ModuleType("scikit_build_core")
    package.build = build
    monkeypatch.setitem(sys.modules, "scikit_build_core", package)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", build)
    spec = importlib.util.spec_from_file_location("phub_build", BACKEND)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return SimpleNamespace(module=module, made=made, root=tmp_path)


def tree_of(root, status=0, **settings):
    """A build tree whose cmake notes its arguments."""
    tree = root / "build/release"
    (tree / "bin").mkdir(parents=True)
    for name in ("phub", "zerocompute"):
        (tree / "bin" / name).touch()
    cmake = root / "cmake"
    cmake.write_text(f'#!/bin/sh\necho "$@" >>{root}/called\nexit {status}\n')
    cmake.chmod(0o755)
    given = {"CMAKE_HOME_DIRECTORY": root, "CMAKE_BUILD_TYPE": "Release", "CMAKE_COMMAND": cmake}
    lines = (f"{name}:STRING={value}" for name, value in (given | settings).items())
    (tree / "CMakeCache.txt").write_text("\n".join(["# A comment", *lines]))
    return tree


def test_what_is_compiled_is_brought_up_to_date_and_packed(backend, capfd):
    tree = tree_of(backend.root)
    assert backend.module.build_wheel("out") == "phub.whl"
    told = {"cmake.source-dir": "scripts/packages/python", "cmake.define.PHUB_BUILT": str(tree)}
    assert backend.made == [told]
    targets = "phub phub_worker_shared zerocompute"
    assert (backend.root / "called").read_text() == f"--build {tree} --target {targets}\n"
    assert f"phub: using {tree}" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"CMAKE_HOME_DIRECTORY": "/elsewhere"}, "it is of /elsewhere"),
        ({"PHUB_SANITIZE": "thread"}, "it is no plain release build"),
        ({"CMAKE_BUILD_TYPE": "Debug"}, "it is no plain release build"),
        ({"PHUB_BENCH": "OFF"}, "it is without zerocompute"),
        ({"status": 1}, "returned non-zero exit status 1"),
    ],
)
def test_another_tree_is_not_used(backend, capfd, settings, reason):
    tree_of(backend.root, **settings)
    backend.module.build_editable("out")
    assert backend.made == [{}]
    said = capfd.readouterr().out
    assert reason in said
    assert "compiling everything" in said


def test_without_a_tree_all_is_compiled(backend, capfd):
    backend.module.build_wheel("out")
    assert backend.made == [{}]
    assert "build/release is not used: it is not there" in capfd.readouterr().out
    tree_of(backend.root).joinpath("bin/phub").unlink()
    backend.module.build_wheel("out")
    assert "it has no bin/phub" in capfd.readouterr().out


def test_who_says_how_gets_that(backend):
    tree_of(backend.root)
    backend.module.build_wheel("out", {"build-dir": "build/wheel"})
    assert backend.made == [{"build-dir": "build/wheel"}]
    assert not (backend.root / "called").exists()


def test_it_says_how_far_it_is(backend, capfd):
    terminal = io.StringIO()
    with backend.module.progress(terminal):
        subprocess.run(["printf", r"[3/40] Building a\nnothing\n[ 75%%] Built b\n"], check=True)
    assert capfd.readouterr().out == "[3/40] Building a\nnothing\n[ 75%] Built b\n"
    shown = terminal.getvalue().split("\r")
    assert shown[1].startswith("phub: compiled 3 of 40, 0.")
    assert shown[2].startswith("phub: compiled 75%, 0.")
    os.write(1, b"it is as before\n")
    assert capfd.readouterr().out == "it is as before\n"
