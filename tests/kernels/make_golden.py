#!/usr/bin/env python3
"""Writes golden.txt: what PyTorch's optimizers compute, bit for bit.

The file is committed, so that only who changes the configurations needs PyTorch. The environment
that tests/scripts/python_test makes has it:

    ATEN_CPU_CAPABILITY=default build/python/bin/python tests/kernels/make_golden.py

`default` is PyTorch's code path without fused multiply-adds, and foreach=False its loop over single
tensors. Roots are NumPy's: those of a PyTorch with MKL may be off by one unit in the last place.
Gradients and initial parameters come from a generator that golden_test.cc has too. A line of the
file is a step, a hash of the bits of all parameters after it and after each step before it, and the
bits of the first parameters. To see all parameters of one step, as golden_test prints its own:

    ATEN_CPU_CAPABILITY=default build/python/bin/python tests/kernels/make_golden.py adam_decay 50
"""

import math
import os
import pathlib
import struct
import sys

STEPS = (1, 2, 10, 50, 100, 200)  # those that are written
VALUES = 67
PLAIN = 8  # of them, in bits
MASK = (1 << 64) - 1

# name, phub's optimizer, class, arguments. The names of the arguments are those of phub's Hyper;
# PyTorch's are derived from them below.
CONFIGS = [
    ("sgd", "sgd", dict(lr=0.05)),
    ("sgd_decay", "sgd", dict(lr=0.05, weight_decay=1e-3)),
    ("momentum", "momentum", dict(lr=0.01, momentum=0.9)),
    ("momentum_dampening", "momentum",
     dict(lr=0.02, momentum=0.8, dampening=0.3, weight_decay=5e-4)),
    ("nesterov", "nesterov", dict(lr=0.01, momentum=0.9)),
    ("nesterov_decay", "nesterov", dict(lr=0.03, momentum=0.95, weight_decay=1e-4)),
    ("adam", "adam", dict(lr=1e-3)),
    ("adam_decay", "adam",
     dict(lr=3e-3, beta1=0.85, beta2=0.98, eps=1e-6, weight_decay=1e-2)),
    ("adamw", "adamw", dict(lr=1e-3, weight_decay=1e-2)),
    ("adamw_no_decay", "adamw", dict(lr=2e-3, beta1=0.8, weight_decay=0.0)),
    ("adagrad", "adagrad", dict(lr=0.01, eps=1e-10)),
    ("adagrad_lr_decay", "adagrad",
     dict(lr=0.1, eps=1e-8, lr_decay=0.05, weight_decay=1e-3)),
    ("rmsprop", "rmsprop", dict(lr=0.01)),
    ("rmsprop_momentum", "rmsprop",
     dict(lr=5e-3, alpha=0.9, eps=1e-7, rmsprop_momentum=0.7, weight_decay=1e-4)),
    ("adam_small_beta", "adam", dict(lr=1e-3, beta1=0.3)),
    ("adamw_half_beta", "adamw", dict(lr=2e-3, beta1=0.5, beta2=0.9)),
    ("sparse_adam", "sparse-adam", dict(lr=1e-3)),
    ("sparse_adam_betas", "sparse-adam", dict(lr=3e-3, beta1=0.7, beta2=0.98, eps=1e-6)),
    ("adadelta", "adadelta", dict(lr=1.0)),
    ("adadelta_decay", "adadelta", dict(lr=0.5, rho=0.95, eps=1e-5, weight_decay=1e-3)),
    ("lion", "lion", dict(lr=1e-3)),
    ("lion_decay", "lion", dict(lr=3e-3, beta1=0.7, beta2=0.95, weight_decay=0.1)),
    ("lars", "lars", dict(lr=1.0, momentum=0.9)),
    ("lars_decay", "lars", dict(lr=2.0, momentum=0.8, weight_decay=1e-2, trust_coeff=0.02)),
    ("lars_always", "lars", dict(lr=4.0, momentum=0.0, eps=1e-3, always_adapt=1.0)),
    ("lamb", "lamb", dict(lr=1e-3, weight_decay=1e-2)),
    ("lamb_no_decay", "lamb", dict(lr=2e-3, beta1=0.8, beta2=0.98, weight_decay=0.0)),
    ("lamb_always", "lamb", dict(lr=1e-2, eps=1e-4, weight_decay=0.0, always_adapt=1.0)),
]


