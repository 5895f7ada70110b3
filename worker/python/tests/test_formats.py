"""Gradients in formats of their own: the bits of coded ones, and trainings with them."""

import copy
import itertools
import os

import numpy as np
import pytest
import torch
from coded import Sender, int8, topk
from conftest import SEED, SavingBox, wait_until
from exact import assert_same_bits, mean
from models import ResNet, image_batch, loss_of, make_net

import phub

# ---- The core.

KEYS = {"a.weight": 20_001, "b.weight": 5_000, "a.bias": 40, "b.bias": 33}
FORMATS = {"*": "f16", "?.weight": "int8", "b.weight": "topk", "b.*s": "f32"}
MEMORY = {"a.weight": "f32", "b.weight": "f32", "a.bias": "f16", "b.bias": "f32"}
ROUNDS = 8
NULL, OWN = 3, 5  # rounds of which a gradient is none, or in memory of the program


def gradient_of(rank, round_, key):
    """Of elements of very different sizes; in some rounds of zeros."""
    random = np.random.default_rng([SEED, rank, round_, *key.encode()])
    values = random.standard_normal(KEYS[key]) * 2.0 ** random.integers(-30, 12)  # f16 holds it
    if key.endswith("bias"):
        return np.arange(KEYS[key], dtype=np.float32) * (rank + round_)
    return (values * (round_ != 6)).astype(np.float32)


def exchanges(rank, transport):
    results = []
    with phub.Worker(KEYS, formats=FORMATS, transport=transport) as worker:
        assert {key: worker.gradient_dtype(key) for key in KEYS} == MEMORY
        for round_ in range(1, ROUNDS + 1):
            for key in KEYS:
                slot = np.asarray(worker.gradient(key))
                if worker.gradient_dtype(key) == "f16":
                    slot = slot.view(np.float16)
                slot[:] = gradient_of(rank, round_, key)
            own = gradient_of(rank, round_, "a.weight").astype(np.float16)
            if round_ == OWN:
                worker.register_memory("a.weight", own, gradient_dtype="f16", scale=0.375)
            elif round_ == OWN + 1:
                worker.register_memory("a.weight")
            for key in KEYS:
                if key == "a.weight" and round_ == NULL and rank == 1:
                    worker.push_null(key)
                else:
                    worker.push(key)
            worker.wait_all()
            results.append({key: np.array(worker.parameters(key)) for key in KEYS})
    return results


def sums(world):
    """What the box makes of it, round by round."""
    senders = [{"a.weight": Sender(int8), "b.weight": Sender(topk)} for _ in range(world)]
    for round_ in range(1, ROUNDS + 1):
        total = {key: np.zeros(n, np.float32) for key, n in KEYS.items()}
        for rank, key in itertools.product(range(world), KEYS):
            if key == "a.weight" and round_ == NULL and rank == 1:
                continue
            gradient = gradient_of(rank, round_, key)
            if key == "a.weight" and round_ == OWN:
                gradient = gradient.astype(np.float16).astype(np.float32) * np.float32(0.375)
            sender = senders[rank].get(key)
            total[key] += sender.send(gradient) if sender else gradient
        yield total


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("world", [1, 2])
def test_sums_are_those_of_the_codes_to_the_bit(box, start, transport, world):
    for results in start(exchanges, world, transport).results():
        for round_, (result, expected) in enumerate(zip(results, sums(world), strict=True), 1):
            for key in KEYS:
                assert np.array_equal(result[key], expected[key]), (key, round_)


def broadcasts(rank):
    initial = np.linspace(-1, 1, 1000, dtype=np.float32)
    with phub.Worker({"w": 1000}, initial="broadcast", gradient_dtype="int4") as worker:
        worker.broadcast({"w": initial} if rank == 0 else None)
        return np.array_equal(np.asarray(worker.parameters("w")), initial)


def test_parameters_are_not_coded(box, start):
    assert start(broadcasts, 2).results() == [True, True]


