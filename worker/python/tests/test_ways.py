"""phub.ddp(factors="auto"): which weights go as factors, and that sums are right in any case."""

import copy
import dataclasses
import gc
import itertools
import json
import os
import signal
import time
import urllib.request

import pytest
import torch
from conftest import SEED, leave, of_ranks, refused
from exact import assert_same_bits, gradients_of, parameters_of
from torch import nn
from torch.nn.utils import prune

import phub
from phub import _choice, _measured, _ways

SLOW, FAST = (0.05, 1000.0), (1000.0, 0.1)  # Gbit/s of a rank, and GFLOP/s
SAMPLES = 6


def model_of(seed=SEED):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(200, 170),
        nn.ReLU(),
        nn.Linear(170, 330, bias=False),
        nn.ReLU(),
        nn.Linear(330, 5),
    )


def measures(rates, spans=None):
    """From now on this is what is measured; spans: of each step, None: factors are kept."""
    _choice.rates = lambda *_: rates
    if spans is None:
        _measured.Trial.add = lambda trial, _: setattr(trial, "is_over", True)
    else:
        left = iter(spans)
        _measured.Clock.span_s = property(lambda _: next(left))


def batch_of(rank, step, samples=SAMPLES):
    random = torch.Generator().manual_seed(SEED + 100 * rank + step)
    return torch.randint(-3, 4, (samples, 200), generator=random).float()


def status_of(job):
    address = f"http://{os.environ['PHUB_SERVER']}/v1/jobs/{job}"
    with urllib.request.urlopen(address, timeout=60) as answer:
        return json.load(answer)


def trains(wrapped, rank, sizes, each=lambda step: None):
    """The gradients and parameters of each step, and which weights were factors before it."""
    net = wrapped.module
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    rows = []
    for step, samples in enumerate(sizes):
        each(step)
        ways = sorted(wrapped.phub.ways.plan) if wrapped.phub.ways else None
        optimizer.zero_grad()
        wrapped(batch_of(rank, step, samples)).square().mean().backward()
        gradients = gradients_of(net)
        optimizer.step()
        rows.append((ways, gradients, parameters_of(net)))
    return rows


def auto(rank, rates, sizes, options=None):
    measures(rates)
    net = model_of(SEED + rank)  # all begin with rank 0's
    wrapped = phub.ddp(net, factors="auto", **(options or {}))
    rows = trains(wrapped, rank, sizes)
    leave(wrapped.phub)
    return rows


def by_hand(rank, factors, first, sizes):
    """From those parameters on, each step from where `first` was."""
    net = model_of()
    wrapped = phub.ddp(net, factors=factors)
    gradients = []
    for step, (parameters, samples) in enumerate(zip(first, sizes, strict=True)):
        net.load_state_dict(parameters)
        net.zero_grad()
        wrapped(batch_of(rank, step, samples)).square().mean().backward()
        gradients.append(gradients_of(net))
    leave(wrapped.phub)
    return gradients


def both(start, rates, sizes, transport="tcp", world=2):
    options = {"transport": transport}
    rows, *others = start(auto, world, rates, sizes, options).results()
    for each in others:
        assert_same_bits(each, rows)
    return rows


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_on_a_slow_link_large_weights_are_factors(box, start, transport):
    sizes = [SAMPLES] * 5
    rows = both(start, SLOW, sizes, transport, world=3)
    assert [ways for ways, *_ in rows] == [[], []] + 3 * [["0.weight", "2.weight"]]
    before = [model_of().state_dict(), *(parameters for *_, parameters in rows[:-1])]
    named = {"[02].weight": SAMPLES}
    as_factors = start(by_hand, 3, named, before, sizes, PHUB_JOB="named").results()[0]
    whole = start(by_hand, 3, None, before, sizes, PHUB_JOB="whole").results()[0]
    for step, (ways, gradients, _) in enumerate(rows):
        assert_same_bits(gradients, (as_factors if ways else whole)[step])


