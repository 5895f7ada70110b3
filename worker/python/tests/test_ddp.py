"""Trainings through the box, compared with one process that averages in rank order."""

import copy
import multiprocessing
import os
import signal
import time
from unittest.mock import Mock

import pytest
import torch
from conftest import SEED
from exact import assert_same_bits, mean
from models import GPT, ResNet, image_batch, text_batch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import phub
from phub import _alone


def model_of(kind):
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    return {"gpt": GPT, "resnet": ResNet}[kind]()


def batch_of(kind, rank, step):
    return {"gpt": text_batch, "resnet": image_batch}[kind](rank, SEED + step)


def optimizer_of(model):
    """Two groups, weight decay, and a schedule."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0, foreach=False)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)


def recorded(model, **options):
    """phub.ddp, and a list with a step's gradients of this rank, by parameter, that grows."""
    wrapped = phub.ddp(model, ddp_options={"bucket_cap_mb": 1}, **options)
    names = {id(p): name for name, p in model.named_parameters()}
    exchange, steps = wrapped.phub.exchange, []

    def record(bucket):
        if bucket.index() == 0:
            steps.append({})
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            steps[-1][names[id(parameter)]] = gradient.clone()
        return exchange(bucket)

    wrapped.phub.exchange = record
    return wrapped, steps


def parameters_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trains(rank, kind, transport, steps):
    model = model_of(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)  # rank 0's count
    wrapped, gradients = recorded(model, transport=transport)
    assert wrapped.phub.worker.connection.startswith(transport)
    optimizer, schedule = optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        wrapped(batch_of(kind, rank, step)).backward()
        optimizer.step()
        schedule.step()
    wrapped.phub.close()
    return gradients, parameters_of(model)


def replay(kind, gradients_of_ranks):
    """One process, with the gradients of all ranks."""
    model = model_of(kind)
    optimizer, schedule = optimizer_of(model)
    for steps in zip(*gradients_of_ranks, strict=True):
        for name, parameter in model.named_parameters():
            parameter.grad = mean([step[name] for step in steps])
        optimizer.step()
        schedule.step()
    return parameters_of(model)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_parameters_are_those_of_one_process_to_the_bit(box, start, transport, world):
    results = start(trains, world, "gpt", transport, 6).results()
    gradients, parameters = zip(*results, strict=True)
    expected = replay("gpt", gradients)
    for each in parameters:
        assert_same_bits(each, expected)
    if world > 1:  # or the ranks had the same batches
        assert not torch.equal(gradients[0][0]["last.weight"], gradients[1][0]["last.weight"])


def test_a_convolutional_net_and_three_ranks(box, start):
    results = start(trains, 3, "resnet", "shm", 6).results()
    gradients, parameters = zip(*results, strict=True)
    expected = replay("resnet", gradients)
    for each in parameters:
        assert_same_bits(each, expected)


# ---- Beside PyTorch's own DDP.