def sends_fp8(rank, dtype, gradients):
    """What comes back of each gradient, each of a job of its own: without a residual before it."""
    results = []
    for n, gradient in enumerate(gradients):
        with phub.Worker({"w": len(gradient)}, gradient_dtype=dtype, job=f"fp8-{n}") as worker:
            np.asarray(worker.gradient("w"))[:] = gradient
            worker.push("w")
            worker.wait("w")
            results.append(np.array(worker.parameters("w")))
    return results


@pytest.mark.parametrize(
    ("dtype", "theirs", "largest"),
    [("fp8-e4m3", torch.float8_e4m3fn, 448), ("fp8-e5m2", torch.float8_e5m2, 57_344)],
)
def test_fp8_is_torchs_after_a_scale_that_nothing_exceeds(box, start, dtype, theirs, largest):
    """bits.md: nothing is cut off and nothing becomes NaN, at whichever end torch's own cast is."""
    random = np.random.default_rng(SEED)
    ends = [largest, np.nextafter(np.float32(largest), np.float32(np.inf)), 1e38, 1e-30, 1000]
    gradients = []
    for end in ends:  # the largest magnitude; what is smaller, down to what rounds to zero
        gradient = random.uniform(-1, 1, 500) * 2.0 ** random.integers(-30, 1, 500)
        gradient = (gradient * end).astype(np.float32)
        gradient[17] = -end
        gradients.append(gradient)
    (results,) = start(sends_fp8, 1, dtype, gradients).results()
    for gradient, result in zip(gradients, results, strict=True):
        most = np.abs(gradient).max()
        scale = np.float32(2.0 ** np.ceil(np.log2(np.float64(most) / largest)))
        scaled = torch.from_numpy(gradient * (1 / scale))
        assert scaled.abs().max() <= largest
        assert np.array_equal(result, scaled.to(theirs).float().numpy() * scale)
        assert np.abs(result - gradient).max() <= most / 8


def rounds_at_random(rank):
    with phub.Worker({"w": 4000}, gradient_dtype="int4", rounding="stochastic") as worker:
        gradient = np.asarray(worker.gradient("w"))
        gradient[:], gradient[0] = 0.3, 7  # of a scale of 1
        worker.push("w")
        worker.wait("w")
        return np.array(worker.parameters("w"))


def test_rounding_may_be_stochastic(box, start):
    (sent,) = start(rounds_at_random, 1).results()
    assert set(sent[1:]) == {0, 1}
    assert abs(sent[1:].mean() - 0.3) < 0.05  # 7 standard deviations


def test_residuals_are_saved_without_a_saver_at_save_points_too(memory_path):
    box = SavingBox(memory_path, 2)
    options = {"box": box.address, "job": "saved", "optimizer": "sgd", "gradient_dtype": "int8"}
    try:
        with phub.Worker({"w": 100}, **options) as worker:

            def saved_after_another_round():
                worker.push("w")
                worker.wait("w")
                worker.save_point(worker.round("w"))
                return box.status("saved").get("durable_round", 0) > 2

            wait_until(saved_after_another_round, "two checkpoints")
    finally:
        box.kill()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"formats": {"*.wieght": "int8"}}, phub.NotFoundError, r"2 keys .* '\*\.wieght'"),
        ({"formats": {"*": "int7"}}, phub.InvalidError, "got 'int7'; did you mean 'int8'"),
        ({"gradient_dtype": "fp8"}, phub.InvalidError, "fp8-e5m2, int32, int8, int4, topk"),
        ({"rounding": "stochastically"}, phub.InvalidError, "one of nearest, stochastic"),
        ({"parameter_dtype": "int8"}, phub.InvalidError, "parameter_dtype"),
        (
            {"gradient_dtype": "topk", "chunk_elements": 1 << 17},
            phub.InvalidError,
            "chunks of at most 65536",
        ),
    ],
)
def test_wrong_formats_are_named(box, options, error, message):
    with pytest.raises(error, match=message):
        phub.Worker({"a.weight": 8, "b.weight": 8}, **options)


def test_memory_is_not_coded(box):
    with phub.Worker({"key": 8}, gradient_dtype="int8") as worker:
        with pytest.raises(phub.InvalidError, match="f32, bf16 or f16, not 'int8'"):
            worker.register_memory("key", np.zeros(8, np.float32), gradient_dtype="int8")
        with pytest.raises(phub.InvalidError, match="8 bytes.*8 elements of f32 are 32"):
            worker.register_memory("key", np.zeros(8, np.int8))


