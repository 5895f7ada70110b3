#!/usr/bin/env python3
"""Writes golden_rates.txt: the learning rates that PyTorch's schedulers set. Of each schedule it has the
rates of some rounds, and of all rounds their sum and the sum of round times rate: no rate may differ
alone, nor may a stretch of them.

The file is committed, so that only who changes the schedules needs PyTorch. The environment that
tests/scripts/python_test makes has it:

    build/python/bin/python tests/kernels/make_golden_rates.py

PyTorch has no schedule of Caffe's "inv": that one is its formula. A scheduler computes a rate from the
one before or by a closed form, so the last bits are not those of another way to compute it.
"""

import math
import pathlib

ROUNDS = 400
# Where a schedule begins or ends, with the rounds beside, and some between.
PLAIN = (1, 2, 3, 25, 50, 51, 52, 75, 100, 150, 200, 201, 250, 251, 300, 301, 302, 350, 351, 399, 400)
PER_LINE = 4

WARM_UP = dict(lr_warmup=50, lr_warmup_from=0.125)
# name, phub's hyperparameters. `scheduler` below makes of them what PyTorch has.
CONFIGS = [
    ("exponential", dict(lr=0.1, lr_exponential=0.99)),
    ("exponential_warm", dict(lr=0.1, lr_exponential=0.97, **WARM_UP)),
    ("inverse", dict(lr=0.01, lr_inverse=1e-4, lr_inverse_power=0.75)),
    ("inverse_fast", dict(lr=0.01, lr_inverse=0.25)),
    ("inverse_warm", dict(lr=0.01, lr_inverse=0.05, lr_inverse_power=0.5, **WARM_UP)),
    ("linear", dict(lr=0.3, lr_polynomial=300)),
    ("polynomial", dict(lr=0.3, lr_polynomial=300, lr_polynomial_power=2.5)),
    ("polynomial_warm", dict(lr=0.3, lr_polynomial=200, lr_polynomial_power=0.5, **WARM_UP)),
    ("linear_end", dict(lr=0.3, lr_polynomial=300, lr_end=0.25)),
    ("cosine", dict(lr=0.05, lr_cosine=400)),
    ("cosine_end", dict(lr=0.05, lr_cosine=400, lr_end=0.0625)),
    ("cosine_warm", dict(lr=0.05, lr_cosine=350, lr_end=0.01, lr_warmup=50)),
    ("warm_up", dict(lr=0.05, **WARM_UP)),
    ("product", dict(lr=0.3, lr_polynomial=300, lr_exponential=0.995)),
]


def schedulers(torch, optimizer, h):
    """Those whose factors are multiplied, without the warm-up."""
    kinds = torch.optim.lr_scheduler
    made = []
    if "lr_exponential" in h:
        made.append(kinds.ExponentialLR(optimizer, h["lr_exponential"]))
    if "lr_inverse" in h:
        power = h.get("lr_inverse_power", 1.0)
        made.append(kinds.LambdaLR(optimizer, lambda n: (1 + h["lr_inverse"] * n) ** -power))
    if "lr_polynomial" in h and "lr_end" in h:
        made.append(kinds.LinearLR(optimizer, 1, h["lr_end"], h["lr_polynomial"]))
    elif "lr_polynomial" in h:
        power = h.get("lr_polynomial_power", 1.0)
        made.append(kinds.PolynomialLR(optimizer, h["lr_polynomial"], power))
    if "lr_cosine" in h:
        end = h["lr"] * h.get("lr_end", 0.0)
        made.append(kinds.CosineAnnealingLR(optimizer, h["lr_cosine"], end))
    return made


def scheduler(torch, optimizer, h):
    kinds = torch.optim.lr_scheduler
    if "lr_warmup" not in h:
        return kinds.ChainedScheduler(schedulers(torch, optimizer, h), optimizer)
    rise = 1e-300 if h.get("lr_warmup_from", 0.0) == 0 else h["lr_warmup_from"]  # not 0 there
    warm = kinds.LinearLR(optimizer, rise, 1.0, h["lr_warmup"])
    then = schedulers(torch, optimizer, h)
    if not then:
        return warm
    return kinds.SequentialLR(optimizer, [warm, *then], [h["lr_warmup"]])


def main():
    import torch

    path = pathlib.Path(__file__).with_name("golden_rates.txt")
    with path.open("w") as out:
        out.write(f"# make_golden_rates.py, PyTorch {torch.__version__}, {ROUNDS} rounds\n")
        for name, h in CONFIGS:
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=h["lr"])
            schedule = scheduler(torch, optimizer, h)
            settings = " ".join(f"{k}={float(v).hex()}" for k, v in sorted(h.items()))
            out.write(f"config {name} {settings}\n")
            rates = {}
            for number in range(1, ROUNDS + 1):
                rates[number] = float(optimizer.param_groups[0]["lr"])
                optimizer.step()
                schedule.step()
            plain = [f"{number}:{rates[number].hex()}" for number in PLAIN]
            for i in range(0, len(plain), PER_LINE):
                out.write(" ".join(plain[i:i + PER_LINE]) + "\n")
            moment = math.fsum(number * rate for number, rate in rates.items())
            out.write(f"sum {math.fsum(rates.values()).hex()} {moment.hex()}\n")
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
