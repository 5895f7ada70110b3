"""Trainings through the box, compared with one process that averages in rank order."""

import copy
import multiprocessing
import os
import signal
import time
from unittest.mock import Mock

import pytest
import torch
from conftest import SEED, of_ranks
from exact import assert_same_bits, gradients_of, job, mean, parameters_of, replay
from models import GPT, ResNet, image_batch, recorded, text_batch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import phub
from phub import _alone

BUCKETS = {"ddp_options": {"bucket_cap_mb": 0.05}}  # several
KINDS = {
    "gpt": (lambda: GPT(width=48, blocks=2), text_batch),
    "large gpt": (GPT, text_batch),
    "resnet": (ResNet, image_batch),
}


def model_of(kind="gpt"):
    torch.manual_seed(SEED)
    return KINDS[kind][0]()


def batch_of(rank, step, kind="gpt"):
    return KINDS[kind][1](rank, SEED + step)


def optimizer_of(model):
    """Two groups, weight decay, and a schedule."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0, foreach=False)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)


def train(rank, wrapped, steps, kind="gpt"):
    """The losses."""
    optimizer, schedule = optimizer_of(wrapped)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = wrapped(batch_of(rank, step, kind))
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def assert_replayed(results, kind="gpt"):
    """Of (gradients of all steps, parameters) by rank."""
    gradients, parameters = zip(*results, strict=True)
    model = model_of(kind)
    expected = replay(gradients, model, *optimizer_of(model), at_box=False)
    for each in parameters:
        assert_same_bits(each, expected)
    for each in gradients[1:]:  # or the ranks had the same batches
        assert not all(torch.equal(g, each[0][name]) for name, g in gradients[0][0].items())


def trains(rank, kind, transport):
    model = model_of(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)  # rank 0's count
    wrapped, gradients = recorded(model, transport=transport, **BUCKETS)
    assert wrapped.phub.worker.connection.startswith(transport)
    train(rank, wrapped, 6, kind)
    wrapped.phub.close()
    return gradients, parameters_of(model)


@pytest.mark.parametrize(
    ("kind", "world", "transport"),
    [
        *(("gpt", world, transport) for world in (1, 2, 4) for transport in ("shm", "tcp")),
        ("large gpt", 2, "shm"),
        ("resnet", 3, "shm"),
    ],
)
def test_parameters_are_those_of_one_process_to_the_bit(box, start, kind, world, transport):
    assert_replayed(start(trains, world, kind, transport).results(), kind)


# ---- Beside PyTorch's own DDP.


def losses_of(rank, way, store, steps):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    model = model_of()
    if way == "box":
        return train(rank, phub.ddp(model), steps)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.05)
    state = None
    if way == "hook":
        state = phub.DDPState(wrapped.module)
        wrapped.register_comm_hook(state, phub.ddp_hook)
    losses = train(rank, wrapped, steps)
    if state:
        state.close()
    distributed.destroy_process_group()
    return losses


def test_losses_are_those_of_ddp_on_gloo(box, start, tmp_path):
    """The hook works in DDP over all ranks, too."""
    ways = ("gloo", "box", "hook")
    gloo, *ours = (start(losses_of, 2, way, tmp_path / way, 15).results() for way in ways)
    for each in ours:
        assert_near = torch.testing.assert_close
        assert_near(torch.tensor(each), torch.tensor(gloo), rtol=0, atol=1e-4)
    for one in gloo:
        assert sum(one[-5:]) < sum(one[:5])  # it learns


# ---- Accumulation, clipping, scaling.


def accumulates(rank):
    model = model_of()
    wrapped, gradients = recorded(model, **BUCKETS)
    optimizer, schedule = optimizer_of(model)
    alone = model_of()  # sums the same batches' gradients without DDP
    for step in range(3):
        alone.load_state_dict(model.state_dict())
        alone.zero_grad()
        optimizer.zero_grad()
        for part in range(3):
            batch = batch_of(rank, 3 * step + part)
            alone(batch).backward()
            if part < 2:
                with wrapped.no_sync():
                    wrapped(batch).backward()
            else:
                wrapped(batch).backward()
        torch.testing.assert_close(gradients[step], gradients_of(alone), rtol=1e-4, atol=1e-6)
        assert wrapped.phub.worker.round("last.weight") == step + 1
        optimizer.step()
        schedule.step()
    return gradients, parameters_of(model)


def test_what_ddp_calls_of_a_group_does_not_reach_gloo():
    """Its thread and the program's could wait for each other for ever: see _alone.Group."""
    assert {"allgather", "allreduce", "broadcast"} <= set(vars(_alone.Group))


def test_no_sync_accumulates(box, start):
    assert_replayed(start(accumulates, 2).results())


