"""Branches of trainings whose steps the ranks make, tuned from outside and from within."""

import itertools

import pytest
import torch
from blobs import WORLD, assert_alike, assert_near, replayed
from conftest import PACKAGE, SEED, of_ranks, refused, wait_until
from exact import parameters_of
from test_tune import ended, of_kind, tune
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import phub
from phub.tuning import Between, Fork, Policy, Tuner, climb

DIGITS = PACKAGE.parents[1] / "build/data/digits.csv"
pytestmark = pytest.mark.skipif(not DIGITS.is_file(), reason="scripts/setup --data makes them")
FIRST_RATE, BATCH, BRANCHES = 1e-4, 32, 4


class Digits(nn.Module):
    """Pictures of 64 numbers, with batch normalisation, whose statistics each rank has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(SEED)
        rows = [[int(n) for n in line.split(",")] for line in DIGITS.read_text().split()]
        self.table = torch.tensor(rows)
        self.net = nn.Sequential(
            nn.Linear(64, 32), nn.BatchNorm1d(32, momentum=0.5), nn.ReLU(), nn.Linear(32, 10)
        )

    def forward(self, step, rank):
        draw = torch.Generator().manual_seed(SEED + 1000 * rank + step)
        rows = self.table[torch.randint(len(self.table), (BATCH,), generator=draw)]
        return functional.cross_entropy(self.net(rows[:, :64] / 16), rows[:, 64])


def begun(_rule=None):
    model = Digits()
    return model, torch.optim.SGD(model.parameters(), FIRST_RATE, momentum=0.9)


def joined(**options):
    model, made = begun()
    options = {"transport": "shm", "branches": BRANCHES - 1, "on_nonfinite": "pass", **options}
    wrapped = phub.ddp(model, **options)
    return model, made, wrapped, phub.OwnBranches(wrapped.phub.worker, model, made)


def trains(rank, folder):
    """Until there is a file `stop`, with the step after the last. Returns losses and parameters."""
    model, made, wrapped, own = joined()
    losses, end = [], 5000
    for step in itertools.count():
        if rank == 0 and end == 5000 and (folder / "enough").exists():  # nobody is a round ahead
            (folder / "new").write_text(str(step + 20))
            (folder / "new").replace(folder / "stop")
        if (folder / "stop").exists():
            end = int((folder / "stop").read_text())
        if step == end:
            break
        own.begin()
        made.zero_grad()
        loss = wrapped(step, rank)
        losses.append(loss.item())
        wrapped.phub.worker.report_loss(losses[-1], name="train")
        loss.backward()
        made.step()
    wrapped.phub.worker.barrier()
    parameters = list(parameters_of(model).values())
    wrapped.phub.close()
    return losses, parameters


@pytest.mark.parametrize("method", ["climb", "pbt"])
def test_phub_tune_finds_a_rate_for_ddp(box, start, monkeypatch, tmp_path, method):
    monkeypatch.setenv("PHUB_JOB", f"digits-{method}")
    log = tmp_path / "log"
    tuner = tune(
        *("--server", box.address, "--job", f"digits-{method}", "--search", "lr=log:1e-5..10"),
        *("--method", method, "--loss", "train", "--branches", str(BRANCHES)),
        *(("--seed", "3") if method == "pbt" else ("--first-clocks", "8")),
        *("--window", "12", "--every", "0.01", "--log", str(log)),
    )
    ranks = start(trains, WORLD, tmp_path)
    least = 1 if method == "climb" else 4
    wait_until(lambda: len(of_kind(log, "chosen")) >= least, "a branch is chosen")
    at = of_kind(log, "loss")[-1]["round"]
    wait_until(lambda: of_kind(log, "loss")[-1]["round"] > at + 20, "it goes on")
    (tmp_path / "enough").touch()
    (first, mine), (_, others) = ranks.results()
    out, _ = ended(tuner, 0)
    assert ("pbt with seed 3" in out) == (method == "pbt")
    assert_alike([mine, others])
    chosen = of_kind(log, "chosen")[-1]
    assert 1e-3 < chosen["values"]["lr"] < 3
    heard = of_kind(log, "loss")
    assert [row["round"] for row in heard] == list(range(1, len(heard) + 1))
    last = [row["loss"] for row in heard if row["branch"] == chosen["branch"]][-3:]
    assert sum(last) / len(last) < 0.8 * first[0]
    fields = "round", "branch", "parent", "values"
    forks = [tuple(row[field] for field in fields) for row in of_kind(log, "fork")]
    together = replayed(None, [row["branch"] for row in heard], forks, begun)
    for row, expected in zip(heard, together, strict=True):
        assert row["ranks"] == WORLD
        if row["loss"] is not None and row["loss"] < 100:
            assert_near(row["loss"], sum(expected) / WORLD, row)


@of_ranks(2)
def test_a_tuner_within_a_rank_and_all_that_a_branch_has(rank):
    """Each branch goes on with what it had: here the order of draws, and a count that is kept."""

    class Count:
        n = 0

        def state_dict(self):
            return {"n": self.n}

        def load_state_dict(self, state):
            self.n = state["n"]

    model, made = begun()
    worker_of = phub.ddp(model, branches=2, on_nonfinite="pass")
    worker, count = worker_of.phub.worker, Count()
    own = phub.OwnBranches(worker, model, made, {"count": count})
    events, seen = [], {0: [0, None]}
    tuner = None
    if rank == 0:
        policy = Policy(branches=3, first_clocks=4, most_clocks=8)
        space = {"lr": Between(1e-3, 1)}
        tuner = Tuner(worker, lambda: climb(space), policy, report=events.append)
    for step in range(60):
        branch = own.begin()
        rate = made.param_groups[0]["lr"]
        n, known = seen.get(branch, [count.n, None])
        assert count.n == n
        assert known in (None, rate)
        seen[branch] = [n + 1, rate]
        count.n += 1
        made.zero_grad()
        loss = worker_of(step, rank)
        if tuner:
            tuner.step(loss.item())
        loss.backward()
        made.step()
    if tuner:
        forks = [e for e in events if isinstance(e.request, Fork)]
        assert len(forks) > 2
        for fork in forks:
            values = fork.request.values
            if fork.branch in seen and values:
                assert seen[fork.branch][1] == values["lr"]
    assert seen[0][1] == FIRST_RATE
    worker.barrier()
    worker_of.phub.close()


TURNS = (1, 4), (2, 3), (1, 2), (0, 0)  # branch and rounds
RATES = {0: FIRST_RATE, 1: 0.1, 2: 0.02}


def sharded(rank):
    """The branch of each step, and the losses."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = Digits()
    fully_shard(model.net, mesh=init_device_mesh("cpu", (1,)))
    replicas = phub.FSDPState(model.net, branches=2, on_nonfinite="pass", transport="shm")
    made = torch.optim.SGD(model.net.parameters(), FIRST_RATE, momentum=0.9)
    own = phub.OwnBranches(replicas.worker, model.net, made)
    if rank == 0:
        replicas.worker.fork(0, {"lr": RATES[1]}, round=4)
        replicas.worker.fork(1, {"lr": RATES[2]}, round=7)
        replicas.worker.schedule(*TURNS, round=5)
    replicas.worker.barrier()
    ran, losses = [], []
    for step in range(20):
        ran.append(own.begin())
        assert made.param_groups[0]["lr"] == RATES[ran[-1]]
        made.zero_grad()
        loss = model(step, rank)
        losses.append(loss.item())
        loss.backward()
        made.step()
    replicas.worker.barrier()
    replicas.close()
    distributed.destroy_process_group()
    return ran, losses


