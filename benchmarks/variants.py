"""The ways in which a training step comes to its dtypes, side by side."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from benchmarks import workloads
from benchmarks.all_low import all_low

NAMES = ("float32", "hand", "all-low", "ours")
LOW = {"mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}
"""The dtype that a policy computes in."""


def ours(loss: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Imported late, so that the other variants can be measured without the package."""
    import amp_jax as amp

    return amp.autocast(loss, policy)


def transform(variant: str, policy: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What the variant does to the loss function."""
    by_name = {"all-low": all_low, "ours": ours}
    return lambda loss: by_name[variant](loss, policy) if variant in by_name else loss


def step(name: str, variant: str, policy: str = "mixed_bfloat16", scale: float = 1) -> tuple[Callable[..., Any], Any]:
    """The training step of a workload in one variant, and the shapes of its arguments."""
    if variant not in NAMES:
        raise ValueError(f"`variant` is {variant!r}; it is one of {', '.join(NAMES)}.")
    dtype = LOW[policy] if variant == "hand" else None
    return workloads.step(name, dtype, transform(variant, policy), scale)
