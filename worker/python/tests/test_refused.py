"""What cannot be exchanged, or stepped by the box, is refused, when it is set up or stepped."""

from unittest.mock import patch

import pytest
import torch
from conftest import leave, of_ranks, refused
from exact import job
from models import loss_of, make_net
from test_device import take_the_way_of_a_gpu
from test_optimizer import Own, made
from test_rows import Text
from torch import nn
from torch.nn.utils import prune
from torch.optim import SGD, Adagrad, AdamW, RMSprop

import phub
from phub import _device

NOT_FOUND = {"'9.weight'", "'0.bias'"}  # what these messages are of


def mlp():
    return nn.Sequential(nn.Linear(20, 70), nn.Tanh(), nn.Linear(70, 33), nn.Linear(33, 5))


def frozen():
    return nn.Linear(2, 2).requires_grad_(requires_grad=False)


def powersgd(formats):
    return {"powersgd": 2, "formats": {"*.bias": "bf16", **formats}}


AS_FACTORS = r"'2\.weight'.* go as PowerSGD's factors"
MODELS = [  # of phub.ddp
    (lambda: nn.Linear(2, 2).double(), {}, "'weight' is torch.float64"),
    (lambda: nn.Linear(2, 2, device="meta"), {}, "'weight' is torch.float32 on meta"),
    (frozen, {}, "no parameter"),
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
    (mlp, {"powersgd": phub.PowerSGD(0)}, r"PowerSGD\(rank=0, .*: rank is .* at least 1"),
    (mlp, {"powersgd": phub.PowerSGD(2, start=-1)}, "start is a whole number, at least 0"),
    (mlp, {"powersgd": phub.PowerSGD(2, start=1.5)}, "start is a whole number"),
    (mlp, {"powersgd": phub.PowerSGD(2, least_ratio=0.5)}, "least_ratio is a number, at least 1"),
    (mlp, {"powersgd": phub.PowerSGD(2, least_ratio="2")}, "least_ratio is a number"),
    (mlp, {"powersgd": phub.PowerSGD(2, least_ratio=50)}, "more than 50 times the elements"),
    (mlp, {"powersgd": 2, "consistency": "ssp"}, "consistency='ssp'"),
    (mlp, powersgd({"2.weight": "int8"}), AS_FACTORS),
    (mlp, powersgd({"2.w*": "f16"}), AS_FACTORS),
    (mlp, {"powersgd": 2, "formats": {"none": "int8"}}, "no name of the .* keys .* matches 'none'"),
    (mlp, {"formats": {"*.wieght": "int8"}}, "wieght"),
    (mlp, {"memory_device": 0}, "is 0, and the parameters are on cpu"),
    (mlp, {"node": 5}, "node=5: it is 'reduce', or a process group"),
    (mlp, {"node": "reduce", "powersgd": 2}, "node and powersgd=2: its factors.*Leave one"),
    (
        mlp,
        {"node": "reduce", "factors": {"*": 2}},
        "node and factors=.*take the place of gradi",
    ),
    (mlp, {"node": "reduce", "groups": "2,2"}, "node and groups='2,2': it counts ranks"),
    (mlp, {"node": "reduce", "min_ranks": 2}, "node and min_ranks=2: it counts ranks"),
]


@pytest.mark.parametrize(("make", "options", "message"), MODELS, ids=[row[-1] for row in MODELS])
def test_models_that_cannot_be_exchanged(box, make, options, message):
    error = (phub.InvalidError, phub.NotFoundError)
    refused(message, lambda: phub.ddp(make(), **options), error=error)


def of_two_groups(make):
    return lambda p: make([{"params": p[:1], "momentum": 0.9}, {"params": p[1:]}], 0.1)


def bfloat16(parameters):
    parameters[2].data = parameters[2].data.bfloat16()
    return AdamW(parameters)


def sgd(parameters):
    return SGD(parameters, 0.1)


