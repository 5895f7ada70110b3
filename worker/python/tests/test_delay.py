"""Trainings whose parameters come a step late, compared with the formula, to the bit.

With p[r] the parameters after step r, and those before the first also before it, step r is one of
p[r - 1] with gradients of p[r - 2]: those that forward() and backward() of the step find.
"""

import copy
import os
import signal
import time

import pytest
import torch
from conftest import leave, of_ranks, refused, wait_until
from deaths import FORK, JOB, STEPS, NoDeath, death_anywhere, live
from exact import (
    assert_same_bits,
    exact_roots,
    gradients_of,
    job,
    mean,
    parameters_of,
    replay,
    saved,
)
from models import Branches, loss_of, make_net
from test_device import HOST, take_the_way_of_a_gpu
from test_optimizer import OPTIMIZERS, assert_same_state, plain, schedule_of
from test_rejoin import Batches
from test_rejoin import make_net as make_stateful
from test_rows import Text
from test_rows import loss_of as loss_of_text
from torch import nn

import phub

PARTS = 2  # backward() of a step


def made(net=None, kind="adamw", **options):
    net = net or make_net()
    if "slack" not in options:
        options["delay"] = 1
    return net, phub.DistributedOptimizer(plain(net, kind), net, **options)


def make_step(net, optimizer, rank, step, parts=1):
    optimizer.zero_grad(set_to_none=step % 2 == 0)  # or memory of the step before is used again
    for part in range(parts):
        loss_of(net, rank, parts * step + part).backward()
    optimizer.step()


def gradients_at(parameters, rank, step, parts=1):
    net = make_net()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(parameters[name])
    for part in range(parts):
        loss_of(net, rank, parts * step + part).backward()
    return gradients_of(net)


def formula(world, kind, steps, parts=1, seen=lambda _rank, step: step - 2, schedule=None):
    """The parameters p[0], p[1] … p[steps], and the optimizer's state.

    seen: of which of them the gradients of a step are. schedule: makes one of an optimizer.
    """
    net = make_net()
    optimizer = plain(net, kind)
    rates = schedule(optimizer) if schedule else None
    after = [parameters_of(net)]
    for step in range(1, steps + 1):
        gradients = [
            gradients_at(after[max(0, seen(rank, step))], rank, step - 1, parts)
            for rank in range(world)
        ]
        for name, parameter in net.named_parameters():
            if name in gradients[0]:
                parameter.grad = mean([of_rank[name] for of_rank in gradients])
        with exact_roots():
            optimizer.step()
        if rates:
            rates.step()
        after.append(parameters_of(net))
    return after, optimizer.state_dict()


def trains(rank, kinds, steps, options):
    results = {}
    for kind in kinds:
        net = make_net()
        with torch.no_grad():
            net[2].weight.add_(rank)  # rank 0's count
        _, optimizer = made(net, kind, accumulate=PARTS, job=job(kind), **options)
        assert optimizer.worker.connection.startswith(options["transport"])
        schedule = schedule_of(optimizer)
        there = []
        for step in range(steps):
            make_step(net, optimizer, rank, step, PARTS)
            schedule.step()
            there.append(parameters_of(net))
        optimizer.synchronize()
        there.append(parameters_of(net))
        results[kind] = there, optimizer.state_dict()
        assert_same_bits(parameters_of(net), there[-1])
        leave(optimizer)
    return results


@pytest.mark.parametrize("overlap", ["backward", False])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_step_has_gradients_of_the_parameters_before_the_latest(
    box, start, world, transport, overlap
):
    kinds = OPTIMIZERS if overlap else ["sgd", "momentum", "adam"]
    steps = 12
    options = {"transport": transport, "overlap": overlap}
    results = start(trains, world, kinds, steps, options).results()
    for kind in kinds:
        after, state = formula(world, kind, steps, PARTS, schedule=schedule_of)
        assert not torch.equal(after[1]["2.weight"], after[2]["2.weight"])
        for result in results:
            there, found = result[kind]
            assert_same_bits(there, after, kind)  # after step r those of step r - 1
            assert_same_state(found, state)


# ---- Beside a training without a delay, whose gradients are computed elsewhere.


def verdict_of(optimizer):
    return repr(optimizer.grad_norm), optimizer.skipped  # a NaN is not equal to itself