def mix(x):
    """splitmix64's output function."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def value(config, step, index):
    """A float of 24 random bits and one of eight exponents; one in 64 is zero."""
    x = mix(mix(mix(config) ^ step) ^ index)
    if (x >> 8) & 63 == 0:
        return 0.0
    return ((x >> 40) - (1 << 23)) * 2.0 ** (-23 - (x & 7))


def fnv1a(data, digest=0xCBF29CE484222325):
    """Goes on from `digest`: of what came before."""
    for byte in data:
        digest = ((digest ^ byte) * 0x100000001B3) & MASK
    return digest


def lion(torch):
    """Lion as its paper's algorithm 2, for torch.optim has none."""

    class Lion(torch.optim.Optimizer):
        def __init__(self, params, lr, betas, weight_decay=0.0):
            super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

        @torch.no_grad()
        def step(self):
            (group,) = self.param_groups
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(beta1 * m + (1 - beta1) * p.grad), alpha=-group["lr"])
                self.state[p]["m"] = beta2 * m + (1 - beta2) * p.grad

    return Lion


def norm(tensor):
    """In double: element i adds its square to lane i mod 16, and the lanes are added in order."""
    lanes = [0.0] * 16
    for i, element in enumerate(tensor.tolist()):
        lanes[i % 16] += element * element
    total = 0.0
    for lane in lanes:
        total += lane
    return math.sqrt(total)


def lars(torch):
    """LARS as timm.optim.Lars, but for the norms, which are in double."""

    class Lars(torch.optim.Optimizer):
        def __init__(self, params, **defaults):
            super().__init__(params, defaults)

        @torch.no_grad()
        def step(self):
            (group,) = self.param_groups
            decay = group["weight_decay"]
            for p in group["params"]:
                grad, ratio = p.grad, 1.0
                if decay != 0 or group["always_adapt"]:
                    own, other = norm(p), norm(grad)
                    if own > 0 and other > 0:
                        ratio = group["trust_coeff"] * own / (other + decay * own + group["eps"])
                    grad = grad.add(p, alpha=decay).mul_(ratio)
                buffer = self.state[p].get("buffer")
                grad = grad.clone() if buffer is None else buffer.mul_(group["momentum"]).add_(grad)
                self.state[p]["buffer"] = grad
                p.add_(grad, alpha=-group["lr"])

    return Lars


