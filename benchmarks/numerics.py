"""Gradient error of a half-precision training step against float32 at the highest matmul precision, on the CPU.

    python -m benchmarks.numerics                             # layers with dtype= set by hand
    python -m benchmarks.numerics amp_jax.autocast            # a transform, called as transform(loss, policy_name)
    python -m benchmarks.numerics amp_jax.autocast gpt lstm   # only these steps

The error is relative L2 of the whole gradient, on small versions of the models, the median of three seeds. Exits with 1
where a transform's error is above 1.05 times that of the layers set by hand.
"""

import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import workloads

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]

SEEDS = (0, 1, 2)
SCALE = 1 / 8
LOSS_SCALE = {"bfloat16": 1.0, "float16": 2.0**12}
"""Without a loss scale float16 would measure underflow."""

ALLOWED = 1.05


def flat(tree: Any) -> jax.Array:
    return jnp.concatenate([x.astype(jnp.float32).ravel() for x in jax.tree.leaves(tree)])


def gradient(loss: Callable[..., Any], params: Any, batch: list[jax.Array], loss_scale: float = 1.0) -> jax.Array:
    """The gradient of `loss` in the parameters, unscaled, as one float32 vector."""

    def scaled(p: Any) -> Any:
        value, pullback = jax.vjp(lambda p: loss(p, *batch), p)
        (grads,) = pullback(jnp.asarray(loss_scale, value.dtype))
        return jax.tree.map(lambda g: g.astype(jnp.float32) / loss_scale, grads)

    grads = jax.jit(scaled)(params)
    return flat(grads.get("params", grads))


@cache
def reference(name: str, seed: int) -> tuple[Any, list[jax.Array], jax.Array]:
    """Parameters, a batch, and the float32 gradient there."""
    init, loss, specs = workloads.workload(name, None, SCALE)
    params, batch = init(jax.random.key(seed)), workloads.example(specs, jax.random.key(seed + 100))
    with jax.default_matmul_precision("highest"):
        return params, batch, gradient(loss, params, batch)


def gradient_error(name: str, dtype: str, transform: Transform | None, seeds: tuple[int, ...] = SEEDS) -> float:
    """The median error over the seeds: of the layers set to `dtype` by hand, or of the float32 loss transformed."""
    by_hand = workloads.workload(name, jnp.dtype(dtype), SCALE).loss
    errors: list[float] = []
    for seed in seeds:
        params, batch, right = reference(name, seed)
        loss = by_hand if transform is None else transform(workloads.workload(name, None, SCALE).loss)
        approx = gradient(loss, params, batch, LOSS_SCALE[dtype])
        errors.append(float(jnp.linalg.norm(approx - right) / jnp.linalg.norm(right)))
    return sorted(errors)[len(errors) // 2]


def find(path: str) -> Callable[..., Any]:
    module, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def main(arguments: list[str]) -> int:
    jax.config.update("jax_platforms", "cpu")  # a GPU would be found, and would round differently
    transform = find(arguments[0]) if arguments else None
    worst = 0.0
    for name in arguments[1:] or workloads.NAMES:
        row: list[str] = []
        for dtype in LOSS_SCALE:
            hand = gradient_error(name, dtype, None)
            row.append(f"{dtype} hand {hand:.2e}")
            if transform is not None:
                ours = gradient_error(name, dtype, lambda loss, t=transform, d=dtype: t(loss, f"mixed_{d}"))
                worst = max(worst, ours / hand)
                row[-1] += f" ours {ours:.2e} ratio {ours / hand:.2f}"
        print(f"{name:9s}", "; ".join(row), flush=True)
    if transform is not None:
        print(f"worst ratio to hand-written {worst:.2f}")
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
