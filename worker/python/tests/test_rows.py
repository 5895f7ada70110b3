"""Gradients of which rows are sent, or factors: of embeddings and of fully connected layers."""

import copy

import numpy as np
import pytest
import torch
from conftest import SEED, of_ranks, refused
from exact import assert_same_bits, gradients_of, job, mean, parameters_of, replay, replayed
from models import descend
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phub

WORDS, SIZE, CLASSES = 300, 16, 4


class Text(nn.Module):
    """The mean of a text's words, and a line through it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(SEED)
        self.words = nn.Embedding(WORDS, SIZE, sparse=True)
        self.line = nn.Linear(SIZE, CLASSES)

    def forward(self, text):
        return self.line(self.words(text).mean(1))


def texts_of(rank, step):
    """Words of some texts, many of them several times, and what the texts are about."""
    random = torch.Generator().manual_seed(SEED + 100 * rank + step)
    words = (torch.rand(5 + rank, 7, generator=random) ** 3 * WORDS).long()
    return words, words[:, 0] % CLASSES


def dense(gradient):
    return gradient.coalesce().to_dense() if gradient.is_sparse else gradient


def loss_of(net, rank, step):
    words, about = texts_of(rank, step)
    return nn.functional.cross_entropy(net(words), about)


def trains(rank, make, steps, options):
    net = Text()
    optimizer = phub.DistributedOptimizer(make(net), net, **options)
    losses = []
    for step in range(steps):
        losses.append(descend(optimizer, loss_of(net, rank, step)))
    optimizer.synchronize()
    optimizer.close()
    return parameters_of(net), losses


def dense_steps(net, rank, steps):
    """A rank's gradients of each step, which begins with what `net` has then."""
    for step in range(steps):
        net.zero_grad()
        loss_of(net, rank, step).backward()
        yield {name: dense(p.grad) for name, p in net.named_parameters()}


def of_one_process(make, ranks, steps):
    """PyTorch's steps of dense gradients: the mean in the order of the ranks."""
    net = Text()
    return replay([dense_steps(net, rank, steps) for rank in range(ranks)], net, make(net))


def sgd(net):
    return torch.optim.SGD(net.parameters(), 0.5)


def momentum(net):
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


def adam(net):
    return torch.optim.Adam(net.parameters(), 0.01)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("make", [sgd, momentum])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_parameters_are_those_of_dense_gradients(box, start, make, ranks, transport):
    steps = 8
    options = {"transport": transport, "rows": {"words.*": 60}}
    results = start(trains, ranks, make, steps, options).results()
    for parameters, _ in results:
        assert_same_bits(parameters, of_one_process(make, ranks, steps))


@pytest.mark.parametrize(
    "options", [{"overlap": "forward"}, {"overlap": False}, {"zero_copy": True}]
)
def test_in_every_form(box, start, options):
    for parameters, losses in start(trains, 2, adam, 12, options).results():
        for name, tensor in of_one_process(adam, 2, 12).items():
            assert torch.allclose(parameters[name], tensor, rtol=1e-4, atol=1e-5), name
        assert losses[-1] != losses[0]


def embedding():
    torch.manual_seed(SEED)
    return nn.Embedding(WORDS, SIZE, sparse=True)


def sparse_adam(net):
    return torch.optim.SparseAdam([net.weight], 0.05)


def decaying_sgd(net):
    return torch.optim.SGD(net.parameters(), 0.5, weight_decay=0.5)


def only_words(rank, make, steps, options):
    net = embedding()
    optimizer = phub.DistributedOptimizer(make(net), net, **options)
    for step in range(steps):
        descend(optimizer, net(texts_of(rank, step)[0]).square().sum())
    state = optimizer.state_dict()["state"].get(0)
    optimizer.close()
    return net.weight.detach().clone(), state


@pytest.mark.parametrize("ranks", [2, 3])
def test_sparse_adam_is_pytorchs(box, start, ranks):
    steps = 10
    net = embedding()
    first = net.weight.detach().clone()
    optimizer = sparse_adam(net)

    def rows_of(step):
        every = []
        for rank in range(ranks):
            net.zero_grad()
            net(texts_of(rank, step)[0]).square().sum().backward()
            every.append(net.weight.grad.coalesce())
        used = torch.cat([each.indices()[0] for each in every]).unique()
        rows = mean([each.to_dense() for each in every])[used]
        return torch.sparse_coo_tensor(used[None], rows, (WORDS, SIZE), check_invariants=False)

    for step in range(steps):
        net.weight.grad = rows_of(step)
        for _ in replayed([[{}]], net, optimizer):
            pass
    expected = optimizer.state_dict()["state"][0]
    for weight, state in start(only_words, ranks, sparse_adam, steps, {}).results():
        assert torch.equal(weight, net.weight)
        assert_same_bits(
            {name: torch.as_tensor(each) for name, each in state.items()},
            {name: torch.as_tensor(each) for name, each in expected.items()},
        )
        never = (expected["exp_avg_sq"] == 0).all(1)
        assert never.any()
        assert torch.equal(weight[never], first[never])


