"""custom_jvp and custom_vjp under autocast: the author's rules stay, and each is autocast as a function of its own.

Autocasting the function alone would leave training in float32: under `grad` only the rules run. They are traced in the
dtypes that they were written for, when JAX asks for them, and planned for the dtypes that their operands really have.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0

from amp_jax import _regions
from amp_jax._graph import FLOAT32, dtype_of
from amp_jax._jaxpr import as_function, trace, with_dtype
from amp_jax._plan import Entry, Rules, Step, entry, plan

Emit = Callable[[Any, Sequence[Any]], list[Any]]


def custom_jvp(step: Step, operands: list[Any], emit: Emit) -> list[Any]:
    """Bind a custom_jvp function and its rule in the plan's dtypes."""
    body, one = step.plans[0], as_function(step.eqn, step.owner)
    avals: list[Any] = [v.aval for v in step.eqn.invars]
    leaves = [np.dtype(d or dtype_of(v.aval)) for d, v in zip(body.output_dtypes, step.eqn.outvars, strict=True)]

    @jax.custom_jvp
    def call(*args: Any) -> tuple[Any, ...]:
        return tuple(emit(body, args))

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        moving = [i for i, t in enumerate(tangents) if t.dtype != float0]

        def forward(*flat: Any) -> tuple[list[Any], list[Any]]:
            given = list(tangents)
            for i, t in zip(moving, flat[len(primals) :], strict=True):
                given[i] = t
            out, out_tangents = jax.jvp(one, flat[: len(primals)], tuple(given))
            return out, [t for t in out_tangents if t.dtype != float0]

        traced = [*avals, *(avals[i] for i in moving)]
        args = [*primals, *(tangents[i] for i in moving)]
        floats = [d for d in leaves if np.issubdtype(d, np.floating) or d.kind == "V"]
        out = _retrace(forward, traced, args, [*leaves, *floats], step, body.rules, emit)
        values, flowing = out[: len(leaves)], iter(out[len(leaves) :])
        moved = [
            next(flowing) if d in floats else np.zeros(v.shape, float0) for v, d in zip(values, leaves, strict=True)
        ]
        return tuple(values), tuple(moved)

    call.defjvp(rule)
    return list(call(*operands))


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Pullback:
    """What the backward rule has to know of the residuals that the forward rule left: how they were traced."""

    tree: Any
    avals: tuple[Any, ...]


def custom_vjp(step: Step, operands: list[Any], emit: Emit) -> list[Any]:
    """Bind a custom_vjp function and both of its rules in the plan's dtypes; the pullback is the residual."""
    body, one = step.plans[0], as_function(step.eqn, step.owner)
    avals: list[Any] = [v.aval for v in step.eqn.invars]
    results: list[Any] = [v.aval for v in step.eqn.outvars]
    leaves = [np.dtype(d or a.dtype) for d, a in zip(body.output_dtypes, results, strict=True)]
    arrives = [np.dtype(x.dtype) if _is_float(a) else None for x, a in zip(operands, avals, strict=True)]

    @jax.custom_vjp
    def call(*args: Any) -> tuple[Any, ...]:
        return tuple(emit(body, args))

    def forward(*args: Any) -> tuple[tuple[Any, ...], Any]:
        seen: list[_Pullback] = []

        def with_pullback(*primals: Any) -> tuple[list[Any], list[Any]]:
            out, pull = jax.vjp(one, *primals)
            arrays, tree = jax.tree.flatten(pull)
            seen[:] = [_Pullback(tree, tuple(jax.typeof(x) for x in arrays))]
            return out, arrays

        out = _retrace(with_pullback, avals, args, leaves, step, body.rules, emit)
        return tuple(out[: len(leaves)]), (seen[0], out[len(leaves) :])

    def backward(residual: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        pullback, arrays = residual
        flowing = [i for i, a in enumerate(results) if _is_float(a)]

        def pull(*flat: Any) -> list[Any]:
            given: list[Any] = [np.zeros(a.shape, float0) for a in results]
            for i, ct in zip(flowing, flat[len(arrays) :], strict=True):
                given[i] = ct
            back = jax.tree.unflatten(pullback.tree, flat[: len(arrays)])(given)
            return [ct for ct, a in zip(back, avals, strict=True) if _is_float(a)]

        traced = [*pullback.avals, *(results[i] for i in flowing)]
        args = [*arrays, *(cotangents[i] for i in flowing)]
        out = iter(_retrace(pull, traced, args, [d for d in arrives if d is not None], step, body.rules, emit))
        return tuple(next(out) if d is not None else None for d in arrives)

    call.defvjp(forward, backward)
    return list(call(*operands))


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, np.inexact)


def _retrace(
    fun: Callable[..., Any],
    avals: Sequence[Any],
    args: Sequence[Any],
    returned: Sequence[np.dtype[Any]],
    step: Step,
    rules: Rules,
    emit: Emit,
) -> list[Any]:
    """Trace `fun` for the dtypes that it was written for, plan it for those of `args`, and run it.

    Results beyond `returned` leave in the dtype that the plan gives them.
    """
    with _regions.traced_under(dataclasses.replace(rules.policy, compute_dtype=step.region, rules=())):
        traced = trace(fun, *(_abstract(a) for a in avals))
    entries = [_entry(v.aval, x) for v, x in zip(traced.jaxpr.invars, args, strict=True)]
    outs = traced.jaxpr.outvars
    wanted = [d if dtype_of(a.aval) == FLOAT32 else None for d, a in zip(returned, outs[: len(returned)], strict=True)]
    made = plan(traced.jaxpr, traced.consts, entries, rules, step.scope, [*wanted, *[None] * (len(outs) - len(wanted))])
    return emit(made, args)


def _abstract(aval: Any) -> Any:
    return with_dtype(aval, aval.dtype) if hasattr(aval, "update") and _is_float(aval) else aval


def _entry(aval: Any, arg: Any) -> Entry:
    own = getattr(aval, "dtype", None)
    return entry(aval, np.dtype(arg.dtype)) if own == FLOAT32 else entry(aval)
