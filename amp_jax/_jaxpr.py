"""Everything that amp_jax assumes about JAX's intermediate representation, in one place.

A *jaxpr* is a function as data: typed input variables, a list of *equations*, output variables. An equation applies one
*primitive* (`add`, `dot_general`, `scan`) to variables and literals; its `params` hold the rest, and for `scan`,
`cond` and their like these hold jaxprs of their own. An *abstract value* (aval) is the type of a variable: shape,
dtype, weak type, sharding. The *name stack* of an equation is the chain of `jax.named_scope`s that it was traced in.

No other file touches `jax.core`, `jax.extend` or `jax.interpreters`, and each assumption made here has a test in
`tests/test_jaxpr.py` that runs on the oldest and the newest supported JAX.
"""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer, eval_context, eval_jaxpr
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var, get_opaque_trace_state
from jax.interpreters import ad, batching, mlir

__all__ = [
    "JaxprEqn",
    "Literal",
    "Primitive",
    "Trace",
    "Var",
    "as_function",
    "bind",
    "category_of",
    "cotangent",
    "current_stack",
    "effectful",
    "equations",
    "inner_jaxprs",
    "is_eager",
    "is_known",
    "is_primitive",
    "is_tracer",
    "mark_primitive",
    "new_bilinear",
    "open_jaxpr",
    "rebind",
    "scan_lengths",
    "scopes",
    "source_line",
    "trace",
    "with_dtype",
    "within",
]


class Trace(NamedTuple):
    """A function as data: its equations, the arrays that it closed over, and the pytree of what it returns."""

    jaxpr: Jaxpr
    consts: Sequence[Any]
    shapes: Any


def trace(fun: Callable[..., Any], *args: Any) -> Trace:
    """Record `fun(*args)`; `args` are arrays, tracers, `ShapeDtypeStruct`s or abstract values."""
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    return Trace(*open_jaxpr(closed), shapes)


