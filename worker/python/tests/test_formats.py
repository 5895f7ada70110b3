"""Gradients in formats of their own: the bits of coded ones, and trainings with them."""

import itertools

import numpy as np
import pytest
import torch
from coded import CODES, Sender
from conftest import SEED, SavingBox, of_ranks, pushed, wait_until
from exact import assert_same_bits, gradients_of, mean, parameters_of, replayed
from models import loss_of, make_net, recorded

import phub

# ---- The core.

KEYS = {"a.weight": 20_001, "b.weight": 5_000, "c.weight": 9_000, "a.bias": 40, "b.bias": 33}
CODED = {"a.weight": "int8", "b.weight": "topk", "c.weight": "f32*2,int8*3,topk"}
FORMATS = {"*": "f16", "?.weight": "int8", **CODED, "b.*s": "f32"}
MEMORY = {**dict.fromkeys(CODED, "f32"), "a.bias": "f16", "b.bias": "f32"}
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
    senders = [{key: Sender(code) for key, code in CODED.items()} for _ in range(world)]
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


@of_ranks(2)
def test_parameters_are_not_coded(rank):
    initial = np.linspace(-1, 1, 1000, dtype=np.float32)
    with phub.Worker({"w": 1000}, initial="broadcast", gradient_dtype="int4") as worker:
        worker.broadcast({"w": initial} if rank == 0 else None)
        assert np.array_equal(np.asarray(worker.parameters("w")), initial)


def sent(gradient, **options):
    """What comes back of it."""
    with phub.Worker({"w": len(gradient)}, **options) as worker:
        return pushed(worker, "w", gradient)


@pytest.mark.parametrize(
    ("dtype", "theirs", "largest"),
    [("fp8-e4m3", torch.float8_e4m3fn, 448), ("fp8-e5m2", torch.float8_e5m2, 57_344)],
)
def test_fp8_is_torchs_after_a_scale_that_nothing_exceeds(box, dtype, theirs, largest):
    """bits.md: nothing is cut off and nothing becomes NaN, at whichever end torch's own cast is."""
    random = np.random.default_rng(SEED)
    above = np.nextafter(np.float32(largest), np.float32(np.inf))
    # The largest magnitude; what is smaller, down to what rounds to zero.
    for number, end in enumerate([largest, above, 1e38, 1e-30, 1000]):
        gradient = random.uniform(-1, 1, 500) * 2.0 ** random.integers(-30, 1, 500)
        gradient = (gradient * end).astype(np.float32)
        gradient[17] = -end
        result = sent(gradient, gradient_dtype=dtype, job=f"{dtype}-{number}")  # without a residual
        most = np.abs(gradient).max()
        scale = np.float32(2.0 ** np.ceil(np.log2(np.float64(most) / largest)))
        scaled = torch.from_numpy(gradient * (1 / scale))
        assert scaled.abs().max() <= largest
        assert np.array_equal(result, scaled.to(theirs).float().numpy() * scale)
        assert np.abs(result - gradient).max() <= most / 8


def test_rounding_may_be_stochastic(box):
    gradient = np.full(4000, 0.3, np.float32)
    gradient[0] = 7  # a scale of 1
    found = sent(gradient, gradient_dtype="int4", rounding="stochastic")[1:]
    assert set(found) == {0, 1}
    assert abs(found.mean() - 0.3) < 0.05  # 7 standard deviations


def test_residuals_are_saved_without_a_saver_at_save_points_too(memory_path):
    options = {"job": "saved", "optimizer": "sgd", "gradient_dtype": "int8"}
    with (
        SavingBox(memory_path, 2) as box,
        phub.Worker({"w": 100}, box=box.address, **options) as worker,
    ):

        def saved_after_another_round():
            pushed(worker, "w")
            worker.save_point(worker.round("w"))
            return box.status("saved").get("durable_round", 0) > 2

        wait_until(saved_after_another_round, "two checkpoints")


# ---- PyTorch.

STEPS = 100


def sent_of(gradients_of_ranks, code):
    """What the box gets of the gradients that each rank had in each step, all coded."""
    for steps in gradients_of_ranks:
        senders = {name: Sender(code) for name in steps[0]}

        def coded(name, gradient, senders=senders):
            flat = senders[name].send(gradient.float().flatten().numpy())
            return torch.from_numpy(flat).view(gradient.shape)

        yield [{name: coded(name, g) for name, g in step.items()} for step in steps]


