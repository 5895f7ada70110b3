"""The listings of README.md run, each in four ranks."""

import contextlib
import io
import re
import sys

import numpy as np
import pytest
import torch
from conftest import PACKAGE, SEED, pushed, ran

import phub

LISTINGS = re.findall(r"^```python\n(.*?)^```$", (PACKAGE / "README.md").read_text(), re.M | re.S)
COMMANDS = re.findall(r"^phub run .*$", (PACKAGE / "README.md").read_text(), re.M)
FIRST_PAGE = (PACKAGE.parents[1] / "README.md").read_text()
BITS = (PACKAGE.parent / "bits.md").read_text()
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


NAMES = ["ddp", "optimizer", "diloco", "rejoin", "ddp-again", "sampler", "tuning", "outside"]
NAMES += ["own-branches", "fsdp", "manager", "core", "store"]


def assert_each_rank_says_a_line(said):
    lines = sorted(said.splitlines())
    assert len(lines) == 4
    assert all(line.startswith(f"{rank}| rank {rank}: ") for rank, line in enumerate(lines))


def runs(rank, listing):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(listing, "train.py", "exec"), {"__name__": "__main__"})
    return f"{rank}| {said.getvalue()}"


@pytest.mark.parametrize("listing", LISTINGS, ids=NAMES)
def test_listing(box, start, tmp_path, monkeypatch, listing):
    """Forked, not started: PyTorch is loaded already."""
    monkeypatch.chdir(tmp_path)
    assert_each_rank_says_a_line("".join(start(runs, 4, listing).results()))


def test_three_lines_of_the_first_page(tmp_path):
    (three_lines,) = re.findall(r"^```python\n(.*?)^```$", FIRST_PAGE, re.M | re.S)
    assert len(three_lines.splitlines()) == 3
    assert COMMANDS == ["phub run -n 4 -- python train.py"]
    assert re.findall(r"^phub run [^#]*[^# ]", FIRST_PAGE, re.M) == COMMANDS
    (tmp_path / "train.py").write_text(BEFORE_THREE_LINES + three_lines + AFTER_THREE_LINES)
    words = COMMANDS[0].replace("python", sys.executable).split()[1:]
    done = ran("-m", "phub", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_each_rank_says_a_line(done.stdout)


def exchanged(rank, gradients, reduction):
    with phub.Worker({"w": len(gradients[rank])}, reduction=reduction) as worker:
        return pushed(worker, "w", gradients[rank])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_reference_of_the_page_about_bits_is_right(box, start, reduction):
    (listing,) = re.findall(r"^```python\n(.*?)^```$", BITS, re.M | re.S)
    page = {"parameters": [torch.nn.Parameter(torch.zeros(1))]}
    exec(listing, page)
    random = np.random.default_rng(SEED)
    gradients = list(random.standard_normal((7, 10_001)).astype(np.float32))
    for gradient in gradients:
        gradient[:3] = -0.0  # the sum is -0 as well
    tensors = [torch.from_numpy(gradient) for gradient in gradients]
    expected = page["summed" if reduction == "sum" else "mean"](tensors).numpy()
    for result in start(exchanged, 7, gradients, reduction).results():
        assert np.array_equal(result.view(np.uint32), expected.view(np.uint32))