@of_ranks(2)
def test_a_lazy_step_leaves_others_alone(rank):
    before = embedding().weight.detach()
    used = torch.cat([texts_of(each, 0)[0].flatten() for each in range(2)]).unique()
    others = torch.ones(WORDS, dtype=torch.bool)
    others[used] = False
    for number, lazy in enumerate((("*",), "weig*", ["weig*"])):
        weight, _ = only_words(rank, decaying_sgd, 1, {"lazy": lazy, "job": job(number)})
        assert torch.equal(weight[others], before[others])
        assert not torch.equal(weight[used], before[used])
    weight, _ = only_words(rank, decaying_sgd, 1, {"lazy": (), "job": job("none")})
    assert torch.equal(weight[others], before[others] - 0.5 * (0.5 * before[others]))


@of_ranks(1)
def test_more_rows_than_there_is_room_for_are_refused(rank):
    net = Text()
    optimizer = phub.DistributedOptimizer(sgd(net), net, rows={"*": 2})
    loss = net(torch.tensor([[1, 2, 3]])).sum()
    refused("3 different rows for key 'words.weight'", loss.backward)
    optimizer.close()


@of_ranks(1)
def test_a_worker_pushes_rows(rank):
    worker = phub.Worker({"m": phub.Key(10, shape=(5, 2), rows_limit=3), "v": 3})
    worker.wait_all()
    rows = np.array([4, 1, 4], np.int64)
    elements = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    worker.push_rows("m", rows, elements)
    worker.wait("m")
    assert worker.parameters("m").tolist() == [0, 0, 3, 4, 0, 0, 0, 0, 6, 8]
    for key, *wrong, message in (
        ("m", rows, elements[:2].copy(), r"are not int64 of \(count,\)"),
        ("v", rows, elements, "no rows_limit"),
        ("m", rows + 1, elements, "there is no row 5"),
        ("m", rows.astype(np.float64), elements, "'m': indices of rows are int64, .* format 'd'"),
        ("m", rows, elements.astype(np.int32), "'m': elements of rows are float32, .* 'i'"),
    ):
        refused(message, worker.push_rows, key, *wrong)
    worker.push_rows("m", rows[:0].copy(), elements[:0].copy())  # none
    worker.wait("m")
    assert not np.array(worker.parameters("m")).any()
    worker.close()


# ---- Gradients of fully connected layers as factors.

SAMPLES = 6


def model_of(seed=SEED):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(20, 70), nn.ReLU(), nn.Linear(70, 33, bias=False), nn.ReLU(), nn.Linear(33, 5)
    )


def batch_of(rank, step):
    """Whole numbers."""
    random = torch.Generator().manual_seed(SEED + 100 * rank + step)
    return torch.randint(-3, 4, (1 + (rank + step) % SAMPLES, 20), generator=random).float()


def backward(forward, rank, step):
    forward(batch_of(rank, step)).square().mean().backward()


def close(one, other, rtol=1e-4, atol=1e-6):
    torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def at_box(net, optimizer, **options):
    return phub.DistributedOptimizer(optimizer, net, **options)


# ---- With phub.ddp.


def trains_alike(rank, transport, factors, steps):
    net = model_of(SEED + rank)  # all begin with rank 0's
    wrapped = phub.ddp(net, transport=transport, factors=factors)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    means, parameters = [], []
    for step in range(steps):
        optimizer.zero_grad()
        backward(wrapped, rank, step)
        means.append(gradients_of(net))
        optimizer.step()
        parameters.append(parameters_of(net))
    return means, parameters


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("factors", [{"*": SAMPLES}, {"2.weight": 1, "[02].*": SAMPLES}])
def test_ranks_stay_alike_and_have_the_mean_of_all(box, start, transport, factors):
    world, steps = 3, 8
    (means, parameters), *others = start(trains_alike, world, transport, factors, steps).results()
    for each in others:
        assert_same_bits(each, (means, parameters))
    net = model_of()
    for step in range(steps):
        net.zero_grad()
        for rank in range(world):
            backward(net, rank, step)
        close(means[step], {name: total / world for name, total in gradients_of(net).items()})
        net.load_state_dict(parameters[step])


