"""What a function keeps in memory from its forward pass for its backward pass.

A *residual* is an intermediate value that the derivative needs. Parameters and inputs are in memory anyway and don't
count; their copies in the compute dtype do. What is counted here is what JAX keeps: inside one `jax.jit`, XLA may still
compute a cheap one again.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from amp_jax._graph import dtype_of, size
from amp_jax._jaxpr import Literal, trace


def saved_bytes(fun: Callable[..., Any], arrays: Sequence[Any]) -> Counter[Any]:
    """Bytes of residuals by dtype, when `fun(*arrays)` is differentiated in all that is a float.

    Args:
        fun: A function of arrays that gives a pytree.
        arrays: Its arguments, or their shapes and dtypes.

    Raises:
        ValueError, TypeError or NotImplementedError: JAX's own, where the function has no derivative.
    """
    floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def residuals(*given: Any) -> Any:
        def of(*chosen: Any) -> Any:
            replaced = dict(zip(floats, chosen, strict=True))
            out = fun(*(replaced.get(i, x) for i, x in enumerate(given)))
            return [x for x in jax.tree.leaves(out) if jnp.issubdtype(dtype_of(x), jnp.floating)]

        out, pullback = jax.vjp(of, *(given[i] for i in floats))
        pullback(out)  # a `while_loop` refuses only here
        return jax.tree.leaves(pullback)

    jaxpr = trace(residuals, *arrays).jaxpr
    known = {*jaxpr.invars, *jaxpr.constvars}
    kept = dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, Literal) and v not in known)
    total = Counter[Any]()
    for var in kept:
        if dtype_of(var.aval) is not None:
            total[dtype_of(var.aval)] += size(var.aval) * dtype_of(var.aval).itemsize
    return total
