"""PowerSGD through the box, compared with NumPy's QR; and parameters that share a key."""

import math

import numpy as np
import pytest
import torch
from conftest import SEED, of_ranks, refused
from exact import assert_same_bits, gradients_of, job, mean, parameters_of
from models import descend, differ, recorded
from torch import nn

import phub
from phub._gathered import Gathered, gathered_of
from phub._powersgd import orthonormal, product

RANK = 2
TRANSPORTS = ("shm", "tcp")
MATRICES = {"0.weight": (8, 9), "3.weight": (30, 128), "5.weight": (24, 30)}


class Net(nn.Sequential):
    """With a convolution, whose weight is a matrix too; the last one is too small."""

    def __init__(self):
        torch.manual_seed(SEED)
        first = nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten()
        lines = nn.Linear(128, 30), nn.Tanh(), nn.Linear(30, 24), nn.Tanh(), nn.Linear(24, 3)
        super().__init__(*first, *lines)


def is_matrix(name):
    return name in MATRICES


def loss_of(wrapped, rank, step, kind=torch.float32):
    random = torch.Generator().manual_seed(SEED + 1000 * step + rank)
    inputs = torch.randn(6, 1, 8, 8, generator=random)
    return (wrapped(inputs.to(kind)).float() - inputs.mean()).square().sum()