# ---- PyTorch.

CODES = {"int8": int8, "topk": topk}


def sent_of(gradients_of_ranks, code):
    """What the box gets of the gradients that each rank had in each step, all coded."""
    result = []
    for steps in gradients_of_ranks:
        senders = {name: Sender(CODES[code]) for name in steps[0]}
        result.append(
            [
                {
                    name: torch.from_numpy(
                        senders[name].send(gradient.float().flatten().numpy())
                    ).view(gradient.shape)
                    for name, gradient in step.items()
                }
                for step in steps
            ]
        )
    return result


def parameters_of(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def gradients_of(net):
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def learns_at_box(rank, code, steps):
    net = make_net()
    plain = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    optimizer = phub.DistributedOptimizer(plain, net, gradient_dtype=code)
    losses, gradients = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net, 0, step % 4)
        loss.backward()
        losses.append(loss.item())
        gradients.append(gradients_of(net))
        optimizer.step()
    return losses, gradients, parameters_of(net)


@pytest.mark.parametrize("code", CODES)
def test_the_boxs_steps_are_those_of_the_codes_to_the_bit(box, start, code):
    steps = 60
    losses, gradients, parameters = zip(
        *start(learns_at_box, 2, code, steps).results(), strict=True
    )
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, foreach=False)
    for of_ranks in zip(*sent_of(gradients, code), strict=True):
        for name, parameter in net.named_parameters():
            if name in of_ranks[0]:
                parameter.grad = mean([each[name] for each in of_ranks])
        optimizer.step()
    for each in parameters:
        assert_same_bits(each, parameters_of(net))
    assert np.mean(losses[0][-4:]) < 0.7 * np.mean(losses[0][:4])


def learns_with_differences(rank, code, steps, zero_copy):
    net = make_net()
    plain = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    optimizer = phub.DistributedOptimizer(plain, net, parameter_dtype=code, zero_copy=zero_copy)
    assert optimizer.worker.parameter_dtype == "f32"
    losses, gradients, parameters = [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net, rank, step % 4)
        loss.backward()
        losses.append(loss.item())
        gradients.append(gradients_of(net))
        optimizer.step()
        parameters.append(parameters_of(net))
    return losses, gradients, parameters


class View:
    """What ranks have of a parameter, by NumPy."""

    def __init__(self, code, parameter):
        self.code, self.values = code, parameter.detach().numpy().flatten()

    def add_difference(self, parameter):
        difference = parameter.detach().numpy().flatten() - self.values
        assert len(difference) <= 8192
        self.values = self.values + self.code(difference)
        return torch.from_numpy(self.values).view(parameter.shape)


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("code", CODES)
def test_results_are_what_differences_add_up_to(box, start, code, zero_copy):
    steps = 60
    losses, gradients, parameters = zip(
        *start(learns_with_differences, 2, code, steps, zero_copy).results(), strict=True
    )
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, foreach=False)
    views = {name: View(CODES[code], p) for name, p in net.named_parameters()}
    for step in range(steps):
        for name, p in net.named_parameters():
            own = [of_rank[step].get(name) for of_rank in gradients]
            zero = torch.zeros_like(p)
            p.grad = mean([zero if each is None else each for each in own])
        optimizer.step()
        expected = {name: views[name].add_difference(p) for name, p in net.named_parameters()}
        for of_rank in parameters:
            assert_same_bits(of_rank[step], expected)
    assert np.mean(losses[0][-4:]) < 0.7 * np.mean(losses[0][:4])


