"""Trainings with embeddings whose rows are sent, compared with PyTorch's own."""

import numpy as np
import pytest
import torch
from conftest import SEED, of_ranks
from exact import assert_same_bits, job, mean, parameters_of, replay, replayed
from torch import nn

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
        loss = loss_of(net, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
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
        net(texts_of(rank, step)[0]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server": False, "rows": {"*": 2}}, "server=True"),
        ({"rows": {"line.*": 2}}, r"'line\.\*'; there are words\.weight"),
        ({"lazy": ("nothing",)}, "lazy: no parameter"),
        ({"lazy": "nothing"}, "lazy: no parameter .* 'nothing'"),
        ({"rows": 5}, "rows=5: it is a number of rows by patterns"),
        ({"rows": {1: 5}}, "rows={1: 5}: it is a number"),
        ({"rows": {"*": "x"}}, r"rows of '\*' is 'x': it must be a whole number"),
        ({"rows": {"*": 2**64}}, r"rows of '\*' is 18446744073709551616: it must"),
        ({"rows": {"*": 0}}, "0 rows"),
        ({"lazy": True}, "lazy=True: it is patterns of names"),
        ({"lazy": [3]}, r"lazy=\[3\]: it is patterns of names"),
        ({"optimizer": "sparse"}, "'line.weight' has dense gradients"),
    ],
)
def test_what_cannot_be_is_refused(box, options, message):
    net, options = Text(), dict(options)
    sparse = options.pop("optimizer", None)
    optimizer = torch.optim.SparseAdam(net.parameters()) if sparse else sgd(net)
    with pytest.raises((phub.InvalidError, phub.NotFoundError), match=message):
        phub.DistributedOptimizer(optimizer, net, **options)


@of_ranks(1)
def test_more_rows_than_there_is_room_for_are_refused(rank):
    net = Text()
    optimizer = phub.DistributedOptimizer(sgd(net), net, rows={"*": 2})
    with pytest.raises(phub.InvalidError, match="3 different rows for key 'words.weight'"):
        net(torch.tensor([[1, 2, 3]])).sum().backward()
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
        with pytest.raises(phub.InvalidError, match=message):
            worker.push_rows(key, *wrong)
    worker.push_rows("m", rows[:0].copy(), elements[:0].copy())  # none
    worker.wait("m")
    assert not np.array(worker.parameters("m")).any()
    worker.close()
