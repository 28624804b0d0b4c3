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
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, get_opaque_trace_state

__all__ = [
    "JaxprEqn",
    "Literal",
    "Trace",
    "Var",
    "as_function",
    "bind",
    "current_stack",
    "equations",
    "inner_jaxprs",
    "is_eager",
    "is_tracer",
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
    closed = jax.make_jaxpr(body)(*operands)
    jaxpr, consts = open_jaxpr(closed)
    if hasattr(eqn.params["jaxpr"], "consts") and hasattr(closed, "jaxpr"):
        return bind(eqn, operands, dict(eqn.params, jaxpr=closed))
    assert not consts, "a rewritten body closes over nothing: its constants are operands"
    return bind(eqn, operands, dict(eqn.params, jaxpr=jaxpr))


def with_dtype(aval: Any, dtype: Any) -> Any:
    """The same abstract value in another dtype: shape, sharding and varying-axis type stay."""
    return aval.update(dtype=np.dtype(dtype), weak_type=False)


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


def is_tracer(value: Any) -> bool:
    """Whether a value is known by type alone so far."""
    return isinstance(value, Tracer)


def is_eager() -> bool:
    """Whether nothing is being traced: operations run as they are called."""
    with eval_context():
        eager = get_opaque_trace_state()
    return get_opaque_trace_state() == eager