def test_replicas_of_fsdp_have_branches(box, start):
    (ran, first), (others, second) = start(sharded, WORLD).results()
    assert ran == others
    assert sorted(set(ran)) == [0, 1, 2]
    at = ran.index(1) + 1  # the schedule begins where the last fork lets it
    forks = [(4, 1, 0, {"lr": RATES[1]}), (7, 2, 1, {"lr": RATES[2]})]
    assert ran[at - 1 : at + 9] == [1] * 4 + [2] * 3 + [1] * 2 + [0]
    for row, expected in zip(
        zip(first, second, strict=True), replayed(None, ran, forks, begun), strict=True
    ):
        for mine, one in zip(row, expected, strict=True):
            assert_near(mine, one, ran)


@of_ranks(2)
def test_a_branch_that_is_discarded_before_it_runs_has_its_values_on_all_ranks(rank):
    model, made, wrapped, own = joined()
    worker, seen = wrapped.phub.worker, []
    for step in range(12):
        if rank == 0 and step == 3:
            child, _ = worker.fork(0, {"lr": 0.5})
            runs = worker.schedule((child, 2), (0, 0))
            worker.discard(child)
        branch = own.begin()
        seen.append((branch, made.param_groups[0]["lr"]))
        made.zero_grad()
        wrapped(step, rank).backward()
        made.step()
    assert [each for each in seen if each[0]] == [(1, 0.5)] * 2
    assert {rate for branch, rate in seen if not branch} == {FIRST_RATE}

    def is_forgotten():
        try:
            return worker.branch_values(1) is None
        except phub.NotFoundError:
            return True

    wait_until(is_forgotten, "the box knows that its rounds are over")
    if rank == 0:
        assert seen[runs - 1] == (1, 0.5)
    worker.barrier()
    wrapped.phub.close()


