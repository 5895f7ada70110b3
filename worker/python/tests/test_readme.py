"""The listings of README.md run, as `phub run` starts them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import phub

PACKAGE = Path(phub.__file__).parents[1]
LISTINGS = re.findall(r"^```python\n(.*?)^```$", (PACKAGE / "README.md").read_text(), re.M | re.S)
COMMANDS = re.findall(r"^phub run .*$", (PACKAGE / "README.md").read_text(), re.M)


def test_there_are_listings():
    assert len(LISTINGS) == 10
    assert COMMANDS == ["phub run -n 4 -- python train.py"]


@pytest.mark.parametrize(
    "listing",
    LISTINGS,
    ids=[
        "ddp",
        "optimizer",
        "rejoin",
        "ddp-again",
        "sampler",
        "tuning",
        "outside",
        "fsdp",
        "core",
        "store",
    ],
)
def test_listing(listing, tmp_path):
    (tmp_path / "train.py").write_text(listing)
    words = COMMANDS[0].replace("phub", f"{sys.executable} -m phub", 1).split()
    words[words.index("python")] = sys.executable
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 4
    assert all(line.startswith(f"{rank}| rank {rank}: ") for rank, line in enumerate(lines))