def open_jaxpr(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """The open jaxpr and its constants. Up to 0.10 a closed jaxpr wraps an open one; since 0.11 both are one class."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def equations(jaxpr: Any) -> Sequence[JaxprEqn]:
    return open_jaxpr(jaxpr)[0].eqns


def inner_jaxprs(eqn: JaxprEqn) -> list[Any]:
    """Every jaxpr in the equation's params, in order; known by what it has, since the classes change."""
    found: list[Any] = []
    for value in eqn.params.values():
        many = value if isinstance(value, (tuple, list)) else (value,)
        found += [v for v in many if hasattr(open_jaxpr(v)[0], "eqns")]
    return found


def effectful(eqn: JaxprEqn) -> bool:
    """Whether it does more than to compute its results: prints, calls back, reads or writes a reference."""
    return bool(eqn.effects)


def scopes(jaxpr: Any, around: str = "") -> set[str]:
    """The name stack of every equation, those of inner jaxprs joined to that of the equation that holds them."""
    found: set[str] = set()
    for eqn in equations(jaxpr):
        here = "/".join(filter(None, (around, str(eqn.source_info.name_stack))))
        found.add(here)
        for inner in inner_jaxprs(eqn):
            found |= scopes(inner, here)
    return found


def scan_lengths(eqn: JaxprEqn) -> tuple[int, int]:
    """How many constants and how many carries a `scan` has: the first two groups of its inputs."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def as_function(eqn: JaxprEqn, owner: Jaxpr) -> Callable[..., list[Any]]:
    """The equation as a function of all its operands, bound exactly as it was traced.

    An equation with custom derivative rules holds functions that `bind` takes in another form than `params` stores
    them; evaluating a jaxpr of one equation leaves that to JAX.
    """
    variables = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
    one = owner.replace(constvars=[], invars=variables, outvars=list(eqn.outvars), eqns=[eqn], effects=eqn.effects)

    def call(*operands: Any) -> list[Any]:
        given = {v: x for v, x in zip(eqn.invars, operands, strict=True) if isinstance(v, Var)}
        return list(eval_jaxpr(one, (), *(given[v] for v in variables)))

    return call


def bind(eqn: JaxprEqn, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Apply the equation's primitive to other operands, with other params."""
    out = eqn.primitive.bind(*operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def rebind(eqn: JaxprEqn, body: Callable[..., list[Any]], operands: Sequence[Any]) -> list[Any]:
    """Apply an equation that holds one body (`jit`, `remat2`) with `body` in its place, all other params kept."""
    closed, params = jax.make_jaxpr(body)(*operands), dict(eqn.params)
    consts = open_jaxpr(closed)[1]
    if consts and "prevent_cse" in params:  # a rematerialised block holds no arrays: they are operands
        operands, own = [*consts, *operands], of_constants(closed)
        closed = jax.make_jaxpr(own)(*operands)
        if isinstance(params["prevent_cse"], tuple):
            params["prevent_cse"] = (*[True] * len(consts), *params["prevent_cse"])
    jaxpr = closed if hasattr(params["jaxpr"], "consts") and hasattr(closed, "jaxpr") else open_jaxpr(closed)[0]
    return bind(eqn, operands, dict(params, jaxpr=jaxpr))


def of_constants(closed: Any) -> Callable[..., list[Any]]:
    """A program as a function of its constants and its inputs."""
    jaxpr, consts = open_jaxpr(closed)
    n = len(consts)
    return lambda *args: list(eval_jaxpr(jaxpr, args[:n], *args[n:]))


def with_dtype(aval: Any, dtype: Any) -> Any:
    """The same abstract value in another dtype: shape, sharding and varying-axis type stay."""
    return aval.update(dtype=np.dtype(dtype), weak_type=False)


def new_bilinear(
    name: str,
    fun: Callable[..., Any],
    on_cpu: Callable[..., Any],
    transposes: tuple[Callable[..., Any], Callable[..., Any]],
    batched: Callable[..., Any],
    params: Sequence[str],
) -> Primitive:
    """A primitive of two operands, linear in each.

    Args:
        name: As jaxprs spell it.
        fun: `(x, y, **params)` in terms of other primitives.
        on_cpu: The same, as the CPU is to compute it.
        transposes: `(cotangent, x, y, **params)`, for `x` and for `y`; that operand is an aval holder.
        batched: The rule of `vmap`: `((x, y), axes, **params)` -> result and its axis.
        params: The names of the params, all hashable.
    """
    new = Primitive(name)
    new.def_impl(jax.jit(lambda x, y, **given: new.bind(x, y, **given), static_argnames=params))
    new.def_abstract_eval(lambda x, y, **given: jax.make_jaxpr(lambda x, y: fun(x, y, **given))(x, y).out_avals[0])
    mlir.register_lowering(new, mlir.lower_fun(fun, multiple_results=False))
    mlir.register_lowering(new, mlir.lower_fun(on_cpu, multiple_results=False), platform="cpu")
    ad.defbilinear(new, *transposes)
    batching.primitive_batchers[new] = batched
    return new


def cotangent(
    primitive: Primitive, side: int, result: Any, aval: Any, other: Any, params: dict[str, Any], new: Callable[..., Any]
) -> Any:
    """What a bilinear primitive's transpose rule gives for one operand, with another function in the primitive's place.

    Args:
        primitive: Whose rule.
        side: 0 or 1: which operand.
        result: The cotangent of the result.
        aval: The operand's abstract value.
        other: The other operand.
        params: What the primitive was bound with.
        new: `(x, y, **params)`, called where the rule binds the primitive.
    """
    rule = ad.get_primitive_transpose(primitive)

    def as_it_is(result: Any, other: Any) -> Any:
        operands = [other, other]
        operands[side] = ad.UndefinedPrimal(aval)
        return rule(result, *operands, **params)[side]

    jaxpr, _, _ = trace(as_it_is, result, other)
    values: dict[Any, Any] = dict(zip(jaxpr.invars, (result, other), strict=True))
    for eqn in jaxpr.eqns:
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        out = [new(*operands, **eqn.params)] if eqn.primitive is primitive else bind(eqn, operands, eqn.params)
        values.update(zip(eqn.outvars, out, strict=True))
    return values[jaxpr.outvars[0]]


def current_stack() -> Any:
    return source_info_util.current_name_stack()


@contextmanager
def within(eqn: JaxprEqn, stack: Any) -> Generator[None]:
    """Trace under the equation's own source line, name stack (`stack` before it) and context (mesh, compute type)."""
    info = eqn.source_info
    with source_info_util.user_context(info.traceback, name_stack=stack + info.name_stack), eqn.ctx.manager:
        yield


def source_line(eqn: JaxprEqn) -> str:
    """`file.py:12 (function)`: where the equation comes from."""
    place, _, function = source_info_util.summarize(eqn.source_info).partition(" ")
    file, _, position = os.path.basename(place).partition(":")
    return f"{file}:{position.partition(':')[0]} {function}".strip(": ")


def is_primitive(value: Any) -> bool:
    return isinstance(value, Primitive)


def mark_primitive(primitive: Primitive, category: str) -> None:
    """Write a category onto the primitive itself, where it goes with it and nowhere else."""
    setattr(primitive, _MARK, category)


def category_of(primitive: Primitive) -> str | None:
    """What `mark_primitive` wrote."""
    return getattr(primitive, _MARK, None)


_MARK = "amp_jax_category"


def is_tracer(value: Any) -> bool:
    """Whether a value is known by type alone so far."""
    return isinstance(value, Tracer)


def is_known(value: Any) -> bool:
    """Whether a constant's numbers are there to be read: not a tracer's, and not a reference's, which may change."""
    return not is_tracer(value) and not isinstance(value, jax.Ref)


def is_eager() -> bool:
    """Whether nothing is being traced: operations run as they are called."""
    with eval_context():
        eager = get_opaque_trace_state()
    return get_opaque_trace_state() == eager
