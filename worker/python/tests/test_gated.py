"""Steps that the box clips or leaves out, against PyTorch's clip_grad_norm_ and optimizers."""

import pytest
import torch
from models import loss_of, make_net
from torch import nn

import phub

RANKS = 2
STEPS = 8
BAD_STEP = 3


def plain(net):
    return torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)


def backward(net, rank, step):
    factor = float("inf") if step == BAD_STEP and rank == 1 else 1
    (loss_of(net, rank, step) * factor).backward()


def exchanged(net):
    return [p for p in net.parameters() if p.requires_grad]


def first_norm():
    """Of the ranks' mean gradient in the first step."""
    net = make_net()
    for rank in range(RANKS):
        (loss_of(net, rank, 0) / RANKS).backward()
    return nn.utils.clip_grad_norm_(net.parameters(), float("inf")).item()


def trains(rank, overlap, options):
    net = make_net()
    optimizer = phub.DistributedOptimizer(
        plain(net), net, overlap=overlap, on_nonfinite="skip", **options
    )
    assert optimizer.grad_norm is None
    assert not optimizer.skipped
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(net, rank, step)
        gradients = [p.grad.clone() for p in exchanged(net)]
        optimizer.step()
        optimizer.synchronize()
        parameters = [p.detach().clone() for p in net.parameters()]
        seen.append((gradients, parameters, optimizer.grad_norm, optimizer.skipped))
    steps = [int(s["step"]) for s in optimizer.state_dict()["state"].values()]
    optimizer.worker.barrier()
    optimizer.close()
    return seen, steps


@pytest.mark.parametrize("overlap", ["backward", "forward"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_steps_are_clipped_and_skipped_as_pytorch_does(box, start, transport, overlap):
    max_norm = 0.9 * first_norm()  # the first step is clipped
    options = {"max_norm": max_norm, "transport": transport}
    results = start(trains, RANKS, overlap, options).results()
    net = make_net()
    optimizer = plain(net)
    clipped = 0
    for step in range(STEPS):
        seen = [ranks[0][step] for ranks in results]
        for index, parameter in enumerate(exchanged(net)):
            parameter.grad = (seen[0][0][index] + seen[1][0][index]) / RANKS
        norm = nn.utils.clip_grad_norm_(net.parameters(), max_norm, foreach=False)
        skipped = not torch.isfinite(norm)
        if not skipped:
            optimizer.step()
        clipped += bool(norm > max_norm)
        for _, parameters, grad_norm, was_skipped in seen:
            assert was_skipped == (step == BAD_STEP) == skipped
            assert skipped or grad_norm == pytest.approx(norm.item(), rel=1e-6)
            for one, other in zip(parameters, net.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert all(a.equal(b) for a, b in zip(seen[0][1], seen[1][1], strict=True))
    assert clipped > 0
    for _, steps in results:
        assert set(steps) == {STEPS - 1}


def tells(rank):
    with phub.Worker({"w": 4}, optimizer="sgd", hyper={"lr": 1, "max_norm": 1}) as worker:
        assert worker.verdict is None
        worker.gradient("w")[:] = memoryview(torch.full((4,), 2.0).numpy())
        worker.push("w")
        worker.wait("w")
        return worker.verdict, list(worker.parameters("w"))


def test_a_worker_is_told_the_norm(box, start):
    [(verdict, parameters)] = start(tells, 1).results()
    assert verdict == phub.Verdict(round=1, norm=4.0, skipped=False)
    assert parameters == pytest.approx([-0.5] * 4)


def test_clipping_at_the_box_is_for_its_own_steps():
    net = make_net()
    for wrong, why in (
        ({"max_norm": 1.0}, "for steps of the box"),
        ({"on_nonfinite": "skip"}, "keeps the gradients of the round before"),
    ):
        with pytest.raises(phub.InvalidError, match=why):
            phub.DistributedOptimizer(plain(net), net, server=False, **wrong)