def lamb(torch):
    """LAMB as timm.optim.Lamb without clipping, but for the norms, which are in double."""

    class Lamb(torch.optim.Optimizer):
        def __init__(self, params, **defaults):
            super().__init__(params, defaults)
            self.steps = 0

        @torch.no_grad()
        def step(self):
            (group,) = self.param_groups
            self.steps += 1
            beta1, beta2 = group["betas"]
            decay = group["weight_decay"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                v = self.state[p].setdefault("v", torch.zeros_like(p))
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = v.sqrt() / math.sqrt(1 - beta2 ** self.steps)
                update = (m / (1 - beta1 ** self.steps)).div_(root.add_(group["eps"]))
                if decay != 0:
                    update.add_(p, alpha=decay)
                if decay != 0 or group["always_adapt"]:
                    own, other = norm(p), norm(update)
                    if own > 0 and other > 0:
                        update.mul_(own / other)
                p.add_(update, alpha=-group["lr"])

    return Lamb


def make_optimizer(torch, kind, hyper, params):
    kwargs = {k: hyper[k] for k in ("lr", "weight_decay") if k in hyper}
    kwargs["foreach"] = False
    if kind in ("sgd", "momentum", "nesterov"):
        for name in ("momentum", "dampening"):
            if name in hyper:
                kwargs[name] = hyper[name]
        return torch.optim.SGD(params, nesterov=kind == "nesterov", **kwargs)
    if "eps" in hyper:
        kwargs["eps"] = hyper["eps"]
    if kind in ("adam", "adamw"):
        kwargs["betas"] = (hyper.get("beta1", 0.9), hyper.get("beta2", 0.999))
        return (torch.optim.Adam if kind == "adam" else torch.optim.AdamW)(params, **kwargs)
    if kind == "sparse-adam":
        del kwargs["foreach"]
        betas = (hyper.get("beta1", 0.9), hyper.get("beta2", 0.999))
        return torch.optim.SparseAdam(params, betas=betas, **kwargs)
    if kind == "adagrad":
        return torch.optim.Adagrad(params, lr_decay=hyper.get("lr_decay", 0.0), **kwargs)
    if kind == "adadelta":
        return torch.optim.Adadelta(params, rho=hyper.get("rho", 0.9), **kwargs)
    if kind == "lion":
        del kwargs["foreach"]
        betas = (hyper.get("beta1", 0.9), hyper.get("beta2", 0.99))
        return lion(torch)(params, betas=betas, **kwargs)
    if kind == "lars":
        return lars(torch)(params, lr=hyper["lr"], momentum=hyper["momentum"],
                           weight_decay=hyper.get("weight_decay", 0.0),
                           eps=hyper.get("eps", 1e-8),
                           trust_coeff=hyper.get("trust_coeff", 0.001),
                           always_adapt=hyper.get("always_adapt", 0.0))
    if kind == "lamb":
        betas = (hyper.get("beta1", 0.9), hyper.get("beta2", 0.999))
        return lamb(torch)(params, lr=hyper["lr"], betas=betas,
                           weight_decay=hyper["weight_decay"], eps=hyper.get("eps", 1e-6),
                           always_adapt=hyper.get("always_adapt", 0.0))
    if kind == "rmsprop":
        return torch.optim.RMSprop(params, alpha=hyper.get("alpha", 0.99),
                                   momentum=hyper.get("rmsprop_momentum", 0.0), **kwargs)
    raise ValueError(kind)


def parameters(torch, number, kind, hyper):
    """The bits of all parameters after each step."""
    param = torch.tensor([value(number, 0, i) for i in range(VALUES)], dtype=torch.float32)
    param.requires_grad_(True)
    optimizer = make_optimizer(torch, kind, hyper, [param])
    for step in range(1, STEPS[-1] + 1):
        gradient = [value(number, step, i) for i in range(VALUES)]
        param.grad = torch.tensor(gradient, dtype=torch.float32)
        if kind == "sparse-adam":
            every = torch.arange(VALUES)[None]
            param.grad = torch.sparse_coo_tensor(every, param.grad, is_coalesced=True)
        optimizer.step()
        yield step, struct.unpack(f"<{VALUES}I", struct.pack(f"<{VALUES}f", *param.tolist()))


def words(bits):
    return " ".join(f"{word:08x}" for word in bits)


def run(torch, number, name, kind, hyper, out):
    arguments = " ".join(f"{k}={float(v).hex()}" for k, v in sorted(hyper.items()))
    out.write(f"config {name} {kind} {arguments}\n")
    digest = fnv1a(b"")
    for step, bits in parameters(torch, number, kind, hyper):
        digest = fnv1a(struct.pack(f"<{VALUES}I", *bits), digest)
        if step in STEPS:
            out.write(f"{step} {digest:016x} {words(bits[:PLAIN])}\n")


def main():
    if os.environ.get("ATEN_CPU_CAPABILITY") != "default":
        sys.exit("set ATEN_CPU_CAPABILITY=default: other code paths use fused multiply-adds")
    import numpy
    import torch

    torch.Tensor.sqrt = lambda x: torch.from_numpy(numpy.sqrt(x.numpy()))
    torch.Tensor.sqrt_ = lambda x: x.copy_(torch.from_numpy(numpy.sqrt(x.numpy())))
    if len(sys.argv) == 3:
        for number, (name, kind, hyper) in enumerate(CONFIGS):
            for step, bits in parameters(torch, number, kind, hyper) if name == sys.argv[1] else ():
                if step == int(sys.argv[2]):
                    print(words(bits))
        return
    path = pathlib.Path(__file__).with_name("golden.txt")
    with path.open("w") as out:
        out.write(f"# make_golden.py, PyTorch {torch.__version__}, {STEPS[-1]} steps of {VALUES} values\n")
        for number, (name, kind, hyper) in enumerate(CONFIGS):
            run(torch, number, name, kind, hyper, out)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
