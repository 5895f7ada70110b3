"""Parameters and buffers of unusual kinds, copies of models, and models of another order."""

import copy
import io
import os

import pytest
import torch
from exact import assert_same_bits, mean
from models import loss_of, make_net
from torch import nn
from torch.distributed.algorithms import Join
from torch.optim.swa_utils import AveragedModel

import phub


def job(name):
    return f"{os.environ['PHUB_JOB']}-{name}"[:200]


def wrapped(form, net, name="job", **options):
    """The module to call, what has sync_buffers() and close(), and the optimizer."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    if form == "ddp":
        model = phub.ddp(net, job=job(name), **options)
        return model, model.phub, optimizer
    optimizer = phub.DistributedOptimizer(optimizer, net, job=job(name), **options)
    return net, optimizer, optimizer


# ---- No elements, and types that phub does not exchange.


class Odd(nn.Module):
    """A layer that trains, and what a model may have beside it."""

    def __init__(self, rank):
        super().__init__()
        self.layer = make_net()
        random = torch.randn(3, generator=torch.Generator().manual_seed(rank))
        frozen = {
            "float8": random.to(torch.float8_e4m3fn),
            "uint16": random.abs().to(torch.uint16),
            "uint32": random.abs().to(torch.uint32),
            "quantized": torch.quantize_per_tensor(random, 0.1 + rank, rank, torch.quint8),
            "channels": torch.quantize_per_channel(
                random, torch.arange(1.0, 4) + rank, torch.arange(3), 0, torch.qint8
            ),
            "coo": (torch.eye(3)[rank % 3] * random).reshape(1, 3).to_sparse(),
            "csr": (torch.eye(3) * (rank + 1)).to_sparse_csr(),
            "empty": torch.empty(0, 3),
        }
        for name, tensor in frozen.items():
            self.register_buffer(f"{name}_buffer", tensor.clone())
            self.register_parameter(f"{name}_frozen", nn.Parameter(tensor, requires_grad=False))
        self.nothing = nn.Parameter(torch.empty(0))
        self.narrow = nn.Linear(0, 12)

    def forward(self, x):
        return self.layer(x + self.narrow(x[:, :0]) + self.nothing.sum())


def dense(tensor):
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.double()


def trains_odd(rank, form, options):
    net = Odd(rank)
    model, state, optimizer = wrapped(form, net, **options)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    trained = {name: p.detach().clone() for name, p in net.layer.named_parameters()}
    before = {name: dense(b) for name, b in net.named_buffers()}
    for _ in range(2):
        state.sync_buffers()
    after = {name: dense(b) for name, b in net.named_buffers()}
    kinds = {name: (b.dtype, b.layout) for name, b in net.named_buffers()}
    assert kinds == {name: (b.dtype, b.layout) for name, b in Odd(rank).named_buffers()}
    state.worker.barrier()
    state.close()
    return trained, before, after


FORMS = {
    "ddp": ("ddp", {}),
    "powersgd": ("ddp", {"powersgd": 1}),
    "box": ("box", {}),
    "forward": ("box", {"overlap": "forward"}),
    "zero copy": ("box", {"zero_copy": True}),
    "own steps": ("box", {"server": False}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_model_may_have_what_is_not_exchanged(box, start, form):
    (trained, before, after), (also_trained, _, also_after) = start(
        trains_odd, 2, *FORMS[form]
    ).results()
    assert_same_bits(trained, also_trained)
    assert after.keys() == before.keys()
    for name in after:
        if name != "float8_buffer":  # the mean
            assert torch.equal(after[name], before[name]), name
        assert torch.equal(after[name], also_after[name]), name


# ---- Copies.


def saved(value):
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return torch.load(content, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "save": saved, "average": AveragedModel}


def copies(rank, form, options):
    for way, made_copy in COPIES.items():
        net = make_net()
        model, state, optimizer = wrapped(form, net, way, **options)
        inputs = torch.ones(2, 12)

        def train(step, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()

        train(0)
        other = made_copy(model)
        with torch.no_grad():
            expected = model(inputs)
            assert torch.equal(other(inputs), expected)
        names = list(model.state_dict())
        if way == "average":
            names = ["n_averaged", *(f"module.{name}" for name in names)]
        assert list(other.state_dict()) == names
        train(1)
        train(2)
        with torch.no_grad():
            assert not torch.equal(model(inputs), expected)
            assert torch.equal(other(inputs), expected)  # it has memory of its own
        other.load_state_dict(other.state_dict())
        again = made_copy(other)
        if way == "average":
            other.update_parameters(model)
        else:
            other.load_state_dict(model.state_dict())
        state.worker.barrier()
        state.close()
        with torch.no_grad():
            assert torch.equal(again(inputs), expected)
            assert torch.equal(other(inputs), model(inputs))
        if form == "ddp":
            with pytest.raises(phub.InvalidError, match="nobody exchanges its gradients"):
                other(inputs).sum().backward()
        plain = other.module if way == "average" else other
        plain = plain.module if form == "ddp" else plain
        plain(inputs).sum().backward()  # the program's own
        assert plain[0].weight.grad is not None


COPIED = {
    **FORMS,
    "factors": ("ddp", {"factors": {"0.weight": 8}}),
    "factors at the box": ("box", {"factors": {"0.weight": 8}}),
    "unused": ("ddp", {"ddp_options": {"find_unused_parameters": True}}),
}


@pytest.mark.parametrize("form", COPIED)
def test_a_copy_is_a_model_of_its_own(box, start, form):
    start(copies, 1, *COPIED[form]).results()


# ---- What a rank does not use.


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.branches = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, inputs, used):
        return sum(self.branches[branch](inputs) for branch in used)


# By step and rank. Nobody uses branch 2 before the last step, nor branch 1 in the first.
USED = [((0,), (0,)), ((0, 1), (0,)), ((1,), (0,)), ((0,), (2,))]


def uses_some(rank, world, as_views):
    net = Branches()
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": as_views}
    model = phub.ddp(net, ddp_options=options)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    expected = Branches()
    plain = torch.optim.SGD(expected.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    inputs = [torch.randn(5, 4, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    for of_ranks in USED:
        optimizer.zero_grad()
        model(inputs[rank], of_ranks[rank]).square().sum().backward()
        optimizer.step()
        gradients = []
        for each in range(world):
            plain.zero_grad()
            expected(inputs[each], of_ranks[each]).square().sum().backward()
            gradients.append([p.grad for p in expected.parameters()])
        for p, of_p in zip(expected.parameters(), zip(*gradients, strict=True), strict=True):
            if any(g is not None for g in of_p):
                p.grad = mean([torch.zeros_like(p) if g is None else g for g in of_p])
        plain.step()
        assert_same_bits(net.state_dict(), expected.state_dict())
        given = [p.grad is None for p in net.parameters()]
        assert given == [p.grad is None for p in expected.parameters()]
    model.phub.worker.barrier()
    model.phub.close()


@pytest.mark.parametrize("as_views", [True, False])
def test_what_only_some_ranks_use_gets_their_mean_everywhere(box, start, as_views):
    start(uses_some, 2, 2, as_views).results()


# ---- Join.


def joins(rank):
    model = phub.ddp(make_net())
    for join in (lambda: Join([model]), model.join):
        with pytest.raises(phub.InvalidError, match="Join is not needed.*model.phub.close"):
            join()


def test_join_says_that_it_is_not_needed(box, start):
    start(joins, 1).results()


# ---- Another order of the same names.


class Ordered(nn.Module):
    """Its modules are made, or only registered, in this order."""

    def __init__(self, order):
        super().__init__()
        made = {"a": nn.Linear(12, 7), "b": nn.Linear(7, 5), "c": nn.BatchNorm1d(5)}
        for name in order:
            self.add_module(name, made[name])

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def trains_in_order(rank, form, options):
    torch.manual_seed(0)
    net = Ordered(("abc", "cba")[rank])
    model, state, optimizer = wrapped(form, net, **options)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    state.sync_buffers()
    found = {name: value.clone() for name, value in sorted(net.state_dict().items())}
    state.worker.barrier()
    state.close()
    return found


@pytest.mark.parametrize("form", [form for form in COPIED if form != "forward"])
def test_keys_match_by_name(box, start, form):
    options = COPIED[form][1]
    if "factors" in options:
        options = {"factors": {"[ab].weight": 8}}
    one, other = start(trains_in_order, 2, COPIED[form][0], options).results()
    assert_same_bits(one, other)


# ---- Wrapped modules.


class Wrapper(nn.Module):
    """As torch.compile and checkpoint_wrapper do."""

    def __init__(self, module, name):
        super().__init__()
        self.inner = name
        self.add_module(name, module)

    def forward(self, x):
        return getattr(self, self.inner)(x)


def trains_wrapped(rank, form, options):
    """Rank 1's modules are wrapped."""
    torch.manual_seed(0)
    net = Ordered("abc")
    if rank == 1:
        net.b = Wrapper(net.b, "_checkpoint_wrapped_module")
        net.c = Wrapper(net.c, "_orig_mod")
        net = Wrapper(net, "_orig_mod")
    model, state, optimizer = wrapped(form, net, **options)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    state.sync_buffers()
    names = sorted(state.worker.keys)
    state.worker.barrier()
    state.close()
    return names, {str(at): value.clone() for at, value in enumerate(net.state_dict().values())}


@pytest.mark.parametrize("form", ["ddp", "powersgd", "box", "factors", "unused"])
def test_wrapped_modules_have_the_plain_names(box, start, form):
    options = COPIED[form][1]
    if "factors" in options:
        options = {"factors": {"[ab].weight": 8}}
    (names, one), (_, other) = start(trains_wrapped, 2, COPIED[form][0], options).results()
    assert not any("_orig_mod" in name or "_wrapped" in name for name in names)
    assert_same_bits(one, other)