def learns_with_ddp(rank, code, kind, steps):
    net = make_net().to(kind)
    wrapped = phub.ddp(net, gradient_dtype=code)
    names, exchange = {id(p): name for name, p in net.named_parameters()}, wrapped.phub.exchange
    own, means, losses = [], [], []

    def record(bucket):
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            own[-1][names[id(parameter)]] = gradient.clone()
        return exchange(bucket)

    wrapped.phub.exchange = record
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    random = torch.Generator().manual_seed(SEED + rank)
    batches = [torch.randn(16, 12, generator=random).to(kind) for _ in range(2)]
    for step in range(steps):
        optimizer.zero_grad()
        own.append({})
        loss = (wrapped(batches[step % 2]).float() - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        means.append(gradients_of(net))
        optimizer.step()
    return losses, own, means


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", CODES)
def test_ddp_has_the_mean_of_the_codes_to_the_bit(box, start, code, kind):
    losses, own, means = zip(*start(learns_with_ddp, 2, code, kind, 40).results(), strict=True)
    for step, of_ranks in enumerate(zip(*sent_of(own, code), strict=True)):
        for name in of_ranks[0]:
            expected = mean([each[name] for each in of_ranks]).to(kind)
            assert torch.equal(means[0][step][name], expected), (name, step)
            assert torch.equal(means[1][step][name], expected), (name, step)
    assert np.mean(losses[0][-4:]) < 0.7 * np.mean(losses[0][:4])


def names_a_pattern_that_matches_nothing(rank, form):
    net = make_net()
    if form == "ddp":
        phub.ddp(net, formats={"*.wieght": "int8"})
    else:
        plain = torch.optim.SGD(net.parameters(), 0.1)
        phub.DistributedOptimizer(plain, net, formats={"*": "bf16", "0.bias": "int8"})


@pytest.mark.parametrize(("form", "message"), [("ddp", "wieght"), ("optimizer", "'0.bias'")])
def test_a_pattern_that_matches_no_parameter_is_named(box, start, form, message):
    """One that is frozen has no gradient."""
    with pytest.raises(phub.NotFoundError, match=message):
        start(names_a_pattern_that_matches_nothing, 1, form).result(0)


def has_buffers(rank, form):
    torch.manual_seed(SEED)
    net = ResNet(width=4, blocks=1)
    options = {
        "formats": {"*": "int4", "*.bias": "f32"},
        "gradient_dtype": "int8",
        "rounding": "stochastic",
    }
    if form == "ddp":
        wrapped = phub.ddp(net, **options)
        state, worker = wrapped.phub, wrapped.phub.worker
        wrapped(image_batch(rank, 0)).backward()
    else:
        plain = torch.optim.SGD(net.parameters(), 0.1)
        wrapped = state = phub.DistributedOptimizer(plain, net, **options)
        worker = state.worker
        net(image_batch(rank, 0)).backward()
        state.step()
    assert {worker.gradient_dtype(key) for key in worker.keys} == {"f32"}
    before = copy.deepcopy(dict(net.named_buffers()))
    state.sync_buffers()
    after = dict(net.named_buffers())
    worker.barrier()
    return before, after


@pytest.mark.parametrize("form", ["ddp", "optimizer"])
def test_buffers_are_exact(box, start, form):
    (one, after), (other, _) = start(has_buffers, 2, form).results()
    assert any("running_mean" in name for name in one)
    for name, buffer in one.items():
        if buffer.is_floating_point():
            assert torch.equal(after[name], (buffer + other[name]) * 0.5), name


def has_formats_by_pattern(rank):
    """With a model of 16 bits, zero_copy, and a gradient of each kind of memory."""
    net = make_net().bfloat16()
    optimizer = phub.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 0.1),
        net,
        zero_copy=True,
        job=f"{os.environ['PHUB_JOB']}-{rank}",
        world_size=1,
        rank=0,
        formats={"0.*": "f32", "2.*": "int8", "*.bias": "f16"},
    )
    formats = {key: optimizer.worker.gradient_dtype(key) for key in optimizer.worker.keys}
    before = parameters_of(net)
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 127.0 if name.startswith("2") else 2.0)
    optimizer.step()
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            expected = (before[name].float() - 0.1 * parameter.grad.float()).bfloat16()
            torch.testing.assert_close(parameter, expected)
    optimizer.close()
    return formats


def test_formats_by_pattern_go_with_parameters_of_any_format(box, start):
    (formats,) = start(has_formats_by_pattern, 1).results()
    assert formats == {"0.weight": "f32", "2.weight": "f32", "2.bias": "f16", "3.weight": "bf16"}