ALONE = {"server": False}
OPTIMIZERS = [
    (Own, {}, "not of Own.*server=False"),
    (torch.optim.NAdam, {}, "not of NAdam.*server=False"),
    (lambda p: AdamW(p, amsgrad=True), {}, "group 0 has amsgrad=True.*server=False"),
    (lambda p: SGD(p, 0.1, maximize=True), {}, "maximize=True"),
    (lambda p: RMSprop(p, centered=True), {}, "centered=True"),
    (lambda p: Adagrad(p, initial_accumulator_value=1), {}, "initial_accumulator_value"),
    (of_two_groups(SGD), {}, "group 1 is"),
    (of_two_groups(RMSprop), {}, "momenta"),
    (lambda p: SGD([*p, nn.Parameter(torch.zeros(3))]), {}, "shape .3,. that is not the mod"),
    (AdamW, {"overlap": "both"}, "overlap"),
    (AdamW, {"accumulate": 0}, "overlap"),
    (AdamW, {"overlap": "forward", **ALONE}, "overlap"),
    (AdamW, {"zero_copy": True, **ALONE}, "zero_copy is for steps of the box"),
    (bfloat16, {"zero_copy": True}, "'2.weight' is torch.bfloat16.*torch.float32"),
    (torch.optim.LBFGS, ALONE, r"a step of LBFGS.*use phub\.ddp"),
    (AdamW, {"consistency": "async"}, "consistency='async'.*say 'bsp'"),
    (AdamW, {"max_norm": 1.0, **ALONE}, "for steps of the box"),
    (AdamW, {"on_nonfinite": "skip", **ALONE}, "keeps the gradients of the round before"),
    (AdamW, {"schedule": {"lr": 0.1}}, "schedule has 'lr'.*lr_cosine"),
    (AdamW, {"schedule": {"lr_cosine": 9}, **ALONE}, "schedule is for steps of the box"),
    (AdamW, {"server": "host:7717"}, "server='host:7717'.*box='HOST:PORT'"),
    (AdamW, {"memory_device": 0}, "is 0, and the parameters are on cpu"),
    (AdamW, {"delay": 2}, "delay=2: it is 0 or 1"),
    (AdamW, {"consistency": "ssp"}, "consistency='ssp'.*say 'bsp'"),
    (AdamW, {"consistency": "ssp", "slack": 2}, "slack=2 and delay=0: the slack is 0 or 1"),
    (AdamW, {"consistency": "ssp", "slack": 0, "delay": 1}, "slack=0 and delay=1"),
    (AdamW, {"consistency": "ssp", "slack": 1, **ALONE}, "delay is for steps of the box"),
    (AdamW, {"consistency": "async", "slack": 1}, "consistency='async'.*say 'bsp'"),
    (AdamW, {"delay": True}, "delay=True: it is 0 or 1"),
    (AdamW, {"delay": 1, **ALONE}, "delay is for steps of the box"),
    (AdamW, {"delay": 1, "overlap": "forward"}, "with delay=1 nothing does: leave overlap out"),
    (AdamW, {"delay": 1, "zero_copy": True}, "delay=1 and zero_copy do not go together"),
    (AdamW, {"delay": 1, "branches": 2}, "delay=1 and branches do not go together"),
    (sgd, {"formats": {"*": "bf16", "0.bias": "int8"}}, "'0.bias'"),  # frozen: no gradient
    (sgd, {"factors": {"*": 2}, **ALONE}, "server=True"),
    (sgd, {"factors": {"9.weight": 2}}, "'9.weight'"),
    (sgd, {"factors": 5}, "factors=5: it is a number of samples by patterns"),
    (sgd, {"factors": "all"}, "factors='all': it is a number of samples.*, or \"auto\""),
    (
        sgd,
        {"factors": "auto", "overlap": False},
        "'auto' and overlap=False: a step is measured",
    ),
    (sgd, {"factors": "auto", "overlap": "forward"}, "'auto' and overlap='forward': a step is"),
    (sgd, {"factors": "auto", "delay": 1}, "factors='auto' and delay=1: a step is measured"),
    (sgd, {"factors": "auto", "accumulate": 2}, "factors='auto' and accumulate=2: what several"),
    (sgd, {"factors": "auto", "branches": 2}, "factors='auto' and branches: each branch"),
    (sgd, {"factors": "auto", **ALONE}, "factors are for steps of the box.*phub.ddp has factors"),
    (sgd, {"factors": {"*": 0}}, "0 samples"),
]
OF_ROWS = [  # with an embedding
    (sgd, {"rows": {"*": 2}, **ALONE}, "server=True"),
    (sgd, {"rows": {"line.*": 2}}, r"'line\.\*'; there are words\.weight"),
    (sgd, {"lazy": ("nothing",)}, "lazy: no parameter"),
    (sgd, {"lazy": "nothing"}, "lazy: no parameter .* 'nothing'"),
    (sgd, {"rows": 5}, "rows=5: it is a number of rows by patterns"),
    (sgd, {"rows": {1: 5}}, "rows={1: 5}: it is a number"),
    (sgd, {"rows": {"*": "x"}}, r"rows of '\*' is 'x': it must be a whole number"),
    (sgd, {"rows": {"*": 2**64}}, r"rows of '\*' is 18446744073709551616: it must"),
    (sgd, {"rows": {"*": 0}}, "0 rows"),
    (sgd, {"lazy": True}, "lazy=True: it is patterns of names"),
    (sgd, {"lazy": [3]}, r"lazy=\[3\]: it is patterns of names"),
    (torch.optim.SparseAdam, {}, "'line.weight' has dense gradients"),
]


