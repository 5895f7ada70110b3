"""DistributedOptimizer(factors="auto"): what goes as factors, and that steps are right anyway."""

import os
import signal
import subprocess

import pytest
import torch
from conftest import SEED, leave, wait_until
from deaths import JOB, STEPS, Death, live
from exact import assert_same_bits, parameters_of
from test_ways import (
    CASES,
    FAST,
    PLAN,
    SAMPLES,
    SLOW,
    TRIALS,
    batch_of,
    loss_of,
    measures,
    model_of,
    status_of,
)

import phub
from phub import _box_ways, _library


def made(net, **options):
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.5)
    return phub.DistributedOptimizer(optimizer, net, factors="auto", **options)


def cheap_results():
    """As if results had so few bits: then factors pay."""
    _box_ways._RESULT_BYTES["f32"] = 0.01


def trains(rank, rates, sizes, how=None, options=None, spans=None, each=lambda step: None):
    """The parameters and the plan before each step, and the parameters at last."""
    measures(rates, spans)
    cheap_results()
    how = how or {}
    net = model_of(SEED + rank)  # all begin with rank 0's
    optimizer = made(net, **(options or {}))
    rows = []
    for step, samples in enumerate(sizes):
        each(step)
        rows.append((parameters_of(net), dict(optimizer.ways.plan) if optimizer.ways else None))
        if step not in how.get("kept", ()):
            optimizer.zero_grad(set_to_none=how.get("none", True))
        if step in how.get("accumulated", ()):
            with optimizer.no_sync():
                loss_of(net, net, rank, step + 20, how).backward()
        sizes_of = {(rank, step): samples, **how.get("sizes", {})}
        loss_of(net, net, rank, step, {**how, "sizes": sizes_of}).backward()
        optimizer.step()
    rows.append((parameters_of(net), None))
    text = ""
    if optimizer.ways and optimizer.ways.facts:
        optimizer.worker.barrier()
        remarks = status_of(optimizer.worker.job)["remarks"]
        text = next(each["text"] for each in remarks if each["subject"] == "factors")
    leave(optimizer)
    return rows, text


def alone(world, first, sizes, how=None, mean=True, rate=1, norm=0):
    """One process that has the batches of all ranks: parameters before each step, and at last."""
    how = how or {}
    net = model_of()
    net.load_state_dict(first)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.5)
    rows = []
    for step, samples in enumerate(sizes):
        rows.append(parameters_of(net))
        optimizer.zero_grad()
        for rank in range(world):
            if step in how.get("accumulated", ()):
                loss_of(net, net, rank, step + 20, how).backward()
            sizes_of = {(rank, step): samples, **how.get("sizes", {})}
            loss_of(net, net, rank, step, {**how, "sizes": sizes_of}).backward()
        for parameter in net.parameters():
            parameter.grad /= world if mean else 1
        if norm:
            torch.nn.utils.clip_grad_norm_(net.parameters(), norm)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= rate
    return [*rows, parameters_of(net)]


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_large_weights_are_factors_where_results_are_small(box, start, transport):
    sizes = [SAMPLES] * 6
    options = {"transport": transport}
    (rows, text), *others = start(trains, 3, SLOW, sizes, None, options).results()
    for other, _ in others:
        assert_same_bits(other, rows)
    assert [plan for _, plan in rows[:-1]] == [{}, {}] + 4 * [PLAN]
    assert text.startswith("2 of 3 weights go as factors, with 0.05 Gbit/s of a rank")
    assert_close([p for p, _ in rows], alone(3, rows[0][0], sizes))


def test_whole_results_are_exchanged_whole(box, start):
    """Factors shorten the way to the box, and what comes back takes as long."""

    def body(rank):
        measures(SLOW)
        net = model_of(SEED + rank)
        optimizer = made(net)
        for step in range(4):
            optimizer.zero_grad()
            net(batch_of(rank, step)).square().mean().backward()
            optimizer.step()
        plan, facts = optimizer.ways.plan, optimizer.ways.facts
        leave(optimizer)
        return plan, facts.ranks

    assert start(body, 2).results() == [({}, 2)] * 2


def test_results_of_few_bits_make_factors_pay(box, start):
    def body(rank):
        measures(SLOW)
        net = model_of(SEED + rank)
        optimizer = made(net, parameter_dtype="int8", transport="tcp")
        for step in range(5):
            optimizer.zero_grad()
            net(batch_of(rank, step)).square().mean().backward()
            optimizer.step()
        plan = dict(optimizer.ways.plan)
        leave(optimizer)
        return plan, parameters_of(net)

    (plan, rows), other = start(body, 2).results()
    assert_same_bits(other, (plan, rows))
    assert plan == PLAN


def test_on_a_fast_link_all_are_whole(box, start):
    (rows, _), *_ = start(trains, 2, FAST, [SAMPLES] * 4).results()
    assert [plan for _, plan in rows[:-1]] == [{}] * 4


AT_BOX = {name: how for name, how in CASES.items() if "dropped" not in how and name != "copies"}


