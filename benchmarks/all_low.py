"""The floor: every float32 operation in the low dtype, with no care for accuracy. A measuring tool, not a way to train.

    python -m benchmarks.all_low [NAME ...]       # floor of the training steps, compiled for an H100

Parameters stay float32 outside and are cast where they are used. jit, custom_jvp and custom_vjp are inlined (their
rules are lost), scan and remat are entered, the scan's carry is low. A value is *raw* while it is a parameter or a
constant that was only moved: it is still float32 then.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

MOVES = {"broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "gather", "copy"}
LOW = {"mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}


def all_low(fun: Callable[..., Any], policy: str = "mixed_bfloat16") -> Callable[..., Any]:
    """`fun` with every operation in the policy's low dtype; results keep the dtypes that `fun` gave them."""
    low = LOW[policy]

    @wraps(fun)
    def wrapped(*args: Any) -> Any:
        flat, tree = jax.tree.flatten(args)
        jaxpr, shape = jax.make_jaxpr(lambda *xs: fun(*jax.tree.unflatten(tree, xs)), return_shape=True)(*flat)
        out = evaluate(jaxpr, flat, low)
        return jax.tree.map(lambda y, s: y.astype(s.dtype), jax.tree.unflatten(jax.tree.structure(shape), out), shape)

    return wrapped


def evaluate(jaxpr: Any, args: Sequence[Any], low: Any) -> list[Any]:
    """Run a jaxpr, each equation by its rule."""
    jaxpr = closed(jaxpr)
    env = dict(zip(jaxpr.jaxpr.invars, args, strict=True)) | dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    raw: set[Any] = set(env)

    def read(var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else env[var]

    for eqn in jaxpr.jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        first = eqn.invars[0] if eqn.invars else None
        if draws(eqn):
            out = as_traced(eqn, values)
        elif rule := RULES.get(eqn.primitive.name):
            out = rule(eqn, values, low)
        elif eqn.primitive.name in MOVES and not isinstance(first, core.Literal) and first in raw:
            out = as_traced(eqn, values)
            raw.update(eqn.outvars)
        else:
            out = lowered(eqn, values, low)
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.jaxpr.outvars]


def as_traced(eqn: Any, values: Sequence[Any]) -> list[Any]:
    if eqn.primitive.name == "jit":
        return core.jaxpr_as_fun(eqn.params["jaxpr"])(*values)
    out = eqn.primitive.bind(*values, **eqn.params)
    return list(out) if eqn.primitive.multiple_results else [out]


def lowered(eqn: Any, values: Sequence[Any], low: Any) -> list[Any]:
    """The operation with its operands and its result in the low dtype."""
    values = [jnp.asarray(x, low) if is_float32(v.aval) else x for v, x in zip(eqn.invars, values, strict=True)]
    params = dict(eqn.params)
    for key in ("preferred_element_type", "new_dtype", "dtype"):
        if params.get(key) == jnp.float32:
            params[key] = jnp.dtype(low)
    out = eqn.primitive.bind(*values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def inline(key: str, eqn: Any, values: Sequence[Any], low: Any) -> list[Any]:
    return evaluate(eqn.params[key], values, low)


def remat(eqn: Any, values: Sequence[Any], low: Any) -> list[Any]:
    body = partial(evaluate, eqn.params["jaxpr"], low=low)
    kept = {key: eqn.params[key] for key in ("prevent_cse", "policy")}
    return jax.checkpoint(lambda *args: body(args), **kept)(*values)


def scan(eqn: Any, values: Sequence[Any], low: Any) -> list[Any]:
    """Constants of the loop are cast before it, its carry and its outputs are low."""
    n, m = lengths(eqn.params)
    consts = [lower(x, low) if getattr(x, "ndim", 0) > 1 else x for x in values[:n]]

    def step(carry: Any, x: Any) -> tuple[list[Any], list[Any]]:
        out = [lower(y, low) for y in evaluate(eqn.params["jaxpr"], [*consts, *carry, *x], low)]
        return out[:m], out[m:]

    init = [lower(x, low) for x in values[n : n + m]]
    kept = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, init, values[n + m :], **kept)
    return [*carry, *ys]


RULES: dict[str, Callable[[Any, Sequence[Any], Any], list[Any]]] = {
    "jit": partial(inline, "jaxpr"),
    "closed_call": partial(inline, "jaxpr"),
    "custom_jvp_call": partial(inline, "call_jaxpr"),
    "custom_vjp_call": partial(inline, "call_jaxpr"),
    "checkpoint": remat,
    "remat2": remat,
    "scan": scan,
    "bitcast_convert_type": lambda eqn, values, low: as_traced(eqn, values),
}


def draws(eqn: Any) -> bool:
    """A jitted function of a key and no float32 array is jax.random's: left alone, its result cast where it is used."""
    avals = [v.aval for v in eqn.invars]
    keys = any(jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) for a in avals)
    return eqn.primitive.name == "jit" and keys and not any(is_float32(a) and a.ndim for a in avals)


def lengths(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and carries a scan has: jax 0.10, and jax 0.11 and later."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def closed(jaxpr: Any) -> Any:
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, ())


def is_float32(aval: Any) -> bool:
    return getattr(aval, "dtype", None) == jnp.float32


def lower(x: Any, low: Any) -> Any:
    return x.astype(low) if is_float32(x) else x


def main(names: list[str]) -> None:
    from benchmarks.h100 import step_cost
    from benchmarks.workloads import NAMES

    for name in names or NAMES:
        print(f"{name:9s} {step_cost(name, 'all-low')}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
