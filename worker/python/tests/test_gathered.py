"""Small parameters are exchanged together under phub.ddp: the same bits, checks and names."""

import pytest
import torch
from conftest import SEED, of_ranks
from exact import assert_same_bits, gradients_of, mean, parameters_of
from models import recorded
from torch import nn

import phub
from phub._gathered import Gathered, gathered_of

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


def trains(rank, options, ddp_options):
    model = Deep()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)  # rank 0's count
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
def test_results_are_those_of_keys_of_their_own(box, start, options, ddp_options):
    results = start(trains, 2, options, ddp_options).results()
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
    try:
        phub.ddp(Deep(odd=rank), join_limit_ms=3000)
    except phub.Error as error:
        return type(error), str(error)
    return None, ""


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