@pytest.mark.parametrize("case", AT_BOX)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_steps_are_those_of_all_gradients(box, start, case, transport):
    """What does not fit into the plan goes whole, of one rank or of all."""
    how = {name: value for name, value in AT_BOX[case].items() if name != "kept"}
    sizes = [SAMPLES] * 7
    options = {"transport": transport, **how.get("options", {})}
    (rows, _), *others = start(trains, 3, SLOW, sizes, how, options).results()
    for other, _ in others:
        assert_same_bits(other, rows)
    assert [plan for _, plan in rows[:-1]] == [{}, {}] + 5 * [PLAN]
    mean = options.get("reduction") != "sum"
    assert_close([p for p, _ in rows], alone(3, rows[0][0], sizes, how, mean))


@pytest.mark.parametrize("case", TRIALS)
def test_factors_are_kept_if_they_are_faster(box, start, case):
    spans, expected = TRIALS[case]
    sizes = [SAMPLES] * len(expected)
    (rows, text), (other, _) = start(trains, 2, SLOW, sizes, None, None, spans).results()
    assert_same_bits(other, rows)
    assert [sorted(plan) for _, plan in rows[:-1]] == expected
    assert text.startswith(f"{len(expected[-1])} of 3 weights")
    assert ("with whole gradients" in text) == (case == "slower")
    assert_close([p for p, _ in rows], alone(2, rows[0][0], sizes))


def test_the_choice_follows_the_samples(box, start):
    """More than there is room for, fewer, and more than pay."""
    sizes = [6] * 4 + [30] * 6 + [8] * 6 + [400] * 8
    (rows, _), (other, _) = start(trains, 2, SLOW, sizes).results()
    assert_same_bits(other, rows)
    samples = [plan.get("2.weight", 0) for _, plan in rows[:-1]]
    assert samples[2:4] == [6, 6]
    assert samples[9] == 30
    assert samples[15] == 8
    assert samples[-1] == 0
    assert_close([p for p, _ in rows], alone(2, rows[0][0], sizes))


# ---- Ranks that are lost, and come.


def survives(rank, lost_at, spans, steps):
    measures(SLOW, spans)
    cheap_results()
    net = model_of(SEED + rank)
    optimizer = made(net, on_loss="shrink", lease_ms=1000)
    plans = []
    for step in range(steps):
        if rank == 1 and step == lost_at:
            os.kill(os.getpid(), signal.SIGKILL)
        plans.append(sorted(optimizer.ways.plan))
        optimizer.zero_grad()
        net(batch_of(rank, step)).square().mean().backward()
        optimizer.step()
    parameters = parameters_of(net)
    optimizer.close()
    return plans, parameters


@pytest.mark.parametrize("lost_at", [5, 11])
def test_a_lost_rank_ends_the_trial(box, start, lost_at):
    """While there are factors, and while there are none."""
    spans, expected = TRIALS["faster"]
    ranks = start(survives, 3, lost_at, spans, len(expected))
    plans, parameters = ranks.result(0)
    assert_same_bits(ranks.result(2), (plans, parameters))
    assert plans[: lost_at + 1] == expected[: lost_at + 1]
    assert plans[lost_at + 1 :] == [expected[lost_at]] * (len(plans) - lost_at - 1)


