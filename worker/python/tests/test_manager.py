"""The calls of torchft's Manager, with ranks that come, die and fail."""

import os
import random
import signal
import time
from unittest.mock import patch

import pytest
import torch
from conftest import LIMIT_S, SEED, of_ranks, refused, wait_until
from deaths import FORK
from exact import assert_same_bits, job, mean
from torch import nn

import phub
from phub import _given_state
from phub._quorum import Course, Standing, course_of
from phub.manager import DistributedDataParallel, Manager, Optimizer, allreduce_gradients

STEPS = 24
JOB = "managed"


def make_net(seed=SEED):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, 5))


def batch_of(rank, step):
    draw = torch.Generator().manual_seed(SEED + 1000 * rank + step)
    return torch.randn(8, 12, generator=draw), torch.randint(5, (8,), generator=draw)


class Training:
    """One rank's, whose first parameters are its own."""

    def __init__(self, rank, **options):
        self.rank = rank
        self.net = make_net(SEED + rank)
        given = {"job": JOB, "lease_ms": 20_000, "max_ranks": 4, "rank": rank, **options}
        self.manager = Manager(self.load, self.state, **given)
        self.optimizer = Optimizer(self.manager, torch.optim.AdamW(self.net.parameters(), 1e-2))
        self.model = self.net

    def state(self):
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state):
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])

    def backward(self):
        inputs, labels = batch_of(self.rank, self.manager.current_step())
        nn.functional.cross_entropy(self.model(inputs), labels).backward()

    def step(self):
        self.optimizer.zero_grad()
        self.backward()
        if self.model is self.net:
            allreduce_gradients(self.manager, self.net)
        self.optimizer.step()

    def result(self):
        return self.manager.state_dict(), self.state()


