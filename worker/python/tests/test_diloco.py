"""Replicas that train for some steps by themselves, compared with the formula, to the bit."""

import itertools
import random
import subprocess
import threading
import time
from unittest.mock import patch

import pytest
import torch
from conftest import LIMIT_S, SEED, leave, of_ranks, refused, wait_until
from deaths import FORK
from exact import assert_same_bits, job
from models import Branches, loss_of, make_net
from outer_oracle import FRAGMENTS, Oracle, inner_of, tokens_of, trained_in
from test_device import HOST, go
from torch import nn
from torch.optim import SGD, AdamW

import phub
from phub import _library
from phub._outer_course import Course
from phub._outer_keys import OuterKey, fragments_of, keys_of

STREAMING = {"sync_every": 6, "fragments": 3, "delay": 2, "alpha": 0.25}
HOW = {
    "averaging": {"sync_every": 1, "lr": 1.0, "momentum": 0.0, "kind": "sgd"},
    "local-sgd": {"sync_every": 4, "lr": 1.0, "momentum": 0.0, "kind": "sgd"},
    "fedprox": {"sync_every": 3, "lr": 1.0, "momentum": 0.0, "proximal": 0.1},
    "diloco": {"sync_every": 3},
    "heavy-ball": {"sync_every": 3, "nesterov": False, "momentum": 0.5, "lr": 0.9},
    "late": {"sync_every": 4, "delay": 3},
    "streaming": STREAMING,
    "two-parts": {"sync_every": 5, "fragments": 2, "delay": 4},
    "int8": {"sync_every": 3, "delta": "int8"},
    "sparseloco": {"sync_every": 3, "lr": 1.0, "momentum": 0.0, "delta": "topk-int2"},
    "topk": {**STREAMING, "delta": "topk"},
    "by-round": {"sync_every": 2, "delta": "f32*2,int8*3,topk"},
    "bfloat16": {"sync_every": 3, "dtype": torch.bfloat16, "delay": 1},
    "results": {"sync_every": 3, "parameter_dtype": "bf16", "delta": "int8", "delay": 2},
    "fedavg": {"sync_every": 4, "lr": 1.0, "momentum": 0.0, "has_tokens": True},
    "weighted": {**STREAMING, "delta": "int8", "has_tokens": True},
    "two-inner": {**STREAMING, "kind": "both"},
}
STEPS = 14
OF_TEST = ("kind", "dtype", "has_tokens")  # what is no argument of DiLoCo


def made(net, how, name, **options):
    """A DiLoCo, and its inner optimizers."""
    given = {key: value for key, value in how.items() if key not in OF_TEST}
    inner = inner_of(net, how.get("kind", "adamw"))
    outer = phub.DiLoCo(net, inner[0] if len(inner) == 1 else inner, job=name, **given, **options)
    return outer, inner


def net_of(rank, how):
    net = make_net().to(how.get("dtype", torch.float32))
    with torch.no_grad():
        for p in trained_in(net).values():
            p.add_(rank)  # rank 0's count
    return net


def make_step(net, inner, rank, step):
    for each in inner:
        each.zero_grad()
    loss_of(net, rank, step).backward()
    for each in inner:
        each.step()


def now(net):
    return {name: p.detach().clone() for name, p in trained_in(net).items()}


def trains(rank, how, options):
    net, used = net_of(rank, how), 0
    if how.get("has_tokens"):
        options = {**options, "tokens": lambda: tokens_of(rank, used)}
    outer, inner = made(net, how, job("trains"), **options)
    assert outer.worker.connection.startswith(options["transport"])
    pauses = random.Random(SEED + rank)
    seen = []
    for step in range(STEPS):
        used = step + 1
        make_step(net, inner, rank, step)
        seen.append(now(net))
        if pauses.random() < 0.3:  # results come before or after they are asked for
            time.sleep(0.01)
    base = outer.base()
    outer.worker.barrier()
    outer.close()
    return seen, now(net), base


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("name", HOW)
def test_each_rank_has_what_the_formula_says(box, start, name, transport, world):
    results = start(trains, world, HOW[name], {"transport": transport}).results()
    oracle = Oracle(world, **HOW[name])
    expected = [oracle.advance() for _ in range(STEPS)]
    base = {name: oracle.seen(name) for name in oracle.base}
    settled = oracle.settle()
    for rank, (seen, last, found) in enumerate(results):
        assert_same_bits(seen, [of_ranks[rank] for of_ranks in expected], f"rank {rank}")
        assert_same_bits(last, settled[rank], f"rank {rank}, at the end")
        assert_same_bits(found, base, f"rank {rank}, the base")