@of_ranks(1)
def test_another_branch_lies_where_the_one_before_did(rank):
    """And what is frozen is not kept."""
    model, made = begun()
    model.frozen = nn.Parameter(torch.zeros(1 << 18), requires_grad=False)
    wrapped = phub.ddp(model, branches=1, on_nonfinite="pass")
    worker = wrapped.phub.worker
    own = phub.OwnBranches(worker, model, made)
    assert len(own._own.saved()) < 1 << 18
    child, _ = worker.fork(0, {"lr": 0.5}, round=4)
    worker.schedule((child, 2), (0, 0), round=5)
    lies, ran = set(), []
    for step in range(10):
        ran.append(own.begin())
        if step > 0:
            tensors = [made.state[p]["momentum_buffer"] for p in made.state]
            lies.add(tuple(each.data_ptr() for each in (*tensors, *model.parameters())))
        made.zero_grad()
        wrapped(step, rank).backward()
        made.step()
    assert ran.count(child) == 2
    assert len(lies) == 1
    wrapped.phub.close()


@of_ranks(1)
def test_a_branch_that_diverges_leaves_nothing_to_its_parent(rank):
    """PowerSGD's residuals and Q are each branch's own."""

    def losses(ruined):
        model, made = begun()
        wrapped = phub.ddp(
            model, powersgd=1, branches=1, on_nonfinite="pass", job=f"powersgd-{ruined}"
        )
        worker, seen = wrapped.phub.worker, []
        own = phub.OwnBranches(worker, model, made)
        for step in range(16):
            if ruined and step == 4:
                child, at = worker.fork(0, {"lr": 1e6})
                worker.schedule((child, 4), (0, 0), round=at)
            branch = own.begin()
            made.zero_grad()
            loss = wrapped(len(seen), rank)
            if branch == 0:
                seen.append(loss.item())
            loss.backward()
            made.step()
        wrapped.phub.close()
        return seen

    expected, found = losses(False), losses(True)
    assert len(found) == 12
    assert found == expected[:12]


@of_ranks(1)
def test_gradients_of_few_bits_have_no_branches(rank):
    for options in ({"gradient_dtype": "int8"}, {"formats": {"*.weight": "topk"}}):
        refused("could not send of gradients of few bits", joined, **options)


@of_ranks(1)
def test_values_go_into_all_groups_by_pytorchs_names(rank):
    model = nn.Linear(4, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(0.5)}]
    made = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), foreach=False)
    wrapped = phub.ddp(model, branches=3, on_nonfinite="pass")
    worker = wrapped.phub.worker
    own = phub.OwnBranches(worker, model, made)

    def step():
        branch = own.begin()
        made.zero_grad()
        wrapped(torch.ones(3, 4)).sum().backward()
        made.step()
        return branch

    step()
    values = {"lr": 0.25, "beta2": 0.5, "weight_decay": 0, "batch": 8}
    child, _ = worker.fork(0, values)
    assert worker.branch_values(child) == values
    assert worker.branch_values(0) == {}
    grandchild, _ = worker.fork(child, {"lr": 0.125})
    assert worker.branch_values(grandchild) == values | {"lr": 0.125}
    wrong, _ = worker.fork(0, {"momentum": 0.9})
    worker.schedule((child, 2), (grandchild, 2), (0, 2), (wrong, 0))
    seen = []
    for _ in range(20):
        if worker.branch_in(worker.round(worker.keys[0]) + 1) == wrong:
            break
        branch = step()
        of_groups = [(float(g["lr"]), g["betas"], g["weight_decay"]) for g in made.param_groups]
        seen.append((branch, of_groups))
    expected = {
        0: [(1e-3, (0.9, 0.99), 0.01), (0.5, (0.9, 0.99), 0.01)],
        child: [(0.25, (0.9, 0.5), 0)] * 2,
        grandchild: [(0.125, (0.9, 0.5), 0)] * 2,
    }
    assert {branch for branch, _ in seen} == {0, child, grandchild}
    for branch, of_groups in seen:
        assert of_groups == [(pytest.approx(lr), b, w) for lr, b, w in expected[branch]]
    refused("3 was forked with momentum=0.9.*AdamW have no such value, but eps, lr", own.begin)
    refused("no optimizer: its branches are states of the ranks", worker.kill, child)
    refused("'none' does not use it", worker.set_hyper, {"lr": 1})
    refused("unknown hyperparameter", worker.fork, 0, {"lrr": 1})
    wrapped.phub.close()