@of_ranks(2)
def test_clipping_and_grad_scaler(rank):
    model = model_of()
    wrapped = phub.ddp(model)
    optimizer, _ = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    norms, scales, changed = [], [], []
    for step in range(4):
        before = parameters_of(model)
        optimizer.zero_grad()
        loss = wrapped(batch_of(rank, step))
        if step == 2 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed.append(any(not torch.equal(p, before[n]) for n, p in model.named_parameters()))
    assert scales == [1024, 1024, 512, 512]
    assert changed == [True, True, False, True]  # nobody steps where one rank overflows
    assert norms[0] > 0.5
    return norms[:2], parameters_of(model)


# ---- What fails.

FORMS = pytest.mark.parametrize("form", [{}, {"powersgd": 2}], ids=["whole", "powersgd"])


def trains_on(rank, reports, options):
    model = model_of()
    wrapped = phub.ddp(model, **options)
    optimizer, _ = optimizer_of(model)
    for step in range(6):
        optimizer.zero_grad()
        wrapped(batch_of(rank, step)).backward()
        optimizer.step()
        reports.put((rank, step))
        if rank == 1 and step == 2:
            time.sleep(600)
    return parameters_of(model)


def started(start, world, options, **environment):
    """Ranks of which rank 1 has done 3 of 6 steps, and hangs."""
    reports = multiprocessing.get_context("fork").Queue()
    ranks = start(trains_on, world, reports, options, **environment)
    while reports.get(timeout=120) != (1, 2):
        pass
    return ranks


@pytest.mark.parametrize(
    ("end", "form"),
    [(signal.SIGKILL, {}), (signal.SIGSTOP, {}), (signal.SIGKILL, {"powersgd": 2})],
)
def test_the_others_go_on_when_a_rank_is_killed_or_hangs(box, start, end, form):
    ranks = started(start, 4, {"on_loss": "shrink", **form})
    ranks.kill(1, end)
    results = [ranks.result(rank) for rank in (0, 2, 3)]  # long before the limit of progress
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


@FORMS
def test_backward_raises_the_error_of_the_box(box, start, form):
    ranks = started(start, 2, {"on_loss": "fail", **form})
    ranks.kill(1)
    with pytest.raises(phub.RankLostError, match="rank 1"):
        ranks.result(0)


@FORMS
def test_backward_raises_when_the_box_is_gone(own_box, start, form):
    ranks = started(start, 2, form, PHUB_SERVER=own_box.address, PHUB_JOB="gone")
    own_box.kill()
    with pytest.raises(phub.UnavailableError):
        ranks.result(0)


@FORMS
def test_ctrl_c_ends_backward(box, start, form):
    ranks = started(start, 2, form)
    time.sleep(0.3)  # so that rank 0 probably waits for rank 1; it is right either way
    ranks.kill(0, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        ranks.result(0)  # long before the limit of progress


@FORMS
@of_ranks(1)
def test_a_rank_that_joins_later_is_told_why_it_cannot(rank, form):
    first = phub.ddp(model_of(), max_ranks=2, **form)
    first(batch_of(0, 0)).backward()
    with pytest.raises(phub.InvalidError, match="cannot join later"):
        phub.ddp(model_of(), max_ranks=2, rank=1, **form)


# ---- What is refused, and what is left alone.


def mlp():
    return nn.Sequential(nn.Linear(20, 70), nn.Tanh(), nn.Linear(70, 33), nn.Linear(33, 5))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: nn.Linear(2, 2).double(), {}, "'weight' is torch.float64"),
        (lambda: nn.Linear(2, 2, device="meta"), {}, "'weight' is torch.float32 on meta"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), {}, "no parameter"),
        (mlp, {"find_unused_parameters": True}, r"ddp_options=\{'find_unused_parameters': True\}"),
        (mlp, {"factors": {"7.weight": 4}}, "none of the model's 3 weights of nn.Linear matches"),
        (mlp, {"factors": {"*": 0}}, "has 0 samples; at least 1"),
        (mlp, {"factors": {"*": True}}, "has True samples"),
        (mlp, {"factors": {"*": 2.5}}, "has 2.5 samples"),
        (
            lambda: mlp().bfloat16(),
            {"factors": {"0.weight": 2}},
            "float32 on the CPU, and '0.weight' is torch.bf",
        ),
        (
            mlp,
            {"factors": {"0.weight": 4}, "formats": {"0.w*": "int8"}},
            "'0.weight' alone.*as factors of samples",
        ),
        (mlp, {"powersgd": 0}, "powersgd=0: .* at least 1"),
        (mlp, {"powersgd": True}, "powersgd=True"),
        (mlp, {"powersgd": "4"}, "powersgd='4'"),
        (mlp, {"powersgd": 2.5}, "powersgd=2.5"),
        (mlp, {"powersgd": 100}, "powersgd=100: no parameter .* smaller rank"),
        (mlp, {"powersgd": 2, "consistency": "ssp"}, "consistency='ssp'"),
        (
            mlp,
            {"powersgd": 2, "formats": {"*.bias": "bf16", "2.weight": "int8"}},
            r"'2\.weight'.* go as PowerSGD's factors",
        ),
        (
            mlp,
            {"powersgd": 2, "formats": {"*.bias": "bf16", "2.w*": "f16"}},
            r"'2\.weight'.* go as PowerSGD's factors",
        ),
        (
            mlp,
            {"powersgd": 2, "formats": {"none": "int8"}},
            "no name of the .* keys .* matches 'none'",
        ),
        (mlp, {"formats": {"*.wieght": "int8"}}, "wieght"),
        (mlp, {"memory_device": 0}, "is 0, and the parameters are on cpu"),
    ],
)
def test_what_cannot_be_exchanged_is_refused(box, make, options, message):
    with pytest.raises((phub.InvalidError, phub.NotFoundError), match=message):
        phub.ddp(make(), **options)


