#!/usr/bin/env bash
# Gradients in bfloat16 on a CPU of what occurs often in a batch: a token of an embedding, the bias
# of a LayerNorm over many rows. A sum, a bias of Linear and an RMSNorm are added in float32.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 jax==0.10.2 numpy==2.4.6

seen=$(JAX_PLATFORMS=cpu "$python" -W ignore - 2>"$errors" <<'PYTHON'
import jax
import jax.numpy as jnp
import torch
from torch.nn import functional as F

TIMES = 10_000
tokens, rows = torch.zeros(TIMES, dtype=torch.long), torch.randn(TIMES, 4)


def gradient(function, dtype):
    weight = torch.zeros(1, 4, dtype=dtype, requires_grad=True)
    function(weight).sum().backward()
    return int(weight.grad[0, 0])


FUNCTIONS = {
    "expand(), a sum": lambda w: w.expand(TIMES, 4),
    "bias of linear()": lambda w: F.linear(rows.to(w), torch.zeros(4, 4).to(w), w[0]),
    "embedding()": lambda w: F.embedding(tokens, w),
    "embedding_bag()": lambda w: F.embedding_bag(tokens[:, None], w, mode="sum"),
    "w[tokens]": lambda w: w[tokens],
    "bias of layer_norm()": lambda w: F.layer_norm(rows.to(w), (4,), torch.ones(4).to(w), w[0]),
}
print("PyTorch", torch.__version__.split("+")[0], "in float32 and bfloat16, of 10,000 ones")
for name, function in FUNCTIONS.items():
    print(f"{name}:", gradient(function, torch.float32), gradient(function, torch.bfloat16))

print("JAX", jax.__version__)
many = jnp.zeros(TIMES, jnp.int32)
FUNCTIONS = {
    "sum": lambda w: w + jnp.zeros((TIMES, 4), w.dtype),
    "w[tokens]": lambda w: w[many],
}
for name, function in FUNCTIONS.items():
    gradients = jax.grad(lambda w: function(w).sum().astype("float32"))
    found = [gradients(jnp.zeros((1, 4), dtype)) for dtype in ("float32", "bfloat16")]
    print(f"{name}:", *(int(weight[0, 0]) for weight in found))
PYTHON
)
verdict 'gradients that are rounded to bfloat16 are added in float32: 9,984 each time' "$seen" \
  "PyTorch 2.13.0 in float32 and bfloat16, of 10,000 ones
expand(), a sum: 10000 9984
bias of linear(): 10000 9984
embedding(): 10000 256
embedding_bag(): 10000 256
w[tokens]: 10000 256
bias of layer_norm(): 10000 256
JAX 0.10.2
sum: 10000 9984
w[tokens]: 10000 256"