# ---- In steps of the box.


def learns(rank, factors, steps, options):
    net = model_of(SEED + rank)  # all begin with rank 0's
    plain = torch.optim.Adam(net.parameters(), 0.01)
    optimizer = at_box(net, plain, accumulate=2, factors=factors, **options)
    for step in range(2 * steps):
        backward(net, rank, step)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.synchronize()
    state = optimizer.state_dict()["state"]
    optimizer.close()
    return parameters_of(net), state[0]["exp_avg"]


@pytest.mark.parametrize(
    "options", [{}, {"overlap": "forward"}, {"overlap": False}, {"zero_copy": True}]
)
def test_they_learn_as_without_factors(box, start, options):
    ways = ({"[02].*": 2 * SAMPLES, "4.weight": 2 * SAMPLES}, {})
    with_factors, without = (start(learns, 2, way, 5, options).results() for way in ways)
    assert_same_bits(with_factors[0][0], with_factors[1][0])
    close(with_factors, without, rtol=1e-3, atol=1e-4)


def whole_numbers(rank, form, transport):
    """Errors of 1, 2 …: products, sums, and steps of 1/4 are exact."""
    net = nn.Linear(20, 4)
    with torch.no_grad():
        net.weight.fill_(1)
        net.bias.fill_(0)
    options = {"factors": {"*": 1, "weight": SAMPLES}, "transport": transport}
    if form == "ddp":
        forward, optimizer = phub.ddp(net, **options), None
    else:
        forward, optimizer = net, at_box(net, torch.optim.SGD(net.parameters(), 0.25), **options)
    seen = []
    for step in range(7):
        net.zero_grad()
        inputs = batch_of(rank, step)
        (forward(inputs) * torch.arange(1, len(inputs) + 1)[:, None]).sum().backward()
        assert net.bias.grad is not None
        if optimizer:
            assert net.weight.grad is None
            optimizer.step()
        seen.append((net.weight if optimizer else net.weight.grad).detach().numpy().copy())
    if optimizer:
        optimizer.close()
        net(batch_of(rank, 0)).sum().backward()  # as before
        assert net.weight.grad is not None
    return seen


@pytest.mark.parametrize(
    ("form", "world", "transport"),
    [("ddp", 3, "shm"), ("box", 2, "shm"), ("box", 2, "tcp")],
)
def test_a_mean_is_the_sum_of_products_times_the_reciprocal(box, start, form, world, transport):
    for seen in start(whole_numbers, world, form, transport).results():
        weight = np.ones((4, 20), np.float32)
        for step, found in enumerate(seen):
            total = np.zeros((4, 20), np.float32)
            for rank in range(world):
                inputs = batch_of(rank, step).numpy()
                errors = np.arange(1, len(inputs) + 1, dtype=np.float32)
                total += np.outer(np.ones(4, np.float32), errors @ inputs)
            mean = total * np.float32(1 / np.float32(world))
            weight -= mean / 4
            assert np.array_equal(found, mean if form == "ddp" else weight)


@of_ranks(2)
def test_a_layer_that_a_rank_does_not_use_counts_as_zero(rank):
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 40), nn.Linear(6, 40)])

        def forward(self, inputs):
            return self.layers[rank](inputs) + 0 * sum(layer.bias.sum() for layer in self.layers)

    net = Either()
    wrapped = phub.ddp(net, factors={"*.weight": 2})
    own = torch.full((2, 6), float(rank + 1))
    wrapped(own).sum().backward()
    with torch.no_grad():  # and without a gradient
        assert wrapped(own).shape == (2, 40)
    for of_rank, layer in enumerate(net.layers):
        assert torch.equal(layer.weight.grad, torch.full((40, 6), float(of_rank + 1)))


@of_ranks(1)
def test_gradients_are_added_to_those_that_are_there(rank):
    net = model_of()
    wrapped = phub.ddp(net, factors={"0.weight": SAMPLES})
    inputs = batch_of(0, 0)
    wrapped(inputs).sum().backward()
    once = net[0].weight.grad.clone()
    wrapped(inputs).sum().backward()
    assert torch.equal(net[0].weight.grad, once + once)
    with wrapped.no_sync():
        refused("no_sync", wrapped(inputs).sum().backward)