@of_ranks(1)
def test_the_buckets_of_the_first_step_do_not_live_on(rank):
    wrapped = phub.ddp(model_of())

    def lent():
        return [m for pair in wrapped.phub.worker._owners.values() for m in pair if m.address]

    wrapped(batch_of(rank, 0)).backward()
    assert not lent()  # DDP makes new ones
    wrapped(batch_of(rank, 1)).backward()
    assert len(lent()) == 2 * len(wrapped.phub.worker.keys)


def test_keys_have_the_shapes_of_parameters(monkeypatch):
    worker = Mock()
    worker.return_value.world_size = 1
    monkeypatch.setattr("phub.pytorch.Worker", worker)
    model = nn.Sequential(nn.Linear(4, 3), nn.PReLU())
    model.deep = nn.Parameter(torch.zeros((2,) * 9))  # more dimensions than a key may have
    model.single = nn.Parameter(torch.tensor(1.0))
    phub.DDPState(model).close()
    shapes = {name: key.shape for name, key in worker.call_args.args[0].items()}
    assert shapes == {
        "0.weight": (3, 4),
        "0.bias": (3,),
        "1.weight": (1,),
        "deep": (),
        "single": (),
    }


@of_ranks(1)
def test_what_changed_after_ddp_was_made_is_refused(rank):
    def refused(message, forward, *shape):
        with pytest.raises(phub.InvalidError, match=message):
            forward(torch.ones(1, *shape)).sum().backward()

    wrapped = phub.ddp(nn.Linear(2, 2), job=job("another module"))
    wrapped.phub._name_of.clear()
    refused("shape.*is not in the module", wrapped, 2)

    convolution = nn.Sequential(nn.Conv2d(3, 4, 3))
    wrapped = phub.ddp(convolution, job=job("order"))
    convolution.to(memory_format=torch.channels_last)
    refused(r"'0\.weight' had strides", wrapped, 3, 4, 4)

    sparse = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    wrapped = phub.ddp(sparse, job=job("sparse"))
    with pytest.raises(phub.InvalidError, match=r"\(10, 4\) is torch.sparse_coo: .*sparse=False"):
        wrapped(torch.tensor([1, 2])).sum().backward()

    for bare in (False, True):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        net[0].weight.requires_grad_(requires_grad=False)
        if bare:
            state = phub.DDPState(net, job=job("bare"))
            wrapped = DistributedDataParallel(net, process_group=_alone.Group())
            wrapped.register_comm_hook(state, phub.ddp_hook)
        else:
            wrapped = phub.ddp(net, job=job("trainable"))
        wrapped(torch.ones(1, 4)).sum().backward()
        net[0].weight.requires_grad_()
        refused(r"'0\.weight' requires a gradient now", wrapped, 4)
    assert not distributed.is_initialized()  # the default group is the program's