def losses_of(rank, wrapped, model, steps):
    optimizer, schedule = optimizer_of(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = wrapped(batch_of("gpt", rank, step))
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def through_gloo(rank, store, steps, hook):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    model = model_of("gpt")
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    state = None
    if hook:
        state = phub.DDPState(wrapped.module)
        wrapped.register_comm_hook(state, phub.ddp_hook)
    losses = losses_of(rank, wrapped, model, steps)
    if hook:
        state.close()
    distributed.destroy_process_group()
    return losses


def through_box(rank, steps):
    model = model_of("gpt")
    return losses_of(rank, phub.ddp(model), model, steps)


def test_losses_are_those_of_ddp_on_gloo(box, start, tmp_path):
    steps = 30
    gloo = start(through_gloo, 2, tmp_path / "store", steps, False).results()
    ours = start(through_box, 2, steps).results()
    for one, other in zip(gloo, ours, strict=True):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= 1e-4
        assert sum(one[-5:]) < sum(one[:5])  # it learns


def test_the_hook_works_in_ddp_over_all_ranks(box, start, tmp_path):
    gloo = start(through_gloo, 2, tmp_path / "plain", 5, False).results()
    hooked = start(through_gloo, 2, tmp_path / "hooked", 5, True).results()
    for one, other in zip(gloo, hooked, strict=True):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= 1e-4


# ---- Accumulation, clipping, scaling.


def accumulates(rank):
    model = model_of("gpt")
    wrapped, gradients = recorded(model)
    optimizer, schedule = optimizer_of(model)
    alone = model_of("gpt")  # sums the same batches' gradients without DDP
    sums = []
    for step in range(3):
        alone.load_state_dict(model.state_dict())
        alone.zero_grad()
        optimizer.zero_grad()
        for part in range(3):
            batch = batch_of("gpt", rank, 3 * step + part)
            alone(batch).backward()
            if part < 2:
                with wrapped.no_sync():
                    wrapped(batch).backward()
            else:
                wrapped(batch).backward()
        sums.append({name: p.grad.clone() for name, p in alone.named_parameters()})
        assert wrapped.phub.worker.round("last.weight") == step + 1
        optimizer.step()
        schedule.step()
    for got, expected in zip(gradients, sums, strict=True):
        for name, gradient in expected.items():
            assert torch.allclose(got[name], gradient, rtol=1e-4, atol=1e-6), name
    return gradients, parameters_of(model)


def test_no_sync_accumulates(box, start):
    results = start(accumulates, 2).results()
    gradients, parameters = zip(*results, strict=True)
    expected = replay("gpt", gradients)
    for each in parameters:
        assert_same_bits(each, expected)


def clips_and_scales(rank):
    model = model_of("gpt")
    wrapped = phub.ddp(model)
    optimizer, _ = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    norms, scales, changed = [], [], []
    for step in range(4):
        before = parameters_of(model)
        optimizer.zero_grad()
        loss = wrapped(batch_of("gpt", rank, step))
        if step == 2 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed.append(any(not torch.equal(p, before[n]) for n, p in model.named_parameters()))
    return norms, scales, changed, parameters_of(model)


def test_clipping_and_grad_scaler(box, start):
    one, other = start(clips_and_scales, 2).results()
    assert one[1] == other[1] == [1024, 1024, 512, 512]
    assert one[2] == other[2] == [True, True, False, True]  # nobody steps where one rank overflows
    assert one[0][0] == other[0][0] > 0.5
    assert_same_bits(one[3], other[3])


# ---- What fails.


def trains_on(rank, reports, on_loss, steps):
    model = model_of("gpt")
    wrapped = phub.ddp(model, on_loss=on_loss)
    optimizer, _ = optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        wrapped(batch_of("gpt", rank, step)).backward()
        optimizer.step()
        reports.put((rank, step))
        if rank == 1 and step == 2:
            time.sleep(600)
    return parameters_of(model)


def started(start, world, on_loss, steps, **environment):
    """Ranks of which rank 1 has done 3 steps, and hangs."""
    reports = multiprocessing.get_context("fork").Queue()
    ranks = start(trains_on, world, reports, on_loss, steps, **environment)
    while reports.get(timeout=120) != (1, 2):
        pass
    return ranks


def lets_go_of_buckets(rank):
    wrapped = phub.ddp(model_of("gpt"))

    def lent():
        return [m for pair in wrapped.phub.worker._owners.values() for m in pair if m.address]

    wrapped(batch_of("gpt", rank, 0)).backward()
    assert not lent()  # DDP makes new ones
    wrapped(batch_of("gpt", rank, 1)).backward()
    assert len(lent()) == 2 * len(wrapped.phub.worker.keys)


def test_the_buckets_of_the_first_step_do_not_live_on(box, start):
    start(lets_go_of_buckets, 1).results()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_go_on_when_a_rank_is_killed_or_hangs(box, start, end):
    ranks = started(start, 4, "shrink", 6)
    ranks.kill(1, end)
    results = [ranks.result(rank) for rank in (0, 2, 3)]  # long before the limit of progress
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_backward_raises_the_error_of_the_box(box, start):
    ranks = started(start, 2, "fail", 6)
    ranks.kill(1)
    with pytest.raises(phub.RankLostError, match="rank 1"):
        ranks.result(0)


def test_backward_raises_when_the_box_is_gone(own_box, start):
    ranks = started(start, 2, "shrink", 6, PHUB_SERVER=own_box.address, PHUB_JOB="gone")
    own_box.kill()
    with pytest.raises(phub.UnavailableError):
        ranks.result(0)


def test_ctrl_c_ends_backward(box, start):
    ranks = started(start, 2, "shrink", 6)
    time.sleep(0.3)  # so that rank 0 probably waits for rank 1; it is right either way
    ranks.kill(0, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        ranks.result(0)  # long before the limit of progress


# ---- What is refused, and what is left alone.


def joins_late(rank):
    first = phub.DDPState(nn.Linear(2, 2), max_ranks=2)
    for name in first.worker.keys:
        first.worker.push(name)
    first.worker.wait_all()
    with pytest.raises(phub.InvalidError, match="cannot join later"):
        phub.DDPState(nn.Linear(2, 2), max_ranks=2, rank=1).broadcast_parameters()


def test_a_rank_that_joins_later_is_told_why_it_cannot(box, start):
    start(joins_late, 1).results()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(2, 2).double(), "'weight' is torch.float64"),
        (nn.Linear(2, 2, device="meta"), "'weight' is torch.float32 on meta"),
        (nn.Linear(2, 2).requires_grad_(requires_grad=False), "no parameter"),
    ],
)
def test_modules_that_cannot_be_exchanged_are_refused(module, message):
    with pytest.raises(phub.InvalidError, match=message):
        phub.ddp(module)