@pytest.mark.parametrize(
    ("make_net", "make", "options", "message"),
    [*((make_net, *row) for row in OPTIMIZERS), *((Text, *row) for row in OF_ROWS)],
    ids=[row[-1] for row in OPTIMIZERS + OF_ROWS],
)
def test_optimizers_that_the_box_cannot_be(box, make_net, make, options, message):
    net = make_net()
    known = phub.NotFoundError if message in NOT_FOUND else phub.InvalidError
    error = (known, phub.NotFoundError) if make_net is Text else known
    optimizer = make(list(net.parameters()))
    refused(message, phub.DistributedOptimizer, optimizer, net, error=error, **options)


MADE = {
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "parametrized": torch.nn.utils.parametrizations.weight_norm,
}


@pytest.mark.parametrize("how", MADE)
def test_factors_of_a_weight_that_is_made_of_others(box, how):
    net = mlp()
    MADE[how](net[2])
    message = r"factors: '2\.weight' is pruned, or parametrized.*Leave it out of factors"
    refused(message, phub.ddp, net, factors={"*": 4})
    refused(message, phub.DistributedOptimizer, sgd(net.parameters()), net, factors={"*": 4})
    refused(
        "none of the model's . weights", phub.ddp, net, factors={"7.*": 4}, error=phub.NotFoundError
    )


@pytest.mark.parametrize("how", MADE)
@pytest.mark.parametrize("form", ["ddp", "box"])
def test_factors_of_a_weight_that_is_made_of_others_later(box, start, how, form):
    def body(rank):
        net = called = mlp()
        if form == "ddp":
            called = phub.ddp(net, factors={"2.weight": 4})
            leaves = called.phub
        else:
            leaves = phub.DistributedOptimizer(sgd(net.parameters()), net, factors={"2.weight": 4})
        inputs = torch.randn(3, net[0].in_features)
        MADE[how](net[2])
        refused(r"'2\.weight' is pruned, or parametrized", called, inputs)
        with torch.no_grad():
            called(inputs)
        leave(leaves)

    start(body, 2).results()


@of_ranks(1)
def test_what_a_gpu_has_not(rank):
    net = make_net()
    with patch.object(_device, "is_gpu", lambda _: True):
        make = phub.DistributedOptimizer
        refused("parameters on the CPU", make, sgd(net.parameters()), net, zero_copy=True)
        refused(r"'0.weight' is on cpu.*on the CPU", phub.ddp, mlp(), powersgd=2)
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    refused(r"'1.weight' is torch.float32 on meta", phub.DDPState, two)
    with patch.object(_device, "is_gpu", lambda device: device.type == "meta"):
        refused(r"'0.bias' on cpu, '1.bias' on meta.*rank per GPU", phub.DDPState, two)
    take_the_way_of_a_gpu()
    factors = {"factors": {"2.weight": 8}}
    refused("float32 on the CPU, and '2.weight'", phub.ddp, net, **factors)
    factors["memory_device"] = 0
    refused("leave memory_device out", make, sgd(net.parameters()), net, **factors)


