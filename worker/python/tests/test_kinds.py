"""Parameters and buffers of unusual kinds, copies of models, and models of another order."""

import copy

import pytest
import torch
from conftest import leave, of_ranks, refused
from exact import assert_same_bits, job, mean, parameters_of, saved
from models import Branches, descend, make_net, train, wrapped
from torch import nn
from torch.distributed.algorithms import Join
from torch.optim.swa_utils import AveragedModel

import phub

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


FORMS = {
    "ddp": ("ddp", {}),
    "powersgd": ("ddp", {"powersgd": 1}),
    "box": ("box", {}),
    "forward": ("box", {"overlap": "forward"}),
    "zero copy": ("box", {"zero_copy": True}),
    "own steps": ("box", {"server": False}),
}
FACTORS = {"factors": {"[ab0].weight": 8}}
COPIED = {**FORMS, "factors": ("ddp", FACTORS), "factors at the box": ("box", FACTORS)}
COPIED["unused"] = "ddp", {"ddp_options": {"find_unused_parameters": True}}


@pytest.mark.parametrize("form", FORMS)
@of_ranks(2)
def test_a_model_may_have_what_is_not_exchanged(rank, form):
    net = Odd(rank)
    model, state, optimizer = wrapped(FORMS[form][0], net, **FORMS[form][1])
    train(optimizer, model, rank, range(3))
    trained = parameters_of(net.layer)
    before = {name: dense(b) for name, b in net.named_buffers()}
    for _ in range(2):
        state.sync_buffers()
    after = {name: dense(b) for name, b in net.named_buffers()}
    for name, (other, buffer) in enumerate(zip(Odd(rank).buffers(), net.buffers(), strict=True)):
        assert (buffer.dtype, buffer.layout) == (other.dtype, other.layout), name
    before["float8_buffer"] = after["float8_buffer"]  # the mean
    if rank == 0:
        assert_same_bits(after, before)
    leave(state)
    return trained, after


# ---- Copies.


COPIES = {"deepcopy": copy.deepcopy, "save": saved, "average": AveragedModel}


@pytest.mark.parametrize("form", COPIED)
@of_ranks(1)
def test_a_copy_is_a_model_of_its_own(rank, form):
    form, options = COPIED[form]
    inputs = torch.ones(2, 12)

    def assert_computes(model, expected):
        with torch.no_grad():
            assert torch.equal(model(inputs), expected)

    for way, made_copy in COPIES.items():
        model, state, optimizer = wrapped(form, make_net(), job=job(way), **options)
        train(optimizer, model, rank, [0])
        other = made_copy(model)
        with torch.no_grad():
            expected = model(inputs)
        assert_computes(other, expected)
        names = list(model.state_dict())
        if way == "average":
            names = ["n_averaged", *(f"module.{name}" for name in names)]
        assert list(other.state_dict()) == names
        train(optimizer, model, rank, [1, 2])
        with torch.no_grad():
            trained = model(inputs)
        assert not torch.equal(trained, expected)
        assert_computes(other, expected)  # it has memory of its own
        other.load_state_dict(other.state_dict())
        again = made_copy(other)
        if way == "average":
            other.update_parameters(model)
        else:
            other.load_state_dict(model.state_dict())
        leave(state)
        assert_computes(again, expected)
        assert_computes(other, trained)
        if form == "ddp":
            refused("nobody exchanges its gradients", lambda m=other: m(inputs).sum().backward())
        plain = other.module if way == "average" else other
        plain = plain.module if form == "ddp" else plain
        plain(inputs).sum().backward()  # the program's own
        assert plain[0].weight.grad is not None


# ---- What a rank does not use.


# By step and rank. Nobody uses branch 2 before the last step, nor branch 1 in the first.
USED = [((0,), (0,)), ((0, 1), (0,)), ((1,), (0,)), ((0,), (2,))]


@pytest.mark.parametrize("as_views", [True, False])
@of_ranks(2)
def test_what_only_some_ranks_use_gets_their_mean_everywhere(rank, as_views):
    net = Branches()
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": as_views}
    model = phub.ddp(net, ddp_options=options)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    expected = Branches()
    plain = torch.optim.SGD(expected.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    inputs = [torch.randn(5, 4, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    for used in USED:
        descend(optimizer, model(inputs[rank], used[rank]).square().sum())
        gradients = []
        for each in range(2):
            plain.zero_grad()
            expected(inputs[each], used[each]).square().sum().backward()
            gradients.append([p.grad for p in expected.parameters()])
        for p, of_p in zip(expected.parameters(), zip(*gradients, strict=True), strict=True):
            if any(g is not None for g in of_p):
                p.grad = mean([torch.zeros_like(p) if g is None else g for g in of_p])
        plain.step()
        assert_same_bits(net.state_dict(), expected.state_dict())
        given = [p.grad is None for p in net.parameters()]
        assert given == [p.grad is None for p in expected.parameters()]
    leave(model.phub)


@of_ranks(1)
def test_join_says_that_it_is_not_needed(rank):
    model = phub.ddp(make_net())
    for join in (lambda: Join([model]), model.join):
        refused("Join is not needed.*model.phub.close", join)


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


class Wrapper(nn.Module):
    """As torch.compile and checkpoint_wrapper do."""

    def __init__(self, module, name):
        super().__init__()
        self.inner = name
        self.add_module(name, module)

    def forward(self, x):
        return getattr(self, self.inner)(x)


def of_another_order(rank):
    return Ordered(("abc", "cba")[rank])


def of_wrapped_modules(rank):
    """On rank 1."""
    net = Ordered("abc")
    if rank == 0:
        return net
    net.b = Wrapper(net.b, "_checkpoint_wrapped_module")
    net.c = Wrapper(net.c, "_orig_mod")
    return Wrapper(net, "_orig_mod")


@pytest.mark.parametrize("make", [of_another_order, of_wrapped_modules])
@pytest.mark.parametrize("form", [form for form in COPIED if form != "forward"])
@of_ranks(2)
def test_keys_match_by_name(rank, form, make):
    """Those of wrapped modules are the plain ones."""
    torch.manual_seed(0)
    net = make(rank)
    model, state, optimizer = wrapped(COPIED[form][0], net, **COPIED[form][1])
    train(optimizer, model, rank, range(3))
    state.sync_buffers()
    found = {
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): value.clone()
        for name, value in net.state_dict().items()
    }
    keys = sorted(state.worker.keys)
    leave(state)
    return keys, dict(sorted(found.items()))