@of_ranks(2)
def test_results_may_be_differences_of_few_bits(rank):
    net = net_of(rank, {})
    how = {**STREAMING, "alpha": 0.0, "parameter_dtype": "int8", "delta": "int4"}
    outer, inner = made(net, how, job("differences"), transport="tcp")
    losses = []
    for step in range(60):
        losses.append(loss_of(net, rank, 0).item())
        make_step(net, inner, rank, step % 2)
    outer.synchronize()
    assert losses[-1] < losses[0] / 2
    assert_same_bits(outer.base(), now(net))
    leave(outer)
    return now(net)


def trains_over_boxes(rank, how):
    net = net_of(rank, how)
    outer, inner = made(net, how, "boxes", transport="tcp", chunk_elements=64)
    queues = outer.worker.queues
    for step in range(STEPS):
        make_step(net, inner, rank, step)
    outer.synchronize()
    outer.worker.barrier()
    outer.close()
    return queues, now(net)


def test_over_several_boxes_it_is_the_same(own_box, box, start):
    how = HOW["streaming"]
    of_one = start(trains_over_boxes, 2, how).results()
    command = [_library.find_program(), "serve", "--join", own_box.address, "--pin", "false"]
    with subprocess.Popen(command) as other:
        try:
            wait_until(lambda: own_box.shards() == 1, "the other box has joined")
            ranks = start(trains_over_boxes, 2, how, PHUB_SERVER=own_box.address)
            for (queues, found), (fewer, expected) in zip(ranks.results(), of_one, strict=True):
                assert queues > fewer
                assert_same_bits(found, expected)
        finally:
            other.kill()


def is_ahead(rank, ahead):
    net = net_of(rank, {})
    outer, inner = made(net, {"sync_every": 4, "delay": 3}, job("ahead"))
    for step in range(8):
        if step == 3 and rank == 1:
            assert ahead.wait(60)  # until the other has sent, and made two steps more
        make_step(net, inner, rank, step)
        if step == 5 and rank == 0:
            ahead.set()
    leave(outer)
    return outer.steps_done


def test_nothing_waits_for_a_result_before_the_delay_is_over(box, start):
    assert start(is_ahead, 2, FORK.Event()).results() == [8, 8]


def trains_there(rank, way, how):
    go(way)
    net = net_of(rank, how)
    outer, inner = made(net, how, job(way))
    assert (outer.worker.on_device is not None) == (way != "cpu")
    seen = []
    for step in range(STEPS):
        make_step(net, inner, rank, step)
        seen.append(now(net))
    seen.append(outer.base())
    outer.worker.barrier()
    outer.close()
    return seen


@pytest.mark.parametrize("name", ["diloco", "topk", "bfloat16"])
def test_on_a_device_it_is_the_same(box, start, name):
    of_host = start(trains_there, 2, "cpu", HOW[name]).results()
    assert_same_bits(start(trains_there, 2, HOST, HOW[name]).results(), of_host)


def trains_two(rank):
    """A model in each of two threads."""
    found = {}
    nets = {name: net_of(rank, HOW[name]) for name in ("diloco", "streaming")}  # one seed for all

    def train(name):
        net = nets[name]
        outer, inner = made(net, HOW[name], job(name))
        for step in range(STEPS):
            make_step(net, inner, rank, step)
        leave(outer)
        found[name] = now(net)

    threads = [threading.Thread(target=train, args=(name,)) for name in nets]
    for each in threads:
        each.start()
    for each in threads:
        each.join(LIMIT_S)
    return found


def test_several_models_in_threads_of_their_own(box, start):
    results = start(trains_two, 2).results()
    for name in ("diloco", "streaming"):
        oracle = Oracle(2, **HOW[name])
        for _ in range(STEPS):
            oracle.advance()
        assert_same_bits([each[name] for each in results], oracle.settle())


