#!/usr/bin/env bash
# The mean of gradients over devices in JAX: a step for jax.pmap, whose page says to use
# jax.shard_map instead. The page of shard_map says that JAX inserts casts of values that devices
# share, and that the transpose of such a cast is a psum; not that a mean of gradients then does
# nothing.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6

seen=$(JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 "$python" -W ignore - 2>"$errors" <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

mesh = jax.make_mesh((4,), ("ranks",), axis_types=(AxisType.Auto,))
weight, data = jnp.array(1.0), jnp.array([1.0, 2.0, 3.0, 6.0])  # each device has one of the data


def loss(weight, data):
    return jnp.mean(weight * data)


def mean(weight, data):
    return jax.lax.pmean(jax.grad(loss)(weight, data), "ranks")


def total(weight, data):
    return jax.lax.psum(jax.grad(loss)(weight, data), "ranks")


def mapped(step, **options):
    parts = {"mesh": mesh, "in_specs": (PartitionSpec(), PartitionSpec("ranks")), "out_specs": PartitionSpec()}
    return float(jax.shard_map(step, **parts, **options)(weight, data))


print("JAX", jax.__version__)
for word, step in (("pmean", mean), ("psum", total)):
    pmap = jax.pmap(step, axis_name="ranks", in_axes=(None, 0))(weight, data)
    print(f"{word} of the gradients 1, 2, 3, 6: pmap {float(pmap[0])}, shard_map {mapped(step)},", end=" ")
    print(f"with check_vma=False {mapped(step, check_vma=False)}")
PYTHON
)
verdict 'the same step gives the same mean and sum, 3 and 12, under both' "$seen" \
  "JAX 0.10.2
pmean of the gradients 1, 2, 3, 6: pmap 3.0, shard_map 12.0, with check_vma=False 3.0
psum of the gradients 1, 2, 3, 6: pmap 12.0, shard_map 48.0, with check_vma=False 12.0"