def trains(rank, steps, options, spoilt=None, kind=torch.float32):
    """(own gradients of each step, means, the first factors, residuals in the end, parameters)"""
    net = Net().to(kind)
    differ(net, rank)
    wrapped, own = recorded(net, **{"powersgd": RANK, **options})
    factors = {name: part["q"] for name, part in wrapped.phub.powersgd.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    means = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(wrapped, rank, step, kind)
        if (rank, step) == spoilt:
            loss = loss * math.inf
        loss.backward()
        means.append(gradients_of(net))
        if step != (spoilt or (0, None))[1]:
            optimizer.step()
    state, worker = wrapped.phub.powersgd.state_dict(), wrapped.phub.worker
    whole = getattr(options.get("powersgd"), "start", 0)
    rounds = {key: whole if is_matrix(key) else steps for key in worker.keys}
    rounds |= {key: steps - whole for key in rounds if ":" in key}
    assert {key: worker.round(key) for key in worker.keys} == rounds
    wrapped.phub.close()
    residuals = {name: part["residual"] for name, part in state.items()}
    return own, means, factors, residuals, parameters_of(net)


class Oracle:
    """Algorithms 1 and 2 of the paper, in double precision, with NumPy's QR."""

    def __init__(self, q, world):
        self.q, self.residuals = q.numpy().T.astype(float), [0.0] * world

    def step(self, gradients):
        flat = [g.double().numpy().reshape(len(g), -1) for g in gradients]
        if not np.isfinite(flat).all():
            return np.full(flat[0].shape, math.nan)
        deltas = [g + e for g, e in zip(flat, self.residuals, strict=True)]
        p, _ = np.linalg.qr(sum(delta @ self.q for delta in deltas) / len(deltas))
        qs = [delta.T @ p for delta in deltas]
        self.residuals = [d - p @ q.T for d, q in zip(deltas, qs, strict=True)]
        self.q = sum(qs) / len(qs)
        return p @ self.q.T


def assert_close(found, expected, tolerance=2e-4):
    difference = found.double().numpy().reshape(expected.shape) - expected
    assert np.linalg.norm(difference) <= tolerance * np.linalg.norm(expected)


def check(results, steps, tolerance=2e-4):
    """All gradients of all ranks."""
    own, means, factors, residuals, parameters = zip(*results, strict=True)
    oracles = {name: Oracle(q, len(results)) for name, q in factors[0].items()}
    assert oracles.keys() == MATRICES.keys()
    for step in range(steps):
        for name, found in means[0][step].items():
            gradients = [of_rank[step][name] for of_rank in own]
            if is_matrix(name):
                expected = oracles[name].step(gradients)
                if not np.isnan(expected).any():
                    assert_close(found, expected, tolerance)
                assert found.isnan().all() == np.isnan(expected).any(), (name, step)
            elif found.isfinite().all():
                expected = mean([g.float() for g in gradients])
                assert_close(found, expected.double().numpy(), 1e-2)
        for other in means[1:]:
            for name, found in means[0][step].items():
                assert torch.equal(found.nan_to_num(7), other[step][name].nan_to_num(7)), name
    for each in parameters[1:]:
        assert_same_bits(each, parameters[0])
    for name, oracle in oracles.items():
        for found, expected in zip(residuals, oracle.residuals, strict=True):
            assert_close(found[name], expected, 20 * tolerance)


CODED = {"gradient_dtype": "topk", "formats": {"*": "f16", "*.bias": "bf16"}}


@pytest.mark.parametrize(
    ("world", "options", "kind"),
    [
        *((world, {"transport": way}, torch.float32) for world in (1, 2, 3) for way in TRANSPORTS),
        (2, CODED, torch.float32),
        (2, {}, torch.bfloat16),
    ],
)
def test_gradients_are_those_of_the_paper(box, start, world, options, kind):
    results = start(trains, world, 5, options, None, kind).results()
    check(results, 5, 2e-4 if kind == torch.float32 else 1e-2)
    if kind == torch.float32:  # plain keys are exact if they have no format
        for step in range(5):
            for name, found in results[0][1][step].items():
                exact = mean([own[step][name] for own, *_ in results])
                is_exact = not is_matrix(name) and "formats" not in options
                assert torch.equal(found, exact) == is_exact, (step, name)


@pytest.mark.parametrize("excluded", [False, True])
def test_an_overflow_is_nan_on_all_ranks_or_excluded_and_leaves_no_trace(box, start, excluded):
    options = {"on_nonfinite": "exclude"} if excluded else {}
    results = start(trains, 3, 5, options, (1, 2)).results()
    if not excluded:
        check(results, 5)
    assert_same_bits(results[0][1][3:], results[1][1][3:])
    for _, means, _, residuals, _ in results:
        for name, gradient in means[2].items():
            assert excluded or gradient.isnan().all() or not is_matrix(name)
        finite = means if excluded else means[3:]
        assert all(g.isfinite().all() for step in finite for g in step.values())
        assert all(e.isfinite().all() for e in residuals.values())


# ---- The parts.


def test_columns_become_orthonormal():
    random = np.random.default_rng(SEED)
    for rows, length in ((1, 1), (1, 65), (3, 64), (4, 1000), (5, 4097)):
        given = random.standard_normal((rows, length)) * 10.0 ** random.integers(-12, 12, (rows, 1))
        given[-1] += 3000 * given[0]  # nearly the same
        given = given.astype(np.float32)
        found = orthonormal(torch.from_numpy(given.copy())).numpy().astype(float)
        assert np.abs(found @ found.T - np.eye(rows)).max() < 1e-6
        expected, _ = np.linalg.qr(given.T.astype(float))
        assert np.abs(found - found @ expected @ expected.T).max() < 1e-5  # the same space


def test_what_others_have_already_is_zero():
    given = torch.tensor([[3.0, 4, 0], [0, 0, 0], [-6, -8, 0], [1, 1, 1e-20], [0, 0, -1e-20]])
    expected = torch.tensor([[0.6, 0.8, 0], [0, 0, 0], [0, 0, 0], [0.8, -0.6, 0], [0, 0, -1]])
    assert torch.allclose(orthonormal(given), expected, atol=1e-6)
    assert orthonormal(torch.tensor([[1.0, 2], [math.inf, 0]])) is None
    assert orthonormal(torch.tensor([[1.0, math.nan], [1, 0]])) is None


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_products_add_in_order(kind):
    random = torch.Generator().manual_seed(SEED)
    left, right = torch.randn(5, 700, generator=random), torch.randn(5, 300, generator=random)
    found = torch.empty(700, 300, dtype=kind)
    product(left, right, found)
    expected = np.zeros((700, 300), np.float32)
    for p, q in zip(left.numpy(), right.numpy(), strict=True):
        expected += np.outer(p, q)
    assert torch.equal(found, torch.from_numpy(expected).to(kind))


@of_ranks(2)
def test_columns_that_were_not_needed_come_back(rank):
    """The second one with the first gradient that needs it."""
    net = nn.Linear(40, 30, bias=False)
    wrapped = phub.ddp(net, powersgd=RANK)
    for columns, inputs in enumerate((torch.zeros(1, 40), torch.ones(1, 40), torch.eye(2, 40))):
        net.zero_grad()
        wrapped(inputs)[:, : len(inputs)].trace().backward()
        expected = torch.zeros(30, 40)
        expected[: len(inputs)] = inputs
        assert torch.allclose(net.weight.grad, expected, atol=1e-4), columns
        assert columns > 0 or not net.weight.grad.any()
    wrapped.phub.worker.barrier()


@of_ranks(2)
def test_only_factors_are_sent(rank):
    wrapped = phub.ddp(Net(), powersgd=RANK, chunk_elements=32)
    before = wrapped.phub.worker.stats.chunks_pushed
    loss_of(wrapped, rank, 0).backward()
    sizes = [RANK * size for shape in MATRICES.values() for size in shape]
    sizes += [p.numel() for name, p in Net().named_parameters() if not is_matrix(name)]
    sent = wrapped.phub.worker.stats.chunks_pushed - before
    assert sent == sum(-(-size // 32) for size in sizes)


@of_ranks(1)
def test_gradients_may_accumulate_and_lie_in_another_order(rank):
    """Of dimensions; the residual has the order of the parameter's indices all the same."""
    net = nn.Conv2d(8, 32, 3, bias=False).to(memory_format=torch.channels_last)
    alone = nn.Conv2d(8, 32, 3, bias=False)
    alone.load_state_dict(net.state_dict())
    wrapped = phub.ddp(net, powersgd=4)
    lost = torch.zeros(32, 8, 3, 3)
    for step in range(3):
        net.zero_grad()
        inputs = torch.randn(2, 2, 8, 6, 6, generator=torch.Generator().manual_seed(SEED + step))
        with wrapped.no_sync():
            wrapped(inputs[0]).square().sum().backward()
        wrapped(inputs[1]).square().sum().backward()
        alone(inputs.flatten(0, 1)).square().sum().backward()
        lost -= net.weight.grad
    lost += alone.weight.grad
    kept = wrapped.phub.powersgd.state_dict()["weight"]["residual"].view(32, 8, 3, 3)
    assert lost.norm() > 0.1 * alone.weight.grad.norm()
    assert torch.allclose(kept, lost, rtol=1e-3, atol=1e-4 * lost.norm())


# ---- Ranks that differ.


def begins_with_other_factors(rank):
    wrapped, own = recorded(Net(), powersgd=RANK)
    state = wrapped.phub.powersgd.state_dict()
    for part in state.values():
        part["q"] += rank
    wrapped.phub.powersgd.load_state_dict(state)
    results = []
    for step in range(2):
        wrapped.zero_grad()
        loss_of(wrapped, rank, step).backward()
        results.append(gradients_of(wrapped.module))
    return own, results, wrapped.phub.powersgd.state_dict()


def test_ranks_may_begin_with_other_factors(box, start):
    """The result is of their mean; from then on factors are the same."""
    one, other = start(begins_with_other_factors, 2).results()
    for step in range(2):
        assert_same_bits(one[1][step], other[1][step])
    for name in MATRICES:
        assert torch.equal(one[2][name]["q"], other[2][name]["q"])
        own, sent = (
            sum(each[part][step][name].flatten(1) for each in (one, other) for step in range(2))
            for part in range(2)
        )
        kept = sum(each[2][name]["residual"] for each in (one, other))
        assert torch.allclose(sent + kept, own, rtol=1e-4, atol=2e-4)  # nothing is lost


class Branches(nn.Module):
    """Ranks have their gradients in another order."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(SEED)
        self.branches = nn.ModuleList(nn.Linear(40, 30) for _ in range(4))
        self.order = [0, 1, 2, 3] if rank == 0 else [3, 1, 0, 2]

    def forward(self, x):
        return sum(self.branches[k](x) for k in self.order).square().mean()


@of_ranks(2)
def test_buckets_may_come_in_any_order(rank):
    wrapped = phub.ddp(Branches(rank), powersgd=1, ddp_options={"bucket_cap_mb": 1e-4})
    for step in range(4):
        wrapped.zero_grad()
        wrapped(torch.full((2, 40), step + rank + 1.0)).backward()
    return gradients_of(wrapped.module)


# ---- What a rank saves.


def go_on(net, rank, name, steps, state=None, powersgd=RANK):
    wrapped = phub.ddp(net, powersgd=powersgd, job=job(name))
    if state:
        wrapped.phub.powersgd.load_state_dict(state)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for step in steps:
        descend(optimizer, loss_of(wrapped, rank, step))
    wrapped.phub.worker.barrier()
    state = wrapped.phub.powersgd.state_dict()
    wrapped.phub.close()
    return state


@of_ranks(2)
def test_a_training_goes_on_from_its_state_to_the_bit(rank):
    whole, again = Net(), Net()
    go_on(whole, rank, "whole", range(5))
    go_on(again, rank, "second", range(2, 5), go_on(again, rank, "first", range(2)))
    assert_same_bits(parameters_of(whole), parameters_of(again))


# ---- The first steps.


@pytest.mark.parametrize("options", [{}, {"transport": "tcp"}, {"formats": {"5.weight": "f16"}}])
def test_the_first_gradients_go_whole(box, start, options):
    first, steps = 2, 5
    how = {"powersgd": phub.PowerSGD(RANK, start=first), **options}
    own, means, *rest = zip(*start(trains, 2, steps, how).results(), strict=True)
    for step in range(first):
        for name, found in means[0][step].items():
            exact = mean([of_rank[step][name] for of_rank in own])
            is_coded = name in options.get("formats", ())
            assert torch.equal(found, exact) != is_coded, (step, name)
            assert_close(found, exact.double().numpy(), 1e-3)
    later = ([of_rank[first:] for of_rank in each] for each in (own, means))
    check(list(zip(*later, *rest, strict=True)), steps - first)


@of_ranks(2)
def test_a_training_that_goes_on_knows_how_many_were_whole(rank):
    whole, again = Net(), Net()
    how = {"powersgd": phub.PowerSGD(RANK, start=3)}
    go_on(whole, rank, "whole", range(5), **how)
    state = go_on(again, rank, "first", range(2), **how)
    assert {int(part["steps"]) for part in state.values()} == {2}
    go_on(again, rank, "second", range(2, 5), state, **how)
    assert_same_bits(parameters_of(whole), parameters_of(again))


def starts(rank):
    with pytest.raises(phub.Error) as raised:
        phub.ddp(Net(), powersgd=phub.PowerSGD(RANK, start=1 + rank), join_limit_ms=3000)
    return raised.type, str(raised.value)


def test_ranks_that_start_at_other_steps_are_told(box, start):
    told = dict(start(starts, 2).results())
    assert "'0.weight:P@" in told[phub.MismatchError]


@of_ranks(1)
def test_how_many_times_smaller_factors_are_is_a_setting(rank):
    how = phub.PowerSGD(RANK, least_ratio=5)
    wrapped = phub.ddp(Net(), powersgd=how)
    assert [*wrapped.phub.powersgd.state_dict()] == ["3.weight", "5.weight"]


@of_ranks(1)
def test_the_state_of_another_model_is_refused(rank):
    powersgd = phub.ddp(Net(), powersgd=RANK).phub.powersgd
    state = powersgd.state_dict()
    state["3.weight"]["q"] = state["3.weight"]["q"][:1]
    refused(r"no q of \(2, 128\) for '3.weight'", powersgd.load_state_dict, state)
    state = powersgd.state_dict()
    state["3.weight"]["steps"] = torch.tensor([1, 2])
    refused("the steps of '3.weight' are", powersgd.load_state_dict, state)
    state["3.weight"]["steps"] = torch.tensor(-1)
    refused("the steps of '3.weight' are", powersgd.load_state_dict, state)
    del state["0.weight"]
    refused("the state is of 3.weight, 5.weight", powersgd.load_state_dict, state)


# ---- Small parameters are exchanged together: the same bits, checks and names.

LAYERS = 150  # two small parameters each


class Deep(nn.Module):
    """Many small layers between larger ones; one has half precision, one another order."""

    def __init__(self, odd=0):
        torch.manual_seed(SEED)
        super().__init__()
        self.first = nn.Linear(40, 60)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(LAYERS))
        self.blocks[7] = nn.Linear(3, 3 + odd)
        self.short = nn.Parameter(torch.randn(5, 5).bfloat16())
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.single = nn.Parameter(torch.tensor(0.5))
        self.last = nn.Linear(60, 40)

    def forward(self, x):
        y = self.last(self.first(x)).sum() + self.short.float().sum() * x.mean()
        y = y + (self.turned * x[0, :24].view(6, 4)).sum() * self.single
        for at, block in enumerate(self.blocks):
            y = y + block(x[:, at % 30 : at % 30 + 3]).pow(2).sum()
        return y


def trains_deep(rank, options, ddp_options):
    model = Deep()
    differ(model, rank)
    options = {"ddp_options": {"bucket_cap_mb": 0.01, **ddp_options}, **options}
    wrapped, own = recorded(model, **options)
    first = parameters_of(model)
    means = []
    for step in range(3):  # DDP makes its buckets anew after the first one
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(SEED + 7 * step + rank))
        model.zero_grad()
        if step == 2:
            with wrapped.no_sync():
                wrapped(x).backward()
        wrapped(x).backward()
        means.append(gradients_of(model))
    keys, matrices = wrapped.phub.worker.keys, wrapped.phub.powersgd
    wrapped.phub.close()
    return first, own, means, keys, [n for n in first if matrices and matrices.get(n)]


@pytest.mark.parametrize(
    ("options", "ddp_options"),
    [
        ({"transport": "shm"}, {}),
        ({"transport": "tcp"}, {"gradient_as_bucket_view": False}),
        ({"powersgd": 1}, {}),
    ],
)
def test_gathered_results_are_those_of_keys_of_their_own(box, start, options, ddp_options):
    results = start(trains_deep, 2, options, ddp_options).results()
    first = parameters_of(Deep())
    for begun, _, means, keys, matrices in results:
        assert len(keys) < 12
        assert "small-parameters:0" in keys
        assert_same_bits(begun, first)
        for step, found in enumerate(means):
            for name in found.keys() - set(matrices):
                expected = mean([own[step][name].float() for _, own, *_ in results])
                assert torch.equal(found[name], expected.to(found[name].dtype)), (step, name)


def joins(rank):
    with pytest.raises(phub.Error) as raised:
        phub.ddp(Deep(odd=rank), join_limit_ms=3000)
    return raised.type, str(raised.value)


def test_ranks_with_other_small_parameters_are_told_which(box, start):
    told = dict(start(joins, 2).results())
    assert phub.MismatchError in told
    assert "'blocks.7.bias' has" in told[phub.MismatchError]


@of_ranks(2)
def test_what_a_step_left_is_forgotten(rank):
    model = Deep()
    wrapped = phub.ddp(model, ddp_options={"bucket_cap_mb": 0.01})
    wrapped(torch.ones(1, 40)).backward()
    gathered = wrapped.phub._gathered
    stale = next(name for name, _ in gathered.places())
    gathered._group_of[stale].lend(stale, torch.full((9,), 9.0))  # of a step that never was
    model.zero_grad()
    wrapped(torch.full((1, 40), rank + 1.0)).backward()
    return gradients_of(model)


def parameters(number, elements=8):
    return {f"p{i}": nn.Parameter(torch.zeros(elements)) for i in range(number)}


def test_what_would_change_is_not_gathered():
    given = {"gradient_dtype": "f32", "parameter_dtype": "bf16", "on_nonfinite": "pass"}
    many = parameters(300)
    assert len(gathered_of(many, {}, given).groups) == 1
    assert gathered_of(parameters(100), {}, given) is None
    assert gathered_of(parameters(300, 5000), {}, given) is None
    for other in ({"gradient_dtype": "int8"}, {"on_nonfinite": "stop"}):
        assert gathered_of(many, {}, given | other) is None
    left = gathered_of(many, {"p2*": "int8"}, given)
    assert left is None or "p21" not in left
    assert gathered_of(many, {"p29?": "f16"}, given) is not None
    assert "p291" not in gathered_of(many, {"p29?": "f16"}, given)


def test_groups_have_room_for_all():
    gathered = Gathered(parameters(100, 1000))
    assert [len(group.places) for group in gathered.groups] == [32, 32, 32, 4]
    places = [place for _, place in gathered.places()]
    assert len({place.data_ptr() for place in places}) == 100