def by_hand(rank, make, loss, options, steps):
    """A model has the latest parameters, and another one those of the step before."""
    net, stale = make(), make()
    optimizer = phub.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), net, overlap=False, **options
    )
    verdicts = []
    for step in range(steps):
        stale.zero_grad()
        loss(stale, rank, step).backward()
        with torch.no_grad():
            for mine, other in zip(net.parameters(), stale.parameters(), strict=True):
                mine.grad = None if other.grad is None else other.grad.clone()
                other.copy_(mine)
        verdicts.append(verdict_of(optimizer))  # of the step before
        optimizer.step()
    verdicts.append(verdict_of(optimizer))
    state = optimizer.state_dict()
    leave(optimizer)
    return [parameters_of(net), state, verdicts]


def delayed(rank, make, loss, options, steps):
    net = make()
    optimizer = phub.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), net, delay=1, **options
    )
    verdicts = []
    for step in range(steps):
        optimizer.zero_grad()
        loss(net, rank, step).backward()
        optimizer.step()
        verdicts.append(verdict_of(optimizer))
    state = optimizer.state_dict()
    verdicts.append(verdict_of(optimizer))
    leave(optimizer)
    return [parameters_of(net), state, verdicts]


def loss_that_overflows(net, rank, step):
    loss = loss_of(net, rank, step)
    return loss * float("inf") if (rank, step) == (1, 3) else loss


def loss_of_branches(net, rank, step):
    used = [(0,), (0, 1), (1,), (1 + rank,), (0,), (2 * rank,)][step % 6]
    return net(torch.full((3, 4), 0.1 * step + rank + 1), used).square().sum()


def make_all():
    return make_net().requires_grad_()


FORMS = {
    "clipped": (make_net, loss_of, {"max_norm": 0.5}),
    "skipped": (make_net, loss_that_overflows, {"on_nonfinite": "skip", "transport": "tcp"}),
    "unused": (Branches, loss_of_branches, {"unused": "skip"}),
    "unused counts as zero": (Branches, loss_of_branches, {}),
    "coded": (make_all, loss_of, {"gradient_dtype": "int8", "formats": {"*bias": "topk"}}),
    "differences": (make_net, loss_of, {"parameter_dtype": "int8"}),
    "schedule of the box": (make_net, loss_of, {"schedule": {"lr_warmup": 3, "lr_cosine": 8}}),
    "rows": (Text, loss_of_text, {}),
    "lazy rows": (Text, loss_of_text, {"lazy": "words.*", "transport": "tcp"}),
}


@pytest.mark.parametrize("way", FORMS)
@of_ranks(2)
def test_every_form_of_a_step_may_be_late(rank, way):
    make, loss, options = FORMS[way]
    found = [
        form(rank, make, loss, {**options, "job": job(form.__name__)}, 9)
        for form in (by_hand, delayed)
    ]
    assert_same_bits(*found)
    if way == "skipped":
        assert [skipped for _, skipped in found[0][2]].count(True) == 1
    return found


# ---- What overlaps.


def goes_ahead(rank, way, gone_ahead, options):
    """Rank 1 does nothing before rank 0 has made a step, and written where its gradients were."""
    if way == HOST:
        take_the_way_of_a_gpu()
    net, optimizer = made(job=job(way), progress_limit_ms=100_000, **options)
    if rank == 1:
        assert gone_ahead.wait(100)
    for step in range(3):
        make_step(net, optimizer, rank, step)
        if step == 0 and rank == 0:
            loss_of(net, rank, 7).backward()  # and in vain
            for mine in optimizer._mine:
                for written in (mine.tensor.grad, getattr(mine, "left", None)):
                    if written is not None:
                        written.fill_(1e9)
                mine.end_step()  # the samples of this backward() do not count
            assert optimizer.worker.round("0.weight") == 0
            gone_ahead.set()
            wait_until(lambda: optimizer.worker.ready("0.weight"), "the result of the first step")
            assert_same_bits(parameters_of(net), parameters_of(make_net()))  # not while computing
    optimizer.synchronize()
    leave(optimizer)
    return parameters_of(net)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("way", ["cpu", HOST])
def test_a_step_returns_before_the_box_has_its_result(box, start, way, transport):
    """Whatever is done to this rank's gradients then."""
    results = start(goes_ahead, 2, way, FORK.Event(), {"transport": transport}).results()
    after, _ = formula(2, "adamw", 3)
    for each in results:
        assert_same_bits(each, after[-1])