@pytest.mark.parametrize("form", ["ddp", "box"])
@of_ranks(2)
def test_gradients_that_are_not_the_weights_are_not_in_the_sum(rank, form):
    net = model_of()
    factors = {"*": SAMPLES}
    if form == "ddp":
        forward, optimizer = phub.ddp(net, factors=factors), None
    else:
        forward, optimizer = net, at_box(net, torch.optim.SGD(net.parameters(), 1), factors=factors)
    before, inputs = parameters_of(net), batch_of(rank, 5).requires_grad_()
    torch.autograd.grad(net(inputs).sum(), inputs)
    net(inputs).sum().backward(inputs=[inputs])
    net.requires_grad_(False)
    net(inputs).sum().backward()
    net.requires_grad_(True)
    assert inputs.grad.any()
    backward(forward, rank, 0)
    if optimizer:
        optimizer.step()
        optimizer.synchronize()
        after = parameters_of(net)
        found = {name: before[name] - after[name] for name in after}
        optimizer.close()
    else:
        found = gradients_of(net)
    alone = model_of()
    alone.load_state_dict(before)
    for each in range(2):
        backward(alone, each, 0)
    close(found, {name: total / 2 for name, total in gradients_of(alone).items()}, atol=1e-5)


def goes_on_alone(rank):
    net = model_of()
    wrapped = phub.ddp(net, factors={"*": SAMPLES}, lease_ms=1000)
    for step in range(4):
        if rank == 1 and step == 2:
            return None
        net.zero_grad()
        backward(wrapped, rank, step)
    return gradients_of(net)


def test_who_is_gone_counts_no_more(box, start):
    found, _ = start(goes_on_alone, 2).results()
    alone = model_of()
    backward(alone, 0, 3)
    close(found, gradients_of(alone))


@of_ranks(1)
def test_the_models_state_stays_as_it_is(rank):
    net = model_of()
    names = list(net.state_dict())
    wrapped = phub.ddp(net, factors={"*": SAMPLES})
    assert list(net.state_dict()) == names
    assert isinstance(wrapped, DistributedDataParallel)
    other = copy.deepcopy(model_of(5))
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(batch_of(0, 0)), net(batch_of(0, 0)))
    given = dict(model_of(6).named_parameters())
    called = torch.func.functional_call(net, given, batch_of(0, 0))
    assert torch.equal(called, model_of(6)(batch_of(0, 0)))
    copied = copy.deepcopy(net)
    copied.load_state_dict(model_of(6).state_dict(), assign=True)
    assert torch.equal(copied(batch_of(0, 0)), called)


# ---- What is refused; test_refused.py has more.


@pytest.mark.parametrize("form", ["ddp", "box"])
@of_ranks(1)
def test_steps_that_cannot_be_are_refused(rank, form):
    layer = nn.Linear(8, 8)
    for net, inputs, message in (
        (model_of(), (3, 20), "has 3 samples, and .* room for 2|3 samples in a step, and .*2"),
        (nn.Sequential(layer, layer), (1, 8), "'0.weight' is used twice|used twice"),
    ):
        options = {"factors": {"0.weight": 2}, "job": f"{form}-{len(net)}"}
        if form == "ddp":
            forward = phub.ddp(net, **options)
        else:
            forward, _ = net, at_box(net, torch.optim.SGD(net.parameters(), 0.1), **options)
        refused(message, lambda f=forward, x=inputs: f(torch.ones(x)).sum().backward())


# ---- Of a worker.


@of_ranks(1)
def test_a_worker_pushes_factors(rank):
    worker = phub.Worker({"m": phub.Key(6, shape=(3, 2), rank_limit=2), "v": 3})
    worker.wait_all()
    left = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    right = np.array([[1, -1], [2, 0]], np.float32)
    worker.push_factors("m", left, right)
    worker.wait("m")
    assert worker.parameters("m").tolist() == [9, -1, 12, -2, 15, -3]
    for key, *factors, message in (
        ("m", left, left, r"are not float32 of \(pairs, 3\)"),
        ("m", left.astype(float), right.astype(float), "'m': factors are float32, .* 'd'"),
        ("v", left, right, "no rank_limit"),
    ):
        refused(message, worker.push_factors, key, *factors)
    worker.push_factors("m", left[:0].copy(), right[:0].copy())  # none
    worker.wait("m")
    assert not np.array(worker.parameters("m")).any()
    worker.close()