def test_arguments_of_ddp_have_a_place_of_their_own():
    message = r"ddp_options=\{'find_unused_parameters': True\}"
    with pytest.raises(phub.InvalidError, match=message):
        phub.ddp(nn.Linear(4, 4), find_unused_parameters=True)


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


def of_another_module(rank):
    wrapped = phub.ddp(nn.Linear(2, 2))
    wrapped.phub._name_of.clear()
    with pytest.raises(phub.InvalidError, match="shape.*is not in the module"):
        wrapped(torch.ones(1, 2)).sum().backward()


def test_the_state_of_another_module_is_refused(box, start):
    start(of_another_module, 1).results()


def becomes_trainable(_rank, bare):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net[0].weight.requires_grad_(requires_grad=False)
    if bare:
        state = phub.DDPState(net)
        wrapped = DistributedDataParallel(net, process_group=_alone.Group())
        wrapped.register_comm_hook(state, phub.ddp_hook)
    else:
        wrapped = phub.ddp(net)
    wrapped(torch.ones(1, 4)).sum().backward()
    net[0].weight.requires_grad_()
    with pytest.raises(phub.InvalidError, match=r"'0\.weight' requires a gradient now"):
        wrapped(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("bare", [False, True])
def test_a_parameter_that_becomes_trainable_later_is_refused(box, start, bare):
    start(becomes_trainable, 1, bare).results()


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
    torch.set_num_threads(1)
    net = Ordered(rank)
    batches = [
        torch.randn(1, 3, 5, 5, generator=torch.Generator().manual_seed(r)) for r in range(2)
    ]
    expected = []
    for batch in batches:
        net.zero_grad()
        net(batch).backward()
        expected.append({name: p.grad.clone() for name, p in net.named_parameters()})
    if options.get("server") is False:
        optimizer = phub.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), 0.0), net, **options
        )
        wrapped, step = net, optimizer.step
    else:
        wrapped, step = phub.ddp(net, **options), lambda: None
    for _ in range(2):
        net.zero_grad()
        wrapped(batches[rank]).backward()
        step()
    for name, parameter in net.named_parameters():
        want = (expected[0][name] + expected[1][name]) / 2
        torch.testing.assert_close(parameter.grad, want, rtol=1e-4, atol=1e-3, msg=name)


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


def changes_order(_rank):
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    wrapped = phub.ddp(net)
    net.to(memory_format=torch.channels_last)
    with pytest.raises(phub.InvalidError, match=r"'0\.weight' had strides"):
        wrapped(torch.ones(1, 3, 4, 4)).sum().backward()


def test_another_order_after_ddp_was_made_is_refused(box, start):
    start(changes_order, 1).results()


def has_no_default_group(rank):
    wrapped = phub.ddp(nn.Linear(2, 2))
    assert not distributed.is_initialized()
    wrapped(torch.ones(1, 2)).sum().backward()


