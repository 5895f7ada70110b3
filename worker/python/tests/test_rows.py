"""Trainings with embeddings whose rows are sent, compared with PyTorch's own."""

import numpy as np
import pytest
import torch
from conftest import SEED
from exact import assert_same_bits, exact_sqrt, mean
from torch import nn

import phub

WORDS, SIZE, CLASSES = 300, 16, 4


class Text(nn.Module):
    """The mean of a text's words, and a line through it."""

    def __init__(self):
        super().__init__()
        torch.set_num_threads(1)
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


def gradients_of(net, rank, step):
    net.zero_grad()
    words, about = texts_of(rank, step)
    nn.functional.cross_entropy(net(words), about).backward()
    return {name: dense(p.grad) for name, p in net.named_parameters()}


def parameters_of(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def trains(rank, make, steps, options):
    net = Text()
    optimizer = phub.DistributedOptimizer(make(net), net, **options)
    losses = []
    for step in range(steps):
        words, about = texts_of(rank, step)
        loss = nn.functional.cross_entropy(net(words), about)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.synchronize()
    optimizer.close()
    return parameters_of(net), losses


def of_one_process(make, ranks, steps):
    """PyTorch's steps of dense gradients: the mean in the order of the ranks."""
    net = Text()
    optimizer = make(net)
    for step in range(steps):
        every = [gradients_of(net, rank, step) for rank in range(ranks)]
        for name, p in net.named_parameters():
            p.grad = mean([each[name] for each in every])
        optimizer.step()
    return parameters_of(net)


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


def sparse_adam(net):
    return torch.optim.SparseAdam([net.weight], 0.05)


def only_words(rank, make, steps, options):
    torch.manual_seed(SEED)
    net = nn.Embedding(WORDS, SIZE, sparse=True)
    optimizer = phub.DistributedOptimizer(make(net), net, **options)
    for step in range(steps):
        net(texts_of(rank, step)[0]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"].get(0)
    optimizer.close()
    return net.weight.detach().clone(), state


@pytest.mark.parametrize("ranks", [2, 3])
def test_sparse_adam_is_pytorchs(box, start, monkeypatch, ranks):
    steps = 10
    monkeypatch.setattr(torch.Tensor, "sqrt_", lambda x: x.copy_(exact_sqrt(x)))
    torch.manual_seed(SEED)
    net = nn.Embedding(WORDS, SIZE, sparse=True)
    optimizer = sparse_adam(net)
    for step in range(steps):
        every = []
        for rank in range(ranks):
            net.zero_grad()
            net(texts_of(rank, step)[0]).square().sum().backward()
            every.append(net.weight.grad.coalesce())
        used = torch.cat([each.indices()[0] for each in every]).unique()
        rows = mean([each.to_dense() for each in every])[used]
        net.weight.grad = torch.sparse_coo_tensor(used[None], rows, (WORDS, SIZE))
        optimizer.step()
    expected = optimizer.state_dict()["state"][0]
    for weight, state in start(only_words, ranks, sparse_adam, steps, {}).results():
        assert torch.equal(weight, net.weight)
        assert_same_bits(
            {name: torch.as_tensor(each) for name, each in state.items()},
            {name: torch.as_tensor(each) for name, each in expected.items()},
        )
        never = (expected["exp_avg_sq"] == 0).all(1)
        assert never.any()
        torch.manual_seed(SEED)
        assert torch.equal(weight[never], nn.Embedding(WORDS, SIZE).weight[never])


def lazily(rank, lazy):
    def make(net):
        return torch.optim.SGD(net.parameters(), 0.5, weight_decay=0.5)

    return only_words(rank, make, 1, {"lazy": lazy})[0]


def test_a_lazy_step_leaves_others_alone(box, start):
    torch.manual_seed(SEED)
    before = nn.Embedding(WORDS, SIZE).weight.detach()
    used = torch.cat([texts_of(rank, 0)[0].flatten() for rank in range(2)]).unique()
    others = torch.ones(WORDS, dtype=torch.bool)
    others[used] = False
    for weight in start(lazily, 2, ("*",)).results():
        assert torch.equal(weight[others], before[others])
        assert not torch.equal(weight[used], before[used])
    for weight in start(lazily, 2, ()).results():
        assert torch.equal(weight[others], before[others] - 0.5 * (0.5 * before[others]))


def test_a_text_is_one_pattern_of_lazy_weights(box, start):
    one, other = (start(lazily, 2, lazy).results() for lazy in ("weig*", ["weig*"]))
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def refuses(rank):
    net = Text()

    def made(**options):
        return phub.DistributedOptimizer(sgd(net), net, **options)

    with pytest.raises(phub.InvalidError, match="server=True"):
        made(server=False, rows={"*": 2})
    with pytest.raises(phub.NotFoundError, match=r"'line\.\*'; there are words\.weight"):
        made(rows={"line.*": 2})
    with pytest.raises(phub.NotFoundError, match="lazy: no parameter"):
        made(lazy=("nothing",))
    with pytest.raises(phub.NotFoundError, match="lazy: no parameter .* 'nothing'"):
        made(lazy="nothing")
    for wrong, said in (
        ({"rows": 5}, "rows=5: it is a number of rows by patterns"),
        ({"rows": {1: 5}}, "rows={1: 5}: it is a number"),
        ({"rows": {"*": "x"}}, r"rows of '\*' is 'x': it must be a whole number"),
        ({"rows": {"*": 2**64}}, r"rows of '\*' is 18446744073709551616: it must"),
        ({"lazy": True}, "lazy=True: it is patterns of names"),
        ({"lazy": [3]}, r"lazy=\[3\]: it is patterns of names"),
    ):
        with pytest.raises(phub.InvalidError, match=said):
            made(**wrong)
    with pytest.raises(phub.InvalidError, match="0 rows"):
        made(rows={"*": 0})
    with pytest.raises(phub.InvalidError, match="'line.weight' has dense gradients"):
        phub.DistributedOptimizer(torch.optim.SparseAdam(net.parameters()), net)
    optimizer = made(rows={"*": 2})
    with pytest.raises(phub.InvalidError, match="3 different rows for key 'words.weight'"):
        net(torch.tensor([[1, 2, 3]])).sum().backward()
    optimizer.close()


def test_what_cannot_be_is_refused(box, start):
    start(refuses, 1).results()


def pushes(rank):
    keys = {"m": phub.Key(10, shape=(5, 2), rows_limit=3), "v": 3}
    worker = phub.Worker(keys)
    worker.wait_all()
    rows = np.array([4, 1, 4], np.int64)
    elements = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    worker.push_rows("m", rows, elements)
    worker.wait("m")
    found = np.array(worker.parameters("m")).reshape(5, 2)
    with pytest.raises(phub.InvalidError, match=r"are not int64 of \(count,\)"):
        worker.push_rows("m", rows, elements[:2].copy())
    with pytest.raises(phub.InvalidError, match="no rows_limit"):
        worker.push_rows("v", rows, elements)
    with pytest.raises(phub.InvalidError, match="there is no row 5"):
        worker.push_rows("m", rows + 1, elements)
    with pytest.raises(phub.InvalidError, match="'m': indices of rows are int64, .* format 'd'"):
        worker.push_rows("m", rows.astype(np.float64), elements)
    with pytest.raises(phub.InvalidError, match="'m': elements of rows are float32, .* 'i'"):
        worker.push_rows("m", rows, elements.astype(np.int32))
    worker.push_rows("m", rows[:0].copy(), elements[:0].copy())  # none
    worker.wait("m")
    assert not np.array(worker.parameters("m")).any()
    worker.close()
    return found


def test_a_worker_pushes_rows(box, start):
    (found,) = start(pushes, 1).results()
    assert np.array_equal(found, [[0, 0], [3, 4], [0, 0], [0, 0], [6, 8]])