def other_rates(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def goes_ahead_with_other_rates(rank, gone_ahead):
    """Rank 0 has a rate for its second step when rank 1 has none for the first yet."""
    net, optimizer = made(progress_limit_ms=100_000)
    schedule = other_rates(optimizer)
    for step in range(4):
        if (rank, step) == (0, 1):
            gone_ahead.set()
        if (rank, step) == (1, 0):
            assert gone_ahead.wait(100)
            time.sleep(0.1)  # rank 0 is in step()
        make_step(net, optimizer, rank, step)
        schedule.step()
    optimizer.synchronize()
    return parameters_of(net)


def test_rates_are_those_of_the_step_however_far_a_rank_is_ahead(box, start):
    results = start(goes_ahead_with_other_rates, 2, FORK.Event()).results()
    after, _ = formula(2, "adamw", 4, schedule=other_rates)
    for each in results:
        assert_same_bits(each, after[-1])


@of_ranks(1)
def test_a_rank_that_joins_later_begins_with_the_latest_parameters(rank):
    nets, optimizers, seen = [], [], []
    for step in range(1, 6):
        if step in (1, 3):
            net, optimizer = made(max_ranks=2, rank=len(nets))
            nets.append(net)
            optimizers.append(optimizer)
        seen.append([parameters_of(net) for net in nets])
        for number, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            make_step(net, optimizer, number, step - 1)
    for optimizer in optimizers:
        optimizer.synchronize()

    net = make_net()
    alone, after = plain(net), [parameters_of(net)]
    for step, of_ranks_ in enumerate(seen, 1):
        for number, found in enumerate(of_ranks_):
            assert_same_bits(found, after[max(0, step - 2 + (number == 1 and step == 3))])
        replay(
            [[gradients_at(found, n, step - 1)] for n, found in enumerate(of_ranks_)], net, alone
        )
        after.append(parameters_of(net))
    for each in nets:
        assert_same_bits(parameters_of(each), after[-1])


def calm(rank, options):
    net, optimizer = made(job=job("calm"), **options)
    for step in range(3):
        make_step(net, optimizer, rank, step)
    leave(optimizer)
    return parameters_of(net)


@pytest.mark.parametrize("way", ["cpu", HOST])
def test_factors_may_be_written_over_too(box, start, way):
    options = {"factors": {"2.weight": 8}}
    found = start(goes_ahead, 2, way, FORK.Event(), options).results()
    assert_same_bits(found, start(calm, 2, options).results())


# ---- When the latest results are taken.

SAVES = 3  # the step after which somebody has the latest


def saves_in_between(rank, who, how):
    """Returns the parameters after each step."""
    net, optimizer = made()
    there, model, state = [], {}, {}
    for step in range(1, 7):
        make_step(net, optimizer, rank, step - 1)
        if step == SAVES and rank in who:
            if how == "synchronize":
                optimizer.synchronize()
            elif how == "verdict":
                assert not optimizer.await_skipped()
            elif how == "model":
                model = copy.deepcopy(net.state_dict())
            else:
                state = copy.deepcopy(optimizer.state_dict())
        there.append(parameters_of(net))
    optimizer.close()  # it takes the last, too
    return [*there, parameters_of(net)], model, state


@pytest.mark.parametrize("who", [(0,), (0, 1)])
@pytest.mark.parametrize("how", ["synchronize", "verdict", "model", "state"])
def test_who_saves_has_the_latest_parameters_and_goes_on_with_them(box, start, who, how):
    results = start(saves_in_between, 2, who, how).results()

    def is_new(rank, step):
        return rank in who and step == SAVES + 1

    after, _ = formula(2, "adamw", 6, seen=lambda rank, step: step - 2 + is_new(rank, step))
    _, expected_state = formula(2, "adamw", SAVES)

    for rank, (there, model, state) in enumerate(results):
        expected = [after[step - 1 + is_new(rank, step + 1)] for step in range(1, 7)]
        assert_same_bits(there, [*expected, after[-1]])
        if rank in who and how == "model":
            assert_same_bits({n: model[n] for n in after[SAVES]}, after[SAVES])
        if rank in who and how == "state":
            assert_same_state(state, expected_state)


@of_ranks(2)
def test_a_checkpoint_can_be_loaded_whatever_is_under_way(rank):
    """The model before the optimizer, and afterwards; and by hand, tensor by tensor."""
    found = []
    for way in ("before", "afterwards", "by hand"):
        net, optimizer = made(job=job(way))
        for step in range(3):
            make_step(net, optimizer, rank, step)
        saved = copy.deepcopy({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
        for step in range(3, 6):
            make_step(net, optimizer, rank, step)  # in vain
        if way == "before":
            net.load_state_dict(saved["net"])
        if way == "by hand":
            with torch.no_grad():
                for name, parameter in net.named_parameters():
                    parameter.copy_(saved["net"][name])
        optimizer.load_state_dict(saved["optimizer"])
        if way == "afterwards":
            net.load_state_dict(saved["net"])
        for step in range(3, 6):
            make_step(net, optimizer, rank, step)
        optimizer.synchronize()
        found.append([parameters_of(net), optimizer.state_dict()])
        leave(optimizer)
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])
    return found


@of_ranks(1)
def test_what_the_program_writes_is_not_overwritten_and_refused(rank):
    net, optimizer = made()
    make_step(net, optimizer, rank, 0)
    with torch.no_grad():
        net[2].weight.fill_(3)
    optimizer.synchronize()
    assert bool((net[2].weight == 3).all())
    message = "parameter '2.weight' was changed by the program"
    refused(message, make_step, net, optimizer, rank, 1, error=RuntimeError)


@of_ranks(1)
def test_a_copy_of_the_model_and_one_without_its_optimizer_are_as_ever(rank):
    net, optimizer = made()
    make_step(net, optimizer, rank, 0)
    for other in (copy.deepcopy(net), saved(net)):
        assert_same_bits(list(other.state_dict().items()), list(make_net().state_dict().items()))
    assert_same_bits(parameters_of(net), parameters_of(make_net()))  # nobody took the results
    del optimizer
    after, _ = formula(1, "adamw", 1)
    part = net[2].state_dict()
    assert_same_bits(parameters_of(net), after[1])
    assert_same_bits(part["weight"], after[1]["2.weight"])


@of_ranks(2)
def test_a_slack_of_one_is_a_delay(rank):
    net, optimizer = made(consistency="ssp", slack=1)
    for step in optimizer.steps(4):
        make_step(net, optimizer, rank, step)
    assert_same_bits(parameters_of(net), formula(2, "adamw", 4)[0][-1])


@of_ranks(2)
def test_the_end_of_steps_has_the_latest_parameters(rank):
    net, optimizer = made()
    for step in optimizer.steps(4):
        make_step(net, optimizer, rank, step)
    found = parameters_of(net)
    after, _ = formula(2, "adamw", 4)
    assert_same_bits(found, after[-1])


def test_a_scale_of_gradients_is_refused(box):
    _, optimizer = made(on_nonfinite="skip", rank=0, world_size=1)
    refused("a GradScaler and delay=1 do not go together", phub.GradScaler, optimizer)


# ---- Deaths.


def lives_on(rank, name, death):
    net = make_stateful()
    plain = torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)
    optimizer = phub.DistributedOptimizer(plain, net, job=name, delay=1)
    batches = Batches(rank)
    torch.manual_seed(rank)

    def makes(step):
        death.at(rank, step, 0)
        optimizer.zero_grad()
        inputs, labels = next(batches)
        nn.functional.cross_entropy(net(inputs), labels).backward()
        death.at(rank, step, 1)
        optimizer.step()
        death.at(rank, step, 2)

    lives = live(optimizer, makes, batches=batches)
    parameters = parameters_of(net)  # the last results are there
    result = parameters, net.state_dict(), optimizer.state_dict()
    optimizer.worker.barrier()
    return lives, parameters, result


def test_a_training_goes_on_after_the_boxs_death(saving_box, start):
    calm = start(lives_on, 2, "calm", NoDeath()).results()
    death = death_anywhere()
    found = death.happens(saving_box, start(lives_on, 2, JOB, death))
    assert_same_bits(found, [(2, *others) for _, *others in calm])
    for _, parameters, (_, model, state) in found:
        assert_same_bits({name: model[name] for name in parameters}, parameters)
        assert {int(of["step"]) for of in state["state"].values()} == {STEPS}


def dies(rank, number):
    net, optimizer = made(lease_ms=2000)
    for step in range(10):
        if (rank, step) == (0, 4):
            os.kill(os.getpid(), number)
        make_step(net, optimizer, rank, step)
    optimizer.synchronize()
    return parameters_of(net)


def test_the_others_go_on_without_a_rank(box, start):
    ranks = start(dies, 3, signal.SIGKILL)
    assert_same_bits(ranks.result(1), ranks.result(2))