def test_a_model_that_is_not_sharded_and_memory_of_a_device_that_is_not_there(box):
    refused("call fully_shard", phub.FSDPState, mlp())
    options = {"job": "no-gpu", "transport": "ofi", "memory_device": 99}
    refused("99", phub.Worker, {"w": 10}, error=phub.UnavailableError, **options)


# ---- Steps.


def total_of(weight: torch.Tensor):
    return weight.square().sum()


def uses_early(net, optimizer):
    """In C++, where no function of a tensor's class is called."""
    optimizer.step()
    torch.jit.script(total_of)(net[0].weight).backward()


def freezes(net, optimizer):
    optimizer.step()
    optimizer.zero_grad()
    net[2].weight.requires_grad_(requires_grad=False)
    loss_of(net, 0, 0).backward()


def steps_with(change, before=True):
    """A step in which the net is changed before or after backward()."""

    def makes_step(net, optimizer):
        for act in (change, lambda *_: loss_of(net, 0, 0).backward())[:: 1 if before else -1]:
            act(net, optimizer)
        optimizer.step()

    return makes_step


def clamps(net, _):
    with torch.no_grad():
        net[2].weight.clamp_(-0.1, 0.1)


def scales(net, optimizer, unscales=False):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(net, 0, 0)).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)


def unscales(net, optimizer):
    scales(net, optimizer, unscales=True)


def has_a_graph(net, optimizer):
    loss_of(net, 0, 0).backward(create_graph=True)
    optimizer.step()


def uses_the_past(net, optimizer):
    """A backward() that needs a parameter after its gradient was pushed."""
    inputs = torch.ones(2, 12, requires_grad=True)
    late = nn.functional.linear(inputs.square(), net[0].weight.detach())
    net(late[:, :12]).sum().backward()


CHANGED, OTHERS = "the gradient of '.*' was changed after it was pushed", "torch's GradScaler"
VIEWS = {"zero_copy": True}
# Between backward() and step(): what is said, and what the program does.
AFTER_BACKWARD = [
    (f"{CHANGED}.*server=False", lambda net, _: nn.utils.clip_grad_norm_(net.parameters(), 1e-3)),
    ("the gradient of '.*' is gone.*zero_grad.*after step", lambda _, opt: opt.zero_grad()),
    (f"{CHANGED}.*zero_grad", lambda _, opt: opt.zero_grad(set_to_none=False)),
    (
        "lr of group 1 was changed between backward.* from 0.004 to 0.5.*after",
        lambda _, opt: opt.param_groups[1].update(lr=0.5),
    ),
    (
        "gradient of '.*' was pushed already.*2 times.*accumulate=2.*no_sync.*GAN",
        lambda net, _: loss_of(net, 0, 1).backward(),
    ),
    ("'2.weight' was frozen", freezes),
    ("'0.weight' was used before its new value.*synchronize", uses_early),
    ("state_dict.. between.*after step", lambda _, opt: opt.state_dict()),
    (
        "keys of a job cannot change",
        lambda _, opt: opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    ),
]
WRONG_STEPS = [
    *((said, steps_with(act, before=False), {}) for said, act in AFTER_BACKWARD),
    ("'2.weight' was changed by the program.*of the DistributedOptimizer", steps_with(clamps), {}),
    (
        "'0.bias' requires a gradient now",
        steps_with(lambda net, _: net[0].bias.requires_grad_(requires_grad=True)),
        {},
    ),
    (f"{OTHERS}.*phub.GradScaler.*phub.ddp.*bfloat16", scales, {}),
    (OTHERS, unscales, {}),
    (OTHERS, unscales, {"server": False}),
    ("the gradient of '.*' has a graph .create_graph=True.*zero_copy", has_a_graph, VIEWS),
    ("modified by an inplace operation", uses_the_past, VIEWS),
]


@of_ranks(1)
def test_guards(rank):
    for number, (message, makes_step, options) in enumerate(WRONG_STEPS):
        overlap = "forward" if "used before" in message else "backward"
        net, optimizer = made(job=job(number), **{"overlap": overlap, **options})
        refused(message, makes_step, net, optimizer, error=RuntimeError)
