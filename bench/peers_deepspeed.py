"""DeepSpeed's all-reduce over shared memory, of PyPI, for bench/peers: compiled from its sources.

As shipped, and with two lines changed for more ranks than cores: a rank that waits yields its core,
and exchanges pieces of 2 MiB, which stay in cache, in place of 32 MiB.

  peers_deepspeed.py SOURCES FOLDER SETTING    compiles one into FOLDER; needs PyTorch, a compiler, ninja
"""

import importlib.util
import os
import sys
from pathlib import Path

PACKAGE = "deepspeed==0.19.8"
ADDRESS = "phub-peers"  # in the names of its shared memory
CHANGES = {
    "as shipped": {},
    "yielding, pieces of 2 MiB": {
        "#define MAX_BUF_SIZE 1048576 * 32": "#define MAX_BUF_SIZE 1048576 * 2",
        "if (cur_state == state0 || cur_state == state1) break;":
            "if (cur_state == state0 || cur_state == state1) break;\n        sched_yield();",
    },
}


def module_of(setting):
    return "deepspeed_" + "".join(letter if letter.isalnum() else "_" for letter in setting)


def compile_one(sources, folder, setting):
    from torch.utils import cpp_extension

    name, changes = module_of(setting), CHANGES[setting]
    copy, build = folder / f"{name}_source", folder / name
    for file in sources.rglob("*"):
        if file.suffix in (".cpp", ".h"):
            text = file.read_text()
            for old, new in changes.items():
                text = text.replace(old, new)
            target = copy / file.relative_to(sources)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("#include <sched.h>\n" + text)
    if not all(new in (copy / "shm.cpp").read_text() for new in changes.values()):
        raise SystemExit(f"peers_deepspeed: {sources}/shm.cpp is not that of {PACKAGE}")
    build.mkdir(exist_ok=True)
    cpp_extension.load(name, [str(copy / "shm_interface.cpp"), str(copy / "shm.cpp")],
                       build_directory=str(build), extra_cflags=["-O2", "-fopenmp"],
                       extra_ldflags=["-fopenmp"])


def all_reduce_of(folder, setting, rank, ranks, run):
    """A function that sums a tensor over all ranks. `run` is a word that this run alone has."""
    import torch

    os.environ.update(LOCAL_SIZE=str(ranks), MASTER_ADDR=ADDRESS, MASTER_PORT=run)
    name = module_of(setting)
    library = next((Path(folder) / name).glob(f"{name}*.so"))
    spec = importlib.util.spec_from_file_location(name, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.initialize(ranks, rank)
    return torch.ops.deepspeed.inference_all_reduce_


if __name__ == "__main__":
    compile_one(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