def expected(ranks, steps):
    """Of one process that has the gradients of all ranks. ranks: of each step."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for step in range(steps):
        found = []
        for rank in ranks(step):
            optimizer.zero_grad()
            inputs, labels = batch_of(rank, step)
            nn.functional.cross_entropy(net(inputs), labels).backward()
            found.append([p.grad.clone() for p in net.parameters()])
        for at, parameter in enumerate(net.parameters()):
            parameter.grad = mean([each[at] for each in found])
        optimizer.step()
    committed = sum(len(ranks(step)) for step in range(steps))
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
    return {"step": steps, "batches_committed": committed}, state


def trains(rank, how):
    training = Training(rank, transport=how[0], use_async_quorum=how[1])
    if how[2]:
        options = {"bucket_cap_mb": 0.001} if how[2] == "buckets" else {}
        training.model = DistributedDataParallel(training.manager, training.net, **options)
    for step in range(STEPS):
        assert training.manager.current_step() == step
        training.step()
        assert training.manager.num_participants() == 3
        assert training.manager.participating_rank() == rank
    training.manager.shutdown()
    return training.result()


@pytest.mark.parametrize(
    "how",
    [
        ("shm", True, ""),
        ("tcp", False, ""),
        ("shm", True, "ddp"),
        ("tcp", True, "buckets"),
    ],
    ids=lambda how: "-".join(map(str, how)),
)
def test_a_step_is_that_of_one_process(box, start, how):
    found = start(trains, 3, how, PHUB_JOB=job("steps")).results()
    wanted = expected(lambda _: range(3), STEPS)
    assert_same_bits(found, [wanted] * 3)


# ---- Ranks that come and go.


def trains_slowly(rank, name, steps, reached, die_at, wait_at=None, goes_on=None):
    training = Training(rank, job=name)
    members = []
    while training.manager.current_step() < steps:
        step = training.manager.current_step()
        if step == wait_at:
            assert goes_on.wait(LIMIT_S)
        training.optimizer.zero_grad()
        training.backward()
        if (rank, step) == die_at[:2] and die_at[2] == 0:
            signal.raise_signal(signal.SIGKILL)
        works = [training.manager.allreduce(p.grad) for p in training.net.parameters()]
        if (rank, step) == die_at[:2]:
            signal.raise_signal(signal.SIGKILL)
        done = [work.wait() for work in works]
        assert all(done)
        found = training.manager.num_participants()
        training.optimizer.step()
        if training.manager.current_step() > step:
            members.append((step, found))
        reached.value = max(reached.value, training.manager.current_step())
    training.manager.shutdown()
    return training.result(), members


def has_come(box, name, rank, incarnation):
    """Else the others may have ended before it joins."""
    ranks = box.status(name).get("ranks", ())
    here = [each for each in ranks if each["state"] in ("joining", "live")]
    return (rank, incarnation) in [(each["rank"], each["incarnation"]) for each in here]


def test_a_killed_rank_stops_nobody(box, start):
    draw = random.Random(f"{SEED} killed")
    die_at = (draw.randrange(3), draw.randrange(3, STEPS), draw.randrange(2))
    print(f"rank, step and place of the death: {die_at}")
    reached = FORK.Value("i", 0)
    ranks = start(trains_slowly, 3, job("killed"), STEPS, reached, die_at)
    left = [rank for rank in range(3) if rank != die_at[0]]
    found = [ranks.result(rank) for rank in left]
    assert_same_bits(found[0], found[1])
    (state, _), members = found[0]
    assert state["step"] == STEPS
    assert [n for step, n in members if step < die_at[1]] == [3] * die_at[1]
    assert [n for step, n in members if step > die_at[1]] == [2] * (STEPS - 1 - die_at[1])
    if die_at[2] == 0:  # it died before it sent anything of the step
        wanted = expected(lambda step: range(3) if step < die_at[1] else left, STEPS)
        assert_same_bits(found[0][0][1], wanted[1])


def test_a_newcomer_has_the_same_bits(box, start):
    """One is killed, and a process that begins anew takes its place."""
    draw = random.Random(f"{SEED} newcomer")
    die_at = (draw.randrange(3), draw.randrange(1, STEPS // 2), draw.randrange(2))
    print(f"rank, step and place of the death: {die_at}")
    reached, goes_on = FORK.Value("i", 0), FORK.Event()
    name, wait_at = job("newcomer"), STEPS * 3 // 4
    ranks = start(trains_slowly, 3, name, STEPS, reached, die_at, wait_at, goes_on)
    wait_until(lambda: reached.value == wait_at, "the step before which all wait")
    ranks._make = (*ranks._make[:3], (name, STEPS, reached, (-1, -1, 0)), ranks._make[4])
    ranks.replace(die_at[0])
    wait_until(lambda: has_come(box, name, die_at[0], 2), "a newcomer")
    goes_on.set()
    found = ranks.results()
    assert_same_bits([state for state, _ in found], [found[0][0]] * 3)
    counts = {step: n for _, members in found for step, n in members}
    assert sorted(counts) == list(range(STEPS))
    assert counts[0] == 3
    assert counts[wait_at - 1] == 2
    assert len(found[die_at[0]][1]) == sum(1 for step in range(wait_at, STEPS) if counts[step] == 3)


def comes_later(rank, name, is_ddp, come):
    """Rank 2 is none of the beginning."""
    if rank == 2:
        assert come.wait(LIMIT_S)
    training = Training(rank, job=name, world_size=2)
    if is_ddp:
        options = {"bucket_cap_mb": 0.001}
        training.model = DistributedDataParallel(training.manager, training.net, **options)
    counts = []
    while training.manager.current_step() < STEPS:
        if rank < 2 and training.manager.current_step() == STEPS // 2 and not come.is_set():
            come.set()
        training.step()
        counts.append((training.manager.current_step() - 1, training.manager.num_participants()))
        if training.manager.current_step() > STEPS // 2 and 3 not in [n for _, n in counts]:
            time.sleep(0.3)  # so that it comes in time
    training.manager.shutdown()
    return training.result(), counts


@pytest.mark.parametrize("is_ddp", [False, True], ids=["plain", "ddp"])
def test_one_more_rank_is_taken_in(box, start, is_ddp):
    come = FORK.Event()
    found = start(comes_later, 3, job("more"), is_ddp, come).results()
    counts = dict(found[0][1])
    assert_same_bits(dict(found[1][1]), counts)
    late = {step: n for step, n in counts.items() if n == 3}
    assert late
    assert_same_bits(dict(found[2][1]), late)
    wanted = expected(lambda step: range(counts[step]), STEPS)
    assert_same_bits([state for state, _ in found], [wanted] * 3)


# ---- Steps that do not count.


@of_ranks(3)
def test_a_rank_with_an_error_gets_the_state_of_the_others(rank):
    training = Training(rank, job=job("errors"))
    commits = []
    while training.manager.current_step() < 6:
        step = training.manager.current_step()
        training.manager.start_quorum()
        training.optimizer.optim.zero_grad()
        training.backward()
        works = [training.manager.allreduce(p.grad) for p in training.net.parameters()]
        done = [work.wait() for work in works]
        assert all(done)
        if (rank, step) == (1, 3) and len(commits) == 3:
            training.manager.report_error(ValueError("a bad batch"))
            assert not training.manager.allreduce(torch.ones(1)).wait()
            assert str(training.manager.errored()) == "a bad batch"
        commits.append(training.manager.should_commit())
        if commits[-1]:
            training.optimizer.optim.step()
    assert commits == [True, True, True, rank != 1, True, True]
    # It has the state of the others before it computes the next gradient.
    assert_same_bits(training.result(), expected(lambda _: range(3), 6))
    training.manager.shutdown()
    return training.result()


@of_ranks(2)
def test_steps_of_too_few_ranks_do_not_count(rank):
    training = Training(rank, job=job("few"), min_replica_size=3, max_retries=2)
    for _ in range(2):
        training.step()
    assert training.manager.current_step() == 0
    refused("3 steps in a row", training.step, error=RuntimeError)
    training.manager.shutdown()


@of_ranks(2)
def test_ranks_go_on_from_the_farthest_file(rank):
    """Each from its own: both begin with the step of rank 1."""
    training = Training(rank, job=job("files"))
    training.manager.load_state_dict({"step": 5 + rank, "batches_committed": 9 + rank})
    begun = {name: p.clone() for name, p in make_net(SEED + 1).named_parameters()}
    training.manager.start_quorum()
    assert training.manager.state_dict() == {"step": 6, "batches_committed": 10}
    assert_same_bits({n: p.detach() for n, p in training.net.named_parameters()}, begun)
    training.manager.shutdown()


@of_ranks(2)
def test_tensors_of_many_kinds_and_waits(rank):
    with Manager(job=job("kinds"), init_sync=False) as manager:
        for step in range(4):
            draw = [torch.Generator().manual_seed(SEED + 10 * step + each) for each in (0, 1)]
            all_of = [
                [
                    torch.randn(3, 700, generator=each),
                    torch.randn(5, generator=each).bfloat16(),
                    torch.randn(2, 3, generator=each).t(),
                    torch.empty(0),
                ]
                for each in draw
            ]
            mine = all_of[rank]
            sums = [a.float() + b.float() for a, b in zip(*all_of, strict=True)]
            wanted = [(s * 0.5).to(m.dtype) for s, m in zip(sums, mine, strict=True)]
            manager.start_quorum()
            last = manager.allreduce(mine.pop(), reduce_op=torch.distributed.ReduceOp.AVG)
            first = [manager.allreduce(each) for each in mine[:2]]
            done = [work.wait() for work in first]
            assert all(done)
            later = manager.allreduce(mine[2])
            assert later.get_future().wait() is mine[2]
            assert last.wait()
            assert manager.should_commit()
            for got, should in zip(mine, wanted[:3], strict=True):
                assert_same_bits(got.contiguous(), should.contiguous())
        manager.start_quorum()
        refused("10 elements of torch.float32, and had 2100", manager.allreduce, torch.zeros(10))


@of_ranks(2)
def test_what_a_rank_does_not_give_counts_as_zero(rank):
    with Manager(job=job("fewer"), init_sync=False) as manager:
        for step in range(5):
            manager.start_quorum()
            first, second = torch.ones(3), torch.full((1 << 20,), 4.0)
            assert manager.allreduce(first).wait()
            assert first.tolist() == [1, 1, 1]
            gives = step != 2 or rank == 0
            work = manager.allreduce(second) if gives else None
            assert manager.should_commit()  # which waits for both
            assert work is None or work.wait()
            assert second.unique().tolist() == [2 if step == 2 and gives else 4]


@of_ranks(2)
def test_tensors_of_few_bits(rank):
    with Manager(job=job("bits"), init_sync=False, gradient_dtype="int8") as manager:
        draw = [torch.Generator().manual_seed(SEED + each) for each in (0, 1)]
        both = [torch.randn(40, 700, generator=each) for each in draw]
        manager.start_quorum()
        found = both[rank].clone()
        assert manager.allreduce(found).wait()
        assert 0 < (found - mean(both)).abs().max() < 0.05
        return found


# ---- What is refused.


@of_ranks(1)
def test_what_is_not_there_is_named(rank):
    for name, value in {"pg": None, "replica_id": "a", "checkpoint_transport": 1}.items():
        refused(f"no {name}: ", Manager, **{name: value})
    refused("a rank that is late", Manager, quorum=2)
    refused("phub.Manager chooses it itself", Manager, on_loss="fail")
    manager = Manager(job=job("refused"))
    assert not manager.is_participating()
    refused("register_state_dict_fn", manager.start_quorum)
    refused("no 'wrap_future': ", lambda: manager.wrap_future, error=AttributeError)
    manager.register_state_dict_fn("a", lambda _: None, dict)
    refused("'a' is registered already", manager.register_state_dict_fn, "a", print, dict)
    refused("before start_quorum", manager.allreduce, torch.zeros(1))
    refused("before start_quorum", manager.should_commit)
    refused("allow_heal=False", manager.start_quorum, allow_heal=False)
    manager.start_quorum()
    refused("gradient_dtype='int8'", manager.allreduce, torch.zeros(1), should_quantize=True)
    refused("phub.Manager averages", manager.allreduce, torch.zeros(1), reduce_op="SUM")
    refused("float32, bfloat16", manager.allreduce, torch.zeros(1, dtype=torch.int64))
    optimizer = Optimizer(manager, torch.optim.SGD(make_net().parameters(), 0.1))
    refused("with a closure", optimizer.step, lambda: 0)
    assert torch.optim.lr_scheduler.StepLR(optimizer, 1).get_last_lr() == [0.1]
    manager.shutdown()
    assert rank == 0


@of_ranks(2)
def test_an_exception_makes_the_rank_a_lost_one(rank):
    def fails():
        with phub.Manager(init_sync=False, job=job("fails")) as manager:
            for step in range(4):
                if (rank, step) == (1, 2):
                    raise ZeroDivisionError
                manager.start_quorum()
                assert manager.allreduce(torch.ones(3)).wait()
                manager.should_commit()
            return manager.num_participants()

    if rank == 1:
        refused("", fails, error=ZeroDivisionError)
    else:
        assert fails() == 1


def test_who_gives_its_state_to_whom():
    fresh, old, new = Standing(0), Standing(4, 1), Standing(5, 1)
    assert course_of({1: fresh, 2: fresh}) == Course(1, 0, (2,))
    assert course_of({0: fresh, 1: new, 2: new, 3: old}) == Course(1, 5, (0, 3))
    assert course_of({0: Standing(9), 1: new}) == Course(1, 5, (0,))
    assert course_of({0: Standing(4), 1: Standing(5), 2: Standing(5)}) == Course(1, 5, (0, 2))
    assert course_of({0: new, 3: new}) == Course(0, 5, ())


# ---- Ranks that die while others depend on them.


def goes_through_deaths(rank, name, where, timeout, come):
    """Rank 0 dies where others need it; rank 2 comes late, and needs a state."""
    training = Training(rank, job=name, world_size=2, timeout=timeout)
    dies = rank == 0 and where
    state = training.state
    if dies == "state":
        training.manager._functions["default"] = (
            training.load,
            lambda: state() if training.manager.current_step() == 0 else os.kill(os.getpid(), 9),
        )
    give = _given_state.give

    def gives(job, ranks, rank, given, **options):
        if dies == "give" and training.manager.current_step() > 0:
            os.kill(os.getpid(), 9)
        return give(job, ranks, rank, given, **options)

    with patch.object(_given_state, "give", gives):
        while training.manager.current_step() < STEPS:
            if rank < 2 and training.manager.current_step() == 4:
                assert come.wait(LIMIT_S)
            if dies == "quorum" and training.manager.current_step() == 4:
                training.manager.start_quorum()
                training.manager.wait_quorum()
                os.kill(os.getpid(), 9)
            training.step()
    training.manager.shutdown()
    return training.result()


@pytest.mark.parametrize("where", ["state", "give", "quorum"])
def test_a_death_while_others_depend_on_it(box, start, where):
    come = FORK.Event()
    ranks = start(goes_through_deaths, 2, job("needed"), where, 2.0, come)
    context, body, _, arguments, given = ranks._make
    ranks._make = (context, body, 2, arguments, given)
    wait_until(lambda: box.status(job("needed")).get("completed_round", 0) > 3, "some steps")
    ranks._start(2)
    wait_until(lambda: has_come(box, job("needed"), 2, 1), "rank 2")
    come.set()
    found = [ranks.result(rank) for rank in (1, 2)]
    assert_same_bits(found[0], found[1])
    assert found[0][0]["step"] == STEPS
    ranks.processes[0].join(LIMIT_S)
    assert ranks.processes[0].exitcode == -9


def loses_a_rank_before_the_jobs_are_made(rank, name):
    training = Training(rank, job=name, timeout=2.0)
    training.manager.start_quorum()
    training.manager.wait_quorum()
    if rank == 0:
        os.kill(os.getpid(), 9)
    training.optimizer.optim.zero_grad()
    training.backward()
    allreduce_gradients(training.manager, training.net)
    assert isinstance(training.manager.errored(), phub.RankLostError)
    assert not training.manager.should_commit()
    for _ in range(3):
        training.step()
    training.manager.shutdown()
    return training.result()


def test_a_step_does_not_count_whose_jobs_lack_a_rank(box, start):
    ranks = start(loses_a_rank_before_the_jobs_are_made, 3, job("lacks"))
    found = [ranks.result(rank) for rank in (1, 2)]
    assert_same_bits(found[0], found[1])
    assert found[0][0] == {"step": 3, "batches_committed": 6}
