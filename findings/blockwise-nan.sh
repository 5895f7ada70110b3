#!/usr/bin/env bash
# A NaN among numbers that bitsandbytes brings to 8 bits in blocks, on a CPU, for an optimizer's
# state or a gradient that is sent. Its formats of 4 bits make the whole block NaN.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 bitsandbytes==0.50.2 numpy==2.4.6

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
from importlib.metadata import version

import torch
from bitsandbytes import functional

PLACE = 3


def eight(numbers):
    packed, state = functional.quantize_blockwise(numbers, blocksize=256)
    return functional.dequantize_blockwise(packed, state, blocksize=256)


def four(numbers):
    packed, state = functional.quantize_4bit(numbers, blocksize=256, quant_type="nf4")
    return functional.dequantize_4bit(packed, state).flatten()


print("bitsandbytes", version("bitsandbytes"), "with a block of numbers up to 1")
for name, function in (("8 bits", eight), ("4 bits", four)):
    for dtype in (torch.float32, torch.bfloat16):
        numbers = torch.linspace(-1, 1, 256).to(dtype)
        numbers[PLACE] = torch.nan
        found = function(numbers)
        others = int(found[torch.arange(256) != PLACE].isnan().sum())
        print(f"{name}, {dtype}: NaN is {found[PLACE]:.2f}, of the others {others} are NaN")
PYTHON
)
verdict 'a NaN is NaN afterwards, or the whole block' "$seen" \
  "bitsandbytes 0.50.2 with a block of numbers up to 1
8 bits, torch.float32: NaN is -0.99, of the others 0 are NaN
8 bits, torch.bfloat16: NaN is -0.99, of the others 0 are NaN
4 bits, torch.float32: NaN is nan, of the others 255 are NaN
4 bits, torch.bfloat16: NaN is nan, of the others 255 are NaN"