def test_the_default_group_is_the_programs(box, start):
    start(has_no_default_group, 1).results()


def in_other_formats(rank):
    torch.manual_seed(SEED)
    for dtypes, job in (
        ((torch.bfloat16, torch.bfloat16), "bf16"),
        ((torch.float16, torch.float16), "f16"),
        ((torch.bfloat16, torch.float32), "f32"),
    ):
        model = nn.ModuleList(nn.Linear(8, 8, bias=False).to(dtype) for dtype in dtypes)
        model.forward = lambda x, model=model: model[1](
            model[0](x.to(model[0].weight.dtype)).to(model[1].weight.dtype)
        )
        expected = copy.deepcopy(parameters_of(model))
        if rank == 1:
            nn.init.zeros_(model[0].weight)
        wrapped = phub.ddp(model, job=f"{os.environ['PHUB_JOB']}-{job}-{dtypes[1]}"[:200])
        assert_same_bits(parameters_of(model), expected)
        wrapped(torch.full((1, 8), rank + 1.0)).float().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        assert [g.dtype for g in gradients] == list(dtypes)
        # of the last layer: its input is (rank + 1) times the same
        alone = copy.deepcopy(model)
        for p in alone.parameters():
            p.grad = None
        parts = []
        for other in range(2):
            for p in alone.parameters():
                p.grad = None
            out = alone[1](alone[0](torch.full((1, 8), other + 1.0).to(dtypes[0])).to(dtypes[1]))
            out.float().sum().backward()
            parts.append([p.grad.float() for p in alone.parameters()])
        for got, one, two, dtype in zip(gradients, *parts, dtypes, strict=True):
            assert torch.equal(got, ((one + two) * 0.5).to(dtype))
        wrapped.phub.close()


def test_other_formats_and_mixtures(box, start):
    start(in_other_formats, 2).results()


def has_results_of_16_bits(rank):
    model = model_of("gpt")
    first = parameters_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)  # rank 0's count
    wrapped, gradients = recorded(model, parameter_dtype="bf16")
    assert_same_bits(parameters_of(model), first)  # they are not results
    wrapped(batch_of("gpt", rank, 0)).backward()
    return gradients[0], {name: p.grad.clone() for name, p in model.named_parameters()}


def test_results_of_16_bits_leave_parameters_alone(box, start):
    gradients, means = zip(*start(has_results_of_16_bits, 2).results(), strict=True)
    for name, found in means[0].items():
        expected = mean([each[name] for each in gradients]).bfloat16().float()
        assert torch.equal(found, expected), name
        assert torch.equal(means[1][name], expected), name


# ---- Beside other processes and copies.


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((4,), float(index)), torch.tensor([float(index)])


def loads_with_forked_workers(rank):
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
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
    return sorted(seen), parameters_of(model)


def test_data_loaders_with_forked_workers(box, start):
    one, other = start(loads_with_forked_workers, 2).results()
    assert sorted(one[0] + other[0]) == sorted(2 * [float(i) for i in range(24)])
    assert_same_bits(one[1], other[1])


def copies(rank, transport):
    model = model_of("gpt")
    wrapped = phub.ddp(model, transport=transport)
    size = 4 * sum(p.numel() for p in model.parameters())
    for step in range(4):
        if step == 3:
            before = wrapped.phub.worker.stats.bytes_copied
        wrapped(batch_of("gpt", rank, step)).backward()
    return (wrapped.phub.worker.stats.bytes_copied - before) / size


@pytest.mark.parametrize(("transport", "copies_of_model"), [("shm", 2), ("tcp", 1)])
def test_gradients_are_copied_once_each_way_at_most(box, start, transport, copies_of_model):
    assert start(copies, 1, transport).results() == [copies_of_model]


def test_sparse_gradients_are_refused(box):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    ddp = phub.ddp(model, rank=0, world_size=1)
    with pytest.raises(
        phub.InvalidError, match=r"shape \(10, 4\) is torch.sparse_coo: .*sparse=False"
    ):
        ddp(torch.tensor([1, 2])).sum().backward()
    ddp.phub.close()