def goes_on(rank, steps, lost_at, path):
    """Rank 1 ends in this step, once, and leaves a file; another process takes its place."""
    measures(SLOW)
    cheap_results()
    net = model_of(SEED + rank)
    # Longer than the test may take: nobody waits for a rank in the jobs of the choice.
    optimizer = made(net, on_loss="wait", lease_ms=1000, wait_limit_ms=600_000)
    began = optimizer.steps_done
    for step in range(began, steps):
        if rank == 1 and step == lost_at and not (path / "lost").exists():
            (path / "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        net(batch_of(rank, step)).square().mean().backward()
        optimizer.step()
    plan = dict(optimizer.ways.plan) if optimizer.ways else None
    found = began, plan, parameters_of(net)
    leave(optimizer)
    return found


def test_who_takes_the_place_of_a_lost_rank_sends_whole_gradients(box, start, tmp_path):
    ranks = start(goes_on, 2, 12, 6, tmp_path)
    ranks.replace(1)  # once it is dead
    (began, plan, parameters), (later, none, same) = ranks.results()
    assert (began, plan) == (0, PLAN)
    assert later >= 5
    assert none is None
    assert_same_bits(same, parameters)


def test_so_does_who_takes_it_before_the_first_step(box, start, tmp_path):
    """The job of the choice has begun without it, and that of the training has not."""
    ranks = start(goes_on, 2, 6, 0, tmp_path)
    ranks.replace(1)
    (began, _, parameters), (later, none, same) = ranks.results()
    assert began == 0
    assert later in (0, 1)  # as the loss was noticed before its first round or in it
    assert none is None
    assert_same_bits(same, parameters)


# ---- Several boxes.


@pytest.mark.parametrize("boxes", [2, 3])
def test_over_several_boxes(own_box, start, monkeypatch, boxes):
    """The link that is measured is that to all boxes: the probe has chunks at each."""
    monkeypatch.setenv("PHUB_SERVER", own_box.address)
    command = [_library.find_program(), "serve", "--join", own_box.address, "--pin", "false"]
    others = [subprocess.Popen(command) for _ in range(boxes - 1)]
    try:
        wait_until(lambda: own_box.shards() == boxes - 1, "the other boxes have joined")
        sizes = [SAMPLES] * 6
        options = {"transport": "tcp"}
        ranks = start(trains, 2, SLOW, sizes, None, options, PHUB_JOB="boxes")
        (rows, text), (other, _) = ranks.results()
    finally:
        for each in others:
            each.kill()
            each.wait()
    assert_same_bits(other, rows)
    assert [plan for _, plan in rows[:-1]] == [{}, {}] + 4 * [PLAN]
    assert text.startswith("2 of 3 weights")
    assert_close([p for p, _ in rows], alone(2, rows[0][0], sizes))


# ---- What it goes with.


def lives_on(rank, death):
    """The box dies after the choice, and comes back from its checkpoint."""
    measures(SLOW)
    cheap_results()
    net = model_of(SEED + rank)
    optimizer = made(net, on_loss="wait", job=JOB)
    plans = {}

    def make_step(step):
        death.at(rank, step, 0)
        plans[step] = dict(optimizer.ways.plan) if optimizer.ways else None
        optimizer.zero_grad()
        net(batch_of(rank, step)).square().mean().backward()
        optimizer.step()

    lives = live(optimizer, make_step)
    found = lives, [plans[step] for step in range(STEPS)], parameters_of(net)
    optimizer.worker.barrier()
    return found


def test_after_the_boxs_death_all_goes_whole(saving_box, start):
    death = Death(SEED % (STEPS - 10) + 8, 0)
    ranks = start(lives_on, 2, death)
    (lives, plans, parameters), other = death.happens(saving_box, ranks)
    assert_same_bits(other, (lives, plans, parameters))
    assert lives == 2
    assert plans[2:5] == [PLAN] * 3
    assert plans[-1] is None
    first = model_of().state_dict()
    assert_close([parameters], alone(2, first, [SAMPLES] * STEPS)[-1:])


OPTIONS = {
    "views": {"zero_copy": True},
    "clipped": {"max_norm": 0.02},
    "skips": {"on_nonfinite": "skip"},
    "excludes": {"on_nonfinite": "exclude"},
    "in groups": {"groups": "2,1"},
    "a schedule": {"schedule": {"lr_exponential": 0.9}},
    "unused": {"unused": "skip"},
}


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_it_goes_with(box, start, case, transport):
    options = {"transport": transport, **OPTIONS[case]}
    sizes = [SAMPLES] * 5
    (rows, _), *others = start(trains, 3, SLOW, sizes, None, options).results()
    for other, _ in others:
        assert_same_bits(other, rows)
    assert [plan for _, plan in rows[:-1]] == [{}, {}] + 3 * [PLAN]
    rate, norm = {"a schedule": (0.9, 0)}.get(case, (1, options.get("max_norm", 0)))
    assert_close([p for p, _ in rows], alone(3, rows[0][0], sizes, rate=rate, norm=norm))


def test_a_step_without_a_weight_leaves_it_as_it_is(box, start):
    """With unused="skip", also where it goes as factors: no step is made of its momentum."""

    def body(rank):
        measures(SLOW)
        cheap_results()
        net = model_of(SEED + rank)
        optimizer = made(net, unused="skip")
        found = []
        for step in range(5):
            before = parameters_of(net)
            optimizer.zero_grad()
            inputs = batch_of(rank, step)
            (net[4](torch.ones(3, 330)) if step == 3 else net(inputs)).square().mean().backward()
            optimizer.step()
            found.append({n: not torch.equal(before[n], p) for n, p in parameters_of(net).items()})
        plan = dict(optimizer.ways.plan)
        leave(optimizer)
        return plan, found

    (plan, found), other = start(body, 2).results()
    assert other == (plan, found)
    assert plan == PLAN
    without = {"0.weight": False, "0.bias": False, "2.weight": False}
    assert found[3] == {**without, "4.weight": True, "4.bias": True}
    assert all(found[4].values())


@pytest.mark.parametrize(
    "shape", [(65536, 4096), (4096, 65536), (4096, 25088), (1 << 20, 1 << 10), (170, 200), (3, 2)]
)
def test_pairs_fit_into_a_chunk_and_are_no_longer_than_rows(shape):
    rows, columns = shape
    samples = _box_ways.most_samples(rows, columns)
    assert samples > 0
    tile = min(rows, max(1, 2**24 // samples - columns), max(1, 2**24 // columns))
    assert samples * (columns + min(tile, -(-rows // 8))) <= 2**24
    assert tile >= min(-(-rows // 8), 2**24 // columns)  # more would be longer slots
    if samples > 1:
        assert samples * (rows + -(-rows // tile) * columns) <= rows * columns