# ---- Which fragment goes when.


def test_fragments_are_spread_over_a_cycle_and_never_two_rounds_apart():
    for every in range(1, 12):
        for count, delay in itertools.product(range(1, every + 1), range(every)):
            course, rounds, due_at = Course(every, count, delay), [0] * count, {}
            for step in range(1, 4 * every + 1):
                due, ending = course.advance()
                assert due == [f for f, at in due_at.items() if at == step]
                for fragment in due:
                    course.merged(fragment)
                    del due_at[fragment]
                for fragment in ending:
                    assert fragment not in due_at
                    rounds[fragment] += 1
                    course.sent(fragment)
                    due_at[fragment] = step + delay
                    if not delay:
                        course.merged(fragment)
                        del due_at[fragment]
                assert max(rounds) - min(rounds) <= 1
                if step % every == 0:
                    assert rounds == [step // every] * count
                    assert course.rounds == step // every


def test_fragments_have_about_as_many_elements():
    draw = random.Random(SEED)
    for _ in range(200):
        sizes = [draw.choice([1, 7, 100, 5000]) for _ in range(draw.randrange(1, 30))]
        keys = [
            OuterKey(str(at), {str(at): nn.Parameter(torch.zeros(n))}) for at, n in enumerate(sizes)
        ]
        count = draw.randrange(1, len(keys) + 1)
        found = fragments_of(keys, count)
        assert [key for fragment in found for key in fragment] == keys
        assert len(found) == count
        assert all(found)
        largest = max(sum(key.elements for key in fragment) for fragment in found)
        assert largest <= 2 * max(max(sizes), sum(sizes) / count)
    net = make_net()
    keys = [OuterKey(name, {name: p}) for name, p in trained_in(net).items()]
    for count, expected in FRAGMENTS.items():
        assert [[key.name for key in each] for each in fragments_of(keys, count)] == expected
    refused("fragments=5, and the model has 4 keys", fragments_of, keys, 5)


@of_ranks(2)
def test_what_nobody_exchanges_is_compared_at_the_start(rank):
    net = make_net()
    with torch.no_grad():
        net[0].bias.add_(rank)
    with pytest.warns(RuntimeWarning, match="'0.bias' is not the same on all ranks"):
        outer, _ = made(net, {"sync_every": 2}, job("compared"))
    leave(outer)


@of_ranks(1)
def test_tokens_must_grow(rank):
    net, used = net_of(rank, {}), 0
    outer, inner = made(net, {"sync_every": 2}, job("tokens"), tokens=lambda: used)
    make_step(net, inner, rank, 0)
    refused(
        "tokens.. was 0.0 after step 0, and is 0.0 after step 2", make_step, net, inner, rank, 1
    )
    outer.close()


def has_many_small_ones(rank):
    torch.manual_seed(SEED + rank)
    layers = [nn.Linear(3, 3) for _ in range(200)]
    net = nn.Sequential(*layers, nn.Linear(3, 400))
    inner = SGD(net.parameters(), 0.1)
    how = {"sync_every": 2, "lr": 1.0, "momentum": 0.0, "fragments": 2}
    with phub.DiLoCo(net, inner, job=job("small"), **how) as outer:
        keys = outer.worker.keys
        assert len(keys) == 2
        before = outer.base()
        assert before.keys() == dict(net.named_parameters()).keys()
        for p in net.parameters():
            p.grad = torch.full_like(p, 1.0 + rank)
        for _ in range(2):
            inner.step()
        outer.synchronize()
        for name, p in net.named_parameters():
            assert torch.allclose(p, before[name] - 0.2 * 1.5, atol=1e-5)
    return now(net)


def test_small_parameters_go_together(box, start):
    one, other = start(has_many_small_ones, 2).results()
    assert_same_bits(one, other)


# ---- Steps of all kinds.


class Skips:
    """A loss scale that overflows in some steps."""

    def __init__(self, at):
        self.scaler, self.at = torch.amp.GradScaler("cpu", init_scale=8.0), at

    def step(self, net, inner, rank, step):
        inner.zero_grad()
        self.scaler.scale(loss_of(net, rank, step)).backward()
        if step in self.at:
            next(p for p in net.parameters() if p.requires_grad).grad.fill_(float("inf"))
        self.scaler.step(inner)
        self.scaler.update()


def skips(rank, fused):
    """Rank 1 has two steps that overflow. Returns how many count."""
    net = net_of(rank, {})
    inner = AdamW([p for p in net.parameters() if p.requires_grad], 1e-2, fused=fused)
    outer = phub.DiLoCo(net, inner, sync_every=4, job=job(f"skips-{fused}"))
    skips = Skips({1, 5} if rank else set())
    left_out = 2 if rank and not fused else 0
    for step in range(8 + left_out):
        skips.step(net, inner, rank, step)
    assert outer.steps_done == 8
    assert outer.worker.round("2.weight") == 2
    leave(outer)
    return now(net)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_leaves_out_do_not_count(box, start, fused):
    """But those that the optimizer leaves out itself do."""
    one, other = start(skips, 2, fused).results()
    assert_same_bits(one, other)


@of_ranks(2)
def test_a_step_with_a_closure_is_one(rank):
    net = net_of(rank, {})
    inner = torch.optim.LBFGS([p for p in net.parameters() if p.requires_grad], max_iter=4)
    outer = phub.DiLoCo(net, inner, sync_every=2, lr=1.0, momentum=0.0, job=job("closure"))

    def closure():
        inner.zero_grad()
        loss = loss_of(net, rank, 0)
        loss.backward()
        return loss

    for _ in range(2):
        inner.step(closure)
    assert outer.steps_done == 2
    leave(outer)
    return now(net)


def proximal_refuses():
    net = make_net()
    outer, (inner,) = made(net, {"sync_every": 2, "proximal": 0.1}, job("proximal"))
    refused("a closure computes", inner.step, lambda: loss_of(net, 0, 0), error=RuntimeError)
    outer.close()


@of_ranks(1)
def test_what_is_wrong_in_a_step_is_an_error_of_it(rank):
    assert rank == 0
    proximal_refuses()
    net = make_net()
    inner = AdamW(net.parameters())
    outer = phub.DiLoCo(net, inner, sync_every=1, job=job("steps"))
    refused("has no buffers", outer.sync_buffers)
    net[0].bias.requires_grad_()
    refused("'0.bias' requires a gradient since", inner.step, error=RuntimeError)
    net[0].bias.requires_grad_(requires_grad=False)
    net[2].weight.requires_grad_(requires_grad=False)
    refused("'2.weight' was frozen since", inner.step, error=RuntimeError)
    net[2].weight.requires_grad_()
    net.append(nn.Linear(5, 5))
    refused("'4.weight' came into the model.*DiLoCo", inner.step, error=RuntimeError)
    outer.close()
    inner.step()  # the optimizer is as it was
    outer.close()
    for call in (outer.base, outer.synchronize, outer.state_dict):
        refused("has left its job", call, error=phub.BadHandleError)
    never, _ = made(make_net(), {"sync_every": 1}, job("never"))
    with pytest.raises(phub.InvalidError, match=r"inner optimizer that DiLoCo was made of"):
        never_stepped(never)


def never_stepped(outer):
    next(iter(outer._named.values())).sum().backward()
    outer.close()


class Tied(nn.Module):
    """Two names of a parameter, one that is frozen, one without elements, and statistics."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(SEED)
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight
        self.other.bias.requires_grad_(requires_grad=False)
        self.none, self.norm = nn.Parameter(torch.zeros(0)), nn.BatchNorm1d(6)
        self.gain = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))

    def forward(self, x):
        return self.norm(self.other(self.one(x))) * self.gain.float()


@of_ranks(2)
def test_a_model_of_all_kinds_of_parameters(rank):
    model = Tied()
    inner = AdamW(model.parameters(), 1e-2)
    with phub.DiLoCo(model, inner, sync_every=2, job=job("kinds")) as outer:
        assert set(outer.worker.keys) == {
            "one.weight",
            "one.bias",
            "norm.weight",
            "norm.bias",
            "gain",
        }
        for step in range(4):
            random_of_step = torch.Generator().manual_seed(SEED + 2 * step + rank)
            inner.zero_grad()
            model(torch.randn(8, 6, generator=random_of_step)).square().mean().backward()
            inner.step()
        mine = model.norm.running_mean.clone()
        outer.sync_buffers()
        assert not torch.equal(mine, model.norm.running_mean)
        outer.worker.barrier()
    return model.state_dict()


# ---- The end, and ranks that come and go.


def ends_early(rank):
    net = net_of(rank, {})
    outer, inner = made(net, {"sync_every": 3, "lr": 1.0, "momentum": 0.0}, job("ends"))
    with outer:
        for step in range(4 if rank == 0 else 10):
            make_step(net, inner, rank, step)
        round_now = outer.worker.round("2.weight")
    return round_now, now(net)


def test_ranks_that_have_more_steps_go_on(box, start):
    (one, _), *others = start(ends_early, 3).results()
    assert one == 1
    assert [each[0] for each in others] == [3, 3]
    differs = [torch.equal(others[0][1][n], others[1][1][n]) for n in others[0][1]]
    assert not all(differs)  # step 10 is each rank's own


@of_ranks(3)
def test_synchronize_gives_all_ranks_the_base(rank):
    found = []
    for name in ("diloco", "streaming", "late"):
        net = net_of(rank, HOW[name])
        outer, inner = made(net, HOW[name], job(name))
        for step in range(7):
            make_step(net, inner, rank, step)
        before = outer.worker.round("2.weight")
        outer.synchronize()
        assert_same_bits(outer.base(), now(net))
        assert outer.worker.round("2.weight") == before + 1
        found.append(now(net))
        for step in range(7, 14):
            make_step(net, inner, rank, step)
        leave(outer)
    return found


BETWEEN = {
    "diloco": HOW["diloco"],
    "late": HOW["late"],
    "alpha": {**HOW["late"], "alpha": 0.5},
    "streaming": STREAMING,
    "weighted": HOW["weighted"],
}


def synchronizes(rank, how, at):
    net, used = net_of(rank, how), 0
    tokens = {"tokens": lambda: tokens_of(rank, used)} if how.get("has_tokens") else {}
    outer, inner = made(net, how, job(f"at-{at}"), **tokens)
    seen = []
    for step in range(STEPS):
        used = step + 1
        make_step(net, inner, rank, step)
        if step + 1 == at:
            outer.synchronize()
        seen.append(now(net))
    leave(outer)
    return seen, now(net)


@pytest.mark.parametrize("at", [4, 5, 6])
@pytest.mark.parametrize("name", BETWEEN)
def test_after_synchronize_each_rank_has_what_the_formula_says(box, start, name, at):
    results = start(synchronizes, 2, BETWEEN[name], at).results()
    oracle, expected = Oracle(2, **BETWEEN[name]), []
    for step in range(STEPS):
        expected.append(oracle.advance())
        if step + 1 == at:
            expected[-1] = oracle.synchronize()
    settled = oracle.settle()
    for rank, (seen, last) in enumerate(results):
        assert_same_bits(seen, [of_ranks[rank] for of_ranks in expected], f"rank {rank}")
        assert_same_bits(last, settled[rank], f"rank {rank}, at the end")


@of_ranks(1)
def test_synchronize_counts_each_movement_once(rank):
    """Each step adds 1 to all parameters, and half of what was sent stays."""
    for number, (how, steps, expected) in enumerate(
        [
            ({"delay": 2}, 5, (2.0, 2.0)),  # of step 5 alpha=0 leaves nothing
            ({"delay": 2, "alpha": 0.5}, 5, (2.75, 2.75)),  # 2 + (0.5 * 5 + 0.5 * 2 - 2) / 2
            ({"fragments": 2, "delay": 1}, 4, (1.5, 2.0)),
            ({"fragments": 2}, 4, (2.0, 2.0)),
        ]
    ):
        model = nn.ParameterList([torch.zeros(8), torch.zeros(8)])
        inner = SGD(model.parameters(), 1.0)
        how = {"sync_every": 4, "lr": 0.5, "momentum": 0.0, **how}
        outer = phub.DiLoCo(model, inner, job=job(f"once-{number}-{rank}"), **how)
        for _ in range(steps):
            for p in model:
                p.grad = -torch.ones_like(p)
            inner.step()
        outer.synchronize()
        assert tuple(p[0].item() for p in model) == expected, how
        outer.close()


@of_ranks(1)
def test_the_last_inner_optimizer_is_the_last_to_step(rank):
    net = net_of(rank, {})
    one, other = inner_of(net, "both")
    outer = phub.DiLoCo(net, [other, one], sync_every=1, job=job("order"))
    one.zero_grad()
    loss_of(net, rank, 0).backward()
    refused("number 0, AdamW, has made none", one.step, error=RuntimeError)
    other.step()
    one.step()
    outer.close()


@of_ranks(1)
def test_a_training_without_an_exchange_warns(rank):
    net = net_of(rank, {})
    outer, inner = made(net, {"sync_every": 4}, job("short"))
    for step in range(3):
        make_step(net, inner, rank, step)
    with pytest.warns(RuntimeWarning, match="ends after 3 steps, and has exchanged nothing"):
        outer.close()


def test_small_parameters_are_keys_of_their_names():
    names = [f"p{at}" for at in range(300)]
    found = {name: nn.Parameter(torch.zeros(200)) for name in names}
    given = {"gradient_dtype": "f32", "parameter_dtype": "f32"}
    keys = keys_of(found, {}, given)
    other = keys_of(dict(sorted(found.items(), reverse=True)), {}, given)
    assert len(keys) == 2
    assert {k.name: [*k.members] for k in keys} == {k.name: [*k.members] for k in other}
    assert len(keys_of(found, {}, {**given, "on_nonfinite": "exclude"})) == 300


def fails(rank, on_loss, entered):
    net = net_of(rank, {})
    outer, inner = made(net, {"sync_every": 2}, f"fails-{on_loss}", on_loss=on_loss)
    try:
        with outer:
            for step in range(8):
                if step == 3 and rank == 1:
                    entered.set()
                    raise ValueError(step)  # noqa: TRY301
                make_step(net, inner, rank, step)
    except ValueError:
        return "failed"
    except phub.RankLostError:
        return "lost"
    return now(net)


def test_a_rank_that_fails_is_lost_and_on_loss_decides(box, start):
    for on_loss in ("shrink", "fail"):
        one, failed, other = start(fails, 3, on_loss, FORK.Event()).results()
        assert failed == "failed"
        if on_loss == "shrink":
            assert_same_bits(one, other)
        else:
            assert (one, other) == ("lost", "lost")


def joins_later(rank, name, begun, joined):
    net = net_of(rank, {})
    outer, inner = made(net, STREAMING, name, lease_ms=2000)
    first = outer.steps_done
    if first:
        assert first % STREAMING["sync_every"] == 0
        assert_same_bits(now(net), outer.base())
        joined.set()
    for step in range(first, 60):
        if step == 13 and rank == 1 and not first:
            begun.set()
            time.sleep(60)
        if step == 48 and rank != 1:
            assert joined.wait(60)
        make_step(net, inner, rank, step)
    outer.synchronize()
    outer.worker.barrier()
    outer.close()
    return now(net)


def test_a_rank_that_is_lost_is_replaced(box, start):
    begun, joined = FORK.Event(), FORK.Event()
    ranks = start(joins_later, 3, "replaced", begun, joined)
    assert begun.wait(60)
    ranks.kill(1)
    wait_until(lambda: box.status("replaced")["completed_round"] > 3, "a round without the rank")
    ranks.replace(1)
    results = ranks.results()
    assert_same_bits(results, [results[0]] * 3)


def has_a_quorum(rank):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    inner = SGD(model.parameters(), 0.02)
    how = {"sync_every": 4, "delay": 1, "momentum": 0.5, "quorum": 2, "grace_ms": 1}
    losses = []
    how |= {"late_decay": 0.5, "tokens": lambda: len(losses)}
    outer = phub.DiLoCo(model, inner, job="quorum", **how)
    generator = torch.Generator().manual_seed(rank)
    refused("quorum", outer.steps, 3)
    refused("state_dict.. and a quorum", outer.state_dict)
    refused("load_state_dict.. and a quorum", outer.load_state_dict, {})
    while outer.worker.round("weight") < 40:
        if rank == 2:
            time.sleep(0.02)
        inputs = torch.randn(16, 8, generator=generator)
        inner.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        inner.step()
        losses.append(loss.item())
    steps = outer.steps_done
    outer.close()
    return steps, losses[0], losses[-1]


def test_with_a_quorum_a_slow_rank_holds_nobody_up(box, start):
    first, second, slow = start(has_a_quorum, 3).results()
    assert slow[0] < min(first[0], second[0])
    for _, loss_at_first, loss in (first, second, slow):
        assert loss < loss_at_first / 4


# ---- What is refused.

REFUSED = [
    ({"sync_every": 0}, "sync_every=0: it is a whole number, at least 1"),
    ({"sync_every": 2.0}, "sync_every=2.0"),
    ({"fragments": True}, "fragments=True"),
    ({"sync_every": 2, "fragments": 3}, "fragments=3 and sync_every=2"),
    ({"sync_every": 9, "fragments": 9}, "fragments=9, and the model has 4 keys"),
    ({"sync_every": 2, "delay": 2}, "delay=2 and sync_every=2.*at most sync_every - 1"),
    ({"delay": -1}, "delay=-1"),
    ({"alpha": 1.0}, "alpha=1.0: .* from 0 to below 1"),
    ({"alpha": "a"}, "alpha='a'"),
    ({"proximal": -1}, "proximal=-1: .* at least 0"),
    ({"proximal": float("inf")}, "proximal=inf"),
    ({"proximal": 0.1, "delay": 1}, "proximal=0.1 and delay=1"),
    ({"momentum": 1.0}, "momentum=1.0: it is a number from 0 to below 1"),
    ({"lr": "fast"}, "lr is 'fast'"),
    ({"delta": 8}, "delta=8: it is the name of a format"),
    ({"delta": "int3"}, "int3"),
    ({"gradient_dtype": "int8"}, "gradient_dtype='int8': .* its format is delta"),
    ({"optimizer": "adam"}, "DiLoCo with optimizer='adam'"),
    ({"reduction": "sum"}, "DiLoCo with reduction='sum'"),
    ({"consistency": "ssp"}, "DiLoCo with consistency='ssp'"),
    ({"branches": 2}, "DiLoCo with branches=2"),
    ({"fragments": 2, "on_nonfinite": "skip"}, "fragments=2 and on_nonfinite='skip'"),
    ({"schedule": {"lr": 1.0}}, "schedule has 'lr'"),
    ({"memory_device": 0}, "memory_device is 0, and the parameters are on cpu"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_what_cannot_be_is_refused(box, options, message):
    net = make_net()
    refused(message, phub.DiLoCo, net, AdamW(net.parameters()), **options)


def test_models_and_optimizers_that_cannot_be_are_refused(box):
    net = make_net()
    refused("inner optimizer is a Linear", phub.DiLoCo, net, net[0])
    refused("no inner optimizer", phub.DiLoCo, net, [])
    other = SGD([*net.parameters(), nn.Parameter(torch.zeros(3))], 0.1)
    refused("shape .3,. that is not the model's", phub.DiLoCo, net, other)
    double = nn.Linear(2, 2).double()
    refused("'weight' is torch.float64", phub.DiLoCo, double, SGD(double.parameters(), 0.1))
    frozen = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    refused("no parameter", phub.DiLoCo, frozen, SGD(frozen.parameters(), 0.1))
    with patch.object(net[0].weight, "device_mesh", None, create=True):
        refused("the model is sharded", phub.DiLoCo, net, SGD(net.parameters(), 0.1))
    at_box = phub.DistributedOptimizer(SGD(net.parameters(), 0.1), net, world_size=1, rank=0)
    refused("inner optimizer is a DistributedOptimizer", phub.DiLoCo, net, at_box)
    at_box.close()


@of_ranks(2)
def test_parameters_that_a_rank_does_not_use_stay(rank):
    model = Branches()
    inner = SGD(model.parameters(), 0.1)
    with phub.DiLoCo(model, inner, sync_every=1, lr=1.0, momentum=0.0, job=job("used")) as outer:
        before = outer.base()
        model(torch.ones(2, 4), [rank]).sum().backward()
        inner.step()
        assert torch.equal(model.branches[2].weight, before["branches.2.weight"])
        moved = model.branches[0].weight - before["branches.0.weight"]
        assert torch.allclose(moved, torch.full_like(moved, -0.1))  # of one of two ranks
        outer.worker.barrier()
    return now(model)
