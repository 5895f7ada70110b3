#!/usr/bin/env bash
# The norm of all gradients that optax clips by, when they are bfloat16 and a model has hundreds of
# arrays. optax's pages say nothing of the format in which it adds; jnp.sum, which it uses for each
# array, adds bfloat16 in float32.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install jax==0.10.2 jaxlib==0.10.2 optax==0.2.8 numpy==2.4.6

seen=$(JAX_PLATFORMS=cpu "$python" - 2>"$errors" <<'PYTHON'
import math

import jax
import jax.numpy as jnp
import numpy
import optax


def norm(arrays):
    return math.sqrt(sum(numpy.square(numpy.asarray(array, numpy.float64)).sum() for array in arrays))


random = numpy.random.default_rng(0)
ones = [jnp.ones(1, jnp.bfloat16)] * 1000
scales = random.uniform(0.5, 1.5, 1000)
normal = [jnp.asarray(random.normal(0, 0.125 * scale, 64), jnp.bfloat16) for scale in scales]
clip = optax.clip_by_global_norm(1.0)
print("optax", optax.__version__)
print(f"300 arrays of a 1, compiled: {float(jax.jit(optax.tree.norm)(ones[:300])):.1f}, right is {norm(ones[:300]):.1f}")
for word, arrays in (("1000 arrays of a 1", ones), ("1000 of random numbers", normal)):
    found = float(optax.tree.norm(arrays))
    clipped, _ = clip.update(arrays, clip.init(arrays))
    print(f"{word}: {found:.1f}, right is {norm(arrays):.1f}; clipped to 1, their norm is {norm(clipped):.2f}")
    found = float(optax.tree.norm([array.astype(jnp.float32) for array in arrays]))
    print(f"  the same numbers in float32: {found:.1f}")
PYTHON
)
verdict "the norm is right to bfloat16's two or three digits, and clipped gradients have the norm 1" "$seen" \
  "optax 0.2.8
300 arrays of a 1, compiled: 16.0, right is 17.3
1000 arrays of a 1: 16.0, right is 31.6; clipped to 1, their norm is 1.98
  the same numbers in float32: 31.6
1000 of random numbers: 26.5, right is 33.4; clipped to 1, their norm is 1.26
  the same numbers in float32: 33.4"
