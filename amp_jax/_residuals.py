"""What a function keeps in memory from its forward pass for its backward pass.

A *residual* is an intermediate value that the derivative needs. Parameters and inputs are in memory anyway and don't
count; their copies in the compute dtype do. What is counted here is what JAX keeps: inside one `jax.jit`, XLA may still
compute a cheap one again.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from amp_jax._graph import dtype_of, size
from amp_jax._jaxpr import Literal, inner_jaxprs, open_jaxpr, trace


class Residual(NamedTuple):
    """One value that is kept.

    Attributes:
        dtype: Its dtype.
        bytes: Its size; of a loop, that of all iterations together.
        scope: The name stack of the equation that computed it.
    """

    dtype: Any
    bytes: int
    scope: str


def residuals(fun: Callable[..., Any], arrays: Sequence[Any]) -> list[Residual]:
    """What is kept when `fun(*arrays)` is differentiated in all that is a float.

    Args:
        fun: A function of arrays that gives a pytree.
        arrays: Its arguments, or their shapes and dtypes.

    Raises:
        ValueError, TypeError or NotImplementedError: JAX's own, where the function has no derivative.
    """
    floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def kept_of(*given: Any) -> Any:
        def of(*chosen: Any) -> Any:
            replaced = dict(zip(floats, chosen, strict=True))
            out = fun(*(replaced.get(i, x) for i, x in enumerate(given)))
            return [x for x in jax.tree.leaves(out) if jnp.issubdtype(dtype_of(x), jnp.floating)]

        out, pullback = jax.vjp(of, *(given[i] for i in floats))
        pullback(out)  # a `while_loop` refuses only here
        return jax.tree.leaves(pullback)

    jaxpr = trace(kept_of, *arrays).jaxpr
    known = {*jaxpr.invars, *jaxpr.constvars}
    found: dict[Any, Residual] = {}
    for var in jaxpr.outvars:
        if isinstance(var, Literal) or var in known or dtype_of(var.aval) is None:
            continue
        dtype, count = dtype_of(var.aval), size(var.aval)
        source, scope = _source(jaxpr, var, "")
        if source not in known:
            found.setdefault((source, count), Residual(dtype, count * dtype.itemsize, scope))
    return list(found.values())


def saved_bytes(fun: Callable[..., Any], arrays: Sequence[Any]) -> Counter[Any]:
    """Bytes of residuals by dtype; see `residuals`."""
    total = Counter[Any]()
    for residual in residuals(fun, arrays):
        total[residual.dtype] += residual.bytes
    return total


def _source(jaxpr: Any, var: Any, around: str) -> tuple[Any, str]:
    """The innermost variable that a value comes from, looking through names and into loops, and its name stack."""
    for eqn in reversed(jaxpr.eqns):
        if var not in eqn.outvars:
            continue
        scope = "/".join(filter(None, (around, str(eqn.source_info.name_stack))))
        if eqn.primitive.name == "name" and not isinstance(eqn.invars[0], Literal):
            source, deeper = _source(jaxpr, eqn.invars[0], around)
            return source, deeper or scope
        for inner in inner_jaxprs(eqn):
            body = open_jaxpr(inner)[0]
            if len(body.outvars) != len(eqn.outvars):
                continue
            made = body.outvars[eqn.outvars.index(var)]
            if any(made in e.outvars for e in body.eqns):
                source, deeper = _source(body, made, scope)
                return (eqn.outvars[0], source), deeper  # two calls may share one body
        return var, scope
    return var, around