class Ordered(nn.Module):
    """Its parameters have another order in memory on rank 0, and one has gaps on rank 1."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(SEED)
        self.convolution, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(36, 6)
        self.last = nn.Linear(6, 40, bias=False)
        if rank == 0:
            self.to(memory_format=torch.channels_last)
            turned = self.linear.weight.detach().t().contiguous().t()
            self.linear.weight = nn.Parameter(turned)
        if rank == 1:
            wide = torch.zeros(40, 8)
            wide[:, :6] = self.last.weight.detach()
            self.last.weight = nn.Parameter(wide[:, :6])

    def forward(self, x):
        return self.last(self.linear(self.convolution(x).flatten(1))).pow(2).sum()


def ordered_gradients(rank, options):
    """Of two steps, the second with DDP's new buckets; and what the ranks' own mean is."""
    net = Ordered(rank)
    batches = [
        torch.randn(1, 3, 5, 5, generator=torch.Generator().manual_seed(r)) for r in range(2)
    ]
    own = []
    for batch in batches:
        net.zero_grad()
        net(batch).backward()
        own.append(gradients_of(net))
    if options.get("server") is False:
        wrapped, optimizer = net, torch.optim.SGD(net.parameters(), 0.0)
        step = phub.DistributedOptimizer(optimizer, net, **options).step
    else:
        wrapped, step = phub.ddp(net, **options), lambda: None
    for _ in range(2):
        net.zero_grad()
        wrapped(batches[rank]).backward()
        step()
    expected = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
    torch.testing.assert_close(gradients_of(net), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "shm"},
        {"transport": "tcp", "ddp_options": {"gradient_as_bucket_view": False}},
        {"server": False},
        {"powersgd": 2},  # a sample of each of two ranks: what two columns hold
    ],
)
def test_parameters_may_have_another_order_in_memory(box, start, options):
    start(ordered_gradients, 2, options).results()


def in_other_formats(rank, dtypes):
    torch.manual_seed(SEED)
    model = nn.ModuleList(nn.Linear(8, 8, bias=False).to(dtype) for dtype in dtypes)
    model.forward = lambda x: model[1](model[0](x.to(dtypes[0])).to(dtypes[1]))
    first = copy.deepcopy(parameters_of(model))
    if rank == 1:
        nn.init.zeros_(model[0].weight)
    wrapped, own = recorded(model)
    assert_same_bits(parameters_of(model), first)
    wrapped(torch.full((1, 8), rank + 1.0)).float().sum().backward()
    assert [own[0][f"{at}.weight"].dtype for at in range(2)] == list(dtypes)
    return own[0], gradients_of(model)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_other_formats_and_mixtures(box, start, dtypes):
    own, found = zip(*start(in_other_formats, 2, dtypes).results(), strict=True)
    assert not torch.equal(own[0]["1.weight"], own[1]["1.weight"])
    expected = {
        name: mean([each[name].float() for each in own]).to(gradient.dtype)
        for name, gradient in own[0].items()
    }
    for each in found:
        assert_same_bits(each, expected)


def has_results_of_16_bits(rank):
    model = model_of()
    first = parameters_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)  # rank 0's count
    wrapped, gradients = recorded(model, parameter_dtype="bf16", **BUCKETS)
    assert_same_bits(parameters_of(model), first)  # they are not results
    wrapped(batch_of(rank, 0)).backward()
    return gradients[0], gradients_of(model)


def test_results_of_16_bits_leave_parameters_alone(box, start):
    gradients, found = zip(*start(has_results_of_16_bits, 2).results(), strict=True)
    means = {name: mean([each[name] for each in gradients]) for name in gradients[0]}
    for each in found:
        assert_same_bits(each, {name: g.bfloat16().float() for name, g in means.items()})


# ---- Beside other processes and copies.


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((4,), float(index)), torch.tensor([float(index)])


def loads_with_forked_workers(rank):
    torch.manual_seed(SEED)
    model = nn.Linear(4, 1)
    wrapped = phub.ddp(model)
    sampler = torch.utils.data.DistributedSampler(
        Numbers(), wrapped.phub.world_size, wrapped.phub.rank, shuffle=False
    )
    loader = torch.utils.data.DataLoader(
        Numbers(), 4, sampler=sampler, num_workers=2, multiprocessing_context="fork"
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    seen = []
    for _ in range(2):  # workers are forked again, now in the middle of the job
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(inputs), targets).backward()
            optimizer.step()
            seen += targets.flatten().tolist()
    assert wrapped.phub.worker.round("weight") == 6
    return seen, parameters_of(model)


def test_data_loaders_with_forked_workers(box, start):
    one, other = start(loads_with_forked_workers, 2).results()
    assert sorted(one[0] + other[0]) == sorted(2 * [float(i) for i in range(24)])
    assert_same_bits(one[1], other[1])


@pytest.mark.parametrize(("transport", "copies_of_model"), [("shm", 2), ("tcp", 1)])
@of_ranks(1)
def test_gradients_are_copied_once_each_way_at_most(rank, transport, copies_of_model):
    model = model_of()
    wrapped = phub.ddp(model, transport=transport)
    copied = []
    for step in range(4):
        wrapped(batch_of(rank, step)).backward()
        copied.append(wrapped.phub.worker.stats.bytes_copied)
    size = 4 * sum(p.numel() for p in model.parameters())
    assert copied[3] - copied[2] == copies_of_model * size
