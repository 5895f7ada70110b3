"""The listings of frameworks.md, and a plain DDP with phub's hook that gets the same batches."""

import re
import sys

import pytest
from conftest import PACKAGE, ran

PAGE = (PACKAGE / "frameworks.md").read_text()
NAMES = ("accelerate", "lightning", "transformers")
LISTINGS = dict(zip(NAMES, re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S), strict=True))

# Notes the parameters that the training begins with, and the indices of each batch.
BEFORE = """
import torch as _torch
from phub import pytorch as _pytorch

_first, _batches = {}, []


def _noting(state, module, *, _init=_pytorch.DDPState.__init__, **options):
    _first.update({name: p.detach().clone() for name, p in module.named_parameters()})
    _init(state, module, **options)


def _fetching(fetcher, indices, *, _fetch=_torch.utils.data._utils.fetch._MapDatasetFetcher.fetch):
    _batches.append(list(indices))
    return _fetch(fetcher, indices)


_pytorch.DDPState.__init__ = _noting
_torch.utils.data._utils.fetch._MapDatasetFetcher.fetch = _fetching
"""

# What the frameworks have trained is `net`. `loss_of` a batch of rows, and `optimizer_of` the net
# are as there. A step has `_accumulated` batches.
AFTER = """
import phub

batches = list(_batches)
assert len(batches) == 3 * 512 // (32 * 4), batches
steps = [batches[at : at + _accumulated] for at in range(0, len(batches), _accumulated)]
trained = {name: p.detach().clone() for name, p in net.named_parameters()}
with torch.no_grad():
    for name, p in net.named_parameters():
        assert not torch.equal(p, _first[name])
        p.copy_(_first[name])
ddp = torch.nn.parallel.DistributedDataParallel(net)
plain = phub.DDPState(ddp.module, job="plain")
ddp.register_comm_hook(plain, phub.ddp_hook)
opt, after_step = optimizer_of(net, len(steps))
for step, (*firsts, last) in enumerate(steps):
    opt.zero_grad()
    for indices in firsts:
        with ddp.no_sync():
            (loss_of(ddp, [data[index] for index in indices]) / _accumulated).backward()
    (loss_of(ddp, [data[index] for index in last]) / _accumulated).backward()
    assert {plain.worker.round(key) for key in plain.worker.keys} == {step + 1}
    after_step()
for name, p in net.named_parameters():
    assert torch.equal(p.view(torch.int32), trained[name].view(torch.int32)), name
plain.close()
print(f"same bits after {len(steps)} steps, batches begin with {batches[0][:2]}")
"""
TENSORS = """
def loss_of(ddp, rows):
    inputs, labels = torch.utils.data.default_collate(rows)
    return torch.nn.functional.cross_entropy(ddp(inputs), labels)


def optimizer_of(net, steps):
    opt = torch.optim.AdamW(net.parameters(), 3e-3)
    return opt, opt.step
"""
AROUND = {
    "accelerate": "net = model.module" + TENSORS,
    "lightning": """
net = model.net
_first = {name.removeprefix("net."): p for name, p in _first.items()}
"""
    + TENSORS,
    "transformers": """
from transformers import get_scheduler
net = model


def loss_of(ddp, rows):
    return ddp(**trainer.data_collator(rows))["loss"]


def optimizer_of(net, steps):
    opt = torch.optim.AdamW(net.parameters(), 5e-5, weight_decay=0.0, fused=True)
    schedule = get_scheduler("linear", opt, 0, steps)

    def step():
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        schedule.step()

    return opt, step
""",
}
# More of a framework: what is added to the listing's arguments.
ADDED = {
    "lightning": ("max_epochs=3,", "accumulate_grad_batches=2,"),
    "transformers": ("num_train_epochs=3,", "gradient_accumulation_steps=2,"),
}


@pytest.mark.parametrize(
    ("name", "accumulated"),
    [("accelerate", 2), *((name, parts) for name in NAMES[1:] for parts in (1, 2))],
)
def test_parameters_are_those_of_the_plain_hook(name, accumulated, tmp_path):
    pytest.importorskip(name)
    listing = LISTINGS[name]
    if accumulated > 1 and name in ADDED:
        before, added = ADDED[name]
        assert before in listing
        listing = listing.replace(before, before + added)
    counted = f"_accumulated = {accumulated}\n"
    (tmp_path / "train.py").write_text(BEFORE + listing + AROUND[name] + counted + AFTER)
    arguments = *["-m", "phub", "run", "-n", "4", "--"], sys.executable, "train.py"
    done = ran(*arguments, cwd=tmp_path)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    for rank in range(4):
        assert re.search(rf"^{rank}\| rank {rank}: loss ", done.stdout, re.M)
    same = re.findall(r"^\d\| same bits after (.*)$", done.stdout, re.M)
    assert len(set(same)) == 4  # or the ranks had the same batches


# What of a listing is phub's, and what takes its place where phub is the backend alone.
PLAIN = {
    "accelerate": [
        (r"import phub\n", "torch.distributed.init_process_group(BACKEND)\n"),
        (r"state = phub.DDPState.*\n", ""),
        (r"model.register_comm_hook.*\n", ""),
        (r"state.close\(\)\n", "net = model.module\n"),
    ],
    "lightning": [
        (r"from phub.lightning.*\n", ""),
        (r"devices=4", "devices=2"),
        (
            r"Strategy\(\)",
            "lightning.pytorch.strategies.DDPStrategy(process_group_backend=BACKEND)",
        ),
    ],
    "transformers": [
        (r"from phub.transformers.*\n", "torch.distributed.init_process_group(BACKEND)\n"),
        (r"trainer.add_callback.*\n", ""),
    ],
}
BITS = """
import hashlib, os
bits = hashlib.sha256()
for p in (net if "net" in globals() else model).parameters():
    bits.update(p.detach().numpy().tobytes())
over = torch.distributed.get_backend()
print(f"parameters {bits.hexdigest()} over {over}\\n", end="", flush=True)
if over == "gloo":
    os._exit(0)  # at its end it may abort
"""


def plain(name):
    """The listing without a word of phub, and with a backend."""
    found = LISTINGS[name]
    for phubs, others in PLAIN[name]:
        found, count = re.subn(phubs, others, found)
        assert count == 1, phubs
    assert "phub" not in found
    return found + BITS


@pytest.mark.parametrize("name", NAMES)
def test_with_another_backend_nothing_else_changes(name, tmp_path):
    pytest.importorskip(name)
    launch = ["-m", "phub", "run", "-n", "2", "--", sys.executable]
    launches = {
        "gloo": launch,
        "phub": launch,
        "by torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2"],
    }
    found = {}
    for way, before in launches.items():
        backend = "gloo" if way == "gloo" else "phub"
        head = f"import phub\nBACKEND = {backend!r}\n"
        (tmp_path / "train.py").write_text(head + plain(name))
        done = ran(*before, "train.py", cwd=tmp_path)
        print(done.stdout, done.stderr)
        assert done.returncode == 0
        bits = re.findall(rf"parameters (\w+) over {backend}", done.stdout)
        losses = sorted(re.findall(r"rank \d: loss \d+\.\d+", done.stdout))
        assert len(bits) == len(losses) == 2
        assert bits[0] == bits[1]
        found[way] = bits[0], losses
    # Of two numbers there is one sum.
    assert found["phub"] == found["gloo"] == found["by torchrun"]


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_nothing_of_the_frameworks_is_loaded_unasked(name):
    code = f"import phub.pytorch, phub.optimizer, sys; assert {name!r} not in sys.modules"
    assert ran("-c", code).returncode == 0