def test_on_a_fast_link_all_are_whole(box, start):
    rows = both(start, FAST, [SAMPLES] * 4)
    assert [ways for ways, *_ in rows] == [[]] * 4


def told(rank, rates, sizes):
    """What the box says of the choice."""
    measures(rates)
    wrapped = phub.ddp(model_of(), factors="auto")
    trains(wrapped, rank, sizes)
    worker = wrapped.phub.worker
    worker.barrier()
    remarks = {each["subject"]: each["text"] for each in status_of(worker.job)["remarks"]}
    worker.barrier()
    leave(wrapped.phub)
    return remarks["factors"]


def test_the_box_says_what_was_chosen(box, start):
    slow, _ = start(told, 2, SLOW, [SAMPLES] * 4, PHUB_JOB="slow").results()
    assert slow == (
        "2 of 3 weights go as factors, with 0.05 Gbit/s of a rank and 1e+03 GFLOP/s: "
        f"0.weight ({SAMPLES} samples), 2.weight ({SAMPLES} samples)"
    )
    fast, _ = start(told, 2, FAST, [SAMPLES] * 4, PHUB_JOB="fast").results()
    assert fast.startswith("0 of 3 weights go as factors")


# Seconds of steps: two whole ones, one whose memory is new, some with factors, then whole ones.
WHOLE, AS_FACTORS = [], ["0.weight", "2.weight"]
TRIALS = {
    "clearly faster": ([9, 1.0, 9] + [0.3] * 5 + [9] * 9, 2 * [WHOLE] + 15 * [AS_FACTORS]),
    "slower": (
        [9, 1.0, 9] + [1.1] * 6 + [1.0] * 5 + [9] * 3,
        2 * [WHOLE] + 7 * [AS_FACTORS] + 8 * [WHOLE],
    ),
    "faster": (
        [9, 1.0, 9] + [0.9] * 6 + [1.0] * 5 + [9] * 3,
        2 * [WHOLE] + 7 * [AS_FACTORS] + 6 * [WHOLE] + 2 * [AS_FACTORS],
    ),
}


def tried(rank, spans, steps, lost_at=None):
    """rank 0 measures a tenth more than the mean of two ranks, and the other a tenth less."""
    measures(SLOW, [each * (1.1 - 0.2 * rank) for each in spans])
    wrapped = phub.ddp(model_of(SEED + rank), factors="auto", on_loss="shrink", lease_ms=1000)

    def may_end(step):
        if rank == 1 and step == lost_at:
            os.kill(os.getpid(), signal.SIGKILL)

    rows = trains(wrapped, rank, [SAMPLES] * steps, may_end)
    text = status_of(wrapped.phub.worker.job)["remarks"][0]["text"]
    if lost_at is None:
        leave(wrapped.phub)
    else:
        wrapped.phub.close()
    return rows, text