def sgd(net):
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, foreach=False)


def learns(rank, options):
    net = make_net()
    optimizer = phub.DistributedOptimizer(sgd(net), net, **options)
    losses, gradients, parameters = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, rank, step % 4)
        loss.backward()
        losses.append(loss.item())
        gradients.append(gradients_of(net))
        optimizer.step()
        parameters.append(parameters_of(net))
    assert rank > 0 or np.mean(losses[-4:]) < 0.7 * np.mean(losses[:4])
    return gradients, parameters


class View:
    """What ranks have of a parameter, by NumPy."""

    def __init__(self, code, parameter):
        self.code, self.values = code, parameter.detach().numpy().flatten()

    def add_difference(self, parameter):
        difference = parameter.detach().numpy().flatten() - self.values
        assert len(difference) <= 8192
        self.values = self.values + self.code(difference)
        return torch.from_numpy(self.values).view(parameter.shape)


@pytest.mark.parametrize(
    ("coded", "code", "zero_copy"),
    [
        ("gradient_dtype", "int8", False),
        ("gradient_dtype", "topk", False),
        ("gradient_dtype", "f32*30,int8*40,topk", False),
        ("parameter_dtype", "int8", False),
        ("parameter_dtype", "int8", True),
    ],
)
def test_the_boxs_steps_are_those_of_the_codes_to_the_bit(box, start, coded, code, zero_copy):
    """And what ranks get is, with coded results, what differences add up to."""
    is_coded = coded == "gradient_dtype"
    options = {coded: code, "zero_copy": zero_copy}
    gradients, parameters = zip(*start(learns, 2, options).results(), strict=True)
    assert_same_bits(parameters[0], parameters[1])
    net = make_net()
    views = {} if is_coded else {n: View(CODES[code], p) for n, p in net.named_parameters()}
    given = sent_of(gradients, code) if is_coded else gradients
    for step, _ in enumerate(replayed(given, net, sgd(net))):
        expected = parameters_of(net)
        if not is_coded:
            expected = {name: views[name].add_difference(p) for name, p in expected.items()}
        assert_same_bits(parameters[0][step], expected)


def learns_with_ddp(rank, code, kind):
    net = make_net().to(kind)
    model, own = recorded(net, gradient_dtype=code)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    random = torch.Generator().manual_seed(SEED + rank)
    batches = [torch.randn(16, 12, generator=random).to(kind) for _ in range(2)]
    means, losses = [], []
    for step in range(40):
        optimizer.zero_grad()
        loss = (model(batches[step % 2]).float() - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        means.append(gradients_of(net))
        optimizer.step()
    assert rank > 0 or np.mean(losses[-4:]) < 0.7 * np.mean(losses[:4])
    return own, means


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", ["int8", "topk", "topk-int2", "f32*3,int8*9,f32*2,topk"])
def test_ddp_has_the_mean_of_the_codes_to_the_bit(box, start, code, kind):
    own, means = zip(*start(learns_with_ddp, 2, code, kind).results(), strict=True)
    assert_same_bits(means[0], means[1])
    for step, of_each in enumerate(zip(*sent_of(own, code), strict=True)):
        expected = {name: mean([each[name] for each in of_each]).to(kind) for name in of_each[0]}
        assert_same_bits(means[0][step], expected)


@of_ranks(1)
def test_formats_by_pattern_go_with_parameters_of_any_format(rank):
    """With a model of 16 bits, zero_copy, and a gradient of each kind of memory."""
    net = make_net().bfloat16()
    formats = {"0.*": "f32", "2.*": "int8", "*.bias": "f16"}
    plain = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = phub.DistributedOptimizer(plain, net, zero_copy=True, formats=formats)
    found = {key: optimizer.worker.gradient_dtype(key) for key in optimizer.worker.keys}
    assert found == {"0.weight": "f32", "2.weight": "f32", "2.bias": "f16", "3.weight": "bf16"}
    expected = {}
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            gradient = torch.full_like(parameter, 127.0 if name.startswith("2") else 2.0)
            parameter.grad = gradient
            expected[name] = (parameter.detach().float() - 0.1 * gradient.float()).bfloat16()
    optimizer.step()
    torch.testing.assert_close({name: parameters_of(net)[name] for name in expected}, expected)
    optimizer.close()
