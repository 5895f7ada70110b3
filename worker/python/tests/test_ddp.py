"""Trainings through the box, compared with one process that averages in rank order."""

import copy
import os
import signal
import time
from unittest.mock import Mock

import pytest
import torch
from conftest import SEED, of_ranks, refused
from deaths import FORK
from exact import assert_same_bits, gradients_of, job, mean, parameters_of, replay
from models import GPT, ResNet, descend, differ, image_batch, recorded, text_batch
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
        losses.append(descend(optimizer, wrapped(batch_of(rank, step, kind))))
        schedule.step()
    return losses


def assert_replayed(results, kind="gpt", average=mean):
    """Of (gradients of all steps, parameters) by rank."""
    gradients, parameters = zip(*results, strict=True)
    model = model_of(kind)
    expected = replay(gradients, model, *optimizer_of(model), at_box=False, average=average)
    for each in parameters:
        assert_same_bits(each, expected)
    for each in gradients[1:]:  # or the ranks had the same batches
        assert not all(torch.equal(g, each[0][name]) for name, g in gradients[0][0].items())


def trains(rank, kind, transport, options):
    model = model_of(kind)
    first = parameters_of(model)
    differ(model, rank)
    wrapped, gradients = recorded(model, transport=transport, **BUCKETS, **options)
    assert_same_bits(parameters_of(model), first)  # they are no results
    assert wrapped.phub.worker.connection.startswith(transport)
    train(rank, wrapped, 6, kind)
    wrapped.phub.close()
    return gradients, parameters_of(model)


def mean_in_bf16(gradients):
    return mean(gradients).bfloat16().float()


@pytest.mark.parametrize(
    ("kind", "world", "transport", "options", "average"),
    [
        *(("gpt", world, each, {}, mean) for world in (1, 2, 4) for each in ("shm", "tcp")),
        ("gpt", 2, "shm", {"parameter_dtype": "bf16"}, mean_in_bf16),
        ("large gpt", 2, "shm", {}, mean),
        ("resnet", 3, "shm", {}, mean),
    ],
)
def test_parameters_are_those_of_one_process_to_the_bit(
    box, start, kind, world, transport, options, average
):
    assert_replayed(start(trains, world, kind, transport, options).results(), kind, average)


# ---- Beside PyTorch's own DDP.


def losses_of(rank, hook, store, steps):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    wrapped = DistributedDataParallel(model_of(), bucket_cap_mb=0.05)
    if hook:
        state = phub.DDPState(wrapped.module)
        wrapped.register_comm_hook(state, phub.ddp_hook)
    losses = train(rank, wrapped, steps)
    if hook:
        state.close()
    distributed.destroy_process_group()
    return losses


def test_losses_with_the_hook_are_those_of_ddp_on_gloo(box, start, tmp_path):
    """It works in DDP over all ranks."""

    def losses(hook):
        return torch.tensor(start(losses_of, 2, hook, tmp_path / str(hook), 15).results())

    try:
        gloo = losses(False)
    except pytest.fail.Exception as failed:
        pytest.skip(f"PyTorch's gloo alone, without phub: {failed}")
    ours = losses(True)
    torch.testing.assert_close(ours, gloo, rtol=0, atol=1e-4)
    assert (gloo[:, -5:].sum(1) < gloo[:, :5].sum(1)).all()  # they learn


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
        batches = [batch_of(rank, 3 * step + part) for part in range(3)]
        for batch in batches:
            alone(batch).backward()
        with wrapped.no_sync():
            for batch in batches[:2]:
                wrapped(batch).backward()
        wrapped(batches[2]).backward()
        torch.testing.assert_close(gradients[step], gradients_of(alone), rtol=1e-4, atol=1e-6)
        assert wrapped.phub.worker.round("last.weight") == step + 1
        optimizer.step()
        schedule.step()
    return gradients, parameters_of(model)


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
        descend(optimizer, wrapped(batch_of(rank, step)))
        reports.put((rank, step))
        if rank == 1 and step == 2:
            time.sleep(600)
    return parameters_of(model)


def started(start, world, options, **environment):
    """Ranks of which rank 1 has done 3 of 6 steps, and hangs."""
    reports = FORK.Queue()
    ranks = start(trains_on, world, reports, options, **environment)
    while reports.get(timeout=120) != (1, 2):
        pass
    return ranks