@pytest.mark.parametrize("case", TRIALS)
def test_factors_are_kept_if_they_are_faster(box, start, case):
    spans, expected = TRIALS[case]
    (rows, text), (other, _) = start(tried, 2, spans, len(expected)).results()
    assert_same_bits(other, rows)
    assert [ways for ways, *_ in rows] == expected
    assert text.startswith(f"{len(expected[-1])} of 3 weights")
    assert ("a step took 1.1e+03 ms" in text and "gradients 1e+03" in text) == (case == "slower")
    before = [model_of().state_dict(), *(parameters for *_, parameters in rows[:-1])]
    whole = start(by_hand, 2, None, before, [SAMPLES] * len(rows), PHUB_JOB="whole").results()[0]
    for (ways, gradients, _), of_whole in zip(rows, whole, strict=True):
        if not ways:
            assert_same_bits(gradients, of_whole)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, of_whole[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lost_at", [5, 11])
def test_a_lost_rank_ends_the_trial(box, start, lost_at):
    """While there are factors, and while there are none."""
    spans, expected = TRIALS["faster"]
    rows, text = start(tried, 2, spans, len(expected), lost_at).result(0)
    later = [ways for ways, *_ in rows[lost_at + 1 :]]
    assert later == [expected[lost_at]] * len(later)
    assert text.startswith(f"{len(expected[lost_at])} of 3 weights")


# ---- What does not fit into the plan. Against one process with the batches of all ranks.


# What has no part in the sum.


def grad_of(what):
    def calls(forward, net, rank, step):
        inputs = batch_of(rank, step + 70, 4).requires_grad_()
        torch.autograd.grad(forward(inputs).sum(), inputs if what == "inputs" else net[2].weight)

    return calls


def backward_to_the_inputs(_, net, rank, step):
    inputs = batch_of(rank, step + 70, 4).requires_grad_()
    net(inputs).sum().backward(inputs=[inputs])
    assert inputs.grad.any()


def backward_of_frozen(_, net, rank, step):
    """As of a discriminator, while the generator learns."""
    inputs = batch_of(rank, step + 70, 4).requires_grad_()
    net.requires_grad_(False)
    net(inputs).sum().backward()
    net.requires_grad_(True)
    assert inputs.grad.any()


OTHERS = {
    "grad of inputs": grad_of("inputs"),
    "grad of a weight": grad_of("weight"),
    "inputs alone": backward_to_the_inputs,
    "frozen": backward_of_frozen,
}


def loss_of(forward, net, rank, step, how):
    samples = how.get("sizes", {}).get((rank, step), SAMPLES)
    other = how.get("others", {}).get((rank, step))
    if other:
        OTHERS[other](forward, net, rank, step)
    loss = forward(batch_of(rank, step, samples)).square().mean()
    if (rank, step) in how.get("twice", ()):
        loss = loss + net(batch_of(rank, step + 50, 4)).square().mean()
    if (rank, step) in how.get("penalized", ()):
        inputs = batch_of(rank, step + 60, 4).requires_grad_()
        (found,) = torch.autograd.grad(net(inputs).square().sum(), inputs, create_graph=True)
        loss = loss + 1e-4 * found.square().sum()
    if (rank, step) in how.get("decayed", ()):
        loss = loss + net[2].weight.square().sum()
    return loss


def copes(rank, how, steps):
    measures(SLOW)
    net = model_of(SEED + rank)
    alone = model_of()
    wrapped = phub.ddp(net, factors="auto", **how.get("options", {}))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    rows = []
    for step in range(steps):
        plan = dict(wrapped.phub.ways.plan)
        if step not in how.get("kept", ()):
            optimizer.zero_grad(set_to_none=how.get("none", True))
        before = parameters_of(net)
        if step in how.get("accumulated", ()):
            with wrapped.no_sync():
                loss_of(wrapped, net, rank, step + 20, how).backward()
        if (rank, step) in how.get("dropped", ()):
            for _ in range(2):
                with wrapped.no_sync():
                    loss_of(wrapped, net, rank, step + 30, how).backward()
                alone.load_state_dict(net.state_dict())
                alone.zero_grad()
                loss_of(alone, alone, rank, step + 30, how).backward()
                for name, gradient in gradients_of(alone).items():
                    torch.testing.assert_close(gradients_of(net)[name], gradient)
                optimizer.zero_grad(set_to_none=how.get("none", True))
        loss_of(wrapped, net, rank, step, how).backward()
        rows.append((before, plan, gradients_of(net)))
        optimizer.step()
    leave(wrapped.phub)
    return rows


PLAN = {"0.weight": SAMPLES, "2.weight": SAMPLES}
CASES = {
    "as planned": {},
    "more samples": {"sizes": {(1, 3): 9}},
    "more samples everywhere": {"sizes": {(rank, 3): 9 for rank in range(3)}},
    "fewer samples": {"sizes": {(0, 3): 1, (1, 4): 2}},
    "used twice": {"twice": {(0, 4), (2, 5)}},
    "used twice, and there is room": {"twice": {(0, 4), (2, 5)}, "sizes": {(0, 4): 2}},
    "another gradient": {"decayed": {(0, 3), (1, 3), (2, 5)}},
    "a penalty of gradients": {"penalized": {(0, 3), (1, 3), (2, 5)}},
    "backward()s of others": {"others": {(i % 3, 3 + i // 2): how for i, how in enumerate(OTHERS)}},
    "no_sync": {"accumulated": {3, 5}},
    "no_sync, zeros": {"accumulated": {3, 5}, "none": False},
    "no_sync, and dropped": {"dropped": {(0, 3), (1, 4), (2, 4)}},
    "no_sync, and dropped, zeros": {"dropped": {(0, 3), (1, 4)}, "none": False},
    "gradients that are kept": {"kept": {3, 4}},
    "the sum": {"options": {"reduction": "sum"}, "sizes": {(1, 3): 9}},
    "copies": {"options": {"ddp_options": {"gradient_as_bucket_view": False}}},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_sum_is_that_of_all(box, start, case, transport):
    world, steps, how = 3, 7, CASES[case]
    options = {"transport": transport, **how.get("options", {})}
    rows, *others = start(copes, world, {**how, "options": options}, steps).results()
    for each in others:
        assert_same_bits(each, rows)
    net = model_of()
    share = 1 if options.get("reduction") == "sum" else 1 / world
    for step, (before, plan, gradients) in enumerate(rows):
        assert plan == (PLAN if step >= 2 else {})
        net.load_state_dict(before)
        net.zero_grad()
        for rank in range(world):
            if step in how.get("accumulated", ()):
                loss_of(net, net, rank, step + 20, how).backward()
            loss_of(net, net, rank, step, how).backward()
        for name, gradient in gradients_of(net).items():
            expected = gradient * share
            if step in how.get("kept", ()):
                expected += rows[step - 1][2][name]
            torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-6)


def test_another_batch_is_another_choice(box, start):
    sizes = [6] * 4 + [30] * 6 + [5] * 6 + [400] * 8
    rows = both(start, SLOW, sizes)
    plans = [plan for plan, *_ in rows]
    assert plans[3] == plans[9] == plans[15] == ["0.weight", "2.weight"]
    assert plans[-1] == []


def limits(rank, sizes):
    measures(SLOW)
    wrapped = phub.ddp(model_of(), factors="auto")
    found = []
    trains(wrapped, rank, sizes, lambda _: found.append(wrapped.phub.ways.plan.get("2.weight", 0)))
    leave(wrapped.phub)
    return found


def test_the_choice_follows_the_samples(box, start):
    one, other = start(limits, 2, [6] * 4 + [30] * 5 + [8] * 5).results()
    assert one == other
    assert one == [0, 0, 6, 6, 6, 6, 6, 6, 30, 30, 30, 30, 30, 8]


def survives(rank, lost_at, steps):
    """Rank 2 dies; later a rank has too many samples, and then all have."""
    measures(SLOW)
    net = model_of(SEED + rank)
    wrapped = phub.ddp(net, factors="auto", on_loss="shrink", lease_ms=1000)
    rows = []
    for step in range(steps):
        if rank == 2 and step == lost_at:
            os.kill(os.getpid(), signal.SIGKILL)
        net.zero_grad()
        sizes = {(1, lost_at + 4): 9, **{(rank, step): 9 for step in range(lost_at + 6, steps)}}
        loss_of(wrapped, net, rank, step, {"sizes": sizes}).backward()
        rows.append(gradients_of(net))
    parameters = parameters_of(net)
    wrapped.phub.close()
    return parameters, rows


def test_gradients_that_were_factors_go_whole_when_a_rank_is_lost(box, start):
    """Their keys are in an older round than the others then."""
    lost_at, steps = 5, 14
    ranks = start(survives, 3, lost_at, steps)
    (parameters, rows), other = ranks.result(0), ranks.result(1)
    assert_same_bits(other, (parameters, rows))
    net = model_of()
    net.load_state_dict(parameters)
    sizes = {(rank, step): 9 for rank in range(2) for step in range(lost_at + 6, steps)}
    sizes[1, lost_at + 4] = 9
    for step in (*range(lost_at), *range(lost_at + 2, steps)):
        world = 3 if step < lost_at else 2
        net.zero_grad()
        for rank in range(world):
            loss_of(net, net, rank, step, {"sizes": sizes}).backward()
        for name, gradient in gradients_of(net).items():
            torch.testing.assert_close(rows[step][name], gradient / world, rtol=1e-4, atol=1e-6)


def may_not_join(rank, name, end, options):
    """Rank 1 alone gets no worker in that job."""
    measures(SLOW)
    join = _ways.worker_beside

    def joins(beside, options, suffix, *more, **others):
        if suffix != name or rank != 1:
            return join(beside, options, suffix, *more, **others)
        if end is is_refused_late:
            join(beside, options, suffix, *more, **others).close()
        return end()

    _ways.worker_beside = _choice.worker_beside = joins
    net = model_of(SEED + rank)
    wrapped = phub.ddp(net, factors="auto", join_limit_ms=1500, **options)
    rows = []
    for step in range(12):
        net.zero_grad()
        before, plan = parameters_of(net), dict(wrapped.phub.ways.plan)
        loss_of(wrapped, net, rank, step, {"sizes": GROWN}).backward()
        rows.append((before, plan, gradients_of(net)))
    wrapped.phub.close()
    return rows


def is_refused():
    raise phub.FullError("there is no room for this job")


def is_refused_late():
    """The others have joined."""
    is_refused()


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


GROWN = {(rank, step): 20 for rank in range(3) for step in range(4, 12)}


@pytest.mark.parametrize("name", ["choice-1", "factors-1", "choice-2", "factors-2"])
@pytest.mark.parametrize("end", [is_refused, is_refused_late, dies])
def test_training_goes_on_where_a_choice_cannot_be(box, start, name, end):
    options = {"on_loss": "shrink", "lease_ms": 1000} if end is dies else {"on_loss": "fail"}
    ranks = start(may_not_join, 3, name, end, options)
    rows, *others = [ranks.result(rank) for rank in range(3) if end is not dies or rank != 1]
    for each in others:
        assert_same_bits(each, rows)
    failed_at = 1 if name.endswith("1") else 7
    net = model_of()
    for step, (before, plan, gradients) in enumerate(rows):
        assert plan == (PLAN if step >= 2 and failed_at > 1 else {})
        there = [0, 2] if end is dies and step > failed_at else [0, 1, 2]
        net.load_state_dict(before)
        net.zero_grad()
        for rank in there:
            loss_of(net, net, rank, step, {"sizes": GROWN}).backward()
        for key, gradient in gradients_of(net).items():
            found = gradients[key]
            torch.testing.assert_close(found, gradient / len(there), rtol=1e-4, atol=1e-6)


@of_ranks(2)
def test_unused_weights_and_copies_and_others(rank):
    """A weight that no step uses, one of two modules, one of another type, and a copy's."""
    measures(SLOW)
    net = model_of(SEED + rank)
    net.add_module("unused", nn.Linear(300, 300))
    net.add_module("tied", nn.Linear(170, 330, bias=False))
    net.tied.weight = net[2].weight
    net.forward = lambda inputs: net[4](net[3](net[2](net[1](net[0](inputs)))))
    wrapped = phub.ddp(net, factors="auto", ddp_options={"find_unused_parameters": True})
    for step in range(4):
        net.zero_grad()
        wrapped(batch_of(rank, step)).square().mean().backward()
    assert wrapped.phub.ways.plan == {"0.weight": SAMPLES}
    assert net.unused.weight.grad is None
    alone = copy.deepcopy(net[0])
    alone(batch_of(0, 0)).sum().backward()
    assert alone.weight.grad.any()
    leave(wrapped.phub)
    net.zero_grad()
    net(batch_of(0, 0)).square().mean().backward()  # no longer in the job
    return gradients_of(net)


@of_ranks(2)
def test_nothing_is_chosen_where_factors_cannot_be(rank):
    measures(SLOW)
    jobs = itertools.count()
    refused("both choose matrices", phub.ddp, model_of(), factors="auto", powersgd=2)
    refused('it is a number of samples.*"auto"', phub.ddp, model_of(), factors="automatic")
    for net, options in (
        (model_of().bfloat16(), {}),
        (model_of(), {"formats": {"*": "int8"}}),
        (model_of(), {"gradient_dtype": "bf16"}),
        (model_of(), {"on_nonfinite": "stop"}),
        (nn.Conv2d(3, 4, 5), {}),
    ):
        # The others may not have left the job before.
        wrapped = phub.ddp(net, factors="auto", job=f"none-{next(jobs)}", **options)
        assert wrapped.phub.ways is None
        leave(wrapped.phub)


def accumulates(rank):
    measures(SLOW)
    net = model_of()
    wrapped = phub.ddp(net, factors="auto")
    plans = []
    for step in range(10):
        net.zero_grad()
        plans.append(sorted(wrapped.phub.ways.plan))
        if step >= 3:
            with wrapped.no_sync():
                wrapped(batch_of(rank, step + 20)).square().mean().backward()
        wrapped(batch_of(rank, step)).square().mean().backward()
    leave(wrapped.phub)
    return plans


def test_what_is_accumulated_is_planned_whole(box, start):
    one, other = start(accumulates, 2).results()
    assert one == other == [[]] * 2 + [sorted(PLAN)] * 5 + [[]] * 3


@of_ranks(2)
def test_the_clock_starts_with_the_backward_of_the_exchange(rank):
    measures(SLOW)
    wrapped = phub.ddp(model_of(), factors="auto")
    for step in range(2):
        with wrapped.no_sync():
            wrapped(batch_of(rank, step + 20)).square().mean().backward()
        time.sleep(2)
        wrapped(batch_of(rank, step)).square().mean().backward()
    facts = wrapped.phub.ways.facts
    assert max(facts.ready_s) <= facts.backward_s < 2
    leave(wrapped.phub)


@of_ranks(2)
def test_the_weights_of_a_call_are_those_that_it_has(rank):
    measures(SLOW)
    net = model_of(SEED + rank)
    wrapped = phub.ddp(net, factors="auto")
    for step in range(4):
        net.zero_grad()
        wrapped(batch_of(rank, step)).square().mean().backward()
    assert wrapped.phub.ways.plan == PLAN
    inputs, other = batch_of(0, 9), model_of(5)
    given = dict(other.named_parameters())
    result = torch.func.functional_call(net, given, inputs)
    assert torch.equal(result, other(inputs))
    net.zero_grad()
    loss = wrapped(batch_of(rank, 4)).square().mean()
    result.sum().backward()
    assert given["0.weight"].grad.any()
    loss.backward()
    copied = copy.deepcopy(net)
    copied.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(copied(inputs), other(inputs))
    net.zero_grad()
    prune.random_unstructured(net[0], "weight", 0.5)
    assert torch.equal(net[0](inputs), nn.functional.linear(inputs, net[0].weight, net[0].bias))
    wrapped(batch_of(rank, 5)).square().mean().backward()
    gradient = net[0].weight_orig.grad.clone()
    leave(wrapped.phub)
    return gradient


# ---- What is measured.


@of_ranks(2)
def test_a_slow_link_is_measured(rank):
    net = model_of(SEED + rank)
    wrapped = phub.ddp(net, factors="auto", transport="tcp", nic_budget="20mbit")
    trains(wrapped, rank, [SAMPLES] * 4)
    ways = wrapped.phub.ways
    facts, plan = ways.facts, ways.plan
    leave(wrapped.phub)
    assert facts.gbit_s < 0.03
    assert facts.gflop_s > 0.01
    assert facts.samples == [SAMPLES] * 3
    assert sorted(facts.ready_s, reverse=True) == facts.ready_s
    assert 0 < facts.ready_s[0] <= facts.backward_s
    # Buckets have the weights that are ready together, and others.
    assert sum(facts.others) <= 170 + 5
    assert plan == {"0.weight": SAMPLES, "2.weight": SAMPLES}
    return plan


def test_computing_that_hides_the_exchange_makes_it_whole():
    shapes = [(1000, 1000), (500, 500)]
    facts = _choice.Facts(
        ranks=2,
        gbit_s=1.0,  # 32 ms and 8 ms
        gflop_s=10.0,  # 4 ms and 1 ms
        backward_s=0.0,
        samples=[10, 10],
        ready_s=[0.0, 0.0],
        others=[0, 0],
    )
    assert _choice.chosen(facts, shapes, 0) == [True, True]
    # The small one is ready first, and back when the large one is.
    late = dataclasses.replace(facts, ready_s=[0.1, 0.0], backward_s=0.1)
    assert _choice.chosen(late, shapes, 0)[0]
    hidden = dataclasses.replace(facts, backward_s=0.1)
    assert _choice.chosen(hidden, shapes, 0) == [False, False]
    # Others take the link for so long that no weight matters.
    assert _choice.chosen(facts, shapes, 100_000_000) == [False, False]
    some = dataclasses.replace(facts, samples=[10, 0])
    assert _choice.chosen(some, shapes, 0) == [True, False]


def test_waits_that_stay_longer_are_another_link():
    waits = _measured.Waits()
    for _ in range(200):
        waits.add(0.05)
    waits.add(1.0)
    assert not waits.have_changed()
    for _ in range(10):
        waits.add(0.15)
    assert waits.have_changed()
    for _ in range(20):
        waits.add(0.06)
    assert not waits.have_changed()


def two_backwards(rank, step):
    return [batch_of(rank, step + 20), batch_of(rank, step)]


def trains_beside(rank):
    wrapped = nn.parallel.DistributedDataParallel(model_of())
    state = phub.DDPState(wrapped.module, factors="auto")
    wrapped.register_comm_hook(state, phub.ddp_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.01)
    rows = []
    for step in range(6):
        optimizer.zero_grad()
        one, other = two_backwards(rank, step)
        if step in (0, 3):
            with wrapped.no_sync():
                wrapped(one).square().mean().backward()
        wrapped(other).square().mean().backward()
        rows.append((parameters_of(wrapped.module), gradients_of(wrapped.module)))
        optimizer.step()
    plan = state.ways.plan
    leave(state)
    return plan, rows


def beside(rank, store):
    """In a DDP that the program has made, which adds up gradients of two backward()."""
    measures(SLOW)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    found = trains_beside(rank)
    gc.collect()  # the DDP ends before its group
    torch.distributed.destroy_process_group()
    return found


def test_a_ddp_of_the_program(box, start, tmp_path):
    (plan, rows), other = start(beside, 2, tmp_path / "store").results()
    assert_same_bits(other, (plan, rows))
    assert plan == PLAN
    net = model_of()
    for step, (parameters, gradients) in enumerate(rows):
        net.load_state_dict(parameters)
        net.zero_grad()
        first = 0 if step in (0, 3) else 1
        for batch in two_backwards(0, step)[first:] + two_backwards(1, step)[first:]:
            net(batch).square().mean().backward()
        for name, gradient in gradients_of(net).items():
            torch.testing.assert_close(gradients[name], gradient / 2, rtol=1e-4, atol=1e-6)
