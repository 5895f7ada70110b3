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
FIRST_PAGE = (PACKAGE.parents[1] / "README.md").read_text()
# Around the three lines of the project's first page.
BEFORE_THREE_LINES = """
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 20), torch.randint(10, (64,)))
model = torch.nn.Linear(20, 10)
"""
AFTER_THREE_LINES = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for inputs, labels in DataLoader(data, batch_size=8, sampler=sampler):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
print(f"rank {model.phub.rank}: loss {loss.item():.3f}")
"""


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
    check(listing, tmp_path)


def test_three_lines_of_the_first_page(tmp_path):
    (three_lines,) = re.findall(r"^```python\n(.*?)^```$", FIRST_PAGE, re.M | re.S)
    assert len(three_lines.splitlines()) == 3
    assert re.findall(r"^phub run [^#]*[^# ]", FIRST_PAGE, re.M) == COMMANDS
    check(BEFORE_THREE_LINES + three_lines + AFTER_THREE_LINES, tmp_path)


def check(listing, tmp_path):
    """Four ranks run the listing, and each prints one line."""
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