@pytest.mark.parametrize(
    ("end", "form"),
    [(signal.SIGKILL, {}), (signal.SIGSTOP, {}), (signal.SIGKILL, {"powersgd": 2})],
    ids=["killed", "hangs", "powersgd"],
)
def test_the_others_go_on_when_a_rank_is_killed_or_hangs(box, start, end, form):
    ranks = started(start, 4, {"on_loss": "shrink", **form})
    ranks.kill(1, end)
    results = [ranks.result(rank) for rank in (0, 2, 3)]  # long before the limit of progress
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


ENDS = {
    "rank": (lambda _, ranks: ranks.kill(1), "rank 1", phub.RankLostError),
    "box": (lambda box, _: box.kill(), ".", phub.UnavailableError),
    # Rank 0 probably waits for rank 1; it is right either way.
    "ctrl-c": (lambda _, ranks: ranks.kill(0, signal.SIGINT), "^$", KeyboardInterrupt),
}


@FORMS
@pytest.mark.parametrize("end", ENDS)
def test_backward_raises_the_error_of_the_box_and_ctrl_c(own_box, start, form, end):
    """Long before the limit of progress."""
    ends, message, error = ENDS[end]
    job = {"PHUB_SERVER": own_box.address, "PHUB_JOB": "ends"}
    ranks = started(start, 2, {"on_loss": "fail", **form}, **job)
    time.sleep(0.3)
    ends(own_box, ranks)
    refused(message, ranks.result, 0, error=error)


@FORMS
@of_ranks(1)
def test_a_rank_that_joins_later_is_told_why_it_cannot(rank, form):
    first = phub.ddp(model_of(), max_ranks=2, **form)
    first(batch_of(0, 0)).backward()
    refused("cannot join later", phub.ddp, model_of(), max_ranks=2, rank=1, **form)


# ---- What is refused, and what is left alone.


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
    assert {shapes.pop("deep"), shapes.pop("single")} == {()}
    assert shapes == {"0.weight": (3, 4), "0.bias": (3,), "1.weight": (1,)}


@of_ranks(1)
def test_what_changed_after_ddp_was_made_is_refused(rank):
    def refuses(message, forward, inputs):
        refused(message, lambda: forward(inputs).sum().backward())

    wrapped = phub.ddp(nn.Linear(2, 2), job=job("another module"))
    wrapped.phub._name_of.clear()
    refuses("shape.*is not in the module", wrapped, torch.ones(1, 2))

    convolution = nn.Sequential(nn.Conv2d(3, 4, 3))
    wrapped = phub.ddp(convolution, job=job("order"))
    convolution.to(memory_format=torch.channels_last)
    refuses(r"'0\.weight' had strides", wrapped, torch.ones(1, 3, 4, 4))

    sparse = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    wrapped = phub.ddp(sparse, job=job("sparse"))
    refuses(r"\(10, 4\) is torch.sparse_coo: .*sparse=False", wrapped, torch.tensor([1, 2]))

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
        refuses(r"'0\.weight' requires a gradient now", wrapped, torch.ones(1, 4))
    assert not distributed.is_initialized()  # the default group is the program's
    # Gloo's thread and the program's could wait for each other for ever: see _alone.Group.
    assert {"allgather", "allreduce", "broadcast"} <= set(vars(_alone.Group))


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


COPIES = {"transport": "tcp", "ddp_options": {"gradient_as_bucket_view": False}}


@pytest.mark.parametrize(  # powersgd: a sample of each of two ranks is what two columns hold
    "options",
    [{"transport": "shm"}, COPIES, {"server": False}, {"powersgd": 2}],
    ids=["shm", "tcp", "own steps", "powersgd"],
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


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F16, F16), (BF16, F32)], ids=str)
def test_other_formats_and_mixtures(box, start, dtypes):
    own, found = zip(*start(in_other_formats, 2, dtypes).results(), strict=True)
    assert not torch.equal(own[0]["1.weight"], own[1]["1.weight"])
    expected = {
        name: mean([each[name].float() for each in own]).to(gradient.dtype)
        for name, gradient in own[0].items()
    }
    for each in found:
        assert_same_bits(each, expected)


# ---- Copies.


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
